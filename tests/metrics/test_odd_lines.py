"""Every odd line has one meaning, whichever way through the exposition it goes and whatever stands before it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.metrics.parse import BadExposition, parse_text
from tests.metrics.test_parse_paths import exactly, outcome

KNOWN = '# HELP x what\n# TYPE x gauge\nx{a="b"} 1\n'

NOTHING = [
    "",
    " \t ",
    "#",
    " # hello 5",
    "\t#hello",
    "  # x 1",
    ' # x{a="b"} 1',
    '# x{a="b"} 1',
    "# HELPx y",
    "# TYPES x gauge",
    "#HELPS",
    "# help x y",
    "# EOF",
    " # EOF",
    "## HELP x y",
    "# # TYPE x gauge",
    '# UNIT x{a="b"} 1',
]
"""Says nothing."""

REFUSED = [
    ('# HELP x{a="b"} 1', "HELP names no metric"),
    ('  # HELP y{a="b"} 1', "HELP names no metric"),
    ('# TYPE x{a="b"} gauge', "TYPE names no metric"),
    ("# HELP 9 y", "HELP names no metric"),
    ("#HELP", "HELP names no metric"),
    (" # TYPE", "TYPE names no metric"),
    ("# TYPE y gauge gauge", "the type of y is none of"),
    (" # HELP x again", "a second HELP of x"),
    ("#\tTYPE\tx\tgauge", "a second TYPE of x"),
    ('{a="b"} 1', "no metric name"),
    ("\ufeffx 1", "no metric name"),
    ('x{a="b"} # 1', "the value is not a number"),
    ('x{a="b"} 1 # {} 1', "more than a value"),
    ('x{a="b"} #', "the value is not a number"),
]

SAMPLES = ['x{a="b"}2', 'x {a="b"} 2', ' x{a="b"} 2', 'x\t{ a = "b" , }\t2\t', 'x{a="b"} +2.0e0', 'x{a="b"} 2 17']


@pytest.mark.parametrize("line", NOTHING)
@pytest.mark.parametrize("odd", ["", 'x{a="ä"} 1\n'], ids=["plain", "exact"])
def test_what_says_nothing(line: str, odd: str) -> None:
    """An ä, and the exposition goes the exact way."""
    assert parse_text(f"{KNOWN}{odd}{line}\n") == parse_text(KNOWN + odd)
    assert parse_text(f"{line}\n{KNOWN}{odd}") == parse_text(KNOWN + odd)


@pytest.mark.parametrize(("line", "why"), REFUSED)
@pytest.mark.parametrize("odd", ["", 'x{a="ä"} 1\n'], ids=["plain", "exact"])
def test_what_breaks_the_exposition(line: str, why: str, odd: str) -> None:
    with pytest.raises(BadExposition, match=why) as caught:
        parse_text(f"{KNOWN}{odd}{line}\n")
    assert caught.value.line == f"{KNOWN}{odd}".count("\n") + 1


@pytest.mark.parametrize("line", SAMPLES)
def test_what_is_a_sample(line: str) -> None:
    (family,) = parse_text(f"{KNOWN}{line}\n")
    assert [(s.labels, s.value) for s in family.samples] == [({"a": "b"}, 1), ({"a": "b"}, 2)]


ODD = st.sampled_from([*NOTHING, *(line for line, _ in REFUSED), *SAMPLES, 'x{a="b"} 1', 'y{c="d"} 1', "y 1"])


@given(st.lists(ODD, max_size=8))
def test_both_ways_agree_on_odd_lines(lines: list[str]) -> None:
    text = KNOWN + "".join(f"{line}\n" for line in lines)
    assert outcome(parse_text, text) == outcome(exactly, text)


# How much is taken


@pytest.mark.parametrize("odd", ["", "ä"], ids=["plain", "exact"])
def test_more_than_is_wanted(odd: str) -> None:
    lines = "".join(f'x{{a="{odd}{n}"}} 1\n' for n in range(100))
    assert len(parse_text(lines, 200)[0].samples) == 100
    with pytest.raises(BadExposition, match="more than 99 lines and labels"):
        parse_text(lines, 99)
    many = "".join(f'x{{a="{odd}{n}"}} {"1" * 300}\n' for n in range(9000))  # labels count from the second block on
    with pytest.raises(BadExposition, match="more than 10000 lines and labels"):
        parse_text(many, 10_000)


def test_a_line_of_megabytes() -> None:
    line = "x{" + ",".join(f'a{n}=""' for n in range(200_000)) + "} 1\n"
    assert len(parse_text(line)[0].samples[0].labels) == 200_000
    with pytest.raises(BadExposition, match="a line of more than"):
        parse_text(f"{KNOWN}{line}", 1_000_000)
