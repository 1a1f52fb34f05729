"""HealthWatch judges every GPU of the node after each telemetry turn: which conditions it has, and since when.

What a condition is called and what is said of it is in `metrics/conditions.py`. What cannot be known (no such field, no
answer this time) is neither there nor fine.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from podgpu.agent.telemetry_turn import TelemetryPart
from podgpu.agent.throttling import Throttling
from podgpu.clock import WallClock
from podgpu.gpu.source import ErrorEvent
from podgpu.metrics.conditions import (
    DRIVER_AWAY,
    LOST,
    NVLINK,
    UNREADABLE,
    XID,
    order_of,
    told_by_fields,
    xid_detail,
    xid_needs_action,
)
from podgpu.metrics.families import THROTTLE_REASONS
from podgpu.model import Assignment, Device, DeviceHealth, Finding, Outcome, Value, Workload, physical

XID_SECONDS = 86_400.0
"""How long an XID makes its GPU broken after it was last told, if nothing ends it before."""
_ENERGY = 156
_DRIVER_REASONS = frozenset({"driver_not_loaded", "library_not_found", "stale_handle"})
"""Of one GPU's reading: it is the driver that does not answer."""
_BEGIN_ANEW = (*THROTTLE_REASONS, _ENERGY)
"""Fields that only grow until the GPU is reset or its driver is loaded again."""


@dataclass(slots=True)
class _Xid:
    since: float
    """Unix time."""
    last: float
    """Monotonic."""


@dataclass(slots=True)
class _Gpu:
    """What is remembered of one."""

    since: dict[str, float] = field(default_factory=dict)
    """Condition -> Unix time from which on it was seen."""
    xids: dict[int, _Xid] = field(default_factory=dict)
    """Those that need action."""
    throttling: Throttling = field(default_factory=Throttling)
    counters: dict[int, float] = field(default_factory=dict)
    links: int = 0
    """The most NVLinks that were up."""
    holders: tuple[Workload, ...] = ()
    was_away: bool = False
    """It was lost, or without a driver, when it was last looked at."""


class HealthWatch:
    """Telemetry, allocation and whoever publishes come in threads of their own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gpus: dict[str, _Gpu] = {}
        self._clock = WallClock()
        self._judged: tuple[tuple[Device, dict[str, str], tuple[str, ...]], ...] = ()
        """GPU, its conditions but for XIDs with their details, and what is fine."""

    # -- what it is told -----------------------------------------------------------------------------------------

    def take(self, part: TelemetryPart, now: float, wall: float) -> None:
        """One telemetry turn; `now` is monotonic."""
        with self._lock:
            self._look_at_clock(now, wall)
            gpus = [d for d in part.devices if not d.is_instance]
            self._gpus = {d.uuid: self._gpus.get(d.uuid) or _Gpu() for d in gpus}
            shown = {d.uuid for d in part.selected}
            readings = {r.device.uuid: r.values for r in part.readings if not r.device.is_instance}
            wired = _usual_links(part.links_up, {d.uuid: d.model for d in gpus})
            self._judged = tuple(
                (d, *self._judge(d, part, readings.get(d.uuid), wired.get(d.uuid, 0), now, wall))
                for d in gpus
                if d.uuid in shown
            )

    def note(self, events: Iterable[ErrorEvent], now: float) -> None:
        """XIDs; `now` is monotonic."""
        with self._lock:
            for event in events:
                gpu = self._gpus.get(physical(event.device))
                if gpu is not None and xid_needs_action(event.code):
                    gpu.xids.setdefault(event.code, _Xid(event.at, now)).last = now

    def hold(self, assignments: Sequence[Assignment], absent: frozenset[str]) -> None:
        """Who holds what now. Of a GPU that is gone, or lost and still listed, its last holders stay."""
        held: dict[str, dict[Workload, None]] = {}
        for assignment in assignments:
            held.setdefault(physical(assignment.device), {})[assignment.holder] = None
        with self._lock:
            for uuid, gpu in self._gpus.items():
                if uuid in held or not (uuid in absent or LOST in gpu.since):
                    gpu.holders = tuple(held.get(uuid, ()))

    def forget_xids(self, uuid: str) -> bool:
        """An operator has seen to them; False: there are none."""
        with self._lock:
            gpu = self._gpus.get(uuid)
            if gpu is None or not gpu.xids:
                return False
            gpu.xids.clear()
            return True

    def is_lost(self, uuid: str) -> bool:
        with self._lock:
            gpu = self._gpus.get(uuid)
            return gpu is not None and LOST in gpu.since

    def forget(self, uuid: str) -> None:
        with self._lock:
            self._gpus.pop(uuid, None)
            self._judged = tuple(judged for judged in self._judged if judged[0].uuid != uuid)

    # -- what it comes to ----------------------------------------------------------------------------------------

    def report(self, assignments: Sequence[Assignment], now: float, wall: float) -> tuple[DeviceHealth, ...]:
        """`assignments`: who holds what now, which is told of elsewhere."""
        held = {physical(assignment.device) for assignment in assignments}
        with self._lock:
            self._look_at_clock(now, wall)
            return tuple(self._report(*judged, held=judged[0].uuid in held, now=now) for judged in self._judged)

    def _report(
        self, device: Device, found: Mapping[str, str], fine: tuple[str, ...], *, held: bool, now: float
    ) -> DeviceHealth:
        gpu = self._gpus[device.uuid]
        gpu.xids = {xid: seen for xid, seen in gpu.xids.items() if now - seen.last < XID_SECONDS}
        findings = [Finding(condition, gpu.since[condition], detail) for condition, detail in found.items()]
        if gpu.xids:
            findings.append(Finding(XID, min(seen.since for seen in gpu.xids.values()), xid_detail(gpu.xids)))
            fine = tuple(condition for condition in fine if condition != XID)
        return DeviceHealth(
            device,
            tuple(sorted(findings, key=lambda finding: order_of(finding.condition))),
            tuple(sorted(fine, key=order_of)),
            () if held or LOST not in found else gpu.holders,
        )

    def _look_at_clock(self, now: float, wall: float) -> None:
        """Moments stay as long ago as they were when the wall clock was set."""
        step = self._clock.step(now, wall)
        if step:
            for gpu in self._gpus.values():
                gpu.since = {condition: since + step for condition, since in gpu.since.items()}
                for seen in gpu.xids.values():
                    seen.since += step

    # -- judgement -----------------------------------------------------------------------------------------------

    def _judge(
        self,
        device: Device,
        part: TelemetryPart,
        values: Mapping[int, Value] | None,
        usual_links: int,
        now: float,
        wall: float,
    ) -> tuple[dict[str, str], tuple[str, ...]]:
        gpu = self._gpus[device.uuid]
        told: dict[str, str | None] = {}
        """Condition -> its detail; None: it is not there."""
        absence = _absence(device, part)
        told[LOST] = told[UNREADABLE] = told[DRIVER_AWAY] = None
        if absence is not None:
            told[absence[0]] = absence[1]
        gpu.was_away = self._came_back(gpu, absence, values)
        since = {}
        if values is not None:
            if device.uuid not in part.mute:
                told[XID] = None
            told |= {condition: "" if there else None for condition, there in told_by_fields(values).items()}
            for condition, lasted in gpu.throttling.look(values, now).items():
                told[condition] = None if lasted is None else ""
                since[condition] = wall - (lasted or 0.0)
            up = part.links_up.get(device.uuid)
            if up is not None and not device.mig_enabled:  # in MIG mode its links are not used
                gpu.links = max(gpu.links, up)
                if gpu.links:  # one without a bridge never has any
                    wired = max(gpu.links, usual_links)
                    told[NVLINK] = f"{wired - up}/{wired}" if up < wired else None
        found = {condition: detail for condition, detail in told.items() if detail is not None}
        kept = {c: moment for c, moment in gpu.since.items() if c in found or c not in told}
        gpu.since = {c: since.get(c, wall) for c in found} | kept
        return found, tuple(condition for condition, detail in told.items() if detail is None)

    @staticmethod
    def _came_back(gpu: _Gpu, absence: tuple[str, str] | None, values: Mapping[int, Value] | None) -> bool:
        """Ends the XIDs of a GPU that was reset, or whose driver was loaded again; whether it is away now."""
        if values is None:
            return gpu.was_away or (absence is not None and (absence[0] == LOST or absence[1] in _DRIVER_REASONS))
        counters = {i: v for i in _BEGIN_ANEW if isinstance(v := values.get(i), int | float)}
        if gpu.was_away or any(value < gpu.counters.get(i, value) for i, value in counters.items()):
            gpu.xids.clear()
            gpu.throttling = Throttling()
        gpu.counters = counters
        return False


def _absence(device: Device, part: TelemetryPart) -> tuple[str, str] | None:
    """Why nothing can be read of the GPU, as a condition with its detail; None: it was read, or nobody tried."""
    inventory = part.outcomes[0] if part.outcomes else None
    if inventory is not None and not inventory.ok:
        return (LOST, "") if device.uuid in part.absent else (DRIVER_AWAY, inventory.error)
    if device.uuid in part.absent:
        hung = device.index >= 0 and any(_is_hung(outcome, device.index) for outcome in part.outcomes)
        return (UNREADABLE, "hung") if hung else (LOST, "")
    outcome = next((o for o in part.outcomes if o.device == device.uuid), None)
    if outcome is None or outcome.ok:
        return None
    if outcome.error not in (*_DRIVER_REASONS, "gpu_lost"):
        return UNREADABLE, "hung" if outcome.error == "deadline" else outcome.error
    others_answer = any(o.ok for o in part.outcomes if o.device)
    return (LOST, "") if others_answer or outcome.error == "gpu_lost" else (DRIVER_AWAY, outcome.error)


def _is_hung(outcome: Outcome, index: int) -> bool:
    """One that the driver lists under this number and that has not said who it is."""
    return outcome.source == f"gpu{index}" and outcome.error == "hung" and not outcome.device


def _usual_links(up: Mapping[str, int], models: Mapping[str, str]) -> dict[str, int]:
    """UUID -> how many links more than half of the GPUs of its model have up: GPUs on one board are wired alike."""
    usual: dict[str, int] = {}
    for model in {models[uuid] for uuid in up if uuid in models}:
        counts = sorted((up[uuid] for uuid in up if models.get(uuid) == model), reverse=True)
        usual[model] = counts[len(counts) // 2] if len(counts) > 2 else 0
    return {uuid: usual.get(models.get(uuid, ""), 0) for uuid in up}
