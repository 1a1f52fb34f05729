"""This module parses text format 0.0.4 into families: the encoder's way back, and anybody else's exposition. Pure.

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from podgpu.errors import SourceError
from podgpu.metrics.lines import (
    SAMPLE,
    SHORT,
    Refused,
    comment_parts,
    complaint_of,
    labels_by_form,
    milliseconds_of,
    number_of,
    parse_labels,
    read_comment,
    shown,
    unescape,
)

TYPES = frozenset({"counter", "gauge", "histogram", "summary", "untyped"})
_PARTS = {"histogram": ("bucket", "sum", "count"), "summary": ("sum", "count")}
_NO_NAME = "{"
_BLOCK = 1 << 16
_FEW = 1000
_BLANKS_TO_FLOAT = "\t\r\x0b\x0c\x1c\x1d\x1e\x1f"
"""What Python's float() skips around a number, ASCII's part of it."""


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


def _nothing() -> None:
    """Between the parts of a text, for a caller who has nobody else to think of."""


def parse_text(text: str, most: int | None = None, between: Callable[[], object] = _nothing) -> list[ParsedFamily]:
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
                labels = labels_by_form(label_text)
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
        except Refused as refused:
            raise BadExposition(number, str(refused)) from None

    def take(self, line: str) -> None:
        if comment := comment_parts(line) if len(line) <= SHORT else read_comment(line):
            self._take_comment(*comment)
        elif sample := SAMPLE.fullmatch(line):
            self._take_sample(*sample.groups())
        elif rest := line.strip(" \t"):
            raise Refused(complaint_of(rest))

    def families(self) -> list[ParsedFamily]:
        found = self._families.values()
        return [ParsedFamily(f.name, f.type or "untyped", f.help or "", tuple(f.samples)) for f in found]

    # Samples

    def _take_sample(self, name: str, label_text: str | None, value: str, timestamp: str | None) -> None:
        closed = f"{label_text or ''}}}"
        labels = self._labels.get(closed)
        if labels is None:
            labels = labels_by_form(closed) or parse_labels(label_text or "")
            self._keep_labels(closed, labels)
        family = self._of_sample.get(name) or self._family_of(name)
        family.samples.append(ParsedSample(name, labels, number_of(value), milliseconds_of(timestamp)))

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
            raise Refused(f"{keyword} names no metric: {shown(rest)}")
        if keyword == "HELP":
            self._take_help(name, rest)
        else:
            self._take_type(name, rest)

    def _take_help(self, name: str, text: str) -> None:
        family = self._family(name)
        if family.help is not None:
            raise Refused(f"a second HELP of {name}")
        family.help = unescape(text)

    def _take_type(self, name: str, kind: str) -> None:
        if kind not in TYPES:
            raise Refused(f"the type of {name} is none of {', '.join(sorted(TYPES))}: {shown(kind)}")
        family = self._family(name)
        if family.type is not None:
            raise Refused(f"a second TYPE of {name}")
        if family.samples:
            raise Refused(f"the TYPE of {name} comes after its samples")
        family.type = kind
        for part in _PARTS.get(kind, ()):
            self._of_sample.pop(f"{name}_{part}", None)  # this one's from now on
        self._family_of(name)
