"""Rounds of a made-up cluster, taken in as `podgpu autoscale` takes them, with time moved by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest

from podgpu.autoscale.metrics import metric_named
from podgpu.autoscale.pods import PodSeen, RunningPods, index_pods
from podgpu.autoscale.questions import Over, Whom, of_workload
from podgpu.autoscale.refusal import Refusal
from podgpu.autoscale.scene import Scene, Store
from podgpu.clock import Clock
from podgpu.cluster.collect import ClusterReading, NodeReading, TargetOutcome
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.state import ClusterState, build_cluster_state
from podgpu.figures.device import DeviceFigures, HolderFigures
from podgpu.metrics.fields import fields
from podgpu.model import Workload
from podgpu.node_state import DeviceState, Holder, HolderUsage, MigInstance, NodeState

BEGIN = 1_700_000_100.0
"""Unix time at monotonic time 0: a multiple of 15 s, and of a minute."""
INTERVAL = 15.0


def pod(
    name: str,
    namespace: str = "serving",
    owner: str = "Deployment/inference",
    labels: str = "app=inference",
    node: str = "n1",
    started: float = -3600.0,
    asks: bool = True,
) -> PodSeen:
    """`started`: seconds after BEGIN."""
    kind, _, made_by = owner.partition("/")
    pairs = tuple(sorted((key, value) for key, _, value in (text.partition("=") for text in labels.split(",") if text)))
    return PodSeen(namespace, name, node, BEGIN + started, kind, made_by, asks, pairs)


def holder(name: str, namespace: str = "serving", container: str = "main", **figures: Any) -> HolderFigures:
    return HolderFigures(Workload(namespace, name, container), **figures)


def gpu(index: int, *holders: HolderFigures, uuid: str = "", **figures: Any) -> DeviceFigures:
    return DeviceFigures(uuid or f"GPU-{index}", index, "H100", holders=holders, **figures)


@dataclass
class Stage:
    """A cluster: `nodes` says what each node's exporter tells in the round that `turn` makes."""

    pods: list[PodSeen] = field(default_factory=list)
    trouble: str = ""
    settings: ViewSettings = field(default_factory=lambda: ViewSettings(interval=INTERVAL))
    longest: float = 600.0
    node_labels: dict[str, tuple[tuple[str, str], ...]] | None = None
    now: float = 0.0
    counts: bool = True
    """Exporters count busy and idle seconds of who has a utilisation, as podgpu's do."""

    begin: float = BEGIN
    """Unix time at monotonic time 0."""

    def __post_init__(self) -> None:
        clock = Clock(monotonic=lambda: self.now, wall=lambda: self.begin + self.now)
        self.store = Store(self.settings, self.longest, self.running, lambda: self.node_labels, clock)
        self._state: ClusterState | None = None
        self._last: dict[str, NodeReading] = {}
        self._counted: dict[tuple[str, str, object], tuple[float, float]] = {}

    def running(self) -> RunningPods:
        return index_pods(self.pods, self.trouble)

    def turn(self, *, outcomes: Iterable[TargetOutcome] = (), **nodes: tuple[DeviceFigures, ...]) -> None:
        """One round, an interval after the last. A node that is not named does not answer."""
        self.now += self.settings.interval
        for name, told in nodes.items():
            devices = tuple(map(self._with_counters, told)) if self.counts else told
            state = NodeState(node=name, producer="podgpu", devices=tuple(_documents(devices, self.settings)))
            self._last[name] = NodeReading(f"http://{name}:9400/metrics", state, read_at=self.now)
        reading = ClusterReading(tuple(self._last.values()), tuple(outcomes))
        wall = self.begin + self.now
        self._state = build_cluster_state(reading, self._state, self.settings, self.now, wall)
        self.store.take(self._state)

    def _with_counters(self, device: DeviceFigures) -> DeviceFigures:
        return replace(device, holders=tuple(self._counted_on(device, of) for of in device.holders))

    def _counted_on(self, device: DeviceFigures, of: HolderFigures) -> HolderFigures:
        if of.utilization is None or of.busy_seconds is not None:
            return of
        key, seconds = (device.uuid, device.instance, of.who), self.settings.interval
        busy, idle = self._counted.get(key, (0.0, 0.0))
        self._counted[key] = busy + seconds * of.utilization, idle + (0.0 if of.utilization else seconds)
        busy, idle = self._counted[key]
        return replace(of, busy_seconds=busy, idle_seconds=idle)

    def turns(self, count: int, **nodes: tuple[DeviceFigures, ...]) -> None:
        for _ in range(count):
            self.turn(**nodes)

    def scene(self, later: float = 6.0) -> Scene:
        """What is answered from, `later` seconds after the last round's instant."""
        self.now += later
        try:
            return self.store.scene()
        finally:
            self.now -= later


def _documents(devices: Iterable[DeviceFigures], settings: ViewSettings) -> Iterable[DeviceState]:
    """The devices as an exporter's document has them."""
    whole: dict[str, DeviceState] = {}
    for device in devices:
        values: dict[str, Any] = {fields()[number].name: value for number, value in device.beside}
        if device.measured is not None:
            values[settings.used_field_name] = device.measured
        slot: dict[str, Any] = {
            "utilization_ratio": device.utilization,
            "memory_used_bytes": device.memory_used,
            "memory_total_bytes": device.memory_total,
            "fields": values,
            "holders": tuple(_document_of(of) for of in device.holders),
        }
        known = whole.get(device.uuid) or DeviceState(
            uuid=device.uuid, index=device.index, model=device.model, hidden=True
        )
        if device.instance:
            own = MigInstance(id=int(device.instance), profile=device.profile, **slot)
            whole[device.uuid] = msgspec.structs.replace(known, instances=(*known.instances, own))
        else:
            power = None if device.power_watts is None else round(device.power_watts * 1000)
            whole[device.uuid] = msgspec.structs.replace(known, hidden=False, power_mw=power, **slot)
    return whole.values()


def _document_of(of: HolderFigures) -> Holder:
    who = of.holder
    return Holder(
        *(who.namespace, who.pod, who.container, who.uid, who.container_id, who.job),
        source="kubelet",
        share_ratio=of.share,
        usage=HolderUsage(
            utilization_ratio=of.utilization,
            memory_used_bytes=of.memory,
            processes=of.processes,
            busy_ns=None if of.busy_seconds is None else round(of.busy_seconds * 1e9),
            idle_ns=None if of.idle_seconds is None else round(of.idle_seconds * 1e9),
            energy_mj=None if of.energy_joules is None else round(of.energy_joules * 1000),
        ),
    )


# What is asked

INFERENCE = Whom("serving", owner=("Deployment", "inference"))


def figure(stage: Stage, metric: str = "gpu_utilization", whom: Whom = INFERENCE, **over: object) -> float:
    """Of the last round, unless a window is given."""
    how = Over(**{"window": INTERVAL, **over})  # type: ignore[arg-type]
    return of_workload(stage.scene(), whom, metric_named(metric), how).value


def busy(name: str, ratio: float, index: int, **more: object) -> DeviceFigures:
    return gpu(index, holder(name, utilization=ratio), utilization=ratio, **more)


def refused(stage: Stage, metric: str = "gpu_utilization", whom: Whom = INFERENCE, **over: object) -> Refusal:
    with pytest.raises(Refusal) as raised:
        figure(stage, metric, whom, **over)
    return raised.value
