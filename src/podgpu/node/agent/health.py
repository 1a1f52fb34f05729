"""Checks the health of every GPU, and counts XIDs and clock events.

`metrics/conditions.py` defines the conditions. A condition is present, absent or unknown. It is
unknown if the GPU did not answer or does not support the field.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import median_low
from typing import Generic, NamedTuple, TypeVar

import msgspec
from msgspec import structs

from podgpu.clock import Clock, RepeatFilter, UnixTime
from podgpu.errors import few_of
from podgpu.metrics.conditions import (
    APPLICATION_XID,
    DRIVER_AWAY,
    FABRIC_FIELD,
    KUBERNETES_HEALTHY,
    KUBERNETES_UNHEALTHY,
    LOST,
    NVLINK,
    POWER_BRAKE,
    RECURRING,
    THERMAL,
    UNREADABLE,
    XID,
    breaks_gpu,
    conditions,
    conditions_from_fields,
    fabric_detail,
    failure_conditions,
    is_grave,
    xid_detail,
    xid_spec,
)
from podgpu.metrics.fields import CLOCK_EVENTS_FIELD, THROTTLE_REASONS, clock_events_of
from podgpu.model import (
    NS,
    UNHEALTHY,
    Assignment,
    Condition,
    Device,
    ErrorEvent,
    FailureCount,
    FieldValues,
    GpuReading,
    KubernetesHealth,
    Workload,
    WorkloadKey,
    XidCount,
    XidCulprit,
    group_by_key,
    split_key,
)
from podgpu.node.agent.gpus import TelemetryResult
from podgpu.node.agent.xid_blame import Verdict

_Event = TypeVar("_Event", bound=Hashable)
XID_SECONDS = 86_400.0  # how long a GPU is reported as broken after its last XID that needs action
_CAUSED_SECONDS = 600.0  # how long an XID that an application caused is reported
_LEAST_GPUS = 3  # of a model, to know its usual number of links
RECURRING_SECONDS = 86_400.0  # failures are forgotten after a quiet time of this length
_SAME_FAILURE_SECONDS = 60.0
# The device plugin needs some time to notice a problem, and the kubelet to write it. The kubelet's
# list of healthy devices is up to 70 s old.
_DISAGREES_SECONDS = 120.0
_MAX_FAILURES = 1000  # per GPU and condition
_MAX_CULPRITS = 64  # of one XID of a device
MAX_DETAIL = 256  # characters, as the documents allow
THROTTLE_SECONDS = 60.0  # shorter throttling is normal operation
THROTTLE_BEGINS = 0.5  # fraction of throttled time at which the condition begins
THROTTLE_ENDS = 0.1  # fraction at which it ends
_xid_log = logging.getLogger(f"{__name__}.xid")
_xid_log.addFilter(RepeatFilter())
_SAMPLE_SECONDS = 5.0  # minimum interval between two samples of the throttling counters
_ENERGY = 156
_DRIVER_REASONS = frozenset({"driver_not_loaded", "library_not_found", "stale_handle"})
# These decrease only if the GPU was reset or the driver reloaded.
_MONOTONIC_FIELDS = (*THROTTLE_REASONS, _ENERGY)
_COUNTER_OF = {reason: number for number, reason in THROTTLE_REASONS.items()}
# The highest counter is used. Older drivers have only the last one.
_THROTTLE_COUNTERS = {
    THERMAL: [_COUNTER_OF[reason] for reason in ("sw_thermal", "hw_thermal", "thermal")],
    POWER_BRAKE: [_COUNTER_OF["hw_power_brake"]],
}


class _CounterSample(NamedTuple):
    at: float
    counters: dict[int, float]  # by field id


@dataclass(slots=True)
class Throttling:
    """Detects whether a GPU is throttled for a long time. Uses the GPU's throttling counters."""

    _samples: deque[_CounterSample] = field(default_factory=deque)
    _is_present: dict[str, bool] = field(default_factory=dict)

    def update(self, values: FieldValues, now: float) -> dict[str, bool]:
        """Returns whether each throttling condition is present. Omits unknown conditions."""
        samples = self._samples
        if samples and now - samples[-1].at < _SAMPLE_SECONDS:
            return self._is_present

        last = _CounterSample(now, _read_counters(values, THROTTLE_REASONS))
        samples.append(last)
        # The first sample is the newest one that is old enough, or else the oldest.
        while len(samples) > 2 and now - samples[1].at >= THROTTLE_SECONDS:
            samples.popleft()

        first = samples[0]
        seconds = now - first.at
        if seconds < THROTTLE_SECONDS:
            return self._is_present

        before = self._is_present
        self._is_present = {}
        for condition, counters in _THROTTLE_COUNTERS.items():
            throttled_ns = _measure_throttled(first, last, counters)
            if throttled_ns is not None:
                # Two limits, so that the condition does not begin and end all the time.
                limit = THROTTLE_ENDS if before.get(condition) else THROTTLE_BEGINS
                self._is_present[condition] = throttled_ns / NS / seconds >= limit
        return self._is_present


def _measure_throttled(
    first: _CounterSample, last: _CounterSample, numbers: Iterable[int]
) -> float | None:
    """Returns the largest increase of these counters. None if the GPU has none of them."""
    increases = []
    for number in numbers:
        if number in first.counters and number in last.counters:
            increases.append(last.counters[number] - first.counters[number])
    return max(increases, default=None)


def _read_counters(values: FieldValues, numbers: Iterable[int]) -> dict[int, float]:
    counters = {}
    for number in numbers:
        value = values.get(number)
        if isinstance(value, int | float):
            counters[number] = float(value)
    return counters


class _Seen(NamedTuple):
    """When an XID was seen. Times are monotonic."""

    first: float
    last: float
    cause: str = ""  # set only for an XID of an application


class PastFailure(NamedTuple):
    """A condition that began before the exporter started."""

    uuid: str
    condition: str
    at: float  # Unix time
    is_present: bool  # the condition had not ended when the exporter stopped


class DeviceHealth(msgspec.Struct, eq=False):
    """What is known of a GPU or a MIG instance, in the fields of `GpuOrInstance`."""

    xids: tuple[XidCount, ...] = ()
    last_xid: int | None = None
    # event -> number in the window, number since the start
    clock_events: dict[str, tuple[int, int]] = {}
    kubernetes_health: str = ""


class GpuHealth(NamedTuple):
    """What was checked of a GPU, in the fields of `DeviceState`."""

    conditions: tuple[Condition, ...] = ()
    healthy: tuple[str, ...] = ()
    failures: tuple[FailureCount, ...] = ()
    last_holders: tuple[Workload, ...] = ()


class HealthReport(NamedTuple):
    devices: Mapping[str, DeviceHealth] = {}  # by device key; the others have no events
    gpus: Mapping[str, GpuHealth] = {}  # by UUID; only selected GPUs are checked


@dataclass(slots=True)
class _CheckedGpu:
    """State of one GPU between two checks. Times are monotonic."""

    details: dict[str, str | None] | None = None
    """Result of `_check_gpu`. None if the GPU is not selected."""
    since: dict[str, float] = field(default_factory=dict)  # start time by condition
    xids: dict[int, _Seen] = field(default_factory=dict)  # XIDs that need action
    # XIDs of applications whose cause is known, by workload and XID
    caused: dict[tuple[WorkloadKey, int], _Seen] = field(default_factory=dict)
    throttling: Throttling = field(default_factory=Throttling)
    counters: dict[int, float] = field(default_factory=dict)
    links: int = 0  # highest number of active NVLinks since the start
    holders: tuple[Workload, ...] = ()
    was_unavailable: bool = False  # the GPU was lost, or its driver was not loaded

    def forget_old_xids(self, now: float) -> None:
        for xid, seen in list(self.xids.items()):
            if now - seen.last >= XID_SECONDS:
                del self.xids[xid]

        for key, cause in list(self.caused.items()):
            if now - cause.last >= _CAUSED_SECONDS:
                del self.caused[key]


class FailureLog:
    """Counts how often each GPU began to have each condition of `failure_conditions`.

    All times are Unix times.
    """

    def __init__(self) -> None:
        # When a GPU began to have a condition, by UUID and condition.
        self._times: dict[tuple[str, str], deque[float]] = {}
        # UUIDs and conditions that were present when the exporter stopped, and have not ended since
        self._continued: set[tuple[str, str]] = set()

    def restore(self, failures: Iterable[PastFailure]) -> None:
        """Adds the failures before the exporter's start."""
        for failure in sorted(failures, key=attrgetter("at")):
            if failure.is_present:
                self._continued.add((failure.uuid, failure.condition))
            self.add(failure.uuid, failure.condition, failure.at)

    def update(
        self, uuid: str, details: Mapping[str, str | None], before: Collection[str], now: float
    ) -> None:
        """Adds the conditions that have just begun.

        `details`: as `_check_gpu` returns them. `before`: the conditions that the GPU already had.
        """
        for condition, detail in details.items():
            key = uuid, condition
            if detail is None:
                self._continued.discard(key)
            elif condition not in before and key not in self._continued:
                self.add(uuid, condition, now)

    def add(self, uuid: str, condition: str, at: float) -> None:
        if condition not in failure_conditions():
            return

        times = self._times.setdefault((uuid, condition), deque(maxlen=_MAX_FAILURES))
        # Many XIDs in a row are one failure.
        if not times or at - times[-1] >= _SAME_FAILURE_SECONDS:
            times.append(at)

    def count(self, uuid: str, now: float) -> list[FailureCount]:
        """Returns the failures of a GPU. Removes those that ended a quiet day ago."""
        counts = []
        for condition in failure_conditions():
            times = self._times.get((uuid, condition))
            if times is None:
                continue

            last = times[-1]
            if now - last >= RECURRING_SECONDS:
                del self._times[uuid, condition]
                continue

            recent = [at for at in times if last - at < RECURRING_SECONDS]
            counts.append(FailureCount(condition, len(recent), recent[0], last))
        return counts

    def forget(self, uuid: str) -> bool:
        """Returns False if the GPU had no failures."""
        self._continued = {key for key in self._continued if key[0] != uuid}
        keys = [key for key in self._times if key[0] == uuid]
        for key in keys:
            del self._times[key]
        return bool(keys)


class HealthWatch:
    """Tracks the conditions of all GPUs. Not thread-safe."""

    def __init__(self, clock: Clock, xid_window: float, clock_window: float) -> None:
        """`xid_window`, `clock_window`: seconds in which XIDs and clock events are counted."""
        self._clock = clock.monotonic
        self._to_unix = UnixTime(clock).convert
        self._gpus: dict[str, _CheckedGpu] = {}
        self._xids: EventLog[tuple[str, int]] = EventLog(xid_window)  # by device key and XID
        # Unix time of the last XID, by device key and XID
        self._xid_seen: dict[tuple[str, int], float] = {}
        self._last_xids: dict[str, int] = {}

        self.failures = FailureLog()

        # by device key and XID, then by workload
        self._culprits: dict[tuple[str, int], dict[WorkloadKey, XidCulprit]] = {}

        # by device key and event
        self._clock_events: EventLog[tuple[str, str]] = EventLog(clock_window)
        self._clock_masks: dict[str, int] = {}

    def update(self, result: TelemetryResult) -> None:
        now = self._clock()
        values_of = result.values
        # A mask that was not just read has been counted before.
        for group in result.groups:
            ids = [spec.id for spec in group.fields]
            if CLOCK_EVENTS_FIELD in ids:
                self._count_clock_events(values_of, now)

        gpus = [device for device in result.devices if not device.is_instance]
        earlier = self._gpus
        self._gpus = {}
        shown = {device.uuid for device in result.selected}
        usual_links = _usual_links(gpus, result.readings)

        for device in gpus:
            gpu = earlier.get(device.uuid) or _CheckedGpu()
            self._gpus[device.uuid] = gpu
            gpu.details = None
            if device.uuid in shown:
                values = values_of.get(device.uuid)
                links = usual_links.get(device.model, 0)
                before = set(gpu.since)
                gpu.details = _check_gpu(gpu, device, result, values, links, now)
                self.failures.update(device.uuid, gpu.details, before, self._to_unix(now))

    def _count_clock_events(self, values_of: Mapping[str, FieldValues], now: float) -> None:
        for key, values in values_of.items():
            mask = values.get(CLOCK_EVENTS_FIELD)
            if not isinstance(mask, int):
                continue

            before = self._clock_masks.get(key, mask)
            self._clock_masks[key] = mask
            present = [(key, event) for event in clock_events_of(mask)]
            self._clock_events.add(present, now)
            # Events that have just begun
            for event in clock_events_of(mask & ~before):
                self._clock_events.totals[key, event] += 1

    def add_xids(self, events: Iterable[ErrorEvent]) -> None:
        now = self._clock()
        for event in events:
            key = event.device, event.code
            spec = xid_spec(event.code)
            self._xids.add([key], now)
            self._xids.totals[key] += 1
            self._xid_seen[key] = event.at
            self._last_xids[event.device] = event.code
            _xid_log.warning(f"XID {event.code} on {event.device}: {spec.text}")

            if spec.needs_action:
                self._add_xid(event, now)

    def _add_xid(self, event: ErrorEvent, now: float) -> None:
        uuid, _ = split_key(event.device)
        self.failures.add(uuid, XID, event.at)
        gpu = self._gpus.get(uuid)
        if gpu is None:
            return

        # Converts the Unix time to a monotonic time.
        first = event.at - self._to_unix(0.0)
        seen = gpu.xids.get(event.code)
        if seen is not None:
            first = seen.first
        gpu.xids[event.code] = _Seen(first, now)

    def add_verdicts(self, verdicts: Iterable[Verdict]) -> None:
        for verdict in verdicts:
            culprit = verdict.culprit
            name = "unknown"
            if culprit is not None:
                name = culprit.text or "a process outside pods"
                self._add_culprit(verdict, culprit)

            process = f" (pid {verdict.pid} {verdict.program})" if verdict.pid else ""
            cause = f"cause of XID {verdict.xid} on {verdict.device}: {name}{process}"
            _xid_log.warning(cause)

    def _add_culprit(self, verdict: Verdict, culprit: Workload) -> None:
        culprits = self._culprits.setdefault((verdict.device, verdict.xid), {})
        earlier = culprits.pop(culprit.key, None)
        total = 1 if earlier is None else earlier.total + 1

        # The newest culprit is the last one.
        culprits[culprit.key] = XidCulprit(
            **structs.asdict(culprit),
            total=total,
            last_seen=verdict.at,
            pid=verdict.pid or None,
            program=verdict.program,
            affected=verdict.affected,
        )
        if len(culprits) > _MAX_CULPRITS:
            oldest = next(iter(culprits))
            del culprits[oldest]
        self._add_cause(verdict, culprit)

    def _add_cause(self, verdict: Verdict, culprit: Workload) -> None:
        uuid, _ = split_key(verdict.device)
        gpu = self._gpus.get(uuid)
        if gpu is None:
            return

        key = culprit.key, verdict.xid
        now = self._clock()
        earlier = gpu.caused.get(key)
        first = now if earlier is None else earlier.first
        gpu.caused[key] = _Seen(first, now, _describe_cause(verdict, culprit))

    def forget_xids(self, uuid: str) -> bool:
        """Removes the XIDs of a GPU. Returns False if it has none."""
        gpu = self._gpus[uuid]
        had_xids = bool(gpu.xids or gpu.caused)
        gpu.xids.clear()
        gpu.caused.clear()
        return self.failures.forget(uuid) or had_xids

    def is_lost(self, uuid: str) -> bool:
        return uuid in self._gpus and LOST in self._gpus[uuid].since

    def forget(self, uuid: str) -> None:
        self._gpus.pop(uuid, None)
        self.failures.forget(uuid)

    def report(
        self,
        assignments: Sequence[Assignment],
        telemetry: TelemetryResult,
        kubernetes: Mapping[str, KubernetesHealth],
    ) -> HealthReport:
        """`kubernetes`: what Kubernetes thinks, by device key."""
        now = self._clock()
        holders = group_by_key(
            (split_key(assignment.device)[0], assignment.holder) for assignment in assignments
        )
        self._update_holders(holders, telemetry)

        devices: defaultdict[str, DeviceHealth] = defaultdict(DeviceHealth)
        self._report_xids(devices, now)
        self._report_clock_events(devices, now)
        for key, opinion in kubernetes.items():
            devices[key].kubernetes_health = opinion.health

        opinions = group_by_key((split_key(key)[0], each) for key, each in kubernetes.items())
        gpus = {}
        for uuid, gpu in self._gpus.items():
            if gpu.details is None:
                continue

            failures = self.failures.count(uuid, self._to_unix(now))
            # Without any answer of the GPU, there is nothing to compare with Kubernetes.
            is_known = uuid in telemetry.readings or any(map(is_grave, gpu.since))
            own_opinions = opinions.get(uuid, ()) if is_known else ()
            gpus[uuid] = self._report_gpu(
                gpu, gpu.details, failures, own_opinions, is_held=uuid in holders, now=now
            )
        return HealthReport(devices, gpus)

    def _update_holders(
        self, holders: Mapping[str, Sequence[Workload]], telemetry: TelemetryResult
    ) -> None:
        """Sets the holders of each GPU. A GPU that is lost or has disappeared keeps its last."""
        for uuid, gpu in self._gpus.items():
            is_lost = uuid in telemetry.absent or LOST in gpu.since
            if uuid in holders or not is_lost:
                gpu.holders = tuple(dict.fromkeys(holders.get(uuid, ())))

    def _report_xids(self, devices: defaultdict[str, DeviceHealth], now: float) -> None:
        recent = self._xids.count_recent(now)
        for key, total in sorted(self._xids.totals.items()):
            device_key, xid = key
            culprits = self._culprits.get(key, {})
            count = XidCount(
                xid,
                total,
                last_seen=self._xid_seen[key],
                in_window=recent[key],
                culprits=tuple(culprits.values()),
            )

            device = devices[device_key]
            device.xids += (count,)
            device.last_xid = self._last_xids[device_key]

    def _report_clock_events(self, devices: defaultdict[str, DeviceHealth], now: float) -> None:
        recent = self._clock_events.count_recent(now)
        totals = self._clock_events.totals
        for key in sorted(recent.keys() | totals.keys()):
            device_key, event = key
            events = devices[device_key].clock_events
            events[event] = recent[key], totals[key]

    def _report_gpu(
        self,
        gpu: _CheckedGpu,
        checked: Mapping[str, str | None],
        failures: Sequence[FailureCount],
        opinions: Sequence[KubernetesHealth],
        is_held: bool,
        now: float,
    ) -> GpuHealth:
        """`checked`: the detail of each known condition, or None if the GPU does not have it."""
        gpu.forget_old_xids(now)
        details = dict(checked)
        since = dict(gpu.since)
        if gpu.xids:
            details[XID] = xid_detail(gpu.xids)
            since[XID] = min(seen.first for seen in gpu.xids.values())
        if gpu.caused:
            causes = gpu.caused.values()
            text = few_of([seen.cause for seen in causes], most=2)
            details[APPLICATION_XID] = text[:MAX_DETAIL]
            since[APPLICATION_XID] = min(seen.first for seen in causes)

        present, healthy = self._list_conditions(details, since, failures)
        for name, detail in _compare_with_kubernetes(gpu, present, opinions, now).items():
            if detail is None:
                healthy.append(name)
            else:
                present.append(Condition(name, self._to_unix(gpu.since[name]), detail))

        # While a GPU is held, its assignments show the holders.
        is_lost = details.get(LOST) is not None
        last_holders = gpu.holders if is_lost and not is_held else ()
        return GpuHealth(
            conditions=tuple(present),
            healthy=tuple(healthy),
            failures=tuple(failures),
            last_holders=last_holders,
        )

    def _list_conditions(
        self,
        details: Mapping[str, str | None],
        since: Mapping[str, float],
        failures: Sequence[FailureCount],
    ) -> tuple[list[Condition], list[str]]:
        """Returns the conditions of a GPU, and the names of those that it does not have.

        `details`: of each condition that was checked. None if the GPU does not have it.
        """
        least = failure_conditions()
        recurring = [failure for failure in failures if failure.count >= least[failure.condition]]

        present = []
        healthy = []
        for name in conditions():
            if name == RECURRING and recurring:
                present.append(Condition(name, min(failure.first for failure in recurring)))
            elif name == RECURRING:
                healthy.append(name)
            elif name in details:
                detail = details[name]
                if detail is None:
                    healthy.append(name)
                else:
                    present.append(Condition(name, self._to_unix(since[name]), detail))
        return present, healthy


def _compare_with_kubernetes(
    gpu: _CheckedGpu, present: Sequence[Condition], opinions: Sequence[KubernetesHealth], now: float
) -> dict[str, str | None]:
    """Compares the conditions of a GPU with what Kubernetes thinks about it and its instances.

    Returns the detail of each condition about a disagreement, or None if the condition is absent.
    Omits unknown conditions. Stores since when they disagree in `gpu`.
    """
    names = {condition.name for condition in present}
    disagreements = {}
    is_known = bool(opinions) and DRIVER_AWAY not in names
    if is_known:
        disagreements = _find_disagreements(names, opinions)

    details: dict[str, str | None] = {}
    for name in (KUBERNETES_HEALTHY, KUBERNETES_UNHEALTHY):
        if name not in disagreements:
            gpu.since.pop(name, None)
        elif now - gpu.since.setdefault(name, now) >= _DISAGREES_SECONDS:
            details[name] = disagreements[name]
        if is_known:
            details.setdefault(name, None)
    return details


def _find_disagreements(
    conditions: Collection[str], opinions: Sequence[KubernetesHealth]
) -> dict[str, str]:
    """Returns the message of Kubernetes, by name of the condition. At most one condition.

    `conditions`: of the GPU. If it has only a warning, Kubernetes is right with either opinion.
    """
    unhealthy = [opinion for opinion in opinions if opinion.health == UNHEALTHY]
    has_problem = any(map(breaks_gpu, conditions))
    if unhealthy and not has_problem:
        return {KUBERNETES_UNHEALTHY: unhealthy[0].message[:MAX_DETAIL]}

    is_unusable = any(map(is_grave, conditions))
    if is_unusable and not unhealthy:
        return {KUBERNETES_HEALTHY: ""}
    return {}


class _Absence(NamedTuple):
    """Why a GPU could not be read."""

    condition: str
    detail: str = ""

    @property
    def is_away(self) -> bool:
        """True if the GPU or its driver may have been restarted meanwhile."""
        return self.condition == LOST or self.detail in _DRIVER_REASONS


def _check_gpu(
    gpu: _CheckedGpu,
    device: Device,
    result: TelemetryResult,
    values: FieldValues | None,
    usual_links: int,
    now: float,
) -> dict[str, str | None]:
    """Returns the detail of each condition, or None if the condition is absent.

    Omits unknown conditions.
    """
    details: dict[str, str | None] = dict.fromkeys((LOST, UNREADABLE, DRIVER_AWAY))
    absence = _find_absence(device, result)
    if absence is not None:
        details[absence.condition] = absence.detail
    _check_reset(gpu, absence, values)

    if values is not None:
        reading = result.readings[device.uuid]
        if reading.reports_errors:
            details[XID] = None
        details |= conditions_from_fields(values)
        details |= fabric_detail(values.get(FABRIC_FIELD), reading.links_up)
        for condition, is_present in gpu.throttling.update(values, now).items():
            details[condition] = "" if is_present else None
        # NVLinks are not used in MIG mode.
        if reading.links_up is not None and not device.mig_enabled:
            details |= _check_links(gpu, reading.links_up, usual_links)

    # The start time of an unknown condition is kept.
    for condition, detail in details.items():
        if detail is None:
            gpu.since.pop(condition, None)
        else:
            gpu.since.setdefault(condition, now)
    return details


def _check_links(gpu: _CheckedGpu, up: int, usual_links: int) -> dict[str, str | None]:
    """Empty if the GPU has no NVLink bridge."""
    gpu.links = max(gpu.links, up)
    if not gpu.links:
        return {}

    wired = max(gpu.links, usual_links)
    missing = wired - up
    return {NVLINK: f"{missing}/{wired}" if missing > 0 else None}


def _check_reset(gpu: _CheckedGpu, absence: _Absence | None, values: FieldValues | None) -> None:
    """Clears the XIDs of a GPU if it was reset or its driver was reloaded."""
    if values is None:
        if absence is not None and absence.is_away:
            gpu.was_unavailable = True
        return

    before = gpu.counters
    gpu.counters = _read_counters(values, _MONOTONIC_FIELDS)
    if gpu.was_unavailable or _has_decreased(before, gpu.counters):
        gpu.xids.clear()
        gpu.throttling = Throttling()
    gpu.was_unavailable = False


def _has_decreased(before: Mapping[int, float], counters: Mapping[int, float]) -> bool:
    """Returns True if the GPU was reset: there is no other reason for a smaller counter."""
    common = before.keys() & counters.keys()
    return any(counters[number] < before[number] for number in common)


def _find_absence(device: Device, result: TelemetryResult) -> _Absence | None:
    """Returns None if the GPU was read or is not selected."""
    if device.uuid in result.absent:
        if _is_hung(device, result):
            return _Absence(UNREADABLE, "hung")
        return _Absence(LOST)

    inventory = result.inventory_source
    if not inventory.up:
        return _Absence(DRIVER_AWAY, inventory.error)

    of_gpus = {source.device: source for source in result.sources if source.device}
    own = of_gpus.get(device.uuid)
    if own is None or own.up:
        return None
    if own.error == "deadline":
        return _Absence(UNREADABLE, "hung")
    if own.error == "gpu_lost":
        return _Absence(LOST)
    if own.error not in _DRIVER_REASONS:
        return _Absence(UNREADABLE, own.error)
    # If the driver answers for another GPU, it has lost only this one.
    if any(source.up for source in of_gpus.values()):
        return _Absence(LOST)
    return _Absence(DRIVER_AWAY, own.error)


def _describe_cause(verdict: Verdict, culprit: Workload) -> str:
    text = f"{verdict.xid} by {culprit.text or 'a process outside pods'}"
    others = [other.text for other in verdict.affected if other.text]
    if others:
        return f"{text}, beside {few_of(others, 2)}"
    return text


def _is_hung(device: Device, result: TelemetryResult) -> bool:
    """Returns True if the first driver call for the GPU has not returned yet."""
    name = f"gpu{device.index}"
    for source in result.sources:
        if source.name == name and source.error == "hung" and not source.device:
            return True
    return False


def _usual_links(gpus: Sequence[Device], readings: Mapping[str, GpuReading]) -> dict[str, int]:
    """Returns the median number of active links of each GPU model.

    A GPU with fewer links has a problem, because GPUs of the same model normally have the same
    number of links. Omits models with fewer than three GPUs.
    """
    counts: defaultdict[str, list[int]] = defaultdict(list)
    for gpu in gpus:
        reading = readings.get(gpu.uuid)
        if reading is not None and reading.links_up is not None:
            counts[gpu.model].append(reading.links_up)

    usual = {}
    for model, links in counts.items():
        if len(links) >= _LEAST_GPUS:
            usual[model] = median_low(links)
    return usual


class _Bucket(NamedTuple, Generic[_Event]):
    began: float
    counts: Counter[_Event]


class EventLog(Generic[_Event]):
    """Counts events per device: since the start (`totals`), and within a time window.

    Events in the window are counted per second, which limits memory if a GPU reports many XIDs.
    """

    def __init__(self, window: float) -> None:
        self.totals: Counter[_Event] = Counter()
        self._window = window
        self._buckets: deque[_Bucket[_Event]] = deque()
        self._recent: Counter[_Event] = Counter()  # sum of the buckets

    def add(self, events: Sequence[_Event], now: float) -> None:
        """Adds events to the time window. The caller adds to `totals`.

        A clock event is in the window as long as it lasts, but it counts once.
        """
        newest = self._buckets[-1] if self._buckets else None
        if newest is None or now - newest.began >= 1.0:
            newest = _Bucket(now, Counter())
            self._buckets.append(newest)

        newest.counts.update(events)
        self._recent.update(events)

    def count_recent(self, now: float) -> Counter[_Event]:
        while self._buckets and self._buckets[0].began <= now - self._window:
            self._recent -= self._buckets.popleft().counts
        return self._recent
