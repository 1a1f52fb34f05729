"""Answers of all shapes: samples, or one of our errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.cluster.prom.answer import parse_answer, parse_error, plain_text
from podgpu.errors import SourceError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["status", "data", "resultType", "result", "metric", "value", "warnings", "error"])
            | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


def body(result: Any, kind: str = "vector", **members: Any) -> bytes:
    return json.dumps({"status": "success", "data": {"resultType": kind, "result": result}, **members}).encode()


def said_of(content: bytes) -> tuple[str, ...]:
    """The notes, or why it was refused."""
    try:
        return parse_answer(content, "http://h").notes
    except SourceError as error:
        return (str(error),)


@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()) | JSON.map(body))
def test_anything_is_samples_or_refused(content: bytes) -> None:
    said = said_of(content)
    assert all(text.isprintable() for text in said)
    assert plain_text(parse_error(content)) == parse_error(content)


LABEL_SETS = st.dictionaries(st.text(min_size=1, max_size=5), st.text(min_size=1, max_size=5), max_size=4)


@given(st.lists(st.tuples(LABEL_SETS, st.floats(allow_nan=False, allow_infinity=False)), max_size=5))
def test_samples_come_as_they_are(samples: list[tuple[dict[str, str], float]]) -> None:
    result = [{"metric": labels, "value": [12.5, repr(value)]} for labels, value in samples]
    answer = parse_answer(body(result), "x")
    assert [({"__name__": s.name} if s.name else {}) | dict(s.labels) for s in answer.samples] == [
        s[0] for s in samples
    ]
    assert [s.value for s in answer.samples] == [s[1] for s in samples]
    assert answer.at == (12.5 if samples else None)


def test_what_is_no_number_is_left_out() -> None:
    values = ["NaN", "+Inf", "-Inf", "1e+06"]
    answer = parse_answer(body([{"metric": {"v": v}, "value": [1, v]} for v in values]), "x")
    assert [(s.labels["v"], s.value) for s in answer.samples] == [("1e+06", 1e6)]


def test_a_histogram_is_no_sample() -> None:
    assert parse_answer(body([{"metric": {}, "histogram": [1, {}]}]), "x").samples == ()


def test_an_empty_label_is_not_there() -> None:
    answer = parse_answer(body([{"metric": {"a": "", "b": "c"}, "value": [1, "1"]}]), "x")
    assert dict(answer.samples[0].labels) == {"b": "c"}


@pytest.mark.parametrize("value", [[1, 2], [1], ["1", "2"], [1, "2_0"], [1, None], "1", [None, "1"]])
def test_a_value_of_another_shape_is_refused(value: Any) -> None:
    with pytest.raises(SourceError, match="an unknown shape"):
        parse_answer(body([{"metric": {}, "value": value}]), "x")


def test_notes_are_few() -> None:
    answer = parse_answer(body([], warnings=[f"w{n}" for n in range(100)] + [3, ""]), "x")
    assert answer.notes == ("w0", "w1", "w2", "w3", "w4")


def test_half_a_character_does_not_come_in() -> None:
    body = (
        rb'{"status":"success","data":{"resultType":"vector","result":[{"metric":{"pod":"a\ud800b"},"value":[1,"2"]}]}}'
    )
    (sample,) = parse_answer(body, "http://prometheus").samples
    assert sample.labels["pod"] == "a?b"
