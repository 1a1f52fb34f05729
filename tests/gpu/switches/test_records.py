"""Tests residency, computed from context-switch records, and busy time, computed from residency."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podgpu.node.gpu.nvml.switch_attribution import (
    RECORD,
    BusyShareModel,
    Period,
    RecordDecoder,
    Residency,
    SwitchCosts,
    SwitchLogError,
    Timeline,
    estimate_without_samples,
)

MS = 1_000_000
IN, OUT = 6, 7


def chunk(*switches: tuple[int, int, int], first: int = 0, instance: int = 255) -> bytes:
    """Encodes context switches (tag, pid, time) as records of the log."""
    return b"".join(
        RECORD.pack(2, 0, 0, tag, 0, (first + n) % 65536, pid, pid, 0, instance, instance, at)
        for n, (tag, pid, at) in enumerate(switches)
    )


def read(data: bytes, lead: int = 0) -> Timeline:
    timeline = Timeline(0, SwitchCosts(lead))
    for _, _, times, pids in RecordDecoder().decode(data):
        timeline.add(times, pids)
    return timeline


def windows(
    switches: Many[tuple[int, int, int]], ends: Many[int], lead: int = 0
) -> list[Residency]:
    timeline = read(chunk(*switches), lead)
    return [timeline.take_window(end) for end in ends]


def test_a_stay_continues_in_the_next_window() -> None:
    first, second = windows([(IN, 1, 2 * MS), (OUT, 1, 15 * MS)], [10 * MS, 20 * MS])
    assert (first.resident, first.unknown, first.switching) == ({1: 8 * MS}, 2 * MS, 0)
    assert second.resident == {1: 5 * MS}
    assert (second.unknown, second.unloaded) == (0, 5 * MS), "no context is loaded after the save"


def test_the_time_between_contexts_and_the_lead_are_switching() -> None:
    switches = [(IN, 1, 0), (OUT, 1, 4 * MS), (IN, 2, 4 * MS + 84_000)]
    (only,) = windows(switches, [10 * MS], lead=64_000)
    assert only.switching == 64_000 + 84_000 + 64_000
    assert only.resident == {1: 4 * MS - 64_000, 2: 6 * MS - 84_000 - 64_000}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (chunk((IN, 1, 1), (OUT, 1, 2))[:-1], "bad_record"),
        (chunk((5, 1, 1)), "bad_record"),
        (chunk((IN, 1, 1)) + chunk((OUT, 1, 2), first=3), "sequence_gap"),
        (chunk((IN, 1, 1), (IN, 2, 2)), "disorder"),
        (chunk((IN, 1, 1), (OUT, 2, 2)), "disorder"),
        (chunk((IN, 1, 5), (OUT, 1, 2)), "disorder"),
    ],
    ids=[
        "part of a record",
        "unknown tag",
        "missing number",
        "two switch-ins",
        "wrong save",
        "backwards",
    ],
)
def test_inconsistent_records_are_rejected(data: bytes, reason: str) -> None:
    with pytest.raises(SwitchLogError) as caught:
        read(data)
    assert caught.value.reason == reason


def test_a_context_that_was_reset_after_a_fault_has_no_save() -> None:
    """Times of an H200: XID 31 at 3.28 ms, and the next context 278 ms later."""
    switch_time = 80_000
    before = (OUT, 2, 3 * MS - switch_time)
    switches = [before, (IN, 1, 3 * MS), (IN, 2, 281 * MS), (OUT, 2, 283 * MS)]
    (only,) = windows(switches, [283 * MS + switch_time])
    assert only.resident == {2: 5 * MS - switch_time}
    assert only.unloaded == 278 * MS, "the engine was reset"
    assert only.last_resident == {1: 3 * MS, 2: 283 * MS}


def test_a_context_that_was_reset_is_found_in_the_next_chunk() -> None:
    timeline = read(chunk((OUT, 2, 2 * MS), (IN, 1, 3 * MS)))
    assert timeline.take_window(10 * MS).resident == {1: 7 * MS, 2: 2 * MS}
    timeline.add([281 * MS, 283 * MS], [2, ~2])
    following = timeline.take_window(283 * MS)
    assert (following.resident, following.unloaded) == ({2: 2 * MS}, 271 * MS)


def test_numbers_wrap_around_and_continue_in_the_next_chunk() -> None:
    sequence = RecordDecoder()
    assert list(sequence.decode(chunk((IN, 1, 1), (OUT, 1, 2), first=65534))) == [
        (255, 255, [1, 2], [1, ~1])
    ]
    assert list(sequence.decode(chunk((IN, 1, 3), first=0))) == [(255, 255, [3], [1])]


@settings(max_examples=40)
@given(
    steps=st.lists(
        st.tuples(st.integers(1, 5), st.integers(0, 3 * MS), st.integers(0, 3 * MS)), max_size=60
    ),
    ends=st.lists(st.integers(1, 5 * MS), min_size=1, max_size=20),
    lead=st.sampled_from([0, 64_000]),
)
def test_stays_switching_and_unknown_add_up_to_any_window(
    steps: list[tuple[int, int, int]], ends: list[int], lead: int
) -> None:
    at, switches = 0, []
    for pid, pause, period in steps:
        switches += [(IN, pid, at + pause), (OUT, pid, at + pause + period)]
        at += pause + period
    cuts = [sum(ends[: n + 1]) for n in range(len(ends))]
    for window in windows(switches, cuts, lead):
        empty = window.unknown + window.unloaded
        assert sum(window.resident.values()) + window.switching + empty == window.window
        assert all(
            window.since <= period.since < period.until <= window.until for period in window.periods
        )
    whole = windows(switches, [cuts[-1]], lead)[0].resident
    parts: dict[int, int] = {}
    for window in windows(switches, cuts, lead):
        for pid, ns in window.resident.items():
            parts[pid] = parts.get(pid, 0) + ns
    assert parts == whole


@given(data=st.binary(max_size=320))
def test_any_bytes_are_read_or_rejected(data: bytes) -> None:
    with suppress(SwitchLogError):
        read(data).take_window(10**18)


def residency(*periods: tuple[int, int, int]) -> Residency:
    """Builds a residency from periods (pid, since, until) in milliseconds."""
    made = [Period(pid, since * MS, since * MS, until * MS) for pid, since, until in periods]
    return Residency(0, periods[-1][2] * MS, made)


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
    ids=[
        "finished",
        "just finished",
        "small kernel preempted",
        "large kernel preempted",
        "long period",
    ],
)
@pytest.mark.parametrize(
    "estimate", [estimate_without_samples, BusyShareModel().estimate], ids=["switches", "exact"]
)
def test_saving_a_preempted_context_is_not_busy_time(
    estimate: Callable[[Residency, int], dict[int, int]], age: int, saving: int
) -> None:
    """An H200 preempts a kernel 2.1 ms after the switch-in. The time to save a context depends on
    the kernel.
    """
    periods = [Period(1 + n % 2, n * age, n * age, (n + 1) * age) for n in range(100)]
    window = Residency(0, 100 * age, periods, costs=SwitchCosts(slice_work=2_055_000))
    assert sum(estimate(window, 100 * age).values()) == pytest.approx(
        100 * (age - saving), rel=0.001
    )


@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 6), st.integers(1, 600 * MS)), min_size=1, max_size=30
    ),
    samples=st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=40),
    busy=st.floats(0, 1.2),
)
def test_no_process_exceeds_its_residency_and_the_sum_does_not_exceed_the_device(
    lengths: list[tuple[int, int]], samples: list[tuple[float, bool]], busy: float
) -> None:
    at, periods = 0, []
    for pid, length in lengths:
        periods.append(Period(pid, at, at, at + length))
        at += length
    window = Residency(0, at, periods)
    device = int(busy * at)
    model = BusyShareModel()
    looks = [(int(moment * at), was) for moment, was in samples]
    model.learn(window, looks)
    resident = window.resident
    for figures in (
        model.estimate(window, device),
        model.estimate(window, device, looks),
        estimate_without_samples(window, device),
    ):
        assert figures.keys() == resident.keys()
        assert all(0 <= figures[pid] <= resident[pid] for pid in figures)
        assert sum(figures.values()) <= device
        missing = min(device, at) - sum(figures.values())
        assert missing <= len(periods) + 1e-6 * at
