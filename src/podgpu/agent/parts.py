"""NodeParts keeps what the three cadences brought last, and makes one snapshot of it. Pure: it is told the time.

Any cadence publishes what the other two brought: parts are frozen copies, replaced as a whole and never changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

from podgpu.agent.allocation_turn import AllocationPart, AllocationTurn, without_crowds
from podgpu.agent.counter_feeds import CounterWatch
from podgpu.agent.health_watch import HealthWatch
from podgpu.agent.lanes import clock_event_masks
from podgpu.agent.tallies import ClockEventLog, XidLog
from podgpu.agent.telemetry_turn import TelemetryPart
from podgpu.agent.usage_turn import UsagePart
from podgpu.gpu.source import ErrorEvent
from podgpu.metrics.mig import billed_name
from podgpu.metrics.render import Policy
from podgpu.model import ContainerUsage, DeviceTotals, NamespaceTotals, Outcome, PodLabels, Snapshot, Usage, UsageMethod


class NodeParts:
    """Each part is taken by the thread of its cadence; a snapshot is made by one thread at a time."""

    def __init__(self, policy: Policy) -> None:
        self.telemetry = TelemetryPart()
        self.allocation = AllocationPart()
        self.usage = UsagePart()
        self.health = HealthWatch()
        self.xids = XidLog(policy.xid_window_ms / 1000)
        self._clock_events = ClockEventLog(policy.clock_window_ms / 1000)
        self._clock_counts: Mapping[tuple[str, str], int] = {}
        self._clock_totals: Mapping[tuple[str, str], int] = {}
        self._allocation_errors: Mapping[tuple[str, str], int] = {}
        self._left_out: Counter[tuple[str, str]] = Counter()
        self._taken_at = 0.0

    def take_telemetry(self, part: TelemetryPart, now: float, wall: float) -> None:
        """`now` is monotonic time here and below, `wall` Unix time."""
        self._clock_counts = self._clock_events.note(clock_event_masks(part.readings, part.lanes), now)
        self._clock_totals = self._clock_events.totals()
        self.telemetry = part
        self.health.take(part, now, wall)
        if part.readings:
            self._taken_at = wall

    def take_allocation(
        self, part: AllocationPart, absent: frozenset[str], errors: Mapping[tuple[str, str], int]
    ) -> None:
        """`absent`: UUIDs of GPUs that were not there when it was asked; `errors`: of the sources, since the start."""
        self.allocation, left_out = without_crowds(part)
        self.health.hold(part.allocation.assignments, absent)
        self._left_out += left_out
        self._allocation_errors = {**errors, **self._left_out}

    def note_errors(self, events: Sequence[ErrorEvent], now: float) -> None:
        """What the GPUs told of since the last time."""
        self.xids.note(events, now)
        self.health.note(events, now)

    def let_go(self, outcome: Outcome) -> None:
        """The driver was let go of: nothing is known of the GPUs but which there were."""
        self.telemetry = replace(self.telemetry, readings=(), others=(), unsupported=(), outcomes=(outcome,))
        self.usage = UsagePart(errors=self.usage.errors)

    def snapshot(
        self,
        policy: Policy,
        counters: CounterWatch,
        holders: AllocationTurn,
        pod_labels: PodLabels,
        now: float,
        wall: float,
    ) -> Snapshot:
        """All of it, as it is now."""
        telemetry, allocation, usage = self.telemetry, self.allocation.allocation, self.usage
        show = holders.show
        configured = {c.field.id for c in policy.counters}
        errors: Counter[tuple[str, str]] = Counter()
        for part in (telemetry.errors, self._allocation_errors, counters.errors, usage.errors):
            errors.update(part)
        return Snapshot(
            taken_at=self._taken_at,
            devices=telemetry.selected,
            readings=telemetry.readings,
            others=telemetry.others,
            assignments=show(allocation.assignments),
            unmapped=allocation.unmapped,
            vcuda=show(allocation.vcuda),
            pod_labels=pod_labels,
            outcomes=(
                *telemetry.outcomes,
                *self.allocation.outcomes,
                *usage.outcomes,
                *counters.outcomes,
            ),
            errors=dict(errors),
            unsupported=tuple(u for u in telemetry.unsupported if u[1] in configured),
            dropped=telemetry.dropped,
            xids=self.xids.tallies(now),
            last_xid=dict(self.xids.last),
            clock_events=self._clock_counts,
            clock_event_totals=self._clock_totals,
            device_count=telemetry.device_count,
            usage=_old_usage(usage, show),
            health=self.health.report(allocation.assignments, now, wall),
        )


def _old_usage(part: UsagePart, show: Callable[[Sequence[ContainerUsage]], tuple[ContainerUsage, ...]]) -> Usage:
    """Converts to the shapes of `Snapshot`, until nothing reads it."""
    containers = [
        ContainerUsage(
            device,
            workload,
            of.utilization_ratio,
            of.memory_used_bytes,
            of.processes,
            of.allocated_ns,
            of.busy_ns,
            of.idle_ns,
            of.energy_mj,
            of.power_ratio,
            None if of.idle_since is None else round(((part.at or 0.0) - of.idle_since) * 1e9),
            of.busy_min_ns,
            of.busy_max_ns,
        )
        for device, holders in sorted(part.usage.holders.items())
        for workload, of in holders
    ]
    devices = tuple(
        DeviceTotals(
            key,
            of.busy_ns,
            of.energy_mj,
            of.memory_used_bytes,
            of.unattributed_busy_ns,
            of.unattributed_energy_mj,
            of.unattributed_memory_bytes,
            cast("UsageMethod | None", of.method or None),
        )
        for key, of in sorted(part.usage.devices.items())
    )
    namespaces = tuple(
        NamespaceTotals(
            n.namespace,
            billed_name(n.model, n.profile) if n.profile else n.model,
            n.allocated_ns or 0,
            n.busy_ns,
            n.energy_mj,
        )
        for n in part.usage.namespaces
    )
    return Usage(show(containers), devices, namespaces, part.at or 0.0)
