"""Builders of readings and states for tests of the cluster view."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from podgpu.fleet.prices import NO_PRICES, Prices
from podgpu.fleet.read.prometheus import PrometheusServer
from podgpu.fleet.readings import ClusterReading, Collector, NodeReading
from podgpu.fleet.round import Cluster, PublishedState
from podgpu.fleet.series import cluster_families
from podgpu.fleet.settings import ViewSettings
from podgpu.fleet.state import ClusterState, Scope, build_cluster_state
from podgpu.metrics.encode import encode
from podgpu.metrics.parse import ParsedFamily, parse_text
from podgpu.model import Condition, DeviceState, Holder, HolderUsage, MigInstance, NodeState
from podgpu.past.prometheus.prometheus_past import PrometheusPast

H100 = "NVIDIA H100 80GB HBM3"
WALL = 1_700_000_100.0  # Unix time at monotonic time 0
Series = dict[tuple[tuple[str, str], ...], float]


def holder(
    pod: str = "train",
    namespace: str = "ml",
    container: str = "main",
    share: float | None = None,
    **usage: Any,
) -> Holder:
    own = HolderUsage(**usage) if usage else None
    return Holder(namespace, pod, container, source="kubelet", share_ratio=share, usage=own)


def gpu(
    index: int, *holders: Holder, busy: float | None = None, used: float | None = None, **more: Any
) -> DeviceState:
    """Returns a GPU. `busy` is its utilisation; `used` is the value of the default --used-field."""
    more.setdefault("uuid", f"GPU-{index}")
    more.setdefault("model", H100)
    fields: Any = {} if used is None else {"DCGM_FI_DEV_MEM_COPY_UTIL": used}
    return DeviceState(index=index, holders=holders, utilization_ratio=busy, fields=fields, **more)


def mig(
    number: int, *holders: Holder, profile: str = "1g.10gb", busy: float | None = None
) -> MigInstance:
    return MigInstance(id=number, profile=profile, holders=holders, utilization_ratio=busy)


def lost(index: int, *holders: Holder) -> DeviceState:
    return gpu(index, *holders, conditions=(Condition("lost", 1.0),))


def node(name: str, *gpus: DeviceState, read_at: float = 0.0, **more: Any) -> NodeReading:
    own = {
        key: more.pop(key)
        for key in ("target", "skew_seconds", "listed", "named", "labels")
        if key in more
    }
    own.setdefault("target", f"http://{name}:9400/metrics")
    state = NodeState(node=name, devices=gpus, producer=more.pop("producer", "podgpu"), **more)
    return NodeReading(state=state, read_at=read_at, **own)


class World:
    """Runs successive rounds."""

    def __init__(self, settings: ViewSettings | None = None) -> None:
        self.settings = settings or ViewSettings()
        self.state: ClusterState | None = None

    def round(
        self, *nodes: NodeReading, at: float = 0.0, wall: float | None = None, **more: Any
    ) -> ClusterState:
        own = {
            key: more.pop(key)
            for key in ("prices", "removed", "budgets", "recorded")
            if key in more
        }
        reading = ClusterReading(nodes, **more)
        wall = WALL + at if wall is None else wall
        self.state = build_cluster_state(reading, self.state, self.settings, at, wall, **own)
        return self.state


def state_of(
    *nodes: NodeReading, at: float = 0.0, settings: ViewSettings | None = None, **more: Any
) -> ClusterState:
    return World(settings).round(*nodes, at=at, **more)


def prometheus_past(
    server: PrometheusServer,
    state: ClusterState | None = None,
    prices: Prices = NO_PRICES,
    **more: Any,
) -> PrometheusPast:
    """Returns the past in Prometheus of a cluster that is not read."""

    def make_collector() -> Collector:
        raise NotImplementedError

    cluster = Cluster(make_collector, ViewSettings())
    if state is not None:
        cluster.published = PublishedState(state)
    return PrometheusPast(server, cluster, lambda: (prices, ()), **more)


def uuids(state: ClusterState) -> dict[str, list[str]]:
    return {entry.name: [gpu.uuid for gpu in entry.state.devices] for entry in state.nodes}


def text_of(state: ClusterState, rolling: Mapping[Scope, float] | None = None) -> str:
    return encode(cluster_families(state, rolling or {})).decode()


def series(state: ClusterState, name: str) -> Series:
    """Returns the value of each series by its sorted labels."""
    for family in parse_text(text_of(state)):
        if family.name == name:
            return {tuple(sorted(sample.labels.items())): sample.value for sample in family.samples}
    return {}


def value(state: ClusterState, name: str, **labels: str) -> float | None:
    return series(state, name).get(tuple(sorted(labels.items())))


def duplicates(families: Iterable[ParsedFamily]) -> list[tuple[str, Mapping[str, str]]]:
    """Returns series that occur twice. Prometheus treats an empty label as absent."""
    seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    found = []
    for family in families:
        for sample in family.samples:
            key = (
                sample.name,
                frozenset((name, value) for name, value in sample.labels.items() if value),
            )
            if key in seen:
                found.append((sample.name, sample.labels))
            seen.add(key)
    return found
