"""Takes JSON that others write apart, and names the place where it is of another shape. Pure.

The kubelet's checkpoint, `podlist.json`, DRA's claims and the schedulers' annotations are all read with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from podgpu.errors import SourceError

T = TypeVar("T")


def parse_json(content: bytes, path: str, shape: Callable[[object], T]) -> T:
    """JSON of one shape. `shape` raises ValueError, naming the place, for any other."""
    try:
        return shape(json.loads(content.decode()))
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, a number of 5,000 digits
        what = " ".join(str(error).split())[:200] if content else "it is empty"
        raise SourceError(
            "malformed",
            f"{path} cannot be understood ({what}): read again next time; if it lasts, look at what writes it",
        ) from error


def as_list(value: object, where: str) -> list[object]:
    """The list at that place; null is none, as Go writes a list that never had an entry."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise ValueError(f"{where} is not a list")
    return value


def as_object(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not an object")
    return value


def as_text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} is not a text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:  # "\ud800" is JSON, but no page could carry it
            raise ValueError(f"{where} has half a surrogate pair") from None
    return value


class LastEntries(Generic[T]):
    """Takes the entries of a list apart; those that are as they were at the last reading are not taken apart again.

    A node's few hundred pods change one at a time, and the file that lists them is another one each time.
    """

    def __init__(self, take_apart: Callable[[object, str], Iterable[T]], names: Sequence[str], told: str) -> None:
        """An entry is known by the texts under `names`; all that matters besides is under `told`."""
        self._take_apart = take_apart
        self._names = names
        self._told = told
        self._known: dict[tuple[object, ...], tuple[object, tuple[T, ...]]] = {}

    def of(self, entries: Sequence[object]) -> tuple[T, ...]:
        """`take_apart` raises ValueError, naming the place it is given, for an entry of another shape."""
        known: dict[tuple[object, ...], tuple[object, tuple[T, ...]]] = {}
        parts: list[T] = []
        for number, entry in enumerate(entries, 1):
            name, told = self._look_at(entry)
            before = self._known.get(name)
            if before is None or before[0] != told:
                before = told, tuple(self._take_apart(entry, f"entry {number}"))
            known[name] = before
            parts += before[1]
        self._known = known
        return tuple(parts)

    def _look_at(self, entry: object) -> tuple[tuple[object, ...], object]:
        if isinstance(entry, dict):
            name = tuple(map(entry.get, self._names))
            if set(map(type, name)) == {str}:
                return name, entry.get(self._told, _NOTHING)
        return (), _NOTHING  # of no good shape: known by nothing, and taken apart to say so


_NOTHING = object()
