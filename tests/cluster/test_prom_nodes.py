"""Whose sample is it: holders and not the exporter's own pod, nodes and not addresses, one copy of each."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.cluster.prom.layouts import AllSeries, Round
from podgpu.cluster.prom.nodes import nodes_of
from podgpu.cluster.prom.targets import Targets, targets_of, with_own_holder
from podgpu.cluster.reading import NodeReading
from podgpu.figures.from_exposition import NODE_LABELS
from podgpu.metrics.fields import field_named
from podgpu.metrics.parse import ParsedSample

_FIELD = field_named("DCGM_FI_DEV_MEM_COPY_UTIL")
assert _FIELD is not None
NOW = Round(at=5000.0, at_monotonic=100.0, node_labels=NODE_LABELS, used_field=_FIELD)
TARGET = {"job": "dcgm", "instance": "10.0.0.1:9400"}
EXPORTER = {"namespace": "monitoring", "pod": "exporter-1", "container": "exporter"}
HELD = {"namespace": "research", "pod": "train", "container": "main"}


def util(value: float = 50, uuid: str = "GPU-1", **labels: str) -> ParsedSample:
    return ParsedSample("DCGM_FI_DEV_GPU_UTIL", TARGET | {"UUID": uuid, "gpu": "0"} | labels, value)


def up(**labels: str) -> ParsedSample:
    return ParsedSample("up", TARGET | labels, 1.0)


def time_of(at: float, **labels: str) -> ParsedSample:
    return ParsedSample("", TARGET | labels, at)


def read(
    samples: Iterable[ParsedSample], ups: Iterable[ParsedSample] = (), times: Iterable[ParsedSample] = ()
) -> tuple[NodeReading, ...]:
    targets = targets_of(ups, NODE_LABELS)
    return nodes_of(AllSeries.of(samples, targets), targets.times(times), targets, NOW)


def holders(node: NodeReading) -> list[tuple[str, str]]:
    return [(of.holder.namespace, of.holder.pod) for device in node.devices for of in device.holders]


@pytest.mark.parametrize(
    ("labels", "ups", "expected"),
    [
        (HELD, [], [("research", "train")]),
        (HELD, [up(**EXPORTER)], [("research", "train")]),
        (EXPORTER, [up(**EXPORTER)], []),
        (EXPORTER | {f"exported_{k}": v for k, v in HELD.items()}, [], [("research", "train")]),
        ({"pod_name": "train", "pod_namespace": "research"}, [up(**EXPORTER)], [("research", "train")]),
        (EXPORTER | {"pod_name": "train", "pod_namespace": "research"}, [up(**EXPORTER)], [("research", "train")]),
        ({"pod": "exporter-1"}, [up(pod="exporter-1")], []),
        (EXPORTER | {"container": "main"}, [up(**EXPORTER)], []),
    ],
)
def test_whose_pod_it_is(labels: dict[str, str], ups: list[ParsedSample], expected: list[tuple[str, str]]) -> None:
    (node,) = read([util(**labels)], ups)
    assert holders(node) == expected


def test_figures_that_are_made_up_say_so() -> None:
    for source, simulated in (("simulated", True), ("nvml", False)):
        up_of_source = ParsedSample("podgpu_exporter_source_up", TARGET | {"source": source}, 1.0)
        (node,) = read([util(), up_of_source])
        assert node.simulated is simulated


def test_what_other_series_tell_of_the_exporters_pod() -> None:
    """`up` may be missing, as behind a federation."""
    held = EXPORTER | {f"exported_{name}": value for name, value in HELD.items()}
    (node,) = read([util(**EXPORTER), util(uuid="GPU-2", **held)])
    assert holders(node) == [("research", "train")]
    on_itself = ParsedSample("podgpu_exporter_build_info", TARGET | EXPORTER, 1.0)
    (node,) = read([util(**EXPORTER), on_itself])
    assert holders(node) == []


LABELS = st.dictionaries(
    st.sampled_from([*HELD, *(f"exported_{name}" for name in HELD), "UUID"]), st.sampled_from("abc"), max_size=7
)


@given(LABELS, st.frozensets(st.tuples(st.sampled_from(["", *"abc"]), st.sampled_from(["", *"abc"])), max_size=4))
def test_the_exporters_pod_is_never_a_holder(labels: dict[str, str], own: frozenset[tuple[str, str]]) -> None:
    found = with_own_holder(labels, own)
    assert not any(name.startswith("exported_") for name in found) or found is labels
    if "exported_pod" in labels:
        assert found.get("pod") == labels["exported_pod"]
    elif "exported_namespace" not in labels and "pod" in found:
        assert (labels.get("namespace", ""), labels["pod"]) not in own
    assert found.get("UUID") == labels.get("UUID")


def test_a_series_without_a_name_belongs_to_the_node_of_its_target() -> None:
    """podgpu_allocation_info has no Hostname, and Prometheus' label `node` may call it otherwise."""
    place = TARGET | {"node": "ip-10-0-0-1", "UUID": "GPU-1", "gpu": "0"}
    held = ParsedSample("podgpu_allocation_info", place | HELD, 1.0)
    counter = ParsedSample("podgpu_namespace_gpu_busy_seconds_total", TARGET | {"namespace": "research"}, 9.0)
    (node,) = read([util(Hostname="node-1", node="ip-10-0-0-1"), held, counter])
    assert (node.node, node.named, holders(node)) == ("node-1", True, [("research", "train")])
    assert [(c.namespace, c.busy_seconds) for c in node.namespaces] == [("research", 9.0)]


def test_one_target_may_tell_of_several_nodes() -> None:
    held = ParsedSample("podgpu_allocation_info", TARGET | {"UUID": "GPU-2", "gpu": "0"} | HELD, 1.0)
    found = {node.node: node for node in read([util(Hostname="a"), util(uuid="GPU-2", Hostname="b"), held])}
    assert {name: holders(node) for name, node in found.items()} == {"a": [], "b": [("research", "train")]}


def test_an_instance_keeps_its_profile() -> None:
    mig = {"GPU_I_ID": "1", "GPU_I_PROFILE": "1g.10gb"}
    engine = ParsedSample("DCGM_FI_PROF_GR_ENGINE_ACTIVE", TARGET | {"UUID": "GPU-1"} | mig, 0.5)
    held = ParsedSample("podgpu_allocation_info", TARGET | {"UUID": "GPU-1", "GPU_I_ID": "1", "gpu": "0"} | HELD, 1.0)
    for samples in ([engine, held], [held, engine]):
        (node,) = read(samples)
        assert [(d.instance, d.profile, d.utilization) for d in node.devices] == [("1", "1g.10gb", 0.5)]


# Copies


COPIES = [up(replica="r0"), up(replica="r1")]


def test_the_newest_copy_wins() -> None:
    samples = [util(90, replica="r0"), util(5, replica="r1")]
    for newest, expected in ((("r0", "r1"), 0.9), (("r1", "r0"), 0.05)):
        times = [time_of(4990, replica=newest[0]), time_of(4970, replica=newest[1])]
        (node,) = read(samples, COPIES, times)
        assert [device.utilization for device in node.devices] == [expected]
        assert node.read_at == 90.0


def test_of_equally_new_copies_the_higher_counts() -> None:
    (node,) = read([util(5, replica="r0"), util(90, replica="r1")], COPIES)
    assert [device.utilization for device in node.devices] == [0.9]


def test_counters_of_copies_count_once() -> None:
    counters = [
        ParsedSample(
            "podgpu_namespace_gpu_busy_seconds_total", TARGET | {"namespace": "n", "replica": replica}, seconds
        )
        for replica, seconds in (("r0", 10.0), ("r1", 25.0))
    ]
    samples = [util(replica="r0"), util(replica="r1"), *counters]
    (node,) = read(samples, COPIES, [time_of(4970, replica="r0"), time_of(4990, replica="r1")])
    assert [c.busy_seconds for c in node.namespaces] == [25.0]


def test_the_same_address_in_two_clusters_is_two_nodes() -> None:
    ups = [up(cluster="a"), up(cluster="b")]
    nodes = read([util(Hostname="n1", cluster="a"), util(uuid="GPU-2", Hostname="n1", cluster="b")], ups)
    assert sorted(device.uuid for node in nodes for device in node.devices) == ["GPU-1", "GPU-2"]


def test_labels_in_which_copies_differ() -> None:
    ups = [up(replica="r0", zone="z"), up(replica="r1", zone="z"), up(replica="r0", instance="other", zone="y")]
    assert targets_of(ups).copy_labels == ("replica",)
    assert targets_of([up(), up(pod="a", namespace="b")]) == Targets(
        {("dcgm", "10.0.0.1:9400"): frozenset({("b", "a")})}, ()
    )


# Age


def test_age_and_clock() -> None:
    taken = ParsedSample("podgpu_exporter_snapshot_timestamp_seconds", TARGET, 5100.0)
    (node,) = read([util(), taken], times=[time_of(4940)])
    assert (node.read_at, node.taken_at, node.skew_seconds) == (40.0, 5100.0, 160.0)


def test_a_sample_of_the_future_is_of_now() -> None:
    (node,) = read([util()], times=[time_of(6000)])
    assert node.read_at == NOW.at_monotonic


@given(st.lists(st.tuples(LABELS, st.sampled_from(["a", "b"]), st.floats(0, 100)), max_size=8))
def test_any_labels_make_nodes_with_every_device_once(series: list[tuple[dict[str, str], str, float]]) -> None:
    samples = [
        ParsedSample("DCGM_FI_DEV_GPU_UTIL", TARGET | labels | {"Hostname": host}, value)
        for labels, host, value in series
    ]
    nodes = read(samples, [up(**EXPORTER)])
    assert {node.node for node in nodes} == {host for _, host, _ in series}
    for node in nodes:
        keys = [device.key for device in node.devices]
        assert len(keys) == len(set(keys))
        assert all(device.node == node.node for device in node.devices)
