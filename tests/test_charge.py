"""The formula of the bill: its sums, and equal results of the recorder and of the exporter's
counters.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.charge import (
    AMOUNTS,
    Amounts,
    Figures,
    HeldTime,
    Tokens,
    UsageAccount,
    Waste,
    charge,
    charge_rest,
)
from podgpu.fleet.prices import Price, Prices
from podgpu.model import NS
from podgpu.past.bills.bill import RangeRow
from podgpu.past.books.record import make_gpu_samples
from tests.fleet.states import World, gpu, holder, node

PRICES = Prices("EUR", {"*": Price(1.0)})
SECONDS = st.floats(0, 3600)
TIMES = st.builds(HeldTime, SECONDS, st.floats(0, 1), *[st.none() | SECONDS] * 5, SECONDS)


def test_each_amount_of_a_measured_time() -> None:
    """Half of an eighth of a GPU, for 40 s of which 8 s were idle, at 9 per hour."""
    time = HeldTime(
        40.0, 0.5, busy=16.0, busy_min=12.0, busy_max=24.0, idle=8.0, waited=4.0, joules=7.0
    )
    assert charge(time, 0.125, 9.0) == Amounts(
        allocated_seconds=2.5,
        idle_seconds=0.5,
        cost=0.05,
        idle_cost=0.01,
        measured_seconds=2.5,
        busy_seconds=2.0,
        busy_min_seconds=1.5,
        busy_max_seconds=3.0,
        energy_joules=7.0,
        waited_seconds=0.5,
    )


def test_unknown_values_are_0_except_the_busy_time_that_is_possible() -> None:
    assert charge(HeldTime(40.0, 0.5), 1.0, None) == Amounts(20.0, busy_max_seconds=40.0)
    idle = Amounts(20.0, 5.0, measured_seconds=5.0, busy_max_seconds=30.0)
    assert charge(HeldTime(40.0, 0.5, idle=10.0), 1.0, None) == idle
    assert charge(HeldTime(40.0, 0.5, idle=99.0), 1.0, None).idle_seconds == 20.0
    assert charge(HeldTime(0.0), 1.0, 9.0) == Amounts()
    assert charge_rest(60.0, 0.0, 0.0, 9.0) == Amounts()


def test_figures_of_two_containers_are_added_and_unknown_ones_are_left_out() -> None:
    own, other = Figures(0.25, 100.0, None, None), Figures(0.5, None, 300.0, None)
    assert own.plus(other) == Figures(0.75, 100.0, 300.0, None)


@given(TIMES, st.floats(0, 1), st.none() | st.floats(0, 100))
def test_idle_is_a_part_of_what_is_allocated(
    time: HeldTime, size: float, price: float | None
) -> None:
    amounts = charge(time, size, price)
    assert amounts.idle_seconds <= amounts.allocated_seconds
    assert amounts.idle_cost <= amounts.cost
    assert amounts.measured_seconds <= amounts.allocated_seconds
    assert amounts.busy_max_seconds >= amounts.busy_seconds


@given(st.lists(st.floats(0, 1), max_size=5), st.floats(0.01, 1), st.floats(0, 100))
def test_holders_and_rest_pay_for_the_whole_device(
    shares: list[float], size: float, price: float
) -> None:
    shares = [share / max(1.0, sum(shares)) for share in shares]
    held = [charge(HeldTime(60.0, share), size, price) for share in shares]
    rest = charge_rest(60.0, size, sum(one.allocated_seconds for one in held), price)
    assert sum(one.allocated_seconds for one in (*held, rest)) == pytest.approx(60.0 * size)
    assert sum(one.cost for one in (*held, rest)) == pytest.approx(price / 60)


def test_all_amounts_of_a_measured_holder() -> None:
    """A third of a GPU for an hour, of which the holder used the MIG instance for 20 minutes."""
    time = HeldTime(3600.0, 0.5, 1200.0, 1000.0, 1500.0, 600.0, 60.0, 5000.0)
    assert charge(time, 0.25, 8.0) == pytest.approx(
        Amounts(
            allocated_seconds=450.0,
            idle_seconds=75.0,
            cost=4.0,
            idle_cost=8.0 * 0.5 / 6,
            measured_seconds=450.0,
            busy_seconds=300.0,
            busy_min_seconds=250.0,
            busy_max_seconds=375.0,
            energy_joules=5000.0,
            waited_seconds=15.0,
        )
    )


def test_only_idle_time_is_measured_if_the_busy_time_is_unknown() -> None:
    amounts = charge(HeldTime(60.0, idle=20.0), 1.0, None)
    expected = Amounts(60.0, 20.0, measured_seconds=20.0, busy_max_seconds=40.0)
    assert amounts == pytest.approx(expected)


def test_an_unmeasured_holder_may_have_been_busy_all_the_time() -> None:
    assert charge(HeldTime(60.0), 1.0, None) == Amounts(60.0, busy_max_seconds=60.0)


def test_what_is_under_used_is_at_most_the_share_that_is_not_idle() -> None:
    """Half of a quarter of a GPU for 80 s: 40 s of the share, of which 10 s were idle."""
    time = HeldTime(80.0, 0.5, busy=8.0, idle=20.0, underused=12.0)
    amounts = charge(time, 0.25, 3600.0)
    assert amounts.underused_seconds == 3.0
    assert amounts.underused_cost == 12.0
    assert amounts.counted_seconds == 10.0

    too_much = charge(time._replace(underused=99.0), 0.25, 3600.0)
    assert too_much.underused_seconds == 7.5

    unknown = charge(time._replace(underused=None), 0.25, 3600.0)
    assert unknown.underused_seconds == unknown.underused_cost == unknown.counted_seconds == 0.0


def test_tokens_are_charged_to_the_time_of_the_share() -> None:
    amounts = charge(HeldTime(80.0, 0.5, tokens=Tokens(300.0, 20.0)), 0.25, None)
    assert (amounts.prompt_tokens, amounts.generated_tokens) == (300.0, 20.0)
    assert amounts.token_seconds == 10.0
    assert charge(HeldTime(80.0), 1.0, None).token_seconds == 0.0
    assert Tokens(300.0, 20.0).plus(Tokens(1.0, 2.0)) == Tokens(301.0, 22.0)


def test_a_rest_without_a_price_has_no_cost() -> None:
    assert charge_rest(60.0, 1.0, 20.0, None) == Amounts(40.0)
    assert charge_rest(60.0, 1.0, 20.0, 3600.0) == Amounts(40.0, cost=40.0)


def test_unknown_parts_of_waste_stay_unknown() -> None:
    waste = Waste(idle=4.0, unallocated=1.0)
    assert waste.total == 5.0
    assert Waste(underused=2.0).total == 2.0
    assert waste.plus(Waste(idle=1.0)) == Waste(idle=5.0, unallocated=1.0)
    assert waste.times(3.0) == Waste(idle=12.0, unallocated=3.0)


def test_an_account_has_an_owner_only_if_its_name_is_known() -> None:
    assert UsageAccount(owner_kind="Deployment").owner is None
    owner = UsageAccount(owner_kind="Deployment", owner_name="llm").owner
    assert owner is not None
    assert (owner.kind, owner.name) == ("Deployment", "llm")


def test_nothing_is_left_if_holders_had_more_than_the_device() -> None:
    assert charge_rest(60.0, 1.0, 60.5, 2.0) == Amounts()
    assert charge_rest(60.0, 0.0, 0.0, 2.0) == Amounts()
    assert sum(Amounts()) == 0.0


def test_unknown_values_of_two_containers_stay_unknown_only_if_both_are() -> None:
    one = Figures(0.25, None, 100.0)
    other = Figures(0.5, 7.0)
    assert one.plus(other) == Figures(0.75, 7.0, 100.0, None)
    assert other.plus(one) == one.plus(other)


@pytest.mark.parametrize(("on", "off"), [(1, 1), (2, 8), (5, 10), (7, 13), (30, 30)])
def test_the_recorder_charges_the_idle_time_that_the_exporter_counts(on: int, off: int) -> None:
    """The node reads every second and the cluster every 15 s, so a holder may work and rest several
    times between.
    """
    world = World()
    total, busy, idle, since = Amounts(), 0, 0, 0.0
    for second in range(1, 601):
        is_on = (second - 1) % (on + off) < on
        busy, idle, since = (
            (busy + 1, idle, 0.0) if is_on else (busy, idle + 1, since or second - 1.0)
        )
        if second % 15 == 0:
            counters: dict[str, Any] = {
                "busy_ns": busy * NS,
                "idle_ns": idle * NS,
                "utilization_ratio": float(is_on),
            }
            own = holder(idle_since=None if is_on else 1_700_000_100.0 + since, **counters)
            one = gpu(0, own, busy=float(is_on))
            state = world.round(
                node("n1", one, read_at=float(second), exporter_id="a"),
                at=float(second),
                prices=Prices("EUR", {"*": Price(1)}),
            )
            if second == 15:
                first = idle
            for sample in make_gpu_samples(state):
                for part in sample.charges:
                    total = total.plus(part.amounts)
    assert total.idle_seconds == pytest.approx(idle - first)
    assert total.idle_cost == pytest.approx((idle - first) / 3600)


def test_the_table_lists_each_amount_once_in_the_order_of_its_field() -> None:
    assert tuple(amount.field for amount in AMOUNTS) == Amounts._fields
    rows = [(one.column, one.counter + one.matcher, one.key, one.cell) for one in AMOUNTS]
    for names in zip(*rows, strict=True):
        given = [name for name in names if name]
        assert len(given) == len(set(given))


def test_each_key_of_an_amount_is_in_the_rows_of_the_bill() -> None:
    assert {amount.key for amount in AMOUNTS if amount.key} <= set(RangeRow.__struct_fields__)
