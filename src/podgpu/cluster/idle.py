"""Determines whether each holder uses its device, and since when it has been idle.

A holder is idle while it has a device allocated and does not use it. Where this is uncertain, it is not idle. There are
four values, from the most to the least certain:

- Measured idle time: podgpu's exporter measures it in each usage reading (`OwnedUsage.compute_idle`). The ledger
  adds it up, in total (`HolderUsage.idle_ns`) and since the holder was last busy (`HolderUsage.idle_since`).
- Proven idle time: `UsageRates` adds up measured idle time across readings of a node. It scales workloads to zero.
- Current use (`HeldPart.use`, `HeldPart.idle_since`): the measured time or, for other exporters, an estimate by
  `IdleTimes`. It is displayed and summed up. A holder that is idle for longer than --idle-after is wasteful.
- Past use: the history has the use as amounts, and the start of wasteful times as the condition `idle`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from podgpu.cluster.collect import NodeEntry
from podgpu.cluster.nodes import CLOCK_AHEAD
from podgpu.cluster.parts import HeldPart, Use, is_mps_client, key_of
from podgpu.model import NS, RESERVATION, DeviceState, GpuOrInstance, Holder, HolderUsage, MigInstance, Workload

_SAME_READING = 1e-6
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
        return "unknown"  # the driver attributes a whole sample to the busiest process, so a holder with 0 may be busy
    ratio = whole if own is None else own
    if ratio is None:
        return "idle" if usage.processes == 0 else "unknown"
    return "used" if ratio else "idle"


@dataclass
class IdleTimes:
    """Finds the use of each holder of a node from its last two readings.

    If podgpu's exporter measures the holder, the exporter's idle time is used. Otherwise, a holder is idle if its
    utilisation (or its device's) is 0 and its busy time has not increased since the last reading.
    """

    node: NodeEntry
    earlier: NodeEntry | None
    offset: float  # Unix time minus monotonic time
    clock_change: float  # change of `offset` since the last round
    idle_for: Mapping[str, float]  # idle seconds before the first reading, by `Device.key`

    def __post_init__(self) -> None:
        skew = self.node.reading.skew_seconds or 0.0
        self._skew = skew if abs(skew) > CLOCK_AHEAD else 0.0
        # Usage in the last reading and start of the idle time, by device and holder.
        self._before = {
            (part.device_key, part.holder.key): (
                part.holder.usage or _NO_USAGE,
                None if part.last_idle_since is None else part.last_idle_since + self.clock_change,
            )
            for part in (self.earlier.held if self.earlier else ())
        }

    def find(self, gpu: DeviceState, instance: MigInstance | None, holder: Holder) -> tuple[Use, float | None]:
        """Returns the holder's use and, if it is idle, since which Unix time."""
        use, usage = measure_use(instance or gpu, holder), holder.usage or _NO_USAGE
        device = key_of(gpu, instance)
        before = self._before.get((device, holder.key))
        since: float | None = None
        if usage.idle_since is not None:
            since = self._measured_start(usage.idle_since, *(before or (_NO_USAGE, None)))
        elif self.node.state.exporter_id and usage.utilization_ratio is not None:
            pass  # the exporter measures the holder, and it is not idle
        elif before is not None and self.earlier is not None:
            since = self._estimated_start(use, usage, *before, self.earlier.reading.read_at)
        elif use == "idle":
            since = self.node.reading.read_at + self.offset - self._known_idle(device, usage)
        if since is not None:
            return "idle", since
        return "used" if use == "idle" else use, None  # used for some time since the last reading

    def _measured_start(self, idle_since: float, last: HolderUsage, last_since: float | None) -> float:
        """Corrects the start for the skew of the node's clock. If the idle time goes on, its start is kept."""
        since = idle_since - self._skew
        is_restarted = self.earlier is not None and self.earlier.state.exporter_id != self.node.state.exporter_id
        goes_on = is_restarted or idle_since <= (last.idle_since or 0.0) + _SAME_IDLE_TIME
        return since if last_since is None or not goes_on else min(since, last_since)

    def _estimated_start(
        self, use: Use, usage: HolderUsage, last: HolderUsage, last_since: float | None, last_read_at: float
    ) -> float | None:
        """Estimates the start from two readings. Returns None if the holder was busy."""
        if self.node.reading.read_at <= last_read_at + _SAME_READING:
            return last_since
        was_busy = usage.busy_ns is not None and last.busy_ns is not None and usage.busy_ns > last.busy_ns
        if use != "idle" or was_busy:
            return None
        return last_read_at + self.offset if last_since is None else last_since

    def _known_idle(self, device: str, usage: HolderUsage) -> float:
        """Returns for how many seconds the holder was idle before podgpu first read it, from counters or Prometheus."""
        if self.earlier is not None:
            return 0.0  # the holder is new on a known node
        counted = None if usage.idle_ns is None else usage.idle_ns / NS
        if counted is not None and usage.busy_ns == 0:
            return counted
        observed = self.idle_for.get(device, 0.0)
        return observed if counted is None else min(observed, counted)


def wasteful_since(part: HeldPart, at: float | None, idle_after: float | None) -> float | None:
    """Returns since when the holder has been idle, if at the Unix time `at` this is longer than --idle-after."""
    since = part.idle_since
    if since is None or at is None or idle_after is None:
        return None
    return since if at - since > idle_after else None


def describe_idle(holder: Workload) -> str:
    """Returns the message of the condition `idle`. `past.py` finds the holder by the message's start."""
    return f"{holder.text} holds it and does not use it"
