"""The wall clock is set, forward and back by hours: nobody becomes idle by that, and nobody busy."""

from __future__ import annotations

import pytest

from podgpu.clock import WallClock
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.view import ClusterView, Memory, assemble
from tests.cluster.view_readings import WALL, gpu, holder, node, reading, value

HOUR = 3600.0


def turn(memory: Memory, now: float, wall: float) -> ClusterView:
    idle = gpu(0, holder(utilization=0.0), utilization=0.0, measured=40.0)
    return assemble(reading(node("n", idle, read_at=now)), memory, ViewSettings(), now, wall)


@pytest.mark.parametrize("step", [2 * HOUR, -2 * HOUR])
def test_idleness_goes_by_the_time_that_passed(step: float) -> None:
    memory = Memory()
    for at in (0.0, 15.0):
        turn(memory, at, WALL + at)
    view = turn(memory, 30.0, WALL + 30 + step)
    assert not view.wasted
    assert [one.since for one in view.idle] == [WALL + step]
    for at in range(45, 1860, 15):
        view = turn(memory, at, WALL + at + step)
    assert [one.since for one in view.wasted] == [WALL + step]
    assert view.counting_since == WALL + step


@pytest.mark.parametrize("step", [2 * HOUR, -2 * HOUR])
def test_the_rolling_average_goes_on(step: float) -> None:
    memory = Memory()
    for at in (0.0, 15.0):
        turn(memory, at, WALL + at)
    view = turn(memory, 30.0, WALL + 30 + step)
    assert value(view, "podgpu_used_gpu_utilization_average_ratio", window="5m", scope="cluster") == 0.4


def test_a_clock_that_is_not_quite_even_moves_nothing() -> None:
    memory = Memory()
    turn(memory, 0.0, WALL)
    for at in range(15, 150, 15):
        view = turn(memory, at, WALL + at + (0.2 if at % 2 else -0.2))
        assert [one.since for one in view.idle] == [WALL]


def test_small_steps_add_up() -> None:
    clock = WallClock()
    steps = [clock.step(now, 1000.0 + now + 0.5 * now) for now in range(9)]
    assert sum(steps) == 4.0
    assert steps.count(0.0) == 7
