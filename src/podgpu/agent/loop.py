"""Agent runs three cadences (telemetry, allocation, usage) into one snapshot. Whatever changes something publishes."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from podgpu.agent.allocation_turn import (
    DEADLINE,
    AllocationTurn,
    ReadIdentities,
    ReadLiveness,
)
from podgpu.agent.change_log import ChangeLog
from podgpu.agent.collections import DEFAULT_RETENTION, Collection, SampleRetention
from podgpu.agent.counter_feeds import CounterFeed, CounterWatch
from podgpu.agent.lanes import SELDOM_SECONDS, Schedule, fields_to_read, make_lanes
from podgpu.agent.parts import NodeParts
from podgpu.agent.publish import Published
from podgpu.agent.telemetry_turn import TelemetryPart, TelemetryTurn
from podgpu.agent.usage_turn import UsageTurn
from podgpu.clock import Clock
from podgpu.device_selection import Selection
from podgpu.errors import StartError
from podgpu.gpu.source import Telemetry
from podgpu.holders import AllocationSource
from podgpu.holders.unmapped import find_lost_gpus
from podgpu.metrics.counters import Counter as MetricCounter
from podgpu.metrics.render import Policy
from podgpu.model import Outcome, PodLabels, Snapshot, Value
from podgpu.usage.containers import ContainerFinder
from podgpu.workers import Workers

_log = logging.getLogger(__name__)
Forgotten = Literal["gpu", "xids", "nothing"]
"""What of a GPU there was to forget."""
WARM_UP_SECONDS = 1.0
"""Rates need two readings: the second comes this soon after the first, whatever the interval."""


@dataclass(frozen=True)
class Settings:
    interval: float = 30.0
    allocation_interval: float = 5.0
    usage_interval: float = 1.0
    sums_interval: float = SELDOM_SECONDS
    """Of podgpu's own sums of throttled time, at least."""
    collections: tuple[Collection, ...] = ()
    """Fields with an interval of their own."""
    counters_may_come: bool = False
    """The counters that the collections are about may be a ConfigMap's, which comes later."""
    retention: SampleRetention = DEFAULT_RETENTION
    selection: Selection = field(default_factory=Selection)
    policy: Policy = field(default_factory=Policy)

    @property
    def deadline(self) -> float:
        """How long a turn waits for a source: enough for a slow driver, never a whole default interval. Of all fields:
        a quick collection does not make the driver quicker."""
        return min(5.0, max(1.0, self.interval))

    @property
    def stale_after(self) -> float:
        """Past three intervals figures are withheld; a turn that waited for a hung source is not yet late."""
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
        counter_feed: CounterFeed | None = None,
        containers: ContainerFinder | None = None,
        liveness: ReadLiveness | None = None,
    ) -> None:
        """`containers` finds a process's container; without it nobody's usage is accounted for.

        `liveness` checks which containers run while a source of holders does not answer or has restarted.
        """
        self.settings = settings or Settings()
        self.clock = clock or Clock()
        self._telemetry = telemetry
        self._isolation = Workers(self.clock.monotonic)
        self._policy = policy = self.settings.policy
        self._counter_watch = CounterWatch(counter_feed, self._isolation, self.settings.deadline)
        self._schedule = self._new_schedule(policy)
        self._telemetry_turn = TelemetryTurn(
            telemetry, self._schedule.lanes, self.settings.selection, self._isolation, self.settings.deadline
        )
        self._allocation_turn = AllocationTurn(
            allocation, identities, self._isolation, DEADLINE, self.clock.monotonic, liveness, self.reload
        )
        self._pod_labels = pod_labels
        self._usage_turn = (
            None
            if containers is None
            else UsageTurn(telemetry, containers, self._isolation, self.settings.deadline, self.clock)
        )
        self._parts = NodeParts(policy)
        self._changes = ChangeLog(self.clock.monotonic)
        self._read_at = float("-inf")
        self._released_until = float("-inf")
        self._turn = threading.Lock()
        self._publishing = threading.Lock()
        self._stopping = False
        self._stopped = threading.Event()
        self._wake = threading.Event()
        self._allocate_now = threading.Event()
        self.fatal: StartError | None = None
        self.notes_beside: Callable[[], Sequence[str]] = tuple
        """What is not as it should be with what runs beside the agent."""
        self._exporter_id = secrets.token_hex(8)
        self.published = self._published(Snapshot(0.0), policy)

    # -- turns ---------------------------------------------------------------------------------------------------

    def read_telemetry(self, *, only_due: bool = False) -> None:
        """One telemetry turn, published: of all fields, or of the lanes whose time has come; none, if it has for none.
        Raises StartError when the process cannot go on."""
        with self._turn:  # held throughout: counters that change in between would leave lanes that nobody follows
            due = self._schedule.take_due(self.clock.monotonic()) if only_due else None
            if due == ():
                return
            if self.clock.monotonic() >= self._released_until:
                self._take(self._telemetry_turn.collect(due))
            self._read_at = self.clock.monotonic()
        self._publish()

    def read_due_telemetry(self) -> None:
        self.read_telemetry(only_due=True)

    def _take(self, part: TelemetryPart) -> None:
        if part.devices != self._parts.telemetry.devices:
            self._allocate_now.set()  # ids that named nothing a moment ago may name a device now
            if set(part.lanes) != set(self._schedule.lanes):
                self._schedule.hurry(self.clock.monotonic())
        self._parts.take_telemetry(part, self.clock.monotonic(), self.clock.wall())

    def read_allocation(self, *, counters_first: bool = False) -> None:
        """One allocation turn, published."""
        self._allocate_now.clear()  # before anything is read: who asks for another turn meanwhile gets one
        if counters_first:
            self.read_counters()
        telemetry = self._parts.telemetry
        part = self._allocation_turn.collect(telemetry.devices)
        self._telemetry_turn.hear_of(find_lost_gpus(part.offered, part.allocation.unmapped, telemetry.device_count))
        self._parts.take_allocation(part, telemetry.absent, self._allocation_turn.errors)
        self._publish()

    def read_usage(self) -> None:
        """One usage turn, published."""
        if self._usage_turn is None or self.clock.monotonic() < self._released_until:
            return
        holders, assignments = self._allocation_turn, self._parts.allocation.allocation.assignments
        telemetry = self._parts.telemetry
        sick = {o.device for o in telemetry.outcomes if not o.ok}
        self._parts.usage = self._usage_turn.collect(
            telemetry.devices, telemetry.listed, assignments, holders.complete, holders.identify, sick
        )
        self._publish()

    def read_counters(self) -> None:
        """Takes up counters that changed; bad ones leave the last good set in place."""
        self._counter_watch.read(self._change_counters)

    def _new_schedule(self, policy: Policy) -> Schedule:
        """Raises UsageError where a collection has none of the counters."""
        its = self.settings
        pass_over, wanted = its.counters_may_come, fields_to_read(policy)
        lanes = make_lanes(
            *(wanted, policy.counters, its.interval, its.collections, its.retention, pass_over),
            sums_interval=its.sums_interval,
        )
        return Schedule(lanes, WARM_UP_SECONDS)

    def _change_counters(self, counters: tuple[MetricCounter, ...]) -> None:
        """The first of the two readings that rates need is taken at once; the exposition stands until the second."""
        if counters == self._policy.counters:
            return
        with self._turn:
            policy = replace(self._policy, counters=counters)
            self._schedule, self._policy = self._new_schedule(policy), policy
            self._telemetry_turn.follow(self._schedule.lanes)
            if self.clock.monotonic() >= self._released_until:
                with suppress(StartError):  # the telemetry loop will meet it too, and end the process
                    self._telemetry_turn.collect()
            self._schedule.take_due(self.clock.monotonic())
        _log.info("counters changed: %d fields", len(counters))
        self._wake.set()

    def _publish(self) -> None:
        if self._stopping:
            return  # nobody is asked any more, and it would look as if nobody answered
        with self._publishing:
            parts, now = self._parts, self.clock.monotonic()
            parts.note_errors(self._telemetry.error_events(), now)
            snapshot = parts.snapshot(
                self._policy, self._counter_watch, self._allocation_turn, self._pod_labels(), now, self.clock.wall()
            )
            self.published = self._published(snapshot, self._policy)
            self._changes.report(snapshot)

    def _published(self, snapshot: Snapshot, policy: Policy) -> Published:
        return Published(snapshot, policy, self._read_at, self._exporter_id, self.settings.interval)

    def warm_up(self) -> None:
        """Both readings that rates need, and the holders: what --once prints."""
        self.read_telemetry()
        self.read_allocation()
        self.read_usage()
        self._wake.wait(min(WARM_UP_SECONDS, self.settings.interval))
        self.read_telemetry()
        self.read_allocation()
        self.read_usage()

    def check_selection(self) -> None:
        """Holds `-d` against the devices that are here; raises UsageError. Without a driver nothing is checked."""
        part = self._telemetry_turn.collect()
        if part.outcomes and part.outcomes[0].ok:
            self.settings.selection.check(part.devices)

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self, on_fatal: Callable[[], object]) -> None:
        """Begin the cadences; `on_fatal` is called from a thread when `fatal` says why podgpu must end."""
        self._read_at = self.clock.monotonic()  # a loop that never turns is late from now on
        loops = {"telemetry": self._telemetry_loop}
        if self._allocation_turn.has_sources or self._counter_watch.watches:
            loops["allocation"] = self._allocation_loop
        if self._usage_turn is not None:
            loops["usage"] = self._usage_loop
        for name, loop in loops.items():
            threading.Thread(target=self._guard, args=(name, loop, on_fatal), name=name, daemon=True).start()

    def _guard(self, name: str, loop: Callable[[], None], on_fatal: Callable[[], object]) -> None:
        """A loop that ended by mistake would leave its figures standing for ever: end the process instead."""
        try:
            loop()
        except StartError as e:
            self.fatal = e
        except Exception as e:  # noqa: BLE001 - the edge: where a thread of its own begins
            _log.exception("unexpected error in the %s loop, please report it", name)
            self.fatal = StartError(
                f"the {name} loop ended by a bug ({type(e).__name__}: {e}); exiting, to be restarted"
            )
        if self.fatal is not None:
            on_fatal()

    def _telemetry_loop(self) -> None:
        while not self._stopping:
            self.read_due_telemetry()
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
        """At fixed times, however long a turn takes, so that counters have the same age in every scrape."""
        due, interval = self.clock.monotonic(), self.settings.usage_interval
        while not self._stopping:
            self.read_usage()
            late = max(0.0, self.clock.monotonic() - due)
            due += interval * (1 + late // interval)
            self._stopped.wait(max(0.0, due - self.clock.monotonic()))

    def release(self, seconds: float) -> bool:
        """Let go of the driver for a while so that it can be unloaded; False when a call in flight keeps it."""
        with self._turn:
            if not self._let_go():
                return False
            self._released_until = self.clock.monotonic() + seconds
            outcome = Outcome(self._telemetry.name, 0.0, "released", f"let go of for {seconds:.0f} s on request")
            self._parts.let_go(outcome)
            self._telemetry_turn.drop_values()
        self._publish()
        return True

    def details(self, uuid: str) -> tuple[Mapping[int, Value], int | None]:
        """Of one GPU: what only its own view shows, by field id, and how many of its NVLinks are up."""
        part = self._parts.telemetry
        return part.details.get(uuid, {}), part.links_up.get(uuid)

    def forget(self, uuid: str) -> Forgotten | None:
        """An operator has seen to a GPU that is gone, or to the XIDs of one that is here. None: no such GPU."""
        with self._turn:  # a turn in between would bring back what it began with
            telemetry, health = self._parts.telemetry, self._parts.health
            known = {d.uuid for d in telemetry.devices}
            if part := self._telemetry_turn.forget(telemetry, uuid, health.is_lost(uuid)):
                self._parts.telemetry = part
                health.forget(uuid)
                forgotten: Forgotten = "gpu"
            elif uuid not in known:
                return None
            else:
                forgotten = "xids" if health.forget_xids(uuid) else "nothing"
        self._publish()
        return forgotten

    def reload(self) -> None:
        """Look at once at everything that may have changed (SIGHUP)."""
        self._allocate_now.set()

    @property
    def turns(self) -> bool:
        """The telemetry loop is alive: it finished a turn not too long ago."""
        return self.clock.monotonic() - self._read_at <= self.settings.stale_after

    def is_fresh(self, published: Published) -> bool:
        """What was read is not too old to be served; whether it has figures, `health.ready` looks at."""
        return self.clock.monotonic() - published.read_at <= self.settings.stale_after

    def stop(self) -> None:
        """End the loops and let go of everything; a hung driver cannot hold this up."""
        self._stopping = True
        self._stopped.set()
        self._wake.set()
        self._allocate_now.set()
        self._let_go()
        self._allocation_turn.close()
        self._isolation.close()

    def _let_go(self) -> bool:
        deadline = self.settings.deadline
        results = self._isolation.run({"release": lambda: self._telemetry.release(deadline / 2)}, deadline)
        return bool(results["release"].value)
