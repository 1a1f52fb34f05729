"""`--match` and the text of queries: what is read is what is meant, and no value ever ends its quotes."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.cluster.prom import promql
from podgpu.cluster.prom.promql import Matcher, parse_matchers
from podgpu.errors import UsageError

TEXTS = st.text(st.characters(codec="utf-8"), max_size=30)
LETTERS = string.ascii_letters + "_"
LABELS = st.builds(str.__add__, st.sampled_from(LETTERS), st.text(LETTERS + string.digits, max_size=10)).filter(
    lambda name: name != "__name__"
)
MATCHERS = st.builds(Matcher, LABELS, st.sampled_from(["=", "!=", "=~", "!~"]), TEXTS)
BLANKS = st.sampled_from(["", " ", "\n\t "])


@given(st.lists(MATCHERS, max_size=5), BLANKS, BLANKS, st.booleans())
def test_what_is_written_is_read_again(matchers: list[Matcher], before: str, between: str, comma: bool) -> None:
    text = before + f"{between},{before}".join(map(str, matchers)) + ("," if comma and matchers else "") + between
    assert parse_matchers(text) == tuple(matchers)


def read_or_refusal(text: str) -> tuple[Matcher, ...] | str:
    try:
        return parse_matchers(text)
    except UsageError as error:
        return str(error)


@given(st.text(max_size=40))
def test_anything_is_read_or_refused_with_its_place(text: str) -> None:
    read = read_or_refusal(text)
    if isinstance(read, str):
        place = re.match(r"--match: at character (\d+) ", read)
        assert place is not None
        assert 1 <= int(place[1]) <= len(text) + 1
        assert read.isprintable()
    else:
        assert parse_matchers(",".join(map(str, read))) == read


@given(TEXTS)
def test_a_quoted_value_is_one_line_and_ends_where_it_ends(value: str) -> None:
    quoted = promql.quote(value)
    assert "\n" not in quoted
    assert re.fullmatch(r'"(?:[^"\\]|\\.)*"', quoted)


@given(st.lists(TEXTS, min_size=1, max_size=4), TEXTS)
def test_any_of_matches_these_and_no_others(values: list[str], other: str) -> None:
    pattern = re.compile(promql.any_of(values), re.DOTALL)
    assert all(pattern.fullmatch(value) for value in values)
    assert (pattern.fullmatch(other) is not None) == (other in values)


@pytest.mark.parametrize(
    ("text", "matcher"),
    [
        ('cluster="a"', Matcher("cluster", "=", "a")),
        (r"c!~'it\'s\n'", Matcher("c", "!~", "it's\n")),
        (r"c=~`\d+`", Matcher("c", "=~", r"\d+")),
        (r'c="\x41\101\u00e9\U0001F600"', Matcher("c", "=", "AAé😀")),
        (r'c="\xc3\xa9"', Matcher("c", "=", "é")),
    ],
)
def test_values_as_go_quotes_them(text: str, matcher: Matcher) -> None:
    assert parse_matchers(text) == (matcher,)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{cluster="a"}', r"character 1 \('\{cluster=\"a\"\}'\): .* leave the braces out"),
        ('cluster="a" node="b"', r"character 13 .* a comma between"),
        ("cluster=a", r"character 9 .* a value in quotes"),
        ("cluster=", r"character 9 \(the end\): a value in quotes"),
        ("cluster", r"character 8 .* should follow cluster"),
        ('cluster="a', r"character 9 .* not closed"),
        (r'c="\d"', r"character 4 .* backslash"),
        ('c="a\nb"', r"character 5 .* line break"),
        (r'c="\xff"', "not UTF-8"),
        (r'c="\ud800"', "no such character"),
        ('__name__="up"', "podgpu's to choose"),
        (',c="a"', "character 1 .* label's name"),
        ("c=" + '"a"' * 3000, "longer than 4096"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_matchers(text)


def test_selectors() -> None:
    assert promql.selector(("up",), promql.has("pod"), promql.is_("x", "1")) == 'up{pod!="",x="1"}'
    assert promql.selector(("a", "b")) == '{__name__=~"a|b"}'
