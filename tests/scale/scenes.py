"""Rounds of a simulated cluster, stored as by `podgpu autoscale`, with a simulated clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from podgpu.clock import Clock
from podgpu.fleet.readings import ClusterReading, NodeReading, TargetOutcome
from podgpu.fleet.settings import ViewSettings
from podgpu.fleet.state import ClusterState, build_cluster_state
from podgpu.model import DeviceState, Holder, HolderUsage, NodeState
from podgpu.scale.answers import compute_value
from podgpu.scale.pods import PodSeen, RunningPods
from podgpu.scale.requests import MetricRequest, PodSelector, Refusal, find_metric
from podgpu.scale.samples import MetricsSnapshot, SampleStore

BEGIN = 1_700_000_100.0  # Unix time at monotonic time 0: a multiple of 15 s, and of a minute
INTERVAL = 15.0
USED_FIELD = "DCGM_FI_DEV_MEM_COPY_UTIL"


def pod(
    name: str,
    namespace: str = "serving",
    owner: str = "Deployment/inference",
    labels: str = "app=inference",
    node: str = "n1",
    started: float = -3600.0,
    asks: bool = True,
) -> PodSeen:
    """Returns a pod that started `started` seconds after BEGIN."""
    kind, _, owner_name = owner.partition("/")
    pairs = tuple(
        sorted(
            (key, value)
            for key, _, value in (text.partition("=") for text in labels.split(",") if text)
        )
    )
    return PodSeen(
        namespace, name, node, BEGIN + started, (kind, owner_name) if owner else None, asks, pairs
    )


def holder(
    name: str,
    namespace: str = "serving",
    container: str = "main",
    *,
    utilization: float | None = None,
    memory: int | None = None,
    busy_seconds: float | None = None,
    idle_seconds: float | None = None,
    idle_since: float | None = None,
    energy_joules: float | None = None,
    wait_seconds: float | None = None,
) -> Holder:
    usage = HolderUsage(
        utilization_ratio=utilization,
        memory_used_bytes=memory,
        busy_ns=None if busy_seconds is None else round(busy_seconds * 1e9),
        idle_ns=None if idle_seconds is None else round(idle_seconds * 1e9),
        idle_since=idle_since,
        energy_mj=None if energy_joules is None else round(energy_joules * 1000),
        wait_ns=None if wait_seconds is None else round(wait_seconds * 1e9),
    )
    return Holder(namespace, name, container, source="kubelet", usage=usage)


def gpu(
    index: int,
    *holders: Holder,
    uuid: str = "",
    utilization: float | None = None,
    memory_used: int | None = None,
    memory_total: int | None = None,
    power_watts: float | None = None,
    measured: float | None = None,
    values: dict[str, float] | None = None,
) -> DeviceState:
    own: dict[str, Any] = dict(values or {})
    if measured is not None:
        own[USED_FIELD] = measured
    return DeviceState(
        uuid=uuid or f"GPU-{index}",
        index=index,
        model="H100",
        utilization_ratio=utilization,
        memory_used_bytes=memory_used,
        memory_total_bytes=memory_total,
        power_mw=None if power_watts is None else round(1000 * power_watts),
        fields=own,
        holders=holders,
    )


def busy(name: str, ratio: float, index: int, **more: Any) -> DeviceState:
    return gpu(index, holder(name, utilization=ratio), utilization=ratio, **more)


@dataclass
class Stage:
    """A simulated cluster. `turn` runs a round in which each exporter reports the given devices."""

    pods: list[PodSeen] = field(default_factory=list)
    trouble: str = ""
    settings: ViewSettings = field(default_factory=lambda: ViewSettings(interval=INTERVAL))
    longest: float = 600.0
    now: float = 0.0
    counts: bool = True
    """Add counters of busy and idle time to holders with a utilisation, as podgpu's exporters do.
    """
    begin: float = BEGIN
    outcomes: tuple[TargetOutcome, ...] = ()

    def __post_init__(self) -> None:
        clock = Clock(monotonic=lambda: self.now, wall=lambda: self.begin + self.now)
        self.store = SampleStore(self.settings, self.longest, self.running, clock)
        self._state: ClusterState | None = None
        self._last: dict[str, NodeReading] = {}
        self._counters: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}

    def running(self) -> RunningPods:
        return RunningPods(
            {} if self.trouble else {one.key: one for one in self.pods}, self.trouble
        )

    def turn(
        self,
        *,
        exporter_id: str = "",
        usage_at: float | None = None,
        **nodes: tuple[DeviceState, ...],
    ) -> None:
        """Runs one round, an interval after the last. Nodes that are not given do not answer."""
        self.now += self.settings.interval
        for name, devices in nodes.items():
            if self.counts:
                devices = tuple(map(self._count, devices))
            state = NodeState(
                node=name,
                producer="podgpu",
                devices=devices,
                exporter_id=exporter_id,
                usage_at=usage_at,
            )
            self._last[name] = NodeReading(f"http://{name}:9400/metrics", state, read_at=self.now)
        reading = ClusterReading(tuple(self._last.values()), self.outcomes)
        wall = self.begin + self.now
        self._state = build_cluster_state(reading, self._state, self.settings, self.now, wall)
        self.store.add_round(self._state)

    def _count(self, device: DeviceState) -> DeviceState:
        return replace(
            device, holders=tuple(self._count_holder(device.uuid, of) for of in device.holders)
        )

    def _count_holder(self, device: str, of: Holder) -> Holder:
        usage = of.usage
        if usage is None or usage.utilization_ratio is None or usage.busy_ns is not None:
            return of
        key, ns = (device, of.key), round(self.settings.interval * 1e9)
        busy_ns, idle_ns = self._counters.get(key, (0, 0))
        busy_ns += round(ns * usage.utilization_ratio)
        idle_ns += 0 if usage.utilization_ratio else ns
        self._counters[key] = busy_ns, idle_ns
        return replace(of, usage=replace(usage, busy_ns=busy_ns, idle_ns=idle_ns))

    def turns(self, count: int, **nodes: Any) -> None:
        for _ in range(count):
            self.turn(**nodes)

    def snapshot(self, later: float = 6.0) -> MetricsSnapshot:
        """Returns the snapshot `later` seconds after the last round."""
        self.now += later
        try:
            return self.store.snapshot()
        finally:
            self.now -= later


INFERENCE = PodSelector("serving", owner=("Deployment", "inference"))


def figure(
    stage: Stage,
    metric: str = "gpu_utilization",
    selector: PodSelector = INFERENCE,
    **aggregation: object,
) -> float:
    """Returns the value of the last round, or of the window if one is given."""
    request = MetricRequest(find_metric(metric), selector, **{"window": INTERVAL, **aggregation})  # type: ignore[arg-type]
    return compute_value(stage.snapshot(), request).value


def refused(
    stage: Stage,
    metric: str = "gpu_utilization",
    selector: PodSelector = INFERENCE,
    **aggregation: object,
) -> Refusal:
    with pytest.raises(Refusal) as raised:
        figure(stage, metric, selector, **aggregation)
    return raised.value
