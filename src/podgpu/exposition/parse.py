"""Parses text format 0.0.4 into families: the encoder's way back, and anybody else's exposition. Pure.

What breaks the format is refused with its line and the reason. Three things it forbids are taken all the same, because
exporters do them and Prometheus takes them: a family whose samples are not in one group, a series that comes twice, and
a backslash that escapes nothing (dcgm-exporter escapes no label values), which stands for itself.

Every line has one meaning: blank lines and comments say nothing, wherever the `#` stands; `# HELP` and `# TYPE` of a
name that is none (`# HELP x{a="b"} 1`) break the text, as they do for Prometheus; all else is a sample, or refused.

There are two ways through a text. `_Text.take` is exact and reads every line there can be. `_Text.take_plain` reads
`name{labels} number` with a name met before and labels written like some met before, which is nearly every line, ten
times as fast; what it is not sure of it leaves to `take`, so that both say the same of every text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from podgpu.errors import SourceError

TYPES = frozenset({"counter", "gauge", "histogram", "summary", "untyped"})
_PARTS = {"histogram": ("bucket", "sum", "count"), "summary": ("sum", "count")}
_LEAST_TIMESTAMP, _MOST_TIMESTAMP = -(2**63), 2**63 - 1
_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*+"
_METRIC_NAME = re.compile(_NAME)
_LABEL_NAME = re.compile(r"([a-zA-Z_][a-zA-Z0-9_]*+)[ \t]*+(=)?")
_QUOTED = re.compile(r'"([^"\\]*+(?:\\.[^"\\]*+)*+)"')
_BLANKS = re.compile(r"[ \t]*+")
_SAMPLE = re.compile(
    rf"[ \t]*+({_NAME})[ \t]*+"
    r'(?:(?<=[ \t])(?=[^{])|\{([^"}]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"}]*+)*+)\}[ \t]*+)'
    r"([^ \t{]++)(?:[ \t]++([^ \t]++))?[ \t]*+"
)
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_NO_FINITE_NUMBER = re.compile(r"[+-]?inf(?:inity)?|nan", re.IGNORECASE)
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")
_COMMENT = re.compile(rf"[ \t]*+#[ \t]*+(?:(HELP|TYPE)(?:[ \t]++|\Z)(?:({_NAME})(?:[ \t]++|\Z))?)?(.*)", re.DOTALL)
_NO_NAME = "{"
_BLOCK = 1 << 16
_SHORT = 1024
"""Longer texts are not remembered."""
_FEW = 1000
_BLANKS_TO_FLOAT = "\t\r\x0b\x0c\x1c\x1d\x1e\x1f"
"""What Python's float() skips around a number, ASCII's part of it."""
_ESCAPE = re.compile(r'\\[\\n"]')
_ESCAPED = {r"\\": "\\", r"\n": "\n", r"\"": '"'}


class BadExposition(SourceError):
    """An exposition that is no text format 0.0.4."""

    def __init__(self, line: int, why: str) -> None:
        super().__init__("malformed", f"line {line}: {why}")
        self.line = line
        self.why = why


class TooMuch(BadExposition):
    """An exposition with more in it than is taken."""


class ParsedSample(NamedTuple):  # a tuple: made once per line, and a frozen dataclass takes four times as long
    name: str
    labels: Mapping[str, str]
    """Not to be changed: samples with the same label text share it."""
    value: float
    timestamp: int | None = None
    """Milliseconds since 1970, where the line has one."""


@dataclass(frozen=True, slots=True)
class ParsedFamily:
    """`type` is `untyped` and `help` empty where the exposition does not say."""

    name: str
    type: str = "untyped"
    help: str = ""
    samples: tuple[ParsedSample, ...] = ()


def parse_text(text: str, most: int | None = None, between: Callable[[], object] = int) -> list[ParsedFamily]:
    """The families in the order they first appear, their samples in the exposition's order. Raises BadExposition.

    `most`: lines and different labels that are taken in all, each of which costs up to a kilobyte; None: any number.
    `between` is called after each part of the text, for a caller who has others to think of.
    """
    if text and not text.endswith("\n"):
        raise BadExposition(text.count("\n") + 1, "the text ends in the middle of this line")
    taken = _Text(most)
    take = taken.take_plain if text.isascii() and not any(b in text for b in _BLANKS_TO_FLOAT) else taken.take_all
    first = 1
    try:
        for lines in _blocks(text):
            take(lines, first)
            first += len(lines)
            between()
    except BadExposition:
        taken.let_go()
        raise
    return taken.families()


def _blocks(text: str) -> Iterator[list[str]]:
    """The lines, a part of the text at a time: a text of 100 MB is not there twice, and a part stays in the cache."""
    start = 0
    while start < len(text):
        end = text.rfind("\n", start, start + _BLOCK) if len(text) - start > _BLOCK else len(text) - 1
        if end < 0:
            end = text.index("\n", start)
        yield text[start:end].split("\n")
        start = end + 1


class _Refused(Exception):
    """Why a line is refused."""


@dataclass(slots=True)
class _Growing:
    name: str
    type: str | None = None
    help: str | None = None
    samples: list[ParsedSample] = field(default_factory=list)


class _Text:
    """What was read so far."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most
        self._taken = 0
        self._families: dict[str, _Growing] = {}
        self._of_sample: dict[str, _Growing] = {}
        self._labels: dict[str, Mapping[str, str]] = {}
        """By their text with the closing brace, which a line without braces cannot have."""

    def take_all(self, lines: Sequence[str], first: int = 1) -> None:
        """`first` is the number of the first line."""
        self._make_room(lines, first)
        for number, line in enumerate(lines, first):
            self._take_numbered(line, number)

    def take_plain(self, lines: Sequence[str], first: int = 1) -> None:
        """The same for lines of ASCII without blanks that float() would skip, those it knows in one go."""
        self._make_room(lines, first)
        labels_of, family_of, new = self._labels, self._of_sample, tuple.__new__
        last, append = _NO_NAME, list[ParsedSample]().append
        for number, line in enumerate(lines, first):
            head, _, value_text = line.rpartition(" ")
            name, _, label_text = head.partition("{")
            labels = labels_of.get(label_text)
            if labels is None and label_text.endswith("}"):
                labels = _labels_by_form(label_text)
                if labels is not None:
                    self._keep_labels(label_text, labels)
            if labels is not None:
                try:
                    value = float(value_text)
                    if name != last:
                        append, last = family_of[name].samples.append, name
                except (KeyError, ValueError):
                    pass
                else:
                    # 1_000 is a number to Python only; infinity may have been written as 1e999.
                    if value - value == 0.0 and "_" not in value_text:
                        append(new(ParsedSample, (last, labels, value, None)))
                        continue
            self._take_numbered(line, number)
            last = _NO_NAME  # what has just been read may say that the name is another family's

    def _make_room(self, lines: Sequence[str], first: int) -> None:
        """Before a part of the exposition is taken. What that part goes over by is a block's worth, so small."""
        if self._most is None:
            return
        if len(lines) == 1 and len(lines[0]) > _BLOCK:
            raise TooMuch(first, f"a line of more than {_BLOCK} bytes")
        self._taken += len(lines)
        if self._taken > self._most:
            raise TooMuch(first, f"by here more than {self._most} lines and labels, which is all that is taken")

    def _keep_labels(self, closed: str, labels: Mapping[str, str]) -> None:
        self._taken += len(labels)
        self._labels[closed] = labels

    def let_go(self) -> None:
        """A little at a time: 60,000 lines freed in one go are 25 ms in which no other thread runs."""
        for family in self._families.values():
            while family.samples:
                del family.samples[-_FEW:]
        while self._labels:
            self._labels.popitem()

    def _take_numbered(self, line: str, number: int) -> None:
        try:
            self.take(line)
        except _Refused as refused:
            raise BadExposition(number, str(refused)) from None

    def take(self, line: str) -> None:
        if comment := _comment_parts(line) if len(line) <= _SHORT else _read_comment(line):
            self._take_comment(*comment)
        elif sample := _SAMPLE.fullmatch(line):
            self._take_sample(*sample.groups())
        elif rest := line.strip(" \t"):
            raise _Refused(_complaint(rest))

    def families(self) -> list[ParsedFamily]:
        found = self._families.values()
        return [ParsedFamily(f.name, f.type or "untyped", f.help or "", tuple(f.samples)) for f in found]

    # Samples

    def _take_sample(self, name: str, label_text: str | None, value: str, timestamp: str | None) -> None:
        closed = f"{label_text or ''}}}"
        labels = self._labels.get(closed)
        if labels is None:
            labels = _labels_by_form(closed) or parse_labels(label_text or "")
            self._keep_labels(closed, labels)
        family = self._of_sample.get(name) or self._family_of(name)
        family.samples.append(ParsedSample(name, labels, _number(value), _milliseconds(timestamp)))

    def _family_of(self, name: str) -> _Growing:
        """A histogram's and a summary's series have names of their own."""
        stem, underscore, part = name.rpartition("_")
        owner = self._families.get(stem) if underscore else None
        family = owner if owner and part in _PARTS.get(owner.type or "", ()) else self._family(name)
        self._of_sample[name] = family
        return family

    def _family(self, name: str) -> _Growing:
        return self._families.setdefault(name, _Growing(name))

    # Comments

    def _take_comment(self, keyword: str | None, name: str | None, rest: str) -> None:
        """`# EOF`, OpenMetrics' last line, is a comment like any other here."""
        if keyword is None:
            return
        if name is None:
            raise _Refused(f"{keyword} names no metric: {_shown(rest)}")
        if keyword == "HELP":
            self._take_help(name, rest)
        else:
            self._take_type(name, rest)

    def _take_help(self, name: str, text: str) -> None:
        family = self._family(name)
        if family.help is not None:
            raise _Refused(f"a second HELP of {name}")
        family.help = _unescape(text)

    def _take_type(self, name: str, kind: str) -> None:
        if kind not in TYPES:
            raise _Refused(f"the type of {name} is none of {', '.join(sorted(TYPES))}: {_shown(kind)}")
        family = self._family(name)
        if family.type is not None:
            raise _Refused(f"a second TYPE of {name}")
        if family.samples:
            raise _Refused(f"the TYPE of {name} comes after its samples")
        family.type = kind
        for part in _PARTS.get(kind, ()):
            self._of_sample.pop(f"{name}_{part}", None)  # this one's from now on
        self._family_of(name)


# Parts of a comment


def _read_comment(line: str) -> tuple[str | None, str | None, str] | None:
    """HELP or TYPE, the metric it is about, the rest; None for what is no comment."""
    match = _COMMENT.match(line)
    return (match[1], match[2], match[3].rstrip(" \t")) if match else None


_comment_parts = lru_cache(maxsize=1024)(_read_comment)
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
            raise _Refused(f"the label {name} comes twice")
        if name == "__name__":
            raise _Refused("the label __name__ is reserved")
        labels[name] = value
        at = _past_blanks(text, at)
        if at < len(text):
            if text[at] != ",":
                raise _Refused(f"a comma is missing after the label {name}")
            at = _past_blanks(text, at + 1)
    return labels


def _labels_by_form(closed: str) -> Mapping[str, str] | None:
    """Labels up to the closing brace, by their form: the text with the values taken out, of which exporters have a few
    dozen. A value may be anything without quotes and backslashes. None: to be looked at more closely."""
    if "\\" in closed:
        return None
    pieces = closed.split('"')
    form = '"'.join(pieces[::2])
    names = _names_in(form) if len(form) <= _SHORT else None
    # One value for each name, or a quote is open.
    return None if names is None or len(pieces) != 2 * len(names) + 1 else dict(zip(names, pieces[1::2], strict=True))


@lru_cache(maxsize=1024)
def _names_in(form: str) -> tuple[str, ...] | None:
    """The names of the labels; None for what is no form of labels."""
    try:
        return tuple(parse_labels(form.removesuffix("}").replace('"', '""')))
    except _Refused:
        return None


def _label_name(text: str, at: int) -> tuple[str, int]:
    match = _LABEL_NAME.match(text, at)
    if match is None:
        raise _Refused(f"no label name where one should be: {_shown(text[at:])}")
    if match[2] is None:
        raise _Refused(f"the label {match[1]} has no value")
    return match[1], _past_blanks(text, match.end())


def _label_value(text: str, at: int, name: str) -> tuple[str, int]:
    match = _QUOTED.match(text, at)
    if match is None:
        raise _Refused(f"the value of the label {name} is not in quotes")
    return _unescape(match[1]), match.end()


def _past_blanks(text: str, at: int) -> int:
    match = _BLANKS.match(text, at)
    return at if match is None else match.end()


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda escape: _ESCAPED[escape[0]], text) if "\\" in text else text


def _number(text: str) -> float:
    """As Go reads it, which knows no 1_000 and, in this format, no hexadecimal; past the largest float is no number."""
    if _NUMBER.fullmatch(text):
        value = float(text)
        if math.isfinite(value):
            return value
    elif _NO_FINITE_NUMBER.fullmatch(text):
        return float(text)
    raise _Refused(f"the value is not a number: {_shown(text)}")


def _milliseconds(text: str | None) -> int | None:
    if text is None:
        return None
    if not _INTEGER.fullmatch(text) or not _LEAST_TIMESTAMP <= int(text) <= _MOST_TIMESTAMP:
        raise _Refused(f"the timestamp is not a whole number of milliseconds: {_shown(text)}")
    return int(text)


# Why not


def _complaint(line: str) -> str:
    """What is wrong with a line that is neither a sample nor a comment. It is known to be wrong."""
    name = _METRIC_NAME.match(line)
    if name is None:
        return f"no metric name where one should be: {_shown(line)}"
    rest = line[name.end() :]
    if rest[:1] not in ("", " ", "\t", "{"):
        return f"no metric name: {_shown(line)}"
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
    return f"more than a value and a timestamp: {_shown(rest)}" if rest.split() else f"{name} has no value"


def _shown(text: str) -> str:
    """Short, and without anything that could move a cursor."""
    return ascii(text) if len(text) <= 40 else f"{text[:40]!a}…"
