"""Samples of each round: one row per pod with a GPU, per namespace, and for the cluster.

A round is one reading of all nodes. A pod on a shared GPU has values only if the exporter reports
usage per pod. Pods on stale nodes have no samples.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import inf, nan
from operator import attrgetter
from typing import Literal, NamedTuple

from podgpu.clock import Clock
from podgpu.errors import texts_of
from podgpu.fleet.parts import HeldPart
from podgpu.fleet.settings import ViewSettings
from podgpu.fleet.spent import MAX_WATTS
from podgpu.fleet.state import ClusterState, read_field, used_value
from podgpu.known import sum_all
from podgpu.model import GpuOrInstance, HolderUsage, group_by
from podgpu.scale.catalogue import (
    BUSY,
    COLUMNS,
    IDLE,
    MEMORY,
    POWER,
    PROFILING_METRICS,
    USED,
    USED_COUNT,
    UTILIZATION,
    WAIT,
)
from podgpu.scale.pods import PodSeen, RunningPods
from podgpu.scale.requests import no_data

_log = logging.getLogger(__name__)
SampleKey = tuple[str, str]
"""Namespace and name of a pod. For a namespace, the name is empty. For the cluster, both are empty.
"""
_MAX_BUSY = 1.5  # maximum plausible busy ratio; it can exceed 1 if counters are read late
_STARTING_SECONDS = 30.0


Rows = dict[SampleKey, Sequence[float]]
"""One value per column; NaN means unknown."""


class RoundSamples(NamedTuple):
    """The samples of one round."""

    at: float  # monotonic time
    rows: Rows  # for pods with a GPU, namespaces and the cluster
    ignored: dict[SampleKey, str]  # pod -> nodes that report the pod although it runs elsewhere
    mps: set[SampleKey]  # pods whose usage is unknown, because they share a GPU by MPS


def sample_round(state: ClusterState, pods: RunningPods, at: float) -> RoundSamples:
    samples = RoundSamples(at, _sample_scopes(state), ignored={}, mps=set())
    node_names = {pod.node for pod in pods.by_key.values()}
    has_node_names = any(node.name in node_names for node in state.nodes)

    for pod, by_node in _find_devices(state).items():
        name = _find_node(pods.by_key.get(pod), by_node, has_node_names)
        if name is not None:
            devices = by_node.pop(name)
            samples.rows[pod] = _make_row(_measure(devices, state.settings))
            if any(device.shares_by_mps for device in devices):
                samples.mps.add(pod)

        if by_node:
            samples.ignored[pod] = ", ".join(by_node)
    return samples


def _sample_scopes(state: ClusterState) -> Rows:
    """Returns the rows of the namespaces and of the cluster, which have the used utilisation."""
    rows: Rows = {}
    for scope, used in state.used.items():
        if scope.scope not in ("namespace", "cluster"):
            continue
        percent = 100 * used.mean / state.settings.full
        row = _make_row({USED.column: percent * used.devices, USED_COUNT: used.devices})
        rows[scope.namespace, ""] = row
    return rows


def _make_row(values: Mapping[int, float | None]) -> array[float]:
    """`values`: by column."""
    row = array("f", (nan,)) * COLUMNS
    for column, value in values.items():
        if value is not None:
            row[column] = value
    return row


def _find_devices(state: ClusterState) -> dict[SampleKey, dict[str, list[_PodDevice]]]:
    """Returns the devices by pod and by the name of the node that reports them."""
    devices: dict[SampleKey, dict[str, list[_PodDevice]]] = {}
    for node in state.nodes:
        if node.stale:
            continue

        for _, parts in groupby(node.held, key=attrgetter("device_key")):
            by_pod = group_by(parts, lambda part: part.holder.pod_name)
            is_alone = len(by_pod) == 1
            for pod, own in by_pod.items():
                _, name = pod
                # Jobs and reservations have no pod name.
                if name:
                    by_node = devices.setdefault(pod, {})
                    by_node.setdefault(node.name, []).append(_PodDevice(own, is_alone))
    return devices


def _find_node(pod: PodSeen | None, reporting: Collection[str], has_node_names: bool) -> str | None:
    """Returns the node whose values are used for the pod, or None.

    This is the pod's node in Kubernetes, if this node reports the pod. If no exporter uses the node
    names of Kubernetes, it is the only reporting node.
    """
    if pod is not None and pod.node in reporting:
        return pod.node
    if pod is not None and has_node_names:
        return None
    if len(reporting) != 1:
        return None
    (only,) = reporting
    return only


def _measure(devices: Sequence[_PodDevice], settings: ViewSettings) -> dict[int, float | None]:
    """Returns a pod's values by column."""
    values = _measure_ratios(devices)
    values[MEMORY.column] = _measure_memory(devices)
    values[POWER.column] = sum_all(device.read_watts() for device in devices)
    values[IDLE] = _measure_idle(devices)
    values |= _measure_used(devices, settings)
    return values


def _measure_ratios(devices: Sequence[_PodDevice]) -> dict[int, float | None]:
    """Returns the means over the devices, in per cent, of the ratios that all devices have."""
    ratios = [device.read_ratios() for device in devices]
    means: dict[int, float | None] = {}
    for column in ratios[0]:
        total = sum_all(each.get(column) for each in ratios)
        if total is not None:
            means[column] = 100 * total / len(devices)
    return means


def _measure_memory(devices: Sequence[_PodDevice]) -> float | None:
    """Returns the used part of the memory, in per cent."""
    used = sum_all(device.read_memory() for device in devices)
    # A total of 0 is unknown.
    total = sum_all(device.device.memory_total_bytes or None for device in devices)
    if used is None or total is None:
        return None
    return min(100.0, 100 * used / total)


def _measure_used(devices: Sequence[_PodDevice], settings: ViewSettings) -> dict[int, float]:
    """Returns sum and number of the devices in use. Empty if the value of a device is unknown."""
    total = 0.0
    count = 0
    for device in devices:
        value = used_value(device.device, settings)
        if value is None:
            return {}
        total += 100 * min(1.0, value / settings.full)
        if value > 0:
            count += 1
    return {USED.column: total, USED_COUNT: count}


def _measure_idle(devices: Iterable[_PodDevice]) -> float | None:
    """Returns for how many seconds all containers of a pod have been idle.

    None if a container is not idle, or if this is unknown.
    """
    least = inf
    for device in devices:
        for part in device.parts:
            if part.idle_since is None or part.measured_idle is None:
                return None
            least = min(least, part.measured_idle)
    return least


class _PodDevice(NamedTuple):
    """The containers of one pod on one GPU or MIG instance."""

    parts: Sequence[HeldPart]
    is_alone: bool  # no other pod and no job holds the device

    @property
    def device(self) -> GpuOrInstance:
        return self.parts[0].device

    @property
    def _usages(self) -> list[HolderUsage]:
        return [part.holder.known_usage for part in self.parts]

    @property
    def shares_by_mps(self) -> bool:
        return not self.is_alone and any(part.unknown_because for part in self.parts)

    def read_ratios(self) -> dict[int, float]:
        """Returns the known ratios by column. A pod's value is the mean over its devices."""
        utilization = sum_all(usage.utilization_ratio for usage in self._usages)
        ratios: dict[int, float | None] = {BUSY.column: self._sum_rates("busy", _MAX_BUSY)}
        if self.is_alone:
            if utilization is None:
                utilization = self.device.utilization_ratio
            # A pod that is alone on a device does not wait.
            ratios[WAIT.column] = 0.0
            for metric in PROFILING_METRICS:
                ratios[metric.column] = read_field(self.device, metric.field)
        else:
            ratios[WAIT.column] = self._sum_rates("waited", _MAX_BUSY)

        ratios[UTILIZATION.column] = utilization
        return {column: min(1.0, ratio) for column, ratio in ratios.items() if ratio is not None}

    def read_memory(self) -> float | None:
        """Returns the used bytes."""
        memory = sum_all(usage.memory_used_bytes for usage in self._usages)
        if memory is None and self.is_alone:
            return self.device.memory_used_bytes
        return memory

    def read_watts(self) -> float | None:
        gpu = self.parts[0].gpu
        if self.is_alone and self.device is gpu and gpu.power_mw is not None:
            return gpu.power_mw / 1000
        return self._sum_rates("joules", MAX_WATTS)

    def _sum_rates(self, name: Literal["busy", "waited", "joules"], most: float) -> float | None:
        """Adds up what the containers did per second since the last reading.

        Returns None if the amount of a container is unknown or implausible.
        """
        total = 0.0
        for part in self.parts:
            window = part.window
            if window is None:
                return None
            amount = getattr(window, name)
            if amount is None or amount / window.held > most:
                return None
            total += amount / window.held
        return total


# The stored rounds


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """The data for answering requests: all stored rounds, the running pods and the stale nodes."""

    rounds: tuple[RoundSamples, ...]  # all rounds within the longest allowed window, oldest first
    ends_at: float  # end of the last round and of all windows, as Unix time
    interval: float
    # running pods that hold a GPU, or held one in an earlier round and may still hold it
    held: frozenset[SampleKey]
    pods: RunningPods
    stale_nodes: Mapping[str, float]  # seconds since the last reading, by node
    notes: tuple[str, ...]

    @property
    def last(self) -> RoundSamples:
        return self.rounds[-1]

    def find_start(self, window: float) -> float:
        """Returns the monotonic time at which a window of this length starts."""
        # Tolerates half an interval, because the time between rounds varies.
        return self.last.at - window + self.interval / 2

    def rounds_in(self, window: float) -> Sequence[RoundSamples]:
        first = bisect_right(self.rounds, self.find_start(window), key=attrgetter("at"))
        return self.rounds[first:]

    def age(self, pod: PodSeen) -> float:
        return self.ends_at - pod.started_at

    def is_starting(self, pod: PodSeen) -> bool:
        """Returns True while its node's exporter may not report the pod yet."""
        return self.age(pod) < 2 * self.interval + _STARTING_SECONDS


def _share_keys(rows: Rows, earlier: Rows) -> Rows:
    """Replaces keys by the equal objects of an earlier round, to save memory."""
    known = {key: key for key in earlier}
    return {known.get(key, key): row for key, row in rows.items()}


@dataclass(eq=False)
class SampleStore:
    """Stores rounds and provides snapshots. Only the cluster loop's thread may add rounds."""

    settings: ViewSettings
    max_window: float
    _pods: Callable[[], RunningPods]
    _clock: Clock = field(default_factory=Clock)
    _rounds: tuple[RoundSamples, ...] = ()
    _held: frozenset[SampleKey] = frozenset()
    _snapshot: MetricsSnapshot | None = None

    def add_round(self, state: ClusterState) -> None:
        now = self._clock.monotonic()
        pods = self._pods()
        samples = sample_round(state, pods, now)
        self._warn_about_ignored(samples, pods)

        rounds = [each for each in self._rounds if each.at > now - self.max_window]
        if rounds:
            samples = samples._replace(rows=_share_keys(samples.rows, rounds[-1].rows))
        self._rounds = (*rounds, samples)

        if not pods.trouble:
            self._held = self._held.union(samples.rows).intersection(pods.by_key)

        stale_nodes = {}
        for node in state.nodes:
            if node.stale:
                stale_nodes[node.name] = node.age_seconds or 0.0
        notes = texts_of(state.notes) + state.failures
        self._snapshot = MetricsSnapshot(
            rounds=self._rounds,
            ends_at=state.taken_at or 0.0,
            interval=self.settings.interval,
            held=self._held,
            pods=pods,
            stale_nodes=stale_nodes,
            notes=tuple(dict.fromkeys(notes)),
        )

    def _warn_about_ignored(self, samples: RoundSamples, pods: RunningPods) -> None:
        """Logs ignored pods, unless they were already ignored in the last round."""
        before = self._rounds[-1].ignored if self._rounds else {}
        for key, nodes in samples.ignored.items():
            pod = pods.by_key.get(key)
            if pod is not None and key not in before:
                _log.warning(
                    "the exporter on %s reports the pod %s/%s, but that pod runs on %s: "
                    "these values are ignored",
                    nodes,
                    pod.namespace,
                    pod.name,
                    pod.node or "no node",
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
                "see its log"
            )
        return snapshot
