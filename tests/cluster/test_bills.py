"""Usage and cost of namespaces, computed from counters that restart, disappear and return."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.cluster.bills import BillKey, BillLedger, BillTotals, CostKey
from podgpu.cluster.collect import NodeReading
from podgpu.cluster.prices import NO_PRICES, Price, Prices
from podgpu.model import NamespaceUsage
from tests.cluster.states import H100, World, gpu, node

S = 10**9
ML = BillKey("ml", H100)


def reading(at: float, seconds: float | None, exporter: str = "x", name: str = "n1", **more: Any) -> NodeReading:
    """`seconds`: allocated to namespace ml; half of them busy, a joule per second."""
    used = () if seconds is None else (
        NamespaceUsage("ml", H100, "", round(seconds * S), round(seconds * S / 2), round(seconds * 1000)),
    )  # fmt: skip
    return node(name, gpu(0), read_at=at, exporter_id=exporter, namespaces=used, **more)


class Ledger:
    def __init__(self, prices: Prices = NO_PRICES) -> None:
        self.world, self.ledger, self.prices = World(), BillLedger(), prices

    def round(self, *readings: NodeReading, at: float) -> BillTotals:
        state = self.world.round(*readings, at=at, prices=self.prices)
        self.ledger.update(state, readings, at)
        return self.ledger.totals()

    def seconds(self, *readings: NodeReading, at: float) -> float:
        return (self.round(*readings, at=at).amounts[ML][0] or 0) / S


def test_growth_counts_and_the_past_does_not() -> None:
    ledger = Ledger()
    assert ledger.round(reading(0, 100), at=0).amounts == {ML: (0, 0, 0)}
    assert ledger.round(reading(15, 110), at=15).amounts == {ML: (10 * S, 5 * S, 10_000)}


def test_an_exporter_that_was_restarted_counts_from_zero() -> None:
    ledger = Ledger()
    ledger.round(reading(0, 100), at=0)
    assert ledger.seconds(reading(15, 5, "y"), at=15) == 5
    assert ledger.seconds(reading(30, 12, "y"), at=30) == 12
    old = Ledger()
    old.round(reading(0, 100, ""), at=0)
    assert old.seconds(reading(15, 5, ""), at=15) == 5, "an older podgpu has no exporter_id: the counter decreased"


def test_another_exporter_that_ran_before_has_a_baseline() -> None:
    ledger = Ledger()
    ledger.round(reading(0, 100), at=0)
    assert ledger.seconds(reading(15, 5000, "y"), at=15) == 0
    assert ledger.seconds(reading(30, 5010, "y"), at=30) == 10


def test_a_second_exporter_takes_over_from_where_its_counters_stood() -> None:
    ledger = Ledger()
    for at, one, two in ((0, 100, 10), (15, 110, 20)):
        first, second = reading(at, one, "x", target="http://a"), reading(at, two, "y", target="http://b")
        seconds = ledger.seconds(first, second, at=at)
    assert seconds == 10
    assert (
        ledger.seconds(reading(15, 110, "x", target="http://a"), reading(90, 30, "y", target="http://b"), at=90) == 20
    )


def test_namespaces_that_are_new_and_nodes_that_come_back() -> None:
    ledger = Ledger()
    ledger.round(reading(0, None), at=0)
    assert ledger.seconds(reading(15, 8), at=15) == 8
    ledger.round(reading(30, None), at=30)
    assert ledger.seconds(reading(45, 9), at=45) == 9
    ledger.round(at=60)
    assert ledger.seconds(reading(400, 300), at=400) == 300
    ledger.round(at=100_000)
    assert ledger.seconds(reading(200_000, 90_000), at=200_000) == 300, "away for more than a day"


def test_costs_at_the_price_of_their_time() -> None:
    ledger = Ledger(Prices("EUR", {H100: Price(3600.0, 3600.0)}))
    ledger.round(reading(0, 0), at=0)
    ledger.round(reading(15, 10), at=15)
    ledger.prices = Prices("EUR", {H100: Price(7200.0)})
    costs = ledger.round(reading(30, 20), at=30).costs
    assert costs[CostKey("ml", "allocated", "EUR")] == pytest.approx(10 + 20)
    assert costs[CostKey("ml", "used", "EUR")] == pytest.approx(15)
    assert costs[CostKey("ml", "energy", "EUR")] == pytest.approx(10 / 1000)
    ledger.prices = Prices("USD", {"*": Price(kwh=1.0)})
    totals = ledger.round(reading(45, 30), at=45)
    assert totals.unpriced == {H100: 10}
    assert totals.costs[CostKey("ml", "allocated", "EUR")] == pytest.approx(30)


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.integers(0, 50), st.integers(0, 3)), min_size=1, max_size=12))
def test_sums_never_decrease_and_older_readings_change_nothing(rounds: list[tuple[str, int, int]]) -> None:
    ledger, last = Ledger(), 0.0
    for number, (exporter, seconds, late) in enumerate(rounds):
        at = 15.0 * number
        total = ledger.seconds(reading(at - 15.0 * late, seconds, exporter), at=at)
        assert total >= last
        last = total
