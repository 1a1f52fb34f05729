"""Reads one physical GPU through NVML, by one handle. After a GPU reset or a driver restart a new `NvmlGpu` is made."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pynvml

from podgpu.errors import DeviceLost, DriverGone, SourceError, Unsupported
from podgpu.gpu.nvml.driver import NvmlDriver, XidWatcher
from podgpu.gpu.nvml.mig import Instance, MigLayout, list_processes
from podgpu.gpu.nvml.plan import DevicePlan, EnergyCounter, GpmSampler
from podgpu.gpu.nvml.usage import UsageReader, UsageSettings
from podgpu.gpu.source import GpuAnswer, UsageAnswer
from podgpu.metrics.fields import Field, detail_fields
from podgpu.model import Device, ProcessUsage, Reading, Value

_log = logging.getLogger(__name__)
_DETAIL_SECONDS = 60.0
"""Interval of reading the details and links of a GPU: about fifty calls of a few microseconds each."""
_MAX_PLANS = 128
_LINK_STATES = [(pynvml.NVML_FI_DEV_NVLINK_GET_STATE, link) for link in range(36)]


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
        self, driver: NvmlDriver, handle: Any, device: Device, settings: UsageSettings, xids: XidWatcher
    ) -> None:
        self._driver = driver
        self.handle = handle
        self.handle_lock = threading.Lock()
        """Held while the handle is checked."""
        self.device = device
        self.answers: bool | None = None
        """True if the last reading succeeded; None before the first reading."""
        self._settings = settings
        self._clock = settings.clock
        self._layout = MigLayout(driver, handle, self._clock)
        self._energy = EnergyCounter(driver, handle, self._clock)
        self.usage_reader = UsageReader(driver, handle, self._energy, settings)
        # State of `read`
        self._xids = xids
        self._xids_registered: bool | None = None
        """None until the registration succeeded or the GPU rejected it."""
        self._xids_failed = False
        self._instances: tuple[Instance, ...] = ()
        self._plans: dict[tuple[tuple[int, ...], str], DevicePlan] = {}
        """(field ids, device key) -> plan."""
        self._detail_plan: DevicePlan | None = None
        self._details_at = float("-inf")
        self._details: Mapping[int, Value] = {}
        self._links_up: int | None = None

    def read(self, fields: Sequence[Field]) -> GpuAnswer:
        now = self._clock()
        self._register_xids()
        self._follow_layout()
        if len(self._plans) > _MAX_PLANS:  # the selected fields were changed many times
            self._drop_plans()
        targets: dict[Device, Any] = {self.device: self.handle}
        targets |= {i.make_device(self.device): i.handle for i in self._instances}
        plans = {device: self._find_plan(device, handle, fields) for device, handle in targets.items()}
        readings = tuple(Reading(device, plan.read(now)) for device, plan in plans.items())
        if fields:
            self._read_details(now)
        guards = {device.key: plan.guard for device, plan in plans.items()}
        return GpuAnswer(
            readings,
            unsupported=tuple((key, i) for key, guard in guards.items() for i in sorted(guard.unsupported)),
            dropped=tuple(i for guard in guards.values() for i in guard.dropped),
            errors=tuple(e for guard in guards.values() for e in guard.errors),
            details=self._details if fields else {},
            reports_errors=bool(self._xids_registered),
            links_up=self._links_up if fields else None,
        )

    def processes(self) -> tuple[ProcessUsage, ...]:
        enabled, instances = self._layout.read()
        return list_processes(self._driver, self.handle, replace(self.device, mig_enabled=enabled), instances)

    def usage(self, shared: Collection[str] = ()) -> UsageAnswer:
        enabled, instances = self._layout.read()
        return self.usage_reader.read(replace(self.device, mig_enabled=enabled), instances, shared)

    def close(self) -> None:
        """Frees the driver's resources. Call when no other method runs."""
        self._drop_plans()
        self.usage_reader.close()

    @property
    def name(self) -> str:
        return f"GPU {self.device.index} ({self.device.uuid})"

    def _register_xids(self) -> None:
        """Registers the GPU for XIDs. A failure does not affect the reading, and the next reading tries again."""
        if self._xids_registered is not None:
            return
        try:
            self._xids_registered = self._xids.register(self.device.uuid, self.handle)
        except Unsupported:
            self._xids_registered = False
            _log.info("%s reports no XID errors", self.name)
        except SourceError as e:
            if not self._xids_failed:
                _log.warning("XID errors of %s cannot be watched: %s", self.name, e)
            self._xids_failed = True

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
            gpm = GpmSampler(self._driver, self.handle, device.gi_id)
            self._plans[key] = DevicePlan(self._driver, handle, gpm, wanted, energy)
        return self._plans[key]

    def _read_details(self, now: float) -> None:
        if self._detail_plan is None:
            gpm = GpmSampler(self._driver, self.handle)
            self._detail_plan = DevicePlan(self._driver, self.handle, gpm, detail_fields())
            self._details_at = float("-inf")
        if now - self._details_at >= _DETAIL_SECONDS:
            self._details_at = now
            self._details = self._detail_plan.read(now)
            self._links_up = self._count_links()

    def _count_links(self) -> int | None:
        """Returns the number of NVLinks that are up, None if the GPU has none or does not report them."""
        try:
            answer = self._driver.call("nvmlDeviceGetFieldValues", self.handle, _LINK_STATES)
        except (DeviceLost, DriverGone):
            raise
        except SourceError:
            return None
        states = [entry.value.uiVal for entry in answer if not entry.nvmlReturn]
        return states.count(1) if states else None

    def _drop_plans(self) -> None:
        for plan in self._plans.values():
            plan.close()
        self._plans, self._detail_plan = {}, None
