"""What top learns by looking on: idle time and parts of the power."""

from __future__ import annotations

from dataclasses import replace

import pytest

from podgpu.model import Workload
from podgpu.top.figures import Condition, DeviceFigures, FlatView, HolderFigures
from podgpu.top.history import POWER_WINDOW, History, Idle
from tests.top.scene import BATCH, TRAINER, holder, view


class Watch:
    """One device with one holder, looked at again and again."""

    def __init__(self) -> None:
        self.history = History()

    def at(
        self, now: float, busy: float | None, idle: float | None = 0.0, utilization: float | None = 0.0
    ) -> Idle | None:
        person = holder(busy_seconds=busy, idle_seconds=idle, utilization=utilization)
        device = DeviceFigures("GPU-0", 0, holders=(person,))
        self.history.note(view(device), now)
        return self.history.idle(device, person)


def test_who_never_ran_anything_is_idle_for_the_whole_counter() -> None:
    watch = Watch()
    assert watch.at(1000, busy=0, idle=300) == Idle(300)
    assert watch.at(1010, busy=0, idle=310) == Idle(310)


def test_who_stopped_before_we_looked_is_idle_for_at_least_as_long_as_we_look() -> None:
    watch = Watch()
    assert watch.at(1000, busy=7, idle=500) == Idle(0, at_least=True)
    assert watch.at(1060, busy=7, idle=560) == Idle(60, at_least=True)


def test_who_stopped_while_we_looked_is_idle_since_then() -> None:
    watch = Watch()
    watch.at(1000, busy=7, idle=40, utilization=0.5)
    assert watch.at(1001, busy=7.5, idle=40.5, utilization=0.5) == Idle(0)
    assert watch.at(1002, busy=7.5, idle=41.5) == Idle(1)
    assert watch.at(1003, busy=7.6, idle=42.4) == Idle(0)


def test_what_nobody_counts_any_more_does_not_grow_and_is_not_known_in_the_end() -> None:
    """Its counters stand still: the source does not know what it does."""
    watch = Watch()
    assert watch.at(1000, busy=0, idle=300) == Idle(300)
    assert watch.at(1030, busy=0, idle=300, utilization=None) == Idle(300)
    assert watch.at(1120, busy=0, idle=300, utilization=None) is None
    assert watch.at(1121, busy=0, idle=301) == Idle(301)


@pytest.mark.parametrize("name", ["lost", "unreadable", "driver_away", "node_gone"])
def test_what_cannot_be_seen_is_not_idle(name: str) -> None:
    holder = HolderFigures(Workload("ns", "pod", "c"), busy_seconds=0.0, idle_seconds=7.0, idle_since=1000.0)
    device = DeviceFigures("GPU-a", 0, holders=(holder,), conditions=(Condition(name, 1.0, "says", "do"),))
    history = History()
    history.note(FlatView((device,), taken_at=4600.0), now=1.0)
    assert history.idle(device, holder) is None
    history.note(FlatView((replace(device, conditions=()),), taken_at=4601.0), now=2.0)
    assert history.idle(replace(device, conditions=()), holder) == Idle(3601.0)


def test_who_is_busy_is_not_idle_while_an_exporter_has_not_counted_on() -> None:
    watch = Watch()
    watch.at(1000, busy=7, utilization=0.5)
    assert watch.at(1001, busy=7, utilization=0.5) == Idle(0)


def test_an_exporter_that_started_anew() -> None:
    watch = Watch()
    watch.at(1000, busy=7)
    assert watch.at(1060, busy=0, idle=5) == Idle(5)


def test_what_cannot_be_told_is_absent() -> None:
    watch = Watch()
    assert watch.at(1000, busy=None) is None
    assert watch.at(1001, busy=0, idle=None) is None


def test_who_left_is_forgotten() -> None:
    watch = Watch()
    watch.at(1000, busy=0, idle=300)
    watch.history.note(view(), 1001)
    assert watch.at(1002, busy=7) == Idle(0, at_least=True)


# Power


def shared(own: float | None, other: float | None, whole: float | None) -> DeviceFigures:
    people = (holder(TRAINER, energy_joules=own), holder(BATCH, energy_joules=other))
    return DeviceFigures("GPU-0", 0, energy_joules=whole, holders=people)


def parts(history: History, device: DeviceFigures) -> list[float | None]:
    return [history.power_part(device, person) for person in device.holders]


def test_parts_are_those_of_the_energy() -> None:
    history = History()
    history.note(view(shared(0, 0, 1000)), 0)
    device = shared(30, 10, 1040)
    history.note(view(device), 1)
    assert parts(history, device) == [0.75, 0.25]


def test_counters_begin_at_nothing() -> None:
    history = History()
    history.note(view(shared(None, None, None)), 0)
    device = shared(30, 10, 40)
    history.note(view(device), 1)
    assert parts(history, device) == [0.75, 0.25]


def test_no_part_before_the_counter_moved() -> None:
    history = History()
    device = shared(5, 5, 1000)
    history.note(view(device), 0)
    assert parts(history, device) == [None, None]
    history.note(view(device), 1)
    assert parts(history, device) == [None, None]


def test_parts_are_of_the_last_seconds() -> None:
    history = History()
    for second in range(20):  # first all one's, then all the other's
        own, other = min(second, 10) * 10.0, max(0, second - 10) * 10.0
        device = shared(own, other, own + other)
        history.note(view(device), float(second))
    assert POWER_WINDOW < 9
    assert parts(history, device) == [0.0, 1.0]


@pytest.mark.parametrize("after", [shared(1, 1, 2), shared(None, 1, 2), shared(200, 200, None)])
def test_counters_that_fell_or_went_away(after: DeviceFigures) -> None:
    history = History()
    history.note(view(shared(100, 100, 1000)), 0)
    history.note(view(after), 1)
    assert parts(history, after)[0] is None


def test_an_instances_holder_has_a_part_of_the_whole_gpu() -> None:
    history = History()
    for now, own, whole in ((0.0, 0.0, 0.0), (1.0, 25.0, 100.0)):
        gpu = DeviceFigures("GPU-0", 0, energy_joules=whole)
        instance = DeviceFigures("GPU-0", 0, instance="7", holders=(holder(energy_joules=own),))
        history.note(view(gpu, instance), now)
    assert parts(history, instance) == [0.25]


def test_what_the_cluster_knows_of_idleness_goes_before_what_was_seen_from_here() -> None:
    holder = HolderFigures(Workload("ns", "pod", "c"), busy_seconds=5.0, idle_seconds=7.0, idle_since=1000.0)
    device = DeviceFigures("GPU-a", 0, holders=(holder,))
    history = History()
    history.note(FlatView((device,), taken_at=4600.0), now=1.0)
    assert history.idle(device, holder) == Idle(3600.0)


def test_who_has_a_process_beside_a_busy_one_is_neither_busy_nor_idle() -> None:
    holder = HolderFigures(Workload("ns", "pod", "c"), utilization=0.0, processes=1, busy_seconds=5.0, idle_seconds=7.0)
    history = History()
    for now, utilization in ((1.0, 0.9), (2.0, 0.9)):
        device = DeviceFigures("GPU-a", 0, utilization=utilization, holders=(holder,))
        history.note(FlatView((device,)), now)
        assert history.idle(device, holder) is None
