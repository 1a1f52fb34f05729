"""This module keeps who held each device and what was wrong with it, from when to when, for a day. Pure.

A device that is not told of for a moment (its node is late) is taken to be as it was; after five minutes nobody knows
what happened in between, and what was going on then ended when it was last seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from podgpu.figures.device import Condition
from podgpu.history.rows import Key
from podgpu.model import Who, Workload

PATIENCE = 300.0
_NEW_EVENT_SECONDS = 60.0
"""A condition that says it began so much later than before began anew: another XID."""
_LONGEST_WORDS = 500
MOST_OF_A_DEVICE = 200
MOST_SPANS = 40_000
"""About 12 MiB. Beyond it those go that ended first."""


@dataclass(slots=True)
class Span:
    start: float
    what: Workload | Mark
    end: float | None = None
    """None: it lasts."""

    def overlaps(self, start: float, end: float) -> bool:
        return self.start < end and (self.end is None or self.end >= start)


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that was wrong with a device."""

    condition: str
    says: str


@dataclass(slots=True)
class _Story:
    """Of one device."""

    seen: float
    """When its holders were last told."""
    holders: tuple[Workload, ...] = ()
    holding: dict[Who, Span] = field(default_factory=dict)
    marked: dict[str, Span] = field(default_factory=dict)
    marks_seen: float = 0.0
    ended: list[Span] = field(default_factory=list)


class Spans:
    def __init__(self, most: int = MOST_SPANS) -> None:
        self._stories: dict[Key, _Story] = {}
        self._most = most
        self._count = 0
        self._changed: list[tuple[Key, Span]] | None = None

    # Telling

    def holders(self, key: Key, now: float, holders: tuple[Workload, ...]) -> None:
        story = self._stories.get(key)
        if story is None:
            if not holders:
                return
            story = self._stories[key] = _Story(now)
        if now - story.seen > PATIENCE:
            self._end(key, story, story.holding, story.seen)
            story.holders = ()
        story.seen = now
        if story.holders == holders:
            return
        story.holders = holders
        by_who = {holder.who: holder for holder in holders if holder.who}
        for gone in story.holding.keys() - by_who.keys():
            self._close(key, story, story.holding.pop(gone), now)
        for who, holder in by_who.items():
            if who not in story.holding:
                story.holding[who] = self._open(key, Span(now, holder))

    def conditions(self, key: Key, now: float, conditions: Sequence[Condition], ahead: float = 0.0) -> None:
        """`ahead`: what a condition's `since` is ahead of the time that is kept here."""
        story = self._stories.get(key)
        if story is None:
            if not conditions:
                return
            story = self._stories[key] = _Story(now)
        if now - story.marks_seen > PATIENCE:
            self._end(key, story, story.marked, story.marks_seen)
        story.marks_seen = now
        if not conditions and not story.marked:
            return
        names = {condition.name for condition in conditions}
        for gone in story.marked.keys() - names:
            self._close(key, story, story.marked.pop(gone), now)
        for condition in conditions:
            self._mark(key, story, condition, now, ahead)

    def _mark(self, key: Key, story: _Story, condition: Condition, now: float, ahead: float) -> None:
        since = now if condition.since is None else min(condition.since - ahead, now)
        mark, known = Mark(condition.name, condition.says[:_LONGEST_WORDS]), story.marked.get(condition.name)
        if known is not None and condition.since is not None and since - known.start >= _NEW_EVENT_SECONDS:
            self._close(key, story, known, since)
            known = None
        if known is None:
            story.marked[condition.name] = self._open(key, Span(since, mark))
        elif known.what != mark:
            known.what = mark
            self._note(key, known)

    def _open(self, key: Key, span: Span) -> Span:
        self._count += 1
        self._note(key, span)
        return span

    def _close(self, key: Key, story: _Story, span: Span, end: float) -> None:
        span.end = max(span.start, end)
        story.ended.append(span)
        self._note(key, span)
        if len(story.ended) > MOST_OF_A_DEVICE:
            self._count -= len(story.ended) - MOST_OF_A_DEVICE
            del story.ended[:-MOST_OF_A_DEVICE]

    def _end(self, key: Key, story: _Story, open_spans: dict[Who, Span] | dict[str, Span], at: float) -> None:
        for span in open_spans.values():
            self._close(key, story, span, at)
        open_spans.clear()

    # Forgetting

    def forget(self, before: float, now: float) -> None:
        """What ended before then. What was not told of for long now ends."""
        for key, story in list(self._stories.items()):
            if now - story.seen > PATIENCE and story.holding:
                self._end(key, story, story.holding, story.seen)
                story.holders = ()
            if now - story.marks_seen > PATIENCE and story.marked:
                self._end(key, story, story.marked, story.marks_seen)
            kept = [span for span in story.ended if span.end is not None and span.end >= before]
            self._count -= len(story.ended) - len(kept)
            story.ended = kept
            if not (kept or story.holding or story.marked):
                del self._stories[key]
        if self._count > self._most:
            self._forget_oldest(self._count - self._most * 3 // 4)

    def _forget_oldest(self, number: int) -> None:
        ends = sorted(span.end or 0.0 for story in self._stories.values() for span in story.ended)
        if ends:
            self._count = 0  # counted anew below
            limit = ends[min(number, len(ends) - 1)]
            for story in self._stories.values():
                story.ended = [span for span in story.ended if (span.end or 0.0) > limit]
                self._count += len(story.ended) + len(story.holding) + len(story.marked)

    # Reading

    def __len__(self) -> int:
        return self._count

    def of(self, key: Key, now: float) -> list[Span]:
        """All of a device, by their beginning. What was not told of for long has ended when it was last seen."""
        story = self._stories.get(key)
        if story is None:
            return []
        spans = [
            *story.ended,
            *_lasting(story.holding, story.seen, now),
            *_lasting(story.marked, story.marks_seen, now),
        ]
        return sorted((replace(span) for span in spans), key=lambda span: span.start)

    def devices_of(self, namespace: str, pod: str) -> list[Key]:
        """Those the pod held within the day."""
        return [
            key
            for key, story in self._stories.items()
            if any(_is_pod(span.what, namespace, pod) for span in (*story.holding.values(), *story.ended))
        ]

    def everything(self) -> list[tuple[Key, Span]]:
        return [
            (key, replace(span))
            for key, story in self._stories.items()
            for span in (*story.ended, *story.holding.values(), *story.marked.values())
        ]

    def lasting(self) -> list[tuple[Key, Span]]:
        return [(key, span) for key, span in self.everything() if span.end is None]

    # Keeping elsewhere

    def watch(self) -> None:
        """From now on what changes is remembered for `changes`."""
        self._changed = []

    def changes(self) -> list[tuple[Key, Span]] | None:
        """What changed since this was last asked, as it is now. None: too much, or nobody watched: take everything."""
        changed, self._changed = self._changed, []
        if changed is None:
            return None
        return [(key, replace(span)) for key, span in changed]

    def _note(self, key: Key, span: Span) -> None:
        if self._changed is not None:
            self._changed.append((key, span))
            if len(self._changed) > self._most:
                self._changed = None

    def restore(self, spans: Iterable[tuple[Key, Span]], seen: float) -> None:
        """From before a restart, of which `seen` is the last moment. Who is told of here already stays as told."""
        for key, span in spans:
            story = self._stories.setdefault(key, _Story(seen, marks_seen=seen))
            if span.end is None and isinstance(span.what, Workload) and span.what.who not in story.holding:
                story.holding[span.what.who] = span
                story.holders = (*story.holders, span.what)
            elif span.end is None and isinstance(span.what, Mark) and span.what.condition not in story.marked:
                story.marked[span.what.condition] = span
            else:
                span.end = max(span.start, seen) if span.end is None else span.end
                story.ended.append(span)
            self._count += 1


def _lasting(spans: Mapping[Any, Span], seen: float, now: float) -> Iterator[Span]:
    for span in spans.values():
        yield span if now - seen <= PATIENCE else replace(span, end=max(span.start, seen))


def _is_pod(what: Workload | Mark, namespace: str, pod: str) -> bool:
    return isinstance(what, Workload) and what.pod == pod and what.namespace == namespace
