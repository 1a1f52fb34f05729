"""Splits the busy time of a shared GPU among its processes.

The driver's context-switch log shows which process used the GPU. The log is read only while
processes of several containers run on a device. If the log is missing or inconsistent, the driver's
utilization samples are used.
"""

from __future__ import annotations

import logging
import random
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from podgpu.metrics.usage_methods import LOG_FAILED, NO_CAPABILITY, NOT_MEASURED
from podgpu.model import (
    HIDDEN_PID,
    Device,
    DeviceUsage,
    ProcessUsage,
    ProcessWaits,
    SwitchStatus,
    WantedMethod,
    select_keys,
)
from podgpu.node.gpu.nvml.driver import CallGuard, DeviceHandle, NvmlDriver
from podgpu.node.gpu.nvml.switch_attribution import (
    KERNEL_PID,
    UNKNOWN_PIDS,
    WHOLE_GPU,
    BusySample,
    BusyShareModel,
    RecordDecoder,
    Residency,
    SwitchCosts,
    SwitchLogError,
    Timeline,
    compute_max_saving,
    estimate_without_samples,
)
from podgpu.node.gpu.nvml.switch_log import ContextSwitchLog, check_driver
from podgpu.node.gpu.nvml.switch_waiting import WaitEstimator
from podgpu.node.gpu.source import FindProcesses, find_no_processes

_log = logging.getLogger(__name__)


class SwitchLog(Protocol):
    """Interface of a context-switch log.

    `ContextSwitchLog` and the simulated driver implement it.
    """

    def drain(self) -> bytes: ...
    def now(self) -> int: ...
    def is_busy(self) -> bool: ...
    def close(self) -> None: ...


_SAMPLE_SECONDS = 0.06
"""Mean interval of busy samples. A sample costs 0.5 ms of CPU in the driver.

More samples would not improve the results over half a minute.
"""
_DRAIN_SECONDS = 2.0
"""Interval at which the log is read.

At 5,000 switches per second, the log is full after 3 seconds.
"""
_SHORT_DRAIN_SECONDS = 0.15
"""The same while new processes appear, because they may end soon.

A process is looked up when the log first names it, and this must happen while it runs.
"""
_NEW_PROCESS_SECONDS = 30.0
"""How long the log is read at the shorter interval after a new process."""
_MENTION_SECONDS = 60.0
"""How long it is remembered that a process was looked up. Pids are reused."""
_MAX_UNREAD_SECONDS = 90.0
"""The listener closes itself if `take_window` is not called for this long.

The records use memory.
"""


@dataclass(slots=True)
class _GpuClock:
    """Converts between Unix time in seconds and the GPU's clock in nanoseconds."""

    _log: SwitchLog
    _wall: Callable[[], float]
    _offset: int = 0  # nanoseconds from Unix time to the GPU's clock

    def read(self) -> int:
        """Returns the GPU's time. Corrects the conversion, because the clocks drift apart."""
        before = self._wall()
        gpu_time = self._log.now()
        after = self._wall()
        self._offset = gpu_time - int((before + after) / 2 * 1e9)
        return gpu_time

    def to_gpu_time(self, unix_time: float) -> int:
        return int(unix_time * 1e9) + self._offset

    def to_unix_time(self, gpu_time: int) -> float:
        return (gpu_time - self._offset) / 1e9


@dataclass(slots=True)
class _BusySampler:
    """Samples whether the engine is busy."""

    _log: SwitchLog
    _wall: Callable[[], float]
    # For these, see `SwitchListener`.
    no_samples_reason: str
    limit: str
    _needs_samples: bool
    # True while no samples are taken, because all contexts were busy all the time.
    is_paused: bool = False
    samples: list[BusySample] = field(default_factory=list)

    def take(self, clock: _GpuClock) -> None:
        if self.no_samples_reason or self.is_paused:
            return

        before = self._wall()
        try:
            busy = self._log.is_busy()
        except SwitchLogError as e:
            if self._needs_samples:
                raise
            self.no_samples_reason = str(e)
            self.limit = LOG_FAILED
            self.samples = []
            return

        moment = clock.to_gpu_time((before + self._wall()) / 2)
        self.samples.append((moment, busy))

    def take_until(self, end: int) -> list[BusySample]:
        """Returns the samples before the GPU time `end`, and keeps the others."""
        samples = [sample for sample in self.samples if sample[0] < end]
        self.samples = [sample for sample in self.samples if sample[0] >= end]
        return samples


@dataclass(slots=True)
class _NamedProcesses:
    """Looks up processes when the log first names them, unless the driver lists them."""

    listed: frozenset[int] = frozenset()  # pids that the driver lists
    find: FindProcesses = find_no_processes
    # When the log last named each process, by pid.
    _mentioned_at: dict[int, float] = field(default_factory=dict)
    # Pids of processes that the driver did not list, but that `find` found.
    existing: set[int] = field(default_factory=set)
    new_at: float = float("-inf")  # when the log last named a new process

    def look_up(self, named: set[int], now: float) -> None:
        """`named`: pids in the new part of the log."""
        new = named - self._mentioned_at.keys() - self.listed
        if new:
            self.existing.update(self.find(new))
            self.new_at = now
        self._mentioned_at.update(dict.fromkeys(named, now))

        for pid, mentioned_at in list(self._mentioned_at.items()):
            if now - mentioned_at > _MENTION_SECONDS:
                del self._mentioned_at[pid]
                self.existing.discard(pid)


@dataclass(slots=True)
class _Timelines:
    """The switches of each engine of one GPU since the last window."""

    _began: int
    _costs: SwitchCosts
    _records: RecordDecoder = field(default_factory=RecordDecoder)
    _timelines: dict[int, Timeline] = field(default_factory=dict)  # by MIG instance, or WHOLE_GPU
    # The first one in the log, by MIG instance.
    _compute_instances: dict[int, int] = field(default_factory=dict)

    def add(self, chunk: bytes) -> set[int]:
        """Adds a part of the log. Returns the pids in it."""
        named: set[int] = set()
        for instance, compute_instance, times, pids in self._records.decode(chunk):
            # `~pid` means that it was saved.
            named.update(pid if pid >= 0 else ~pid for pid in set(pids))
            self.find(instance).add(times, pids)

            first = self._compute_instances.setdefault(instance, compute_instance)
            if first != compute_instance:
                raise SwitchLogError(
                    "several_compute_instances",
                    f"GPU instance {instance} runs several compute instances at once, "
                    "so busy time cannot be divided",
                )
        return named - UNKNOWN_PIDS

    def find(self, instance: int) -> Timeline:
        return self._timelines.setdefault(instance, Timeline(self._began, self._costs))

    def clear(self) -> None:
        self._timelines = {}


class SwitchListener:
    """Reads one GPU's log in a separate thread. Also samples whether the GPU is busy.

    The thread is needed because the log has a fixed size, and because samples must be taken at
    random times. After a SwitchLogError, the listener is closed and cannot be used again.
    """

    def __init__(
        self,
        log: SwitchLog,
        costs: SwitchCosts,
        *,
        no_samples_reason: str,
        limit: str,
        needs_samples: bool,
        wall: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
        in_background: bool = True,
    ) -> None:
        """Opens the timeline at the current time of the GPU.

        `no_samples_reason`: reason why no busy samples are taken, or an empty string. `limit`: see
        `DeviceTotals.method_limit`. `needs_samples`: if False, the log is also used if samples
        fail. `in_background`: if False, the caller must call `step`.
        """
        self._log = log
        self._gpu_clock = _GpuClock(log, wall)
        self.began = self._gpu_clock.read()
        self._log_time = self.began  # GPU time up to which the log was read
        self.sampler = _BusySampler(log, wall, no_samples_reason, limit, needs_samples)
        self._timelines = _Timelines(self.began, costs)
        self._processes = _NamedProcesses()

        self._clock = clock
        self._drained_at = clock()
        self._window_taken_at = self._drained_at

        self._lock = threading.Lock()
        self._error: SwitchLogError | None = None  # why the listener has ended
        self._ended = threading.Event()

        if in_background:
            threading.Thread(target=self._run, name="switches", daemon=True).start()

    @property
    def no_samples_reason(self) -> str:
        return self.sampler.no_samples_reason

    @property
    def limit(self) -> str:
        return self.sampler.limit

    def follow(self, listed: frozenset[int], find: FindProcesses) -> None:
        """Sets the pids that the driver lists. `find`: looks up processes that it does not."""
        with self._lock:
            self._processes.listed = listed
            self._processes.find = find

    def list_existing(self) -> frozenset[int]:
        """Returns the processes that the driver did not list, but that were found."""
        with self._lock:
            return frozenset(self._processes.existing)

    def take_window(
        self, until: float, instance: int | None = None
    ) -> tuple[Residency, list[BusySample]]:
        """Returns residency and samples since the end of the last window.

        `until`: end of the window, as Unix time. `instance`: MIG instance, or None for the whole
        GPU. Raises SwitchLogError.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            try:
                self._drain()
            except SwitchLogError as e:
                self._end(e)
                raise
            self._window_taken_at = self._clock()

            timeline = self._timelines.find(WHOLE_GPU if instance is None else instance)
            # The window neither begins before the last one, nor ends after the log.
            end = max(timeline.now, min(self.to_gpu_time(until), self._log_time))
            return timeline.take_window(end), self.sampler.take_until(end)

    def to_gpu_time(self, moment: float) -> int:
        """Converts a Unix time to nanoseconds of the GPU's clock."""
        return self._gpu_clock.to_gpu_time(moment)

    def to_unix_time(self, gpu_time: int) -> float:
        """Converts nanoseconds of the GPU's clock to a Unix time."""
        return self._gpu_clock.to_unix_time(gpu_time)

    def step(self) -> float:
        """Takes a sample, drains the log if due, and returns the seconds until the next step."""
        with self._lock:
            # The listener has ended, so `_run` does not wait.
            if self._error is not None:
                return 0.0
            try:
                self.sampler.take(self._gpu_clock)
                if self._seconds_until_drain() <= 0:
                    self._drain()
                    self._check_is_used()
            except SwitchLogError as e:
                self._end(e)

            if self.no_samples_reason:
                return self._seconds_until_drain()
            # Random, because periodic loads would distort regular samples.
            return random.uniform(0.5, 1.5) * _SAMPLE_SECONDS

    def close(self) -> None:
        with self._lock:
            if self._error is None:
                self._end(SwitchLogError("closed", "the context-switch log is closed"))

    def _run(self) -> None:
        while not self._ended.wait(self.step()):
            pass

    def _check_is_used(self) -> None:
        if self._clock() - self._window_taken_at > _MAX_UNREAD_SECONDS:
            raise SwitchLogError(
                "not_taken", f"context switches were not used for {_MAX_UNREAD_SECONDS:g} s"
            )

    def _seconds_until_drain(self) -> float:
        now = self._clock()
        interval = _DRAIN_SECONDS
        if now - self._processes.new_at < _NEW_PROCESS_SECONDS:
            interval = _SHORT_DRAIN_SECONDS
        return self._drained_at + interval - now

    def _drain(self) -> None:
        # The time is read first, because the log contains all switches until then.
        self._log_time = self._gpu_clock.read()
        named = self._timelines.add(self._log.drain())
        self._drained_at = self._clock()
        self._processes.look_up(named, self._drained_at)

    def _end(self, error: SwitchLogError) -> None:
        self._error = error
        self._ended.set()
        # They use memory as long as somebody has the listener.
        self._timelines.clear()
        self.sampler.samples = []
        self._log.close()


_CAP_SYS_ADMIN = 21
_INITIAL_USER_NAMESPACE = ["0", "0", "4294967295"]


MEASURED_ARCHITECTURES = {9: ("Hopper (GH100)", SwitchCosts(lead=64_000, slice_work=2_055_000))}
"""Name and measured costs by NVML's architecture number.

The busy register is read only on these architectures. The costs were measured on an H200 with
driver 580. In seven traces of 2,800 to 53,000 switches, a context was resident for 63 to 67 µs more
than it worked. The busy bit differed from NVML's utilization by at most one percentage point. In
4,400 time slices, kernels recorded when they ran. They started 21 to 52 µs after the switch-in and
were preempted after 2,100 µs. Saving a context took 68 µs (one warp per multiprocessor) to 107 µs
(all memory of the multiprocessors in use), and 121 µs for PyTorch.
"""
MEASURED_BRANCHES = frozenset({580})
"""Driver branches with which the log was measured. `auto` uses no other ones."""


def open_switch_log(device: Device, driver_version: str) -> SwitchLog:
    """Opens the context-switch log of a GPU. Raises SwitchLogError if this fails."""
    check_driver(driver_version)
    minor = (device.index or 0) if device.minor is None else device.minor
    return ContextSwitchLog(device.pci_bus_id, minor)


def has_sys_admin() -> bool:
    """Returns True if this process has CAP_SYS_ADMIN in the initial user namespace."""
    try:
        status = Path("/proc/self/status").read_text()
        uids = Path("/proc/self/uid_map").read_text()
    except OSError:
        return False

    effective = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    if effective is None or uids.split() != _INITIAL_USER_NAMESPACE:
        return False
    capabilities = int(effective[1], 16)
    return bool(capabilities >> _CAP_SYS_ADMIN & 1)


class LogNotMeasured(SwitchLogError):
    """`auto` does not use the log of this GPU, because nobody has measured it."""


@dataclass(frozen=True, slots=True)
class SwitchLogFactory:
    """Opens context-switch logs. `wanted` is the value of `--usage-from`."""

    wanted: WantedMethod = "samples"
    open_log: Callable[[Device, str], SwitchLog] = open_switch_log
    """Opens the log of a GPU, given the GPU and the driver's version. Raises SwitchLogError."""
    privileged: Callable[[], bool] = has_sys_admin
    make_listener: Callable[..., SwitchListener] = SwitchListener

    @property
    def is_auto(self) -> bool:
        return self.wanted == "auto"

    def open_listener(
        self, driver: NvmlDriver, gpu: DeviceHandle, wall: Callable[[], float]
    ) -> SwitchListener:
        """Opens the log of a GPU and starts a listener. Raises SwitchLogError if this fails."""
        architecture = 0
        # Switching costs were not measured in MIG mode.
        if not gpu.device.mig_enabled:
            with CallGuard[str]().catch():
                architecture = int(driver.call("nvmlDeviceGetArchitecture", gpu.handle))

        version = str(driver.call("nvmlSystemGetDriverVersion"))
        if self.is_auto:
            _require_measured(architecture, version)

        _, costs = MEASURED_ARCHITECTURES.get(architecture, ("", SwitchCosts()))
        limit, no_samples_reason = self._explain_unsampled(architecture)
        return self.make_listener(
            self.open_log(gpu.device, version),
            costs,
            no_samples_reason=no_samples_reason,
            limit=limit,
            needs_samples=not self.is_auto,
            wall=wall,
        )

    def _explain_unsampled(self, architecture: int) -> tuple[str, str]:
        """Returns why no busy samples are taken: `DeviceTotals.method_limit` and a text."""
        # Without CAP_SYS_ADMIN, each read fails and writes a line to the kernel log.
        if not self.privileged():
            return NO_CAPABILITY, "CAP_SYS_ADMIN is missing (chart: exporter.usage.from: exact)"
        if self.wanted == "switches":
            return "", "--usage-from is switches"
        if architecture not in MEASURED_ARCHITECTURES:
            text = f"the busy register is only read on {_name_architectures()} without MIG"
            return NOT_MEASURED, text
        return "", ""


def _name_architectures() -> str:
    return ", ".join(name for name, _ in MEASURED_ARCHITECTURES.values())


def _require_measured(architecture: int, driver_version: str) -> None:
    """Raises LogNotMeasured for other GPUs and drivers than those that were measured."""
    branch, _, _ = driver_version.partition(".")
    if architecture in MEASURED_ARCHITECTURES and branch in map(str, MEASURED_BRANCHES):
        return

    branches = ", ".join(map(str, sorted(MEASURED_BRANCHES)))
    raise LogNotMeasured(
        NOT_MEASURED,
        f"auto reads context switches only on {_name_architectures()} without MIG and with driver "
        f"{branches}, because they were not measured elsewhere",
    )


_LINGER_SECONDS = 60.0
"""How long the log stays in use when the GPU is no longer shared.

Most GPUs are soon shared again, and short-lived processes are not in every list.
"""
_RETRY_SECONDS = 60.0
_STEADY_SECONDS = 60.0
"""How long the log must have been used before another fallback is logged."""
_UNKNOWN_PART = 50
"""At most 1/50 of a window may be missing in the log.

Contexts count as completely busy if they were idle for at most 1/50 of their residency.
"""
_UNLISTED_PART = 100
"""At most 1/100 of a window may belong to processes that do not exist for the driver and /proc."""
_SATURATED_NS = 30 * 10**9
"""Sampling pauses if contexts were completely busy for this long.

Sampling causes half of the cost.
"""


class _WindowError(SwitchLogError):
    """The log cannot be used for the current window. The log stays open for later windows."""


@dataclass(slots=True)
class _OpenLog:
    """The open log of one GPU, and what was learnt from it."""

    listener: SwitchListener
    # Estimators by device key.
    waits: dict[str, WaitEstimator] = field(default_factory=partial(defaultdict, WaitEstimator))
    _model: BusyShareModel = field(default_factory=BusyShareModel)
    _saturated_ns: int = 0  # how long contexts have been completely busy

    def divide(
        self, residency: Residency, worked: int, samples: Sequence[BusySample]
    ) -> dict[int, int]:
        """Divides the time in which processes worked among them, by pid."""
        if self.listener.no_samples_reason:
            return estimate_without_samples(residency, worked)
        self._model.learn(residency, samples)
        self._pause_if_saturated(residency, worked)
        return self._model.estimate(residency, worked, samples)

    def _pause_if_saturated(self, residency: Residency, worked: int) -> None:
        if _covers(worked, sum(residency.resident.values())):
            self._saturated_ns += residency.window
        else:
            self._saturated_ns = 0
        self.listener.sampler.is_paused = self._saturated_ns > _SATURATED_NS


@dataclass(slots=True)
class _LogReport:
    """Reports whether the log of one GPU can be used: in the status, the metrics and podgpu's log.

    Logs each reason once, until the log has been used for some time without a failure.
    """

    _clock: Callable[[], float]
    _is_auto: bool  # if True, it is no failure of a source that the log cannot be used
    name: str = ""  # of the GPU
    status: SwitchStatus = field(default_factory=SwitchStatus)
    limit: str = ""  # `DeviceTotals.method_limit`
    _logged: set[str] = field(default_factory=set)  # reasons
    _failed_at: float = float("-inf")

    def succeed(self, limit: str) -> None:
        self.status = SwitchStatus(self.status.errors)
        self.limit = limit
        steady_seconds = self._clock() - self._failed_at
        if self._logged and steady_seconds >= _STEADY_SECONDS:
            self._logged.clear()
            _log.info("%s: processes are measured by context switches again", self.name)

    def fail(self, error: SwitchLogError) -> None:
        """Reports that processes are measured by the driver's samples."""
        self._failed_at = self._clock()
        self.limit = LOG_FAILED

        errors = (*self.status.errors, error.reason)
        level = logging.WARNING
        if isinstance(error, LogNotMeasured):
            self.limit = NOT_MEASURED
            errors = self.status.errors
            level = logging.INFO
        if error.reason not in self._logged:
            self._logged.add(error.reason)
            text = "%s: processes are temporarily measured by the driver's samples: %s"
            _log.log(level, text, self.name, error)

        if self._is_auto:
            self.status = SwitchStatus(errors)
        else:
            self.status = SwitchStatus(errors, error.reason, f"{self.name}: {error}")


class BusyTimeSplitter:
    """Splits the busy time of one GPU and its MIG instances among their processes.

    Not thread-safe.
    """

    def __init__(
        self,
        open_listener: Callable[[DeviceHandle], SwitchListener],
        clock: Callable[[], float],
        is_auto: bool,
    ) -> None:
        """`is_auto`: see `_LogReport`."""
        self._clock = clock
        self._open_listener = open_listener
        self._report = _LogReport(clock, is_auto)
        self._log: _OpenLog | None = None
        self._retry_at = float("-inf")

        # When each device was last shared, by device key. Only devices that were shared recently.
        self._shared_at: dict[str, float] = {}
        self._previous_pids: frozenset[int] = frozenset()
        self._pids: frozenset[int] = frozenset()

    @property
    def status(self) -> SwitchStatus:
        return self._report.status

    def begin_reading(
        self,
        target: DeviceHandle,
        running: Sequence[ProcessUsage] | None,
        shared: Collection[str],
        find: FindProcesses,
    ) -> None:
        """Opens the log if the GPU is shared, and closes it some time after the sharing has ended.

        `running`: processes on the GPU. `shared`: keys of devices with processes of several
        containers. `find`: see `Telemetry.usage`.
        """
        gpu = target.device
        self._report.name = gpu.text
        self._report.status = replace(self.status, errors=())
        self._previous_pids = self._pids
        self._pids = frozenset(process.pid for process in running or ())
        self._update_shared(gpu, running is not None, shared)

        if not self._shared_at:
            self._report.status = SwitchStatus()
            self.close()
        elif any(process.mps for process in running or ()):
            self._shared_at = {}
            self.close()
            self._fall_back(
                _WindowError("mps", "it is shared by MPS, where all clients use the same context")
            )
        elif self._log is None and self._clock() >= self._retry_at:
            self._open(target)

        if self._log is not None:
            self._log.listener.follow(self._pids, find)

    def _update_shared(self, gpu: Device, sees_processes: bool, shared: Collection[str]) -> None:
        """Updates which devices of this GPU are, or were recently, shared."""
        now = self._clock()
        if not sees_processes:
            self._shared_at = {}
            return

        for key in shared:
            if key == gpu.uuid or key.startswith(f"{gpu.uuid}/"):
                self._shared_at[key] = now

        for key, shared_at in list(self._shared_at.items()):
            if now - shared_at > _LINGER_SECONDS:
                del self._shared_at[key]

    def _open(self, target: DeviceHandle) -> None:
        try:
            listener = self._open_listener(target)
        except SwitchLogError as e:
            self._fall_back(e)
            return

        self._log = _OpenLog(listener)
        reason = listener.no_samples_reason
        note = f"; busy samples are not available: {reason}" if reason else ""
        _log.info(
            "%s is shared by several containers: reading its context switches%s",
            self._report.name,
            note,
        )

    def split(self, usage: DeviceUsage, until: float | None) -> DeviceUsage:
        """Returns the usage with the busy time of each process.

        If the log cannot be used, these times are missing. `until`: end of the window, as Unix
        time.
        """
        usage = replace(usage, bounded=True)
        key = usage.device.key
        if key in self._shared_at:
            usage = replace(usage, method_limit=self._report.limit)
        log = self._log
        if log is None or until is None or not usage.window_ns:
            return usage

        # A window is taken even if it cannot be used, so that the next one begins at its end.
        listener = log.listener
        try:
            residency, samples = listener.take_window(until, usage.device.gi_id)
            usage = _add_evidence(usage, residency, listener)
            if usage.busy_ns is None or not self._is_usable(residency, usage, listener):
                return usage
            known = self._previous_pids | self._pids | listener.list_existing() | {HIDDEN_PID}
            _check_is_complete(residency, usage.window_ns, usage.busy_ns, known)
        except SwitchLogError as e:
            self._fall_back(e)
            return replace(usage, method_limit=self._report.limit)

        self._report.succeed(listener.limit)
        worked = max(0, usage.busy_ns - residency.switching)
        busy_ns = log.divide(residency, worked, samples)
        waits = log.waits[key].add(residency, busy_ns)
        return replace(
            usage,
            process_busy_ns=select_keys(busy_ns, known),
            method="switches" if listener.no_samples_reason else "exact",
            method_limit=self._report.limit,
            resident_ns=residency.resident,
            switching_ns=residency.switching,
            saving_ns=compute_max_saving(residency),
            waits=waits,
        )

    def _is_usable(
        self, residency: Residency, usage: DeviceUsage, listener: SwitchListener
    ) -> bool:
        if usage.device.key not in self._shared_at or not residency.periods:
            return False

        # If the log was opened during the window, it must still cover almost all of the window.
        is_first = residency.since == listener.began
        return not is_first or _covers(residency.window, usage.window_ns)

    def close(self) -> None:
        """Closes the log. An open log prevents the driver from being unloaded."""
        if self._log is not None:
            self._log.listener.close()
            self._log = None
            _log.info("%s: the context-switch log is closed", self._report.name)

    def _fall_back(self, error: SwitchLogError) -> None:
        self._report.fail(error)
        if not isinstance(error, _WindowError):
            self.close()
            self._retry_at = self._clock() + _RETRY_SECONDS


def _add_evidence(
    usage: DeviceUsage, residency: Residency, listener: SwitchListener
) -> DeviceUsage:
    """Adds what the log shows even if the busy time cannot be divided by it.

    This is when each process was last resident, or that no process waited.
    """
    is_complete = residency.unknown == 0
    if is_complete:
        last_resident = {}
        for pid, gpu_time in residency.last_resident.items():
            last_resident[pid] = listener.to_unix_time(gpu_time)
        return replace(usage, last_resident=last_resident)

    has_no_switch = residency.unknown == residency.window
    if has_no_switch and _covers(residency.window, usage.window_ns):
        # If two processes had work, they would take turns. So no process waited.
        return replace(usage, waits=ProcessWaits({}, {}, 0))
    return usage


def _covers(part: int, whole: int) -> bool:
    """Returns False if more than 1/`_UNKNOWN_PART` of the whole is missing."""
    return part * _UNKNOWN_PART >= whole * (_UNKNOWN_PART - 1)


def _check_is_complete(residency: Residency, window_ns: int, busy_ns: int, known: Set[int]) -> None:
    """Raises _WindowError if the log does not show all processes for almost the whole window.

    `known`: pids of processes that exist.
    """
    # The windows of the log and of the usage must also have the same length.
    missing = max(residency.unknown, abs(residency.window - window_ns))
    if residency.unloaded:
        # Nothing can have run while no context was loaded, so the GPU was busy at most this long.
        loaded_ns = residency.window - residency.unloaded
        missing = max(missing, busy_ns - loaded_ns)
    # Compares with a fraction of the window, in integers.
    if missing * _UNKNOWN_PART > window_ns:
        percent = 100 * missing // window_ns
        raise _WindowError(
            "unaccounted_time", f"the context-switch log does not cover {percent} % of the time"
        )

    unlisted = residency.resident.keys() - known - {KERNEL_PID}
    unlisted_ns = sum(residency.resident[pid] for pid in unlisted)
    if unlisted_ns * _UNLISTED_PART > window_ns:
        raise _WindowError("unlisted_process", "a process runs on it that the driver does not list")
