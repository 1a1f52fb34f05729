"""This module says what top learns by looking on: since when a holder has run nothing, and its part of the device's
power. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from podgpu.model import WorkloadKey
from podgpu.top.figures import DeviceFigures, FlatView, HolderFigures, is_blind

POWER_WINDOW = 5.0
"""Seconds over which a holder's part of the power is taken: an exporter's counters move in steps of a second."""
_SILENT_SECONDS = 90.0
"""Whose counters have not moved for so long is counted by nobody."""


@dataclass(frozen=True, slots=True)
class Idle:
    seconds: float
    at_least: bool = False
    """It ran nothing since top began to look; since when is not known."""


@dataclass(slots=True)
class _Watched:
    """A holder's counters. Idle time goes by the source's own: where nobody counts it, it does not grow."""

    busy: float
    idle: float
    idle_when_busy: float
    """The idle counter when it last ran something."""
    moved_at: float
    at_least: bool

    @classmethod
    def first_seen(cls, busy: float, idle: float, now: float) -> _Watched:
        """A holder that never ran was idle for the whole counter."""
        return cls(busy, idle, 0.0 if busy == 0 else idle, now, at_least=busy > 0)

    def see(self, busy: float, idle: float, runs: bool, now: float) -> None:
        if busy != self.busy or idle != self.idle:
            self.moved_at = now
        if runs or busy > self.busy:
            self.idle_when_busy, self.at_least = idle, False
        self.busy, self.idle = busy, idle


@dataclass(slots=True)
class _Energy:
    points: deque[tuple[float, float, float]] = field(default_factory=deque)
    """When, the holder's joules, the GPU's joules."""

    def add(self, now: float, own: float, whole: float) -> None:
        if self.points and (own < self.points[-1][1] or whole < self.points[-1][2]):
            self.points.clear()  # the exporter started anew
        self.points.append((now, own, whole))
        while len(self.points) > 2 and self.points[1][0] <= now - POWER_WINDOW:
            self.points.popleft()

    @property
    def part(self) -> float | None:
        (_, own, whole), (_, own_now, whole_now) = self.points[0], self.points[-1]
        return None if whole_now <= whole else min(1.0, (own_now - own) / (whole_now - whole))


_Key = tuple[tuple[str, str], WorkloadKey]


class History:
    def __init__(self) -> None:
        self._watched: dict[_Key, _Watched] = {}
        self._energy: dict[_Key, _Energy] = {}
        self._now = 0.0
        self._taken_at: float | None = None
        self._old_nodes: frozenset[str] = frozenset()

    def note(self, view: FlatView, now: float) -> None:
        """`now` is monotonic seconds. Holders that left are removed."""
        is_same = view.taken_at is not None and view.taken_at == self._taken_at
        self._now, self._taken_at, self._old_nodes = now, view.taken_at, view.old_nodes
        whole = {d.uuid: d.energy_joules for d in view.devices if not d.instance}
        present = {(d.key, h.who) for d in view.devices for h in d.holders}
        self._watched = {key: watched for key, watched in self._watched.items() if key in present}
        self._energy = {key: energy for key, energy in self._energy.items() if key in present}
        for device in view.devices:
            for holder in device.holders:
                if not is_same:  # a cluster is looked at more often than it looks itself
                    self._watch(device, holder)
                    self._measure(device, holder, whole.get(device.uuid))

    def idle(self, device: DeviceFigures, holder: HolderFigures) -> Idle | None:
        """As the source has it, which may have looked on for longer; else as seen from here. None: nobody knows."""
        if is_blind(device) or device.node in self._old_nodes:
            return None
        if holder.idle_since is not None and self._taken_at is not None:
            return Idle(max(0.0, self._taken_at - holder.idle_since))
        watched = self._watched.get((device.key, holder.who))
        if watched is None or self._now - watched.moved_at > _SILENT_SECONDS:
            return None
        return Idle(watched.idle - watched.idle_when_busy, watched.at_least)

    def power_part(self, device: DeviceFigures, holder: HolderFigures) -> float | None:
        """The holder's part of what its physical GPU draws, as a ratio."""
        energy = self._energy.get((device.key, holder.who))
        return None if energy is None else energy.part

    def _watch(self, device: DeviceFigures, holder: HolderFigures) -> None:
        key, busy, idle = (device.key, holder.who), holder.busy_seconds, holder.idle_seconds
        if busy is None or idle is None:
            self._watched.pop(key, None)
            return
        watched = self._watched.get(key)
        runs = bool(holder.utilization)
        if not runs and holder.processes and device.utilization and (watched is None or busy <= watched.busy):
            self._watched.pop(key, None)  # beside a busy process its 0 says nothing: see accounting/ledger.py
            return
        if watched is None or busy < watched.busy or idle < watched.idle:  # new, or the exporter started anew
            watched = self._watched[key] = _Watched.first_seen(busy, idle, self._now)
        watched.see(busy, idle, runs, self._now)

    def _measure(self, device: DeviceFigures, holder: HolderFigures, whole: float | None) -> None:
        """A counter that is not there yet has counted nothing: it begins with the second reading of the energy."""
        energy = self._energy.setdefault((device.key, holder.who), _Energy())
        energy.add(self._now, holder.energy_joules or 0.0, whole or 0.0)
