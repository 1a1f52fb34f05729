"""When windows end, and how long samples are kept."""

from __future__ import annotations

import pytest

from podgpu.autoscale.answers import compute_value
from podgpu.autoscale.metrics import UTILIZATION
from podgpu.autoscale.requests import MetricRequest, Refusal, RefusalKind
from tests.autoscale.scenes import INFERENCE, INTERVAL, Stage, busy, pod


def answer(stage: Stage, later: float) -> tuple[float, float]:
    found = compute_value(stage.snapshot(later), MetricRequest(UTILIZATION, INFERENCE, window=60.0))
    return found.value, found.at


def test_there_is_no_answer_before_the_first_round_and_long_after_the_last() -> None:
    stage = Stage([pod("a")])
    with pytest.raises(Refusal, match="first round"):
        stage.snapshot()
    stage.turn(n1=(busy("a", 0.5, 0),))
    assert stage.snapshot(60.0).rounds
    with pytest.raises(Refusal) as raised:
        stage.snapshot(100.0)
    assert raised.value.kind is RefusalKind.NO_DATA


def test_a_clock_that_is_set_does_not_change_the_window() -> None:
    stage = Stage([pod("a")])
    stage.turns(4, n1=(busy("a", 1.0, 0),))
    stage.begin -= 3600.0
    stage.pods = [pod("a", started=-7200.0)]
    stage.turns(2, n1=(busy("a", 0.5, 0),))
    assert answer(stage, 6.0) == (pytest.approx(75), stage.begin + stage.now)


def test_a_round_that_was_missed_is_not_zero() -> None:
    stage = Stage([pod("a")])
    stage.turn(n1=(busy("a", 0.5, 0),))
    stage.now += 2 * INTERVAL
    stage.turn(n1=(busy("a", 0.5, 0),))
    assert answer(stage, 6.0)[0] == pytest.approx(50)


def test_samples_are_stored_for_the_longest_window() -> None:
    stage = Stage([pod("a"), pod("b")], longest=60.0)
    stage.turns(3, n1=(busy("a", 0.5, 0), busy("b", 0.5, 1)))
    stage.turns(20, n1=(busy("b", 0.5, 1),))
    rounds = stage.snapshot().rounds
    assert len(rounds) == 4
    assert not any(("serving", "a") in one.rows for one in rounds)
