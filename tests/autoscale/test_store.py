"""When windows end, what two replicas say, what is kept and for how long."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.autoscale.answers import Aggregation, PodSelector, compute_value
from podgpu.autoscale.metrics import COLUMNS, find_metric
from podgpu.autoscale.refusal import Refusal, RefusalKind
from podgpu.autoscale.store import SampleRings
from tests.autoscale.scenes import BEGIN, INTERVAL, Stage, gpu, holder, pod

INFERENCE = PodSelector("serving", owner=("Deployment", "inference"))


def answer(stage: Stage, later: float) -> tuple[float, float]:
    found = compute_value(stage.snapshot(later), INFERENCE, find_metric("gpu_utilization"), Aggregation(window=60.0))
    return found.value, found.at


def test_two_replicas_answer_alike_though_one_is_done_before_the_other() -> None:
    early, late = Stage([pod("a")]), Stage([pod("a")])
    for ratio in (0.1, 0.2, 0.3, 0.4):
        for stage in (early, late):
            stage.turn(n1=(gpu(0, holder("a", utilization=ratio), utilization=ratio),))
    early.turn(n1=(gpu(0, holder("a", utilization=1.0), utilization=1.0),))
    late.now += INTERVAL
    assert answer(early, 2.0) == answer(late, 2.0) == (pytest.approx(25), BEGIN + 4 * INTERVAL)
    late.now -= INTERVAL
    late.turn(n1=(gpu(0, holder("a", utilization=1.0), utilization=1.0),))
    assert answer(early, 6.0) == answer(late, 6.0)
    assert answer(early, 6.0)[1] == BEGIN + 5 * INTERVAL


def test_rounds_that_stand_still_are_no_answer_after_a_while() -> None:
    stage = Stage([pod("a")])
    stage.turn(n1=(gpu(0, holder("a", utilization=0.5)),))
    assert stage.snapshot(60.0).number
    with pytest.raises(Refusal) as raised:
        stage.snapshot(100.0)
    assert raised.value.kind is RefusalKind.NO_DATA


def test_before_the_first_round_there_is_no_answer() -> None:
    with pytest.raises(Refusal, match="first round"):
        Stage().snapshot()


def test_a_clock_set_back_forgets_what_lies_in_the_future() -> None:
    stage = Stage([pod("a")])
    stage.turns(4, n1=(gpu(0, holder("a", utilization=1.0), utilization=1.0),))
    stage.now -= 3600.0
    stage.turns(2, n1=(gpu(0, holder("a", utilization=0.5), utilization=0.5),))
    assert answer(stage, 6.0) == (pytest.approx(50), BEGIN + stage.now)


def test_a_round_that_was_missed_is_no_zero() -> None:
    stage = Stage([pod("a")])
    stage.turn(n1=(gpu(0, holder("a", utilization=0.5), utilization=0.5),))
    stage.now += 2 * INTERVAL
    stage.turn(n1=(gpu(0, holder("a", utilization=0.5), utilization=0.5),))
    assert answer(stage, 6.0)[0] == pytest.approx(50)


# What is kept


def row(value: float) -> tuple[float, ...]:
    return (value,) * COLUMNS


def test_a_key_not_seen_for_the_max_window_is_forgotten() -> None:
    rings: SampleRings[str] = SampleRings(4, 10)
    for number in range(3):
        rings.add(number, {"a": row(1), "b": row(2)})
    for number in range(3, 20):
        rings.add(number, {"b": row(2)})
    assert len(rings) == 1
    assert list(rings.values("a", 0, 19, 4)) == []


def test_more_keys_than_there_is_room_for_are_counted() -> None:
    rings: SampleRings[int] = SampleRings(4, 10)
    rings.add(0, {key: row(key) for key in range(15)})
    assert (len(rings), rings.left_out) == (10, 5)


@given(
    st.lists(st.tuples(st.integers(1, 7), st.none() | st.floats(0, 100, width=32)), min_size=1, max_size=60),
    st.integers(1, 8),
)
def test_what_is_read_are_the_last_rounds_as_they_were(steps: list[tuple[int, float | None]], window: int) -> None:
    rings: SampleRings[str] = SampleRings(8, 10)
    number, written = 0, dict[int, float]()
    for step, value in steps:
        number += step
        rings.add(number, {} if value is None else {"a": row(value)})
        if value is not None:
            written[number] = value
        wanted = [written[n] for n in range(number - window + 1, number + 1) if n in written]
        values = rings.values("a", 3, number, window)
        assert [v for v in values if not math.isnan(v)] == wanted
        found = rings.mean("a", 3, number, window)
        if number in written:
            assert found == (pytest.approx(math.fsum(wanted) / len(wanted)), len(wanted))
        else:
            assert found is None
