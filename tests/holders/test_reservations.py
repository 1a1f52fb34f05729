"""Tests KAI Scheduler and Run:ai, where the pods of a group hold the GPU of a reservation pod."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from podgpu.fleet.prices import Price, Prices
from podgpu.fleet.readings import NodeReading
from podgpu.fleet.view import View, make_view
from podgpu.kube.objects import ContainerRecord, PodRecord
from podgpu.metrics.adapter import node_from_samples, samples_in
from podgpu.model import Allocation, Assignment, NodeState, Workload
from podgpu.node.holders.annotations import find_reserved, replace_reservations
from podgpu.node.holders.reader import merge
from podgpu.past.bills.bill import RangeAnswer, RangeQuery
from podgpu.past.books.record import make_gpu_samples
from podgpu.past.books.recorder import HistoryRecorder
from podgpu.past.sqlite.sqlite_past import SqlitePast
from tests.fleet.states import state_of
from tests.holders.devices import gpu, uuid
from tests.nodes.node import node_of, read_description

NODES = Path(__file__).parents[1] / "nodes"
NODE = tuple(replace(gpu(number), memory_bytes=40_960 * 2**20) for number in range(3))
GROUP = "runai-gpu-group"
UUID = "run.ai/reserve_for_gpu_index"


def pod(
    name: str, labels: dict[str, str], annotations: dict[str, str] | None = None, **more: object
) -> PodRecord:
    values = {
        "containers": (ContainerRecord("main"),),
        "phase": "Running",
        "node": "node-1",
        **more,
    }
    pairs = {"labels": tuple(labels.items()), "annotations": tuple((annotations or {}).items())}
    return PodRecord("ml", name, f"u-{name}", **pairs, **values)  # type: ignore[arg-type]


def reservation(
    group: str, number: int | None = None, name: str = "gpu-reservation-1"
) -> PodRecord:
    annotations = {} if number is None else {UUID: uuid(number)}
    return pod(
        name, {GROUP: group}, annotations, containers=(ContainerRecord("resource-reservation"),)
    )


def listed(number: int, name: str = "gpu-reservation-1") -> dict[str, Allocation]:
    """Returns the allocation if the kubelet lists a reservation pod with GPU `number`."""
    holder = Workload("ml", name, "resource-reservation")
    return {"kubelet": Allocation((Assignment(uuid(number), holder, "kubelet", share=1.0),))}


def merged(readings: dict[str, Allocation], *pods: PodRecord) -> Allocation:
    return merge(replace_reservations(readings, pods, NODE, lambda workload: workload))


def shares(allocation: Allocation) -> list[tuple[str, str, str, float | None]]:
    return [
        (one.device, one.holder.pod, one.holder.container, one.share)
        for one in allocation.assignments
    ]


HALF = pod("a", {GROUP: "x"}, {"gpu-fraction": "0.5"})


def test_the_gpu_of_a_group() -> None:
    half = [(uuid(1), "a", "main", 0.5)]
    assert shares(merged(listed(1), reservation("x"), HALF)) == half
    assert shares(merged(listed(1), reservation("x", 2), HALF)) == half, (
        "the kubelet overrides the annotation"
    )
    assert shares(merged({}, reservation("x", 1), HALF)) == half, (
        "the annotation is used if there is no other source"
    )
    assert shares(merged(listed(1), reservation("x"))) == [], "a group without pods has no holder"
    assert shares(merged(listed(1), replace(reservation("x"), phase="Failed"), HALF)) == []


@pytest.mark.parametrize(
    ("annotations", "share"),
    [
        ({"gpu-fraction": "5e-1"}, 0.5),
        ({"gpu-fraction": "0"}, None),
        ({"gpu-fraction": "nan"}, None),
        (
            {"gpu-fraction": "half", "gpu-memory": "4096"},
            0.11,
        ),  # 4096 of 40,900 MiB, rounded up as KAI does
        ({"gpu-memory": "99999999"}, 1.0),
        ({"gpu-memory": "4Gi"}, None),
        ({}, None),
    ],
)
def test_shares(annotations: dict[str, str], share: float | None) -> None:
    (one,) = merged(listed(1), reservation("x"), pod("a", {GROUP: "x"}, annotations)).assignments
    assert one.share == share, "an unknown share must not become 1"


def test_the_container_with_the_gpu() -> None:
    containers = (ContainerRecord("proxy"), ContainerRecord("main", container_id="c"))
    named = pod("a", {GROUP: "x"}, {"gpu-fraction-container-name": "main"}, containers=containers)
    (one,) = merged(listed(1), reservation("x"), named).assignments
    assert one.holder == Workload("ml", "a", "main", "u-a", "c")
    for finished, count in ((False, 1), (True, 0)):
        init = (ContainerRecord("warm-up", finished=finished),)
        starting = pod(
            "a", {GROUP: "x"}, {"gpu-fraction-container-name": "warm-up"}, init_containers=init
        )
        assert len(merged(listed(1), reservation("x"), starting).assignments) == count


def test_pods_that_hold_nothing() -> None:
    pods = [replace(HALF, phase="Succeeded"), replace(HALF, phase="Failed"), replace(HALF, node="")]
    for one in pods:
        assert merged(listed(1), reservation("x"), one) == Allocation()
    (pending,) = merged(listed(1), reservation("x"), replace(HALF, phase="Pending")).assignments
    assert pending.holder.pod == "a"


def test_several_gpus_and_groups_that_cannot_be_mapped() -> None:
    readings = listed(0, "gpu-reservation-0") | {"podlist": listed(1)["kubelet"]}
    several = pod("a", {f"{GROUP}/{group}": group for group in "xyz"}, {"gpu-fraction": "0.4"})
    allocation = merged(
        readings, reservation("x", name="gpu-reservation-0"), reservation("y"), several
    )
    assert shares(allocation) == [(uuid(0), "a", "main", 0.4), (uuid(1), "a", "main", 0.4)]
    assert [(one.reason, one.device_id) for one in allocation.unmapped] == [("unknown_group", "z")]
    twice = merged(readings, reservation("x", name="gpu-reservation-0"), reservation("x"), HALF)
    assert (twice.assignments, [one.reason for one in twice.unmapped]) == ((), ["unknown_group"])


def test_without_the_api_server_the_gpu_is_reserved() -> None:
    allocation = merged(listed(1))
    assert allocation.assignments == ()
    assert find_reserved(allocation) == {uuid(1)}
    worker = Allocation((Assignment(uuid(1), Workload(uid="u"), "processes", share=0.25),))
    by_process = merged(listed(1) | {"processes": worker})
    assert [(one.holder.uid, one.share) for one in by_process.assignments] == [("u", 0.25)]
    assert find_reserved(by_process) == frozenset()
    by_hook = Allocation((Assignment(uuid(1), Workload("ml", "a", "main"), "podlist"),))
    (one,) = merged({"podlist": by_hook} | listed(1)).assignments
    assert (one.holder.pod, one.share) == ("a", None), (
        "the fraction of a pod on a reserved GPU is unknown"
    )
    similar = Allocation(
        (Assignment(uuid(1), Workload("ml", "gpu-reservation-x", "main"), "kubelet"),)
    )
    assert merged({"kubelet": similar}).assignments != ()


DCGM_EXPORTER = """
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-0",namespace="kai-resource-reservation",pod="gpu-reservation-9f8",container="resource-reservation"} 0
DCGM_FI_DEV_GPU_UTIL{gpu="1",UUID="GPU-1",namespace="runai-reservation",pod="runai-reservation-gpu-n-x7k2p",container="runai-reservation"} 40
DCGM_FI_DEV_GPU_UTIL{gpu="2",UUID="GPU-2",namespace="ml",pod="train",container="main"} 0
"""


def test_reservation_pods_in_the_metrics_of_dcgm_exporter() -> None:
    (state,) = node_from_samples(samples_in(DCGM_EXPORTER), "node-1")
    view, waste = view_of(state)
    totals = view.totals
    assert (totals.allocated, totals.used, totals.idle, totals.unknown) == (3.0, 1.0, 1.0, 1.0)
    assert [row.namespace for row in view.namespaces if row.namespace] == ["ml"]
    assert [row.pod for row in waste.rows] == ["train"]


# Objects of the scheduler on a simulated API server and kubelet


def read_states(scenario: str, folder: Path) -> list[NodeState]:
    """Returns the state of the node twice: from the agent, and parsed from its metrics."""
    with node_of(read_description(NODES / scenario), folder) as running:
        running.take_turns()
        text = running.agent.published.fresh.plain
        return [
            running.agent.published.state,
            *node_from_samples(samples_in(text.decode()), "node-1"),
        ]


def view_of(document: NodeState) -> tuple[View, RangeAnswer]:
    """Returns the view and the usage of a node. Checks that the shares on a GPU do not exceed 1."""
    reading = NodeReading(state=document, read_at=0.0, target="http://node-1:9400/metrics")
    state = state_of(reading, prices=Prices("EUR", {"*": Price(10.0)}))
    view = make_view(state)
    for device in view.nodes[0].gpus:
        assert sum(holder.part or 0 for holder in device.holders) <= 1
    recorder = HistoryRecorder(lambda: make_gpu_samples(state))
    recorder.record()
    past = SqlitePast(recorder, lambda: state)
    answer = asyncio.run(past.range(RangeQuery(order="wasted")))
    recorder.stop()
    return view, answer


@pytest.mark.parametrize(
    ("scenario", "allocated", "unknown", "free"),
    [("kai", 3.1, 0.0, 2.9), ("kai-no-api", 3.0, 2.0, 0.0)],
)
def test_the_cluster_view(
    folder: Path, scenario: str, allocated: float, unknown: float, free: float
) -> None:
    for document in read_states(scenario, folder):
        view, waste = view_of(document)
        totals = view.totals
        assert (totals.allocated, totals.unknown, totals.free) == (allocated, unknown, free)
        assert totals.cost_per_hour == pytest.approx(10 * allocated)
        names = [
            f"{holder.namespace}/{holder.pod}"
            for device in view.nodes[0].gpus
            for holder in device.holders
        ]
        names += [f"{row.namespace}/{row.pod}" for row in waste.rows] + [
            row.namespace for row in view.namespaces
        ]
        assert not any("reservation" in name for name in names)
        assert waste.rows
        assert all(row.pod for row in waste.rows)


def test_the_cost_of_shares_of_dra_claims(folder: Path) -> None:
    for document in read_states("dra-capacity", folder):
        view, _ = view_of(document)
        costs = {row.namespace: row.cost_per_hour for row in view.namespaces}
        assert costs == {"serving": 7.5, "notebooks": 13.0}, (
            "a sole holder without a limit has the whole GPU"
        )
        assert (view.totals.allocated, view.totals.free) == (2.05, 0.95)
