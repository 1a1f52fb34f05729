"""Turns the state of one round into samples: one row for each pod with a GPU, each node, each namespace, the cluster.

A pod on a shared GPU has values only if the exporter reports usage per pod. Stale nodes have no samples.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from math import inf, nan
from typing import NamedTuple

from podgpu.autoscale.metrics import (
    BUSY,
    COLUMNS,
    MEMORY,
    POWER,
    PROFILING_METRICS,
    USED,
    USED_COUNT,
    UTILIZATION,
    ScalingMetric,
)
from podgpu.autoscale.pods import PodSeen, RunningPods
from podgpu.cluster.collect import Scope
from podgpu.cluster.nodes import NodeEntry
from podgpu.cluster.parts import HeldPart, gpu_utilization
from podgpu.cluster.state import ClusterState
from podgpu.cluster.used import used_value
from podgpu.model import DeviceState, HolderUsage, Slot, WorkloadKey

PodKey = tuple[str, str]  # namespace, name
IdleSeconds = float | None  # how long the pod has verifiably been idle; None: busy or unknown
ScopeKey = tuple[str, str]  # kind (node, namespace or cluster) and name
_SlotKey = tuple[str, int | None, int | None]  # UUID, index, MIG instance
_MAX_BUSY = 1.5  # maximum plausible busy ratio; above 1, because counters may be read late
_MAX_RATIO = 1.01
_MAX_WATTS = 5000.0  # maximum plausible power of one GPU
_MIN_SECONDS = 0.5  # minimum time between two different readings
_COUNTED = (
    0.95  # fraction of the time that must be counted; below 1, because readings and counters are not synchronized
)
_NS = 1_000_000_000


class RoundSamples(NamedTuple):
    """The samples of one round. Rows are indexed by column; NaN means unknown."""

    holding: dict[PodKey, IdleSeconds]  # pods that hold a GPU
    pods: dict[PodKey, Sequence[float]]
    scopes: dict[ScopeKey, Sequence[float]]
    ignored: dict[PodKey, tuple[str, ...]]  # nodes whose exporters report a pod that does not run there


class _Idle(NamedTuple):
    seconds: float  # idle time since the holder was last busy
    uncounted: float = 0.0  # time since then that is in neither counter, in seconds


class _Rate(NamedTuple):
    at: float  # time of the counters by the exporter
    read_at: float  # our monotonic time of the reading
    exporter_id: str
    busy_ns: int | None
    idle_ns: int | None
    energy_mj: int | None
    busy: float | None = None
    watts: float | None = None
    idle: _Idle | None = None  # None if busy or unknown


class UsageRates:
    """Computes rates from the growth of the holders' counters between two readings of their node."""

    def __init__(self, stale_after: float) -> None:
        self._stale_after = stale_after
        self._before: dict[tuple[str, _SlotKey, WorkloadKey], _Rate] = {}
        self._now: dict[tuple[str, _SlotKey, WorkloadKey], _Rate] = {}

    def next_round(self) -> None:
        """Starts the next round. Removes holders that were not in the last one."""
        self._before, self._now = self._now, {}

    def update(self, node: NodeEntry, part: HeldPart) -> _Rate:
        key = node.name, _slot_key(part), part.holder.key
        usage = part.holder.usage or HolderUsage()
        is_measured = usage.utilization_ratio is not None
        rate = _Rate(
            node.state.usage_at or node.read_at,
            node.read_at,
            node.state.exporter_id,
            usage.busy_ns if is_measured else None,
            usage.idle_ns if is_measured else None,
            usage.energy_mj,
        )
        before = self._before.pop(key, None)
        if before is None or before.exporter_id != rate.exporter_id or self._has_gap(before, rate):
            rate = rate._replace(idle=_count_first_idle(rate, usage))
        elif rate.at - before.at < _MIN_SECONDS:  # the exporter has not updated the counters
            rate = before
        else:
            seconds = rate.at - before.at
            busy = _growth(before.busy_ns, rate.busy_ns, _NS * seconds)
            watts = _growth(before.energy_mj, rate.energy_mj, 1000 * seconds)
            rate = rate._replace(
                busy=None if busy is None or busy > _MAX_BUSY else min(1.0, busy),
                watts=None if watts is None or watts > _MAX_WATTS else watts,
                idle=self._count_idle(before, rate, usage),
            )
        self._now[key] = rate
        return rate

    def _has_gap(self, before: _Rate, rate: _Rate) -> bool:
        """Returns whether the exporter's clock was changed, or it stopped counting for some time."""
        return abs((rate.at - before.at) - (rate.read_at - before.read_at)) > self._stale_after

    def _count_idle(self, before: _Rate, rate: _Rate, usage: HolderUsage) -> _Idle | None:
        """Counts only time that the counters report as idle. Counters may lag by up to `stale_after`."""
        if rate.busy_ns is None or rate.idle_ns is None or before.busy_ns is None or before.idle_ns is None:
            return _count_first_idle(rate, usage)
        if rate.busy_ns < before.busy_ns or rate.idle_ns < before.idle_ns:  # the counters were reset
            return _count_first_idle(rate, usage)
        if rate.busy_ns > before.busy_ns:
            return None
        last = before.idle or _Idle(0.0)
        counted = (rate.idle_ns - before.idle_ns) / _NS
        uncounted = max(0.0, last.uncounted + _COUNTED * (rate.at - before.at) - counted)
        return _Idle(last.seconds + counted, uncounted) if uncounted <= self._stale_after else None


def _count_first_idle(rate: _Rate, usage: HolderUsage) -> _Idle | None:
    if rate.busy_ns is None or rate.idle_ns is None:
        return None
    if rate.exporter_id and usage.idle_since is not None:
        return _Idle(max(0.0, rate.at - usage.idle_since))
    return _Idle(rate.idle_ns / _NS if rate.busy_ns == 0 else 0.0)


def _growth(before: int | None, now: int | None, scale: float) -> float | None:
    """Returns None if a value is unknown or the counter was reset."""
    return None if before is None or now is None or now < before else (now - before) / scale


def _slot_key(part: HeldPart) -> _SlotKey:
    return part.gpu.uuid, part.gpu.index, None if part.instance is None else part.instance.id


class _DeviceSample(NamedTuple):
    """The values of one pod on one device."""

    utilization: float | None
    memory: float | None
    memory_total: float | None
    busy: float | None
    watts: float | None
    fractions: tuple[float | None, ...]  # in the order of PROFILING_METRICS
    used: float | None = None  # --used-field as a ratio
    idle_seconds: float | None = None


def sample_round(
    state: ClusterState, rates: UsageRates, pods: RunningPods, node_names: Collection[str] = ()
) -> RoundSamples:
    """`node_names` are the names of the nodes in Kubernetes."""
    devices: dict[PodKey, dict[str, list[_DeviceSample]]] = {}
    scopes: dict[ScopeKey, Sequence[float]] = {}
    for node in state.nodes:
        if node.stale:
            continue
        busy: dict[_SlotKey, float | None] = {}
        for key, group in groupby(node.held, key=_slot_key):
            parts = list(group)
            rate_of = {part.holder.key: rates.update(node, part) for part in parts}
            busy[key] = _sum(rate.busy for rate in rate_of.values())
            by_pod: dict[PodKey, list[HeldPart]] = {}
            for part in parts:
                if part.holder.pod:
                    by_pod.setdefault((part.holder.namespace, part.holder.pod), []).append(part)
            alone = len(by_pod) == 1 and all(part.holder.pod for part in parts)
            for pod, own in by_pod.items():
                sample = _sample_device(own, [rate_of[part.holder.key] for part in own], alone, state)
                devices.setdefault(pod, {}).setdefault(node.name, []).append(sample)
        scopes["node", node.name] = _sample_node(node, busy, state)
    rates.next_round()
    for scope in state.used:
        if scope.scope in ("namespace", "cluster"):
            row = _empty_row()
            _set_used(row, state, scope)
            scopes[scope.scope, scope.namespace] = row
    result = RoundSamples({}, {}, scopes, {})
    for pod, by_node in devices.items():
        name = _find_node(pods.by_key.get(pod), by_node, node_names)
        if name is not None:
            samples = by_node[name]
            result.holding[pod] = _min(sample.idle_seconds for sample in samples)
            result.pods[pod] = _make_row(samples)
        ignored = tuple(other for other in by_node if other != name)
        if ignored:
            result.ignored[pod] = ignored
    return result


def _find_node(pod: PodSeen | None, reporting: Collection[str], node_names: Collection[str]) -> str | None:
    """Returns the node whose values are used for the pod, because a former node may report the pod for some time.

    An exporter may use a node name that differs from Kubernetes'. Its values are used if no other node reports the pod.
    """
    if pod is not None and pod.node in reporting:
        return pod.node
    possible = reporting if pod is None else [name for name in reporting if name not in node_names]
    return next(iter(possible)) if len(possible) == 1 else None


def _min(seconds: Iterable[float | None]) -> float | None:
    """Returns the minimum, or None if one of the values is unknown."""
    least = inf
    for value in seconds:
        if value is None:
            return None
        least = min(least, value)
    return least


def _sample_device(
    parts: Sequence[HeldPart], rates: Sequence[_Rate], alone: bool, state: ClusterState
) -> _DeviceSample:
    slot, gpu = parts[0].slot, parts[0].gpu
    used = used_value(slot, state.settings)
    usages = [part.holder.usage for part in parts]
    utilization = _sum(None if usage is None else usage.utilization_ratio for usage in usages)
    memory = _sum(None if usage is None else usage.memory_used_bytes for usage in usages)
    busy, watts = _sum(rate.busy for rate in rates), _sum(rate.watts for rate in rates)
    if alone:
        utilization = slot.utilization_ratio if utilization is None else utilization
        memory = slot.memory_used_bytes if memory is None else memory
        if slot is gpu and gpu.power_mw is not None:
            watts = gpu.power_mw / 1000
    return _DeviceSample(
        None if utilization is None else min(1.0, utilization),
        memory,
        slot.memory_total_bytes or None,
        None if busy is None else min(1.0, busy),
        watts,
        tuple(_fraction(slot, metric) if alone else None for metric in PROFILING_METRICS),
        None if used is None else min(1.0, used / state.settings.full),
        _min(_find_idle_seconds(part, rate) for part, rate in zip(parts, rates, strict=True)),
    )


def _find_idle_seconds(part: HeldPart, rate: _Rate) -> float | None:
    """Uses only counters: a gauge can be 0 at every scrape although there was work in between."""
    return None if part.idle_since is None or rate.idle is None else rate.idle.seconds


def _fraction(slot: Slot, metric: ScalingMetric) -> float | None:
    value = (slot.fields or {}).get(metric.field)
    return min(1.0, value) if isinstance(value, int | float) and 0 <= value <= _MAX_RATIO else None


def _sum(values: Iterable[float | None]) -> float | None:
    """Returns the sum, or None if one of the values is unknown."""
    total = 0.0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def _percent(ratios: Sequence[float | None]) -> float:
    total = _sum(ratios)
    return nan if total is None else 100 * total / len(ratios)


def _empty_row() -> array[float]:
    return array("f", (nan,)) * COLUMNS


def _make_row(samples: Sequence[_DeviceSample]) -> array[float]:
    row = _empty_row()
    if not samples:
        return row
    row[UTILIZATION.column] = _percent([sample.utilization for sample in samples])
    memory, memory_total = _sum(sample.memory for sample in samples), _sum(sample.memory_total for sample in samples)
    row[MEMORY.column] = nan if memory is None or not memory_total else min(100.0, 100 * memory / memory_total)
    row[BUSY.column] = _percent([sample.busy for sample in samples])
    watts = _sum(sample.watts for sample in samples)
    row[POWER.column] = nan if watts is None else watts
    for place, metric in enumerate(PROFILING_METRICS):
        row[metric.column] = _percent([sample.fractions[place] for sample in samples])
    used = [sample.used for sample in samples if sample.used is not None]
    if len(used) == len(samples):
        row[USED.column], row[USED_COUNT] = 100 * sum(used), float(sum(ratio > 0 for ratio in used))
    return row


def _sample_node(node: NodeEntry, busy: dict[_SlotKey, float | None], state: ClusterState) -> array[float]:
    row = _make_row([_sample_gpu(gpu, busy) for gpu in node.gpus])
    _set_used(row, state, Scope("node", node=node.name))
    return row


def _sample_gpu(gpu: DeviceState, busy: dict[_SlotKey, float | None]) -> _DeviceSample:
    """Returns the values of a GPU, for all its holders together."""
    return _DeviceSample(
        utilization=gpu_utilization(gpu),
        memory=gpu.memory_used_bytes,
        memory_total=gpu.memory_total_bytes,
        busy=_gpu_busy(gpu, busy),
        watts=None if gpu.power_mw is None else gpu.power_mw / 1000,
        fractions=tuple(_gpu_fraction(gpu, metric) for metric in PROFILING_METRICS),
    )


def _gpu_busy(gpu: DeviceState, busy: dict[_SlotKey, float | None]) -> float | None:
    """Sums over all holders. In MIG mode, returns the mean over the instances; instances without a holder are idle."""
    if not gpu.instances:
        own = busy.get((gpu.uuid, gpu.index, None), 0.0)
        return None if own is None else min(1.0, own)
    instances = [busy.get((gpu.uuid, gpu.index, instance.id), 0.0) for instance in gpu.instances]
    total = _sum(None if value is None else min(1.0, value) for value in instances)
    return None if total is None else total / len(instances)


def _gpu_fraction(gpu: DeviceState, metric: ScalingMetric) -> float | None:
    own = _fraction(gpu, metric)
    if own is not None or not gpu.instances:
        return own
    total = _sum(_fraction(instance, metric) for instance in gpu.instances)
    return None if total is None else total / len(gpu.instances)


def _set_used(row: array[float], state: ClusterState, scope: Scope) -> None:
    used = state.used.get(scope)
    if used is not None:
        row[USED.column] = 100 * used.mean / state.settings.full * used.devices
        row[USED_COUNT] = float(used.devices)
