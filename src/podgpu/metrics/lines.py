"""This module reads one line of text format 0.0.4: a comment, or a sample's labels, value and timestamp. Pure.

What breaks the format is `Refused`, with the reason; `parse.py`, which has the whole text, adds the line's number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import lru_cache

_LEAST_TIMESTAMP, _MOST_TIMESTAMP = -(2**63), 2**63 - 1
_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*+"
_METRIC_NAME = re.compile(_NAME)
_LABEL_NAME = re.compile(r"([a-zA-Z_][a-zA-Z0-9_]*+)[ \t]*+(=)?")
_QUOTED = re.compile(r'"([^"\\]*+(?:\\.[^"\\]*+)*+)"')
_BLANKS = re.compile(r"[ \t]*+")
SAMPLE = re.compile(
    rf"[ \t]*+({_NAME})[ \t]*+"
    r'(?:(?<=[ \t])(?=[^{])|\{([^"}]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"}]*+)*+)\}[ \t]*+)'
    r"([^ \t{]++)(?:[ \t]++([^ \t]++))?[ \t]*+"
)
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_NO_FINITE_NUMBER = re.compile(r"[+-]?inf(?:inity)?|nan", re.IGNORECASE)
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")
_COMMENT = re.compile(rf"[ \t]*+#[ \t]*+(?:(HELP|TYPE)(?:[ \t]++|\Z)(?:({_NAME})(?:[ \t]++|\Z))?)?(.*)", re.DOTALL)
SHORT = 1024
"""Longer texts are not remembered."""
_ESCAPE = re.compile(r'\\[\\n"]')
_ESCAPED = {r"\\": "\\", r"\n": "\n", r"\"": '"'}


class Refused(Exception):
    """Why a line is refused."""


# Parts of a comment


def read_comment(line: str) -> tuple[str | None, str | None, str] | None:
    """HELP or TYPE, the metric it is about, the rest; None for what is no comment."""
    match = _COMMENT.match(line)
    return (match[1], match[2], match[3].rstrip(" \t")) if match else None


comment_parts = lru_cache(maxsize=1024)(read_comment)
"""An exporter's next exposition has the same comments; and, below, labels of the same names."""


# Parts of a sample line


def parse_labels(text: str) -> Mapping[str, str]:
    """What stands between the braces. Raises an error that says what is wrong with it."""
    labels: dict[str, str] = {}
    at = _past_blanks(text, 0)
    while at < len(text):
        name, at = _label_name(text, at)
        value, at = _label_value(text, at, name)
        if name in labels:
            raise Refused(f"the label {name} comes twice")
        if name == "__name__":
            raise Refused("the label __name__ is reserved")
        labels[name] = value
        at = _past_blanks(text, at)
        if at < len(text):
            if text[at] != ",":
                raise Refused(f"a comma is missing after the label {name}")
            at = _past_blanks(text, at + 1)
    return labels


def labels_by_form(closed: str) -> Mapping[str, str] | None:
    """Labels up to the closing brace, by their form: the text with the values taken out, of which exporters have a few
    dozen. A value may be anything without quotes and backslashes. None: to be looked at more closely."""
    if "\\" in closed:
        return None
    pieces = closed.split('"')
    form = '"'.join(pieces[::2])
    names = names_in(form) if len(form) <= SHORT else None
    # One value for each name, or a quote is open.
    return None if names is None or len(pieces) != 2 * len(names) + 1 else dict(zip(names, pieces[1::2], strict=True))


@lru_cache(maxsize=1024)
def names_in(form: str) -> tuple[str, ...] | None:
    """The names of the labels; None for what is no form of labels."""
    try:
        return tuple(parse_labels(form.removesuffix("}").replace('"', '""')))
    except Refused:
        return None


def _label_name(text: str, at: int) -> tuple[str, int]:
    match = _LABEL_NAME.match(text, at)
    if match is None:
        raise Refused(f"no label name where one should be: {shown(text[at:])}")
    if match[2] is None:
        raise Refused(f"the label {match[1]} has no value")
    return match[1], _past_blanks(text, match.end())


def _label_value(text: str, at: int, name: str) -> tuple[str, int]:
    match = _QUOTED.match(text, at)
    if match is None:
        raise Refused(f"the value of the label {name} is not in quotes")
    return unescape(match[1]), match.end()


def _past_blanks(text: str, at: int) -> int:
    match = _BLANKS.match(text, at)
    return at if match is None else match.end()


def unescape(text: str) -> str:
    return _ESCAPE.sub(lambda escape: _ESCAPED[escape[0]], text) if "\\" in text else text


def number_of(text: str) -> float:
    """As Go reads it, which knows no 1_000 and, in this format, no hexadecimal; past the largest float is no number."""
    if _NUMBER.fullmatch(text):
        value = float(text)
        if math.isfinite(value):
            return value
    elif _NO_FINITE_NUMBER.fullmatch(text):
        return float(text)
    raise Refused(f"the value is not a number: {shown(text)}")


def milliseconds_of(text: str | None) -> int | None:
    if text is None:
        return None
    if not _INTEGER.fullmatch(text) or not _LEAST_TIMESTAMP <= int(text) <= _MOST_TIMESTAMP:
        raise Refused(f"the timestamp is not a whole number of milliseconds: {shown(text)}")
    return int(text)


# Why not


def complaint_of(line: str) -> str:
    """What is wrong with a line that is neither a sample nor a comment. It is known to be wrong."""
    name = _METRIC_NAME.match(line)
    if name is None:
        return f"no metric name where one should be: {shown(line)}"
    rest = line[name.end() :]
    if rest[:1] not in ("", " ", "\t", "{"):
        return f"no metric name: {shown(line)}"
    rest = rest.lstrip(" \t")
    if not rest.startswith("{"):
        return _value_complaint(name[0], rest)
    unquoted = _QUOTED.sub(lambda quoted: "_" * len(quoted[0]), rest)
    if '"' in unquoted.partition("}")[0]:
        return "a quoted label value is not closed"
    if "}" not in unquoted:
        return "the labels are not closed with a brace"
    return _value_complaint(name[0], rest[unquoted.index("}") + 1 :].lstrip(" \t"))


def _value_complaint(name: str, rest: str) -> str:
    return f"more than a value and a timestamp: {shown(rest)}" if rest.split() else f"{name} has no value"


def shown(text: str) -> str:
    """Short, and without anything that could move a cursor."""
    return ascii(text) if len(text) <= 40 else f"{text[:40]!a}…"
