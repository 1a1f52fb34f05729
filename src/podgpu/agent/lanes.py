"""This module has the lanes, fields that are read together at one interval; the schedule knows which are due. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from podgpu.agent.collections import DEFAULT_RETENTION, Collection, SampleRetention, collection_of_fields
from podgpu.gpu.source import Lane
from podgpu.metrics.conditions import FIELD_CONDITIONS
from podgpu.metrics.counters import Counter
from podgpu.metrics.dcgm import CLOCK_EVENTS_COUNT_FIELD, CLOCK_EVENTS_TOTAL_FIELD
from podgpu.metrics.families import CLOCK_EVENTS_FIELD, THROTTLE_REASONS
from podgpu.metrics.fields import Field, fields
from podgpu.metrics.render import Policy
from podgpu.model import Reading

_CLOCK_EVENT_COUNTS = {CLOCK_EVENTS_COUNT_FIELD, CLOCK_EVENTS_TOTAL_FIELD}
_TOGETHER_SECONDS = 0.02
"""What is due this soon is read now: every turn has a cost of its own."""
SELDOM_SECONDS = 5.0
"""How far apart readings of podgpu's own sums of throttled time are at least: one takes the driver 1.5 ms of CPU (an
H200), and whether a GPU is throttled is judged at this pace too."""


def make_lanes(
    wanted: Sequence[Field],
    counters: Sequence[Counter],
    interval: float,
    collections: Sequence[Collection] = (),
    retention: SampleRetention = DEFAULT_RETENTION,
    pass_over: bool = False,
    sums_interval: float = SELDOM_SECONDS,
) -> tuple[Lane, ...]:
    """One for each collection, and one for the fields of none, which podgpu's own are among; at quick intervals one
    more, for those of podgpu's own that are dear and need not be as quick.

    Raises UsageError for a collection without a field, unless such are passed over.
    """
    collection_of = collection_of_fields(counters, collections, pass_over)
    asked_for = {counter.field.id for counter in counters}
    own_sums = THROTTLE_REASONS.keys() - asked_for if interval < sums_interval else set()
    base = tuple(f for f in wanted if f.id not in collection_of and f.id not in own_sums)
    lanes = [_lane(base, interval, retention)]
    lanes.append(_lane(tuple(f for f in wanted if f.id in own_sums), sums_interval, retention))
    for collection in collections:
        own = tuple(f for f in wanted if collection_of.get(f.id) is collection)
        lanes.append(_lane(own, collection.every, collection.retention.over(retention)))
    return tuple(lane for lane in lanes if lane.fields) or (lanes[0],)


def _lane(fields: tuple[Field, ...], interval: float, retention: SampleRetention) -> Lane:
    return Lane(fields, interval, retention.max_age or 0.0, retention.max_samples or 0)


class Schedule:
    """When each lane is to be read next. One thread at a time."""

    def __init__(self, lanes: Sequence[Lane], warm_up: float) -> None:
        """`warm_up`: rates need two readings; the second comes this soon after the first, whatever the interval."""
        self.lanes = tuple(lanes)
        self._warm_up = warm_up
        self._next = dict.fromkeys(self.lanes, float("-inf"))
        self._cold = set(self.lanes)

    @property
    def next_at(self) -> float:
        return min(self._next.values())

    def take_due(self, now: float) -> tuple[Lane, ...]:
        """The lanes to read now; the next time of each is set."""
        due = tuple(lane for lane in self.lanes if self._next[lane] <= now + _TOGETHER_SECONDS)
        for lane in due:
            self._next[lane] = self._after(lane, now)
        return due

    def _after(self, lane: Lane, now: float) -> float:
        """On a grid, so that lanes meet; who is late begins a new one."""
        if lane in self._cold:
            self._cold.discard(lane)
            return now + min(self._warm_up, lane.interval)
        on_time = self._next[lane] + lane.interval
        return on_time if on_time > now else now + lane.interval

    def hurry(self, now: float) -> None:
        """Everything is to be read anew: other devices are here."""
        for lane in self._next:
            self._next[lane] = min(self._next[lane], now)


def fields_to_read(policy: Policy) -> tuple[Field, ...]:
    """The counter file's fields, and what podgpu's own families are made of."""
    wanted = {c.field.id: c.field for c in policy.counters}
    own = {*THROTTLE_REASONS, *FIELD_CONDITIONS}
    own |= {CLOCK_EVENTS_FIELD} if wanted.keys() & _CLOCK_EVENT_COUNTS else set()
    if policy.gpu_manager:
        from podgpu.metrics.gpu_manager import FB_TOTAL_FIELD

        own.add(FB_TOTAL_FIELD)
    return tuple((wanted | {i: fields()[i] for i in own}).values())


def fields_of(lanes: Iterable[Lane]) -> frozenset[int]:
    return frozenset(f.id for lane in lanes for f in lane.fields)


def clock_event_masks(readings: Iterable[Reading], lanes: Iterable[Lane]) -> dict[str, int]:
    """By device, of the samples of the turn in which these lanes were read."""
    if CLOCK_EVENTS_FIELD not in fields_of(lanes):
        return {}
    masks = ((r.device.key, r.values.get(CLOCK_EVENTS_FIELD)) for r in readings)
    return {key: mask for key, mask in masks if isinstance(mask, int)}
