"""Writes Events, which `kubectl describe pod` and `kubectl describe node` show.

An Event stands for all changes of one GPU with the same reason. It is written at once, and then at
most every 10 minutes, with the number of changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import NamedTuple

from podgpu.clock import Clock
from podgpu.errors import SourceError, utc_text
from podgpu.kube.client import ApiClient
from podgpu.kube.objects import KubeObject
from podgpu.model import Workload
from podgpu.writers.gpu_changes import ChangeReason, GpuChange
from podgpu.writers.health_writer import NodeUpdate
from podgpu.writers.write_option import EVENTS
from podgpu.writers.write_queue import Write

COMPONENT = "podgpu"
LABELS = {"app.kubernetes.io/managed-by": COMPONENT}
"""Labels of all objects that podgpu creates."""
EVENT_SECONDS = 600.0
_EXPIRES_AFTER = 3600.0  # the API server deletes an Event one hour after the last write
_MAX_MESSAGE = 1024
_MAX_SERIES = 2000  # in memory; the oldest are dropped


def select_labels(labels: Mapping[str, str]) -> str:
    """Returns a label selector of the API."""
    return ",".join(f"{name}={value}" for name, value in labels.items())


class Target(NamedTuple):
    """The object that an Event is about."""

    kind: str
    name: str
    namespace: str = ""
    uid: str = ""

    @property
    def event_namespace(self) -> str:
        return self.namespace or "default"

    def refer(self) -> dict[str, str]:
        reference = {"apiVersion": "v1", "kind": self.kind, "name": self.name}
        if self.namespace:
            reference["namespace"] = self.namespace
        if self.uid:
            reference["uid"] = self.uid
        return reference


def node_target(node: str) -> Target:
    """Events of nodes have the node's name as UID. `kubectl describe node` finds them by it."""
    return Target("Node", node, uid=node)


def pod_target(workload: Workload) -> Target:
    return Target("Pod", workload.pod, workload.namespace, workload.uid)


class SeriesKey(NamedTuple):
    target: Target
    gpu: str
    reason: ChangeReason

    @property
    def event_name(self) -> str:
        """The same in all exporters of the node, also after a restart."""
        text = "\0".join((*self.target, self.gpu, self.reason))
        digest = hashlib.sha256(text.encode()).hexdigest()
        return f"podgpu.{digest[:20]}"


@dataclass
class _EventSeries:
    """All changes that one Event stands for. Times are monotonic, except `first` and `last`."""

    first: float
    last: float
    message: str = ""
    is_warning: bool = True
    count: int = 0
    written: int = 0  # the `count` of the Event
    written_at: float | None = None  # None before the Event was written
    was_present: bool = False  # True if the first change is not new: the Event may have it already

    @property
    def unwritten(self) -> int:
        return self.count - self.written


@dataclass(eq=False)
class EventWriter:
    _client: ApiClient
    _node: str
    _clock: Clock = field(default_factory=Clock)
    _series: dict[SeriesKey, _EventSeries] = field(default_factory=dict)

    def update(self, update: NodeUpdate) -> list[Write]:
        self.add(update.changes)
        return self.list_due()

    def add(self, changes: Iterable[GpuChange]) -> None:
        for change in changes:
            for target in self._find_targets(change):
                self._add_to(SeriesKey(target, change.gpu, change.reason), change)

    def _find_targets(self, change: GpuChange) -> Iterator[Target]:
        if change.concerns_node:
            yield node_target(self._node)
        # A pod with several containers is one target.
        yield from dict.fromkeys(pod_target(workload) for workload in change.pods)

    def _add_to(self, key: SeriesKey, change: GpuChange) -> None:
        now = self._clock.wall()
        series = self._series.pop(key, None)
        if series is None or now - series.last > _EXPIRES_AFTER:
            series = _EventSeries(now, now, was_present=not change.is_new)

        series.last = now
        series.message = change.message[:_MAX_MESSAGE]
        series.is_warning = change.is_warning
        series.count += change.times

        # The dict is sorted by the last change.
        self._series[key] = series
        if len(self._series) > _MAX_SERIES:
            oldest = next(iter(self._series))
            del self._series[oldest]

    def list_due(self) -> list[Write]:
        now = self._clock.monotonic()
        writes = []
        for key, series in self._series.items():
            if not series.unwritten:
                continue
            is_due = series.written_at is None or now - series.written_at >= EVENT_SECONDS
            if is_due:
                name = f"{key.target.event_namespace}/{key.event_name}"
                send = partial(self._send, key, series)
                writes.append(Write(EVENTS, name, send))

        return writes

    async def _send(self, key: SeriesKey, series: _EventSeries) -> None:
        if self._clock.wall() - series.last > _EXPIRES_AFTER:
            # It would have expired by now.
            self._mark_written(series)
            return

        path = f"/api/v1/namespaces/{key.target.event_namespace}/events"
        if series.written_at is None:
            await self._create(path, key, series)
        else:
            await self._update(path, key, series)

    async def _create(self, path: str, key: SeriesKey, series: _EventSeries) -> None:
        try:
            await self._client.create(path, self._make_event(key, series))
            self._mark_written(series)
        except SourceError as error:
            if error.reason != "conflict":
                raise
            # Another exporter, or this one before its restart, has written the Event.
            await self._take_over(path, key, series)

    async def _take_over(self, path: str, key: SeriesKey, series: _EventSeries) -> None:
        event = await self._client.get(f"{path}/{key.event_name}")
        series.written = _read_count(event)
        series.count += series.written
        if series.was_present:
            # The first change is in the Event already.
            series.count -= 1

        age = max(0.0, self._clock.wall() - _read_time(event))
        series.written_at = self._clock.monotonic() - age
        if series.unwritten and age >= EVENT_SECONDS:
            await self._update(path, key, series)

    async def _update(self, path: str, key: SeriesKey, series: _EventSeries) -> None:
        changes = {
            "count": series.count,
            "lastTimestamp": utc_text(series.last),
            "message": series.message,
            "type": _type_of(series),
        }
        try:
            await self._client.patch(f"{path}/{key.event_name}", changes)
        except SourceError as error:
            if error.reason != "not_found":
                raise
            # It has expired.
            await self._client.create(path, self._make_event(key, series))

        self._mark_written(series)

    def _mark_written(self, series: _EventSeries) -> None:
        series.written = series.count
        series.written_at = self._clock.monotonic()

    def _make_event(self, key: SeriesKey, series: _EventSeries) -> KubeObject:
        target = key.target
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": key.event_name,
                "namespace": target.event_namespace,
                "labels": LABELS,
            },
            "involvedObject": target.refer(),
            "reason": str(key.reason),
            "message": series.message,
            "type": _type_of(series),
            "count": series.count,
            "firstTimestamp": utc_text(series.first),
            "lastTimestamp": utc_text(series.last),
            "source": {"component": COMPONENT, "host": self._node},
            "reportingComponent": COMPONENT,
            "reportingInstance": self._node,
        }


def _type_of(series: _EventSeries) -> str:
    return "Warning" if series.is_warning else "Normal"


def _read_count(event: KubeObject) -> int:
    count = event.get("count")
    return count if isinstance(count, int) else 1


def _read_time(event: KubeObject) -> float:
    """Returns the time of the last change. 0 if it is unknown."""
    try:
        return datetime.fromisoformat(str(event.get("lastTimestamp"))).timestamp()
    except ValueError:
        return 0.0
