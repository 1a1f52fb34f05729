"""This module says whose each place in a column is: a device's, or what one holder uses of a device. Pure.

Places are given out from 0 up and given anew after a day without data, or before that when there are more devices than
are kept: then those go first that were seen longest ago, holders before devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from podgpu.model import Who

MOST_ROWS = 18_000
"""528 samples of 8 bytes each: 73 MiB. 8,000 GPUs, and more than as many holders whose use is not the GPU's."""
_MOST_AT_ONCE = 500
"""Rows that make room in one turn: each is blanked in every column."""


class Key(NamedTuple):
    uuid: str
    instance: str = ""
    """Of a MIG instance, its id."""
    who: Who = ()
    """A holder of it; empty: the device itself."""

    @property
    def device(self) -> Key:
        return self if not self.who else Key(self.uuid, self.instance)

    @property
    def text(self) -> str:
        """As `/api/v1/history` calls a device."""
        return f"{self.uuid}/{self.instance}" if self.instance else self.uuid


@dataclass(slots=True)
class Row:
    place: int
    seen: float
    node: str = ""
    index: int = -1
    """Of the GPU on its node; -1: not known."""


class Rows:
    def __init__(self, most: int = MOST_ROWS) -> None:
        self._most = most
        self._rows: dict[Key, Row] = {}
        self._free: list[int] = []
        self._end = 0
        self.refused = 0
        """Keys that found no place since the start."""

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[tuple[Key, Row]]:
        return iter(self._rows.items())

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    @property
    def end(self) -> int:
        """No place is beyond it: what a column must have room for."""
        return self._end

    def get(self, key: Key) -> Row | None:
        return self._rows.get(key)

    def take(self, key: Key, now: float) -> Row | None:
        """Its row, seen now. None: there is no place left."""
        row = self._rows.get(key)
        if row is None:
            if len(self._rows) >= self._most:
                self.refused += 1
                return None
            row = self._rows[key] = Row(self._free.pop() if self._free else self._end, now)
            self._end = max(self._end, row.place + 1)
        row.seen = now
        return row

    def restore(self, key: Key, place: int, seen: float) -> Row | None:
        """A row from before a restart, at its own place if that is free."""
        row = self._rows.get(key)
        if row is not None:
            row.seen = max(row.seen, seen)
            return row
        taken_before = self._end
        if taken_before <= place < self._most and len(self._rows) < self._most:
            self._free += range(taken_before, place)
            self._end = place + 1
            row = self._rows[key] = Row(place, seen)
            return row
        if place in self._free:
            self._free.remove(place)
            row = self._rows[key] = Row(place, seen)
            return row
        return self.take(key, seen)

    def drop_unseen(self, before: float) -> list[Key]:
        gone = [key for key, row in self._rows.items() if row.seen < before]
        self._drop(gone)
        return gone

    def make_room(self, coming: Iterable[Key], now: float) -> list[int]:
        """Lets go of rows that were not seen now and are not about to be, as many as keys that come find no place: the
        places that must be blanked."""
        coming = set(coming)
        wanted = len(self._rows) + sum(key not in self._rows for key in coming) - self._most
        if wanted <= 0:
            return []
        idle = [
            (not key.who, row.seen, row.place, key)
            for key, row in self._rows.items()
            if row.seen < now and key not in coming
        ]
        going = sorted(idle)[: min(wanted, _MOST_AT_ONCE)]
        self._drop(key for *_, key in going)
        return [place for _, _, place, _ in going]

    def _drop(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._free.append(self._rows.pop(key).place)
