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
from dataclasses import dataclass, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import pynvml

from podgpu.errors import DeviceLost, DriverGone, SourceError, StartError
from podgpu.gpu.nvml.driver import NvmlDriver, XidWatcher, handle_address
from podgpu.gpu.nvml.gpu import NvmlGpu, open_device
from podgpu.gpu.nvml.switch_splitter import Capability, SwitchListener, SwitchLogFactory
from podgpu.gpu.nvml.usage import UsageSettings
from podgpu.gpu.source import ErrorEvent, GpuAnswer, Inventory, UsageAnswer
from podgpu.metrics.fields import Field
from podgpu.model import Device, ProcessUsage

_log = logging.getLogger(__name__)
_MAX_WAIT_SECONDS = 4.5
"""Maximum wait for GPUs that are opened. Shorter than the usual deadline of an inventory."""
_QUIET_SECONDS = 0.5
"""Minimum wait for another GPU after one was opened. The wait is longer (1.5 times the time so far) if GPUs are slow:
without persistence mode the driver needs one or two seconds per GPU."""
_BUS_SECONDS = 10.0
_CLOSE_WAIT = 0.45
"""Maximum wait for driver calls in progress, including the wait for XIDs. Shorter than the shortest deadline of an
inventory."""
_RESTART_SECONDS = 10.0
"""Minimum interval of restarts after the bus changed, if no GPU answers, or if a call in progress prevented one."""
SEARCH_SECONDS = 120.0
"""Interval of restarts while the driver lists fewer GPUs than the PCI bus."""


@dataclass(frozen=True, slots=True)
class _Lookup:
    """Result of opening one GPU."""

    index: int
    handle: Any = None
    device: Device | None = None
    error: SourceError | StartError | None = None


def _look_up(driver: NvmlDriver, index: int, results: SimpleQueue[_Lookup]) -> None:
    try:
        with driver.hold():
            handle, device = open_device(driver, index)
        results.put(_Lookup(index, handle, device))
    except (SourceError, StartError) as e:
        results.put(_Lookup(index, error=e))


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
        self._settings = UsageSettings(sees_processes, switch_logs or SwitchLogFactory(), clock, wall)
        self._driver = NvmlDriver(nvml)
        self._count_expected = count_expected
        self._clock = clock
        self._xids = XidWatcher(self._driver, wall)
        self._opening = threading.Lock()
        """Held while the driver is opened or closed."""
        self._is_open = False
        self._opened: dict[int, str] = {}
        """Index -> UUID of GPUs that are open."""
        self._pending: dict[int, float] = {}
        """Index of a GPU that is being opened -> start time."""
        self._errors: dict[int, SourceError | StartError] = {}
        """Index of a GPU that could not be opened -> reason."""
        self._lookups: SimpleQueue[_Lookup] = SimpleQueue()
        self._gpus: dict[str, NvmlGpu] = {}
        """UUID -> GPU."""
        self._replaced: list[NvmlGpu] = []
        """GPUs whose handle became invalid. They are freed when the driver is closed, because workers may use them."""
        self._previous: dict[str, NvmlGpu] = {}
        """UUID -> GPU from before the driver was reopened. If it is found again, its usage continues."""
        self.expected: int | None = None
        self._bus_read_at = float("-inf")
        self._bus_changed = False
        self._close_failed = False
        self._restarted_at = float("-inf")
        self._listed = 0

    def inventory(self) -> Inventory:
        self._read_bus()
        with self._opening:
            if self._must_restart():
                self._restarted_at = self._clock()
                self._close(_CLOSE_WAIT)  # if a call hangs, the driver stays open and in use
            if not self._is_open:
                self._open()
            self._open_gpus()
            self._raise_common_error()
            gpus = tuple(self._gpus[uuid].device for _, uuid in sorted(self._opened.items()))
            unreachable = {index: str(error) for index, error in self._errors.items()}
            for index, began in self._pending.items():
                unreachable[index] = f"the driver has not answered for {self._clock() - began:.0f} s"
            return Inventory(gpus, unreachable, frozenset(self._pending))

    def _open_gpus(self) -> None:
        """Opens each GPU in its own thread, so that a GPU that hangs does not delay the others.

        Waits until all new ones are open, or until no more was opened for a while. Later results are read by the next
        call.
        """
        new = [i for i in range(self._listed) if i not in self._opened and i not in self._pending]
        for index in new:
            self._pending[index] = self._clock()
            target = partial(_look_up, self._driver, index, self._lookups)
            threading.Thread(target=target, name=f"open-gpu{index}", daemon=True).start()
        began, quiet = time.monotonic(), _QUIET_SECONDS if self._opened else _MAX_WAIT_SECONDS
        while self._pending:
            elapsed = time.monotonic() - began
            wait = min(quiet, _MAX_WAIT_SECONDS - elapsed) if any(index in self._pending for index in new) else 0.0
            try:
                lookup = self._lookups.get(timeout=max(0.0, wait))
            except Empty:
                break
            quiet = max(_QUIET_SECONDS, 1.5 * (time.monotonic() - began))
            del self._pending[lookup.index]
            self._errors.pop(lookup.index, None)
            if lookup.error is not None:
                self._errors[lookup.index] = lookup.error
            elif lookup.device is not None:
                self._opened[lookup.index] = lookup.device.uuid
                self._add_gpu(lookup.handle, lookup.device)

    def _raise_common_error(self) -> None:
        """Raises a StartError of any GPU. Raises DriverGone if all GPUs failed with it."""
        for error in self._errors.values():
            if isinstance(error, StartError):
                raise error
        gone = [error for error in self._errors.values() if isinstance(error, DriverGone)]
        if gone and len(gone) == self._listed:
            raise gone[0]

    def _add_gpu(self, handle: Any, device: Device) -> None:
        gpu = NvmlGpu(self._driver, handle, device, self._settings, self._xids)
        previous = self._previous.pop(device.uuid, None)
        if previous is not None:
            gpu.device = replace(device, mig_enabled=previous.device.mig_enabled)
            gpu.usage_reader.continue_after(previous.usage_reader)
        self._gpus[device.uuid] = gpu

    def _read_bus(self) -> None:
        now = self._clock()
        if now - self._bus_read_at >= _BUS_SECONDS:
            before, self.expected, self._bus_read_at = self.expected, self._count_expected(), now
            self._bus_changed |= before != self.expected

    def _must_restart(self) -> bool:
        if not self._is_open:
            return False
        answers = [gpu.answers for gpu in self._gpus.values() if gpu.answers is not None]
        none_answers = bool(answers or self._errors) and not any(answers)
        elapsed = self._clock() - self._restarted_at
        if self._listed < (self.expected or 0) and elapsed >= (
            _RESTART_SECONDS if self._close_failed else SEARCH_SECONDS
        ):
            return True
        return (self._bus_changed or none_answers) and elapsed >= _RESTART_SECONDS

    def _open(self) -> None:
        self._driver.open()
        self._bus_changed = False
        with self._driver.hold():
            self._xids.start()
            count = self._driver.call("nvmlDeviceGetCount")
        if count != self._listed:
            self._listed = count
            _log.info("%s: the driver lists %d GPU%s", self.name, count, "" if count == 1 else "s")
        self._restarted_at = self._clock()
        self._is_open = True

    def release(self, wait: float) -> bool:
        if not self._opening.acquire(timeout=wait):
            return False
        try:
            if not self._close(wait):
                return False
            self._previous = {}  # the driver may be unloaded after its release, which resets counters
            return True
        finally:
            self._opening.release()

    def _close(self, wait: float) -> bool:
        failed_before, self._close_failed = self._close_failed, not self._driver.close(wait, self._free)
        if self._close_failed:
            if not failed_before:
                _log.warning("the driver cannot be closed: a call has not returned")
            return False
        # Counters of a GPU that did not answer may have been reset.
        self._previous |= {uuid: gpu for uuid, gpu in self._gpus.items() if gpu.answers is not False}
        self._gpus, self._opened, self._replaced, self._is_open = {}, {}, [], False
        self._pending, self._errors, self._lookups = {}, {}, SimpleQueue()
        return True

    def _free(self) -> None:
        self._xids.free()
        for gpu in (*self._gpus.values(), *self._replaced):
            gpu.close()

    def read(self, gpu: Device, fields: Sequence[Field]) -> GpuAnswer:
        with self._hold(gpu) as state:
            return state.read(fields)

    def processes(self, gpu: Device) -> Sequence[ProcessUsage]:
        with self._hold(gpu) as state:
            return state.processes()

    def usage(self, gpu: Device, shared: Collection[str] = ()) -> UsageAnswer:
        with self._hold(gpu) as state:
            return state.usage(shared)

    def check_capability(self, gpu: Device) -> Capability:
        """Returns how usage would be split if containers shared this GPU. Raises SourceError."""
        with self._hold(gpu) as state:
            return self._settings.switch_logs.check_capability(self._driver, state.handle, state.device)

    def open_switch_log(self, gpu: Device) -> SwitchListener:
        """Opens the context-switch log of this GPU. Raises SwitchLogError or SourceError."""
        with self._hold(gpu) as state:
            logs = self._settings.switch_logs
            return logs.open_listener(self._driver, state.handle, self._settings.wall, state.device)

    @contextmanager
    def _hold(self, gpu: Device) -> Iterator[NvmlGpu]:
        with self._driver.hold():
            state = self._gpus.get(gpu.uuid)
            if state is None:
                raise DeviceLost(f"GPU {gpu.index} ({gpu.uuid}) is no longer listed by the driver")
            try:
                state = self._check_handle(state)
                yield state
                state.answers = True
            except (DeviceLost, DriverGone):
                state.answers = False
                raise

    def _check_handle(self, gpu: NvmlGpu) -> NvmlGpu:
        """Opens the GPU again if its handle is invalid, for example after a reset.

        Errors of an invalid handle cannot be distinguished from "not supported". So this reads the UUID, which every
        GPU supports. Raises DeviceLost, or DriverGone if the driver may have been restarted.
        """
        device = gpu.device
        with gpu.handle_lock:
            current = self._gpus.get(device.uuid)
            if current is not gpu and current is not None:
                return current  # opened by another worker in the meantime
            if self._has_uuid(gpu.handle, device.uuid):
                return gpu
            try:
                handle = self._driver.call("nvmlDeviceGetHandleByPciBusId", device.pci_bus_id)
            except (DeviceLost, DriverGone):
                raise
            except SourceError as e:
                raise DriverGone(
                    f"the driver no longer finds {gpu.name} by its handle or its PCI slot: {e}", "stale_handle"
                ) from e
            if not self._has_uuid(handle, device.uuid):
                raise DeviceLost(
                    f"{gpu.name} does not answer at PCI slot {device.pci_bus_id}, or another GPU has replaced it"
                )
            if handle_address(handle) == handle_address(gpu.handle):
                return gpu  # only a single call failed
            _log.info("%s was found again at %s", gpu.name, device.pci_bus_id)
            self._replaced.append(gpu)
            self._gpus[device.uuid] = NvmlGpu(self._driver, handle, device, self._settings, self._xids)
            return self._gpus[device.uuid]

    def _has_uuid(self, handle: Any, uuid: str) -> bool:
        try:
            return bool(self._driver.call("nvmlDeviceGetUUID", handle) == uuid)
        except SourceError:
            return False

    def error_events(self) -> Sequence[ErrorEvent]:
        return self._xids.drain()
