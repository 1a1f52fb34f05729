"""Runs three loops, which read telemetry, allocations and usage, and publishes the results."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from podgpu.clock import Clock
from podgpu.errors import ReadNotes, SourceError, StartError, UsageError
from podgpu.metrics.labels import Policy
from podgpu.model import (
    FieldValues,
    PodLabels,
    RunningProcess,
    SourceStatus,
)
from podgpu.node.agent.device_selection import Selection
from podgpu.node.agent.gpus import TelemetryCollector
from podgpu.node.agent.health import HealthWatch, PastFailure
from podgpu.node.agent.orphans import OrphanWatch
from podgpu.node.agent.publish import (
    COUNTERS,
    LatestResults,
    Published,
    Publisher,
    add_memory,
)
from podgpu.node.agent.schedule import (
    WARM_UP_SECONDS,
    Collection,
    CounterSpecs,
    ReadCounters,
    Schedule,
    group_fields,
)
from podgpu.node.agent.usage_collector import UsageCollector, UsageResult
from podgpu.node.agent.xid_blame import XidBlame
from podgpu.node.gpu.nvml.kernel_log import KernelLog, KernelXid
from podgpu.node.gpu.source import FieldGroup, Telemetry
from podgpu.node.holders.reader import AllocationReader, HolderSources, find_existing_gpus
from podgpu.node.usage.containers import ContainerFinder, ProcessOwners
from podgpu.node.usage.ledger import Ledger
from podgpu.workers import ErrorCounts, Workers, run_loop

_log = logging.getLogger(__name__)
_SERIAL = 53  # DCGM_FI_DEV_SERIAL
Forgotten = Literal["gpu", "xids", "nothing"]  # what `podgpu forget` has removed
_AFTER_TELEMETRY = 0.2  # seconds after a telemetry reading, whose energy a usage reading then uses
_UNALLOCATED_READINGS = 12  # use without an allocation is reported after this many readings


@dataclass(frozen=True)
class Settings:
    node_name: str = ""  # if empty, `policy.hostname` is used
    interval: float = 30.0
    allocation_interval: float = 5.0
    usage_interval: float = 1.0
    collections: tuple[Collection, ...] = ()  # groups of fields with their own interval
    skip_empty: bool = False
    """Skip collections without fields, because a ConfigMap may add their fields later."""
    selection: Selection = field(default_factory=Selection)
    policy: Policy = field(default_factory=Policy)

    @property
    def deadline(self) -> float:
        """Maximum duration of a reading.

        Long enough for a slow driver, but shorter than the default interval.
        """
        return min(5.0, max(1.0, self.interval))

    @property
    def stale_after(self) -> float:
        """Maximum age of values that are served.

        Long enough for one reading that waits for a source that hangs.
        """
        return max(3 * self.interval, self.interval + self.deadline)


class Agent:
    def __init__(
        self,
        telemetry: Telemetry,
        holders: HolderSources | None = None,
        settings: Settings | None = None,
        clock: Clock | None = None,
        *,
        pod_labels: Callable[[], PodLabels] = dict,
        read_counters: ReadCounters | None = None,
        containers: ContainerFinder | None = None,
        ledger: Ledger | None = None,
        kernel_log: KernelLog | None = None,
    ) -> None:
        """`containers`: finds the containers of processes. If None, usage is not read.

        `kernel_log`: names the processes that cause XIDs.
        """
        # `read_counters` replaces `policy.counters`.
        self.settings = settings or Settings()
        self.clock = clock or Clock()
        self.fatal: StartError | None = None
        self.warnings: list[ReadNotes] = []  # of other components, for the page and probes
        self._workers = Workers(self.clock.monotonic)
        self._errors = ErrorCounts()

        # Held by a reading of GPUs, and by what must not happen meanwhile.
        self._reading = threading.Lock()
        # Held while a result is replaced, and while the results become a `Published`.
        self._publishing = threading.Lock()
        self._stopped = threading.Event()
        # These end the wait of a loop.
        self._telemetry_now = threading.Event()
        self._allocate_now = threading.Event()

        self._telemetry = telemetry
        self._read_counters = read_counters
        policy = self.settings.policy
        self._schedule = self._make_schedule(policy.counters)
        self._telemetry_collector = TelemetryCollector(
            telemetry,
            self._schedule.groups,
            self.settings.selection,
            self._workers,
            self._errors,
            self.settings.deadline,
            self.clock,
        )

        self._allocations = AllocationReader(
            holders or HolderSources(), self._workers, self._errors, self.clock, self.reload
        )

        self._loops = {"telemetry": self._telemetry_loop}
        if self._allocations.sources or read_counters is not None:
            self._loops["allocation"] = self._allocation_loop
        self._usage_collector: UsageCollector | None = None
        if containers is not None:
            self._add_usage(containers, ledger, kernel_log)

        self._health = HealthWatch(
            self.clock, policy.xid_window_ms / 1000, policy.clock_window_ms / 1000
        )

        self._results = LatestResults()
        # by UUID
        self._serials: dict[str, FieldValues] = {}
        self._publisher = Publisher(
            self.clock,
            self._errors,
            pod_labels,
            node=self.settings.node_name or policy.hostname or "this node",
            interval_seconds=self.settings.interval,
        )
        # Monotonic times. While the driver is released, each due time counts as a reading.
        self._read_at = float("-inf")
        self._released_until = float("-inf")
        self.published = self._make_published()

    def _add_usage(
        self, containers: ContainerFinder, ledger: Ledger | None, kernel_log: KernelLog | None
    ) -> None:
        """Creates what reads usage, and its loops."""
        owners = ProcessOwners(
            containers, self._allocations.complete, self._allocations.read_identities
        )
        if ledger is None:
            seconds = _UNALLOCATED_READINGS * self.settings.allocation_interval
            ledger = Ledger(unallocated_after=seconds)

        def list_kernel_xids() -> Sequence[KernelXid]:
            return kernel_log.lines if kernel_log is not None else ()

        self._usage_collector = UsageCollector(
            self._telemetry,
            owners,
            ledger,
            self._workers,
            self._errors,
            self.settings.deadline,
            self.clock,
            XidBlame(owners.recall, list_kernel_xids, self.clock.wall),
            OrphanWatch(owners.read_program),
        )
        self._loops["usage"] = self._usage_loop
        if kernel_log is not None:
            # A process that causes an XID is looked up at once, because it is about to exit.
            self._loops["kernel-log"] = partial(
                kernel_log.run, self._stopped, lambda line: owners.find_early([line.pid])
            )

    # Readings

    def read_telemetry(self, *, only_due: bool = False) -> None:
        """Reads the GPUs and publishes the result.

        With `only_due`, reads only the fields that are due. Raises StartError if the process cannot
        continue.
        """
        # The counters must not change during a reading.
        with self._reading:
            due = None
            if only_due:
                due = self._schedule.take_due(self.clock.monotonic())
                if not due:
                    return

            if not self._is_released:
                self._collect_telemetry(due)
            self._read_at = self.clock.monotonic()
        self._publish()

    def _collect_telemetry(self, due: tuple[FieldGroup, ...] | None) -> None:
        before = self._results.telemetry
        allocation = self._results.allocation
        some_lost = before.gpus_lost > 0
        existing = find_existing_gpus(allocation.offered, allocation.unmapped, some_lost)
        result = self._telemetry_collector.collect(due, existing)
        if result.devices != before.devices:
            # Ids that were unknown may belong to new devices.
            self._allocate_now.set()

        with self._publishing:
            self._results.telemetry = result
            self._health.update(result)

        # A GPU that is lost later still has its serial number.
        for uuid, reading in result.readings.items():
            if _SERIAL in reading.slow_values:
                self._serials[uuid] = {_SERIAL: reading.slow_values[_SERIAL]}

    @property
    def _is_released(self) -> bool:
        return self.clock.monotonic() < self._released_until

    def read_allocation(self) -> None:
        telemetry = self._results.telemetry
        devices = add_memory(telemetry.devices, telemetry.values)
        allocation = self._allocations.read(devices)
        with self._publishing:
            self._results.allocation = allocation

        self._publish()

    def read_usage(self) -> None:
        if self._usage_collector is None or self._is_released:
            return

        result = self._usage_collector.collect(self._results.telemetry, self._results.allocation)
        with self._publishing:
            # `release` may have been called during the reading.
            if not self._is_released:
                self._results.usage = result
            self._health.add_verdicts(result.verdicts)

        self._publish()

    def read_counters(self) -> None:
        """Re-reads the counters if they can change.

        If they are invalid, keeps the old ones and reports the error.
        """
        if self._read_counters is None:
            return

        results = self._workers.run({COUNTERS: self._read_counters}, self.settings.deadline)
        result = results[COUNTERS]
        counters = result.value
        if counters is not None and counters != self.settings.policy.counters:
            try:
                self._use_counters(counters)
            except UsageError as e:
                # a collection matches none of the counters
                result = replace(result, error=SourceError("malformed", str(e)))

        status = self._errors.record(COUNTERS, result)
        with self._publishing:
            self._results.counters = (status,)

    def _use_counters(self, counters: CounterSpecs) -> None:
        """Raises UsageError if a collection matches none of the counters."""
        schedule = self._make_schedule(counters)
        policy = replace(self.settings.policy, counters=counters)
        with self._reading:
            self._schedule = schedule
            self.settings = replace(self.settings, policy=policy)
            self._telemetry_collector.set_groups(schedule.groups)
        _log.info("counters changed: %d fields", len(counters))
        # All fields are due.
        self._telemetry_now.set()

    def _make_schedule(self, counters: CounterSpecs) -> Schedule:
        """Raises UsageError if a collection matches none of the counters."""
        settings = self.settings
        groups = group_fields(
            counters, settings.interval, settings.collections, settings.skip_empty
        )
        return Schedule(groups)

    def _publish(self) -> None:
        # After `stop`, all calls fail, and these failures must not be published.
        if self._stopped.is_set():
            return

        with self._publishing:
            events = self._telemetry.error_events()
            self._health.add_xids(events)
            if self._usage_collector is not None:
                self._usage_collector.blame.add(events)
            self.published = self._make_published()

    def _make_published(self) -> Published:
        telemetry = self._results.telemetry
        allocation = self._results.allocation
        health = self._health.report(
            allocation.assignments, telemetry, allocation.kubernetes_health
        )
        return self._publisher.make(self._results, health, self.settings.policy, self._read_at)

    def warm_up(self) -> None:
        """Reads everything twice, because rates need two readings. Used by --once."""
        for pause in (0.0, min(WARM_UP_SECONDS, self.settings.interval)):
            self._telemetry_now.wait(pause)
            self.read_telemetry()
            self.read_allocation()
            self.read_usage()

    def check_selection(self) -> None:
        """Raises UsageError if `-d` selects a device that does not exist.

        Does nothing if the driver is not loaded.
        """
        result = self._telemetry_collector.collect()
        if result.inventory_source.up:
            self.settings.selection.check(result.devices)

    # Lifecycle

    def start(self, on_fatal: Callable[[], object]) -> None:
        """Starts the loops.

        If the process must end, a loop sets `fatal` to the reason and calls `on_fatal`.
        """
        # detects a loop that hangs in its first reading
        self._read_at = self.clock.monotonic()

        for name, loop in self._loops.items():
            guarded = partial(self._run_guarded, name, loop, on_fatal)
            threading.Thread(target=guarded, name=name, daemon=True).start()

    def _run_guarded(
        self, name: str, loop: Callable[[], None], on_fatal: Callable[[], object]
    ) -> None:
        if error := run_loop(name, loop):
            self.fatal = error
            on_fatal()

    def _telemetry_loop(self) -> None:
        while not self._stopped.is_set():
            self.read_telemetry(only_due=True)
            wait = self._schedule.next_at - self.clock.monotonic()
            self._telemetry_now.wait(max(0.0, wait))
            self._telemetry_now.clear()

    def _allocation_loop(self) -> None:
        interval = self.settings.allocation_interval
        due = self.clock.monotonic() + interval
        while not self._stopped.is_set():
            wait = due - self.clock.monotonic()
            self._allocate_now.wait(max(0.0, wait))
            # Cleared first, so that a request during this reading starts another one.
            self._allocate_now.clear()
            due = self.clock.monotonic() + interval
            if not self._stopped.is_set():
                self.read_counters()
                self.read_allocation()

    def _usage_loop(self) -> None:
        """Reads at fixed times, however long a reading takes.

        So counters have the same age in every scrape.
        """
        interval = self.settings.usage_interval
        due = self.clock.monotonic() + _AFTER_TELEMETRY

        while not self._stopped.is_set():
            self.read_usage()

            # Skips the times that have passed.
            late = max(0.0, self.clock.monotonic() - due)
            due += interval * (1 + late // interval)
            self._stopped.wait(max(0.0, due - self.clock.monotonic()))

    def release(self, seconds: float) -> bool:
        """Closes the driver for `seconds`, so that an operator can unload it.

        Returns False if this fails.
        """
        with self._reading:
            if not self._release_driver():
                return False

            message = f"released for {seconds:.0f} s on request"
            source = SourceStatus(self._telemetry.name, False, 0.0, "released", message)
            with self._publishing:
                self._released_until = self.clock.monotonic() + seconds
                self._results.telemetry = replace(
                    self._results.telemetry, readings={}, sources=(source,)
                )
                self._results.usage = UsageResult()
            self._telemetry_collector.drop_values()

        self._publish()
        return True

    def details(self, uuid: str) -> tuple[FieldValues, int | None]:
        """Returns additional values of a GPU by field id, and the number of its active NVLinks."""
        reading = self._results.telemetry.readings.get(uuid)
        if reading is None:
            return self._serials.get(uuid, {}), None

        return reading.slow_values, reading.links_up

    def list_processes(self) -> Mapping[str, Sequence[RunningProcess]]:
        """Returns the processes of the last usage reading, by device key."""
        return self._results.usage.processes

    def forget(self, uuid: str) -> Forgotten | None:
        """Removes a GPU that disappeared. If the GPU is present, removes its XIDs instead.

        Returns what was removed, or None if there is no such GPU.
        """
        # A concurrent reading would add the GPU again.
        with self._reading, self._publishing:
            telemetry = self._results.telemetry
            is_lost = self._health.is_lost(uuid)
            result = self._telemetry_collector.forget(telemetry, uuid, is_lost)
            if result is not None:
                self._results.telemetry = result
                self._health.forget(uuid)
                forgotten: Forgotten = "gpu"
            elif all(device.uuid != uuid for device in telemetry.devices):
                return None
            else:
                forgotten = "xids" if self._health.forget_xids(uuid) else "nothing"

        self._publish()
        return forgotten

    def restore_failures(self, failures: Iterable[PastFailure]) -> None:
        """Adds failures of GPUs before the start. Call it before `start`."""
        self._health.failures.restore(failures)

    def reload(self) -> None:
        """Starts a reading of the allocation and the counters at once. SIGHUP calls this method."""
        self._allocate_now.set()

    @property
    def is_running(self) -> bool:
        """True if the telemetry loop has finished a reading recently."""
        return self.clock.monotonic() - self._read_at <= self.settings.stale_after

    def is_fresh(self, published: Published) -> bool:
        return self.clock.monotonic() - published.read_at <= self.settings.stale_after

    def stop(self) -> None:
        """Ends the loops and closes the driver.

        If the driver hangs, waits only until the deadline.
        """
        self._stopped.set()
        self._telemetry_now.set()
        self._allocate_now.set()
        self._release_driver()
        self._workers.close()

    def _release_driver(self) -> bool:
        # longer than a wait for XIDs
        deadline = max(2.0, self.settings.deadline)
        release = partial(self._telemetry.release, deadline / 2)
        results = self._workers.run({"release": release}, deadline)
        return bool(results["release"].value)
