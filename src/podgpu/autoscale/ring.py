"""This module keeps the last rounds' samples of each key in one block of memory a key, no longer than the longest
window asked for.

A round is written into the slot of its number; what is read are the rounds before, so that who reads on another thread
meets no half-written one. NaN stands for "not known" in here and never leaves.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

from podgpu.autoscale.metrics import COLUMNS

K = TypeVar("K", bound=Hashable)
NAN = math.nan
_SPARE = 4
"""Slots beside those of the longest window: the rounds that come in while somebody still reads an older one's."""


class Rings(Generic[K]):
    def __init__(self, rounds: int, most_keys: int) -> None:
        """`rounds`: in the longest window."""
        self._slots = rounds + _SPARE
        self._most = most_keys
        self._blocks: dict[K, array[float]] = {}
        self._seen: dict[K, int] = {}
        """Key -> the last round that had it."""
        self._last: int | None = None
        self.left_out = 0
        """Keys of the last round that there was no room for."""

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, number: int, samples: Mapping[K, Sequence[float]]) -> None:
        """One round. A second one of the same number replaces the first; one from before means that the clock was set
        back: what was kept lies in the future, and is dropped."""
        if self._last is not None and number < self._last:
            self._blocks, self._seen = {}, {}
            self._last = None
        first_new = number if self._last is None else max(self._last + 1, number - self._slots + 1)
        self._drop(number - self._slots)
        for skipped in range(first_new, number):
            for block in self._blocks.values():
                self._write(block, skipped, _NOTHING)
        for key, block in self._blocks.items():
            self._write(block, number, samples.get(key, _NOTHING))
        self._add_new(number, samples)
        self._last = number

    def _add_new(self, number: int, samples: Mapping[K, Sequence[float]]) -> None:
        self.left_out = 0
        for key, sample in samples.items():
            if key not in self._blocks:
                if len(self._blocks) >= self._most:
                    self.left_out += 1
                    continue
                block = array("f", (NAN,)) * (self._slots * COLUMNS)
                self._write(block, number, sample)
                self._blocks[key] = block
            self._seen[key] = number

    def _drop(self, oldest: int) -> None:
        gone = [key for key, number in self._seen.items() if number <= oldest]
        for key in gone:
            del self._seen[key], self._blocks[key]

    def _write(self, block: array[float], number: int, sample: Sequence[float]) -> None:
        slot = number % self._slots
        for column, value in enumerate(sample):
            block[column * self._slots + slot] = value

    def values(self, key: K, column: int, last: int, rounds: int) -> array[float]:
        """Of the `rounds` rounds up to and with number `last`, the oldest first; NaN where nobody knows."""
        block = self._blocks.get(key)
        rounds = min(rounds, self._slots - _SPARE)
        if block is None or rounds <= 0:
            return array("f")
        slots = self._slots
        end = last % slots + 1
        begin = end - rounds
        base = column * slots
        if begin >= 0:
            return block[base + begin : base + end]
        return block[base + slots + begin : base + slots] + block[base : base + end]

    def mean(self, key: K, column: int, last: int, rounds: int) -> tuple[float, int] | None:
        """Over these rounds, and how many of them are known. None: what is not known in the last one is not known."""
        values = self.values(key, column, last, rounds)
        if not values:
            return None
        total, count = sum(values), len(values)
        if total != total:
            if math.isnan(values[-1]):
                return None
            found = known(values)
            total, count = math.fsum(found), len(found)
        return total / count, count


_NOTHING = (NAN,) * COLUMNS


def known(values: array[float]) -> list[float]:
    return [value for value in values if value == value]
