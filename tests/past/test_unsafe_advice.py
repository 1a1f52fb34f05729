"""Clusters in which a careless recommendation would hurt: podgpu makes none, or says what it assumes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from podgpu.charge import UsageAccount
from podgpu.past.savings.advice import make_savings
from podgpu.past.savings.savings import Advice, PodLoad, SavingsAnswer, SavingsQuery
from tests.past.planted import GIB, STEPS_PER_DAY, make_fleet, make_pod


def ask(*pods: PodLoad, days: float = 7, **query: Any) -> SavingsAnswer:
    return make_savings(SavingsQuery(**query), make_fleet(*pods, days=days), "EUR")


def lines_of(found: SavingsAnswer) -> list[tuple[str, list[str]]]:
    return [(line.kind, sorted(pod.pod for pod in line.pods)) for line in found.advice]


def only_line(found: SavingsAnswer) -> Advice:
    [line] = found.advice
    return line


# Peaks at the same time


def test_pods_that_peak_in_the_same_5_minutes_of_a_day_do_not_share() -> None:
    def nightly(step: int) -> float:
        return 0.5 if step % STEPS_PER_DAY == 24 else 0.01

    assert not ask(make_pod("a", nightly), make_pod("b", nightly)).advice


def test_peaks_of_two_pods_count_while_the_use_of_a_third_is_unknown() -> None:
    """The third pod is known for 96 % of the time, but not while the others collide."""

    def collides(step: int) -> float:
        return 0.6 if step % 25 == 0 else 0.02

    def blind(step: int) -> float | None:
        return None if step % 25 == 0 else 0.03

    found = ask(make_pod("a", collides), make_pod("b", collides), make_pod("blind", blind))
    [(kind, pods)] = lines_of(found)
    assert kind == "share"
    assert "blind" in pods
    assert not {"a", "b"} <= set(pods)


def test_a_mix_is_known_for_95_percent_of_the_range() -> None:
    def unknown_at(place: int) -> Any:
        return lambda step: None if step % 25 == place else 0.02

    pods = [make_pod(f"p{place}", unknown_at(place), peak_bytes=4.0 * GIB) for place in range(5)]
    assert "share" not in [line.kind for line in ask(*pods).advice]
    same = [make_pod(f"p{place}", unknown_at(7), peak_bytes=4.0 * GIB) for place in range(5)]
    assert [len(line.pods) for line in ask(*same).advice] == [5]


def test_the_slowdown_of_the_worst_5_minutes_is_said() -> None:
    """Rare work at the same time hardly changes the mean."""

    def rare(step: int) -> float:
        return 0.36 if step % 48 == 0 else 0.0

    def often(step: int) -> float:
        return 0.36

    line = only_line(ask(make_pod("rare", rare), make_pod("often", often), slowdown=2.0))
    in_step = 1 + 1.04 * 0.36 / (1 - 1.04 * 0.36)
    rare_pod = next(pod for pod in line.pods if pod.pod == "rare")
    assert rare_pod.worst_slowdown == pytest.approx(in_step, abs=0.01)


def test_the_assumptions_name_what_5_minutes_cannot_show() -> None:
    line = only_line(ask(make_pod("a", 0.1), make_pod("b", 0.1)))
    assert "do not start their work at the same moments" in line.assumes
    assert "namespaces" not in line.assumes
    other = make_pod("c", 0.1, account=UsageAccount("other", "c"), node="node-2")
    line = only_line(ask(make_pod("a", 0.1), other))
    assert "different namespaces" in line.assumes
    assert "on one node" in line.assumes


# Rhythms


def test_a_pod_that_is_idle_at_night_only_is_not_stopped() -> None:
    def office(step: int) -> float:
        return 0.6 if 96 <= step % STEPS_PER_DAY < 216 else 0.0

    assert lines_of(ask(make_pod("office", office))) == []
    assert lines_of(ask(make_pod("office", office), idle=14 * 3600)) == []


@pytest.mark.parametrize("idle_hours", [12, 24])
def test_a_pod_that_worked_after_a_longer_pause_is_not_stopped(idle_hours: int) -> None:
    """A job of every third day: its present pause is not longer than the last one."""

    def every_third_day(step: int) -> float:
        return 0.9 if step % (3 * STEPS_PER_DAY) < 12 else 0.0

    pod = make_pod("report", every_third_day, days=8)
    assert lines_of(ask(pod, days=8, idle=idle_hours * 3600)) == []


def test_a_line_to_stop_a_pod_says_when_it_last_worked() -> None:
    """A weekend looks like the end of the work."""

    def weekdays(step: int) -> float:
        return 0.5 if step < 5 * STEPS_PER_DAY else 0.0

    line = only_line(ask(make_pod("weekdays", weekdays)))
    assert line.kind == "stop"
    assert "Before, it worked in 100 % of all intervals of 5 minutes" in line.says
    assert "does not start again" in line.assumes
    idle = only_line(ask(make_pod("idle", 0.0)))
    assert "Before" not in idle.says


# Young pods, and memory


def test_a_pod_that_was_restarted_under_a_new_name_has_no_history() -> None:
    started = 5 * STEPS_PER_DAY
    pod = make_pod("web-2", lambda step: None if step < started else 0.0)
    found = ask(pod)
    assert not found.advice
    assert [(row.reason, row.pods) for row in found.left_out] == [("unknown", 1)]


def test_a_pod_that_waits_for_work_with_a_tick_is_not_idle() -> None:
    pod = make_pod("health-check", 0.0006, peak_bytes=79.0 * GIB)
    assert not ask(pod).advice


def test_the_largest_memory_of_all_pods_counts() -> None:
    calm = make_pod("calm", 0.02, peak_bytes=10.0 * GIB)
    weekly = make_pod("weekly", 0.02, peak_bytes=66.0 * GIB)
    assert not ask(calm, weekly).advice


def test_random_loads_never_break_a_limit() -> None:
    """Recomputes the limits of each mix from the loads, step by step."""
    import random

    chance = random.Random(7)
    pods = []
    uses: dict[str, list[float | None]] = {}
    for number in range(60):
        level = chance.uniform(0.01, 0.3)
        phase = chance.randrange(STEPS_PER_DAY)
        line: list[float | None] = []
        for step in range(7 * STEPS_PER_DAY):
            if chance.random() < 0.02:
                line.append(None)
            elif (step + phase) % STEPS_PER_DAY < 100:
                line.append(min(1.0, level * chance.expovariate(1)))
            else:
                line.append(0.0)
        uses[f"p{number}"] = line
        memory = chance.uniform(2, 50) * GIB
        pods.append(make_pod(f"p{number}", line.__getitem__, peak_bytes=memory))
    found = ask(*pods)
    mixes = [line for line in found.advice if line.kind == "share"]
    assert len(mixes) > 5
    for mix in mixes:
        assert sum(pod.peak_memory_bytes or math.inf for pod in mix.pods) * 1.1 <= 80 * GIB
        for values in zip(*(uses[pod.pod] for pod in mix.pods), strict=True):
            busy = [value for value in values if value]
            if len(busy) > 1:
                assert sum(busy) < 0.751
        for pod in mix.pods:
            assert 1 <= (pod.slowdown or 0) < 1.25
