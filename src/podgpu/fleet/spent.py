"""Compares two readings of a node: what each holder did in between, and what nobody held.

This is the only place that subtracts the exporters' counters for bills. An exporter can only harm
its own node, so an increase that is impossible in the time between the readings is rejected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from podgpu.charge import HeldTime
from podgpu.fleet.node_entry import HeldByHolder, NodeEntry
from podgpu.fleet.parts import divide_gpu, key_of
from podgpu.model import (
    MJ,
    NS,
    DeviceState,
    GpuOrInstance,
    Holder,
    HolderUsage,
    MigInstance,
    WorkloadKey,
)

LONGEST_GAP = 60.0  # seconds; after a longer time, only what the exporter counted is charged
_LONGEST_COUNTED_GAP = 3600.0  # seconds; a longer time is unknown, so nobody is charged
_LATE_SECONDS = 5.0  # counters may be read this much later than the rest of the document
_MARGIN = 1.2  # clocks and power limits are not exact
MAX_WATTS = 5000.0  # of one GPU; no GPU needs as much
_NOTHING_USED = HolderUsage(
    allocated_ns=0,
    busy_ns=0,
    busy_min_ns=0,
    busy_max_ns=0,
    idle_ns=0,
    wasted_underused_ns=0,
    wait_ns=0,
    energy_mj=0,
)
Rejected = Mapping[str, int]  # name of a counter -> number of impossible increases


@dataclass
class Spending:
    """Measures what happened on a node between its last two readings.

    Held time is measured by our clock, so it is always known and paid for. After a gap, it is what
    the exporter counted meanwhile. Counters of another exporter cannot be compared: their increase
    is unknown, not zero.
    """

    node: NodeEntry
    earlier: NodeEntry | None
    longest_gap: float  # seconds
    rejected: Counter[str] = field(default_factory=Counter)
    seconds: float | None = None  # between the readings; None if they cannot be compared

    def __post_init__(self) -> None:
        self._before: HeldByHolder = {}
        self._totals: dict[str, DeviceState] = {}
        if self.earlier is None:
            return

        self.rejected.update(self.earlier.rejected)
        self._before = self.earlier.held_by_holder()
        self._totals = {gpu.uuid: gpu for gpu in self.earlier.state.devices}

        reading = self.node.reading
        earlier_reading = self.earlier.reading
        exporter = self.node.state.exporter_id
        self._has_restarted = exporter != self.earlier.state.exporter_id
        has_counted = bool(exporter) and not self._has_restarted
        is_same_target = reading.target == earlier_reading.target
        self._is_comparable = has_counted or is_same_target

        seconds = reading.read_at - earlier_reading.read_at
        self._is_gap = seconds > self.longest_gap
        longest = self.longest_gap
        if has_counted:
            longest = max(longest, _LONGEST_COUNTED_GAP)
        if 0 < seconds <= longest:
            self.seconds = seconds

    def measure(
        self, gpu: DeviceState, device_key: str, holder: Holder, share: float
    ) -> HeldTime | None:
        """Returns what the holder did since the last reading. None if this is unknown."""
        if self.seconds is None:
            return None

        usage = holder.known_usage
        before = self._before.get((device_key, holder.key))
        if before is None:
            most_seconds = _longest_covered(self.seconds)
            last = _NOTHING_USED
        else:
            # Counters that stood still for some time may catch up at once.
            most_seconds = _longest_covered(self.node.reading.read_at - before.counted_at)
            last = before.holder.known_usage
            if not self._is_gap:
                return self._compare(last, usage, gpu, self.seconds, share, most_seconds)

        # The exporter counts the time of a holder from its first second on, multiplied by its
        # share. A new holder on an unknown GPU may have been there before.
        if gpu.uuid not in self._totals:
            return None

        counted = self._subtract(last.allocated_ns, usage.allocated_ns, NS)
        # With a longer time, the holder is not really new.
        if counted is None or counted > most_seconds:
            return None

        held = self.seconds
        counted_share = holder.share_ratio or share
        # The share is 0 if the other holders have the whole device. Then no time is charged.
        if counted_share:
            held = min(held, counted / counted_share)
        return self._compare(last, usage, gpu, held, share, most_seconds)

    def find_counted_at(self, device_key: str, holder: Holder) -> float:
        """Returns the monotonic time of the reading in which the holder's counters last changed."""
        read_at = self.node.reading.read_at
        before = self._before.get((device_key, holder.key))
        if before is None:
            return read_at
        is_same = _counters_of(before.holder) == _counters_of(holder)
        return before.counted_at if is_same else read_at

    def _compare(
        self,
        last: HolderUsage,
        usage: HolderUsage,
        gpu: DeviceState,
        held: float,
        share: float,
        most_seconds: float,
    ) -> HeldTime:
        """`most_seconds`: the longest time that the increase of a counter may cover."""
        seconds_of = partial(self._increase, NS, most_seconds)
        joules_of = partial(self._increase, MJ, _most_joules(gpu, most_seconds))
        return HeldTime(
            held=held,
            share=share,
            busy=seconds_of("busy time", last.busy_ns, usage.busy_ns),
            busy_min=seconds_of("busy time", last.busy_min_ns, usage.busy_min_ns),
            busy_max=seconds_of("busy time", last.busy_max_ns, usage.busy_max_ns),
            idle=seconds_of("idle time", last.idle_ns, usage.idle_ns),
            waited=seconds_of("waiting time", last.wait_ns, usage.wait_ns),
            joules=joules_of("energy", last.energy_mj, usage.energy_mj),
            underused=seconds_of(
                "under-used time", last.wasted_underused_ns, usage.wasted_underused_ns
            ),
        )

    def _measure_unattributed(
        self, gpu: DeviceState, instance: MigInstance | None, most_seconds: float
    ) -> float | None:
        """Returns the energy in joules that no holder used. None if it is not counted."""
        if instance is not None or gpu.usage is None:
            return None
        before = self._totals[gpu.uuid].usage
        last = None if before is None else before.unattributed_energy_mj
        now = gpu.usage.unattributed_energy_mj
        return self._increase(MJ, _most_joules(gpu, most_seconds), "energy", last, now)

    def list_unattributed(self) -> dict[str, float | None]:
        """Maps each device that both readings have to its energy that no holder used."""
        if self.seconds is None or self.earlier is None:
            return {}

        # Energy is read with the GPU's usage, which may stand still for some time.
        most_seconds = _longest_covered(max(self.seconds, self.longest_gap))
        known = _list_holders(self.earlier)
        if self._is_gap:
            devices = _list_holders(self.node).keys()
            if known.keys() != devices:
                return {}  # the MIG layout changed

        joules: dict[str, float | None] = {}
        for gpu in self.node.state.devices:
            for instance, _ in divide_gpu(gpu):
                key = key_of(gpu, instance)
                holders = known.get(key)
                if holders is None:
                    continue
                # In a gap, it is known only if the time of all holders is counted.
                if self._is_gap and not _are_counted(holders, instance or gpu):
                    continue

                joules[key] = self._measure_unattributed(gpu, instance, most_seconds)

        return joules

    def _increase(
        self, scale: int, most: float, name: str, before: int | None, now: int | None
    ) -> float | None:
        """Returns the increase of a counter, or None if it is unknown or more than possible."""
        increase = self._subtract(before, now, scale)
        if increase is None or increase <= most:
            return increase

        self.rejected[name] += 1
        return None

    def _subtract(self, before: int | None, now: int | None, scale: int) -> float | None:
        if before is None or now is None or not self._is_comparable:
            return None

        # If the exporter restarted, its counters restarted at 0.
        start = 0 if self._has_restarted or now < before else before
        return (now - start) / scale


def _longest_covered(seconds: float) -> float:
    """Returns the longest time that an increase within `seconds` may cover."""
    return _MARGIN * seconds + _LATE_SECONDS


def _most_joules(gpu: DeviceState, seconds: float) -> float:
    watts = MAX_WATTS
    if gpu.power_limit_mw is not None:
        watts = min(watts, _MARGIN * gpu.power_limit_mw / 1000)
    return watts * seconds


def _counters_of(holder: Holder) -> tuple[int | None, ...]:
    usage = holder.known_usage
    return usage.busy_ns, usage.idle_ns, usage.energy_mj


def _list_holders(node: NodeEntry) -> dict[str, set[WorkloadKey]]:
    holders = {}
    for gpu in node.state.devices:
        for instance, _ in divide_gpu(gpu):
            keys = {holder.key for holder in (instance or gpu).holders}
            holders[key_of(gpu, instance)] = keys
    return holders


def _are_counted(before: set[WorkloadKey], device: GpuOrInstance) -> bool:
    """Returns True if the holders are those of before, and the exporter counts their time."""
    for holder in device.holders:
        if holder.known_usage.allocated_ns is None:
            return False
    return before == {holder.key for holder in device.holders}


def describe_rejected(rejected: Rejected) -> str:
    """Returns a note for the node. Empty if nothing was rejected."""
    if not rejected:
        return ""
    counts = [f"{name}: {count}" for name, count in sorted(rejected.items())]
    return (
        "its counters increased by more than is possible in the time, so these increases are not"
        f" charged ({', '.join(counts)}): check that its exporter is the real podgpu or"
        " dcgm-exporter"
    )
