"""The samples of a page whose like was seen before, without the parser. Pure.

Exporters' pages differ in numbers and label values; names, label names and comments are the same few hundred texts on
every node. A page is cut at its numbers. What stands between two of them has a head, comments and a name, and a form,
the labels with their values taken out. Each head and each form is judged once, by the parser itself, with empty values
and the number 0. A page of known ones is then good whatever the values (they have no quote, backslash or line break in
them) and the numbers are. What depends on more than one line, comments that come twice or too late, is looked at here.
Whatever is unusual is left to the parser.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from podgpu.exposition.parse import BadExposition, ParsedFamily, ParsedSample, parse_text

HOLE = "\0"
"""Stands where a number was."""
_MOST_KNOWN = 20_000
"""Some 10 MB. A page that makes up new names each time must not fill the memory."""
_LONGEST = 4096
T = TypeVar("T")
_NO_LABELS: Mapping[str, str] = {}


class _Head(NamedTuple):
    name: str
    """Of the sample; empty where there is none, for a comment may end in a number too."""
    commented: frozenset[str]
    """Families that HELP and TYPE are about."""


class Chunks:
    """What is known of pages, of all targets together."""

    def __init__(self, names: frozenset[str]) -> None:
        """`names`: samples that are wanted."""
        self._names = names
        self._heads: dict[str, _Head | None] = {}
        """None: not for us."""
        self._forms: dict[str, tuple[str, ...] | None] = {}
        """Names of the labels."""

    def samples(self, holed: str, numbers: list[float]) -> tuple[list[ParsedSample], array[int]] | None:
        """The samples wanted in the page's order, and which of its numbers is each one's.

        `holed` is the page with HOLE for each number. None: the parser must look at it.
        """
        *chunks, rest = holed.split(HOLE)
        if "\\" in holed or rest.strip("\n"):
            return None
        samples: list[ParsedSample] = []
        slots: list[int] = []
        seen: set[str] = set()
        """Families that had a comment or a sample."""
        label_sets: dict[str, Mapping[str, str]] = {}
        """By their text: samples with the same labels share them, as the parser has it."""
        checked: set[str] = set()
        names, heads, new, last = self._names, self._heads, tuple.__new__, ""
        for slot, chunk in enumerate(chunks):
            before, brace, text = chunk.partition("{")
            if "\n" in text:  # a comment has a brace in it, or a line has no number
                before, brace, text = _partition_last_line(chunk)
            head = heads.get(before) or self._head(before)
            if head is None:
                return None
            name = head.name
            if name != last or head.commented:
                if not seen.isdisjoint(head.commented):
                    return None  # a second HELP or TYPE, or a TYPE after samples
                seen |= head.commented
                seen.add(name)
                last = name
            if name in names:
                labels = label_sets.get(text) if brace else _NO_LABELS
                if labels is None:
                    values = self._values(text)
                    if values is None:
                        return None
                    labels = label_sets[text] = values
                samples.append(new(ParsedSample, (name, labels, numbers[slot], None)))
                slots.append(slot)
            elif brace and text not in checked:
                if self._values(text) is None:
                    return None
                checked.add(text)
        return samples, array("I", slots)

    def _head(self, before: str) -> _Head | None:
        if before not in self._heads:
            _make_room(self._heads)
            self._heads[before] = _judge_head(before)
        return self._heads[before]

    def _values(self, text: str) -> Mapping[str, str] | None:
        """The labels up to the number. None: the parser must look at it."""
        pieces = text.split('"')
        form = '"'.join(pieces[::2])
        try:
            names = self._forms[form]
        except KeyError:
            _make_room(self._forms)
            names = self._forms[form] = _judge_form(form)
        return (
            None if names is None or len(pieces) != 2 * len(names) + 1 else dict(zip(names, pieces[1::2], strict=True))
        )


def _partition_last_line(chunk: str) -> tuple[str, str, str]:
    comments, line_end, line = chunk.rpartition("\n")
    before, brace, text = line.partition("{")
    return comments + line_end + before, brace, text


def _make_room(known: dict[str, T]) -> None:
    if len(known) >= _MOST_KNOWN:
        known.clear()


def _judge_head(before: str) -> _Head | None:
    """Comments and a name, by themselves a page of one sample."""
    families = _parse(before)
    *comments, last = before.split("\n")
    if families is None or any(line and not line.startswith("#") for line in comments):
        return None  # or a sample without a number, such as NaN
    commented = frozenset(family.name for family in families) if "#" in before else frozenset[str]()
    if last.startswith("#"):
        return _Head("", commented)
    (sample,) = (sample for family in families for sample in family.samples)
    return _Head(sample.name, commented) if sample.timestamp is None else None


def _judge_form(form: str) -> tuple[str, ...] | None:
    """What stands behind a name, by itself at a name."""
    families = _parse("x{" + form.replace('"', '""')) if "\n" not in form else None
    if families is None:
        return None
    (sample,) = (sample for family in families for sample in family.samples)
    return tuple(sample.labels) if sample.timestamp is None else None


def _parse(text: str) -> list[ParsedFamily] | None:
    if len(text) > _LONGEST:
        return None
    try:
        families = parse_text(f"{text} 0\n")
    except BadExposition:
        return None
    return None if any(family.type in ("histogram", "summary") for family in families) else families
