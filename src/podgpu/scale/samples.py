"""Stores the samples of each round: one row for each pod with a GPU, one for each namespace, and
one for the cluster.

A round is one reading of all nodes. A pod on a shared GPU has values only if the exporter reports
usage per pod. Pods on stale nodes have no samples.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, starmap
from math import nan
from operator import attrgetter
from typing import NamedTuple

from podgpu.charge import HeldTime
from podgpu.clock import Clock
from podgpu.fleet.parts import HeldPart
from podgpu.fleet.readings import ViewSettings
from podgpu.fleet.state import ClusterState, used_value
from podgpu.model import GpuOrInstance, HolderUsage, group_by_key
from podgpu.scale.catalogue import (
    COLUMNS,
    IDLE,
    MEMORY,
    POWER,
    PROFILING_METRICS,
    RATIO_METRICS,
    USED,
    USED_COUNT,
)
from podgpu.scale.pods import PodSeen, RunningPods
from podgpu.scale.requests import no_data

_log = logging.getLogger(__name__)
SampleKey = tuple[str, str]
"""Namespace and name of a pod. For a namespace, the name is empty. For the cluster, both are empty.
"""
_MAX_BUSY = 1.5  # maximum plausible busy ratio; it can exceed 1 if counters are read late
_MAX_RATIO = 1.01
_MAX_WATTS = 5000.0  # maximum plausible power of one GPU
_STARTING_SECONDS = 30.0
_NO_TIME = HeldTime(0.0)


class RoundSamples(NamedTuple):
    """The samples of one round. Each row has one value per column; NaN means unknown."""

    at: float  # monotonic time
    rows: dict[SampleKey, Sequence[float]]  # for pods with a GPU, namespaces and the cluster
    ignored: dict[SampleKey, str]  # pod -> nodes that report the pod although it runs elsewhere
    mps: set[SampleKey]  # pods whose usage is unknown, because they share a GPU by MPS


_PodDevice = tuple[Sequence[HeldPart], bool]
"""A pod's containers on one device, and True if no other pod holds the device."""


def sample_round(state: ClusterState, pods: RunningPods, at: float) -> RoundSamples:
    devices: dict[SampleKey, dict[str, list[_PodDevice]]] = {}  # by pod and node
    mps: set[SampleKey] = set()
    for node in state.nodes:
        if node.stale:
            continue
        for _, group in groupby(node.held, key=attrgetter("device_key")):
            parts = list(group)
            by_pod = group_by_key(
                ((part.holder.namespace, part.holder.pod), part)
                for part in parts
                if part.holder.pod
            )
            alone = len(by_pod) == 1 and all(part.holder.pod for part in parts)
            if not alone:
                mps |= {
                    pod for pod, own in by_pod.items() if any(part.unknown_because for part in own)
                }
            for pod, own in by_pod.items():
                devices.setdefault(pod, {}).setdefault(node.name, []).append((own, alone))
    samples = RoundSamples(at, {}, {}, mps)
    for scope, used in state.used.items():
        if scope.scope in ("namespace", "cluster"):
            row = samples.rows[scope.namespace, ""] = array("f", (nan,)) * COLUMNS
            row[USED.column] = 100 * used.mean / state.settings.full * used.devices
            row[USED_COUNT] = float(used.devices)
    node_names = {pod.node for pod in pods.by_key.values()}
    has_node_names = any(node.name in node_names for node in state.nodes)
    for pod, by_node in devices.items():
        name = _find_node(pods.by_key.get(pod), by_node, has_node_names)
        if name is not None:
            samples.rows[pod] = _make_row(by_node[name], state)
        if ignored := ", ".join(other for other in by_node if other != name):
            samples.ignored[pod] = ignored
    return samples


def _find_node(pod: PodSeen | None, reporting: Collection[str], has_node_names: bool) -> str | None:
    """Returns the node whose values are used for the pod: its node in Kubernetes, if this node
    reports the pod.

    If no exporter uses the node names of Kubernetes, returns the only reporting node.
    """
    if pod is not None and (has_node_names or pod.node in reporting):
        return pod.node if pod.node in reporting else None
    return next(iter(reporting)) if len(reporting) == 1 else None


def _make_row(devices: Sequence[_PodDevice], state: ClusterState) -> array[float]:
    row = array("f", (nan,)) * COLUMNS
    for metric, ratios in zip(
        RATIO_METRICS, zip(*starmap(_read_ratios, devices), strict=True), strict=True
    ):
        if (ratio := _sum(ratios)) is not None:
            row[metric.column] = 100 * ratio / len(devices)
    held = [parts[0].device for parts, _ in devices]
    memory_total = _sum(device.memory_total_bytes or None for device in held)
    memory = _sum(starmap(_read_memory, devices))
    if memory is not None and memory_total:
        row[MEMORY.column] = min(100.0, 100 * memory / memory_total)
    watts = _sum(starmap(_read_watts, devices))
    if watts is not None:
        row[POWER.column] = watts
    used = [value for device in held if (value := used_value(device, state.settings)) is not None]
    if len(used) == len(held):
        row[USED.column] = 100 * sum(min(1.0, value / state.settings.full) for value in used)
        row[USED_COUNT] = float(sum(value > 0 for value in used))
    idle = [
        None if part.idle_since is None else part.measured_idle
        for parts, _ in devices
        for part in parts
    ]
    known = [seconds for seconds in idle if seconds is not None]
    if len(known) == len(idle):
        row[IDLE] = min(known)
    return row


def _read_ratios(parts: Sequence[HeldPart], alone: bool) -> tuple[float | None, ...]:
    """Returns the ratios of one device in the order of RATIO_METRICS."""
    device, windows = parts[0].device, [part.window or _NO_TIME for part in parts]
    utilization = _sum((part.holder.usage or HolderUsage()).utilization_ratio for part in parts)
    if alone and utilization is None:
        utilization = device.utilization_ratio
    busy = _sum(_rate(window.busy, window, _MAX_BUSY) for window in windows)
    wait = 0.0 if alone else _sum(_rate(window.waited, window, _MAX_BUSY) for window in windows)
    profiling = (
        _read_field(device, metric.field) if alone else None for metric in PROFILING_METRICS
    )
    return tuple(
        None if ratio is None else min(1.0, ratio)
        for ratio in (utilization, busy, wait, *profiling)
    )


def _read_memory(parts: Sequence[HeldPart], alone: bool) -> float | None:
    memory = _sum((part.holder.usage or HolderUsage()).memory_used_bytes for part in parts)
    return parts[0].device.memory_used_bytes if alone and memory is None else memory


def _read_watts(parts: Sequence[HeldPart], alone: bool) -> float | None:
    device, gpu = parts[0].device, parts[0].gpu
    if alone and device is gpu and gpu.power_mw is not None:
        return gpu.power_mw / 1000
    windows = [part.window or _NO_TIME for part in parts]
    return _sum(_rate(window.joules, window, _MAX_WATTS) for window in windows)


def _rate(amount: float | None, window: HeldTime, most: float) -> float | None:
    """Returns the amount per second. None if it is not known, or implausible."""
    rate = None if amount is None else amount / window.held
    return rate if rate is not None and rate <= most else None


def _read_field(device: GpuOrInstance, field: str) -> float | None:
    value = (device.fields or {}).get(field)
    return value if isinstance(value, int | float) and 0 <= value <= _MAX_RATIO else None


def _sum(values: Iterable[float | None]) -> float | None:
    """Returns the sum, or None if one of the values is unknown."""
    values = list(values)
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


# The stored rounds


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """The data for answering requests: all stored rounds, the running pods and the stale nodes."""

    rounds: tuple[RoundSamples, ...]  # all rounds within the longest allowed window, oldest first
    ends_at: float  # end of the last round and of all windows, as Unix time
    interval: float
    held_before: frozenset[
        SampleKey
    ]  # running pods that held a GPU in an earlier round and may still hold it
    pods: RunningPods
    stale_nodes: Mapping[str, float]  # seconds since the last reading, by node
    notes: tuple[str, ...]

    @property
    def last(self) -> RoundSamples:
        return self.rounds[-1]

    def rounds_in(self, window: float) -> Sequence[RoundSamples]:
        # Tolerates half an interval, because the time between rounds varies.
        first = self.last.at - window + self.interval / 2
        return self.rounds[bisect_right(self.rounds, first, key=attrgetter("at")) :]

    def age(self, pod: PodSeen) -> float:
        return self.ends_at - pod.started_at

    def needs_gpu(self, pod: PodSeen) -> bool:
        return pod.key in self.last.rows or pod.requests_gpu or pod.key in self.held_before

    def is_starting(self, pod: PodSeen) -> bool:
        """Returns True if the pod started so recently that its node's exporter may not report it
        yet.
        """
        return self.age(pod) < 2 * self.interval + _STARTING_SECONDS


@dataclass(eq=False)
class SampleStore:
    """Stores rounds and provides snapshots. Only the cluster loop's thread may add rounds."""

    settings: ViewSettings
    max_window: float
    _pods: Callable[[], RunningPods]
    _clock: Clock = field(default_factory=Clock)
    _snapshot: MetricsSnapshot | None = None

    def add_round(self, state: ClusterState) -> None:
        before, now, pods = self._snapshot, self._clock.monotonic(), self._pods()
        samples = sample_round(state, pods, now)
        for key, nodes in samples.ignored.items():
            if key in pods.by_key and (before is None or key not in before.last.ignored):
                _log.warning(
                    (
                        "the exporter on %s reports the pod %s/%s, but that pod runs on %s: these "
                        "values are ignored"
                    ),
                    *(nodes, *key, pods.by_key[key].node or "no node"),
                )
        rounds = [one for one in before.rounds if one.at > now - self.max_window] if before else []
        held_before = before.held_before if before else frozenset()
        if not pods.trouble:
            held_before = frozenset(
                key for key in (*held_before, *samples.rows) if key in pods.by_key
            )
        keys = (
            {key: key for key in rounds[-1].rows} if rounds else {}
        )  # reuses key objects, to save memory
        rows = {keys.get(key, key): row for key, row in samples.rows.items()}
        self._snapshot = MetricsSnapshot(
            (*rounds, samples._replace(rows=rows)),
            state.taken_at or 0.0,
            self.settings.interval,
            held_before,
            pods,
            {node.name: node.age_seconds or 0.0 for node in state.nodes if node.stale},
            tuple(
                dict.fromkeys(
                    (*state.notes, *(outcome.text for outcome in state.outcomes if outcome.error))
                )
            ),
        )

    def snapshot(self) -> MetricsSnapshot:
        """Raises Refusal if there is no snapshot yet, or if it is too old."""
        snapshot = self._snapshot
        if snapshot is None:
            raise no_data("podgpu autoscale has not read the nodes yet: retry later")
        late = self._clock.monotonic() - snapshot.last.at
        if late > self.settings.stale_after + 2 * self.settings.interval:
            raise no_data(
                f"podgpu autoscale last read the nodes {late:.0f} s ago, which is too long: "
                "see "
                "its log"
            )
        return snapshot
