"""The only definition of idle: a holder is idle while it has a device allocated and does not use
it.

podgpu's exporter measures idle time in each usage reading (`OwnedUsage.compute_idle`): in total
(`HolderUsage.idle_ns`) and since the holder was last busy (`HolderUsage.idle_since`). Other
exporters do not, so `IdleTimes` estimates it from two readings without use. An uncertain time is
not idle. `HeldPart` has the result, for everything that shows idle time or adds it up. What scales
workloads to zero uses only measured time (`HeldPart.measured_idle`). A holder that is idle for
longer than --idle-after is wasteful.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from podgpu.charge import HeldTime
from podgpu.fleet.choose import CLOCK_AHEAD
from podgpu.fleet.parts import HeldPart, Use, is_mps_client, key_of
from podgpu.fleet.readings import NodeEntry
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

_SAME_READING = 1e-6
_SAME_COUNTERS = 0.5  # seconds; if less time has passed, the counters are from the same reading
_SAME_IDLE_TIME = 1.0  # seconds; a smaller change of the reported idle time is measurement error
_NO_USAGE = HolderUsage()


def measure_use(device: GpuOrInstance, holder: Holder) -> Use:
    """Returns whether the holder uses the GPU or MIG instance, according to one reading."""
    usage = holder.usage or _NO_USAGE
    if usage.idle_since is not None:
        return "idle"
    own, whole = usage.utilization_ratio, device.utilization_ratio
    if holder.source == RESERVATION:
        return "used" if whole else "unknown"
    if is_mps_client(device, holder):
        return "unknown"
    if own == 0 and usage.processes != 0 and whole:
        # the driver attributes a whole sample to the busiest process, so a holder with 0 may be
        # busy
        return "unknown"
    ratio = whole if own is None else own
    if ratio is None:
        return "idle" if usage.processes == 0 else "unknown"
    return "used" if ratio else "idle"


class HolderTimes(NamedTuple):
    use: Use
    idle_since: float | None = None  # Unix time
    measured_idle: float | None = (
        None  # seconds; None if the holder was busy, or if its idle time is an estimate
    )
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
    longest_gap: (
        float  # seconds; a longer time that the counters do not cover interrupts measured idle time
    )
    _seconds: float | None = (
        None  # time between the two readings of the counters; None if they cannot be compared
    )

    def __post_init__(self) -> None:
        skew = self.node.reading.skew_seconds or 0.0
        self._skew = skew if abs(skew) > CLOCK_AHEAD else 0.0
        held = self.earlier.held if self.earlier else ()
        self._before = {(part.device_key, part.holder.key): part for part in held}
        read_at, then = self.node.reading.read_at, self.earlier
        self.counted_at = read_at
        if (
            then is not None
            and not then.stale
            and then.state.exporter_id == self.node.state.exporter_id
        ):
            seconds = _counted_at(self.node) - _counted_at(then)
            # The difference is large if a clock was set, or if the exporter did not count for some
            # time.
            if abs(seconds - (read_at - then.counted_at)) <= self.longest_gap:
                self._seconds = seconds
                self.counted_at = then.counted_at if seconds < _SAME_COUNTERS else read_at

    def find(
        self, gpu: DeviceState, instance: MigInstance | None, holder: Holder, share: float
    ) -> HolderTimes:
        use, usage = measure_use(instance or gpu, holder), holder.usage or _NO_USAGE
        device = key_of(gpu, instance)
        part = self._before.get((device, holder.key))
        before = part.holder.usage or _NO_USAGE if part else _NO_USAGE
        last_since = (
            None
            if part is None or part.last_idle_since is None
            else part.last_idle_since + self.clock_change
        )
        since: float | None = None
        if usage.idle_since is not None:
            since = self._measured_start(usage.idle_since, before, last_since)
        elif self.node.state.exporter_id and usage.utilization_ratio is not None:
            pass  # the exporter measures the holder, and it is not idle
        elif part is not None and self.earlier is not None:
            since = self._estimated_start(
                use, usage, before, last_since, self.earlier.reading.read_at
            )
        elif use == "idle":
            since = self.node.reading.read_at + self.offset - self._known_idle(device, usage)
        if since is not None:
            use = "idle"
        elif use == "idle":
            use = "used"  # for some time since the last reading
        window = None if part is None else self._compare(part, usage, share)
        return HolderTimes(use, since, self._measure(part, usage, window), window)

    def _compare(self, part: HeldPart, usage: HolderUsage, share: float) -> HeldTime | None:
        """Returns what the holder did since the last reading. None if the two readings cannot be
        compared.
        """
        last, seconds = part.holder.usage or _NO_USAGE, self._seconds
        if seconds is None or seconds < _SAME_COUNTERS:
            return None if seconds is None else part.window
        # While the usage is not measured, constant counters mean nothing.
        is_measured = usage.utilization_ratio is not None and last.utilization_ratio is not None
        return HeldTime(
            held=seconds,
            share=share,
            busy=_growth(last.busy_ns, usage.busy_ns, NS) if is_measured else None,
            idle=_growth(last.idle_ns, usage.idle_ns, NS) if is_measured else None,
            waited=_growth(last.wait_ns, usage.wait_ns, NS),
            joules=_growth(last.energy_mj, usage.energy_mj, MJ),
        )

    def _measure(
        self, part: HeldPart | None, usage: HolderUsage, window: HeldTime | None
    ) -> float | None:
        """Returns the seconds for which the exporter's counters prove that the holder is idle."""
        if usage.utilization_ratio is None or usage.busy_ns is None or usage.idle_ns is None:
            return None
        if self.node.state.exporter_id:
            return (
                None
                if usage.idle_since is None
                else max(0.0, _counted_at(self.node) - usage.idle_since)
            )
        if part is None or window is None or window.busy is None or window.idle is None:
            return 0.0 if usage.busy_ns else usage.idle_ns / NS
        if window is part.window:
            return part.measured_idle
        is_covered = window.held - window.idle <= self.longest_gap
        return (
            None
            if window.busy
            else window.idle + (part.measured_idle or 0.0 if is_covered else 0.0)
        )

    def _measured_start(
        self, idle_since: float, last: HolderUsage, last_since: float | None
    ) -> float:
        """Corrects the start for the skew of the node's clock. If the idle time goes on, its start
        is kept.
        """
        since = idle_since - self._skew
        is_restarted = (
            self.earlier is not None
            and self.earlier.state.exporter_id != self.node.state.exporter_id
        )
        goes_on = is_restarted or idle_since <= (last.idle_since or 0.0) + _SAME_IDLE_TIME
        return since if last_since is None or not goes_on else min(since, last_since)

    def _estimated_start(
        self,
        use: Use,
        usage: HolderUsage,
        last: HolderUsage,
        last_since: float | None,
        last_read_at: float,
    ) -> float | None:
        """Estimates the start from two readings. Returns None if the holder was busy."""
        if self.node.reading.read_at <= last_read_at + _SAME_READING:
            return last_since
        was_busy = (
            usage.busy_ns is not None and last.busy_ns is not None and usage.busy_ns > last.busy_ns
        )
        if use != "idle" or was_busy:
            return None
        return last_read_at + self.offset if last_since is None else last_since

    def _known_idle(self, device: str, usage: HolderUsage) -> float:
        """Returns for how many seconds the holder was idle before podgpu first read it, from
        counters or Prometheus.
        """
        if self.earlier is not None:
            return 0.0  # the holder is new on a known node
        counted = None if usage.idle_ns is None else usage.idle_ns / NS
        if counted is not None and usage.busy_ns == 0:
            return counted
        observed = self.idle_for.get(device, 0.0)
        return observed if counted is None else min(observed, counted)


def _counted_at(node: NodeEntry) -> float:
    """Returns when the exporter read the counters: by its clock or, if it does not say so, by our
    monotonic clock.
    """
    return node.state.usage_at or node.reading.read_at


def _growth(before: int | None, now: int | None, scale: int) -> float | None:
    """Returns the increase of a counter. None after a reset, because the time that the counter
    covers is unknown.
    """
    return None if before is None or now is None or now < before else (now - before) / scale


def estimate_idle(part: HeldPart, seconds: float, at: float) -> float:
    """Returns the idle time in the `seconds` before the Unix time `at`. Use it only for holders
    without `idle_ns`.
    """
    if part.use != "idle":
        return 0.0
    return seconds if part.idle_since is None else max(0.0, min(seconds, at - part.idle_since))


def wasteful_since(part: HeldPart, at: float | None, idle_after: float | None) -> float | None:
    """Returns since when the holder has been idle, if at the Unix time `at` this is longer than
    --idle-after.
    """
    since = part.idle_since
    if since is None or at is None or idle_after is None:
        return None
    return since if at - since > idle_after else None


def describe_idle(holder: Workload) -> str:
    """Returns the message of the condition `idle`. `past.py` finds the holder by the message's
    start.
    """
    return f"{holder.text} holds it and does not use it"
