"""Parses and writes metric families of any exporter in Prometheus text format 0.0.4.

Malformed text is rejected with the line number and the reason. Some violations are accepted,
because they occur in practice and Prometheus accepts them: samples of a family that are not
adjacent, repeated HELP and TYPE lines, duplicate series, and invalid escape sequences
(dcgm-exporter does not escape label values). Timestamps are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from podgpu.errors import SourceError
from podgpu.metrics.encode import Labels, escape_help, format_float

_MAX_LINES = 250_000  # ten times as many as a node with 16 GPUs and 112 MIG instances exports
TYPES = frozenset({"counter", "gauge", "histogram", "summary", "untyped"})
_SUFFIXES = {"histogram": ("bucket", "sum", "count"), "summary": ("sum", "count")}
_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*+"
_QUOTED = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
# Groups: HELP or TYPE, the name of the family, the rest of the line.
_COMMENT = re.compile(
    rf"[ \t]*+#[ \t]*+(?:(HELP|TYPE)(?:[ \t]++|\Z)(?:({_NAME})(?:[ \t]++|\Z))?)?(.*)", re.DOTALL
)
# Groups: name, labels (None without braces), value. A timestamp may follow the value.
# Without braces, a space must separate the name and the value.
_SAMPLE = re.compile(
    rf"[ \t]*+({_NAME})[ \t]*+"
    rf'(?:(?<=[ \t])(?=[^{{])|\{{([^"}}]*+(?:{_QUOTED}[^"}}]*+)*+)\}}[ \t]*+)'
    r"([^ \t{]++)(?:[ \t]++[+-]?[0-9]++)?[ \t]*+"
)
_LABEL = re.compile(rf"[ \t]*+([a-zA-Z_][a-zA-Z0-9_]*+)[ \t]*+=[ \t]*+({_QUOTED})[ \t]*+(?:,|\Z)")
_LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*+")
_USUAL_NUMBER = re.compile(r"-?[0-9]{1,30}(?:\.[0-9]{1,30})?(?:e[+-][0-9]{2})?")
_NUMBER = re.compile(
    r"[+-]?(?:(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]+)?|inf(?:inity)?)|nan", re.IGNORECASE
)
"""Numbers that Prometheus accepts. `float` also accepts 1_000 and digits of other scripts."""
_ESCAPE = re.compile(r'\\[\\n"]')
_ESCAPED = {r"\\": "\\", r"\n": "\n", r"\"": '"'}
_LARGEST_PLAIN = 2.0**53  # floats represent all whole numbers up to this one exactly


class BadExposition(SourceError):
    """The text is not in format 0.0.4, or has too many lines."""

    def __init__(self, line: int, why: str) -> None:
        super().__init__("malformed", f"line {line}: {why}")
        self.line = line
        self.why = why


class ParsedSample(NamedTuple):  # a tuple is four times as fast to create as a frozen dataclass
    name: str
    labels: Mapping[str, str]  # read-only: samples with the same label text share one mapping
    value: float


@dataclass(slots=True)
class ParsedFamily:
    name: str
    type: str = "untyped"
    help: str = ""
    samples: list[ParsedSample] = field(default_factory=list)


def is_web_page(body: bytes) -> bool:
    """Returns True if the body begins like HTML or XML instead of metrics."""
    return body[:512].lstrip()[:1] == b"<"


def check_is_metrics(body: bytes, shown: str) -> None:
    """Raises SourceError if the body is a web page instead of metrics."""
    if is_web_page(body):
        raise SourceError(
            "not_prometheus",
            f"{shown} is a web page, not metrics: add the path of the metrics to the URL",
        )


def parse_text(text: str) -> list[ParsedFamily]:
    """Returns the families, ordered by their first line. Samples keep their order.

    Raises BadExposition if the text is malformed.
    """
    lines = text.split("\n")
    # Each line ends with a line feed, so nothing is left after the last one.
    unfinished = lines.pop()
    if unfinished:
        raise BadExposition(len(lines) + 1, "the text ends in the middle of this line")
    if len(lines) > _MAX_LINES:
        raise BadExposition(_MAX_LINES + 1, f"the text has more than {_MAX_LINES} lines")

    parser = _Parser()
    family_of = parser.by_sample_name.get
    labels_of = parser.labels.get
    is_usual = _USUAL_NUMBER.fullmatch
    for number, line in enumerate(lines, 1):
        # Most lines are `name{labels} number` with a known name. For them, this is four times as
        # fast as read_line.
        head, _, value = line.rpartition(" ")
        name, _, label_text = head.partition("{")
        family = family_of(name)
        if family is not None and is_usual(value):
            labels = labels_of(label_text) or parser.split_labels(label_text)
            if labels:
                family.samples.append(ParsedSample(name, labels, float(value)))
                continue

        try:
            parser.read_line(line)
        except ValueError as error:
            raise BadExposition(number, str(error)) from None

    return list(parser.families.values())


class _Parser:
    def __init__(self) -> None:
        self.families: dict[str, ParsedFamily] = {}
        self.by_sample_name: dict[str, ParsedFamily] = {}
        # Text of a sample's labels, up to and including "}" -> these labels, parsed. Many samples
        # have the same labels.
        self.labels: dict[str, dict[str, str]] = {}
        self._label_names: set[str] = set()

    def split_labels(self, text: str) -> dict[str, str] | None:
        """Splits `name="value",name="value"}` without escape sequences.

        Returns None if the text has another form.
        """
        try:
            labels = dict([pair.split('="') for pair in text[:-2].split('",')])
        except ValueError:
            # One of the pairs has not exactly two parts.
            return None

        # A name that is repeated and a quote inside a value change the number of quotes.
        if not text.endswith('"}') or text.count('"') != 2 * len(labels) or "\\" in text:
            return None
        if not self._label_names.issuperset(labels):
            if not all(map(_LABEL_NAME.fullmatch, labels)):
                return None
            self._label_names.update(labels)

        self.labels[text] = labels
        return labels

    def read_line(self, line: str) -> None:
        """Reads one line of any kind. Raises ValueError if the line is malformed."""
        if comment := _COMMENT.match(line):
            keyword, name, text = comment.groups()
            if keyword is not None:
                self._add_comment(keyword, name, text.rstrip(" \t"))
        elif sample := _SAMPLE.fullmatch(line):
            name, labels, value = sample.groups()
            if not _NUMBER.fullmatch(value):
                raise ValueError(f"the value is not a number: {_shorten(value)}")

            family = self.by_sample_name.get(name) or self._family_of_sample(name)
            parsed_labels = _parse_labels(labels or "")
            family.samples.append(ParsedSample(name, parsed_labels, float(value)))
        elif line.strip(" \t"):
            raise ValueError(f"neither a comment nor a sample: {_shorten(line)}")

    def _family_of_sample(self, name: str) -> ParsedFamily:
        """Returns the family of a sample.

        Samples of histograms and summaries have a suffix after the family's name.
        """
        stem, _, suffix = name.rpartition("_")
        family = self.families.get(stem)
        if family is None or suffix not in _SUFFIXES.get(family.type, ()):
            family = self._family(name)
        self.by_sample_name[name] = family
        return family

    def _family(self, name: str) -> ParsedFamily:
        return self.families.setdefault(name, ParsedFamily(name))

    def _add_comment(self, keyword: str, name: str | None, text: str) -> None:
        if name is None:
            raise ValueError(f"{keyword} without the name of a metric: {_shorten(text)}")

        if keyword == "HELP":
            self._family(name).help = _unescape(text)
        elif text in TYPES:
            self._family(name).type = text
            if text in _SUFFIXES:
                # Samples with a suffix may belong to this family.
                self.by_sample_name.clear()
            # The next lines are samples with this name.
            self._family_of_sample(name)
        else:
            raise ValueError(f"unknown type of {name}: {_shorten(text)}")


def _parse_labels(text: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    text = text.strip(" \t")
    position = 0
    while position < len(text):
        match = _LABEL.match(text, position)
        if match is None:
            raise ValueError(f"not a label: {_shorten(text[position:].strip())}")

        name = match[1]
        if name in labels:
            raise ValueError(f"the label {name} occurs twice")
        labels[name] = _unescape(match[2][1:-1])
        position = match.end()

    return labels


def _unescape(text: str) -> str:
    if "\\" in text:
        return _ESCAPE.sub(lambda escape: _ESCAPED[escape[0]], text)
    return text


def _shorten(text: str) -> str:
    if len(text) <= 40:
        return ascii(text)
    return f"{text[:40]!a}…"


def encode_parsed(families: Iterable[ParsedFamily]) -> bytes:
    """Encodes parsed families.

    Omits timestamps, because node_exporter's textfile collector rejects them.
    """
    # By the id of the labels: samples with the same labels share one mapping.
    texts: dict[int, str] = {}
    lines = []
    for family in families:
        if family.help:
            lines.append(f"# HELP {family.name} {escape_help(family.help)}\n")
        if family.help or family.type != "untyped" or not family.samples:
            lines.append(f"# TYPE {family.name} {family.type}\n")

        for name, labels, value in family.samples:
            text = texts.get(id(labels))
            if text is None:
                text = Labels(labels.items()).text
                texts[id(labels)] = text

            is_whole = value.is_integer() and abs(value) <= _LARGEST_PLAIN
            number = int(value) if is_whole else format_float(value)
            lines.append(f"{name}{text} {number}\n")

    return "".join(lines).encode()
