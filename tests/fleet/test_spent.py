"""What happened between two readings of a node: which increases of counters are charged."""

from __future__ import annotations

from typing import Any

import pytest

from podgpu.charge import HeldTime
from podgpu.fleet.node_entry import NodeEntry
from podgpu.fleet.spent import describe_rejected
from podgpu.model import NS, DeviceTotals, Holder
from tests.fleet.states import World, gpu, holder, mig, node

OLD = holder("old", busy_ns=0)


class Node:
    """One node with one GPU, read again and again."""

    def __init__(self) -> None:
        self.world = World()

    def read(self, at: float, *holders: Holder, exporter_id: str = "a", **more: Any) -> NodeEntry:
        target = more.pop("target", "http://n1")
        more.setdefault("usage", DeviceTotals(method="exact"))
        one = gpu(0, *holders, **more)
        reading = node("n1", one, read_at=at, exporter_id=exporter_id, target=target)
        [entry] = self.world.round(reading, at=at).nodes
        return entry


def spent(entry: NodeEntry, pod: str = "train") -> HeldTime | None:
    [part] = [part for part in entry.held if part.holder.pod == pod]
    return part.spent


def test_every_counter_is_compared() -> None:
    one = Node()
    names = ("busy_ns", "busy_min_ns", "busy_max_ns", "idle_ns", "wait_ns")
    first: dict[str, Any] = {name: number * NS for number, name in enumerate(names)}
    later: dict[str, Any] = {name: (2 * number + 1) * NS for number, name in enumerate(names)}
    one.read(15, holder(energy_mj=1_000, **first))
    entry = one.read(30, holder(energy_mj=7_000, **later))
    assert spent(entry) == HeldTime(15.0, 1.0, 1.0, 2.0, 3.0, 4.0, 5.0, joules=6.0)
    assert entry.charged_seconds == 15.0


def test_the_first_reading_charges_nothing() -> None:
    entry = Node().read(15, holder(busy_ns=NS))
    assert spent(entry) is None
    assert entry.charged_seconds == 0.0
    assert entry.unattributed_joules == {}


def test_a_long_gap_is_unknown_if_the_exporter_does_not_count_the_time() -> None:
    for seconds, is_known in ((0.5, True), (60, True), (61, False)):
        one = Node()
        one.read(15, holder(busy_ns=0))
        entry = one.read(15 + seconds, holder(busy_ns=NS))
        assert (spent(entry) is not None) is is_known
        assert entry.unattributed_joules.keys() == ({"GPU-0"} if is_known else set())


def test_a_gap_of_up_to_an_hour_is_what_the_exporter_counted() -> None:
    for seconds, held in ((61, 55.0), (3600, 55.0), (3601, None)):
        one = Node()
        one.read(15, holder(busy_ns=0, allocated_ns=5 * NS))
        entry = one.read(15 + seconds, holder(busy_ns=40 * NS, allocated_ns=60 * NS))
        time = spent(entry)
        assert (time and (time.held, time.busy)) == (held and (held, 40.0))
        assert entry.unattributed_joules.keys() == ({"GPU-0"} if held else set())


def test_a_gap_after_which_the_exporter_or_the_holders_are_others_is_unknown() -> None:
    counted = holder(allocated_ns=60 * NS)
    for exporter_id, holders in (("b", [counted]), ("a", [counted, holder("new")]), ("a", [])):
        one = Node()
        one.read(15, holder(allocated_ns=5 * NS))
        entry = one.read(215, *holders, exporter_id=exporter_id)
        assert entry.unattributed_joules == {}


def test_the_same_reading_again_charges_nothing() -> None:
    one = Node()
    one.read(15, holder(busy_ns=0))
    assert spent(one.read(15, holder(busy_ns=NS))) is None


def test_a_new_holder_is_charged_from_its_first_second() -> None:
    one = Node()
    one.read(15, OLD)
    new = holder(
        allocated_ns=4 * NS,
        busy_ns=3 * NS,
        busy_min_ns=2 * NS,
        busy_max_ns=4 * NS,
        idle_ns=NS,
        wait_ns=NS,
        energy_mj=9_000,
    )
    expected = HeldTime(8.0, 0.5, 3.0, 2.0, 4.0, 1.0, 1.0, 9.0)
    assert spent(one.read(30, OLD, new)) == expected


def test_a_new_holder_is_not_charged_for_more_than_the_time_between_the_readings() -> None:
    one = Node()
    one.read(15, OLD)
    time = spent(one.read(30, OLD, holder(allocated_ns=23 * NS)))
    assert time is not None
    assert time.held == 15.0


@pytest.mark.parametrize(
    ("new", "more"),
    [
        (holder(), {}),  # it has no counters
        (holder(busy_ns=0), {}),  # its exporter does not count held time
        (holder(allocated_ns=24 * NS), {}),  # it was missing in one reading
        (holder(allocated_ns=NS), {"exporter_id": "b", "target": "http://b"}),  # another exporter
        (holder(allocated_ns=NS), {"uuid": "GPU-9"}),  # the GPU is new, too
    ],
)
def test_the_time_of_a_new_holder_is_unknown(new: Holder, more: dict[str, Any]) -> None:
    one = Node()
    one.read(15, OLD)
    assert spent(one.read(30, OLD, new, **more)) is None


def test_counters_of_a_restarted_exporter_start_at_0() -> None:
    one = Node()
    one.read(15, holder(busy_ns=5 * NS))
    time = spent(one.read(30, holder(busy_ns=7 * NS), exporter_id="b"))
    assert time is not None
    assert time.busy == 7.0


def test_a_counter_that_decreases_starts_at_0() -> None:
    one = Node()
    one.read(15, holder(busy_ns=9 * NS))
    time = spent(one.read(30, holder(busy_ns=2 * NS)))
    assert time is not None
    assert time.busy == 2.0


def test_a_counter_that_stands_still_has_increased_by_0() -> None:
    one = Node()
    one.read(15, holder(busy_ns=9 * NS))
    time = spent(one.read(30, holder(busy_ns=9 * NS)))
    assert time is not None
    assert time.busy == 0.0


def test_the_first_value_of_a_counter_is_a_baseline() -> None:
    one = Node()
    one.read(15, holder())
    assert spent(one.read(30, holder(busy_ns=9 * NS))) == HeldTime(15.0)


def test_the_same_exporter_at_another_address_is_compared() -> None:
    one = Node()
    one.read(15, holder(busy_ns=5 * NS))
    time = spent(one.read(30, holder(busy_ns=7 * NS), target="http://10.0.0.1"))
    assert time is not None
    assert time.busy == 2.0


def test_another_exporter_is_not_compared_but_held_time_is_charged() -> None:
    one = Node()
    one.read(15, holder(busy_ns=5 * NS))
    entry = one.read(30, holder(busy_ns=7 * NS), target="http://other", exporter_id="b")
    assert spent(entry) == HeldTime(15.0)
    assert entry.rejected == {}


@pytest.mark.parametrize(
    ("seconds", "limit_mw", "joules", "is_charged"),
    [
        (15, None, 5000 * 23, True),
        (15, None, 5000 * 23 + 1, False),
        (15, 100_000, 120 * 23, True),
        (15, 100_000, 120 * 23 + 1, False),
        (15, 2**63 - 1, 5000 * 23 + 1, False),
    ],
)
def test_energy_is_limited_by_the_power_limit(
    seconds: int, limit_mw: int | None, joules: int, is_charged: bool
) -> None:
    """15 s between the readings may be 15 * 1.2 + 5 = 23 s of counters."""
    one = Node()
    one.read(15, holder(energy_mj=0), power_limit_mw=limit_mw)
    entry = one.read(15 + seconds, holder(energy_mj=joules * 1000), power_limit_mw=limit_mw)
    time = spent(entry)
    assert time is not None
    assert time.joules == (joules if is_charged else None)
    assert entry.rejected == ({} if is_charged else {"energy": 1})


def test_a_rejected_increase_is_noted_in_the_same_round() -> None:
    one = Node()
    one.read(15, usage=DeviceTotals(unattributed_energy_mj=0))
    entry = one.read(30, usage=DeviceTotals(unattributed_energy_mj=10**12))
    assert entry.rejected == {"energy": 1}
    assert entry.notes == (describe_rejected(entry.rejected),)


def test_rejected_increases_are_counted_over_all_rounds() -> None:
    one = Node()
    one.read(15, holder(busy_ns=0, idle_ns=0, wait_ns=0))
    one.read(30, holder(busy_ns=24 * NS, idle_ns=24 * NS, wait_ns=23 * NS))
    entry = one.read(45, holder(busy_ns=48 * NS, idle_ns=25 * NS, wait_ns=47 * NS))
    assert entry.rejected == {"busy time": 2, "idle time": 1, "waiting time": 1}
    assert "(busy time: 2, idle time: 1, waiting time: 1)" in entry.notes[0]
    assert describe_rejected({}) == ""


def test_energy_that_no_holder_used() -> None:
    one = Node()
    for at, joules in ((15, 100), (30, 130)):
        totals = DeviceTotals(method="exact", unattributed_energy_mj=joules * 1000)
        entry = one.read(at, usage=totals)
    assert entry.unattributed_joules == {"GPU-0": 30.0}
    assert one.read(45, usage=None).unattributed_joules == {"GPU-0": None}
    assert one.read(60, usage=totals).unattributed_joules == {"GPU-0": None}


def test_the_rest_of_the_energy_belongs_to_the_gpu_and_not_to_an_instance() -> None:
    one = Node()
    for at in (15, 30):
        totals = DeviceTotals(method="exact", unattributed_energy_mj=at * 1000)
        entry = one.read(at, usage=totals, instances=(mig(3),))
    assert sorted(entry.unattributed_joules.values(), key=str) == [15.0, None]


def test_a_device_that_is_new_has_no_rest() -> None:
    one = Node()
    one.read(15)
    assert one.read(30, uuid="GPU-9").unattributed_joules == {}


def test_the_counted_time_of_a_share_is_not_multiplied_by_it_again() -> None:
    """The exporter counts share × time."""
    one = Node()
    half = [holder(name, share=0.5, allocated_ns=10 * NS) for name in ("a", "b")]
    one.read(15, *half)
    later = [holder(name, share=0.5, allocated_ns=910 * NS) for name in ("a", "b")]
    entry = one.read(15 + 1800, *later)
    for name in ("a", "b"):
        assert spent(entry, name) == HeldTime(1800.0, 0.5)
    new = holder("c", share=0.25, allocated_ns=2 * NS)
    entry = one.read(15 + 1815, later[0], new)
    assert spent(entry, "c") == HeldTime(8.0, 0.25)


def test_a_new_holder_without_a_share_is_charged_no_time() -> None:
    one = Node()
    whole = holder("whole", share=1.0)
    one.read(15, whole)
    entry = one.read(30, whole, holder(allocated_ns=5 * NS, busy_ns=2 * NS))
    assert spent(entry) == HeldTime(15.0, busy=2.0, share=0.0)


def test_counters_that_stood_still_may_catch_up() -> None:
    one = Node()
    for second in (15, 30, 45, 60, 75):
        one.read(second, holder(busy_ns=NS, energy_mj=1000), power_limit_mw=350_000)
    later = holder(busy_ns=61 * NS, energy_mj=22_500_000)
    entry = one.read(90, later, power_limit_mw=350_000)
    time = spent(entry)
    assert time is not None
    assert (time.busy, time.joules) == (60.0, 22_499.0)
    assert entry.rejected == {}


def test_a_pod_that_started_with_its_exporter_is_charged_from_its_first_second() -> None:
    one = Node()
    one.read(15, OLD, exporter_id="a")
    new = holder("new", allocated_ns=10 * NS, busy_ns=4 * NS)
    entry = one.read(55, OLD, new, exporter_id="b")
    assert spent(entry, "new") == HeldTime(20.0, 0.5, busy=4.0)


def test_the_rest_of_a_gap_is_unknown_if_the_mig_layout_changed() -> None:
    one = Node()
    one.read(15, instances=(mig(1, holder()),))
    assert one.read(1815).unattributed_joules == {}
