"""Bills from readings that come out of order, or under another name: nothing is billed twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.cluster.test_bills import World, told


def test_an_older_reading_is_no_beginning_anew() -> None:
    """Two servers behind one address, and the one asked now was told later of the last scrape."""
    world = World()
    world.turn(told("n1", 100_000, 0), at=0)
    assert world.bill(told("n1", 100_030, 30), at=31) == 30
    assert world.bill(told("n1", 100_020, 20), at=46) == 30
    assert world.bill(told("n1", 100_060, 60), at=61) == 60


def test_an_older_reading_from_before_a_beginning_anew() -> None:
    world = World()
    world.turn(told("n1", 1000, 0), at=0)
    assert world.bill(told("n1", 5, 30), at=31) == 5
    assert world.bill(told("n1", 1010, 10), at=46) == 5
    assert world.bill(told("n1", 35, 60), at=61) == 35


def test_readings_of_nearly_one_moment_in_either_order() -> None:
    world = World()
    world.turn(told("n1", 1000, 0), at=0)
    assert world.bill(told("n1", 1030.4, 30), at=31) == 30.4
    assert world.bill(told("n1", 1030, 30.1), at=46) == 30.4
    assert world.bill(told("n1", 1060, 60), at=61) == 60


def test_a_servers_clock_that_was_set_back_shows_the_past_as_new() -> None:
    """The node's own clock tells; where counters really began anew, what was held back is billed later."""
    world = World()
    world.turn(told("n1", 5000, 0, taken_at=9000.0), at=0)
    assert world.bill(told("n1", 1400, 15, taken_at=5400.0), at=15) == 0
    assert world.bill(told("n1", 5030, 30, taken_at=9030.0), at=30) == 30
    assert world.bill(told("n1", 10, 45, taken_at=9000.0), at=45) == 30
    assert world.bill(told("n1", 40, 75, taken_at=9031.0), at=75) == 70


def test_a_node_that_changes_its_name_and_back_is_not_billed_under_both() -> None:
    world = World()
    bill = None
    for turn in range(10):
        name = "b" if turn % 2 else "a"
        bill = world.bill(told(name, 1000 + 15 * turn, 15.0 * turn, target="t", uuid="GPU-x"), at=15.0 * turn)
    assert bill is not None
    assert 120 <= bill <= 135  # a name never heard of begins with a baseline


def test_two_nodes_that_swap_their_names() -> None:
    world = World()
    world.turn(told("a", 1000, 0, target="t1"), told("b", 5000, 0, target="t2"), at=0)
    assert world.bill(told("b", 1015, 15, target="t1"), told("a", 5015, 15, target="t2"), at=15) == 30


def test_two_nodes_behind_one_address_in_turn() -> None:
    world = World()
    world.turn(told("a", 1000, 0, target="t"), at=0)
    world.turn(told("b", 5000, 15, target="t"), at=15)
    assert world.bill(told("a", 1030, 30, target="t"), at=30) == 30
    assert world.bill(told("b", 5030, 45, target="t"), at=45) == 60


@given(st.lists(st.integers(0, 60), max_size=30))
def test_in_whatever_order_readings_come_no_more_is_billed_than_was_used(moments: list[int]) -> None:
    world = World()
    world.turn(told("n1", 1000, 0), at=0)
    for at, moment in enumerate(moments, 1):
        bill = world.bill(told("n1", 1000 + moment, moment), at=60.0 + at)
        assert bill == max(moments[:at])
