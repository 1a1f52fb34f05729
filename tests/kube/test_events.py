"""Lines from pieces, events from lines, and the time to stay away: all pure."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.errors import SourceError
from podgpu.kube.answers import api_sentence, parse_retry_after
from podgpu.kube.backoff import Backoff
from podgpu.kube.events import Lines, is_older, parse_event, parse_list, uid

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)
_like_events = st.fixed_dictionaries(
    {"type": st.sampled_from(["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]) | _json},
    optional={"object": _json | st.fixed_dictionaries({"metadata": _json, "code": _json, "message": _json})},
)


@given(st.binary(max_size=120), st.lists(st.integers(0, 120), max_size=12))
def test_any_cut_gives_the_same_lines(stream: bytes, cuts: list[int]) -> None:
    stream += b"\n"
    edges = [0, *sorted(cuts), len(stream)]
    lines = Lines()
    found = [line for start, end in pairwise(edges) for line in lines.feed(stream[start:end])]
    assert found == [line for line in (one.strip() for one in stream.split(b"\n")) if line]


def test_what_no_newline_ended_is_no_line() -> None:
    assert Lines().feed(b'{"type": "ADD') == []


@pytest.mark.parametrize(
    "pieces", [[b"x" * 11], [b"x" * 6, b"x" * 6], [b"x" * 11 + b"\n"], [b"x" * 6, b"x" * 6 + b"\n"]]
)
def test_a_line_past_its_bound(pieces: list[bytes]) -> None:
    lines = Lines(longest=10)
    *before, last = pieces
    for piece in before:
        lines.feed(piece)
    with pytest.raises(SourceError, match="larger than"):
        lines.feed(last)


def test_lines_of_the_full_length_do_not_add_up() -> None:
    lines = Lines(longest=10)
    for _ in range(5):
        assert lines.feed(b"x" * 10 + b"\n") == [b"x" * 10]


@given(st.binary(max_size=60) | (_like_events | _json).map(lambda value: json.dumps(value).encode()))
def test_any_line_gives_an_event_or_a_source_error(line: bytes) -> None:
    try:
        event = parse_event(line)
        found = event.kind if event.version else ""
    except SourceError as error:
        found = error.reason
    assert found in ("ADDED", "MODIFIED", "DELETED", "BOOKMARK", "bad_answer", "gone", "server_error")


@given(st.dictionaries(st.sampled_from(["items", "metadata"]), _json))
def test_any_list_gives_objects_or_a_source_error(answer: dict[str, Any]) -> None:
    try:
        items, version = parse_list(answer)
    except SourceError as error:
        items, version = [], error.reason
    assert version
    assert all(isinstance(one, dict) for one in items)


def test_part_of_a_list_is_no_list() -> None:
    with pytest.raises(SourceError, match="part of a list"):
        parse_list({"items": [], "metadata": {"resourceVersion": "1", "continue": "more"}})


def test_an_empty_list_may_be_null() -> None:
    assert parse_list({"items": None, "metadata": {"resourceVersion": "1"}}) == ([], "1")


@pytest.mark.parametrize("code", [{"code": 410}, {"reason": "Expired"}, {"reason": "Gone"}])
def test_an_old_version_is_gone(code: dict[str, Any]) -> None:
    with pytest.raises(SourceError, match="too old") as caught:
        parse_event(json.dumps({"type": "ERROR", "object": {"message": "too old"} | code}).encode())
    assert caught.value.reason == "gone"


def test_an_object_without_a_uid_is_no_object() -> None:
    assert uid({"metadata": {"uid": "u"}}) == "u"
    for body in ({}, {"metadata": None}, {"metadata": {"uid": 7}}):
        with pytest.raises(SourceError):
            uid(body)


def test_versions_are_compared_as_numbers_or_not_at_all() -> None:
    assert is_older("99", "100")
    assert not is_older("100", "100")
    assert not is_older("abc", "100")
    assert not is_older("1", "")
    assert not is_older("1", "9" * 5000)


@given(st.binary(max_size=80) | _json.map(lambda value: json.dumps(value).encode()))
def test_any_refusal_gives_one_printable_line(body: bytes) -> None:
    assert all(one.isprintable() for one in api_sentence(body))


@pytest.mark.parametrize(
    ("text", "seconds"), [("1", 1), (" 30 ", 30), ("", 0), ("-1", 0), ("²", 0), ("soon", 0), ("9" * 5000, 300)]
)
def test_retry_after(text: str, seconds: float) -> None:
    assert parse_retry_after(text) == seconds


def test_the_wait_grows_to_a_minute_and_is_drawn_from_all_of_it() -> None:
    most = Backoff(chance=lambda: 1.0)
    assert [most.after(0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    half = Backoff(chance=lambda: 0.5)
    assert [half.after(0) for _ in range(3)] == [0.5, 1, 2]


def test_a_good_minute_starts_the_wait_anew() -> None:
    backoff = Backoff(chance=lambda: 1.0)
    waits = [backoff.after(lasted) for lasted in (0, 0, 0, 60, 0, 0)]
    assert waits == [1, 2, 4, 1, 2, 4]


def test_the_time_a_turn_lasted_is_taken_off() -> None:
    backoff = Backoff(chance=lambda: 1.0)
    assert [backoff.after(50) for _ in range(9)] == [0, 0, 0, 0, 0, 0, 10, 10, 10]


def test_the_wait_the_server_asks_for_is_the_least() -> None:
    backoff = Backoff(chance=lambda: 0.0)
    assert backoff.after(0, at_least=7) == 7


@given(st.lists(st.floats(0, 200), max_size=100), st.floats(0, 1))
def test_the_wait_stays_within_its_bounds(turns: list[float], chance: float) -> None:
    backoff = Backoff(chance=lambda: chance)
    assert all(0 <= backoff.after(lasted) <= 60 for lasted in turns)
