"""Bills from counters that begin anew, vanish, come back and come twice: nothing is lost, nothing billed twice."""

from __future__ import annotations

import pickle
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podgpu.cluster.bills import MOST_ACCOUNTS, NS, Amounts, BillLedger
from podgpu.cluster.reading import ClusterReading, NamespaceCounters, NodeReading
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.view import ClusterView, Memory, assemble
from podgpu.figures.prices import Price, Prices
from tests.cluster.view_readings import H100, WALL, all_series, gpu, node, node_readings, series, text_of, value

ALLOCATED = "podgpu_cluster_namespace_gpu_allocated_seconds_total"
BUSY = "podgpu_cluster_namespace_gpu_busy_seconds_total"
ENERGY = "podgpu_cluster_namespace_gpu_energy_joules_total"
ML = {"namespace": "ml", "model": H100}
PRICES = Prices("EUR", {H100: Price(Fraction(2), Fraction("0.25"))})


def told(name: str, allocated: float | None, at: float = 0.0, namespace: str = "ml", **more: object) -> NodeReading:
    counters = (
        () if allocated is None else (NamespaceCounters(namespace, H100, allocated, allocated / 2, allocated * 300),)
    )
    uuid = str(more.pop("uuid", f"GPU-{name}"))
    return node(name, gpu(0, uuid=uuid), read_at=at, namespaces=counters, **more)  # type: ignore[arg-type]


class World:
    """Rounds at the times given."""

    def __init__(self, prices: Prices = PRICES, most_accounts: int = MOST_ACCOUNTS) -> None:
        self.memory = Memory(bills=BillLedger(most_accounts))
        self.prices = prices

    def turn(self, *nodes: NodeReading, at: float) -> ClusterView:
        return assemble(ClusterReading(nodes), self.memory, ViewSettings(), at, WALL + at, prices=self.prices)

    def bill(self, *nodes: NodeReading, at: float, of: str = "ml") -> float | None:
        return value(self.turn(*nodes, at=at), ALLOCATED, namespace=of, model=H100)


def test_what_was_used_before_the_start_is_not_billed() -> None:
    world = World()
    assert world.bill(told("n1", 1000), at=0) == 0
    assert world.bill(told("n1", 1015, 15), told("n2", 500, 15), at=15) == 15
    assert world.bill(told("n1", 1030, 30), told("n2", 510, 30), at=30) == 40


def test_all_three_counters() -> None:
    world = World()
    world.turn(told("n1", 1000), at=0)
    view = world.turn(told("n1", 1010, 15), at=15)
    assert [value(view, name, **ML) for name in (ALLOCATED, BUSY, ENERGY)] == [10, 5, 3000]


def test_an_exporter_that_begins_anew() -> None:
    world = World()
    world.turn(told("n1", 1000), at=0)
    assert world.bill(told("n1", 4, 15), at=15) == 4
    assert world.bill(told("n1", 19, 30), at=30) == 19


def test_a_namespace_that_is_new_on_a_known_node_counts_from_nothing() -> None:
    world = World()
    world.turn(told("n1", 1000), at=0)
    assert world.bill(told("n1", 7, 15, namespace="new"), at=15, of="new") == 7


def test_series_and_nodes_that_vanish_and_come_back() -> None:
    world = World()
    world.turn(told("n1", 1000), at=0)
    assert world.bill(told("n1", None, 15), at=15) == 0  # an exporter whose figures are too old tells none
    assert world.bill(told("n1", 1030, 30), at=30) == 30
    assert world.bill(at=3600) == 30
    assert world.bill(told("n1", 5000, 7200), at=7200) == 4000


def test_a_node_that_was_away_for_a_day_begins_anew() -> None:
    world = World()
    world.turn(told("n1", 1000), told("n2", 0), at=0)
    world.turn(told("n2", 0, 86_401), at=86_401)
    assert world.bill(told("n1", 90_000, 86_416), told("n2", 5, 86_416), at=86_416) == 5


def test_counters_that_were_only_not_read_at_first_are_not_taken_for_new() -> None:
    world = World()
    world.turn(told("n1", None), at=0)
    assert world.bill(told("n1", 1_000_000, 15), at=15) == 0
    assert world.bill(told("n1", 1_000_015, 30), at=30) == 15
    young = World()
    young.turn(told("n1", None), at=0)
    assert young.bill(told("n1", 12, 15), at=15) == 12


def test_an_exporter_with_nothing_to_say_yet_is_not_known() -> None:
    world = World()
    world.turn(node("n1"), at=0)
    assert world.bill(told("n1", 50, 15), at=15) == 0


# Twice


def test_one_exporter_under_two_addresses_of_a_named_node() -> None:
    world = World()
    for at in range(0, 300, 15):
        older = told("n1", 1000 + at, at, target="http://10.0.0.1")
        newer = told("n1", 1000 + at + 0.5, at + 0.5, target="http://n1")
        bill = world.bill(*((older, newer) if at % 2 else (newer, older)), at=at + 1)
    assert bill == 285


def test_one_exporter_under_two_addresses_without_a_name() -> None:
    world = World()
    for at in range(0, 300, 15):
        nodes = [told(name, 1000 + at, at, named=False, uuid="GPU-1") for name in ("10.0.0.1", "fd00::1")]
        bill = world.bill(*nodes, at=at)
    assert bill == 285


def test_the_other_address_takes_over_and_gives_back() -> None:
    """Whichever is heard of, an hour is an hour."""
    world = World()
    for at in range(0, 3600, 15):
        named = told("n1", 1000 + at, at if at < 600 or at > 2400 else 600, uuid="GPU-1")
        address = told("10.0.0.1", 1000 + at, at, named=False, uuid="GPU-1")
        heard = [named] if at < 300 else [address] if 900 < at <= 2400 else [named, address]
        bill = world.bill(*heard, at=at)
    assert bill == pytest.approx(3585, abs=45)
    assert bill <= 3585


def test_two_exporters_of_a_node_that_do_not_agree() -> None:
    world = World()
    for at in range(0, 150, 15):
        first = told("n1", 1000 + at, min(at, 60), target="a")
        second = told("n1", 9000 + at, at - 0.25, target="b")
        bill = world.bill(first, second, at=at + 1)
    assert 120 <= bill <= 135  # type: ignore[operator]


def test_an_exporter_that_comes_back_at_another_address() -> None:
    world = World()
    world.turn(told("n1", 1000, target="http://10.0.0.1"), at=0)
    assert world.bill(told("n1", 6, 15, target="http://10.0.0.2"), at=15) == 6
    same = World()
    same.turn(told("n1", 1000, target="http://10.0.0.1"), at=0)
    assert same.bill(told("n1", 1015, 15, target="http://10.0.0.2"), at=15) == 15


def test_addresses_that_turn_out_to_be_two_nodes() -> None:
    world = World()
    world.turn(told("a", 1000, named=False, uuid="GPU-1"), told("b", 1000, named=False, uuid="GPU-1"), at=0)
    apart = [told("a", 1015, 15, named=False, uuid="GPU-1"), told("b", 80_000, 15, named=False, uuid="GPU-2")]
    assert world.bill(*apart, at=15) == 15


# Costs


def test_costs_at_the_price_of_their_time() -> None:
    world = World()
    world.turn(told("n1", 0), at=0)
    world.turn(told("n1", 3600, 15), at=15)
    world.prices = Prices("EUR", {H100: Price(Fraction(10), None)})
    view = world.turn(told("n1", 7200, 30), at=30)
    costs = {dict(labels)["kind"]: cost for labels, cost in series(view, "podgpu_namespace_cost_total").items()}
    assert costs == {"allocated": 12.0, "used": 6.0, "energy": 0.075}


def test_a_cost_is_there_from_the_start() -> None:
    view = World().turn(told("n1", 1000), at=0)
    assert value(view, "podgpu_namespace_cost_total", namespace="ml", kind="used", currency="EUR") == 0


def test_another_currency_is_another_series() -> None:
    world = World()
    world.turn(told("n1", 0), at=0)
    world.turn(told("n1", 3600, 15), at=15)
    world.prices = Prices("USD", {"*": Price(Fraction(3))})
    view = world.turn(told("n1", 7200, 30), at=30)
    found = {currency: value(view, "podgpu_namespace_cost_total", namespace="ml", kind="allocated", currency=currency)
             for currency in ("EUR", "USD")}  # fmt: skip
    assert found == {"EUR": 2.0, "USD": 3.0}


def test_a_model_without_a_price_is_seen() -> None:
    world = World(Prices("EUR", {"NVIDIA A30": Price(Fraction(1))}))
    world.turn(told("n1", 0), at=0)
    view = world.turn(told("n1", 60, 15), at=15)
    assert "podgpu_namespace_cost_total{" not in text_of(view)
    assert value(view, "podgpu_cluster_unpriced_gpu_seconds_total", model=H100) == 60
    assert view.notes == (f"--prices has no price for {H100}: in no cost; add it to the file",)


def test_without_prices_there_are_no_costs() -> None:
    world = World(Prices())
    world.turn(told("n1", 0), at=0)
    text = text_of(world.turn(told("n1", 60, 15), at=15))
    assert "cost" not in text
    assert "unpriced" not in text


def test_a_million_small_amounts_add_up() -> None:
    """Floats would not: 0.1 is none."""
    world = World()
    for tick in range(2000):
        view = world.turn(told("n1", tick / 10, tick), at=tick)
    assert view.bills["ml", H100] == Amounts(199_900_000_000, 99_950_000_000, 59_970_000)
    assert world.memory.costs.totals()[("ml", "allocated", "EUR")] == float(Fraction(1999, 10) * 2 / 3600)  # type: ignore[index]


# Whatever comes


@given(
    st.lists(
        st.tuples(st.sampled_from([1.0, 15.0, 400.0, 90_000.0]), st.lists(node_readings(), max_size=5)), max_size=6
    )
)
@settings(max_examples=60)
def test_no_counter_ever_goes_down(rounds: list[tuple[float, list[NodeReading]]]) -> None:
    memory, now = Memory(), 0.0
    before: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    counters = (ALLOCATED, BUSY, ENERGY, "podgpu_namespace_cost_total", "podgpu_cluster_unpriced_gpu_seconds_total")
    for seconds, nodes in rounds:
        now += seconds
        later = tuple(NodeReading(n.target, n.node, n.named, n.devices, n.namespaces, n.read_at + now) for n in nodes)
        view = assemble(ClusterReading(later), memory, ViewSettings(), now, WALL + now, prices=PRICES)
        told = all_series(view)
        after = {(name, labels): v for name in counters for labels, v in told[name].items()}
        assert before.keys() <= after.keys()
        assert all(after[key] >= figure >= 0 for key, figure in before.items())
        before = after


@given(st.lists(st.lists(st.floats(0, 500), min_size=1, max_size=8), min_size=1, max_size=4))
def test_as_increase_would_have_it(steps: list[list[float]]) -> None:
    """Each list is the growth in the rounds of one life of the exporter."""
    world, at, billed = World(), 0.0, 0.0
    world.turn(told("n1", 0.0, 0.0), at=0)
    for growths in steps:
        total = 0.0
        for growth in growths:
            at, total = at + 15, total + growth
            bill = world.bill(told("n1", total, at), at=at)
        billed += total
    # A life whose first figure is not below the last one of the life before is taken for the same: less, never more.
    assert bill is not None
    assert bill <= billed + 1e-6
    if len(steps) == 1:
        assert bill == pytest.approx(billed, abs=1e-6)


# Bounds


def test_accounts_of_namespaces_long_gone_are_closed() -> None:
    world = World(most_accounts=5)
    for tick in range(20):
        view = world.turn(told("n1", 1.0, tick, namespace=f"ns{tick:02}"), at=tick)
    assert sorted(view.bills) == [(f"ns{tick}", H100) for tick in range(15, 20)]
    assert {key.namespace for key in view.costs} == {f"ns{tick}" for tick in range(15, 20)}


def test_nodes_and_series_are_forgotten_after_a_day() -> None:
    world, sizes = World(most_accounts=5), []
    for day in range(10, 90):
        at = day * 90_000.0
        world.turn(told("n01", 0.0, at, namespace=f"ns{day}"), told(f"n{day}", 0.0, at), at=at)
        sizes.append(len(pickle.dumps(world.memory.bills)))
    assert max(sizes[40:]) == max(sizes[3:40])


def test_sums_are_whole_numbers() -> None:
    world = World()
    world.turn(told("n1", 0.1), at=0)
    view = world.turn(told("n1", 0.3, 15), at=15)
    assert view.bills["ml", H100].allocated == NS // 5
