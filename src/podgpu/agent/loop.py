"""The agent reads telemetry, allocations and usage in three threads. Each turn of a loop publishes a new document."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from podgpu.agent.allocation_turn import DEADLINE, AllocationPart, AllocationTurn, ReadIdentities, ReadLiveness
from podgpu.agent.counter_feeds import CounterWatch, ReadCounters
from podgpu.agent.health import ClockEventLog, HealthWatch, XidLog
from podgpu.agent.lanes import (
    DEFAULT_RETENTION,
    THROTTLE_INTERVAL,
    Collection,
    SampleRetention,
    Schedule,
    fields_to_read,
    make_lanes,
)
from podgpu.agent.publish import ChangeLog, NodeParts, Published, add_memory
from podgpu.agent.telemetry_turn import TelemetryPart, TelemetryTurn
from podgpu.agent.usage_turn import RunningProcess, UsagePart, UsageTurn
from podgpu.clock import Clock, UnixTime
from podgpu.device_selection import Selection
from podgpu.errors import StartError
from podgpu.gpu.source import Telemetry
from podgpu.holders import AllocationSource
from podgpu.holders.unmapped import find_lost_gpus
from podgpu.metrics.counters import CounterSpec
from podgpu.metrics.render import Policy
from podgpu.model import PodLabels, SourceStatus, Value
from podgpu.usage.containers import ContainerFinder
from podgpu.workers import Workers

_log = logging.getLogger(__name__)
Forgotten = Literal["gpu", "xids", "nothing"]  # what was removed at an operator's request
WARM_UP_SECONDS = 1.0  # time between the first two readings, which rates need


@dataclass(frozen=True)
class Settings:
    interval: float = 30.0
    allocation_interval: float = 5.0
    usage_interval: float = 1.0
    throttle_interval: float = THROTTLE_INTERVAL
    collections: tuple[Collection, ...] = ()  # fields with their own interval
    counters_may_come: bool = False  # a ConfigMap that is created later may contain the fields of `collections`
    retention: SampleRetention = DEFAULT_RETENTION
    selection: Selection = field(default_factory=Selection)
    policy: Policy = field(default_factory=Policy)

    @property
    def deadline(self) -> float:
        """Maximum duration of a turn: enough for a slow driver, and less than the default interval."""
        return min(5.0, max(1.0, self.interval))

    @property
    def stale_after(self) -> float:
        """Maximum age of the figures that are served. Allows for one turn that waits for a hung source."""
        return max(3 * self.interval, self.interval + self.deadline)


class Agent:
    def __init__(
        self,
        telemetry: Telemetry,
        allocation: Sequence[AllocationSource] = (),
        settings: Settings | None = None,
        clock: Clock | None = None,
        identities: ReadIdentities | None = None,
        pod_labels: Callable[[], PodLabels] = dict,
        read_counters: ReadCounters | None = None,
        containers: ContainerFinder | None = None,
        liveness: ReadLiveness | None = None,
    ) -> None:
        """Without `containers`, usage is not read. `liveness` finds running containers while an allocation source
        does not answer or has just restarted.
        """
        self.settings = settings or Settings()
        self.clock = clock or Clock()
        self.fatal: StartError | None = None
        self.notes_beside: Callable[[], Sequence[str]] = tuple  # warnings of other components, for the page
        deadline = self.settings.deadline
        self._telemetry = telemetry
        self._workers = Workers(self.clock.monotonic)
        self._policy = policy = self.settings.policy
        self._configured = _field_ids(policy.counters)
        self._counter_watch = CounterWatch(read_counters, self._workers, deadline)
        self._schedule = self._new_schedule(policy)
        self._telemetry_turn = TelemetryTurn(
            telemetry, self._schedule.lanes, self.settings.selection, self._workers, deadline
        )
        self._allocation_turn = AllocationTurn(
            allocation, identities, self._workers, DEADLINE, self.clock, liveness, self.reload
        )
        self._usage_turn = None
        if containers is not None:
            self._usage_turn = UsageTurn(telemetry, containers, self._workers, deadline, self.clock)
        self._pod_labels = pod_labels
        self._telemetry_part, self._allocation_part, self._usage_part = TelemetryPart(), AllocationPart(), UsagePart()
        self._health = HealthWatch(UnixTime(self.clock).convert)
        self._xids = XidLog(policy.xid_window_ms / 1000)
        self._clock_events = ClockEventLog(policy.clock_window_ms / 1000)
        self._clock_event_counts: Mapping[str, Mapping[str, tuple[int, int]]] = {}
        self._changes = ChangeLog(self.clock.monotonic)
        self._exporter_id = secrets.token_hex(8)
        self._taken_at: float | None = None  # Unix time of the last reading
        self._read_at = float("-inf")  # monotonic time of the last telemetry turn
        self._released_until = float("-inf")
        self._turn = threading.Lock()
        self._publishing = threading.Lock()
        self._stopping = False
        self._stopped = threading.Event()
        self._wake = threading.Event()
        self._allocate_now = threading.Event()
        self.published = Published(self._make_parts(), policy, self._read_at)

    # -- turns ---------------------------------------------------------------------------------------------------

    def read_telemetry(self, *, only_due: bool = False) -> None:
        """Reads the GPUs once, all fields or those that are due, and publishes the result.

        Raises StartError if the process cannot continue.
        """
        with self._turn:  # the counters must not change during the turn
            due = self._schedule.take_due(self.clock.monotonic()) if only_due else None
            if due == ():
                return
            if self.clock.monotonic() >= self._released_until:
                self._apply_telemetry(self._telemetry_turn.collect(due))
            self._read_at = self.clock.monotonic()
        self._publish()

    def _apply_telemetry(self, part: TelemetryPart) -> None:
        now = self.clock.monotonic()
        if part.devices != self._telemetry_part.devices:
            self._allocate_now.set()  # the new devices may resolve ids that were unknown
            if set(part.lanes) != set(self._schedule.lanes):
                self._schedule.make_all_due(now)
        self._clock_events.add(part.clock_event_masks(), now)
        self._clock_event_counts = self._clock_events.counts()
        self._telemetry_part = part
        self._health.update(part, now)
        if part.readings:
            self._taken_at = self.clock.wall()

    def read_allocation(self, *, counters_first: bool = False) -> None:
        """Reads the allocation sources once and publishes the result."""
        self._allocate_now.clear()  # cleared first, so that a request during this turn causes another turn
        if counters_first:
            self.read_counters()
        telemetry = self._telemetry_part
        part = self._allocation_turn.collect(add_memory(telemetry.devices, telemetry.readings))
        self._telemetry_turn.add_lost(find_lost_gpus(part.offered, part.unmapped, bool(telemetry.gpus_lost)))
        self._health.update_holders(part.assignments, telemetry.absent)
        self._allocation_part = part
        self._publish()

    def read_usage(self) -> None:
        """Reads the usage of the GPUs once and publishes the result."""
        if self._usage_turn is None or self.clock.monotonic() < self._released_until:
            return
        holders, telemetry = self._allocation_turn, self._telemetry_part
        self._usage_part = self._usage_turn.collect(
            telemetry.devices,
            telemetry.listed,
            self._allocation_part.assignments,
            holders.complete,
            holders.identify,
            {source.device for source in telemetry.sources if not source.up},
        )
        self._publish()

    def read_counters(self) -> None:
        """Reads the counters again if they can change. Invalid counters are ignored and reported."""
        self._counter_watch.update(self._change_counters)

    def _new_schedule(self, policy: Policy) -> Schedule:
        """Raises UsageError for a collection that contains none of the counters."""
        settings = self.settings
        lanes = make_lanes(
            fields_to_read(policy),
            policy.counters,
            settings.interval,
            settings.collections,
            settings.retention,
            settings.counters_may_come,
            settings.throttle_interval,
        )
        return Schedule(lanes, WARM_UP_SECONDS)

    def _change_counters(self, counters: tuple[CounterSpec, ...]) -> None:
        """Replaces the counters and reads them once.

        Rates need two readings, so the old exposition is served until the next turn.
        """
        if counters == self._policy.counters:
            return
        with self._turn:
            policy = replace(self._policy, counters=counters)
            self._schedule, self._policy = self._new_schedule(policy), policy
            self._configured = _field_ids(counters)
            self._telemetry_turn.set_lanes(self._schedule.lanes)
            if self.clock.monotonic() >= self._released_until:
                with suppress(StartError):  # the telemetry loop gets the same error and ends the process
                    self._telemetry_turn.collect()
            self._schedule.take_due(self.clock.monotonic())
        _log.info("counters changed: %d fields", len(counters))
        self._wake.set()

    def _publish(self) -> None:
        if self._stopping:
            return  # workers reject calls now, which would look like failures
        with self._publishing:
            events, now = self._telemetry.error_events(), self.clock.monotonic()
            self._xids.add(events, now)
            self._health.add_xids(events, now)
            parts = self._make_parts()
            self.published = Published(parts, self._policy, self._read_at)
            self._changes.report(parts)

    def _make_parts(self) -> NodeParts:
        now, allocation = self.clock.monotonic(), self._allocation_part
        return NodeParts(
            telemetry=self._telemetry_part,
            allocation=allocation,
            usage=self._usage_part,
            health=self._health.report(allocation.assignments, now),
            xids=self._xids.counts(now),
            clock_events=self._clock_event_counts,
            counter_sources=self._counter_watch.sources,
            counter_errors=self._counter_watch.errors,
            pod_labels=self._pod_labels(),
            configured=self._configured,
            taken_at=self._taken_at,
            exporter_id=self._exporter_id,
            interval=self.settings.interval,
        )

    def warm_up(self) -> None:
        """Reads everything twice for --once, because rates need two readings."""
        for is_second in (False, True):
            if is_second:
                self._wake.wait(min(WARM_UP_SECONDS, self.settings.interval))
            self.read_telemetry()
            self.read_allocation()
            self.read_usage()

    def check_selection(self) -> None:
        """Raises UsageError if `-d` names a device that does not exist. Checks nothing while there is no driver."""
        part = self._telemetry_turn.collect()
        if part.sources and part.sources[0].up:
            self.settings.selection.check(part.devices)

    # -- lifecycle -----------------------------------------------------------------------------------------------

    def start(self, on_fatal: Callable[[], object]) -> None:
        """Starts the loops. If the process must end, sets `fatal` to the reason and calls `on_fatal` in a thread."""
        self._read_at = self.clock.monotonic()  # so that a loop that hangs in its first turn is detected
        loops = {"telemetry": self._telemetry_loop}
        if self._allocation_turn.has_sources or self._counter_watch.is_active:
            loops["allocation"] = self._allocation_loop
        if self._usage_turn is not None:
            loops["usage"] = self._usage_loop
        for name, loop in loops.items():
            threading.Thread(target=self._guard, args=(name, loop, on_fatal), name=name, daemon=True).start()

    def _guard(self, name: str, loop: Callable[[], None], on_fatal: Callable[[], object]) -> None:
        """Ends the process if a loop fails unexpectedly, because its figures would not be updated any more."""
        try:
            loop()
        except StartError as e:
            self.fatal = e
        except Exception as e:  # noqa: BLE001 - top level of a thread
            _log.exception("unexpected error in the %s loop, please report it", name)
            self.fatal = StartError(
                f"the {name} loop ended by a bug ({type(e).__name__}: {e}); exiting, so that podgpu is restarted"
            )
        if self.fatal is not None:
            on_fatal()

    def _telemetry_loop(self) -> None:
        while not self._stopping:
            self.read_telemetry(only_due=True)
            while not self._stopping and (wait := self._schedule.next_at - self.clock.monotonic()) > 0:
                self._wake.wait(wait)
                self._wake.clear()

    def _allocation_loop(self) -> None:
        due = self.clock.monotonic() + self.settings.allocation_interval
        while not self._stopping:
            self._allocate_now.wait(max(0.0, due - self.clock.monotonic()))
            due = self.clock.monotonic() + self.settings.allocation_interval
            if not self._stopping:
                self.read_allocation(counters_first=True)

    def _usage_loop(self) -> None:
        """Reads at fixed times, however long a turn takes, so that counters have the same age in every scrape."""
        due, interval = self.clock.monotonic(), self.settings.usage_interval
        while not self._stopping:
            self.read_usage()
            late = max(0.0, self.clock.monotonic() - due)
            due += interval * (1 + late // interval)
            self._stopped.wait(max(0.0, due - self.clock.monotonic()))

    def release(self, seconds: float) -> bool:
        """Closes the driver for `seconds`, so that it can be unloaded. Returns False if a pending call prevents it."""
        with self._turn:
            if not self._release_driver():
                return False
            self._released_until = self.clock.monotonic() + seconds
            message = f"released for {seconds:.0f} s on request"
            source = SourceStatus(self._telemetry.name, False, 0.0, "released", message)
            self._telemetry_part = replace(
                self._telemetry_part, readings=(), others=(), unsupported=(), sources=(source,)
            )
            self._usage_part = UsagePart(errors=self._usage_part.errors)
            self._telemetry_turn.drop_values()
        self._publish()
        return True

    def details(self, uuid: str) -> tuple[Mapping[int, Value], int | None]:
        """Returns rarely changing values of one GPU by field id, and the number of its active NVLinks."""
        part = self._telemetry_part
        return part.details.get(uuid, {}), part.links_up.get(uuid)

    def list_processes(self) -> Mapping[str, Sequence[RunningProcess]]:
        """Returns the processes of the last usage turn by device key."""
        return self._usage_part.list_processes()

    def forget(self, uuid: str) -> Forgotten | None:
        """Removes a GPU that disappeared, or the XIDs of a present one, at an operator's request.

        Returns None if there is no such GPU.
        """
        with self._turn:  # a concurrent turn would add the GPU again
            telemetry = self._telemetry_part
            known = {d.uuid for d in telemetry.devices}
            if part := self._telemetry_turn.forget(telemetry, uuid, self._health.is_lost(uuid)):
                self._telemetry_part = part
                self._health.forget(uuid)
                forgotten: Forgotten = "gpu"
            elif uuid not in known:
                return None
            else:
                forgotten = "xids" if self._health.forget_xids(uuid) else "nothing"
        self._publish()
        return forgotten

    def reload(self) -> None:
        """Starts an allocation turn immediately, which also reads changed counters (SIGHUP)."""
        self._allocate_now.set()

    @property
    def turns(self) -> bool:
        """Whether the telemetry loop is alive, that is, finished a turn recently."""
        return self.clock.monotonic() - self._read_at <= self.settings.stale_after

    def is_fresh(self, published: Published) -> bool:
        """Whether the figures are recent enough to be served."""
        return self.clock.monotonic() - published.read_at <= self.settings.stale_after

    def stop(self) -> None:
        """Ends the loops and closes all sources. Waits for a hung driver only until the deadline."""
        self._stopping = True
        self._stopped.set()
        self._wake.set()
        self._allocate_now.set()
        self._release_driver()
        self._allocation_turn.close()
        self._workers.close()

    def _release_driver(self) -> bool:
        deadline = self.settings.deadline
        results = self._workers.run({"release": lambda: self._telemetry.release(deadline / 2)}, deadline)
        return bool(results["release"].value)


def _field_ids(counters: Sequence[CounterSpec]) -> frozenset[int]:
    return frozenset(counter.field.id for counter in counters)
