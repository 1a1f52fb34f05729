"""This module has the ring written to its directory as it grows, and read from there at the start.

What is new in the ring is added to the segments every time; when that fails it stays in the ring, and is tried again.
When the wall clock was set, everything is written anew, once: moments in files are Unix time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from podgpu.history import columns, frames
from podgpu.history.asking import COARSE, STEP
from podgpu.history.directory import Directory, Period
from podgpu.history.frames import Column, Name, Segment
from podgpu.history.ring import Ring
from podgpu.history.rows import Key
from podgpu.history.spans import MOST_SPANS, Span

_MOST_COLUMNS: Mapping[Period, int] = {"hour": 120, "day": 24}
"""In a segment that grows: half an hour, and two hours. Beyond, another is begun, so that old ones can go."""
_MANY_FILES = 24
"""More than a day takes: beyond, everything is written anew, and the others go."""
_KINDS: Mapping[Period, frames.Kind] = {"hour": "fine", "day": "coarse"}
_STEPS: Mapping[Period, int] = {"hour": STEP, "day": COARSE}
_SET_SECONDS = 60.0
"""History that ends further in the future than this was written before the clock was set back."""
_SAME = 1.0
_NAMED_SECONDS = 9000.0
"""For so long may columns follow in a file after a name: who was seen then may have been seen until then."""
_ANEW_SECONDS = 60.0
"""Everything is written anew no more often than this, however often the clock is set."""


@dataclass(frozen=True, slots=True)
class _News:
    """What is to be written of one period."""

    is_file: bool
    """A new one."""
    newest: float
    """Unix time of the last column or span; -inf: there is none."""
    columns: int
    names: dict[int, Key]
    frames: list[bytes]


class Journal:
    def __init__(self, directory: Directory, ring: Ring) -> None:
        self._directory = directory
        self._ring = ring
        self._saved: dict[Period, dict[int, bytes]] = {"hour": {}, "day": {}}
        self._named: dict[Period, dict[int, Key]] = {"hour": {}, "day": {}}
        self._columns: dict[Period, int] = {"hour": 0, "day": 0}
        self._changes: list[tuple[Key, Span]] = []
        self._ahead: float | None = None
        """By how much Unix time was ahead of the ring's when the segments were written."""
        self._anew = False
        self._wrote_anew = float("-inf")

    # Reading

    def load(self, now: float, ahead: float) -> list[str]:
        """Takes what the files have into the ring. `now`: the ring's time, `ahead`: of it, Unix time. What to say of
        files that cannot be read, or that are not of today. Raises OutputError; it can be tried again."""
        segments, words = self._directory.read()
        newest = max((segment.last_column for segment in segments), default=-math.inf)
        last_known = max((segment.newest for segment in segments), default=now + ahead)
        back = max(0.0, newest - now - ahead) if newest > now + ahead + _SET_SECONDS else 0.0
        if back:
            words.append(
                f"the history in {self._directory.path} ends {back:.0f} s from now: the clock was set back since; it is"
                " shown as if it had ended just now"
            )
        with self._ring.lock:
            has_unwritten = bool(self._ring.fine or len(self._ring.spans))  # taken while the disk did not answer
            self._anew = bool(back) or has_unwritten or self._directory.files > _MANY_FILES
            for segment in sorted(segments, key=lambda s: s.last_column, reverse=True):
                _Taking(self._ring, now, ahead + back).take(segment)
            spans = {name: span for segment in segments for name, span in segment.spans.items()}
            shifted = [(key, _shifted(span, -ahead - back)) for key, span in spans.values()]
            self._ring.spans.restore(shifted, min(now, last_known - ahead - back + STEP))
            self._ring.spans.watch()
            if not self._anew:
                self._saved["hour"], self._saved["day"] = dict(self._ring.fine), dict(self._ring.coarse)
        return words

    # Writing

    def save(self, now: float, ahead: float) -> None:
        """Raises OutputError; what was not written is tried again the next time."""
        self._directory.open()
        if self._ahead is not None and abs(ahead - self._ahead) >= _SAME:
            self._anew = True
        if self._directory.files > _MANY_FILES:  # as when GPUs come and go all the time, and make room for each other
            self._anew = True
        if self._anew:
            if now - self._wrote_anew < _ANEW_SECONDS:
                return
            self._wrote_anew = now
        with self._ring.lock:
            kept: dict[Period, dict[int, bytes]] = {"hour": dict(self._ring.fine), "day": dict(self._ring.coarse)}
            self._remember(self._ring.spans.changes())
            news = {period: self._news(period, its_columns, ahead) for period, its_columns in kept.items()}
        for period, new in news.items():
            if new.is_file:
                self._directory.begin(period, [frames.head(), *new.frames], new.newest, alone=self._anew)
                self._columns[period], self._named[period] = 0, {}
            elif new.frames:
                self._directory.add(period, new.frames, new.newest)
            self._columns[period] += new.columns
            self._named[period] |= new.names
            self._saved[period] = kept[period]
        self._changes, self._anew, self._ahead = [], False, ahead

    def _remember(self, changes: list[tuple[Key, Span]] | None) -> None:
        if changes is None or len(self._changes) + len(changes) > MOST_SPANS:
            self._anew, self._changes = True, []
        else:
            self._changes += changes

    def _news(self, period: Period, kept: Mapping[int, bytes], ahead: float) -> _News:
        saved, step, ring = self._saved[period], _STEPS[period], self._ring
        is_file = self._anew or self._columns[period] >= _MOST_COLUMNS[period] or not self._directory.grows(period)
        new = kept if self._anew else {n: column for n, column in kept.items() if saved.get(n) is not column}
        named = {} if is_file else self._named[period]
        names = [
            Name(row.place, key, row.node, row.index, row.seen + ahead)
            for key, row in ring.rows
            if named.get(row.place) != key
        ]
        spans = self._changes if period == "day" else []
        if is_file and period == "day":
            spans = [*spans, *(ring.spans.everything() if self._anew else ring.spans.lasting())]
        return _News(
            is_file,
            max(max(new, default=-math.inf) * step, frames.newest_of(span for _, span in spans)) + ahead,
            len(new),
            {name.place: name.key for name in names},
            [
                *([frames.names_frame(names)] if names else ()),
                *([frames.spans_frame((key, _shifted(span, ahead)) for key, span in spans)] if spans else ()),
                *(frames.column_frame(_KINDS[period], n * step + ahead, new[n]) for n in sorted(new)),
            ],
        )

    def tidy(self, now: float, ahead: float) -> None:
        """Now and then. Raises OutputError when the directory is not ours. Files are as old as they are by the clock
        they were written by: when it was set since, they are needed until everything is written anew."""
        self._directory.open()
        self._directory.sync()
        self._directory.remove_old(now + (ahead if self._ahead is None else self._ahead))

    def close(self) -> None:
        self._directory.close()


def _shifted(span: Span, seconds: float) -> Span:
    return replace(span, start=span.start + seconds, end=None if span.end is None else span.end + seconds)


class _Taking:
    """One segment's columns, taken into a ring whose rows may be in other places."""

    def __init__(self, ring: Ring, now: float, ahead: float) -> None:
        self._ring = ring
        self._now = now
        self._ahead = ahead
        self._places: tuple[dict[int, Name], list[int | None]] | None = None

    def take(self, segment: Segment) -> None:
        for column in reversed(segment.columns):
            into, step = (self._ring.fine, STEP) if column.kind == "fine" else (self._ring.coarse, COARSE)
            number = round((column.at - self._ahead) / step)
            if number not in into and self._is_wanted(number * step, step):
                into[number] = self._placed(column)

    def _is_wanted(self, at: float, step: int) -> bool:
        return self._now - (3600.0 if step == STEP else 86_400.0) - step < at <= self._now

    def _placed(self, column: Column) -> bytes:
        """What is at a place that nobody names would be shown as somebody else's later."""
        where = self._where(column.names)
        count = columns.places(column.samples)
        own = [*where[:count], *[None] * (count - len(where))]
        nobodys = [number for number, place in enumerate(own) if place is None]
        if len(nobodys) + sum(place == number for number, place in enumerate(own)) == count:
            return columns.without(column.samples, nobodys) if nobodys else column.samples
        return columns.moved(column.samples, own, self._ring.rows.end)

    def _where(self, names: dict[int, Name]) -> list[int | None]:
        """The place in the ring of each place in the file."""
        if self._places is None or self._places[0] is not names:
            where: list[int | None] = [None] * (max(names, default=-1) + 1)
            for name in names.values():
                seen = min(name.seen - self._ahead + _NAMED_SECONDS, self._now)
                row = self._ring.rows.restore(name.key, name.place, seen)
                if row is not None:
                    where[name.place] = row.place
                    if not row.node:
                        row.node, row.index = name.node, name.index
            self._places = names, where
        return self._places[1]
