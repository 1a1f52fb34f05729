"""Tests OTLP metrics: names, attributes and values, decoded with OpenTelemetry's own messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from podgpu.metrics.conditions import conditions
from podgpu.metrics.encode import families_in
from podgpu.metrics.otlp import PushedNode, encode_metrics, find_state
from podgpu.metrics.parse import parse_text
from podgpu.model import Condition, DeviceState, NodeState, WorkloadOwner
from tests.metrics.otlp import Point, decode_metrics
from tests.nodes.node import Node, node_of, read_description

NODES = Path(__file__).parents[1] / "nodes"
MIG = "MIG-aaaaaaa0-1111-2222-3333-444444444444"
NOW = 1_800_000_000.0
GPU = "GPU-00000000-1111-2222-3333-444444444444"


@pytest.fixture(params=["usage-time-sliced"])
def node(folder: Path, request: pytest.FixtureRequest) -> Iterator[Node]:
    with node_of(read_description(NODES / request.param), folder) as built:
        built.take_turns()
        yield built


def encode(*nodes: PushedNode, **attributes: str) -> list[Point]:
    return decode_metrics(b"".join(encode_metrics(nodes, attributes, NOW, kubernetes=True)))


def points_of(node: Node) -> list[Point]:
    return encode(PushedNode(node.agent.published.state))


def select(points: list[Point], metric: str, **attributes: Any) -> list[Point]:
    wanted = {name.replace("_", "."): value for name, value in attributes.items()}
    return [p for p in points if p.metric == metric and wanted.items() <= p.attributes.items()]


def text_values(node: Node, name: str) -> dict[tuple[str, str], float]:
    """Returns the values in Prometheus' text by pod and kind of waste."""
    values: dict[tuple[str, str], float] = {}
    for family in parse_text(node.agent.published.fresh.plain.decode()):
        if family.name == name:
            for sample in family.samples:
                key = sample.labels["pod"], sample.labels.get("kind", "")
                values[key] = sample.value
    return values


@pytest.mark.parametrize("node", ["usage-time-sliced", "usage-mig"], indirect=True)
def test_containers_have_the_values_of_prometheus(node: Node) -> None:
    points = points_of(node)
    compared = 0
    for spec in families_in("exporter").values():
        if spec.part != "holder_usage" or "{kind}" in spec.member:
            continue
        left_out = ("total", "seconds", "bytes", "ratio", "joules")
        words = [word for word in spec.name.split("_") if word not in left_out]
        own = {p.attributes["k8s.pod.name"]: p.value for p in select(points, ".".join(words))}
        expected = {pod: value for (pod, _), value in text_values(node, spec.name).items()}
        assert own == pytest.approx(expected), spec.name
        compared += len(own)
    assert compared > 10


def test_waste_has_its_kinds(node: Node) -> None:
    points = select(points_of(node), "podgpu.container.gpu.wasted")
    own = {(p.attributes["k8s.pod.name"], p.attributes["kind"]): p.value for p in points}
    assert own == pytest.approx(text_values(node, "podgpu_container_gpu_wasted_seconds_total"))
    assert {kind for _, kind in own} == {"idle", "underused"}


def test_parts_sum_to_the_whole(node: Node) -> None:
    points = points_of(node)
    parts = sum(p.value for p in select(points, "podgpu.container.gpu.energy"))
    rest = sum(p.value for p in select(points, "podgpu.device.unattributed.energy"))
    whole = sum(p.value for p in select(points, "hw.energy"))
    assert whole > 0
    assert parts + rest == pytest.approx(whole)


def test_counters_are_cumulative_since_the_time_at_which_they_were_0(node: Node) -> None:
    points = points_of(node)
    started = node.clock.wall() - (node.description.usage_turns - 1)
    busy = select(points, "podgpu.container.gpu.busy")
    assert busy
    for point in [*busy, *select(points, "hw.energy")]:
        assert point.kind == "counter"
        assert point.since == pytest.approx(started, abs=0.01)
        assert point.at == pytest.approx(node.clock.wall(), abs=1.0)
    for point in points:
        assert point.kind == "counter" or point.since is None


def test_units_are_not_part_of_the_name(node: Node) -> None:
    units = {p.metric: (p.unit, p.kind) for p in points_of(node)}
    assert units["podgpu.container.gpu.busy"] == ("s", "counter")
    assert units["podgpu.container.gpu.energy"] == ("J", "counter")
    assert units["podgpu.container.gpu.memory.used"] == ("By", "updowncounter")
    assert units["podgpu.container.gpu.utilization"] == ("1", "gauge")
    assert units["podgpu.namespace.gpu.busy"] == ("s", "counter")
    assert units["hw.gpu.memory.limit"] == ("By", "updowncounter")
    assert units["hw.power"] == ("W", "gauge")
    # The hardware metrics have these values.
    assert "podgpu.device.energy" not in units
    assert "podgpu.device.memory.used" not in units


def test_containers_have_the_attributes_of_kubernetes_and_of_their_gpu(node: Node) -> None:
    state = node.agent.published.state
    holder = next(h for h in state.devices[0].holders if h.pod)
    owners = {holder.pod_name: WorkloadOwner("Deployment", "web")}
    points = encode(PushedNode(state, "east", owners), **{"deployment.environment": "test"})
    [point] = select(points, "podgpu.container.gpu.busy", k8s_pod_name=holder.pod)
    assert point.attributes == {
        "hw.id": state.devices[0].uuid,
        "hw.name": "nvidia0",
        "hw.model": state.devices[0].model,
        "hw.vendor": "NVIDIA",
        "k8s.namespace.name": holder.namespace,
        "k8s.pod.name": holder.pod,
        "k8s.pod.uid": holder.uid,
        "k8s.container.name": holder.container,
        "container.id": holder.container_id,
        "k8s.deployment.name": "web",
    }
    assert point.resource["host.name"] == point.resource["k8s.node.name"] == state.node
    assert point.resource["k8s.cluster.name"] == "east"
    assert point.resource["deployment.environment"] == "test"
    assert point.resource["service.name"] == "podgpu"


def test_what_is_known_of_the_node_replaces_attributes_of_the_user(node: Node) -> None:
    attributes = {"host.name": "elsewhere", "service.name": "gpus"}
    points = encode(PushedNode(node.agent.published.state), **attributes)
    assert points[0].resource["host.name"] == node.agent.published.state.node
    assert points[0].resource["service.name"] == "gpus"


@pytest.mark.parametrize("node", ["usage-mig"], indirect=True)
def test_mig_instances_have_their_own_id_and_a_parent(node: Node) -> None:
    points = points_of(node)
    [busy] = select(points, "podgpu.container.gpu.busy", k8s_pod_name="train")
    assert busy.attributes["hw.id"] == MIG
    assert busy.attributes["hw.parent"] == GPU
    assert {p.attributes["hw.id"] for p in select(points, "hw.energy")} == {GPU}


@pytest.mark.parametrize("node", ["faulty"], indirect=True)
def test_absent_is_not_zero(node: Node) -> None:
    points = points_of(node)
    ids = [f"GPU-0000000{index}-1111-2222-3333-444444444444" for index in range(6)]
    measured = {p.attributes["hw.id"] for p in select(points, "hw.power")}
    assert ids[0] in measured
    # GPU 1 is lost, GPU 2 hangs, and GPU 3 reports no power.
    assert not measured & set(ids[1:4])
    states = {
        p.attributes["hw.id"]: p.attributes["hw.state"]
        for p in select(points, "hw.status")
        if p.value == 1
    }
    assert states[ids[0]] == states[ids[1]] == "failed"
    assert states[ids[3]] == "ok"
    for id in states:
        own = select(points, "hw.status", hw_id=id)
        assert sum(p.value for p in own) == 1
        assert len(own) == 4


@pytest.mark.parametrize("node", ["faulty"], indirect=True)
def test_xids_are_errors_since_the_start_of_the_exporter(node: Node) -> None:
    errors = {p.attributes["error.type"]: p for p in select(points_of(node), "hw.errors")}
    values = {name: p.value for name, p in errors.items()}
    assert values == {"xid_31": 2, "xid_79": 1, "uncorrected": 0}
    assert errors["uncorrected"].since is None
    # XIDs may come between two readings of the GPUs.
    assert errors["xid_79"].at == NOW
    assert errors["uncorrected"].at == pytest.approx(node.agent.published.state.taken_at)
    started = node.agent.published.state.counted_since
    assert errors["xid_79"].since == pytest.approx(started, abs=0.01)
    assert errors["xid_79"].attributes["hw.type"] == "gpu"


def test_a_node_without_readings_has_no_request() -> None:
    state = NodeState(producer="podgpu", node="gpu-1")
    assert list(encode_metrics([PushedNode(state)], {}, NOW, kubernetes=True)) == []


def make_gpu(*names: str, detail: str = "", healthy: tuple[str, ...] = ()) -> DeviceState:
    found = tuple(Condition(name, 1.0, detail) for name in names)
    return DeviceState(uuid="GPU-1", conditions=found, healthy=healthy)


@pytest.mark.parametrize(
    ("gpu", "state"),
    [
        (make_gpu(), ""),
        (make_gpu(healthy=("ecc",)), "ok"),
        (make_gpu("unallocated_use"), "ok"),
        (make_gpu("thermal"), "degraded"),
        (make_gpu("nvlink", "row_remap_pending"), "predicted_failure"),
        (make_gpu("thermal", "lost"), "failed"),
        (make_gpu("xid", detail="79"), "failed"),
        (make_gpu("xid", detail="43"), "degraded"),
        (make_gpu("xid", detail="43,79"), "failed"),
        (make_gpu("xid"), "failed"),
        (make_gpu("recovery_action", detail="reset"), "failed"),
        (make_gpu("unreadable"), "failed"),
        (make_gpu("ecc"), "failed"),
        (make_gpu("row_remap_failure"), "failed"),
        (make_gpu("power_brake"), "degraded"),
        (make_gpu("nvlink"), "degraded"),
        (make_gpu("recurring"), "predicted_failure"),
        (make_gpu("kubernetes_unhealthy"), "ok"),
        (make_gpu("of_a_newer_version"), "failed"),
    ],
)
def test_state_of_a_gpu(gpu: DeviceState, state: str) -> None:
    assert find_state(gpu) == state


def test_every_condition_has_a_state() -> None:
    for name, spec in conditions().items():
        assert (find_state(make_gpu(name)) == "ok") == (spec.of != "gpu")


def test_a_state_is_known_if_podgpu_has_read_the_gpu() -> None:
    """The cluster view does not keep which conditions are absent."""
    read = DeviceState(uuid="GPU-1", index=0, fields={"DCGM_FI_DEV_ENC_UTIL": 40})
    hung = DeviceState(uuid="GPU-2", index=1)
    state = NodeState(producer="podgpu", node="gpu-1", taken_at=NOW, devices=(read, hung))
    points = encode(PushedNode(state))
    states = {p.attributes["hw.id"]: p.attributes["hw.state"] for p in points if p.value == 1}
    assert states == {"GPU-1": "ok"}
    assert {p.attributes["hw.id"] for p in select(points, "hw.status")} == {"GPU-1"}
    [encoder] = select(points, "hw.gpu.utilization", hw_gpu_task="encoder")
    assert encoder.value == 0.4
    other = NodeState(producer="dcgm-exporter", node="gpu-1", taken_at=NOW, devices=(read,))
    assert select(encode(PushedNode(other)), "hw.status") == []


def test_the_cluster_of_the_user_stays_if_no_other_is_known(node: Node) -> None:
    nodes = PushedNode(node.agent.published.state)
    points = encode(nodes, **{"k8s.cluster.name": "west"})
    assert {point.resource["k8s.cluster.name"] for point in points} == {"west"}


@pytest.mark.parametrize("node", ["usage-time-sliced", "usage-mig", "faulty"], indirect=True)
def test_no_attribute_is_empty(node: Node) -> None:
    points = points_of(node)
    assert points
    for point in points:
        assert all([*point.attributes.values(), *point.resource.values()])


def test_usage_without_a_time_is_left_out(node: Node) -> None:
    state = replace(node.agent.published.state, usage_at=None)
    metrics = {point.metric for point in encode(PushedNode(state))}
    assert "hw.power" in metrics
    assert not any(name.startswith("podgpu.") for name in metrics)
