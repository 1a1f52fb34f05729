"""When windows end, what two replicas answer, and how long samples are kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.autoscale.answers import compute_value
from podgpu.autoscale.metrics import COLUMNS, find_metric
from podgpu.autoscale.refusal import Refusal, RefusalKind
from podgpu.autoscale.requests import AggregationOptions
from podgpu.autoscale.store import SampleRings
from tests.autoscale.scenes import BEGIN, INFERENCE, INTERVAL, Stage, busy, pod


def answer(stage: Stage, later: float) -> tuple[float, float]:
    found = compute_value(
        stage.snapshot(later), INFERENCE, find_metric("gpu_utilization"), AggregationOptions(window=60.0)
    )
    return found.value, found.at


def test_two_replicas_answer_alike_although_one_finishes_earlier() -> None:
    early, late = Stage([pod("a")]), Stage([pod("a")])
    for ratio in (0.1, 0.2, 0.3, 0.4):
        for stage in (early, late):
            stage.turn(n1=(busy("a", ratio, 0),))
    early.turn(n1=(busy("a", 1.0, 0),))
    late.now += INTERVAL
    assert answer(early, 2.0) == answer(late, 2.0) == (pytest.approx(25), BEGIN + 4 * INTERVAL)
    late.now -= INTERVAL
    late.turn(n1=(busy("a", 1.0, 0),))
    assert answer(early, 6.0) == answer(late, 6.0)
    assert answer(early, 6.0)[1] == BEGIN + 5 * INTERVAL


def test_there_is_no_answer_before_the_first_round_and_long_after_the_last() -> None:
    stage = Stage([pod("a")])
    with pytest.raises(Refusal, match="first round"):
        stage.snapshot()
    stage.turn(n1=(busy("a", 0.5, 0),))
    assert stage.snapshot(60.0).number
    with pytest.raises(Refusal) as raised:
        stage.snapshot(100.0)
    assert raised.value.kind is RefusalKind.NO_DATA


def test_a_clock_set_back_drops_samples_of_the_future() -> None:
    stage = Stage([pod("a")])
    stage.turns(4, n1=(busy("a", 1.0, 0),))
    stage.begin -= 3600.0
    stage.pods = [pod("a", started=-7200.0)]
    stage.turns(2, n1=(busy("a", 0.5, 0),))
    assert answer(stage, 6.0) == (pytest.approx(50), stage.begin + stage.now)


def test_a_round_that_was_missed_is_not_zero() -> None:
    stage = Stage([pod("a")])
    stage.turn(n1=(busy("a", 0.5, 0),))
    stage.now += 2 * INTERVAL
    stage.turn(n1=(busy("a", 0.5, 0),))
    assert answer(stage, 6.0)[0] == pytest.approx(50)


def row(value: float) -> tuple[float, ...]:
    return (value,) * COLUMNS


def test_samples_of_keys_that_are_gone_are_dropped() -> None:
    rings: SampleRings[str] = SampleRings(4)
    rings.add(0, {"a": row(1), "b": row(1)})
    for number in range(1, 20):
        rings.add(number, {"b": row(2)})
    assert "a" not in rings
    assert rings.known("b", 0, 19, 3) == {17: 2, 18: 2, 19: 2}


@given(
    st.lists(st.tuples(st.integers(1, 7), st.none() | st.floats(0, 100, width=32)), min_size=1, max_size=60),
    st.integers(1, 8),
)
def test_rings_return_the_last_rounds(steps: list[tuple[int, float | None]], window: int) -> None:
    rings: SampleRings[str] = SampleRings(8)
    number, written = 0, dict[int, float]()
    for step, value in steps:
        number += step
        rings.add(number, {} if value is None else {"a": row(value)})
        if value is not None:
            written[number] = value
        assert rings.known("a", 3, number, window) == {n: v for n, v in written.items() if n > number - window}
