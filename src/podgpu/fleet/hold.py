"""The only definition of idle: a holder has a device allocated and does not use it.

podgpu's exporter measures idle time in each usage reading (`OwnedUsage.compute_idle`): in total
(`HolderUsage.idle_ns`) and since the holder was last busy (`HolderUsage.idle_since`). Other
exporters do not, so `IdleTimes` estimates it from two readings without use. An uncertain time is
not idle. `HeldPart` has the result, for everything that shows idle time or adds it up. What scales
workloads to zero uses only measured time (`HeldPart.measured_idle`). A holder that is idle for
longer than --idle-after is wasteful.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from podgpu.charge import HeldTime, Waste
from podgpu.fleet.choose import CLOCK_AHEAD
from podgpu.fleet.node_entry import HeldByHolder, NodeEntry
from podgpu.fleet.parts import (
    HeldPart,
    Use,
    WasteRate,
    device_memory,
    device_price,
    divide_gpu,
    gpu_utilization,
    is_mps_client,
    key_of,
    make_rate,
    may_be_busy,
)
from podgpu.known import divide_known
from podgpu.model import (
    MJ,
    NS,
    RESERVATION,
    DeviceState,
    GpuOrInstance,
    Holder,
    HolderUsage,
    MigInstance,
    Workload,
)

_SAME_READING = 1e-6  # seconds; times from Prometheus are computed, so they are not exact
_SAME_COUNTERS = 0.5  # seconds; if less time has passed, the counters are from the same reading
_SAME_IDLE_TIME = 1.0  # seconds; a smaller change of the reported idle time is measurement error


def measure_use(device: GpuOrInstance, holder: Holder) -> Use:
    """Returns whether the holder uses the GPU or MIG instance, according to one reading."""
    usage = holder.known_usage
    if usage.idle_since is not None:
        return "idle"

    device_ratio = device.utilization_ratio
    if holder.source == RESERVATION:
        if device_ratio:
            return "used"
        # The pods of a reservation are unknown, so it is never idle.
        return "unknown"

    if is_mps_client(device, holder):
        return "unknown"

    own_ratio = usage.utilization_ratio
    if own_ratio == 0 and usage.processes != 0 and device_ratio:
        # The driver attributes a whole sample to the busiest process, so a holder with 0 may be
        # busy.
        return "unknown"

    ratio = device_ratio if own_ratio is None else own_ratio
    if ratio is None:
        if usage.processes == 0:
            return "idle"
        return "unknown"

    if ratio:
        return "used"

    return "idle"


class HolderTimes(NamedTuple):
    use: Use
    idle_since: float | None = None  # Unix time
    # Seconds. None if the holder was busy, or if its idle time is an estimate.
    measured_idle: float | None = None
    window: HeldTime | None = None  # since the last reading


@dataclass
class IdleTimes:
    """Compares the last two readings of a node: finds the use of each holder.

    If podgpu's exporter measures the holder, the exporter's idle time is used. Otherwise, a holder
    is idle if its utilisation (or its device's) is 0 and its busy time has not increased since the
    last reading.
    """

    node: NodeEntry
    earlier: NodeEntry | None
    offset: float  # Unix time minus monotonic time
    clock_change: float  # change of `offset` since the last round
    idle_for: Mapping[str, float]  # idle seconds before the first reading, by `Device.key`
    # Seconds. A longer time that the counters do not cover interrupts measured idle time.
    longest_gap: float

    def __post_init__(self) -> None:
        read_at = self.node.reading.read_at
        self.counted_at = read_at
        skew = self.node.reading.skew_seconds or 0.0
        self._skew = skew if abs(skew) > CLOCK_AHEAD else 0.0
        self._before: HeldByHolder = {}
        # Time between the two readings of the counters. None if they cannot be compared.
        self._seconds: float | None = None
        earlier = self.earlier
        if earlier is None:
            return

        self._before = earlier.held_by_holder()
        self._last_read_at = earlier.reading.read_at
        self._is_restarted = earlier.state.exporter_id != self.node.state.exporter_id
        if earlier.stale or self._is_restarted:
            return

        seconds = _counted_at(self.node) - _counted_at(earlier)
        # The difference is large if a clock was set, or if the exporter did not count for some
        # time.
        difference = seconds - (read_at - earlier.counted_at)
        if abs(difference) <= self.longest_gap:
            self._seconds = seconds
            if seconds < _SAME_COUNTERS:
                self.counted_at = earlier.counted_at

    def find(self, gpu: DeviceState, instance: MigInstance | None, holder: Holder) -> HolderTimes:
        usage = holder.known_usage
        use = measure_use(instance or gpu, holder)
        device = key_of(gpu, instance)
        part = self._before.get((device, holder.key))
        since = self._find_start(device, part, use, usage)
        if since is not None:
            use = "idle"
        elif use == "idle":
            # It is idle in this reading, and was busy for some time since the last one.
            use = "used"

        window = None if part is None else self._compare(part, usage)
        return HolderTimes(use, since, self._measure_idle(part, usage, window), window)

    def _find_start(
        self, device: str, part: HeldPart | None, use: Use, usage: HolderUsage
    ) -> float | None:
        """Returns since when the holder is idle. None if it is not.

        `part`: the holder in the last round.
        """
        if usage.idle_since is not None:
            return self._measured_start(usage.idle_since, part)
        if self.node.state.exporter_id and usage.utilization_ratio is not None:
            return None  # the exporter measures the holder, and it is not idle
        if part is not None:
            return self._estimated_start(part, use, usage)
        if use == "idle":
            now = self.node.reading.read_at + self.offset
            return now - self._known_idle(device, usage)

        return None

    def _measured_start(self, idle_since: float, part: HeldPart | None) -> float:
        """Corrects the start for the skew of the node's clock. If idle time goes on, keeps it."""
        since = idle_since - self._skew
        last_since = None if part is None else self._last_start(part)
        if part is None or last_since is None:
            return since

        last_reported = part.holder.known_usage.idle_since or 0.0
        is_same = idle_since <= last_reported + _SAME_IDLE_TIME
        # An exporter that restarted does not know when the idle time started.
        if is_same or self._is_restarted:
            return min(since, last_since)

        return since

    def _estimated_start(self, part: HeldPart, use: Use, usage: HolderUsage) -> float | None:
        """Estimates the start from two readings. Returns None if the holder was busy."""
        last_since = self._last_start(part)
        if self.node.reading.read_at <= self._last_read_at + _SAME_READING:
            return last_since

        last = part.holder.known_usage
        if use != "idle" or _growth(last.busy_ns, usage.busy_ns, NS):
            return None
        if last_since is None:
            return self._last_read_at + self.offset

        return last_since

    def _last_start(self, part: HeldPart) -> float | None:
        """Returns the start that the last round found, by the wall clock of now."""
        since = part.last_idle_since
        if since is None:
            return None
        return since + self.clock_change

    def _compare(self, part: HeldPart, usage: HolderUsage) -> HeldTime | None:
        """Returns what the holder did since the last reading. None if this is unknown."""
        seconds = self._seconds
        if seconds is None:
            return None
        if seconds < _SAME_COUNTERS:
            return part.window

        last = part.holder.known_usage
        busy = None
        idle = None
        # While the usage is not measured, constant counters mean nothing.
        if usage.utilization_ratio is not None and last.utilization_ratio is not None:
            busy = _growth(last.busy_ns, usage.busy_ns, NS)
            idle = _growth(last.idle_ns, usage.idle_ns, NS)

        return HeldTime(
            held=seconds,
            busy=busy,
            idle=idle,
            waited=_growth(last.wait_ns, usage.wait_ns, NS),
            joules=_growth(last.energy_mj, usage.energy_mj, MJ),
            underused=_growth(last.wasted_underused_ns, usage.wasted_underused_ns, NS),
        )

    def _measure_idle(
        self, part: HeldPart | None, usage: HolderUsage, window: HeldTime | None
    ) -> float | None:
        """Returns the seconds for which the exporter's counters prove that the holder is idle."""
        if usage.utilization_ratio is None or usage.busy_ns is None or usage.idle_ns is None:
            return None

        # An exporter with an id reports since when the holder is idle.
        if self.node.state.exporter_id:
            if usage.idle_since is None:
                return None
            return max(0.0, _counted_at(self.node) - usage.idle_since)

        # Without two readings, counters prove only that the holder was never busy.
        if part is None or window is None or window.busy is None or window.idle is None:
            if usage.busy_ns:
                return 0.0
            return usage.idle_ns / NS

        # The counters are those of the last round.
        if window is part.window:
            return part.measured_idle
        if window.busy:
            return None

        # The holder may have been busy in a long time that the counters do not cover.
        is_covered = window.held - window.idle <= self.longest_gap
        if not is_covered or part.measured_idle is None:
            return window.idle
        return part.measured_idle + window.idle

    def _known_idle(self, device: str, usage: HolderUsage) -> float:
        """Returns the idle seconds before podgpu first read it, from counters or Prometheus."""
        if self.earlier is not None:
            return 0.0  # the holder is new on a known node

        counted = divide_known(usage.idle_ns, NS)
        if counted is not None and usage.busy_ns == 0:
            return counted

        observed = self.idle_for.get(device, 0.0)
        if counted is None:
            return observed

        return min(observed, counted)


def _counted_at(node: NodeEntry) -> float:
    """Returns when the exporter read the counters, by its clock.

    If it does not report this time, returns that of the reading, by our monotonic clock.
    """
    return node.state.usage_at or node.reading.read_at


def _growth(before: int | None, now: int | None, scale: int) -> float | None:
    """Returns the increase of a counter.

    None after a reset, because the time that the counter covers is unknown.
    """
    if before is None or now is None or now < before:
        return None
    return (now - before) / scale


def estimate_idle(part: HeldPart, seconds: float, at: float) -> float:
    """Returns the idle time in the `seconds` before the Unix time `at`.

    Use it only for holders without `idle_ns`.
    """
    if part.use != "idle":
        return 0.0
    if part.idle_since is None:
        return seconds
    return max(0.0, min(seconds, at - part.idle_since))


def wasteful_since(part: HeldPart, at: float | None, idle_after: float | None) -> float | None:
    """Returns since when the holder has been idle, if it is longer than --idle-after.

    `at`: Unix time of the reading.
    """
    since = part.idle_since
    if since is None or at is None or idle_after is None:
        return None
    if at - since > idle_after:
        return since
    return None


def describe_idle(holder: Workload) -> str:
    """Returns the message of the condition `idle`."""
    return f"{holder.text} holds it and does not use it"


# What no known holder has


class UnheldPart(NamedTuple):
    """What no known holder has of a GPU: it is unknown or unallocated."""

    unknown: float = 0.0  # fraction of the GPU that may be in use
    unallocated: WasteRate = WasteRate()
    # Of an hour of a GPU that is in use, although nobody is known to hold it. It is paid for and
    # not wasted. None if there is none, or without a price.
    unheld_cost: float | None = None


def is_used_unheld(gpu: DeviceState, held: Mapping[str, Sequence[HeldPart]]) -> bool:
    """Returns whether something runs on a GPU that nobody is known to hold."""
    if any(held.get(key_of(gpu, instance)) for instance, _ in divide_gpu(gpu)):
        return False
    return may_be_busy(gpu_utilization(gpu), device_memory(gpu))


def has_unheld_use(nodes: Iterable[NodeEntry]) -> bool:
    for node in nodes:
        if node.gone or node.silent is not None:
            continue
        held = node.held_by_device()
        if any(is_used_unheld(gpu, held) for gpu in node.gpus):
            return True
    return False


def find_unheld(
    node: NodeEntry, gpu: DeviceState, held: Mapping[str, Sequence[HeldPart]]
) -> UnheldPart:
    allocated = 0.0
    unallocated = WasteRate()
    for instance, size in divide_gpu(gpu):
        parts = held.get(key_of(gpu, instance), ())
        share = sum(part.share for part in parts)
        allocated += share * size
        price = device_price(node.prices, gpu, instance, size)
        free = Waste(unallocated=max(0.0, 1.0 - share))
        unallocated = unallocated.plus(make_rate(free, size, price))

    unknown = max(0.0, 1.0 - allocated)
    if node.gone or node.silent is not None:
        return UnheldPart(unknown)

    if is_used_unheld(gpu, held):
        cost = unallocated.cost_per_hour or Waste()
        return UnheldPart(unknown, unheld_cost=cost.unallocated)

    return UnheldPart(unallocated=unallocated)
