"""The JSON of /api/v1/view, of one pod and of one GPU. `top` decodes the same JSON."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podgpu.errors import Note, SourceError
from podgpu.fleet.prices import Price, Prices
from podgpu.fleet.settings import ViewSettings
from podgpu.fleet.state import ClusterState, build_single_node_state
from podgpu.fleet.view import (
    decode_details,
    decode_view,
    make_details,
    make_gpu_answer,
    make_pod,
    make_view,
    total_of,
)
from podgpu.model import (
    Condition,
    DeviceTotals,
    NamespaceUsage,
    NodeState,
    SourceStatus,
    Workload,
    WorkloadOwner,
    XidCount,
)
from podgpu.top.lines import make_lines
from tests.fleet.states import H100, WALL, World, gpu, holder, mig, node, state_of
from tests.fleet.test_state import READINGS

PRICES = Prices("EUR", {H100: Price(7.0)})


def view_json(state: ClusterState) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(msgspec.json.encode(make_view(state)))
    return document


@given(st.integers(1, 10**6), st.lists(st.integers(0, 1000), min_size=1, max_size=8).filter(any))
def test_the_watts_of_holders_do_not_exceed_those_of_their_gpu(
    power_mw: int, parts: list[int]
) -> None:
    holders = [holder(f"p{n}", power_ratio=part / sum(parts)) for n, part in enumerate(parts)]
    (shown,) = view_json(state_of(node("n1", gpu(0, *holders, power_mw=power_mw))))["nodes"][0][
        "gpus"
    ]
    assert round(sum(one["power_watts"] for one in shown["holders"]), 6) <= shown["power_watts"]


def test_a_node_with_everything() -> None:
    owners = {("ml", "train"): WorkloadOwner("Job", "train")}
    working = holder(
        share=0.5,
        utilization_ratio=0.25,
        memory_used_bytes=5,
        processes=1,
        busy_ns=2 * 10**9,
        energy_mj=1500,
    )
    device = gpu(
        0,
        working,
        busy=0.5,
        memory_total_bytes=100,
        power_mw=300_500,
        temperature_celsius=61,
        usage=DeviceTotals(memory_used_bytes=7, energy_mj=9000),
    )
    cut = gpu(1, instances=(mig(7, holder("m", utilization_ratio=0.0), busy=0.0),))
    broken = gpu(
        2,
        conditions=(Condition("lost", WALL - 5.4),),
        last_holders=(Workload("ml", "gone", "main"),),
    )
    state = state_of(node("n1", device, cut, broken, simulated=True), owners=owners, prices=PRICES)
    view = view_json(state)
    assert {
        name: view[name]
        for name in ("api", "scope", "taken_at", "simulated", "currency", "prices", "used_field")
    } == {
        "api": "podgpu/v1",
        "scope": "cluster",
        "taken_at": WALL,
        "simulated": True,
        "currency": "EUR",
        "prices": "file",
        "used_field": "DCGM_FI_DEV_MEM_COPY_UTIL",
    }
    assert (view["idle_after_seconds"], view["interval_seconds"]) == (1800.0, 15.0)
    assert view["totals"] == {
        "gpus": 3,
        "allocated": 0.6429,
        "used": 0.5,
        "idle": 0.1429,
        "unknown": 0.0,
        "free": 2.3571,
        "unheld_unknown": 0.0,
        "broken": 1,
        "power_watts": 300.5,
        "cost_per_hour": 4.5,
        "wasted_per_hour": 1.0,
        "waste": {
            "gpus": {"idle": 0.1429, "underused": 0.0, "unallocated": 2.3571},
            "cost_per_hour": {"idle": 1.0, "underused": 0.0, "unallocated": 16.5},
        },
    }
    one, two, three = view["nodes"][0]["gpus"]
    assert one == {
        "uuid": "GPU-0",
        "index": 0,
        "model": H100,
        "utilization_ratio": 0.5,
        "memory_used_bytes": 7,
        "memory_total_bytes": 100,
        "power_watts": 300.5,
        "temperature_celsius": 61.0,
        "energy_joules": 9.0,
        "price_per_hour": 7.0,
        "holders": [
            {
                "namespace": "ml",
                "pod": "train",
                "container": "main",
                "share_ratio": 0.5,
                "utilization_ratio": 0.25,
                "memory_used_bytes": 5,
                "processes": 1,
                "busy_seconds": 2.0,
                "energy_joules": 1.5,
                "owner": {"kind": "Job", "name": "train"},
                "cost_per_hour": 3.5,
                "part": 0.5,
                "use": "used",
                "waste": {"gpus": {"idle": 0.0}, "cost_per_hour": {"idle": 0.0}},
            }
        ],
        "waste": {
            "gpus": {"idle": 0.0, "unallocated": 0.5},
            "cost_per_hour": {"idle": 0.0, "unallocated": 3.5},
        },
    }
    (instance,) = two["instances"]
    assert {
        name: instance[name] for name in ("id", "profile", "slices", "gpu_slices", "price_per_hour")
    } == {
        "id": "7",
        "profile": "1g.10gb",
        "slices": 1,
        "gpu_slices": 7,
        "price_per_hour": 1.0,
    }
    assert instance["holders"][0]["idle_since"] == WALL
    assert (two["utilization_ratio"], "holders" in two) == (0.0, False)
    assert (three["absent"], three["last_holders"]) == (
        True,
        [{"namespace": "ml", "pod": "gone", "container": "main"}],
    )
    assert three["conditions"][0]["condition"] == "lost"
    assert three["conditions"][0]["since"] == round(WALL - 5.4)
    assert view["alerts"][0]["uuid"] == "GPU-2"
    assert view["notes"] == [view["alerts"][0]["text"]]


def test_namespaces_with_cost() -> None:
    state = state_of(
        node("n1", gpu(0, holder(), busy=0.9), gpu(1, holder("x", "web"))), prices=PRICES
    )
    ml, web = view_json(state)["namespaces"]
    assert ml == {
        "namespace": "ml",
        "allocated_gpus": 1.0,
        "used_gpus": 1.0,
        "idle_gpus": 0.0,
        "unknown_gpus": 0.0,
        "cost_per_hour": 7.0,
        "wasted_per_hour": 0.0,
        "waste": {"gpus": {"idle": 0.0}, "cost_per_hour": {"idle": 0.0}},
    }
    assert "used_gpus" not in web, "use is unknown"


def test_pods_on_mig_instances_without_labels_are_a_hint() -> None:
    for instances, is_hinted in (((mig(1, holder()),), True), ((), False)):
        view = make_view(state_of(node("n1", gpu(0, instances=instances))))
        assert ("labels" in [hint.missing for hint in view.setup]) is is_hinted


def test_a_condition_of_a_newer_version_is_an_alert_without_advice() -> None:
    state = state_of(node("n1", gpu(0, conditions=(Condition("fault_of_a_newer_version"),))))
    assert [alert.text for alert in state.alerts] == [
        "GPU 0 of node n1 (GPU-0): fault_of_a_newer_version"
    ]


def test_an_exporters_own_page() -> None:
    state = NodeState(
        node="n1", producer="podgpu", taken_at=WALL, devices=(gpu(0, holder(), busy=0.0),),
        namespaces=(NamespaceUsage("ml", H100, allocated_ns=36 * 10**11),),
    )  # fmt: skip
    own = ViewSettings(interval=30.0, idle_after=None)
    view = view_json(build_single_node_state(state, own, 5.0, WALL + 1))
    assert (view["scope"], view["taken_at"], view["totals"]["idle"]) == ("node", WALL, 1.0)
    assert view.keys().isdisjoint({"used_field", "idle_after_seconds", "currency", "simulated"})
    assert view["nodes"][0].keys() == {"name", "gpus"}
    stale = view_json(
        build_single_node_state(
            state, own, 5.0, WALL + 1, fresh=False, notes=[Note("a", "too old")]
        )
    )
    assert (stale["nodes"], stale["namespaces"]) == ([{"name": "n1", "old": True, "gpus": []}], [])
    assert stale["alerts"] == [{"severity": "broken", "text": "too old", "node": "n1"}]


def test_the_gpus_of_one_pod() -> None:
    cut = gpu(1, instances=(mig(1, holder("a"), holder("b")), mig(2, holder("b"))))
    state = state_of(
        node("n1", gpu(0, holder("b")), cut), node("n2", gpu(2, holder("c"))), prices=PRICES
    )
    found = make_pod(state, make_view(state), "ml", "a")
    assert found is not None
    answer = json.loads(msgspec.json.encode(found))
    (device,) = answer["nodes"][0]["gpus"]
    assert device.keys() == {"uuid", "index", "model", "instances"}
    assert [[h["pod"] for h in instance["holders"]] for instance in device["instances"]] == [
        ["a", "b"]
    ]
    assert answer["totals"]["allocated"] == pytest.approx(1 / 14, abs=1e-4)
    assert make_pod(state, make_view(state), "ml", "nobody") is None


def test_one_gpu_with_the_details_of_its_exporter() -> None:
    device = gpu(
        0, xids=(XidCount(31, 2, 5.0), XidCount(79, 1, 9.0)), usage=DeviceTotals(method="exact")
    )
    device = msgspec.structs.replace(
        device, fields={"DCGM_FI_DEV_GPU_UTIL": 5, "DCGM_FI_DRIVER_VERSION": "580"}
    )
    sources = (
        SourceStatus("nvml", up=True),
        SourceStatus("gpu1", up=False),
        SourceStatus("gpu0", False, error="hung"),
    )
    state = NodeState(node="n1", producer="podgpu", devices=(device,), sources=sources)
    details = make_details(state, "GPU-0", {155: 300.0}, 18)
    assert details.fields is not None
    values = {field.name: field.value for field in details.fields}
    assert {
        "DCGM_FI_DEV_GPU_UTIL": 5,
        "DCGM_FI_DEV_POWER_USAGE": 300.0,
        "nvlinks_up": 18,
    }.items() <= values.items()
    assert [xid.xid for xid in details.xids or ()] == [79, 31]
    assert [(source.source, source.ok) for source in details.sources] == [
        ("nvml", True),
        ("gpu0", False),
    ]
    assert decode_details(msgspec.json.encode(details)) == details
    view = make_view(state_of(node("n1", device)))
    answer = make_gpu_answer(view, "GPU-0")
    assert answer is not None
    assert (answer.node, answer.gpu.index) == ("n1", 0)
    assert make_gpu_answer(view, "GPU-9") is None


@given(st.lists(READINGS, max_size=4))
@settings(max_examples=30)
def test_what_is_written_can_be_decoded(readings: list[Any]) -> None:
    view = make_view(state_of(*readings, prices=PRICES))
    body = msgspec.json.encode(view)
    assert decode_view(body) == view
    assert b"null" not in body


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"api": "other"}', b"\xff", b'{"api": "podgpu/v1"}', b"[" * 9999]
)
def test_anything_else_is_refused(body: bytes) -> None:
    with pytest.raises(SourceError, match="is not a valid response of podgpu's /api/v1/view"):
        decode_view(body)


@given(st.lists(READINGS, max_size=4))
def test_numbers_that_are_shown_together_add_up(readings: list[Any]) -> None:
    view = view_json(state_of(*readings, prices=PRICES))
    gpus = [gpu for node in view["nodes"] for gpu in node["gpus"]]
    slots = [slot for gpu in gpus for slot in (gpu, *gpu.get("instances", ()))]
    for slot in slots:
        if "instances" in slot:
            continue  # the utilisation of the GPU is the mean of its instances
        for name in ("utilization_ratio", "memory_used_bytes"):
            parts = [holder[name] for holder in slot.get("holders", ()) if name in holder]
            assert sum(parts) <= slot.get(name, 0) + 1e-4 * len(parts)
    holders = [holder for slot in slots for holder in slot.get("holders", ())]
    totals, count = view["totals"], len(holders)
    for use in ("used", "idle", "unknown"):
        held = sum(holder["part"] for holder in holders if holder["use"] == use)
        assert held == pytest.approx(totals[use], abs=1e-4 * (count + 1))
        named = sum(namespace.get(f"{use}_gpus", 0) for namespace in view["namespaces"])
        nameless = sum(h["part"] for h in holders if h["use"] == use and "namespace" not in h)
        assert named + nameless == pytest.approx(held, abs=1e-4 * (count + 1))
    assert totals["used"] + totals["idle"] + totals["unknown"] == pytest.approx(
        totals["allocated"], abs=1e-9
    )
    unheld = totals["free"] + totals["unheld_unknown"]
    assert totals["allocated"] + unheld == pytest.approx(totals["gpus"], abs=1e-9)


def test_a_gpu_that_may_be_in_use_is_not_free() -> None:
    world, memory = World(), {"memory_used_bytes": 2**30}
    one = node("n1", gpu(0, holder(share=0.5, utilization_ratio=0.5), busy=0.5), gpu(1, busy=0.0))
    two = node(
        "n2", gpu(2, busy=0.3), gpu(3, **memory), gpu(4, busy=0.0, **memory), gpu(5), read_at=100.0
    )
    totals = total_of(world.round(one, two))
    assert (totals.gpus, totals.allocated, totals.free, totals.unheld_unknown) == (6, 0.5, 3.5, 2.0)
    gone = world.round(two, at=100.0)
    totals = total_of(gone)
    assert (totals.gpus, totals.allocated, totals.free, totals.unheld_unknown) == (6, 0.5, 2.0, 3.5)
    remarks = [line.remark for line in make_lines(make_view(gone), WALL + 100.0)]
    assert [remark.replace("1 holder", "held") for remark in remarks] == [
        "held",
        *["holder unknown"] * 3,
        "-",
        "-",
    ]
