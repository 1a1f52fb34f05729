"""The parser's quick way says of every exposition what its exact way says; real expositions and the seeds' go round."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from podgpu.metrics.parse import BadExposition, ParsedFamily, parse_text
from podgpu.metrics.text import encode_parsed

FIXTURES = Path(__file__).parents[1] / "fixtures"
EXPOSITIONS = sorted((*FIXTURES.glob("h200/*.prom"), *FIXTURES.glob("seeds/*.prom")))

HEADS = st.sampled_from(["a", "a_sum", "b", "# HELP a", "# TYPE a", "# TYPE a_sum", "#", "", " a", "a ", "9", "ä"])
LABEL_TEXTS = ["", "{}", "{", "}", "{,}", '{x="1"}', '{x="1",}', '{x="1"', '{x="1" }', '{x="{"}', '{x="1",x="1"}']
LABEL_TEXTS += ['{x="1",y="}"}', '{y="}",x="1"}', '{x="\\""}', '{x="1"}}', '{__name__="a"}', '{x="ä"}', '{x="1"y="2"}']
LABEL_TEXTS += ['{x="a b"}', '{x=" 1"}']
NUMBERS = [
    " 1",
    "1",
    " 1 2",
    " 1_0",
    " 1e999",
    " NaN",
    " +Inf",
    " nan",
    " 0x1",
    " 1\r",
    " \t1",
    " 1\x0b",
    " ",
    "",
    "  1",
]
NUMBERS += [
    " histogram",
    " gauge",
    " ١",
    " 1 ",
    " -0",
    " .5",
    " 5.",
    " infinity",
    "\t1",
    " \x1c1",
    " 1.5e3",
    ' "',
    " {1",
]
LINES = st.builds("{}{}{}".format, HEADS, st.sampled_from(LABEL_TEXTS), st.sampled_from(NUMBERS))


def exactly(text: str) -> list[ParsedFamily]:
    """Every exposition that is not plain ASCII goes the exact way, if only for a remark at its end."""
    return parse_text(f"{text}# ä\n")


def outcome(read: object, text: str) -> object:
    try:
        return repr(read(text))  # type: ignore[operator]
    except BadExposition as refused:
        return (refused.line, refused.why)


@given(st.lists(LINES, max_size=12))
@example(['a{x="1"} 1', '{x="1"} 2'])
@example(['a{x="1"} 1', 'a{x="1"} 1_0'])
@example(["# TYPE a histogram", 'a_sum{x="1"} 1', 'a_sum{x="1"} 2'])
@example(['a_sum{x="1"} 1', 'a_sum{x="1"} 2', "# TYPE a histogram", 'a_sum{x="1"} 3'])
def test_both_ways_agree(lines: list[str]) -> None:
    text = "".join(f"{line}\n" for line in lines)
    assert outcome(parse_text, text) == outcome(exactly, text)


@given(st.text(st.sampled_from('a{}="x,\\ 1#_.e\n\t'), max_size=60).map(lambda text: f"{text}\n"))
def test_both_ways_agree_on_garbage(text: str) -> None:
    assert outcome(parse_text, f'a{{x="1"}} 1\n{text}') == outcome(exactly, f'a{{x="1"}} 1\n{text}')


@pytest.mark.parametrize("path", EXPOSITIONS, ids=lambda p: p.name)
def test_a_real_exposition_goes_round(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    parsed = parse_text(text)
    assert parsed
    assert parse_text(encode_parsed(parsed).decode()) == parsed
    assert parsed == exactly(text)


@pytest.mark.parametrize("path", EXPOSITIONS, ids=lambda p: p.name)
def test_the_oracle_reads_the_same(path: Path) -> None:
    # Without HELP and TYPE: they make prometheus_client rename counters.
    lines = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line[0] != "#"]
    theirs = [s for family in text_string_to_metric_families("".join(lines)) for s in family.samples]
    ours = [s for family in parse_text("".join(lines)) for s in family.samples]
    assert sorted((s.name, sorted(s.labels.items()), s.value) for s in ours) == sorted(
        (s.name, sorted(s.labels.items()), float(s.value)) for s in theirs
    )


def test_numbers_are_rewritten_in_their_shortest_form_and_timestamps_left_out() -> None:
    lines = ["a 397.251000", 'a{b="1"} 46348437 1700000000000', 'a{b="2"} 9223372036854775794', 'a{b="3"} -0']
    assert encode_parsed(parse_text("\n".join([*lines, 'a{b="4"} NaN', ""]))).decode().splitlines() == [
        "a 397.251",
        'a{b="1"} 46348437',
        'a{b="2"} 9.223372036854776e+18',
        'a{b="3"} -0.0',
        'a{b="4"} NaN',
    ]


def test_every_word_of_an_exposition_is_kept() -> None:
    exposition = (
        '# HELP h A \\\\ and a \\n.\n# TYPE h histogram\nh_bucket{le="1"} 2\nh_sum 3\nh_count 2\n# TYPE empty gauge\n'
    )
    assert encode_parsed(parse_text(exposition)).decode() == exposition
