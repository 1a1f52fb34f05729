"""The ring against a plain list of everything it was told; and what becomes of it over a day."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podgpu.figures.device import DeviceFigures
from podgpu.history.asking import COARSE, PER_DAY, PER_HOUR, RANGES, STEP, Kept
from podgpu.history.columns import NO_SAMPLE, Sample
from podgpu.history.ring import Ring, Told
from podgpu.history.rows import Key, Rows
from tests.history.figures import MIB, NOON, gpu, holder, pod

BEGIN = NOON
"""A multiple of all steps."""
maybe_ratio = st.none() | st.floats(0, 1)


def kept(ring: Ring, at: float, key: str = "GPU-0", asked: str = "1h") -> Kept:
    found = ring.keep_of(Key(key), RANGES[asked], at)
    assert found is not None
    return found


def near(a: float | None, b: float | None, by: float) -> bool:
    return (a is None) == (b is None) and (a is None or b is None or abs(a - b) <= by)


class Plain:
    """Everything that was told, as it was."""

    def __init__(self) -> None:
        self._rounds: list[tuple[float, dict[str, float | None]]] = []

    def add(self, at: float, devices: Sequence[DeviceFigures]) -> None:
        if devices:
            self._rounds.append((at, {device.uuid: device.utilization for device in devices}))

    def values(self, uuid: str, begin: float, end: float) -> list[float]:
        """Utilisations within that time; of each 15 s those of the last round."""
        last = {at // STEP: told for at, told in self._rounds if begin <= at < end}
        return [value for told in last.values() if (value := told.get(uuid)) is not None]


@settings(max_examples=60, deadline=None)
@given(
    rounds=st.lists(
        st.tuples(
            st.sampled_from([15.0, 15.0, 15.0, 7.0, 31.0, 290.0, 4000.0]),
            st.lists(maybe_ratio, min_size=3, max_size=3),
            st.integers(0, 7),
        ),
        min_size=1,
        max_size=60,
    )
)
def test_the_ring_says_what_a_plain_list_says(rounds: Sequence[tuple[float, Sequence[float | None], int]]) -> None:
    """Devices come and go (a bit of the last number says which are there), rounds are late or lost."""
    ring, plain, at = Ring(), Plain(), BEGIN
    for pause, ratios, present in rounds:
        at += pause
        devices = [gpu(n, ratio) for n, ratio in enumerate(ratios) if present >> n & 1]
        ring.record(at, [Told(devices)])
        plain.add(at, devices)
    for number in range(3):
        for asked in ("1h", "24h"):
            step, steps = RANGES[asked]
            found = ring.keep_of(Key(f"GPU-{number}"), RANGES[asked], at)
            told = [] if found is None else [sample.utilization for sample in found.samples]
            first = (at // step - steps + 1) * step
            for place in range(steps):
                values = plain.values(f"GPU-{number}", first + place * step, first + (place + 1) * step)
                expected = sum(values) / len(values) if values else None
                assert near(told[place] if told else None, expected, 2e-4), (asked, place)


@given(
    utilization=maybe_ratio,
    memory=st.none() | st.integers(0, 15 * 1024 * 1024 * MIB),
    watts=st.none() | st.floats(0, 6500),
    temperature=st.none() | st.floats(0, 200),
)
def test_a_sample_of_eight_bytes_is_what_was_told(
    utilization: float | None, memory: int | None, watts: float | None, temperature: float | None
) -> None:
    ring = Ring()
    ring.record(BEGIN, [Told([gpu(0, utilization, memory=memory, watts=watts, temperature=temperature), gpu(1, None)])])
    assert {len(column) for column in ring.fine.values()} == {2 * 8}
    sample = kept(ring, BEGIN).samples[-1]
    assert near(sample.utilization, utilization, 1e-4)
    assert near(sample.memory, memory, MIB)
    assert near(sample.watts, watts, 0.1)
    assert near(sample.temperature, temperature, 1.0)
    if utilization:
        assert sample.utilization, "what does a little is not idle"


@pytest.mark.parametrize("impossible", [-1.0, 1e9, float("nan"), float("inf")])
def test_what_cannot_be_is_not_known(impossible: float) -> None:
    ring = Ring()
    ring.record(BEGIN, [Told([gpu(0, 0.5, memory=2**60, watts=impossible, temperature=impossible)])])
    assert kept(ring, BEGIN).samples[-1] == Sample(0.5, None, None, None)


def test_a_gap_is_a_gap() -> None:
    """Nobody was asked for two minutes: nothing is known of them, and the five minutes are the mean of the rest."""
    ring = Ring()
    for number in range(40):
        if not 4 <= number < 12:
            ring.record(BEGIN + number * STEP, [Told([gpu(0, 0.25 if number < 4 else 0.75)])])
    hour = [sample.utilization for sample in kept(ring, BEGIN + 39 * STEP).samples[-40:]]
    assert hour == [0.25] * 4 + [None] * 8 + [0.75] * 28
    day = [sample.utilization for sample in kept(ring, BEGIN + 39 * STEP, asked="24h").samples[-3:]]
    assert day == [None, pytest.approx((4 * 0.25 + 8 * 0.75) / 12, abs=1e-4), 0.75]


def test_figures_of_an_old_node_are_not_taken_for_those_of_now() -> None:
    ring = Ring()
    ring.record(BEGIN, [Told([gpu(0, 0.5)])])
    ring.record(BEGIN + STEP, [Told([gpu(0, 0.5)], fresh=False)])
    assert [sample.utilization for sample in kept(ring, BEGIN + STEP).samples[-2:]] == [0.5, None]


def test_a_shared_gpu_keeps_what_each_holder_uses() -> None:
    ring, a, b = Ring(), pod("a"), pod("b")
    ring.record(BEGIN, [Told([gpu(0, 0.9, holder(a, 0.6, 10 * MIB), holder(b, 0.3, 20 * MIB))])])
    assert {who: line[-1] for who, line in kept(ring, BEGIN).own.items()} == {
        a.who: Sample(0.6, 10 * MIB),
        b.who: Sample(0.3, 20 * MIB),
    }


def test_a_sole_holder_is_its_device_unless_somebody_else_works_there_too() -> None:
    ring, a = Ring(), pod("a")
    ring.record(BEGIN, [Told([gpu(0, 0.9, holder(a, 0.88))])])
    assert kept(ring, BEGIN).own == {}
    ring.record(BEGIN + STEP, [Told([gpu(0, 0.9, holder(a, 0.0))])])
    assert kept(ring, BEGIN + STEP).own[a.who][-2:] == [NO_SAMPLE, Sample(0.0, None)]


def test_a_day_of_nodes_that_come_and_go_stays_bounded() -> None:
    """Every five minutes another GPU and another pod, for two days: what was there a day ago is gone, places are given
    anew, and nobody is shown what was another's."""
    ring = Ring()
    at = BEGIN
    for number in range(2 * PER_DAY):
        for _ in range(2):
            at += COARSE / 2
            ring.record(at, [Told([gpu(number, 1.0 if number % 2 else 0.25, holder(pod(f"p{number}"), 0.25))])])
    assert len(ring.fine) <= PER_HOUR
    assert len(ring.coarse) <= PER_DAY
    assert len(ring.rows) <= 2 * (PER_DAY + 4)
    assert ring.rows.end <= 2 * (PER_DAY + 4)
    assert len(ring.spans) <= 2 * PER_DAY
    assert ring.keep_of(Key("GPU-0"), RANGES["24h"], at) is None
    for number in (2 * PER_DAY - 1, 2 * PER_DAY - 10, 2 * PER_DAY - 200):
        known = [s.utilization for s in kept(ring, at, f"GPU-{number}", "24h").samples if s.utilization is not None]
        assert known
        assert set(known) == {1.0 if number % 2 else 0.25}


def test_more_devices_than_are_kept() -> None:
    """Those that are there stay; who was seen longest ago makes room, and nobody has another's past."""
    ring = Ring(most_rows=10)
    ring.record(BEGIN, [Told([gpu(number, 0.1) for number in range(8)])])
    ring.record(BEGIN + STEP, [Told([gpu(number, 0.9) for number in range(6, 14)])])
    assert len(ring.rows) == 10
    assert [s.utilization for s in kept(ring, BEGIN + STEP, "GPU-13").samples[-2:]] == [None, 0.9]
    assert [s.utilization for s in kept(ring, BEGIN + STEP, "GPU-7").samples[-2:]] == [0.1, 0.9]
    ring.record(BEGIN + 2 * STEP, [Told([gpu(number) for number in range(30)])])
    assert len(ring.rows) == 10
    assert ring.rows.refused > 0
    assert ring.rows.end == 10


@pytest.mark.parametrize("count", [11, 25])
def test_more_live_devices_than_are_kept_do_not_throw_each_other_out(count: int) -> None:
    """Those that have a place keep it and their past, turn after turn, whoever else finds none."""
    ring = Ring(most_rows=10)
    ring.record(BEGIN, [Told([gpu(0, 0.6, holder(pod("a"), 0.3), holder(pod("b"), 0.3))])])
    devices = [gpu(n, 0.5, holder(pod(f"a{n}"), 0.25), holder(pod(f"b{n}"), 0.25)) for n in range(count)]
    ring.record(BEGIN + STEP, [Told(devices)])
    known, columns = {key: row.place for key, row in ring.rows}, dict(ring.fine)
    assert sorted(key.uuid for key in known) == sorted(f"GPU-{n}" for n in range(10))
    for turn in range(2, 8):
        ring.record(BEGIN + turn * STEP, [Told(devices)])
        assert {key: row.place for key, row in ring.rows} == known
    assert all(ring.fine[number] is column for number, column in columns.items()), "nothing was blanked"
    assert [s.utilization for s in kept(ring, BEGIN + 7 * STEP, "GPU-9").samples[-8:]] == [None] + [0.5] * 7


def test_holders_make_room_before_devices_do() -> None:
    rows = Rows(most=3)
    for key in (Key("GPU-0"), Key("GPU-0", "", ("pod", "a"))):
        rows.take(key, 1.0)
    rows.take(Key("GPU-1"), 0.5)
    assert len(rows.make_room([Key("GPU-2")], 2.0)) == 1
    assert Key("GPU-1") in rows
    assert Key("GPU-0", "", ("pod", "a")) not in rows
