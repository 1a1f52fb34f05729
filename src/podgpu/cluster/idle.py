"""This module finds the holders that run nothing on what they hold, and since when. Pure but for what was seen before.

A holder is idle when its own utilisation is 0 (the device's where nobody knows its own) and its busy time, where it is
counted, has not grown since the last round: what ran and ended between two rounds was no idleness.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from podgpu.cluster.nodes import NodeView
from podgpu.figures.device import DeviceFigures, HolderFigures, has_identity
from podgpu.model import Who

IdleFor = Mapping[tuple[str, str], float]
_Key = tuple[str, str, str, Who]
"""Node (empty where the UUID says it all), UUID, instance, holder."""
_SAME_READING = 1e-6
"""Seconds. Times are sums of others, and off by a few of the last digits."""


class IdleHolder(NamedTuple):
    node: NodeView
    device: DeviceFigures
    of: HolderFigures
    since: float
    """Unix time; of an old node as it was when that was last heard of."""


@dataclass(slots=True)
class _Seen:
    active_at: float
    """Unix time at which it was last seen not idle, or first seen."""
    read_at: float
    """Monotonic time of the reading that said so."""
    busy_seconds: float | None
    idle: bool

    def again(self, device: DeviceFigures, of: HolderFigures, read_at: float, at: float) -> None:
        if read_at <= self.read_at + _SAME_READING:
            return
        busy, known = of.busy_seconds, self.busy_seconds
        self.idle = _runs_nothing(device, of) and (busy is None or known is None or busy <= known)
        self.read_at = read_at
        if not self.idle:
            self.active_at = at
        if busy is not None:
            self.busy_seconds = busy


class IdleMemory:
    """Who was seen doing what. Holders that are gone are forgotten."""

    def __init__(self) -> None:
        self._seen: dict[_Key, _Seen] = {}
        self._nodes: set[str] = set()

    def turn(self, nodes: Iterable[NodeView], idle_for: IdleFor, now: float, wall: float) -> list[IdleHolder]:
        """All idle holders, however short that may be, by node and device."""
        before, found = self._seen, dict[_Key, _Seen]()
        names: set[str] = set()
        idle: list[IdleHolder] = []
        for node in nodes:
            read_at, at = now - node.age, wall - node.age
            names.add(node.name)
            for device in node.devices:
                if not device.holders:
                    continue
                prefix = "" if has_identity(device.uuid) else node.name
                for of in device.holders:
                    key = prefix, device.uuid, device.instance, of.who
                    seen = before.get(key)
                    if seen is not None:
                        seen.again(device, of, read_at, at)
                    else:
                        began = 0.0 if node.name in self._nodes else _idle_before(device, of, idle_for)
                        seen = _Seen(at - began, read_at, of.busy_seconds, _runs_nothing(device, of))
                    found[key] = seen
                    if seen.idle:
                        idle.append(IdleHolder(node, device, of, seen.active_at))
        self._seen, self._nodes = found, names
        return idle

    def clock_was_set(self, seconds: float) -> None:
        """By so much: what was idle for a minute has not been idle for hours because of that."""
        for seen in self._seen.values():
            seen.active_at += seconds

    def __len__(self) -> int:
        return len(self._seen)


def _runs_nothing(device: DeviceFigures, of: HolderFigures) -> bool:
    """False where nobody knows: the driver's samples go to the busiest process alone, so beside a busy one a figure of
    0 says nothing of whoever has a process there too."""
    if of.utilization is None:
        return device.utilization == 0
    return of.utilization == 0 and not (of.processes and device.utilization)


def _idle_before(device: DeviceFigures, of: HolderFigures, idle_for: IdleFor) -> float:
    """Seconds for which it is known to have been idle before it was first seen here, so that a restart of ours does
    not begin anew. What its own counter of idle time says is the most: the device may have been idle before it came."""
    if of.idle_seconds is not None and of.busy_seconds == 0:
        return max(0.0, of.idle_seconds)
    known = idle_for.get(device.key, 0.0)
    return max(0.0, known if of.idle_seconds is None else min(known, of.idle_seconds))


def wasted(idle: Iterable[IdleHolder], idle_after: float, wall: float) -> list[IdleHolder]:
    """Those of fresh nodes that have been idle for longer than that."""
    return [idler for idler in idle if not idler.node.old and wall - idler.since > idle_after]
