"""This module keeps the last hour of every device at 15 s and the last day at 5 min, in memory, bounded. Pure but for
its lock.

All times here are seconds of a clock that only goes on (`keeper.py` has it). A sample belongs to the 15 s in which it
was taken; where none was, nothing is known of them. A window of 5 min is the mean of what is known of it, made once it
is over. Columns are never changed, only replaced, so that whoever reads needs the lock for a moment only.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from podgpu.figures.device import DeviceFigures, HolderFigures
from podgpu.history import columns
from podgpu.history.asking import COARSE, PER_DAY, PER_HOUR, STEP, Kept, Range
from podgpu.history.columns import NO_SAMPLE, Sample
from podgpu.history.rows import MOST_ROWS, Key, Row, Rows
from podgpu.history.spans import Spans
from podgpu.model import Workload

_PER_WINDOW = COARSE // STEP
_DAY = 86_400.0
_NOWHERE = -1
_LONGEST_UUID = 200
"""What is longer is somebody's joke, and would be kept for a day."""
_OWN_BEYOND = 0.05
"""A sole holder whose utilisation is further from its device's has a row of its own: somebody else works there too."""


@dataclass(frozen=True, slots=True)
class Told:
    """What one source says at one moment."""

    devices: Sequence[DeviceFigures]
    fresh: bool = True
    """False: the figures and holders are of before; only what is wrong with the devices is of now."""


class Ring:
    def __init__(self, most_rows: int = MOST_ROWS) -> None:
        self.rows = Rows(most_rows)
        self.spans = Spans()
        self.fine: dict[int, bytes] = {}
        self.coarse: dict[int, bytes] = {}
        """Number of the step since the beginning of time -> column."""
        self.lock = threading.RLock()
        self._apart: set[Key] = set()
        """Devices whose holders have rows of their own."""
        self._tidied = -1
        """The window in which was last looked for what is too old."""

    # Taking

    def record(self, at: float, told: Iterable[Told], ahead: float = 0.0) -> bool:
        """What is told at that time, and whether there is any of it. `ahead`: by how much Unix time is ahead of it, for
        times that devices tell."""
        now, old = _split(told)
        with self.lock:
            self._make_room(now, at)
            # All devices before any holder: one that took the place of a device would have to give it back each time.
            rows = [self.rows.take(key, at) for key in now]
            samples: list[tuple[int, Sample]] = []
            for (key, device), row in zip(now.items(), rows, strict=True):
                if row is None:
                    continue
                row.node, row.index = device.node, device.index
                samples.append((row.place, _sample(device)))
                if device.holders:
                    samples += self._of_holders(key, device, at)
                self.spans.holders(key, at, tuple([of.holder for of in device.holders]))
                self.spans.conditions(key, at, device.conditions, ahead)
            for key, device in old.items():
                if key in self.rows:
                    self.spans.conditions(key, at, device.conditions, ahead)
            if samples:
                self.fine[int(at // STEP)] = columns.pack(samples, self.rows.end)
            self._tidy(at)
        return bool(samples)

    def _make_room(self, devices: Mapping[Key, DeviceFigures], at: float) -> None:
        blank = self.rows.make_room(devices, at)
        if blank:
            for kept in (self.fine, self.coarse):
                for number, column in kept.items():
                    kept[number] = columns.without(column, blank)

    def _of_holders(self, key: Key, device: DeviceFigures, at: float) -> list[tuple[int, Sample]]:
        """Once what a holder uses is kept apart on a device, it is as long as the device is there."""
        if key not in self._apart:
            if len(device.holders) == 1 and not _differs(device, device.holders[0]):
                return []
            self._apart.add(key)
        found: list[tuple[int, Sample]] = []
        for of in device.holders:
            if of.who and (of.utilization is not None or of.memory is not None):
                row = self.rows.take(Key(key.uuid, key.instance, of.who), at)
                if row is not None:
                    found.append((row.place, Sample(of.utilization, of.memory)))
        return found

    def _tidy(self, at: float) -> None:
        newest, window = int(at // STEP), int(at // COARSE)
        if window != self._tidied:
            self._tidied = window
            for over in {number // _PER_WINDOW for number in self.fine}:
                if over < window and over not in self.coarse:
                    self.coarse[over] = columns.mean(self._of_window(over))
            self.coarse = {n: column for n, column in self.coarse.items() if window - PER_DAY < n <= window}
            self.spans.forget(at - _DAY, at)
            self.rows.drop_unseen(at - _DAY - 2 * COARSE)
            self._apart = {key for key in self._apart if key in self.rows}
        self.fine = {n: column for n, column in self.fine.items() if newest - PER_HOUR < n <= newest}

    def _of_window(self, window: int) -> list[bytes]:
        numbers = range(window * _PER_WINDOW, (window + 1) * _PER_WINDOW)
        return [self.fine[number] for number in numbers if number in self.fine]

    # Reading

    def latest(self, count: int, at: float) -> list[bytes | None]:
        """The last columns of 15 s up to that time, oldest first."""
        with self.lock:
            last = int(at // STEP)
            return [self.fine.get(number) for number in range(last - count + 1, last + 1)]

    def keep_of(self, device: Key, asked: Range, at: float) -> Kept | None:
        """Everything of one device. None: there is no such device, nor was there within a day."""
        with self.lock:
            row, spans = self.rows.get(device), self.spans.of(device, at)
            if row is None and not spans:
                return None
            holders = {span.what.who for span in spans if isinstance(span.what, Workload)}
            own = {who: self.rows.get(Key(device.uuid, device.instance, who)) for who in holders}
            found, going_on = self._asked(asked, at)
        row = row or Row(_NOWHERE, 0.0)
        return Kept(
            device,
            row.node,
            row.index,
            _samples(found, going_on, row),
            spans,
            {who: _samples(found, going_on, own_row) for who, own_row in own.items() if own_row is not None},
        )

    def _asked(self, asked: Range, at: float) -> tuple[list[bytes | None], list[bytes] | None]:
        """The columns; and of a window that is not over yet those it will be the mean of, in place of the last."""
        last = int(at // asked.step)
        if asked.step == STEP:
            return self.latest(asked.steps, at), None
        return [self.coarse.get(number) for number in range(last - asked.steps + 1, last)], self._of_window(last)


def _split(told: Iterable[Told]) -> tuple[dict[Key, DeviceFigures], dict[Key, DeviceFigures]]:
    """Those told of now, and those that are only known from before; each device once."""
    now: dict[Key, DeviceFigures] = {}
    old: dict[Key, DeviceFigures] = {}
    for part in told:
        into = now if part.fresh else old
        for device in part.devices:
            if len(device.uuid) <= _LONGEST_UUID:
                into.setdefault(Key(device.uuid, device.instance), device)
    return now, {key: device for key, device in old.items() if key not in now}


def _sample(device: DeviceFigures) -> Sample:
    return Sample(device.utilization, device.memory_used, device.power_watts, device.temperature)


def _differs(device: DeviceFigures, of: HolderFigures) -> bool:
    if device.utilization is None or of.utilization is None:
        return device.utilization is not of.utilization
    return abs(device.utilization - of.utilization) > _OWN_BEYOND


def _samples(found: Iterable[bytes | None], going_on: Sequence[bytes] | None, row: Row) -> list[Sample]:
    samples = [NO_SAMPLE if column is None else _at(column, row) for column in found]
    if going_on is not None:
        samples.append(columns.mean_sample([_at(column, row) for column in going_on]))
    return samples


def _at(column: bytes, row: Row) -> Sample:
    return NO_SAMPLE if row.place == _NOWHERE else columns.sample_at(column, row.place)
