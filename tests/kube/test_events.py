"""Lines from pieces, events from lines, and the time to stay away: all pure."""

from __future__ import annotations

import json
import random
import tracemalloc
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.errors import SourceError
from podgpu.kube.answers import api_sentence, parse_retry_after
from podgpu.kube.events import Lines, is_older, parse_event, parse_list, uid
from podgpu.kube.pace import Backoff, Pace

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


def listed(answer: object, **bounds: int) -> tuple[list[Any], str]:
    items: list[Any] = []
    body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    return items, parse_list(body, items.append, **bounds).version


@given(st.dictionaries(st.sampled_from(["items", "metadata"]), _json) | st.binary(max_size=60))
def test_any_list_gives_objects_or_a_source_error(answer: object) -> None:
    try:
        items, version = listed(answer)
    except SourceError as error:
        items, version = [], error.reason
    assert version
    assert all(isinstance(one, dict) for one in items)


_objects = st.lists(st.dictionaries(st.text(max_size=8), _json, max_size=3), max_size=5)


@given(
    _objects,
    st.permutations(["kind", "items", "metadata"]),
    st.sampled_from([None, 2]),
    st.integers(1, 40).map(lambda size: size * 4096),
)
def test_a_list_is_read_as_json_has_it(items: list[Any], order: list[str], indent: int | None, longest: int) -> None:
    answer = {"kind": "PodList", "items": items, "metadata": {"resourceVersion": "7"}}
    text = json.dumps({name: answer[name] for name in order}, indent=indent).encode()
    expected = json.loads(text)["items"]
    assert json.dumps(listed(text, longest=longest)) == json.dumps([expected, "7"])


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"{}", b"[]", b"null", b'{"items": [}', b'{"items": [{}', b'{"items": [{},]}', b'{"items": [{} {}]}',
     b'{"metadata": {"resourceVersion": "1"}} {}', b'{"metadata": {"resourceVersion": "1"}, "items": {}}',
     b'{"metadata": {"resourceVersion": "1"}, "items": [1]}', b'{"metadata": {"resourceVersion": "1"}, "items": ne}',
     b"\xff", b"<html>log in first</html>", b"[" * 100_000, b'{"items": [' + b'{"a":' * 100_000],
)  # fmt: skip
def test_what_is_no_list(body: bytes) -> None:
    with pytest.raises(SourceError) as caught:
        listed(body)
    assert caught.value.reason == "bad_answer"


def test_a_large_object_of_a_list_is_refused_and_not_made() -> None:
    def of(size: int) -> bytes:
        return b'{"metadata": {"resourceVersion": "1"}, "items": [{"a": [' + b"[]," * (size // 3) + b"[]]}]}"

    assert len(listed(of(900_000), longest=1_000_000)[0]) == 1
    tracemalloc.start()
    try:
        with pytest.raises(SourceError, match="larger than the 1000000 bytes"):
            listed(of(6_000_000), longest=1_000_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6_000_000 * 2 + 1_000_000 * 25  # as objects the whole would take 144 MB


def test_of_a_long_list_one_object_at_a_time_is_held() -> None:
    pod = {"metadata": {"uid": "u", "labels": {f"label-{number}": "x" for number in range(20)}}}
    body = json.dumps({"metadata": {"resourceVersion": "1"}, "items": [pod] * 5_000}).encode()
    tracemalloc.start()
    try:
        count = [0]
        parse_list(body, lambda _: count.__setitem__(0, count[0] + 1))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == [5_000]
    assert peak < len(body) * 1.5  # its text once, and one object


def test_a_page_says_what_to_ask_the_next_with() -> None:
    body = json.dumps({"items": [], "metadata": {"resourceVersion": "1", "continue": "more"}}).encode()
    assert parse_list(body, print) == ("1", "more")


def test_an_empty_list_may_be_null() -> None:
    assert listed({"items": None, "metadata": {"resourceVersion": "1"}}) == ([], "1")


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


def test_the_wait_grows_and_is_drawn_from_all_of_it() -> None:
    most = Backoff(Pace(chance=lambda: 1.0))
    assert [most.after(0, "unreachable") for _ in range(7)] == [1, 2, 4, 8, 10, 10, 10]
    half = Backoff(Pace(chance=lambda: 0.5))
    assert [half.after(0, "unreachable") for _ in range(3)] == [0.5, 1, 2]


def test_a_refusal_is_asked_about_less_and_less() -> None:
    backoff = Backoff(Pace(chance=lambda: 1.0))
    assert [backoff.after(0, "forbidden") for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_a_server_that_comes_back_and_refuses_for_a_moment_is_asked_soon() -> None:
    """kube-apiserver forbids everything until its RBAC rules are read."""
    backoff = Backoff(Pace(chance=lambda: 1.0))
    for _ in range(9):
        backoff.after(0, "unreachable")
    assert [backoff.after(0, "forbidden") for _ in range(2)] == [1, 2]


def test_a_forgotten_version_is_listed_at_once_however_long_the_outage() -> None:
    backoff = Backoff(Pace(chance=lambda: 1.0))
    for _ in range(9):
        backoff.after(0, "unreachable")
    assert backoff.after(0, "gone") == 1
    assert [backoff.after(0, "gone") for _ in range(2)] == [10, 10], "forgotten again and again it is an illness"


def seconds_until_seen(outage: float, chance: random.Random) -> float:
    """From a server's return until its collection is listed anew: it is met, says gone, and is asked again."""
    backoff, now = Backoff(Pace(chance=chance.random)), 0.0
    while now < outage:
        now += backoff.after(0, "unreachable")
    return now + backoff.after(0, "gone") - outage


def test_nearly_all_are_back_within_seconds_of_any_outage_and_not_as_one() -> None:
    chance = random.Random(1)
    for outage in (5.0, 22.0, 300.0):
        times = sorted(seconds_until_seen(outage, chance) for _ in range(2000))
        assert times[1900] < 10.0
        assert times[-1] < 15.0
        busiest = max(sum(start <= one < start + 1 for one in times) for start in range(15))
        assert busiest < 2000 * 0.5, "two thousand do not come back in the same second"


def test_a_good_minute_starts_the_wait_anew() -> None:
    backoff = Backoff(Pace(chance=lambda: 1.0))
    waits = [backoff.after(lasted) for lasted in (0, 0, 0, 60, 0, 0)]
    assert waits == [1, 2, 4, 1, 2, 4]


def test_the_time_a_turn_lasted_is_taken_off() -> None:
    backoff = Backoff(Pace(chance=lambda: 1.0))
    assert [backoff.after(7) for _ in range(6)] == [0, 0, 0, 1, 3, 3]


def test_the_wait_the_server_asks_for_is_the_least() -> None:
    backoff = Backoff(Pace(chance=lambda: 0.0))
    assert backoff.after(0, at_least=7) == 7


@given(st.lists(st.floats(0, 200), max_size=100), st.floats(0, 1))
def test_the_wait_stays_within_its_bounds(turns: list[float], chance: float) -> None:
    backoff = Backoff(Pace(chance=lambda: chance))
    assert all(0 <= backoff.after(lasted) <= 10 for lasted in turns)
