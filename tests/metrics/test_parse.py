"""The parser against the encoder, against prometheus_client as the oracle, and against what is no text format."""

from __future__ import annotations

import math
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from podgpu.metrics.parse import BadExposition, ParsedFamily, ParsedSample, parse_text
from podgpu.metrics.text import encode, format_float
from podgpu.series import Family, Labels, Sample

GOLDEN = sorted((Path(__file__).parents[1] / "nodes").glob("*/expected.prom"))
TEXT = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\x00"))
LETTERS = string.ascii_letters + "_"
# Not st.from_regex, which draws letter by letter.
NAMES = st.builds(str.__add__, st.sampled_from(LETTERS + ":"), st.text(LETTERS + string.digits + ":", max_size=20))
LABEL_NAMES = st.builds(str.__add__, st.sampled_from(LETTERS), st.text(LETTERS + string.digits, max_size=20)).filter(
    lambda name: not name.startswith("__")
)
LABELS = st.dictionaries(LABEL_NAMES, TEXT, max_size=4)
VALUES = st.one_of(st.integers(-(2**53), 2**53), st.floats())
BLANKS = st.text(" \t", max_size=3)


def only(text: str) -> ParsedSample:
    (family,) = parse_text(text)
    (sample,) = family.samples
    return sample


def same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))


# What is understood


@st.composite
def families(draw: st.DrawFn) -> list[Family]:
    names = draw(st.lists(NAMES, unique=True, max_size=4))
    samples = st.lists(
        st.builds(lambda pairs, v: Sample(Labels(pairs.items()), v), LABELS, VALUES), min_size=1, max_size=4
    )
    kinds = st.sampled_from(["gauge", "counter", "untyped"])
    return [Family(name, draw(kinds), draw(TEXT), tuple(draw(samples))) for name in names]


@given(families())
def test_what_we_print_reads_back(printed: list[Family]) -> None:
    parsed = parse_text(encode(printed).decode())
    assert [(f.name, f.type) for f in parsed] == [(f.name, f.type) for f in printed]
    for ours, theirs in zip(printed, parsed, strict=True):
        assert theirs.help == ours.help.lstrip(" \t").rstrip(" \t")
        for sample, read in zip(ours.samples, theirs.samples, strict=True):
            assert (read.name, read.labels, read.timestamp) == (ours.name, dict(sample.labels.pairs), None)
            assert same(read.value, sample.value)


@given(NAMES, LABELS, VALUES, st.none() | st.integers(-(2**62), 2**62), st.lists(BLANKS, min_size=12, max_size=12))
def test_any_spacing(name: str, labels: dict[str, str], value: float, at: int | None, blanks: list[str]) -> None:
    inside = f"{blanks[0]},{blanks[1]}".join(
        f"{key}{blanks[2]}={blanks[3]}{Labels([(key, text)]).text[len(key) + 2 : -1]}" for key, text in labels.items()
    )
    braces = f"{blanks[4]}{{{blanks[5]}{inside}{blanks[6]}}}{blanks[7]}" if labels else " "
    end = "" if at is None else f"\t{blanks[8]}{at}"
    sample = only(f"{blanks[9]}{name}{braces}{format_float(float(value))}{end}{blanks[10]}\n")
    assert (sample.name, sample.labels, sample.timestamp) == (name, labels, at)
    assert same(sample.value, float(value))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.parent.name)
def test_as_the_oracle_reads_it(path: Path) -> None:
    """But for the names of counters, which the oracle makes end in _total."""
    text = path.read_bytes().decode()
    ours, theirs = parse_text(text), list(text_string_to_metric_families(text))
    assert [(f.help, _plain(f.name)) for f in ours] == [(f.documentation, _plain(f.name)) for f in theirs]
    assert [(_plain(s.name), s.labels, s.value) for f in ours for s in f.samples] == [
        (_plain(s.name), s.labels, s.value) for f in theirs for s in f.samples
    ]


def _plain(name: str) -> str:
    return name.removesuffix("_total")


@given(st.lists(st.tuples(NAMES, LABELS, VALUES, st.none() | st.integers(0, 2**40)), max_size=5))
def test_timestamps_and_values_as_the_oracle_has_them(
    rows: list[tuple[str, dict[str, str], float, int | None]],
) -> None:
    text = "".join(
        f"{name}{Labels(labels.items()).text} {format_float(float(value))}{'' if at is None else f' {at}'}\n"
        for name, labels, value, at in rows
    )
    theirs = [s for f in text_string_to_metric_families(text) for s in f.samples]
    ours = {id(s): s for f in parse_text(text) for s in f.samples}.values()
    assert len(ours) == len(theirs) == len(rows)
    for sample in theirs:
        at = None if sample.timestamp is None else round(float(sample.timestamp) * 1000)
        assert any(
            (o.name, o.labels, o.timestamp) == (sample.name, sample.labels, at) and same(o.value, sample.value)
            for o in ours
        )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-1.5e3", -1500),
        ("+Inf", math.inf),
        ("-inf", -math.inf),
        ("Infinity", math.inf),
        (".5", 0.5),
        ("5.", 5),
    ],
)
def test_numbers(text: str, value: float) -> None:
    assert only(f"x {text}\n").value == value


@pytest.mark.parametrize("text", ["NaN", "nan", "NAN"])
def test_not_a_number(text: str) -> None:
    assert math.isnan(only(f"x {text}\n").value)


def test_escapes() -> None:
    assert only(r'x{a="\\n\n\"\\"} 1' + "\n").labels == {"a": '\\n\n"\\'}
    assert parse_text("# HELP x a\\nb\\\\c \\q\n")[0].help == "a\nb\\c \\q"


def test_a_backslash_that_escapes_nothing_stands_for_itself() -> None:
    assert only(r'x{a="DOMAIN\user"} 1' + "\n").labels == {"a": r"DOMAIN\user"}


def test_braces_and_commas_in_values() -> None:
    assert only('x{a="}",b=",",c="{ # "} 1\n').labels == {"a": "}", "b": ",", "c": "{ # "}


def test_comments_blank_lines_and_eof() -> None:
    assert parse_text("\n \t\n# a comment\n#\n#TYPES x\n# HELPFUL y z\n# EOF\n") == []
    assert parse_text("") == []


def test_head_without_samples_and_samples_without_head() -> None:
    assert parse_text("# HELP x what it is\n# TYPE x gauge\ny 1\n") == [
        ParsedFamily("x", "gauge", "what it is"),
        ParsedFamily("y", samples=(ParsedSample("y", {}, 1.0),)),
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


def test_scattered_and_repeated_samples_are_taken() -> None:
    x, y = parse_text("x 1\ny 2\nx 1\nx 3\n")
    assert [sample.value for sample in x.samples] == [1, 1, 3]
    assert len(y.samples) == 1


def test_carriage_returns_and_other_separators_are_no_line_ends() -> None:
    assert only('x{a="\r\x0b\x85\u2028"} 1\n').labels == {"a": "\r\x0b\x85\u2028"}


# What is refused


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("x", "x has no value"),
        ('x{a="b"}', "x has no value"),
        ("x 1 2 3", "more than a value and a timestamp: '1 2 3'"),
        ("x{} {} 1", "more than a value and a timestamp: '{} 1'"),
        ("1x 1", "no metric name where one should be: '1x 1'"),
        ("x-y 1", "no metric name: 'x-y 1'"),
        ("<html>", "no metric name where one should be: '<html>'"),
        ('{"x.y"} 1', "no metric name where one should be: '{\"x.y\"} 1'"),
        ("x one", "the value is not a number: 'one'"),
        ("x 1_000", "the value is not a number: '1_000'"),
        ("x 0x1p4", "the value is not a number: '0x1p4'"),
        ("x ١", "the value is not a number: '\\u0661'"),
        ("x 1e999", "the value is not a number: '1e999'"),
        ("x -NaN", "the value is not a number: '-NaN'"),
        ("x 1\r", "the value is not a number: '1\\r'"),
        ("x 1 2.5", "the timestamp is not a whole number of milliseconds: '2.5'"),
        ("x 1 9223372036854775808", "the timestamp is not a whole number of milliseconds: '9223372036854775808'"),
        ('x{a="b" 1', "the labels are not closed with a brace"),
        ('x{a="b} 1', "a quoted label value is not closed"),
        ('x{a="b\\"} 1', "a quoted label value is not closed"),
        ("x{a} 1", "the label a has no value"),
        ("x{a=b} 1", "the value of the label a is not in quotes"),
        ('x{a="1" b="2"} 1', "a comma is missing after the label a"),
        ('x{a="1",a="2"} 1', "the label a comes twice"),
        ('x{a="1",,b="2"} 1', "no label name where one should be: ',b=\"2\"'"),
        ('x{,a="1"} 1', "no label name where one should be: ',a=\"1\"'"),
        ('x{a:b="1"} 1', "the label a has no value"),
        ('x{__name__="y"} 1', "the label __name__ is reserved"),
        ("# TYPE x", "the type of x is none of counter, gauge, histogram, summary, untyped: ''"),
        ("# TYPE x info", "the type of x is none of counter, gauge, histogram, summary, untyped: 'info'"),
        ("# TYPE known gauge", "a second TYPE of known"),
        ("# HELP known again", "a second HELP of known"),
        ("# TYPE late gauge", "the TYPE of late comes after its samples"),
        ("# HELP", "HELP names no metric: ''"),
        ("# HELP wanted! x", "HELP names no metric: 'wanted! x'"),
    ],
)
def test_refused_with_line_and_reason(line: str, why: str) -> None:
    before = "# HELP known k\n# TYPE known gauge\nknown 1\nlate 1\n"
    with pytest.raises(BadExposition) as caught:
        parse_text(f"{before}{line}\nx 1\n")
    assert (caught.value.line, caught.value.why) == (5, why)
    assert str(caught.value) == f"line 5: {why}"


def test_a_trailing_comma_is_right() -> None:
    assert only('x{a="1",} 1\n').labels == {"a": "1"}


def test_an_exposition_cut_short() -> None:
    with pytest.raises(BadExposition, match="line 2: the text ends in the middle of this line"):
        parse_text("x 1\ny 1")


def test_what_is_quoted_is_short_and_harmless() -> None:
    with pytest.raises(BadExposition) as caught:
        parse_text("\x1b[2J" + "x" * 1000 + "\n")
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 120


def refused_line(text: str) -> int | None:
    try:
        parse_text(text)
    except BadExposition as e:
        return e.line
    return None


@given(st.text())
def test_no_crash_on_garbage(text: str) -> None:
    line = refused_line(text)
    assert line is None or 1 <= line <= text.count("\n") + 1


@given(st.text('x{}="\\n, #1\t', max_size=30))
def test_no_crash_on_near_misses(text: str) -> None:
    line = refused_line(text + "\n")
    assert line is None or text.split("\n")[line - 1]
