"""This module writes the ring as bytes of a file, and reads it: a line that says what it is, then frames one after the
other, each with its checksum.

A frame that was torn or damaged is passed over, and the next one is looked for: what can be read is read. A file tells
whose the places of its columns are before the columns come. Pure.
"""

from __future__ import annotations

import json
import math
import re
import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from podgpu.errors import SourceError
from podgpu.history.columns import SAMPLE_BYTES
from podgpu.history.rows import MOST_ROWS, Key
from podgpu.history.spans import Mark, Span
from podgpu.model import WORKLOAD_PARTS, Workload, parts_of

T = TypeVar("T")
VERSION = 1
Kind = Literal["fine", "coarse"]
_HEAD = f"podgpu history {VERSION} {sys.byteorder}\n".encode()
_ANY_HEAD = re.compile(rb"podgpu history (\d{1,9}) (little|big)\n")
_MARK = b"\xf7PGH"
_FRAME = struct.Struct("<4scII")
_MOMENT = struct.Struct("<d")
_NAMES, _FINE, _COARSE, _SPANS = b"N", b"F", b"C", b"S"
_COLUMN_OF: dict[Kind, bytes] = {"fine": _FINE, "coarse": _COARSE}
_LAST_MOMENT = 1e11
_LONGEST_NAME = 1024
_LARGEST_FRAME = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Name:
    """Whose a place in the columns is."""

    place: int
    key: Key
    node: str = ""
    index: int = -1
    seen: float = 0.0
    """Unix time at which it last was."""


@dataclass(slots=True)
class Column:
    kind: Kind
    at: float
    """Unix time at which its step began."""
    samples: bytes
    names: dict[int, Name]
    """By place; columns under the same names share them. Of places beyond its own it may say anything."""


@dataclass(slots=True)
class Segment:
    """What a file has, in its order."""

    columns: list[Column] = field(default_factory=list)
    spans: dict[tuple[Key, str, float], tuple[Key, Span]] = field(default_factory=dict)
    """By device, what and when it began: what is told later of the same is what counts."""
    damaged: int = 0
    """Bytes that could not be read."""

    @property
    def last_column(self) -> float:
        """Unix time; -inf: there is none."""
        return max((column.at for column in self.columns), default=-math.inf)

    @property
    def newest(self) -> float:
        """Unix time of the last thing it tells of; -inf: there is none."""
        return max(self.last_column, newest_of(span for _, span in self.spans.values()))


def newest_of(spans: Iterable[Span]) -> float:
    return max((span.start if span.end is None else span.end for span in spans), default=-math.inf)


# Writing


def head() -> bytes:
    return _HEAD


def names_frame(names: Iterable[Name]) -> bytes:
    rows = [[n.place, n.key.uuid, n.key.instance, list(n.key.who), n.node, n.index, n.seen] for n in names]
    return _frame(_NAMES, _text(rows))


def column_frame(kind: Kind, at: float, samples: bytes) -> bytes:
    return _frame(_COLUMN_OF[kind], _MOMENT.pack(at) + samples)


def spans_frame(spans: Iterable[tuple[Key, Span]]) -> bytes:
    return _frame(_SPANS, _text([_span_row(key, span) for key, span in spans]))


def _span_row(key: Key, span: Span) -> list[Any]:
    what = span.what
    words = ["m", what.condition, what.says] if isinstance(what, Mark) else ["h", *parts_of(what)]
    return [key.uuid, key.instance, span.start, span.end, *words]


def _text(rows: list[list[Any]]) -> bytes:
    return json.dumps(rows, separators=(",", ":"), allow_nan=False).encode()


def _frame(kind: bytes, content: bytes) -> bytes:
    return _FRAME.pack(_MARK, kind, len(content), zlib.crc32(content, kind[0])) + content


# Reading


def load_segment(content: bytes) -> Segment:
    """Raises SourceError for a file that is not podgpu's, or of another version. One that is damaged is read as far as
    it can be."""
    found = _ANY_HEAD.match(content)
    if content[: len(_HEAD)] != _HEAD:
        if found is None:
            raise SourceError("malformed", "is not a file of podgpu's history")
        version, order = found[1].decode(), found[2].decode()
        if int(version) != VERSION:
            raise SourceError("other_version", f"is of version {version}; this podgpu reads version {VERSION}")
        raise SourceError("other_machine", f"was written on a {order}-endian machine, and this one is not")
    segment, names = Segment(), dict[int, Name]()
    for kind, payload in _frames(content, segment):
        try:
            names = _take(segment, names, kind, payload)
        except (ValueError, TypeError, IndexError, RecursionError):
            segment.damaged += len(payload)
    return segment


def _frames(content: bytes, segment: Segment) -> Iterator[tuple[bytes, bytes]]:
    at = len(_HEAD)
    while at < len(content):
        payload = b""
        if len(content) - at >= _FRAME.size:
            mark, kind, length, checksum = _FRAME.unpack_from(content, at)
            begin = at + _FRAME.size
            if mark == _MARK and length <= min(_LARGEST_FRAME, len(content) - begin):
                payload = content[begin : begin + length]
                if zlib.crc32(payload, kind[0]) == checksum:
                    yield kind, payload
                    at = begin + length
                    continue
        following = content.find(_MARK, at + 1)
        following = len(content) if following < 0 else following
        segment.damaged += following - at
        at = following


def _take(segment: Segment, names: dict[int, Name], kind: bytes, payload: bytes) -> dict[int, Name]:
    """The names that count from here on."""
    if kind == _NAMES:
        return _renamed(segment, names, {name.place: name for name in _each(segment, payload, _name)})
    if kind == _SPANS:
        for key, word, span in _each(segment, payload, _span):
            segment.spans[key, word, span.start] = key, span
    elif kind in (_FINE, _COARSE):
        at, samples = _moment(_MOMENT.unpack_from(payload)[0] if len(payload) >= _MOMENT.size else None), payload[8:]
        if len(samples) % SAMPLE_BYTES or len(samples) > SAMPLE_BYTES * MOST_ROWS:
            raise ValueError("column")
        segment.columns.append(Column("fine" if kind == _FINE else "coarse", at, samples, names))
    return names


def _renamed(segment: Segment, names: dict[int, Name], new: dict[int, Name]) -> dict[int, Name]:
    """Only where columns that were read under these names would say something else are they copied: a place goes to
    another, or is named that was nobody's in them."""
    if segment.columns and segment.columns[-1].names is names:
        end = max(len(column.samples) for column in segment.columns) // SAMPLE_BYTES
        for place, name in new.items():
            known = names.get(place)
            if known.key != name.key if known else place < end:
                return names | new
    names.update(new)
    return names


def _each(segment: Segment, payload: bytes, read: Callable[[Any], T]) -> Iterator[T]:
    """Rows that cannot be read are passed over."""
    rows = json.loads(payload)
    if not isinstance(rows, list):
        raise TypeError("rows")
    for row in rows:
        try:
            yield read(row)
        except (ValueError, TypeError):
            segment.damaged += 1


def _name(row: Any) -> Name:
    place, uuid, instance, who, node, index, seen = row
    if type(place) is not int or not 0 <= place < MOST_ROWS or type(index) is not int or type(who) is not list:
        raise ValueError("name")
    parts = tuple(_word(part) for part in who)
    return Name(place, Key(_word(uuid), _word(instance), parts), _word(node), max(index, -1), _moment(seen))


def _span(row: Any) -> tuple[Key, str, Span]:
    uuid, instance, start, end, sort, *words = row
    words = [_word(word) for word in words]
    what: Workload | Mark
    if sort == "m":
        condition, says = words
        what, word = Mark(condition, says), f"m{condition}"
    elif sort == "h":
        what = Workload(**dict(zip(WORKLOAD_PARTS, words, strict=True)))
        word = f"h{what.who}"
    else:
        raise ValueError("span")
    begun = _moment(start)
    ended = None if end is None else max(_moment(end), begun)
    return Key(_word(uuid), _word(instance)), word, Span(begun, what, ended)


def _word(text: Any) -> str:
    if type(text) is not str or len(text) > _LONGEST_NAME:
        raise TypeError("word")
    return text


def _moment(value: Any) -> float:
    if type(value) not in (int, float) or not -_LAST_MOMENT < value < _LAST_MOMENT:
        raise ValueError("moment")
    return float(value)
