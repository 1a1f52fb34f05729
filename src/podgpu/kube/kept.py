"""What a watcher holds, written by its thread and read by any other. Touches nothing else."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Generic, TypeVar

from podgpu.errors import SourceError

T = TypeVar("T")


class Kept(Generic[T]):
    """Things by key, how fresh they are, and what went wrong. No lock is ever held while waiting for anything."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._things: dict[str, T] = {}
        self._snapshot: tuple[T, ...] | None = ()
        self._failures: Counter[str] = Counter()
        self.synced = threading.Event()
        self.version = 0
        self.error: SourceError | None = None

    def __len__(self) -> int:
        return len(self._things)

    def items(self) -> tuple[T, ...]:
        with self._lock:
            if self._snapshot is None:
                # Made when asked for, not per event: a busy cluster changes more often than anybody looks.
                self._snapshot = tuple(self._things.values())
            return self._snapshot

    def failures(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._failures)

    def replace(self, things: dict[str, T]) -> None:
        """A whole list came in."""
        if things != self._things:
            with self._lock:
                self._things = things
                self._changed()
        self.synced.set()

    def put(self, key: str, thing: T | None) -> None:
        """One thing is new, changed, or (None) gone."""
        if self._things.get(key) == thing:
            return
        with self._lock:
            if thing is None:
                del self._things[key]
            else:
                self._things[key] = thing
            self._changed()

    def fail(self, error: SourceError) -> None:
        self.error = error
        self.count(error.reason)

    def count(self, reason: str) -> None:
        with self._lock:
            self._failures[reason] += 1

    def _changed(self) -> None:
        self._snapshot = None
        self.version += 1
