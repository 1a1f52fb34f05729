"""Answers to a question that was asked before: what is known of their series changes nothing of what they say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.cluster.prom.answer import MOST_VALUES, Vector, parse_answer
from podgpu.cluster.prom.series import SeriesMemory
from podgpu.errors import SourceError

LABELS = st.dictionaries(
    st.sampled_from(["__name__", "UUID", "pod", "job", "a{b"]),
    st.text(st.sampled_from('aZ0 {}[]",:\\é\ud800\n') | st.characters(), max_size=8),
    max_size=4,
)
VALUES = st.sampled_from(["0", "1.5", "-2e+06", "NaN", "+Inf", "1_0", "", "x", " 1", 'a"b'])
TIMES = st.sampled_from([0, 12, 1800000007.311, 1e300, -1, "1", None])
ELEMENTS = st.fixed_dictionaries({"metric": LABELS, "value": st.tuples(TIMES, VALUES)}) | st.fixed_dictionaries(
    {"metric": LABELS, "histogram": st.just([1, {}])}
)
GOOD = st.fixed_dictionaries({"metric": LABELS, "value": st.tuples(st.just(12.5), st.just("1"))})


def body(result: Any, compact: bool = True, **members: Any) -> bytes:
    document = {"status": "success", "data": {"resultType": "vector", "result": result}, **members}
    return json.dumps(document, separators=(",", ":") if compact else None, ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )


def said(content: bytes, memory: SeriesMemory | None) -> Vector | str:
    try:
        return parse_answer(content, "x", None if memory is None else memory.of("question"))
    except SourceError as error:
        return str(error)


BODIES = st.builds(
    body,
    st.lists(ELEMENTS | GOOD, max_size=4) | st.lists(GOOD, max_size=4),
    st.booleans(),
    warnings=st.lists(st.sampled_from(['a "]}] b', "w", '"data":{"resultType":"vector","result":[']), max_size=2),
)


def spoilt(content: bytes, at: int, what: bytes) -> bytes:
    at = at % (len(content) + 1)
    return content[:at] + what + content[at + len(what) % 2 :]


@given(
    st.lists(BODIES | st.builds(spoilt, BODIES, st.integers(0, 400), st.sampled_from([b",", b"}", b'"', b"\\", b"]"])))
)
def test_the_same_as_without_a_memory(bodies: list[bytes]) -> None:
    memory = SeriesMemory()
    for content in [*bodies, *bodies]:
        assert said(content, memory) == said(content, None)


def of(name: str, value: float = 1, **labels: str) -> dict[str, Any]:
    return {"metric": {"__name__": name, **labels}, "value": [12.5, str(value)]}


def test_series_with_the_same_labels_share_them() -> None:
    memory = SeriesMemory()
    first = parse_answer(body([of("a", UUID="GPU-1"), of("b", UUID="GPU-1")]), "x", memory.of("q")).samples
    again = parse_answer(body([of("a", 2, UUID="GPU-1")]), "x", memory.of("another")).samples
    assert first[0].labels is first[1].labels is again[0].labels
    assert [sample.value for sample in (*first, *again)] == [1, 1, 2]


def test_a_series_that_is_gone_is_not_told_of_again() -> None:
    memory = SeriesMemory()
    for numbers in (range(5000), range(3), range(3)):
        content = body([of("a", n, pod=f"p{n}") for n in numbers])
        found = parse_answer(content, "x", memory.of("q")).samples
        assert [(s.labels["pod"], s.value) for s in found] == [(f"p{n}", n) for n in numbers]


def test_a_long_answer_is_cut_where_an_element_ends() -> None:
    """It is looked at in pieces, so that no other thread waits for all of it."""
    seams = ('"]},{"metric":{', '\\"]},{"metric":{"a":"b"', "]},", "plain")
    content = body([of("a", n, pod=f"p{n}", odd=seams[n % 4]) for n in range(8000)])
    assert len(content) > 512 * 1024
    memory = SeriesMemory()
    assert memory.of("question").cut(content) is not None
    assert said(content, memory) == said(content, None)


@pytest.mark.fault(
    "Prometheus has more series than podgpu remembers, and then others",
    "they are read without being remembered; the view goes on",
)
def test_more_series_than_are_remembered() -> None:
    memory = SeriesMemory()
    for numbers in (range(201_000), range(300_000, 300_003), range(300_000, 300_003)):
        memory.begin_round()
        elements = ",".join(f'{{"metric":{{"pod":"{n}"}},"value":[1,"1"]}}' for n in numbers)
        content = body([]).replace(b'"result":[]', f'"result":[{elements}]'.encode())
        found = parse_answer(content, "x", memory.of("q"), MOST_VALUES).samples
        assert len(found) == len(numbers)
        assert found[-1].labels == {"pod": str(numbers[-1])}


@pytest.mark.parametrize("between", ["", " ", ",,", ";"])
def test_what_is_not_json_is_refused(between: str) -> None:
    element = json.dumps(of("a"), separators=(",", ":"))
    content = body([]).replace(b'"result":[]', f'"result":[{element}{between}{element}]'.encode())
    with pytest.raises(SourceError, match="no whole JSON"):
        parse_answer(content, "x", SeriesMemory().of("q"))


def test_a_long_answer_of_another_shape_is_read_once() -> None:
    """Not cut at every character."""
    content = body([of("a", pod="p" * 100_000), of("a")], compact=False)
    assert len(parse_answer(content, "x", SeriesMemory().of("q")).samples) == 2
