"""From residency to busy time: no more than was resident, no more than the device, and near to the truth."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.gpu.nvml.switch_attribution import BusyShareModel, Residency, Stay, estimate_without_samples

MS = 1_000_000


def residency(*stays: tuple[int, int, int]) -> Residency:
    """(pid, since, until) in milliseconds, each switched in at its beginning."""
    made = [Stay(pid, since * MS, since * MS, until * MS) for pid, since, until in stays]
    return Residency(0, stays[-1][2] * MS, made)


def test_by_residency_alone_every_stay_was_busy_from_its_beginning() -> None:
    window = residency((1, 0, 50), (2, 50, 90), (3, 90, 100))
    assert estimate_without_samples(window, 30 * MS) == {1: 10 * MS, 2: 10 * MS, 3: 10 * MS}
    assert estimate_without_samples(window, 50 * MS) == {1: 20 * MS, 2: 20 * MS, 3: 10 * MS}
    assert estimate_without_samples(window, 200 * MS) == {1: 50 * MS, 2: 40 * MS, 3: 10 * MS}
    assert estimate_without_samples(window, 0) == {1: 0, 2: 0, 3: 0}
    assert estimate_without_samples(Residency(0, MS), MS) == {}


def test_samples_tell_work_from_an_idle_tail() -> None:
    """One works for all of its 20 ms, one rests after 10 of its 80."""
    model = BusyShareModel()
    estimate = {}
    for turn in range(60):
        window = residency((1, 0, 20), (2, 20, 100))
        moment = turn * 37 % 100
        busy = moment < 30
        model.learn(window, [(moment * MS, busy)])
        estimate = model.estimate(window, 30 * MS)
    assert abs(estimate[1] - 20 * MS) < 2 * MS
    assert abs(estimate[2] - 10 * MS) < 2 * MS
    assert sum(estimate.values()) <= 30 * MS


def test_short_stays_and_long_ones_of_a_process_have_their_own_habits() -> None:
    """Two work through stays of 1.6 ms while the other waits for its turn, and rest in long ones after 0.4."""
    short, long, work_of_long = 1_600_000, 30 * MS, 400_000

    def window(*stays: tuple[int, int]) -> tuple[Residency, list[tuple[int, int]]]:
        """Of stays (pid, length), and when there was work."""
        made, work, at = [], [], 0
        for pid, length in stays:
            made.append(Stay(pid, at, at, at + length))
            work.append((at, at + (work_of_long if length == long else length)))
            at += length
        return Residency(0, at, made), work

    usual, work = window(*[(1 + n % 2, short) for n in range(6)], (1, long), (2, long))
    model = BusyShareModel()
    for turn in range(300):
        moment = turn * 7_310_003 % usual.until
        model.learn(usual, [(moment, any(begin <= moment < end for begin, end in work))])
    another, work = window(*[(1, short)] * 5, *[(2, long)] * 3)
    estimate = model.estimate(another, sum(end - begin for begin, end in work))
    assert estimate[1] == pytest.approx(5 * short, abs=0.4 * MS)
    assert estimate[2] == pytest.approx(3 * work_of_long, abs=0.4 * MS)


@pytest.mark.parametrize(
    ("age", "saving"),
    [(1_536_000, 0), (2_054_000, 0), (2_104_000, 49_000), (2_157_000, 102_000), (6 * MS, 37_000)],
    ids=[
        "gave way",
        "gave way at the last moment",
        "small kernel stopped",
        "large one stopped",
        "went on, and stopped?",
    ],
)
@pytest.mark.parametrize("estimate", [estimate_without_samples, BusyShareModel().estimate], ids=["switches", "exact"])
def test_saving_a_context_in_the_middle_of_its_work_is_not_work(
    estimate: Callable[[Residency, int], dict[int, int]], age: int, saving: int
) -> None:
    """An H200's figures: a kernel is stopped 2.1 ms after the switch-in, and how long it takes to save is its own."""
    stays = [Stay(1 + n % 2, *(2 * [n * age]), (n + 1) * age) for n in range(100)]
    window = Residency(0, 100 * age, stays, slice_work=2_055_000)
    assert sum(estimate(window, 100 * age).values()) == pytest.approx(100 * (age - saving), rel=0.001)


def test_a_long_stay_uses_its_own_samples() -> None:
    """A process that usually rests after 10 ms works for all of a long stay; another that usually works does not."""
    model = BusyShareModel()
    usual = residency((1, 0, 500), (2, 500, 1000))
    for turn in range(20):
        moments = [(60 * n + 3 * turn) * MS for n in range(16)]
        model.learn(usual, [(moment, not 10 * MS <= moment < 500 * MS) for moment in moments])
    samples = [(moment * MS, moment < 500) for moment in range(20, 1000, 60)]
    model.learn(usual, samples)
    by_model, by_samples = model.estimate(usual, 500 * MS), model.estimate(usual, 500 * MS, samples)
    assert by_model[1] < 250 * MS
    assert by_samples[1] == pytest.approx(500 * MS, abs=60 * MS)
    assert sum(by_samples.values()) == pytest.approx(500 * MS, abs=10)


@pytest.mark.parametrize("work", [5, 30, 60, 250])
def test_samples_of_long_stays_are_unbiased(work: int) -> None:
    """One process works for `work` of each stay of 400 ms, the other for 320. Errors cancel out over many stays."""
    length, count = 400, 1800
    stays = [Stay(1 + n % 2, *(2 * [n * length * MS]), (n + 1) * length * MS) for n in range(count)]
    at, chance, looks = 0.0, random.Random(1), []
    while (at := at + chance.uniform(30, 90)) < count * length:
        looks.append((int(at * MS), at % length < (320 if at // length % 2 else work)))
    model, found = BusyShareModel(), 0
    for first in range(0, count, 12):
        window = Residency(stays[first].since, stays[first + 11].until, stays[first : first + 12])
        own = [look for look in looks if window.since <= look[0] < window.until]
        model.learn(window, own)
        found += model.estimate(window, 6 * (work + 320) * MS, own)[1]
    assert found / (count / 2) / MS == pytest.approx(work, abs=3)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 600 * MS)), min_size=1, max_size=30),
    samples=st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=40),
    busy=st.floats(0, 1.2),
)
def test_no_process_exceeds_its_residency_and_the_sum_does_not_exceed_the_device(
    lengths: list[tuple[int, int]], samples: list[tuple[float, bool]], busy: float
) -> None:
    at, stays = 0, []
    for pid, length in lengths:
        stays.append(Stay(pid, at, at, at + length))
        at += length
    window = Residency(0, at, stays)
    device = int(busy * at)
    model = BusyShareModel()
    looks = [(int(moment * at), was) for moment, was in samples]
    model.learn(window, looks)
    resident = window.sum_by_process()
    for figures in (
        model.estimate(window, device),
        model.estimate(window, device, looks),
        estimate_without_samples(window, device),
    ):
        assert figures.keys() == resident.keys()
        assert all(0 <= figures[pid] <= resident[pid] for pid in figures)
        assert sum(figures.values()) <= device
        missing = min(device, at) - sum(figures.values())
        assert missing <= len(stays) + 1e-6 * at or figures == {}
