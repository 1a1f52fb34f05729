"""Busy time from residency: limited by the residency of each process and by the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.gpu.nvml.switch_attribution import BusyShareModel, Residency, Stay, estimate_without_samples

MS = 1_000_000


def residency(*stays: tuple[int, int, int]) -> Residency:
    """Each stay is (pid, since, until) in milliseconds."""
    made = [Stay(pid, since * MS, since * MS, until * MS) for pid, since, until in stays]
    return Residency(0, stays[-1][2] * MS, made)


def test_without_samples_every_stay_is_busy_from_its_beginning() -> None:
    window = residency((1, 0, 50), (2, 50, 90), (3, 90, 100))
    assert estimate_without_samples(window, 30 * MS) == {1: 10 * MS, 2: 10 * MS, 3: 10 * MS}
    assert estimate_without_samples(window, 50 * MS) == {1: 20 * MS, 2: 20 * MS, 3: 10 * MS}
    assert estimate_without_samples(window, 200 * MS) == {1: 50 * MS, 2: 40 * MS, 3: 10 * MS}
    assert estimate_without_samples(window, 0) == {1: 0, 2: 0, 3: 0}
    assert estimate_without_samples(Residency(0, MS), MS) == {}


@pytest.mark.parametrize(
    ("age", "saving"),
    [(1_536_000, 0), (2_054_000, 0), (2_104_000, 49_000), (2_157_000, 102_000), (6 * MS, 37_000)],
    ids=["finished", "just finished", "small kernel preempted", "large kernel preempted", "long stay"],
)
@pytest.mark.parametrize("estimate", [estimate_without_samples, BusyShareModel().estimate], ids=["switches", "exact"])
def test_saving_a_preempted_context_is_not_busy_time(
    estimate: Callable[[Residency, int], dict[int, int]], age: int, saving: int
) -> None:
    """On an H200 a kernel is preempted 2.1 ms after the switch-in. The time to save it depends on the kernel."""
    stays = [Stay(1 + n % 2, *(2 * [n * age]), (n + 1) * age) for n in range(100)]
    window = Residency(0, 100 * age, stays, slice_work=2_055_000)
    assert sum(estimate(window, 100 * age).values()) == pytest.approx(100 * (age - saving), rel=0.001)


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
