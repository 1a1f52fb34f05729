"""The rolling average of the rounds, against what PromQL's avg_over_time makes of the same instants."""

from __future__ import annotations

import pickle
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.cluster.reading import ClusterReading, Scope
from podgpu.cluster.rolling import RollingMemory
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.view import Memory, assemble
from tests.cluster.view_readings import WALL, gpu, node, series

CLUSTER = Scope("cluster")
NODE = Scope("node", node="n1")


def rounds(memory: RollingMemory, values: list[float | None], interval: float = 15.0, late: float = 0.0) -> float:
    """One each interval; the time of the last."""
    at = WALL
    for number, value in enumerate(values):
        at = WALL + interval * number + late
        memory.add(at, interval, {} if value is None else {CLUSTER: value})
    return at


def test_the_window_is_open_at_its_older_end() -> None:
    memory = RollingMemory()
    at = rounds(memory, [1.0, 0.5, 0.0, 0.0], interval=15)
    assert memory.averages(at, 15, window=45) == {CLUSTER: 0.5 / 3}
    assert memory.averages(at, 15, window=30) == {CLUSTER: 0.0}


def test_fewer_rounds_than_the_window_has() -> None:
    memory = RollingMemory()
    assert memory.averages(WALL, 15, 300) == {}
    at = rounds(memory, [0.2, 0.4])
    assert memory.averages(at, 15, 300)[CLUSTER] == pytest.approx(0.3)


@given(st.lists(st.none() | st.floats(0, 1), min_size=1, max_size=60), st.integers(1, 30), st.floats(0, 13))
def test_as_promql_computes_it(values: list[float | None], steps: int, late: float) -> None:
    """avg_over_time(x[window:15s]) at the last instant: of the instants later than window ago that have a value."""
    memory = RollingMemory()
    at = rounds(memory, values, late=late)
    inside = [value for value in values[-steps:] if value is not None]
    expected = {CLUSTER: pytest.approx(fmean(inside), abs=1e-12)} if inside else {}
    assert memory.averages(at, 15, window=15.0 * steps) == expected


def test_a_scope_that_is_gone_ends_with_the_window_and_leaves_nothing() -> None:
    memory = RollingMemory()
    memory.add(WALL, 15, {})
    nothing = len(pickle.dumps(memory))
    memory.clear()
    memory.add(WALL, 15, {NODE: 1.0})
    assert memory.averages(WALL + 285, 15, 300) == {NODE: 1.0}
    assert memory.averages(WALL + 300, 15, 300) == {}
    assert len(pickle.dumps(memory)) == nothing


def test_a_round_that_somebody_asked_for_is_no_instant() -> None:
    memory = RollingMemory()
    memory.add(WALL, 15, {CLUSTER: 0.0})
    memory.add(WALL + 10, 15, {CLUSTER: 1.0})
    assert memory.averages(WALL + 10, 15, 300) == {CLUSTER: 0.0}


def test_a_timer_that_is_a_little_early_is_not_taken_for_another_round() -> None:
    memory = RollingMemory()
    memory.add(WALL, 15, {CLUSTER: 0.0})
    memory.add(WALL + 14.99, 15, {CLUSTER: 1.0})
    assert memory.averages(WALL + 14.99, 15, 300) == {CLUSTER: 0.5}


def test_a_clock_that_was_set_back_begins_anew() -> None:
    memory = RollingMemory()
    rounds(memory, [1.0, 1.0])
    memory.add(WALL - 3600, 15, {CLUSTER: 0.25})
    assert memory.averages(WALL - 3600, 15, 300) == {CLUSTER: 0.25}


def test_what_prometheus_computed_is_taken() -> None:
    view = assemble(
        ClusterReading(
            (node("n1", gpu(0, measured=10.0)),), rolling={CLUSTER: 0.75, NODE: 0.5, Scope("owner"): float("nan")}
        ),
        Memory(),
        ViewSettings(window=5400.0),
        0.0,
        WALL,
    )
    assert series(view, "podgpu_used_gpu_utilization_average_ratio") == {
        (("scope", "cluster"), ("window", "1h30m")): 0.75,
        (("node", "n1"), ("scope", "node"), ("window", "1h30m")): 0.5,
    }
