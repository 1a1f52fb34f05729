"""BusyDivision decides how the busy time of a shared GPU is divided among its processes, and says by which method.

The driver's samples are the floor: they are always there. The context-switch log is used while processes of several
containers are on a device, the log answers, and nothing about it is in doubt; otherwise that window is told by samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from podgpu.errors import DeviceLost, DriverGone, SourceError
from podgpu.gpu.nvml.driver import NvmlDriver
from podgpu.gpu.nvml.switches.attribution import Habits, Residency, Sample, longest_saving, young_first
from podgpu.gpu.nvml.switches.listener import Listener
from podgpu.gpu.nvml.switches.opening import Opening
from podgpu.gpu.nvml.switches.records import HIDDEN_PID, KERNEL_PID, Doubt
from podgpu.model import Device, DeviceUsage, ProcessUsage

_log = logging.getLogger(__name__)
_LINGER_SECONDS = 60.0
"""How long a log is kept open after the GPU is no longer shared: jobs come and go."""
_FIRST_PAUSE_SECONDS = 60.0
_LONGEST_PAUSE_SECONDS = 3600.0
_UNKNOWN_PART = 50
"""Of a window, one part in this many may be unaccounted for (2 %)."""
_HIDDEN_PART = 100
"""And one in this many may belong to processes that are hidden from us, or that no list names."""
_SATURATED_PART = 50
"""Where all but one part in this many of all residency was work, there is no idle tail to find."""
_SATURATED_NS = 30 * 10**9
"""Once it has been so for this long it is taken to go on: half of what watching costs is looking for such tails."""


class BusyDivision:
    """Of one GPU and its MIG instances; from one worker."""

    def __init__(
        self,
        driver: NvmlDriver,
        handle: Any,
        opening: Opening,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._driver = driver
        self._handle = handle
        self._opening = opening
        self._clock = clock
        self._wall = wall
        self._name = ""
        self._listener: Listener | None = None
        self._habits = Habits()
        self._shared: frozenset[str] = frozenset()
        self._listed: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
        """The pids listed a turn ago, and now."""
        self._shared_at = float("-inf")
        self._retry_at = float("-inf")
        self._pause = _FIRST_PAUSE_SECONDS
        self._saturated_ns = 0
        """For how long nobody has been resident without work."""
        self.doubts: list[str] = []
        """Reason words of this turn."""
        self.fallback = ""
        """Why a shared device is told by samples at present, in words."""
        self._fallback_reason = ""

    def begin(self, gpu: Device, running: Sequence[ProcessUsage] | None, shared: Collection[str]) -> None:
        """A new turn: who runs on the GPU, and the keys of devices that several containers run on."""
        self.doubts = []
        self._name = f"GPU {gpu.index} ({gpu.uuid})"
        self._listed = self._listed[1], frozenset(process.pid for process in running or ())
        ours = frozenset(key for key in shared if key == gpu.uuid or key.startswith(f"{gpu.uuid}/"))
        self._shared = frozenset() if running is None else ours
        now = self._clock()
        if self._shared and any(process.mps for process in running or ()):
            self._shared = frozenset()
            self._fall_back(_OfOneWindow("mps", "it is shared by MPS, where all clients are one context to the driver"))
        elif self._shared:
            self._shared_at = now
            if self._listener is None and now >= self._retry_at:
                self._open(gpu)
        else:
            self._saturated_ns = 0
            self._settle()
        if self._listener is not None and now - self._shared_at > _LINGER_SECONDS:
            self.close()

    def divide(self, usage: DeviceUsage, until: float | None) -> DeviceUsage:
        """The window's usage as context switches tell it, where they do; `until`: Unix time of its end."""
        usage = replace(usage, bounded=True)
        if self._listener is None or until is None or not usage.window_ns:
            return usage
        try:
            residency, samples = self._listener.window(until, usage.device.gi_id)
            if usage.busy_ns is None or usage.device.key not in self._shared:
                return usage
            if not _covers(residency, usage.window_ns, self._listener.began):
                return usage
            _check(residency, usage.window_ns, self._listed[0] | self._listed[1])
        except Doubt as e:
            self._fall_back(e)
            return usage
        self._settle()
        self._pause = _FIRST_PAUSE_SECONDS
        return self._divided(usage, usage.busy_ns, residency, samples)

    def close(self) -> None:
        """Also before the driver is let go of: an open log keeps it from being unloaded."""
        if self._listener is not None:
            self._listener.close()
            self._listener, self._habits = None, Habits()
            _log.info("%s: the context-switch log is closed", self._name)

    def _open(self, gpu: Device) -> None:
        version, architecture = identify(self._driver, self._handle, gpu)
        try:
            self._listener = self._opening.listener(gpu, version, architecture, self._wall)
            self._saturated_ns = 0
        except Doubt as e:
            self._fall_back(e)
        else:
            why = self._opening.why_unsampled(architecture)
            way = f"without busy samples, since {why}" if why else "with busy samples"
            _log.info("%s: several containers share it; its context switches are read (%s)", self._name, way)

    def _fall_back(self, doubt: Doubt) -> None:
        """Small doubts cost a window, others the log for a while: one that is broken is not asked every second."""
        self.doubts.append(doubt.reason)
        if self._fallback_reason != doubt.reason:
            _log.warning("%s: for now the driver's samples say who keeps it busy: %s", self._name, doubt)
        self._fallback_reason, self.fallback = doubt.reason, f"{self._name}: {doubt}"
        if isinstance(doubt, _OfOneWindow):
            return
        self.close()
        self._retry_at = self._clock() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)

    def _settle(self) -> None:
        self._fallback_reason = self.fallback = ""

    def _divided(
        self, usage: DeviceUsage, busy_ns: int, residency: Residency, samples: Sequence[Sample]
    ) -> DeviceUsage:
        worked = max(0, busy_ns - residency.switching)
        resident = residency.of_processes()
        sampled = self._listener is not None and self._listener.sampled
        if self._listener is not None and sampled:
            self._habits.learn(residency, samples)
            saturated = worked * _SATURATED_PART >= sum(resident.values()) * (_SATURATED_PART - 1)
            self._saturated_ns = self._saturated_ns + residency.window if saturated else 0
            self._listener.rests = self._saturated_ns > _SATURATED_NS
        figures = self._habits.estimate(residency, worked, samples) if sampled else young_first(residency, worked)
        return replace(
            usage,
            process_busy_ns={pid: ns for pid, ns in figures.items() if pid not in (HIDDEN_PID, KERNEL_PID)},
            method="exact" if sampled else "switches",
            resident_ns=resident,
            switching_ns=residency.switching,
            saving_ns=longest_saving(residency),
        )


def identify(driver: NvmlDriver, handle: Any, gpu: Device) -> tuple[str, int | None]:
    """The driver's version and the GPU's architecture, by which a log is opened. None for one that is cut by MIG:
    nobody has measured the busy register there, nor what a switch takes."""
    version = str(driver.call("nvmlSystemGetDriverVersion"))
    if gpu.mig_enabled:
        return version, None
    try:
        return version, int(driver.call("nvmlDeviceGetArchitecture", handle))
    except (DeviceLost, DriverGone):
        raise
    except SourceError:
        return version, None


class _OfOneWindow(Doubt):
    """A doubt that says nothing against the log itself."""


def _covers(residency: Residency, window_ns: int, began: int) -> bool:
    """False where it has not seen a switch yet, or began to listen in the middle: no doubt, it just cannot tell."""
    in_the_middle = residency.since == began and residency.window * _UNKNOWN_PART < window_ns * (_UNKNOWN_PART - 1)
    return bool(residency.stays) and not in_the_middle


def _check(residency: Residency, window_ns: int, listed: Collection[int]) -> None:
    missing = max(residency.unknown, abs(residency.window - window_ns))
    if missing * _UNKNOWN_PART > window_ns:
        percent = 100 * missing // window_ns
        raise _OfOneWindow("unaccounted_time", f"{percent} % of the time is unaccounted for in the context-switch log")
    resident = residency.of_processes()
    if resident.get(HIDDEN_PID, 0) * _HIDDEN_PART > window_ns:
        raise _OfOneWindow(
            "hidden_process",
            "processes of other users run on it, and only CAP_SYS_ADMIN can see who they are"
            " (chart: exporter.usage.from: exact)",
        )
    unlisted = sum(ns for pid, ns in resident.items() if pid not in listed and pid not in (HIDDEN_PID, KERNEL_PID))
    if unlisted * _HIDDEN_PART > window_ns:
        raise _OfOneWindow("unlisted_process", "a process runs on it that the driver does not list")
