"""Lists the GPUs through NVML, reads each one, and reopens the driver when needed.

NVML lists GPUs only when it is initialized, which interrupts all readers. So it is initialized again only if the number
of GPUs on the PCI bus changes, if no GPU answers, and every 2 minutes while it lists fewer GPUs than the bus.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pynvml

from podgpu.errors import DeviceLost, DriverGone, SourceError, StartError
from podgpu.gpu.nvml.driver import NvmlDriver, XidWatcher
from podgpu.gpu.nvml.gpu import NvmlGpu, open_device
from podgpu.gpu.nvml.switch_splitter import Capability, SwitchLogFactory, identify_gpu
from podgpu.gpu.nvml.usage import UsageReader
from podgpu.gpu.source import ErrorEvent, GpuAnswer, Inventory, UsageFlaws
from podgpu.metrics.fields import Field
from podgpu.model import Device, DeviceUsage, ProcessUsage

_log = logging.getLogger(__name__)
_QUIET_SECONDS = 0.5
"""Minimum wait for another GPU after one was opened. The wait is longer (1.5 times the time so far) if GPUs are slow:
without persistence mode the driver needs one or two seconds per GPU."""
_MAX_WAIT_SECONDS = 4.5
"""Maximum wait for all GPUs. Shorter than the usual deadline of an inventory."""
_RETRY_SECONDS = 5.0
"""Interval of attempts to open a GPU that could not be opened."""


@dataclass(slots=True)
class _Lookup:
    """State of opening one GPU."""

    began: float
    pending: bool = True
    result: tuple[Any, Device] | None = None
    error: SourceError | StartError | None = None


class DeviceEnumerator:
    """Opens each GPU in its own thread, so that a GPU that hangs does not delay the others. Retries failed GPUs."""

    def __init__(self, driver: NvmlDriver, count: int, clock: Callable[[], float]) -> None:
        self._driver = driver
        self._clock = clock
        self._answered = threading.Condition()
        self._lookups = {index: _Lookup(clock()) for index in range(count)}
        self._has_waited = False
        for index, lookup in self._lookups.items():
            self._start(index, lookup)

    def wait(self) -> None:
        """Waits until all GPUs are open, or until no more was opened for a while. Only the first call waits.

        Raises StartError, and DriverGone if all GPUs failed with it.
        """
        began = time.monotonic()
        with self._answered:
            while not self._has_waited:
                pending, elapsed = self._count_pending(), time.monotonic() - began
                quiet = max(_QUIET_SECONDS, 1.5 * elapsed) if pending < len(self._lookups) else _MAX_WAIT_SECONDS
                self._has_waited = not pending or not self._answered.wait_for(
                    partial(self._has_fewer_pending, pending), min(quiet, _MAX_WAIT_SECONDS - elapsed)
                )
        errors = [lookup.error for lookup in self._lookups.values()]
        for error in errors:
            if isinstance(error, StartError):
                raise error
        gone = [error for error in errors if isinstance(error, DriverGone)]
        if gone and len(gone) == len(errors):
            raise gone[0]

    def retry_failed(self) -> None:
        now = self._clock()
        for index, lookup in self._lookups.items():
            if lookup.error is not None and not lookup.pending and now - lookup.began >= _RETRY_SECONDS:
                lookup.began, lookup.pending = now, True
                self._start(index, lookup)

    @property
    def found(self) -> list[tuple[Any, Device]]:
        """Handles and devices in the order of their index."""
        return [lookup.result for lookup in self._lookups.values() if lookup.result is not None]

    @property
    def errors(self) -> dict[int, str]:
        """Index of a GPU that is not open yet -> reason."""
        return {index: self._explain(lookup) for index, lookup in self._lookups.items() if lookup.result is None}

    @property
    def hung(self) -> frozenset[int]:
        """Indices of GPUs whose first lookup has not returned."""
        lookups = self._lookups.items()
        return frozenset(index for index, lookup in lookups if lookup.result is None and lookup.error is None)

    @property
    def failed(self) -> int:
        """Number of GPUs whose lookup failed. Pending lookups are not counted."""
        return sum(lookup.error is not None for lookup in self._lookups.values())

    def _count_pending(self) -> int:
        return sum(lookup.pending for lookup in self._lookups.values())

    def _has_fewer_pending(self, before: int) -> bool:
        return self._count_pending() < before

    def _explain(self, lookup: _Lookup) -> str:
        if lookup.error is not None:
            return str(lookup.error)
        return f"the driver has not answered for {self._clock() - lookup.began:.0f} s"

    def _start(self, index: int, lookup: _Lookup) -> None:
        threading.Thread(target=self._look_up, args=(index, lookup), name=f"open-gpu{index}", daemon=True).start()

    def _look_up(self, index: int, lookup: _Lookup) -> None:
        result: tuple[Any, Device] | None = None
        error: SourceError | StartError | None = None
        try:
            with self._driver.hold():
                result = open_device(self._driver, index)
        except (SourceError, StartError) as e:
            error = e
        finally:
            with self._answered:
                lookup.result, lookup.error, lookup.pending = result, error, False
                self._answered.notify_all()


_BUS_SECONDS = 10.0
_CLOSE_WAIT = 0.45
"""Maximum wait for driver calls in progress, including the wait for XIDs. Shorter than the shortest deadline of an
inventory."""
_RESTART_SECONDS = 10.0
"""Minimum interval of restarts after the bus changed or if no GPU answers."""
_SEARCH_SECONDS = 120.0
"""Interval of restarts while the driver lists fewer GPUs than the PCI bus."""
_MAX_REMOVED = 64


class NvmlTelemetry:
    def __init__(
        self,
        nvml: Any = pynvml,
        name: str = "nvml",
        count_expected: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        sees_processes: bool = True,
        switch_logs: SwitchLogFactory | None = None,
    ) -> None:
        """`sees_processes`: True if podgpu is in the host's PID namespace; otherwise NVML's process lists are empty.

        `count_expected`: returns the number of GPUs on the PCI bus, None if unknown.
        `switch_logs`: opens context-switch logs (`--usage-from`).
        """
        self.name = name
        self.switch_logs = switch_logs or SwitchLogFactory()
        self._driver = NvmlDriver(nvml)
        self._make_usage_reader = partial(
            UsageReader, sees_processes=sees_processes, clock=clock, wall=wall, switch_logs=self.switch_logs
        )
        self._count_expected = count_expected
        self._clock = clock
        self._xids = XidWatcher(self._driver, wall, clock)
        self._opening = threading.Lock()
        """Held while the driver is opened or closed."""
        self._enumerator: DeviceEnumerator | None = None
        self._gpus: dict[str, NvmlGpu] = {}
        """UUID -> GPU that was found since the driver was opened."""
        self._removed: dict[str, NvmlGpu] = {}
        """UUID -> GPU from before the driver was opened. If it is found again, its counters continue."""
        self.expected: int | None = None
        self._bus_read_at = float("-inf")
        self._bus_changed = False
        self._restarted_at = float("-inf")
        self._listed = 0

    def inventory(self) -> Inventory:
        self._read_bus()
        with self._opening:
            if self._must_restart():
                self._restarted_at = self._clock()
                self._close(_CLOSE_WAIT)  # if a call hangs, the driver stays open and in use
            if self._enumerator is None:
                self._enumerator = self._open()
            self._enumerator.retry_failed()
            self._enumerator.wait()
            for handle, device in self._enumerator.found:
                if device.uuid not in self._gpus:
                    self._gpus[device.uuid] = self._add_gpu(handle, device)
            gpus = tuple(self._gpus[device.uuid].device for _, device in self._enumerator.found)
            return Inventory(gpus, self._enumerator.errors, self._enumerator.hung)

    def _read_bus(self) -> None:
        now = self._clock()
        if now - self._bus_read_at >= _BUS_SECONDS:
            before, self.expected, self._bus_read_at = self.expected, self._count_expected(), now
            self._bus_changed |= before != self.expected

    def _must_restart(self) -> bool:
        if self._enumerator is None:
            return False
        answers = [gpu.answers for gpu in self._gpus.values() if gpu.answers is not None]
        none_answers = bool(answers or self._enumerator.failed) and not any(answers)
        elapsed = self._clock() - self._restarted_at
        if self._listed < (self.expected or 0) and elapsed >= _SEARCH_SECONDS:
            return True
        return (self._bus_changed or none_answers) and elapsed >= _RESTART_SECONDS

    def _open(self) -> DeviceEnumerator:
        self._driver.open()
        self._bus_changed = False
        with self._driver.hold():
            self._xids.start()
            count = self._driver.call("nvmlDeviceGetCount")
        if count != self._listed:
            self._listed = count
            _log.info("%s: the driver lists %d GPU%s", self.name, count, "" if count == 1 else "s")
        self._restarted_at = self._clock()
        return DeviceEnumerator(self._driver, count, self._clock)

    def _add_gpu(self, handle: Any, device: Device) -> NvmlGpu:
        gpu = self._removed.pop(device.uuid, None)
        if gpu is not None:
            gpu.reopen(handle, device)
            return gpu
        return NvmlGpu(self._driver, handle, device, self._make_usage_reader, self._xids, self._clock)

    def release(self, wait: float) -> bool:
        if not self._opening.acquire(timeout=wait):
            return False
        try:
            if not self._close(wait):
                return False
            for gpu in self._removed.values():
                gpu.answers = False  # the driver may be unloaded after its release, which resets counters
            return True
        finally:
            self._opening.release()

    def _close(self, wait: float) -> bool:
        if not self._driver.close(wait, self._free):
            _log.warning("the driver cannot be closed: a call has not returned")
            return False
        self._removed |= self._gpus
        for uuid in list(self._removed)[:-_MAX_REMOVED]:
            del self._removed[uuid]
        self._gpus, self._enumerator = {}, None
        return True

    def _free(self) -> None:
        self._xids.free()
        for gpu in self._gpus.values():
            gpu.close()

    def read(self, gpu: Device, fields: Sequence[Field]) -> GpuAnswer:
        with self._hold(gpu) as state:
            return state.read(fields)

    def processes(self, gpu: Device) -> Sequence[ProcessUsage]:
        with self._hold(gpu) as state:
            return state.processes()

    def usage(self, gpu: Device, shared: Collection[str] = ()) -> tuple[DeviceUsage, ...]:
        with self._hold(gpu) as state:
            return state.usage(shared)

    def usage_flaws(self, gpu: Device) -> UsageFlaws:
        state = self._gpus.get(gpu.uuid)
        return UsageFlaws() if state is None else state.usage_reader.flaws

    def check_capability(self, gpu: Device) -> Capability:
        """Returns how usage would be split if containers shared this GPU. Raises SourceError."""
        with self._hold(gpu) as state:
            version, architecture = identify_gpu(self._driver, state.handle, state.device)
            return self.switch_logs.check_capability(state.device, version, architecture)

    @contextmanager
    def _hold(self, gpu: Device) -> Iterator[NvmlGpu]:
        with self._driver.hold():
            state = self._gpus.get(gpu.uuid)
            if state is None:
                raise DeviceLost(f"GPU {gpu.index} ({gpu.uuid}) is no longer listed by the driver")
            try:
                yield state
                state.answers = True
            except (DeviceLost, DriverGone):
                state.answers = False
                raise

    def error_events(self) -> Sequence[ErrorEvent]:
        return self._xids.drain()
