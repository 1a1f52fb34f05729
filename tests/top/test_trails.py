"""Sparklines: what top saw itself, what a server remembers, and how little of it is kept."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.top.api_answers import FULL, NO_DATA, ServerHistory
from podgpu.top.cells import ASCII, RICH, span, spark
from podgpu.top.trails import POINTS, Trails

ROW = ("n", "GPU-a", "", "")
OTHER = ("n", "GPU-b", "", "")


def known(trails: Trails, row: tuple[str, str, str, str] = ROW) -> list[float]:
    return [point / FULL for point in trails.all()[row] if point != NO_DATA]


def test_what_was_seen_second_by_second() -> None:
    trails = Trails()
    for second in range(5):
        trails.note({ROW: second / 10}, 1000.0 + second)
    assert trails.all()[ROW][-5:] == bytes(round(s / 10 * FULL) for s in range(5))
    assert known(trails) == [0.0, 0.1, 0.2, 0.3, 0.4]


def test_several_looks_within_a_step_are_one_point() -> None:
    trails = Trails(step=10.0)
    for second, ratio in ((0, 0.2), (4, 0.4), (8, 0.6)):
        trails.note({ROW: ratio}, 1000.0 + second)
    assert known(trails) == [0.4]


def test_a_gap_stays_a_gap() -> None:
    trails = Trails()
    trails.note({ROW: 1.0}, 1000.0)
    trails.note({ROW: None}, 1001.0)
    trails.note({ROW: 0.0}, 1003.0)
    assert trails.all()[ROW][-4:] == bytes([FULL, NO_DATA, NO_DATA, 0])


def test_the_longer_it_looks_the_longer_the_time_that_is_shown() -> None:
    trails = Trails()
    spans = set()
    for second in range(7200):
        trails.note({ROW: 0.5}, float(second))
        spans.add(trails.span)
    assert spans == {60.0, 120.0, 240.0, 480.0, 960.0, 1920.0}
    assert len(known(trails)) == POINTS
    assert set(known(trails)) == {0.5}


def test_who_is_gone_is_forgotten() -> None:
    trails = Trails()
    trails.note({ROW: 0.5, OTHER: 0.5}, 1.0)
    trails.note({OTHER: 0.5}, 2.0)
    assert set(trails.all()) == {OTHER}


def test_a_server_remembers_what_was_before() -> None:
    trails = Trails()
    trails.note({ROW: 0.5, OTHER: 0.1}, 100_000.0)
    remembered = bytes([0, 0, 50, 100, 150, 200, NO_DATA])
    trails.remember(ServerHistory(15.0, {("GPU-a", ""): remembered}), {ROW: ("GPU-a", "")}, 100_001.0)
    assert trails.span == 15.0 * POINTS
    assert known(trails) == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 0.5]  # the last is its own
    assert known(trails, OTHER) == [0.1]
    trails.note({ROW: 1.0, OTHER: 0.1}, 100_016.0)
    assert known(trails)[-2:] == [0.5, 1.0]


def test_a_server_that_has_hardly_begun_is_not_listened_to_yet() -> None:
    trails = Trails()
    trails.note({ROW: 0.5}, 1000.0)
    few = ServerHistory(60.0, {("GPU-a", ""): bytes([NO_DATA] * 55 + [100] * 5)})
    trails.remember(few, {ROW: ("GPU-a", "")}, 1000.0)
    assert (trails.span, trails.remembers, known(trails)) == (60.0, False, [0.5])
    trails.remember(ServerHistory(60.0, {("GPU-a", ""): bytes([100] * 6)}), {ROW: ("GPU-a", "")}, 1000.0)
    assert (trails.span, trails.remembers, len(known(trails))) == (3600.0, True, 6)


def test_more_points_than_are_shown_are_the_last_of_them() -> None:
    trails = Trails()
    trails.note({ROW: None}, 1.0)
    trails.remember(
        ServerHistory(15.0, {("GPU-a", ""): bytes(100) + bytes([FULL]) * POINTS}), {ROW: ("GPU-a", "")}, 1.0
    )
    assert set(known(trails)) == {1.0}


@given(
    st.lists(
        st.tuples(st.floats(0, 200), st.one_of(st.none(), st.floats(-1, 2))),
        max_size=40,
    ),
    st.sampled_from([0.3, 1.0, 7.0, 15.0, 300.0]),
    st.binary(max_size=80),
)
def test_whatever_comes_there_are_as_many_points(
    looks: list[tuple[float, float | None]], step: float, remembered: bytes
) -> None:
    trails, now = Trails(), 0.0
    for wait, ratio in looks:
        now += wait
        trails.note({ROW: ratio}, now)
        trails.remember(ServerHistory(step, {("GPU-a", ""): remembered}), {ROW: ("GPU-a", "")}, now)
        assert len(trails.all()[ROW]) == POINTS


def test_eight_thousand_rows_are_kept_in_little() -> None:
    rows = [("n", f"GPU-{number}", "", "") for number in range(8000)]
    trails = Trails()
    for second in range(3):
        trails.note(dict.fromkeys(rows, 0.5), float(second))
    assert sum(sys.getsizeof(points) for points in trails.all().values()) < 8000 * 200


@pytest.mark.parametrize(
    ("points", "width", "text"),
    [
        (bytes([0, 100, 200]), 3, "▁▅█"),
        (bytes([0, 100, 200]), 6, "   ▁▅█"),
        (bytes([NO_DATA, 0, 1]), 3, " ▁▂"),
        (bytes([0, 0, 200, 200]), 2, "▁█"),
        (bytes([200, NO_DATA]), 1, "█"),
        (b"", 4, "    "),
        (bytes([0, 100]), 0, ""),
    ],
)
def test_sparklines(points: bytes, width: int, text: str) -> None:
    assert spark(points, width, RICH) == text


@given(st.binary(max_size=100), st.integers(0, 120))
def test_sparklines_have_their_width(points: bytes, width: int) -> None:
    assert len(spark(points, width, RICH)) == width
    assert spark(points, width, ASCII).isascii()


@pytest.mark.parametrize(
    ("seconds", "text"), [(60, "1m"), (3600, "1h"), (900, "15m"), (90, "90s"), (5400, "90m"), (24 * 3600, "24h")]
)
def test_spans(seconds: float, text: str) -> None:
    assert span(seconds) == text
