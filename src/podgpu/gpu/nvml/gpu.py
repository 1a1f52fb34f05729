"""Reads one physical GPU through NVML, also after GPU resets and driver restarts. The GPU is identified by its UUID."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pynvml

from podgpu.errors import DeviceLost, DriverGone, SourceError, Unsupported
from podgpu.gpu.nvml.driver import DeviceHandle, NvmlDriver, XidWatcher, handle_address
from podgpu.gpu.nvml.mig import Instance, MigLayout
from podgpu.gpu.nvml.plan import DevicePlan, EnergyCounter
from podgpu.gpu.nvml.processes import ProcessList
from podgpu.gpu.nvml.usage import UsageReader
from podgpu.gpu.source import GpuAnswer
from podgpu.metrics.fields import Field, detail_fields
from podgpu.model import Device, DeviceUsage, ProcessUsage, Reading, Value

_log = logging.getLogger(__name__)
_DETAIL_SECONDS = 60.0
"""Interval of reading the details of a GPU: about fifty calls of a few microseconds each."""
_MAX_PLANS = 128
_LINK_STATE = pynvml.NVML_FI_DEV_NVLINK_GET_STATE
_MAX_LINKS = 36
_LINK_SECONDS = 25.0
"""Interval of counting NVLinks. Shorter than the default telemetry interval, so that each reading counts them."""


def open_device(driver: NvmlDriver, index: int) -> tuple[Any, Device]:
    """Returns the handle and identity of the GPU with this index. Raises SourceError."""
    handle = driver.call("nvmlDeviceGetHandleByIndex", index)
    minor: int | None = None
    with suppress(Unsupported):
        minor = int(driver.call("nvmlDeviceGetMinorNumber", handle))
    return handle, Device(
        index=index,
        uuid=driver.call("nvmlDeviceGetUUID", handle),
        pci_bus_id=driver.call("nvmlDeviceGetPciInfo", handle).busId,
        model=driver.call("nvmlDeviceGetName", handle),
        minor=minor,
    )


class NvmlGpu:
    """`read`, `processes` and `usage` may run in different workers. They share handle, layout and energy readings."""

    def __init__(
        self,
        driver: NvmlDriver,
        handle: Any,
        device: Device,
        make_usage_reader: Callable[[NvmlDriver, DeviceHandle, EnergyCounter], UsageReader],
        xids: XidWatcher,
        clock: Callable[[], float],
    ) -> None:
        self._driver = driver
        self._xids = xids
        self._clock = clock
        self.handle = DeviceHandle(handle)
        self._handle_lock = threading.Lock()
        self.device = device
        self.answers: bool | None = None
        """True if the last reading succeeded; None before the first reading since the driver was opened."""
        self._reset_generation = 0
        """Generation of the first handle after the driver or the GPU was unavailable. Its counters may have been
        reset."""
        self._layout = MigLayout(driver, self.handle, clock)
        self._energy = EnergyCounter(driver, self.handle, clock)
        # State of `read`
        self._read_generation = self._xid_generation = 0
        self._xids_registered = self._xids_failed = False
        self._instances: tuple[Instance, ...] = ()
        self._plans: dict[tuple[tuple[int, ...], str], DevicePlan] = {}
        """(field ids, device key) -> plan."""
        self._detail_plan: DevicePlan | None = None
        self._details_at = float("-inf")
        self._details: Mapping[int, Value] = {}
        self._links = LinkCounter(driver, self.handle, clock)
        # State of `processes`
        self._process_list = ProcessList(driver, self.handle, device.uuid)
        # State of `usage`
        self._usage_generation = 0
        self.usage_reader = make_usage_reader(driver, self.handle, self._energy)
        self._usage_processes = ProcessList(driver, self.handle, device.uuid)

    def reopen(self, handle: Any, device: Device) -> None:
        """Sets the new handle after the driver was opened again. Call before any reading."""
        self.handle.replace(handle)
        if self.answers is False:
            self._reset_generation = self.handle.generation
        self.device = replace(device, mig_enabled=self.device.mig_enabled)
        self.answers = None

    def read(self, fields: Sequence[Field]) -> GpuAnswer:
        now = self._clock()
        self._check_handle()
        self._register_xids()
        if self._read_generation != self.handle.generation:
            self._drop_plans()
            self._read_generation = self.handle.generation
        self._follow_layout()
        if len(self._plans) > _MAX_PLANS:  # the selected fields were changed many times
            self._drop_plans()
        targets: dict[Device, Any] = {self.device: self.handle}
        targets |= {i.make_device(self.device): i.handle for i in self._instances}
        plans = {device: self._find_plan(device, handle, fields) for device, handle in targets.items()}
        return GpuAnswer(
            tuple(Reading(device, plan.read(now)) for device, plan in plans.items()),
            unsupported=tuple((device.key, i) for device, plan in plans.items() for i in sorted(plan.unsupported)),
            dropped=tuple(i for plan in plans.values() for i in plan.dropped),
            errors=tuple(e for plan in plans.values() for e in plan.errors),
            details=self._read_details(now) if fields else {},
            reports_errors=self._xids_registered,
            links_up=self._links.read() if fields else None,
        )

    def processes(self) -> tuple[ProcessUsage, ...]:
        self._check_handle()
        return self._process_list.read(*self._layout.read())

    def usage(self, shared: Collection[str] = ()) -> tuple[DeviceUsage, ...]:
        self._check_handle()
        if self._usage_generation != self.handle.generation:
            may_have_been_reset = self._usage_generation < self._reset_generation
            self._usage_generation = self.handle.generation
            if may_have_been_reset:
                self.usage_reader.reset()
            else:
                self.usage_reader.close()
        enabled, instances = self._layout.read()
        device = replace(self.device, mig_enabled=enabled)
        read_processes = partial(self._usage_processes.read, enabled, instances)
        return self.usage_reader.read(device, instances, read_processes, shared)

    def close(self) -> None:
        self._drop_plans()
        self.usage_reader.close()

    @property
    def _name(self) -> str:
        return f"GPU {self.device.index} ({self.device.uuid})"

    def _check_handle(self) -> None:
        """Replaces the handle if it is invalid, for example after a reset.

        Errors of an invalid handle cannot be distinguished from "not supported". So this reads the UUID, which every
        GPU supports.
        """
        with self._handle_lock:
            if self._has_uuid(self.handle):
                return
            handle = self._find_handle()
            if handle_address(handle) != handle_address(self.handle.handle):  # equal if only a single call failed
                self.handle.replace(handle)
                self._reset_generation = self.handle.generation
                _log.info("%s was found again at %s", self._name, self.device.pci_bus_id)

    def _has_uuid(self, handle: Any) -> bool:
        try:
            return bool(self._driver.call("nvmlDeviceGetUUID", handle) == self.device.uuid)
        except SourceError:
            return False

    def _find_handle(self) -> Any:
        """Finds the GPU by its PCI slot. Raises DeviceLost, or DriverGone if the driver may have been restarted."""
        slot = self.device.pci_bus_id
        try:
            handle = self._driver.call("nvmlDeviceGetHandleByPciBusId", slot)
        except (DeviceLost, DriverGone):
            raise
        except SourceError as e:
            raise DriverGone(
                f"the driver no longer finds {self._name} by its handle or its PCI slot: {e}", "stale_handle"
            ) from e
        if not self._has_uuid(handle):
            raise DeviceLost(f"{self._name} does not answer at PCI slot {slot}, or another GPU has replaced it")
        return handle

    def _register_xids(self) -> None:
        """Registers the GPU for XIDs. A failure does not affect the reading, and the next reading tries again."""
        if self._xid_generation == self.handle.generation:
            return
        generation, self._xids_registered = self.handle.generation, False
        try:
            self._xids_registered = self._xids.register(self.device.uuid, self.handle)
        except Unsupported:
            _log.info("%s reports no XID errors", self._name)
        except SourceError as e:
            if not self._xids_failed:
                _log.warning("XID errors of %s cannot be watched: %s", self._name, e)
            self._xids_failed = True
            return
        self._xid_generation, self._xids_failed = generation, False

    def _follow_layout(self) -> None:
        enabled, instances = self._layout.read()
        if enabled != self.device.mig_enabled or instances != self._instances:
            layout = ", ".join(i.profile for i in instances) or "none"
            _log.info("GPU %d: MIG %s, instances: %s", self.device.index, "on" if enabled else "off", layout)
            self._drop_plans()
            self.device = replace(self.device, mig_enabled=enabled)
        self._instances = instances

    def _find_plan(self, device: Device, handle: Any, fields: Sequence[Field]) -> DevicePlan:
        key = tuple(field.id for field in fields), device.key
        if key not in self._plans:
            wanted = [f for f in fields if f.per_instance] if device.is_instance else fields
            energy = None if device.is_instance else self._energy
            take_sample = partial(self._take_gpm_sample, device.gi_id)
            self._plans[key] = DevicePlan(self._driver, handle, take_sample, wanted, energy)
        return self._plans[key]

    def _take_gpm_sample(self, gi_id: int | None, sample: Any) -> None:
        if gi_id is None:
            self._driver.call("nvmlGpmSampleGet", self.handle, sample)
        else:
            self._driver.call("nvmlGpmMigSampleGet", self.handle, gi_id, sample)

    def _read_details(self, now: float) -> Mapping[int, Value]:
        if self._detail_plan is None:
            take_sample = partial(self._take_gpm_sample, None)
            self._detail_plan = DevicePlan(self._driver, self.handle, take_sample, detail_fields())
            self._details_at = float("-inf")
        if now - self._details_at >= _DETAIL_SECONDS:
            self._details_at = now
            self._details = self._detail_plan.read(now)
        return self._details

    def _drop_plans(self) -> None:
        for plan in self._plans.values():
            plan.close()
        self._plans, self._detail_plan = {}, None
        self._links = LinkCounter(self._driver, self.handle, self._clock)


class LinkCounter:
    """Counts the NVLinks of one GPU that are up, with one driver call."""

    def __init__(self, driver: NvmlDriver, handle: DeviceHandle, clock: Callable[[], float]) -> None:
        self._driver = driver
        self._handle = handle
        self._clock = clock
        self._read_at = float("-inf")
        self._links = _MAX_LINKS
        """Number of links to read; 0 if the GPU has none."""
        self._up: int | None = None

    def read(self) -> int | None:
        """Returns None if the GPU has no links or does not report them. Raises DeviceLost and DriverGone."""
        now = self._clock()
        if self._links and now - self._read_at >= _LINK_SECONDS:
            self._read_at = now
            self._up = self._count()
        return self._up

    def _count(self) -> int | None:
        request = [(_LINK_STATE, link) for link in range(self._links)]
        try:
            answer = self._driver.call("nvmlDeviceGetFieldValues", self._handle, request)
        except (DeviceLost, DriverGone):
            raise
        except SourceError:
            return None
        states = {link: entry.value.uiVal for link, entry in enumerate(answer) if not entry.nvmlReturn}
        if self._links == _MAX_LINKS:
            self._links = max(states, default=-1) + 1
        return sum(state == 1 for state in states.values()) if states else None
