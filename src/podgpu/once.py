"""A cached property that several threads may read at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class computed_once(Generic[T]):
    """Computes the value in the first thread that reads it. Other threads wait for it.

    `functools.cached_property` has one lock for all objects in Python 3.11, and none since 3.12.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> computed_once[T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object | None, owner: type) -> computed_once[T] | T:
        if instance is None:
            return self

        values = vars(instance)
        # `setdefault` is atomic, so all threads get the same lock.
        lock = values.setdefault(f"_lock_of_{self._name}", threading.Lock())
        with lock:
            if self._name not in values:
                values[self._name] = self._compute(instance)

        # From now on, Python finds the value in the object and does not call this method.
        value: T = values[self._name]
        return value
