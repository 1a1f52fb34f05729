"""Compares the parser with the encoder and with prometheus_client, and tests malformed text."""

from __future__ import annotations

import math
import string
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from podgpu.errors import SourceError
from podgpu.metrics.encode import Family, Labels, Sample, encode, format_float
from podgpu.metrics.parse import (
    BadExposition,
    ParsedFamily,
    ParsedSample,
    check_is_metrics,
    encode_parsed,
    parse_text,
)

TESTS = Path(__file__).parents[1]
GOLDEN = sorted((TESTS / "nodes").glob("*/expected.prom"))
EXPOSITIONS = sorted((*TESTS.glob("fixtures/h200/*.prom"), *TESTS.glob("fixtures/seeds/*.prom")))
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"))
LETTERS = string.ascii_letters + "_"
NAMES = st.builds(
    str.__add__, st.sampled_from(LETTERS + ":"), st.text(LETTERS + string.digits + ":", max_size=20)
)
LABEL_NAMES = st.builds(
    str.__add__, st.sampled_from(LETTERS), st.text(LETTERS + string.digits, max_size=20)
).filter(lambda name: not name.startswith("__"))
LABELS = st.dictionaries(LABEL_NAMES, TEXT, max_size=4)
VALUES = st.one_of(st.integers(-(2**53), 2**53), st.floats())
BLANKS = st.text(" \t", max_size=3)
KNOWN = '# HELP x what\n# TYPE x gauge\nx{a="b"} 1\nlate 1\n'


def only(text: str) -> ParsedSample:
    (family,) = parse_text(text)
    (sample,) = family.samples
    return sample


def same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


@st.composite
def families(draw: st.DrawFn) -> list[Family]:
    names = draw(st.lists(NAMES, unique=True, max_size=4))
    samples = st.lists(
        st.builds(lambda pairs, v: Sample(Labels(pairs.items()), v), LABELS, VALUES),
        min_size=1,
        max_size=4,
    )
    kinds = st.sampled_from(["gauge", "counter", "untyped"])
    return [Family(name, draw(kinds), draw(TEXT), tuple(draw(samples))) for name in names]


@given(families())
def test_encoded_families_are_parsed_back(printed: list[Family]) -> None:
    parsed = parse_text(encode(printed).decode())
    assert [(f.name, f.type) for f in parsed] == [(f.name, f.type) for f in printed]
    for ours, theirs in zip(printed, parsed, strict=True):
        assert theirs.help == ours.help.strip(" \t")
        for sample, read in zip(ours.samples, theirs.samples, strict=True):
            assert (read.name, read.labels) == (ours.name, dict(sample.labels.pairs))
            assert same(read.value, sample.value)


@given(
    NAMES,
    LABELS,
    VALUES,
    st.none() | st.integers(-(2**62), 2**62),
    st.lists(BLANKS, min_size=12, max_size=12),
)
def test_any_spacing(
    name: str, labels: dict[str, str], value: float, at: int | None, blanks: list[str]
) -> None:
    inside = f"{blanks[0]},{blanks[1]}".join(
        f"{key}{blanks[2]}={blanks[3]}{Labels([(key, text)]).text[len(key) + 2 : -1]}"
        for key, text in labels.items()
    )
    braces = f"{blanks[4]}{{{blanks[5]}{inside}{blanks[6]}}}{blanks[7]}" if labels else " "
    end = "" if at is None else f"\t{blanks[8]}{at}"
    sample = only(f"{blanks[9]}{name}{braces}{format_float(float(value))}{end}{blanks[10]}\n")
    assert (sample.name, sample.labels) == (name, labels)
    assert same(sample.value, float(value))


@pytest.mark.parametrize("path", [*GOLDEN, *EXPOSITIONS], ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_the_oracle_reads_the_same(path: Path) -> None:
    text = path.read_bytes().decode()
    # HELP and TYPE are removed, because they make prometheus_client rename counters.
    lines = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    theirs = [s for family in text_string_to_metric_families(lines) for s in family.samples]
    ours = [s for family in parse_text(text) for s in family.samples]
    assert sorted((s.name, sorted(s.labels.items()), s.value) for s in ours) == sorted(
        (s.name, sorted(s.labels.items()), float(s.value)) for s in theirs
    )
    assert (
        parse_text(encode_parsed(parse_text(text)).decode())
        == parse_text(text)
        == parse_exactly(text)
    )


def test_escapes() -> None:
    assert only(r'x{a="\\n\n\"\\"} 1' + "\n").labels == {"a": '\\n\n"\\'}
    assert parse_text("# HELP x a\\nb\\\\c \\q\n")[0].help == "a\nb\\c \\q"
    assert only(r'x{a="DOMAIN\user"} 1' + "\n").labels == {"a": r"DOMAIN\user"}


def test_head_without_samples_and_samples_without_head() -> None:
    assert parse_text("# HELP x what it is\n# TYPE x gauge\ny 1\n") == [
        ParsedFamily("x", "gauge", "what it is"),
        ParsedFamily("y", samples=[ParsedSample("y", {}, 1.0)]),
    ]


def test_histograms_and_summaries_keep_their_parts() -> None:
    text = (
        '# TYPE h histogram\nh_bucket{le="+Inf"} 2\nh_sum 3\nh_count 2\nh_other 1\n'
        '# TYPE s summary\ns{quantile="0.5"} 1\ns_sum 1\ns_count 1\ns_bucket 1\n'
    )
    found = {family.name: [sample.name for sample in family.samples] for family in parse_text(text)}
    assert found == {
        "h": ["h_bucket", "h_sum", "h_count"],
        "h_other": ["h_other"],
        "s": ["s", "s_sum", "s_count"],
        "s_bucket": ["s_bucket"],
    }


def test_a_type_counts_for_the_samples_after_it() -> None:
    found = parse_text("s_count 1\n# TYPE s summary\ns_count 2\n")
    values = {family.name: [sample.value for sample in family.samples] for family in found}
    assert values == {"s_count": [1.0], "s": [2.0]}


def test_heads_are_written_if_they_say_something() -> None:
    sample = ParsedSample("y", {}, 1.0)
    families = [
        ParsedFamily("bare", samples=[sample]),
        ParsedFamily("helped", help="a", samples=[sample]),
        ParsedFamily("typed", "gauge", samples=[sample]),
        ParsedFamily("empty"),
    ]
    assert encode_parsed(families).decode().splitlines() == [
        "y 1",
        "# HELP helped a",
        "# TYPE helped untyped",
        "y 1",
        "# TYPE typed gauge",
        "y 1",
        "# TYPE empty untyped",
    ]


COMMENTS = [
    "",
    " \t ",
    "#",
    " # hello 5",
    ' # x{a="b"} 1',
    "# HELPx y",
    "# TYPES x gauge",
    "# help x y",
    "# EOF",
]
SAMPLES = [
    'x{a="b"}2',
    'x {a="b"} 2',
    ' x{a="b"} 2',
    'x\t{ a = "b" , }\t2\t',
    'x{a="b"} +2.0e0',
    'x{a="b"} 2 17',
]


def test_a_parsed_text_is_written_completely() -> None:
    text = (
        '# HELP h A \\\\ and a \\n.\n# TYPE h histogram\nh_bucket{le="1"} 2\nh_sum 3\nh_count '
        "2\n# TYPE empty gauge\n"
    )
    assert encode_parsed(parse_text(text)).decode() == text
    lines = [
        "a 397.251000",
        'a{b="1"} 46348437 1700000000000',
        'a{b="2"} 9223372036854775794',
        'a{b="3"} -0',
        "",
    ]
    written = encode_parsed(parse_text("\n".join(lines))).decode().splitlines()
    assert written == [
        "a 397.251",
        'a{b="1"} 46348437',
        'a{b="2"} 9.223372036854776e+18',
        'a{b="3"} 0',
    ]


REFUSED = [
    *(
        "x",
        'x{a="b"}',
        "x 1 2 3",
        "x{} {} 1",
        "1x 1",
        "x-y 1",
        "<html>",
        '{"x.y"} 1',
        '{a="b"} 1',
        "\ufeffx 1",
    ),
    *("x one", "x 1_000", "x 0x1p4", "x ١", "x -NaN", "x 1\r", "x 1 2.5"),
    *(
        'x{a="b" 1',
        'x{a="b} 1',
        'x{a="b\\"} 1',
        "x{a} 1",
        "x{a=b} 1",
        'x{a="1" b="2"} 1',
        'x{a="1",a="2"} 1',
    ),
    *('x{a="1",,b="2"} 1', 'x{,a="1"} 1', 'x{a:b="1"} 1', 'x{a="b"} 1 # {} 1', 'x{a="b"} #'),
    *("# TYPE y", "# TYPE y info", "# TYPE y gauge gauge"),
    *("# HELP", "# HELP wanted! x", '# HELP x{a="b"} 1', " # TYPE"),
]


@pytest.mark.parametrize("line", REFUSED)
def test_malformed_lines_are_refused_with_their_number(line: str) -> None:
    with pytest.raises(BadExposition, match=r"^line 5: ") as caught:
        parse_text(f"{KNOWN}{line}\nx 1\n")
    assert caught.value.line == 5


def test_a_truncated_text_is_refused() -> None:
    with pytest.raises(BadExposition, match="line 2: the text ends in the middle of this line"):
        parse_text("x 1\ny 1")


def test_too_many_lines_are_refused() -> None:
    assert parse_text("\n" * 250_000) == []
    with pytest.raises(BadExposition, match="line 250001: the text has more than 250000 lines"):
        parse_text("\n" * 250_001)


def test_a_web_page_is_no_metrics() -> None:
    text = "URL is a web page, not metrics: add the path of the metrics to the URL"
    for body in (b"<html>", b"\n \t<!DOCTYPE html>", b" " * 511 + b"<"):
        with pytest.raises(SourceError) as raised:
            check_is_metrics(body, "URL")
        assert (raised.value.reason, str(raised.value)) == ("not_prometheus", text)
    for body in (b"", b"# <html>", b" " * 512 + b"<"):
        check_is_metrics(body, "URL")


# The fast and the slow path of the parser must give the same result

HEADS = st.sampled_from(
    ["a", "a_sum", "b", "# HELP a", "# TYPE a", "# TYPE a_sum", "#", "", " a", "a ", "9", "ä"]
)
LABEL_TEXTS = [
    "",
    "{}",
    "{",
    "}",
    "{,}",
    '{x="1"}',
    '{x="1",}',
    '{x="1"',
    '{x="1" }',
    '{x="{"}',
    '{x="1",x="1"}',
]
LABEL_TEXTS += [
    '{x="1",y="}"}',
    '{x="\\""}',
    '{x="1"}}',
    '{__name__="a"}',
    '{x="ä"}',
    '{x="1"y="2"}',
    '{x="a b"}',
]
NUMBERS = [
    " 1",
    "1",
    " 1 2",
    " 1_0",
    " 1e999",
    " NaN",
    " +Inf",
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
    "\t1",
    " \x1c1",
    " 1.5e3",
    ' "',
    " {1",
]
LINES = st.builds("{}{}{}".format, HEADS, st.sampled_from(LABEL_TEXTS), st.sampled_from(NUMBERS))
ODD_LINES = LINES | st.sampled_from([*COMMENTS, *SAMPLES, *REFUSED])


def parse_exactly(text: str) -> list[ParsedFamily]:
    """Parses with the slow path only, by adding a blank at the start of each line."""
    return parse_text("".join(f" {line}\n" for line in text.removesuffix("\n").split("\n")))


def outcome(parse: Callable[[str], list[ParsedFamily]], text: str) -> object:
    try:
        return repr(parse(text))
    except BadExposition as error:
        return error.line


@given(st.lists(ODD_LINES, max_size=12))
@example(['a{x="1"} 1', '{x="1"} 2'])
@example(['a{x="1"} 1', 'a{x="1"} 1_0'])
@example(["# TYPE a histogram", 'a_sum{x="1"} 1', 'a_sum{x="1"} 2'])
@example(['a_sum{x="1"} 1', 'a_sum{x="1"} 2', "# TYPE a histogram", 'a_sum{x="1"} 3'])
def test_odd_lines(lines: list[str]) -> None:
    text = KNOWN + "".join(f"{line}\n" for line in lines)
    assert outcome(parse_text, text) == outcome(parse_exactly, text)
