"""This module makes one round's samples of the cluster's view: what each pod did on the devices it holds, and each
node. Pure, but for the counters of the round before, from which rates are made.

What cannot be told apart is not told: of a GPU that several pods share each has its own part where the exporter tells
it, and nothing where it does not. Nodes not heard of lately tell nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from podgpu.autoscale import metrics as m
from podgpu.autoscale.ring import NAN
from podgpu.cluster.collect import Scope
from podgpu.cluster.flat import flat_devices
from podgpu.cluster.state import ClusterState
from podgpu.figures.device import DeviceFigures, HolderFigures, has_identity
from podgpu.model import WorkloadKey

PodKey = tuple[str, str]
"""Namespace and name."""
ScopeKey = tuple[str, str]
"""`node`, `namespace` or `cluster`, and its name."""
_MOST_RATE = 1.5
"""Of one device's time: an exposition read late tells a little more than everything, and more than that is no rate."""
_OVER_FULL = 1.01
_SAME_READING = 0.5
"""Seconds."""
_SURE = 0.95
"""Part of the time that has to be counted as idle: counting begins and ends between readings."""
_NOT_KNOWN = (NAN,) * m.COLUMNS
_FRACTION = ((m.SM, m.SM_ACTIVE), (m.TENSOR, m.TENSOR_ACTIVE), (m.DRAM, m.DRAM_ACTIVE))


class Holding(NamedTuple):
    """A pod that holds devices."""

    node: str
    idle_since: float | None
    """Unix time since which it has surely run nothing on any device it holds. None: it runs something, or might."""


class Round(NamedTuple):
    """Rows are by column; NaN: not known."""

    holding: dict[PodKey, Holding]
    pods: dict[PodKey, Sequence[float]]
    scopes: dict[ScopeKey, tuple[float, ...]]


class _Idle(NamedTuple):
    """A holder that runs nothing, as its exporter counts it."""

    seconds: float
    """Counted since it last ran something."""
    uncounted: float = 0.0
    """Seconds of these readings in which neither idleness nor work was counted."""


class _Rate(NamedTuple):
    read_at: float
    busy_seconds: float | None
    idle_seconds: float | None
    energy_joules: float | None
    busy: float | None = None
    watts: float | None = None
    idle: _Idle | None = None
    """None: it runs something, or nobody can be sure."""

    @property
    def idle_since(self) -> float | None:
        return None if self.idle is None else self.read_at - self.idle.seconds


class Rates:
    """How fast each holder's counters grow, from one reading of its node to the next, and for how long they say that it
    ran nothing."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, str, WorkloadKey], _Rate] = {}
        self._now: dict[tuple[str, str, WorkloadKey], _Rate] = {}

    def next_round(self) -> None:
        """Holders that were in none of the last round's readings are forgotten."""
        self._before, self._now = self._now, {}

    def of(self, device: DeviceFigures, of: HolderFigures, read_at: float, stale_after: float) -> _Rate:
        key = device.uuid, device.instance, of.who
        # Popped to save memory: only one round's rates are kept. A holder that is in a round twice (two nodes report
        # its device) is compared with its first entry.
        before = self._before.pop(key, None) or self._now.get(key)
        if before is None or read_at <= before.read_at - _SAME_READING:  # then the clock was set back
            rate = _Rate(read_at, of.busy_seconds, of.idle_seconds, of.energy_joules, idle=_idle_at_first(of))
        elif read_at - before.read_at < _SAME_READING:
            rate = before
        else:
            seconds = read_at - before.read_at
            busy = _growth(before.busy_seconds, of.busy_seconds, seconds) if of.utilization is not None else None
            watts = _growth(before.energy_joules, of.energy_joules, seconds)
            if busy is not None:
                busy = min(busy, 1.0) if busy <= _MOST_RATE else None
            idle = _idle(before, of, seconds, stale_after)
            rate = _Rate(read_at, of.busy_seconds, of.idle_seconds, of.energy_joules, busy, watts, idle)
        self._now[key] = rate
        return rate


def _idle_at_first(of: HolderFigures) -> _Idle | None:
    """One that has never run anything has been idle for all that was counted."""
    if of.utilization is None or of.idle_seconds is None or of.busy_seconds is None:
        return None
    return _Idle(max(0.0, of.idle_seconds) if of.busy_seconds == 0 else 0.0)


def _idle(before: _Rate, of: HolderFigures, seconds: float, stale_after: float) -> _Idle | None:
    """Nobody is idle in time that nobody has counted: an exporter that was away, or whose counters stand still. One
    that reads its GPUs seldom lets them stand still for a while, though never for longer than makes a node old."""
    if of.utilization is None or of.idle_seconds is None or of.busy_seconds is None:
        return None
    if before.idle_seconds is None or before.busy_seconds is None:
        return _idle_at_first(of)
    if of.idle_seconds < before.idle_seconds or of.busy_seconds < before.busy_seconds:
        return _idle_at_first(of)  # counted anew
    if of.busy_seconds > before.busy_seconds:
        return None
    so_far = before.idle or _Idle(0.0)
    counted = of.idle_seconds - before.idle_seconds
    uncounted = max(0.0, so_far.uncounted + _SURE * seconds - counted)
    return _Idle(so_far.seconds + counted, uncounted) if uncounted <= stale_after else None


def _growth(before: float | None, now: float | None, seconds: float) -> float | None:
    """None: not counted, or counted anew."""
    if before is None or now is None or now < before:
        return None
    return (now - before) / seconds


# One device of one pod


class _Part(NamedTuple):
    """What a pod does on one device; None: not known."""

    utilization: float | None
    memory: int | None
    memory_total: int | None
    busy: float | None
    watts: float | None
    fractions: tuple[float | None, ...]
    used: float | None
    """The used field in per cent."""
    in_use: bool | None


def _part(
    device: DeviceFigures, own: Sequence[HolderFigures], rates: Sequence[_Rate], alone: bool, view: ClusterState
) -> _Part:
    beside = dict(device.beside) if alone else {}
    utilization = _sum(of.utilization for of in own)
    memory = _sum(of.memory for of in own)
    busy = _sum(rate.busy for rate in rates)
    watts = _sum(rate.watts for rate in rates)
    if alone:
        utilization = device.utilization if utilization is None else utilization
        memory = device.memory_used if memory is None else memory
        watts = device.power_watts if device.power_watts is not None else watts
    full = view.settings.full
    value = device.measured
    used = None if value is None or not 0 <= value <= full * _OVER_FULL else min(1.0, value / full)
    return _Part(
        None if utilization is None else min(1.0, utilization),
        None if memory is None else round(memory),
        device.memory_total or None,
        None if busy is None else min(1.0, busy),
        watts,
        tuple(_ratio(beside.get(field)) for _, field in _FRACTION),
        None if used is None else 100 * used,
        None if used is None or value is None else value > 0,
    )


def _sum(values: Iterable[float | None]) -> float | None:
    total = 0.0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def _ratio(value: float | None) -> float | None:
    return min(1.0, value) if value is not None and 0 <= value <= _OVER_FULL else None


def _row(parts: Sequence[_Part]) -> Sequence[float]:
    """The columns of a pod that holds these."""
    row = array("f", _NOT_KNOWN)
    row[m.UTILIZATION.column] = _percent([part.utilization for part in parts])
    memory, total = _sum(part.memory for part in parts), _sum(part.memory_total for part in parts)
    row[m.MEMORY.column] = NAN if memory is None or not total else min(100.0, 100 * memory / total)
    row[m.BUSY.column] = _percent([part.busy for part in parts])
    watts = _sum(part.watts for part in parts)
    row[m.POWER.column] = NAN if watts is None else watts
    for place, (metric, _) in enumerate(_FRACTION):
        row[metric.column] = _percent([part.fractions[place] for part in parts])
    if all(part.in_use is not None for part in parts):
        in_use = [part.used for part in parts if part.in_use and part.used is not None]
        row[m.USED.column], row[m.USED_COUNT] = sum(in_use), float(len(in_use))
    return row


def _percent(ratios: Sequence[float | None]) -> float:
    total = _sum(ratios)
    return NAN if total is None or not ratios else 100 * total / len(ratios)


# One round


def sample_round(view: ClusterState, rates: Rates) -> Round:
    pods = _Pods(view)
    scopes: dict[ScopeKey, tuple[float, ...]] = {}
    had: set[tuple[str, str]] = set()
    for node in view.nodes:
        if node.stale:
            continue
        read_at = (view.taken_at or 0.0) - (node.age_seconds or 0.0)
        busy_of: dict[int, float | None] = {}
        devices = tuple(flat_devices(node, view.settings))
        for device in devices:
            rate_of = {id(of): rates.of(device, of, read_at, view.settings.stale_after) for of in device.holders}
            busy_of[id(device)] = _sum(rate.busy for rate in rate_of.values())
            if has_identity(device.uuid):
                if device.key in had:
                    continue  # two nodes claim it: it counts once
                had.add(device.key)
            pods.take(node.name, device, rate_of)
        scopes["node", node.name] = _node_row(devices, busy_of, view, node.name)
    rates.next_round()
    return Round(pods.holding(), pods.rows(), {**scopes, **_used_scopes(view)})


class _Pods:
    """The pods of one round, collected device by device."""

    def __init__(self, view: ClusterState) -> None:
        self._view = view
        self._parts: dict[PodKey, list[_Part]] = {}
        self._since: dict[PodKey, float | None] = {}
        self._nodes: dict[PodKey, str] = {}

    def take(self, node: str, device: DeviceFigures, rate_of: Mapping[int, _Rate]) -> None:
        """`rate_of`: of each holder, by its id()."""
        own: dict[PodKey, list[HolderFigures]] = {}
        for of in device.holders:
            if of.holder.pod:
                own.setdefault((of.holder.namespace, of.holder.pod), []).append(of)
        alone = len(own) == 1 and all(of.holder.pod for of in device.holders)
        for pod, holders in own.items():
            own_rates = [rate_of[id(of)] for of in holders]
            self._parts.setdefault(pod, []).append(_part(device, holders, own_rates, alone, self._view))
            self._nodes[pod] = node
            began = [of.idle_since for of in holders]
            began += [rate.idle_since for rate in own_rates]
            self._since[pod] = _latest([self._since[pod], *began] if pod in self._since else began)

    def holding(self) -> dict[PodKey, Holding]:
        return {pod: Holding(self._nodes[pod], self._since[pod]) for pod in self._parts}

    def rows(self) -> dict[PodKey, Sequence[float]]:
        """Once only: each pod's parts go as its row comes, as there are thousands."""
        rows = {}
        while self._parts:
            pod, parts = self._parts.popitem()
            rows[pod] = _row(parts)
        return rows


def _latest(moments: Sequence[float | None]) -> float | None:
    """None where one of them is."""
    known = [moment for moment in moments if moment is not None]
    return max(known) if len(known) == len(moments) else None


def _node_row(
    devices: Sequence[DeviceFigures], busy: Mapping[int, float | None], view: ClusterState, name: str
) -> tuple[float, ...]:
    """A GPU in MIG mode is its instances where they have the figure and it has none."""
    row = [NAN] * m.COLUMNS
    gpus = [device for device in devices if not device.instance]
    row[m.UTILIZATION.column] = _percent(_each(devices, {id(d): d.utilization for d in devices}))
    memory, total = _sum(d.memory_used for d in gpus), _sum(d.memory_total for d in gpus)
    row[m.MEMORY.column] = NAN if memory is None or not total else min(100.0, 100 * memory / total)
    if gpus:
        watts = _sum(d.power_watts for d in gpus)
        row[m.POWER.column] = NAN if watts is None else watts
    row[m.BUSY.column] = _percent(_busy_gpus(devices, busy))
    for metric, field in _FRACTION:
        row[metric.column] = _percent(_each(devices, {id(d): _ratio(dict(d.beside).get(field)) for d in devices}))
    _put_used(row, view, Scope("node", node=name))
    return tuple(row)


def _each(devices: Sequence[DeviceFigures], values: Mapping[int, float | None]) -> list[float | None]:
    cut = {device.uuid for device in devices if device.instance and values[id(device)] is not None}
    return [values[id(d)] for d in devices if (bool(d.instance) if d.uuid in cut else not d.instance)]


def _busy_gpus(devices: Sequence[DeviceFigures], busy: Mapping[int, float | None]) -> list[float | None]:
    """Of each GPU what its holders do together, no more than all of it. One in MIG mode is the mean of its instances:
    nobody holds the GPU itself, which says nothing of them."""
    gpus: dict[tuple[str, int], list[float | None]] = {}
    cut = {(device.uuid, device.index) for device in devices if device.instance}
    for device in devices:
        gpu = device.uuid, device.index
        if device.instance or gpu not in cut:
            part = busy[id(device)]
            gpus.setdefault(gpu, []).append(None if part is None else min(1.0, part))
    return [None if (total := _sum(parts)) is None else total / len(parts) for parts in gpus.values()]


def _used_scopes(view: ClusterState) -> dict[ScopeKey, tuple[float, ...]]:
    found: dict[ScopeKey, tuple[float, ...]] = {}
    for scope in view.used:
        if scope.scope in ("namespace", "cluster"):
            row = [NAN] * m.COLUMNS
            _put_used(row, view, scope)
            found[scope.scope, scope.namespace] = tuple(row)
    return found


def _put_used(row: list[float], view: ClusterState, scope: Scope) -> None:
    used = view.used.get(scope)
    if used is not None:
        row[m.USED.column] = 100 * used.mean / view.settings.full * used.devices
        row[m.USED_COUNT] = float(used.devices)
