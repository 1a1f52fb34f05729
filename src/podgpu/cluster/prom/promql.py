"""This module writes PromQL as text: the user's `--match` read and checked, selectors and durations written. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from podgpu.errors import UsageError

_BLANKS = re.compile(r"\s*+")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*+")
_OPERATOR = re.compile(r"=~|!~|!=|=")
_QUOTES = ('"', "'", "`")
_ESCAPE = re.compile(
    r"\\(?:(?P<one>[abfnrtv\\'\"])|x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})"
    r"|(?P<o>[0-3][0-7]{2}))"
)
_ONE = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\\": "\\", "'": "'", '"': '"'}
_SPECIAL = re.compile(r"([\\.+*?()|\[\]{}^$])")
"""What means something in RE2, which Prometheus' regular expressions are."""
_LONGEST = 4096


class Matcher(NamedTuple):
    label: str
    operator: str
    """=, !=, =~ or !~."""
    value: str

    def __str__(self) -> str:
        return f"{self.label}{self.operator}{quote(self.value)}"


# Reading


def parse_matchers(text: str) -> tuple[Matcher, ...]:
    """`cluster="a",team=~"x|y"`: what may stand between a selector's braces. Raises UsageError with the place."""
    if len(text) > _LONGEST:
        raise UsageError(f"--match: longer than {_LONGEST} characters")
    found: list[Matcher] = []
    at = _past_blanks(text, 0)
    while at < len(text):
        matcher, at = _matcher(text, at)
        found.append(matcher)
        at = _past_blanks(text, at)
        if at < len(text):
            if text[at] != ",":
                raise _wrong(text, at, "a comma between two matchers is missing")
            at = _past_blanks(text, at + 1)
    return tuple(found)


def _matcher(text: str, at: int) -> tuple[Matcher, int]:
    label = _LABEL.match(text, at)
    if label is None:
        braces = ": leave the braces out" if text[at] == "{" else ""
        raise _wrong(text, at, f"a label's name should be here{braces}")
    if label[0] == "__name__":
        raise _wrong(text, at, "__name__ is podgpu's to choose")
    at = _past_blanks(text, label.end())
    operator = _OPERATOR.match(text, at)
    if operator is None:
        raise _wrong(text, at, f"=, !=, =~ or !~ should follow {label[0]}")
    value, end = _value(text, _past_blanks(text, operator.end()))
    return Matcher(label[0], operator[0], value), end


def _value(text: str, at: int) -> tuple[str, int]:
    """As Go quotes: with backslashes in " and ', without any in `."""
    mark = text[at : at + 1]
    if mark not in _QUOTES or not mark:
        raise _wrong(text, at, 'a value in quotes should be here, such as "a"')
    parts: list[str] = []
    here = at + 1
    while here < len(text) and text[here] != mark:
        if text[here] == "\n" and mark != "`":
            raise _wrong(text, here, r"a line break in a quoted value is written \n")
        if text[here] == "\\" and mark != "`":
            part, here = _unescaped(text, here)
        else:
            part, here = text[here], here + 1
        parts.append(part)
    if here >= len(text):
        raise _wrong(text, at, "this quote is not closed")
    return _as_text("".join(parts), text, at), here + 1


def _unescaped(text: str, at: int) -> tuple[str, int]:
    escape = _ESCAPE.match(text, at)
    if escape is None:
        raise _wrong(text, at, "a backslash that escapes nothing (write two of them for one)")
    if escape["one"]:
        return _ONE[escape["one"]], escape.end()
    if escape["x"] or escape["o"]:  # a byte of UTF-8, put together in _as_text
        byte = int(escape["x"], 16) if escape["x"] else int(escape["o"], 8)
        return (chr(byte) if byte < 0x80 else chr(0xDC00 + byte)), escape.end()
    number = int(escape["u"] or escape["U"], 16)
    if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF:
        raise _wrong(text, at, "there is no such character")
    return chr(number), escape.end()


def _as_text(value: str, text: str, at: int) -> str:
    try:
        return value.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        raise _wrong(text, at, "this value is not UTF-8") from None


def _past_blanks(text: str, at: int) -> int:
    match = _BLANKS.match(text, at)
    return match.end() if match else at


def _wrong(text: str, at: int, why: str) -> UsageError:
    rest = ascii(text[at : at + 20]) if at < len(text) else "the end"
    return UsageError(f'--match: at character {at + 1} ({rest}): {why}; write label matchers such as cluster="a"')


# Writing


def quote(value: str) -> str:
    """In double quotes, as Prometheus and VictoriaMetrics read it: one line, whatever is in it."""
    return '"' + "".join(_escaped(character) for character in value) + '"'


def _escaped(character: str) -> str:
    if character in '\\"':
        return "\\" + character
    if character == "\n":
        return r"\n"
    return character if character >= " " and character != "\x7f" else f"\\x{ord(character):02x}"


def any_of(values: Iterable[str]) -> str:
    """A regular expression that only these match."""
    return "|".join(_SPECIAL.sub(r"\\\1", value) for value in values)


def selector(names: Sequence[str], *matchers: Matcher) -> str:
    """Of series with one of these names."""
    wanted = [*matchers]
    name = names[0] if len(names) == 1 else ""
    if not name:
        wanted.insert(0, Matcher("__name__", "=~", any_of(names)))
    return f"{name}{{{','.join(map(str, wanted))}}}"


def is_label(name: str) -> bool:
    return _LABEL.fullmatch(name) is not None


def is_(label: str, value: str = "") -> Matcher:
    """Without a value: the label is not there."""
    return Matcher(label, "=", value)


def has(label: str) -> Matcher:
    return Matcher(label, "!=", "")


def by(*labels: str) -> str:
    """`by (a, b)`, each once; nothing for none."""
    return f" by ({', '.join(dict.fromkeys(labels))})" if labels else ""


def milliseconds(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"
