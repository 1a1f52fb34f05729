"""Readings for tests of the view: nodes and devices in a line each, and whatever readings hypothesis can think of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from podgpu.cluster.metrics import cluster_families, node_families
from podgpu.cluster.reading import ClusterReading, NamespaceCounters, NodeReading, Scope, TargetOutcome
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.view import ClusterView, Memory, assemble
from podgpu.figures.device import DeviceFigures, HolderFigures, Owner
from podgpu.metrics.encode import encode
from podgpu.metrics.parse import ParsedFamily, parse_text
from podgpu.model import Workload

H100 = "NVIDIA H100 80GB HBM3"
WALL = 1_700_000_100.0
"""Unix time at monotonic time 0: the beginning of a minute, of five too."""


def holder(pod: str = "train", namespace: str = "ml", container: str = "main", **figures: Any) -> HolderFigures:
    return HolderFigures(Workload(namespace, pod, container), **figures)


def gpu(index: int, *holders: HolderFigures, uuid: str = "", model: str = H100, **figures: Any) -> DeviceFigures:
    return DeviceFigures(uuid or f"GPU-{index}", index, model, holders=holders, **figures)


def node(name: str, *devices: DeviceFigures, read_at: float = 0.0, **more: Any) -> NodeReading:
    more.setdefault("target", f"http://{name}:9400/metrics")
    return NodeReading(node=name, devices=devices, read_at=read_at, **more)


def reading(*nodes: NodeReading, **more: Any) -> ClusterReading:
    return ClusterReading(nodes, **more)


def view_of(
    *nodes: NodeReading,
    at: float = 0.0,
    memory: Memory | None = None,
    settings: ViewSettings | None = None,
    **more: Any,
) -> ClusterView:
    return assemble(reading(*nodes, **more), memory or Memory(), settings or ViewSettings(), at, WALL + at)


def text_of(view: ClusterView) -> str:
    return encode(cluster_families(view)).decode()


Series = dict[tuple[tuple[str, str], ...], float]
"""Labels in alphabetic order -> value."""


def all_series(view: ClusterView) -> Mapping[str, Series]:
    """By the name of their family, as Prometheus would read them."""
    found: dict[str, Series] = defaultdict(dict)
    for family in parse_text(text_of(view)):
        found[family.name] = {tuple(sorted(sample.labels.items())): sample.value for sample in family.samples}
    return found


def series(view: ClusterView, name: str) -> Series:
    return all_series(view)[name]


def value(view: ClusterView, name: str, **labels: str) -> float | None:
    return series(view, name).get(tuple(sorted(labels.items())))


def duplicates(families: Iterable[ParsedFamily]) -> list[tuple[str, Mapping[str, str]]]:
    """Series that come twice; a label without a value is none to Prometheus."""
    seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    found = []
    for family in families:
        for sample in family.samples:
            key = sample.name, frozenset((name, value) for name, value in sample.labels.items() if value)
            if key in seen:
                found.append((sample.name, sample.labels))
            seen.add(key)
    return found


def expositions_of(view: ClusterView) -> list[list[ParsedFamily]]:
    return [parse_text(encode(families).decode()) for families in (cluster_families(view), node_families(view))]


# Whatever there may be

NAMES = st.sampled_from(["a", "b", "a b", 'q"uote', "new\nline", "back\\slash", "größe", "<script>", ""])
RATIOS = st.sampled_from([None, 0.0, 0.25, 1.0]) | st.floats(0, 1)
WORKLOADS = st.one_of(
    st.builds(Workload, namespace=NAMES, pod=NAMES, container=NAMES),
    st.builds(Workload, job=NAMES),
    st.builds(Workload, uid=NAMES, container_id=NAMES),
)
COUNTERS = st.none() | st.floats(0, 1e6)
HOLDERS = st.builds(
    HolderFigures,
    WORKLOADS,
    utilization=RATIOS,
    processes=st.sampled_from([None, 0, 1, 2, 3]),
    busy_seconds=COUNTERS,
    idle_seconds=COUNTERS,
    share=st.none() | st.floats(0, 1.5),
)
DEVICES = st.builds(
    DeviceFigures,
    uuid=st.sampled_from(["GPU-1", "GPU-2", "GPU-3", "gpu 0", ""]),
    index=st.integers(-1, 3),
    model=st.sampled_from([H100, "NVIDIA A30", ""]),
    instance=st.sampled_from(["", "", "1", "x"]),
    profile=st.sampled_from(["", "1g.10gb", "odd"]),
    utilization=RATIOS,
    measured=st.sampled_from([None, float("nan"), 1e18, -1.0]) | st.floats(0, 100),
    holders=st.lists(HOLDERS, max_size=3).map(tuple),
)
NAMESPACE_COUNTERS = st.builds(
    NamespaceCounters,
    namespace=NAMES,
    model=st.sampled_from([H100, "NVIDIA A30", f"{H100} MIG 1g.10gb"]),
    allocated_seconds=COUNTERS,
    busy_seconds=COUNTERS,
    energy_joules=st.sampled_from([None, float("nan"), float("inf"), 1e300, -5.0]) | st.floats(0, 1e6),
)


def node_readings(now: float = 0.0) -> st.SearchStrategy[NodeReading]:
    return st.builds(
        NodeReading,
        target=st.sampled_from(["t1", "t2", "t3", 't"4']),
        node=st.sampled_from(["n1", "n2", "10.0.0.1:9400", 'n"\n']),
        named=st.booleans(),
        devices=st.lists(DEVICES, max_size=4).map(tuple),
        namespaces=st.lists(NAMESPACE_COUNTERS, max_size=3).map(tuple),
        read_at=st.sampled_from([now, now - 1, now - 50, now - 400]),
        taken_at=st.sampled_from([None, 1.0]),
        skew_seconds=st.sampled_from([None, 0.0, 100.0, -1000.0]),
    )


def holdings(now: float = 0.0) -> st.SearchStrategy[ClusterReading]:
    """What is known of nodes and of who holds their GPUs."""
    return st.builds(
        ClusterReading,
        nodes=st.lists(node_readings(now), max_size=5).map(tuple),
        owners=st.dictionaries(st.tuples(NAMES, NAMES), st.builds(Owner, NAMES, NAMES), max_size=4),
        idle_for=st.dictionaries(
            st.tuples(st.just("GPU-1"), st.sampled_from(["", "1"])), st.floats(0, 1e5), max_size=2
        ),
    )


def readings(now: float = 0.0) -> st.SearchStrategy[ClusterReading]:
    """And what else there is to tell of a round."""
    return st.builds(
        replace,
        holdings(now),
        outcomes=st.lists(
            st.builds(
                TargetOutcome, st.sampled_from(["t1", "t2", "x\ny"]), st.just(0.1), st.sampled_from(["", "refused"])
            ),
            max_size=3,
        ).map(tuple),
        errors=st.dictionaries(st.tuples(NAMES, NAMES), st.integers(1, 5), max_size=3),
        rolling=st.none()
        | st.dictionaries(
            st.sampled_from([Scope("cluster"), Scope("node", node="n1"), Scope("other")]), st.floats(0, 1)
        ),
    )
