"""Tests the waiting times of processes that share a GPU, estimated from the context-switch log."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.model import ProcessWaits
from podgpu.node.gpu.nvml.switch_attribution import (
    SWITCHED_IN,
    Period,
    RecordDecoder,
    Residency,
    SwitchCosts,
    Timeline,
    estimate_without_samples,
)
from podgpu.node.gpu.nvml.switch_waiting import DEFAULT_SLICE_NS, WaitEstimator
from tests.engine import Bursts, Engine

MS = 1_000_000
SECOND = 10**9
LEAD = 64_000
A, B, C = 1, 2, 3


def follow(*periods: tuple[int, float], busy: float = 1.0) -> ProcessWaits:
    """Estimates the waits in a window of consecutive periods (pid, milliseconds). `busy`: busy
    fraction of each.
    """
    at, made = 0, []
    for pid, length in periods:
        made.append(Period(pid, at, at, at + int(length * MS)))
        at = made[-1].until
    residency = Residency(0, at, made)
    return WaitEstimator().add(
        residency, {pid: int(busy * ns) for pid, ns in residency.resident.items()}
    )


def test_a_process_that_lost_the_gpu_at_the_end_of_its_slice_waited_until_it_returned() -> None:
    waits = follow((A, 2.14), (B, 1.0), (C, 2.0), (A, 1.0))
    assert waits.processes == {A: (3 * MS, 3 * MS, 3 * MS)}
    assert waits.pairs == {(A, B): MS, (A, C): 2 * MS}
    assert waits.pressure_ns == 3 * MS


def test_a_process_that_left_early_may_not_have_waited_at_all() -> None:
    assert follow((A, 1.0), (B, 2.0), (A, 1.0)).processes == {A: (2 * MS, 0, 2 * MS)}


def test_a_process_waited_at_most_for_one_stay_of_each_other_process() -> None:
    waits = follow((A, 1.0), (B, 2.0), (C, 2.0), (B, 2.0), (A, 1.0))
    assert waits.processes[A] == (3 * MS, 0, 4 * MS)
    assert waits.pairs[A, B] + waits.pairs[A, C] == 3 * MS


@pytest.mark.parametrize(("busy", "estimate"), [(1.0, 1.07), (0.0, 0.0)])
def test_a_process_did_not_wait_before_the_last_slice_of_a_long_stay(
    busy: float, estimate: float
) -> None:
    waits = follow((A, 1.0), (B, 50.0), (A, 1.0), busy=busy)
    assert waits.processes[A] == (estimate * MS, 0, 2.14 * MS)


@pytest.mark.parametrize("slice_ns", [1_000_000, 2_100_000, 6_000_000])
def test_the_length_of_a_slice_is_detected(slice_ns: int) -> None:
    estimator, _ = run([(1000, 1000)] * 3, slice_ns=slice_ns)
    assert estimator.slice == pytest.approx(slice_ns, rel=0.05)


def test_periodic_loads_with_stays_of_equal_length_do_not_wait() -> None:
    estimator, (truth, waited) = run([(12, 30), (12, 30, 15)])
    assert estimator.slice == DEFAULT_SLICE_NS
    assert truth[A] < 1
    assert waited[A][0] < 5


@pytest.mark.parametrize(
    ("loads", "slice_ns"),
    [
        ([(1000, 1000), (1000, 1000)], 2_100_000),
        ([(1000, 1000), (1000, 1000)], 6_000_000),
        ([(1000, 1000), (20, 83), (8, 51)], 2_100_000),
        ([(37, 97), (53, 211, 5), (11, 61, 9)], 2_100_000),
        ([(31, 101), (29, 103), (30, 107), (28, 109)], 2_100_000),
        ([(31, 101), (29, 103), (30, 107), (28, 109)], 6_000_000),
        ([(5, 100), (7, 130), (11, 170)], 2_100_000),
        ([(1, 10), (1, 11), (1, 13)], 2_100_000),
        ([(0.1, 2), (0.1, 2.3)], 2_100_000),
        ([(1, 5), (1, 7), (1, 11)], 2_100_000),
    ],
)
def test_the_estimate_is_near_the_truth(loads: Sequence[tuple[float, ...]], slice_ns: int) -> None:
    _, (truth, waited) = run(loads, slice_ns=slice_ns)
    for pid, (estimate, least, most) in waited.items():
        assert estimate == pytest.approx(truth[pid], abs=5.0)
        assert least <= estimate <= most
        assert least - 1 < truth[pid] < most + 3


def run(
    loads: Sequence[tuple[float, ...]], seconds: int = 20, slice_ns: int = 2_100_000
) -> tuple[WaitEstimator, tuple[dict[int, float], dict[int, list[float]]]]:
    """Simulates loads (work, period and delay in ms). Returns true and estimated waits in % of the
    time, by pid.
    """
    engine, estimator = Engine(slice_ns=slice_ns), WaitEstimator()
    timeline = Timeline(0, SwitchCosts(LEAD))
    for pid, (work, period, *late) in enumerate(loads, 1):
        engine.start(Bursts(pid, int(work * MS), int(period * MS), int(sum(late) * MS)))
    waited: dict[int, list[float]] = {}
    read = busy = 0
    for second in range(1, seconds + 1):
        engine.advance(second * SECOND)
        for switch in engine.switches(read):
            timeline.add([switch.at], [switch.pid if switch.tag == SWITCHED_IN else ~switch.pid])
        residency = timeline.take_window(second * SECOND)
        worked = engine.busy_ns - busy - residency.switching
        waits = estimator.add(residency, estimate_without_samples(residency, worked))
        check(residency, waits)
        for pid, figures in waits.processes.items():
            sums = waited.setdefault(pid, [0.0, 0.0, 0.0])
            waited[pid] = [
                one + ns * 100 / SECOND / seconds for one, ns in zip(sums, figures, strict=True)
            ]
        read, busy = engine.switched, engine.busy_ns
    truth = {pid: ns * 100 / SECOND / seconds for pid, ns in engine.waited.items()}
    return estimator, (truth, waited)


def check(residency: Residency, waits: ProcessWaits) -> None:
    resident = residency.resident
    for pid, (estimate, least, most) in waits.processes.items():
        assert 0 <= least <= estimate <= most <= residency.window - resident[pid]
    for waiter, runner in waits.pairs:
        assert waiter != runner
    rows = Counter[int]()
    for (waiter, _), ns in waits.pairs.items():
        assert ns >= 0
        rows[waiter] += ns
    for pid, (estimate, _, _) in waits.processes.items():
        assert estimate - len(waits.pairs) <= rows[pid] <= estimate  # each pair is rounded down
    assert 0 <= waits.pressure_ns <= residency.window


@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 9 * MS), st.integers(0, MS)), min_size=1
    ),
    window=st.integers(MS, 100 * MS),
    busy=st.floats(0, 1),
)
def test_waiting_and_running_never_exceed_the_time_that_passed(
    lengths: list[tuple[int, int, int]], window: int, busy: float
) -> None:
    timeline, estimator = Timeline(0, SwitchCosts(LEAD)), WaitEstimator()
    at = 0
    for pid, length, pause in lengths:
        timeline.add([at, at + length], [pid, ~pid])
        at += length + pause
    for until in (
        0,
        *range(window, at + window, window),
    ):  # one without length: the clock was set back
        residency = timeline.take_window(until)
        check(
            residency,
            estimator.add(residency, estimate_without_samples(residency, int(busy * window))),
        )


def test_a_missing_window_is_not_counted_as_waiting() -> None:
    estimator = WaitEstimator()
    for since in (0, SECOND, 3 * SECOND):
        periods = [
            Period(A, since, since, since + 2 * MS),
            Period(B, since + 2 * MS, since + 2 * MS, since + SECOND),
        ]
        waits = estimator.add(
            Residency(since, since + SECOND, periods), {A: 2 * MS, B: SECOND - 2 * MS}
        )
        assert bool(waits.processes) == (since == SECOND)


@pytest.mark.parametrize(
    ("name", "busy", "waited"),
    [
        (
            "h200-three-loads",
            0.74,
            {684: 27.4, 685: 24.5, 686: 12.4},
        ),  # 22 of 50, 18 of 65 and 40 of 400 ms
        (
            "h200-short-bursts",
            0.31,
            {678: 4.2, 679: 6.2, 680: 5.9},
        ),  # 1 of 8, 1.5 of 13 and 0.5 of 6 ms
    ],
)
def test_the_estimate_agrees_with_loads_that_recorded_their_waiting(
    name: str, busy: float, waited: dict[int, float]
) -> None:
    """Logs of 20 s on an H200 with random pauses, from tests/device/waiting.py. `waited`: pid -> %
    of the time.
    """
    path = Path(__file__).with_name("recorded") / f"{name}.bin.gz"
    ((_, _, times, pids),) = RecordDecoder().decode(gzip.decompress(path.read_bytes()))
    first, last = times[0], times[-1]
    timeline, estimator = Timeline(first, SwitchCosts(LEAD)), WaitEstimator()
    timeline.add(times, pids)
    found = Counter[int]()
    for end in range(first + SECOND, last, SECOND):
        residency = timeline.take_window(end)
        waits = estimator.add(residency, estimate_without_samples(residency, int(busy * SECOND)))
        check(residency, waits)
        found.update({pid: estimate for pid, (estimate, _, _) in waits.processes.items()})
    seconds = (last - first) // SECOND
    for pid, percent in waited.items():
        assert found[pid] / seconds / SECOND * 100 == pytest.approx(percent, abs=3)
