"""Division of GPUs among holders, the use of each share, and sums."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from podgpu.fleet.hold import measure_use
from podgpu.fleet.parts import Use, divide_device, divide_gpu, gpu_utilization
from podgpu.fleet.prices import Price, Prices
from podgpu.fleet.view import make_view
from podgpu.model import Condition, DeviceTotals
from tests.fleet.states import H100, gpu, holder, lost, mig, node, state_of


def test_shares_as_given_else_equal() -> None:
    def of(*shares: float | None) -> list[float]:
        return divide_device([holder(share=share) for share in shares])

    assert of(None) == [1.0]
    assert of(0.25) == [0.25]
    assert of(None, None, None) == [1 / 3] * 3
    assert of(0.5, None, None) == [0.5, 0.25, 0.25]
    assert of(1.0, 1.0) == [0.5, 0.5]
    assert of(1.0, None) == [1.0, 0.0]
    assert of(2.0, 1.0) == [0.5, 0.5], "nothing has more than the whole device"


def test_mig_instances_are_the_part_of_their_compute_slices() -> None:
    cut = gpu(0, instances=(mig(1, profile="3g.40gb"), mig(2), mig(3, profile="odd")))
    assert [part for _, part in divide_gpu(cut)] == pytest.approx([3 / 7, 1 / 7, 3 / 7, 0])
    a30 = gpu(0, model="NVIDIA A30", instances=(mig(1, profile="1g.6gb"),))
    assert [part for _, part in divide_gpu(a30)] == [0.25, 0.75]
    hidden = gpu(0, hidden=True, instances=(mig(1),))
    assert divide_gpu(hidden) == [(mig(1), 1 / 7)], "--devices excludes the GPU"
    assert divide_gpu(gpu(0, hidden=True)) == []


def test_utilisation_of_a_gpu_in_mig_mode_is_the_mean_by_size() -> None:
    cut = gpu(0, instances=(mig(1, profile="3g.40gb", busy=0.4), mig(2, busy=0.0), mig(3)))
    assert gpu_utilization(cut) == pytest.approx(0.3)
    hidden = replace(mig(4, busy=1.0), hidden=True)
    assert gpu_utilization(gpu(0, instances=(*cut.instances, hidden))) == pytest.approx(0.3)
    assert gpu_utilization(gpu(0, busy=0.5)) == 0.5


@given(st.lists(st.none() | st.floats(0, 1), max_size=20))
def test_no_more_is_given_out_than_there_is(wanted: list[float | None]) -> None:
    given_out = divide_device([holder(share=share) for share in wanted])
    assert all(part >= 0 for part in given_out)
    assert sum(given_out) <= 1 + 1e-9
    if None in wanted:
        assert sum(given_out) == pytest.approx(1)


@pytest.mark.parametrize(
    ("device", "usage", "use"),
    [
        (None, {"utilization_ratio": 0.5}, "used"),
        (0.5, {}, "used"),
        (0.5, {"utilization_ratio": 0.0, "idle_since": 5.0}, "idle"),
        (0.0, {"utilization_ratio": 0.0}, "idle"),
        (0.9, {"utilization_ratio": 0.0, "processes": 1}, "unknown"),
        (0.9, {"utilization_ratio": 0.0, "processes": 0}, "idle"),
        (None, {}, "unknown"),
        (None, {"processes": 0}, "idle"),
        (None, {"processes": 1}, "unknown"),
    ],
)
def test_use(device: float | None, usage: dict[str, Any], use: Use) -> None:
    assert measure_use(gpu(0, busy=device), holder(**usage)) == use


def test_a_gpu_that_cannot_be_seen_is_unknown_and_a_lost_one_is_held_by_those_it_was_given_to() -> (
    None
):
    user = holder("user", utilization_ratio=0.5)
    guest = type(user)("ml", "guest", "main", usage=user.usage)
    unreadable = (Condition("unreadable", 1.0),)
    state = state_of(
        node(
            "n1",
            lost(0, user, guest),
            lost(1, guest),
            gpu(2, user, guest, conditions=unreadable, busy=0.5),
        )
    )
    assert [(part.gpu.index, part.holder.pod, part.use) for part in state.nodes[0].held] == [
        (0, "user", "unknown"),
        (2, "user", "unknown"),
        (2, "guest", "unknown"),
    ]


def test_an_idle_client_of_mps_is_not_unknown() -> None:
    mps = DeviceTotals(method="mps")
    idle, unknown = holder("a", processes=1, idle_since=5.0), holder("b", processes=1)
    [entry] = state_of(node("n1", gpu(0, idle, unknown, busy=0.5, usage=mps))).nodes
    assert [(part.use, part.unknown_because) for part in entry.held] == [
        ("idle", ""),
        ("unknown", "not known under MPS"),
    ]


def test_a_holder_that_is_reported_twice_has_one_part() -> None:
    one = holder("a")
    [entry] = state_of(node("n1", gpu(0, one, one), gpu(1, one, holder("b"), one))).nodes
    assert [(part.holder.pod, part.share) for part in entry.held] == [
        ("a", 1.0),
        ("a", 0.5),
        ("b", 0.5),
    ]


def test_a_cluster_without_holders_costs_nothing() -> None:
    free = node("n1", gpu(0, busy=0.0))
    totals = make_view(state_of(free, prices=Prices("EUR", {H100: Price(2.0)}))).totals
    assert (totals.cost_per_hour, totals.wasted_per_hour) == (0.0, 0.0)
    totals = make_view(state_of(free)).totals
    assert (totals.cost_per_hour, totals.wasted_per_hour) == (None, None)
    held = node("n1", gpu(0, holder(), model="A30"))
    totals = make_view(state_of(held, prices=Prices("EUR", {H100: Price(2.0)}))).totals
    assert totals.cost_per_hour is None, "its model has no price"
