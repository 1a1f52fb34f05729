"""Checks the health of every GPU, and counts XIDs and clock events.

`metrics/conditions.py` defines the conditions. A condition is present, absent or unknown. It is
unknown if the GPU did not answer or does not support the field.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

from podgpu.clock import Clock, RepeatFilter, UnixTime
from podgpu.metrics.conditions import (
    DRIVER_AWAY,
    LOST,
    NVLINK,
    POWER_BRAKE,
    THERMAL,
    UNREADABLE,
    XID,
    conditions,
    conditions_from_fields,
    xid_detail,
    xid_spec,
)
from podgpu.metrics.fields import CLOCK_EVENTS, CLOCK_EVENTS_FIELD, THROTTLE_REASONS
from podgpu.model import (
    Assignment,
    Condition,
    Device,
    ErrorEvent,
    GpuReading,
    Value,
    Workload,
    XidCount,
    group_by_key,
    split_key,
)
from podgpu.node.agent.gpus import TelemetryResult

XID_SECONDS = 86_400.0  # how long a GPU is reported as broken after its last XID that needs action
THROTTLE_SECONDS = 60.0  # shorter throttling is normal operation
THROTTLE_BEGINS, THROTTLE_ENDS = (
    0.5,
    0.1,
)  # the condition begins and ends at these fractions of throttled time
_xid_log = logging.getLogger(f"{__name__}.xid")
_xid_log.addFilter(RepeatFilter())
_SAMPLE_SECONDS = 5.0  # minimum interval between two samples of the throttling counters
_ENERGY = 156
_DRIVER_REASONS = frozenset({"driver_not_loaded", "library_not_found", "stale_handle"})
_MONOTONIC_FIELDS = (
    *THROTTLE_REASONS,
    _ENERGY,
)  # these decrease only if the GPU was reset or the driver reloaded
_COUNTER_OF = {reason: number for number, reason in THROTTLE_REASONS.items()}
_THROTTLE_COUNTERS = {  # the highest counter is used; older drivers have only the last one
    THERMAL: [_COUNTER_OF[reason] for reason in ("sw_thermal", "hw_thermal", "thermal")],
    POWER_BRAKE: [_COUNTER_OF["hw_power_brake"]],
}


@dataclass(slots=True)
class Throttling:
    """Detects whether a GPU is throttled for a long time. Uses the GPU's throttling counters."""

    _samples: deque[tuple[float, dict[int, float]]] = field(default_factory=deque)
    _is_present: dict[str, bool] = field(default_factory=dict)

    def update(self, values: Mapping[int, Value], now: float) -> dict[str, bool]:
        """Returns whether each throttling condition is present. Omits unknown conditions."""
        samples = self._samples
        if samples and now - samples[-1][0] < _SAMPLE_SECONDS:
            return self._is_present
        samples.append(
            (
                now,
                {
                    i: float(v)
                    for i in THROTTLE_REASONS
                    if isinstance(v := values.get(i), int | float)
                },
            )
        )
        while len(samples) > 2 and now - samples[1][0] >= THROTTLE_SECONDS:
            samples.popleft()
        (began, first), (_, last) = samples[0], samples[-1]
        if now - began >= THROTTLE_SECONDS:
            before, self._is_present = self._is_present, {}
            for condition, counters in _THROTTLE_COUNTERS.items():
                ratios = [
                    (last[i] - first[i]) / 1e9 / (now - began)
                    for i in counters
                    if i in first and i in last
                ]
                if ratios:
                    limit = THROTTLE_ENDS if before.get(condition) else THROTTLE_BEGINS
                    self._is_present[condition] = max(ratios) >= limit
        return self._is_present


@dataclass(slots=True)
class _Gpu:
    """State of one GPU between two checks. Times are monotonic."""

    details: dict[str, str | None] | None = (
        None  # result of `_check_gpu`; None if the GPU is not selected
    )
    since: dict[str, float] = field(default_factory=dict)  # start time by condition
    xids: dict[int, tuple[float, float]] = field(
        default_factory=dict
    )  # first and last time of XIDs that need action
    throttling: Throttling = field(default_factory=Throttling)
    counters: dict[int, float] = field(default_factory=dict)
    links: int = 0  # highest number of active NVLinks since the start
    holders: tuple[Workload, ...] = ()
    was_unavailable: bool = False  # the GPU was lost, or its driver was not loaded


class HealthWatch:
    """Tracks the conditions of all GPUs. Not thread-safe."""

    def __init__(self, clock: Clock, xid_window: float, clock_window: float) -> None:
        """`xid_window`, `clock_window`: length in seconds of the windows in which XIDs and clock
        events are counted.
        """
        self._clock = clock.monotonic
        self._to_unix = UnixTime(clock).convert
        self._gpus: dict[str, _Gpu] = {}
        self._xids = EventLog(xid_window)
        self._xid_seen: dict[
            tuple[str, int], float
        ] = {}  # Unix time of the last XID, by device key and XID
        self._last_xids: dict[str, int] = {}
        self._clock_events = EventLog(clock_window)
        self._clock_masks: dict[str, int] = {}

    def update(self, result: TelemetryResult) -> None:
        now, all_values = self._clock(), result.values
        is_due = any(f.id == CLOCK_EVENTS_FIELD for group in result.groups for f in group.fields)
        for key, values in all_values.items() if is_due else ():
            mask = values.get(CLOCK_EVENTS_FIELD)
            if isinstance(mask, int):
                begun = mask & ~self._clock_masks.get(key, mask)
                self._clock_masks[key] = mask
                self._clock_events.add([(key, event) for event in _events(mask)], now)
                self._clock_events.totals.update((key, event) for event in _events(begun))
        gpus = [d for d in result.devices if not d.is_instance]
        self._gpus = {d.uuid: self._gpus.get(d.uuid) or _Gpu() for d in gpus}
        shown = {d.uuid for d in result.selected}
        links = _usual_links(gpus, result.readings)
        for d in gpus:
            gpu = self._gpus[d.uuid]
            gpu.details = None
            if d.uuid in shown:
                gpu.details = _check_gpu(
                    gpu, d, result, all_values.get(d.uuid), links.get(d.model, 0), now
                )

    def add_xids(self, events: Iterable[ErrorEvent]) -> None:
        now = self._clock()
        for event in events:
            key = event.device, event.code
            self._xids.add([key], now)
            self._xids.totals[key] += 1
            self._xid_seen[key] = event.at
            self._last_xids[event.device] = event.code
            _xid_log.warning(f"XID {event.code} on {event.device}: {xid_spec(event.code).text}")
            gpu = self._gpus.get(split_key(event.device)[0])
            if gpu is not None and xid_spec(event.code).needs_action:
                first, _ = gpu.xids.get(event.code, (event.at - self._to_unix(0.0), now))
                gpu.xids[event.code] = first, now

    def forget_xids(self, uuid: str) -> bool:
        """Removes the XIDs of a GPU. Returns False if it has none."""
        xids, self._gpus[uuid].xids = self._gpus[uuid].xids, {}
        return bool(xids)

    def is_lost(self, uuid: str) -> bool:
        return uuid in self._gpus and LOST in self._gpus[uuid].since

    def forget(self, uuid: str) -> None:
        self._gpus.pop(uuid, None)

    def report(
        self, assignments: Sequence[Assignment], absent: Collection[str]
    ) -> dict[str, dict[str, Any]]:
        """Returns the health fields of `DeviceState` and `MigInstance`, by device key and name of
        the field.

        `absent`: UUIDs of GPUs that disappeared. These GPUs, and lost GPUs, keep their last
        holders.
        """
        now = self._clock()
        held = group_by_key(
            (split_key(assignment.device)[0], assignment.holder) for assignment in assignments
        )
        for uuid, gpu in self._gpus.items():
            if uuid in held or not (uuid in absent or LOST in gpu.since):
                gpu.holders = tuple(dict.fromkeys(held.get(uuid, ())))
        devices: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        recent_xids = self._xids.count_recent(now)
        for (key, xid), total in sorted(self._xids.totals.items()):
            count = XidCount(xid, total, self._xid_seen[key, xid], recent_xids[key, xid])
            devices[key]["xids"] = (*devices[key].get("xids", ()), count)
            devices[key]["last_xid"] = self._last_xids[key]
        recent, totals = self._clock_events.count_recent(now), self._clock_events.totals
        for key, event in sorted(recent.keys() | totals.keys()):
            devices[key].setdefault("clock_events", {})[event] = (
                recent[key, event],
                totals[key, event],
            )
        for uuid, gpu in self._gpus.items():
            if gpu.details is not None:
                devices[uuid] |= self._report_gpu(gpu, gpu.details, uuid in held, now)
        return devices

    def _report_gpu(
        self, gpu: _Gpu, checked: Mapping[str, str | None], is_held: bool, now: float
    ) -> dict[str, Any]:
        gpu.xids = {xid: seen for xid, seen in gpu.xids.items() if now - seen[1] < XID_SECONDS}
        details, since = dict(checked), dict(gpu.since)
        if gpu.xids:
            details[XID], since[XID] = (
                xid_detail(gpu.xids),
                min(first for first, _ in gpu.xids.values()),
            )
        ordered = [(name, details[name]) for name in conditions() if name in details]
        return {
            "conditions": tuple(
                Condition(n, self._to_unix(since[n]), d) for n, d in ordered if d is not None
            ),
            "healthy": tuple(name for name, detail in ordered if detail is None),
            "last_holders": () if is_held or details.get(LOST) is None else gpu.holders,
        }


def _check_gpu(
    gpu: _Gpu,
    device: Device,
    result: TelemetryResult,
    values: Mapping[int, Value] | None,
    usual_links: int,
    now: float,
) -> dict[str, str | None]:
    """Returns the detail of each condition, or None if the condition is absent. Omits unknown
    conditions.
    """
    absence = _find_absence(device, result)
    details: dict[str, str | None] = dict.fromkeys((LOST, UNREADABLE, DRIVER_AWAY))
    if absence is not None:
        details[absence[0]] = absence[1]
    _check_reset(gpu, absence, values)
    if values is not None:
        reading = result.readings[device.uuid]
        if reading.reports_errors:
            details[XID] = None
        present = conditions_from_fields(values) | gpu.throttling.update(values, now)
        details |= {
            condition: "" if is_present else None for condition, is_present in present.items()
        }
        up = reading.links_up
        if up is not None and not device.mig_enabled:  # NVLinks are not used in MIG mode
            gpu.links = max(gpu.links, up)
            if gpu.links:  # 0 if the GPU has no NVLink bridge
                wired = max(gpu.links, usual_links)
                details[NVLINK] = f"{wired - up}/{wired}" if up < wired else None
    absent = {condition for condition, detail in details.items() if detail is None}
    gpu.since = {
        c: moment
        for c, moment in (dict.fromkeys(details, now) | gpu.since).items()
        if c not in absent
    }
    return details


def _check_reset(
    gpu: _Gpu, absence: tuple[str, str] | None, values: Mapping[int, Value] | None
) -> None:
    """Clears the XIDs of a GPU if it was reset or its driver was reloaded."""
    if values is None:
        gpu.was_unavailable |= absence is not None and (
            absence[0] == LOST or absence[1] in _DRIVER_REASONS
        )
        return
    counters = {i: v for i in _MONOTONIC_FIELDS if isinstance(v := values.get(i), int | float)}
    if gpu.was_unavailable or any(
        value < gpu.counters.get(i, value) for i, value in counters.items()
    ):
        gpu.xids.clear()
        gpu.throttling = Throttling()
    gpu.counters, gpu.was_unavailable = counters, False


def _find_absence(device: Device, result: TelemetryResult) -> tuple[str, str] | None:
    """Returns the condition and detail of a GPU that could not be read. None if it was read or is
    not selected.
    """
    inventory = result.sources[0] if result.sources else None
    if inventory is not None and not inventory.up:
        return (LOST, "") if device.uuid in result.absent else (DRIVER_AWAY, inventory.error)
    if device.uuid in result.absent:
        hung = device.index is not None and any(
            s.name == f"gpu{device.index}" and s.error == "hung" and not s.device
            for s in result.sources
        )
        return (UNREADABLE, "hung") if hung else (LOST, "")
    source = next((s for s in result.sources if s.device == device.uuid), None)
    if source is None or source.up:
        return None
    if source.error not in (*_DRIVER_REASONS, "gpu_lost"):
        return UNREADABLE, "hung" if source.error == "deadline" else source.error
    others_answer = any(s.up for s in result.sources if s.device)
    return (
        (LOST, "") if others_answer or source.error == "gpu_lost" else (DRIVER_AWAY, source.error)
    )


def _usual_links(gpus: Sequence[Device], readings: Mapping[str, GpuReading]) -> dict[str, int]:
    """Returns the median number of active links of each GPU model. Omits models with fewer than
    three GPUs.

    A GPU with fewer links has a problem, because GPUs of the same model normally have the same
    number of links.
    """
    links = ((gpu.model, readings[gpu.uuid].links_up) for gpu in gpus if gpu.uuid in readings)
    counts = group_by_key((model, up) for model, up in links if up is not None)
    return {model: median_low(ups) for model, ups in counts.items() if len(ups) > 2}


class EventLog:
    """Counts events per device: since the start (`totals`), and within a time window.

    Events in the window are counted per second, which limits memory if a GPU reports many XIDs.
    """

    def __init__(self, window: float) -> None:
        self.totals: Counter[tuple[str, Any]] = Counter()
        self._window = window
        self._buckets: deque[tuple[float, Counter[tuple[str, Any]]]] = deque()
        self._recent: Counter[tuple[str, Any]] = Counter()  # sum of the buckets

    def add(self, events: Sequence[tuple[str, Any]], now: float) -> None:
        """Adds events to the time window. Does not change `totals`."""
        if not self._buckets or now - self._buckets[-1][0] >= 1.0:
            self._buckets.append((now, Counter()))
        self._buckets[-1][1].update(events)
        self._recent.update(events)

    def count_recent(self, now: float) -> Counter[tuple[str, Any]]:
        while self._buckets and self._buckets[0][0] <= now - self._window:
            self._recent -= self._buckets.popleft()[1]
        return self._recent


def _events(mask: int) -> Iterator[str]:
    return (event for bit, event in CLOCK_EVENTS.items() if mask & bit)
