"""Waste has three parts that do not overlap: idle, under-used and unallocated. Every surface shows
the same ones.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.charge import UNALLOCATED, Charge, HeldTime, UsageAccount, Waste, charge, charge_rest
from podgpu.fleet.parts import WasteRate
from podgpu.fleet.prices import Price, Prices
from podgpu.fleet.readings import NodeReading
from podgpu.fleet.view import GpuView, make_view
from podgpu.model import NS, Holder
from podgpu.past.bills.bill import RangeQuery, make_range
from podgpu.past.books.record import make_gpu_samples
from tests.fleet.states import H100, World, gpu, holder, mig, node, series, value

PRICES = Prices("EUR", {H100: Price(7.0)})
TIMES = st.floats(0.0, 100.0)
KINDS = ("idle", "underused", "unallocated")


@given(st.lists(st.tuples(TIMES, TIMES, TIMES), max_size=4), st.sampled_from([1.0, 0.25]))
def test_the_parts_of_waste_are_within_the_capacity(
    holders: list[tuple[float, float, float]], size: float
) -> None:
    used = []
    for idle, underused, busy in holders:
        time = HeldTime(60.0, 1 / len(holders), busy, idle=idle, underused=underused)
        used.append(charge(time, size, 5.0))
    allocated = sum(amounts.allocated_seconds for amounts in used)
    rest = charge_rest(60.0, size, allocated, 5.0)
    assert allocated + rest.allocated_seconds == pytest.approx(60.0 * size)
    for amounts in used:
        wasted = amounts.idle_seconds + amounts.underused_seconds
        assert wasted <= amounts.allocated_seconds + 1e-9
        assert amounts.idle_cost + amounts.underused_cost <= amounts.cost + 1e-9
        assert amounts.underused_cost * 3600 / 5.0 == pytest.approx(
            amounts.underused_seconds / size, abs=1e-9
        )
        assert amounts.counted_seconds == pytest.approx(amounts.allocated_seconds)


def test_an_idle_holder_is_not_under_used_too() -> None:
    amounts = charge(HeldTime(60.0, 0.5, idle=60.0, underused=30.0), 1.0, 3600.0)
    assert (amounts.idle_seconds, amounts.underused_seconds) == (30.0, 0.0)
    amounts = charge(HeldTime(60.0, 0.5, idle=20.0, underused=15.0), 1.0, 3600.0)
    assert (amounts.idle_cost, amounts.underused_cost, amounts.cost) == (10.0, 15.0, 30.0)


def test_under_used_time_that_is_not_counted_is_unknown() -> None:
    amounts = charge(HeldTime(60.0, 1.0, busy=20.0, idle=0.0), 1.0, 3600.0)
    assert (amounts.underused_seconds, amounts.counted_seconds) == (0.0, 0.0)


# Now


def _rounds(*ends: DeviceArgs, seconds: float = 10.0, **more: Any) -> World:
    """Runs two rounds. Each argument: a GPU's holders in the last round."""
    world = World()
    for at in (0.0, seconds):
        devices = []
        for index, holders in enumerate(ends):
            devices.append(gpu(index, *(one(at) for one in holders), busy=0.5 if holders else 0.0))
        world.round(node("n1", *devices, read_at=at, exporter_id="a"), at=at, prices=PRICES, **more)
    return world


class _Worker:
    """A holder whose under-used time grows by this part of the time."""

    def __init__(self, pod: str, share: float, underused: float | None) -> None:
        self.pod = pod
        self.share = share
        self.underused = underused

    def __call__(self, at: float) -> Holder:
        wasted = None if self.underused is None else round(self.underused * at * NS)
        own: dict[str, Any] = {} if wasted is None else {"wasted_underused_ns": wasted}
        busy = round(0.5 * at * NS)
        return holder(
            self.pod, share=self.share, utilization_ratio=0.5, busy_ns=busy, idle_ns=0, **own
        )


DeviceArgs = tuple[_Worker, ...]


def test_the_view_has_the_parts_of_each_holder_gpu_namespace_and_in_total() -> None:
    world = _rounds((_Worker("a", 0.5, 0.2), _Worker("b", 0.5, 0.1)), ())
    assert world.state is not None
    view = make_view(world.state)
    shared, free = view.nodes[0].gpus
    first, second = (one.waste for one in shared.holders)
    assert first == WasteRate(Waste(0.0, 0.2), Waste(0.0, 1.4))
    assert second == WasteRate(Waste(0.0, 0.1), Waste(0.0, 0.7))
    assert shared.waste == WasteRate(Waste(0.0, 0.3, 0.0), Waste(0.0, 2.1, 0.0))
    assert free.waste == WasteRate(Waste(unallocated=1.0), Waste(unallocated=7.0))
    assert view.namespaces[0].waste == WasteRate(Waste(0.0, 0.3), Waste(0.0, 2.1))
    assert view.totals.waste == WasteRate(Waste(0.0, 0.3, 1.0), Waste(0.0, 2.1, 7.0))


def test_an_exporter_that_does_not_count_under_used_time() -> None:
    world = _rounds((_Worker("a", 1.0, None),))
    assert world.state is not None
    assert make_view(world.state).totals.waste == WasteRate(
        Waste(idle=0.0, unallocated=0.0), Waste(idle=0.0, unallocated=0.0)
    )


def test_without_a_new_reading_the_waste_of_the_last_one_is_shown() -> None:
    world = World()
    worker = _Worker("a", 1.0, 0.3)
    # As with --prometheus, if a round is shorter than the interval of scrapes.
    for at, read_at in ((0.0, 0.0), (10.0, 10.0), (20.0, 10.0)):
        held = gpu(0, worker(read_at), busy=0.5)
        entry = node("n1", held, read_at=read_at, exporter_id="a")
        state = world.round(entry, at=at, prices=PRICES)
    waste = make_view(state).totals.waste
    assert waste is not None
    assert waste.gpus == Waste(0.0, 0.3, 0.0)
    [part] = state.nodes[0].held
    assert part.spent is None, "nothing is charged twice"


def test_under_used_time_is_at_most_the_share() -> None:
    world = _rounds((_Worker("a", 0.5, 0.9),))
    assert world.state is not None
    waste = make_view(world.state).totals.waste
    assert waste is not None
    assert waste.gpus == Waste(0.0, 0.5, 0.5)


def test_a_holder_whose_use_is_unknown_wastes_nothing() -> None:
    state = World().round(node("n1", gpu(0, holder())), prices=PRICES)
    [device] = make_view(state).nodes[0].gpus
    assert device.holders[0].use == "unknown"
    assert device.holders[0].waste is None
    assert device.waste == WasteRate(Waste(unallocated=0.0), Waste(unallocated=0.0))


def test_a_gpu_that_may_be_in_use_is_not_unallocated() -> None:
    state = World().round(node("n1", gpu(0, busy=0.7)), prices=PRICES)
    view = make_view(state)
    assert (view.totals.unheld_unknown, view.totals.waste) == (1.0, None)
    assert view.nodes[0].gpus[0].waste is None


def test_unallocated_mig_instances() -> None:
    cut = gpu(0, instances=(mig(1, holder(share=1.0), busy=0.5), mig(2, busy=0.0)))
    state = World().round(node("n1", cut), prices=PRICES)
    waste = make_view(state).totals.waste
    assert waste is not None
    assert waste.gpus.unallocated == pytest.approx(6 / 7, abs=1e-4)
    assert waste.cost_per_hour is not None
    assert waste.cost_per_hour.unallocated == pytest.approx(6.0, abs=1e-3)


_USES = st.sampled_from([0.0, 0.5, None])
_DEVICES = st.lists(st.lists(_USES, max_size=3), max_size=4)


def _parts(waste: WasteRate | None) -> Waste:
    return Waste() if waste is None else waste.gpus


@given(_DEVICES)
def test_the_parts_of_all_gpus_are_those_of_the_totals(devices: list[list[float | None]]) -> None:
    gpus = []
    for index, uses in enumerate(devices):
        holders = []
        for number, use in enumerate(uses):
            own: dict[str, Any] = {} if use is None else {"utilization_ratio": use}
            holders.append(holder(f"p{index}-{number}", share=0.3, **own))
        gpus.append(gpu(index, *holders, busy=max((use or 0.0 for use in uses), default=0.0)))
    view = make_view(World().round(node("n1", *gpus), prices=PRICES))

    shown: list[GpuView] = [device for one in view.nodes for device in one.gpus]
    for kind in KINDS:
        whole = getattr(_parts(view.totals.waste), kind) or 0.0
        assert sum(getattr(_parts(one.waste), kind) or 0.0 for one in shown) == pytest.approx(
            whole, abs=1e-3
        )
    assert (_parts(view.totals.waste).idle or 0.0) == pytest.approx(view.totals.idle, abs=1e-3)
    unallocated = _parts(view.totals.waste).unallocated or 0.0
    assert unallocated == pytest.approx(view.totals.free, abs=1e-3)


def test_the_metrics_have_the_same_parts_as_the_view() -> None:
    world = _rounds((_Worker("a", 0.5, 0.2),), ())
    state = world.state
    assert state is not None
    assert series(state, "podgpu_waste_gpus") == {
        (("kind", "idle"), ("namespace", "ml")): 0.0,
        (("kind", "underused"), ("namespace", "ml")): pytest.approx(0.2),
        (("kind", "unallocated"),): 1.5,
    }
    cost = "podgpu_waste_cost_per_hour"
    assert value(state, cost, kind="unallocated", currency="EUR") == 10.5
    assert value(state, cost, kind="underused", currency="EUR", namespace="ml") == pytest.approx(
        1.4
    )


def test_the_new_and_the_old_name_of_long_idle_gpus() -> None:
    world = World()
    for at in (0.0, 3600.0):
        idle = gpu(0, holder(utilization_ratio=0.0), busy=0.0)
        state = world.round(node("n1", idle, read_at=at), at=at)
    for name in ("podgpu_namespace_long_idle_gpus", "podgpu_namespace_idle_gpus"):
        assert value(state, name, namespace="ml", model=H100) == 1


# A period


def _read(at: float, underused_ns: int | None) -> NodeReading:
    own: dict[str, Any] = {} if underused_ns is None else {"wasted_underused_ns": underused_ns}
    one = holder(
        "a", share=0.5, utilization_ratio=0.3, busy_ns=round(at * NS / 4), idle_ns=0, **own
    )
    return node("n1", gpu(0, one, busy=0.3), gpu(1, busy=0.0), read_at=at, exporter_id="a")


@pytest.mark.parametrize("counts", [True, False])
def test_the_bill_of_the_recorder_has_the_parts(counts: bool) -> None:
    world = World()
    charges: list[Charge] = []
    for at in (0.0, 15.0, 30.0):
        reading = _read(at, round(at * NS / 5) if counts else None)
        state = world.round(reading, at=at, prices=PRICES)
        for record in make_gpu_samples(state):
            charges += record.charges
    answer = make_range(RangeQuery(), (0.0, 30.0), charges, PRICES, {})
    total = answer.totals.waste
    assert total is not None
    hour = 1 / 3600
    assert total.hours.unallocated == pytest.approx(45 * hour, abs=1e-4)
    assert total.hours.underused == (pytest.approx(6 * hour, abs=1e-4) if counts else None)
    assert total.unknown_hours == (None if counts else pytest.approx(15 * hour, abs=1e-4))
    assert answer.totals.cost == pytest.approx(60 * hour * 7, abs=1e-3)
    assert total.cost is not None
    assert answer.totals.unallocated_cost == total.cost.unallocated

    held, free = answer.rows
    assert held.waste is not None
    assert held.waste.hours.unallocated is None
    assert free.unallocated
    assert free.waste is not None
    assert free.waste.cost is not None
    assert free.waste.cost == Waste(unallocated=free.cost)
    assert free.wasted == 0.0, "`wasted` keeps its meaning: cost of idle hours"


def test_a_busy_gpu_that_nobody_holds_is_paid_for_and_not_wasted_now_and_in_the_bill() -> None:
    """The page's figures of now, times half a minute, are those of the bill."""
    world = World()
    charges: list[Charge] = []
    for at in (0.0, 15.0, 30.0):
        reading = node(
            "n1", gpu(0, busy=0.7), gpu(1, busy=0.0), gpu(2, busy=0.0), read_at=at, exporter_id="a"
        )
        state = world.round(reading, at=at, prices=PRICES)
        for record in make_gpu_samples(state):
            charges += record.charges
    now = make_view(state).totals
    assert now.waste is not None
    assert now.waste.cost_per_hour is not None
    assert now.unheld_cost_per_hour == 7.0
    busy, _, _ = make_view(state).nodes[0].gpus
    assert (busy.waste, busy.unheld_cost_per_hour) == (None, 7.0)

    hour = 30 / 3600
    answer = make_range(RangeQuery(), (0.0, 30.0), charges, PRICES, {})
    totals = answer.totals
    assert totals.waste is not None
    assert totals.waste.cost is not None
    assert totals.unheld_hours == pytest.approx(hour, abs=1e-4)
    assert totals.waste.hours.unallocated == pytest.approx(2 * hour, abs=1e-4)
    wasted = now.waste.cost_per_hour.total * hour
    assert totals.waste.cost.total == pytest.approx(wasted, abs=1e-3)
    whole = (now.waste.cost_per_hour.unallocated or 0.0) + now.unheld_cost_per_hour
    assert totals.cost == pytest.approx(whole * hour, abs=1e-3)
    [note] = [note for note in answer.notes if "in use" in note]
    assert "not counted as wasted" in note
    [row] = answer.rows
    assert row.unallocated
    assert row.unheld_hours == totals.unheld_hours
    assert row.cost == totals.cost


@pytest.mark.parametrize("prices", [PRICES, Prices("", {})])
def test_rows_are_sorted_by_all_that_they_waste(prices: Prices) -> None:
    charges = []
    usage = ("idle", 50.0, 0.0), ("underused", 10.0, 70.0), ("well", 0.0, 5.0)
    for pod, idle, underused in usage:
        time = HeldTime(100.0, 1.0, 20.0, idle=idle, underused=underused)
        amounts = charge(time, 1.0, 3600.0 if prices is PRICES else None)
        account = UsageAccount("ml", pod)
        currency = "EUR" if prices is PRICES else ""
        charges.append(Charge(account, amounts=amounts, currency=currency))
    answer = make_range(RangeQuery(order="wasted"), (0.0, 100.0), charges, prices, {})
    assert [row.pod for row in answer.rows] == ["underused", "idle", "well"]


@given(
    st.lists(st.tuples(st.booleans(), st.booleans(), TIMES, TIMES, TIMES), min_size=1, max_size=6)
)
def test_the_parts_of_the_rows_add_up_to_the_totals(
    usage: list[tuple[bool, bool, float, float, float]],
) -> None:
    charges = []
    for number, (is_held, is_used, idle, underused, busy) in enumerate(usage):
        if is_held:
            time = HeldTime(100.0, 0.5, busy, idle=idle, underused=underused)
            account = UsageAccount("ml", f"pod-{number}")
            amounts = charge(time, 1.0, 7.0)
        else:
            account = UNALLOCATED
            amounts = charge_rest(100.0, 1.0, busy, 7.0, is_used)
        charges.append(Charge(account, amounts=amounts, currency="EUR"))
    answer = make_range(RangeQuery(), (0.0, 100.0), charges, PRICES, {})
    if answer.totals.waste is None:
        return
    for unit in ("hours", "cost"):
        for kind in KINDS:
            whole = getattr(getattr(answer.totals.waste, unit), kind) or 0.0
            rows = [getattr(row.waste, unit) for row in answer.rows if row.waste is not None]
            parts = sum(getattr(row, kind) or 0.0 for row in rows)
            assert parts == pytest.approx(whole, abs=1e-3)
    cost = answer.totals.waste.cost
    assert cost is not None
    wasted = sum(part for part in (cost.idle, cost.underused, cost.unallocated) if part)
    assert wasted <= (answer.totals.cost or 0.0) + 1e-3
