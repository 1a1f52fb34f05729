"""Telemetry from NVML: finds the GPUs, reads one GPU with its MIG instances, follows the driver's life.

Nothing here knows which fields exist: `catalog/fields.csv` does, and `plan.py` carries it out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import pynvml

from podgpu.catalog.fields import Field
from podgpu.errors import DeviceLost, DriverGone, SourceError, Unsupported
from podgpu.model import Device, DeviceUsage, ProcessUsage, Reading
from podgpu.telemetry.driver import NvmlDriver
from podgpu.telemetry.mig import Instance, mig_enabled, read_instances
from podgpu.telemetry.pci import count_pci_gpus
from podgpu.telemetry.plan import DevicePlan
from podgpu.telemetry.process_list import ProcessList
from podgpu.telemetry.source import GpuAnswer, Inventory, UsageFlaws, XidEvent
from podgpu.telemetry.usage import UsageReader
from podgpu.telemetry.xid_watch import XidWatch

_log = logging.getLogger(__name__)
_BUS_LOOK_SECONDS = 10.0
_LOST_LOOK_SECONDS = 60.0
_ALL_LOST_LOOK_SECONDS = 5.0
_CLOSE_WAIT = 2.0
_STALE_HANDLE = "stale_handle"


class NvmlTelemetry:
    def __init__(
        self,
        nvml: Any = pynvml,
        name: str = "nvml",
        count_expected: Callable[[], int | None] = count_pci_gpus,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        sees_processes: bool = True,
    ) -> None:
        """`sees_processes`: podgpu is in the host's PID namespace; elsewhere NVML's process lists are false."""
        self.name = name
        self._driver = NvmlDriver(nvml)
        self._make_usage_reader = partial(
            UsageReader, self._driver, sees_processes=sees_processes, clock=clock, wall=wall
        )
        self._count_expected = count_expected
        self._clock = clock
        self._xids = XidWatch(self._driver, wall)
        self._gpus: dict[str, _Gpu] = {}
        self._inventory: Inventory | None = None
        self.expected: int | None = None
        self._bus_looked_at = float("-inf")
        self._enumerated_at = float("-inf")
        self._stale = False

    def inventory(self) -> Inventory:
        bus_changed = self._look_at_bus()
        if self._inventory is not None and (bus_changed or self._must_start_over(self._inventory)):
            self.release(_CLOSE_WAIT)
        if not self._driver.is_open:
            self._inventory = None
            self._driver.open()
        if self._inventory is None:
            self._inventory = self._enumerate()
        return self._inventory

    def _look_at_bus(self) -> bool:
        """True when a GPU came or went."""
        now = self._clock()
        if now - self._bus_looked_at < _BUS_LOOK_SECONDS:
            return False
        before, self.expected, self._bus_looked_at = self.expected, self._count_expected(), now
        return before != self.expected

    def _must_start_over(self, inventory: Inventory) -> bool:
        """NVML lists GPUs once, at initialisation: what comes, goes or is reset is only seen by a new one."""
        if self._stale:
            return True
        lost = len(inventory.unreachable) + sum(gpu.lost for gpu in self._gpus.values())
        every = lost == len(inventory.unreachable) + len(self._gpus)
        patience = _ALL_LOST_LOOK_SECONDS if every else _LOST_LOOK_SECONDS
        return lost > 0 and self._clock() - self._enumerated_at >= patience

    def _enumerate(self) -> Inventory:
        self._stale = False
        self._enumerated_at = self._clock()
        gpus: dict[str, _Gpu] = {}
        unreachable: dict[int, str] = {}
        with self._driver.using():
            for index in range(self._driver.call("nvmlDeviceGetCount")):
                try:
                    gpu = _Gpu(self._driver, index, self._make_usage_reader)
                except DriverGone:
                    raise
                except SourceError as e:
                    unreachable[index] = str(e)
                    _log.warning("GPU %d does not answer: %s", index, e)
                else:
                    gpus[gpu.device.uuid] = gpu
        self._gpus = gpus
        self._xids.start({uuid: gpu.handle for uuid, gpu in gpus.items()})
        _log.info("%s: %d GPU%s", self.name, len(gpus), "" if len(gpus) == 1 else "s")
        return Inventory(tuple(gpu.device for gpu in gpus.values()), unreachable)

    def read(self, gpu: Device, fields: Sequence[Field]) -> GpuAnswer:
        with self._using(gpu) as state:
            return state.read(fields, self._clock())

    def processes(self, gpu: Device) -> Sequence[ProcessUsage]:
        with self._using(gpu) as state:
            return state.processes()

    def usage(self, gpu: Device) -> tuple[DeviceUsage, ...]:
        with self._using(gpu) as state:
            return state.usage()

    def usage_flaws(self, gpu: Device) -> UsageFlaws:
        state = self._gpus.get(gpu.uuid)
        return UsageFlaws() if state is None else state.usage_reader.flaws

    @contextmanager
    def _using(self, gpu: Device) -> Iterator[_Gpu]:
        state = self._gpus.get(gpu.uuid)
        if state is None:
            raise DeviceLost(f"GPU {gpu.index} ({gpu.uuid}) is no longer listed by the driver")
        try:
            with self._driver.using():
                yield state
        except DriverGone as e:
            self._stale = self._stale or e.reason not in ("released", _STALE_HANDLE)
            raise

    def xid_events(self) -> Sequence[XidEvent]:
        return self._xids.drain()

    def release(self, wait: float) -> bool:
        self._xids.stop()
        if self._driver.close(wait, before=self._free):
            self._gpus, self._inventory = {}, None
            return True
        _log.warning("the driver cannot be let go: a call into it has not returned")
        self._xids.start({uuid: gpu.handle for uuid, gpu in self._gpus.items()})
        return False

    def _free(self) -> None:
        for gpu in self._gpus.values():
            gpu.close()


class _Gpu:
    """One physical GPU's handle, plans and present MIG layout.

    `read`, `processes` and `usage` may each have a worker: none changes what another looks at.
    """

    def __init__(self, driver: NvmlDriver, index: int, make_usage_reader: Callable[[Any], UsageReader]) -> None:
        self._driver = driver
        self.handle = driver.call("nvmlDeviceGetHandleByIndex", index)
        self.device = Device(
            index=index,
            uuid=driver.call("nvmlDeviceGetUUID", self.handle),
            pci_bus_id=driver.call("nvmlDeviceGetPciInfo", self.handle).busId,
            model=driver.call("nvmlDeviceGetName", self.handle),
            minor=self._minor(),
        )
        self.lost = False
        self._layout = _MigLayout(driver, self.handle)
        self._instances: tuple[Instance, ...] = ()
        self._fields: Sequence[Field] = ()
        self._plans: dict[str, DevicePlan] = {}
        self._process_list = ProcessList(driver, self.handle, self.device.uuid)
        self.usage_reader = make_usage_reader(self.handle)
        self._usage_layout = _MigLayout(driver, self.handle)
        self._usage_processes = ProcessList(driver, self.handle, self.device.uuid)

    def _minor(self) -> int | None:
        with suppress(Unsupported):
            return int(self._driver.call("nvmlDeviceGetMinorNumber", self.handle))
        return None

    def read(self, fields: Sequence[Field], now: float) -> GpuAnswer:
        self.lost = True  # until the whole reading went through
        self._check_handle()
        self._follow_layout()
        if fields is not self._fields:
            self._drop_plans()
            self._fields = fields
        targets = {self.device: self.handle} | {i.device(self.device): i.handle for i in self._instances}
        readings = tuple(self._read_device(device, handle, now) for device, handle in targets.items())
        self.lost = False
        plans = {device.key: self._plans[device.key] for device in targets}
        return GpuAnswer(
            readings,
            unsupported=tuple((key, i) for key, plan in plans.items() for i in sorted(plan.unsupported)),
            dropped=tuple(i for plan in plans.values() for i in plan.dropped),
            errors=tuple(e for plan in plans.values() for e in plan.errors),
        )

    def processes(self) -> tuple[ProcessUsage, ...]:
        self._check_handle()
        return self._process_list.read()

    def usage(self) -> tuple[DeviceUsage, ...]:
        self._check_handle()
        enabled, instances = self._usage_layout.read()
        device = replace(self.device, mig_enabled=enabled)
        return self.usage_reader.read(device, instances, self._usage_processes.read)

    def _check_handle(self) -> None:
        """A re-loaded driver refuses old handles in words that also mean "not supported": ask what always works."""
        try:
            known = self._driver.call("nvmlDeviceGetUUID", self.handle) == self.device.uuid
        except (DeviceLost, DriverGone):
            raise
        except SourceError:
            known = False
        if not known:
            message = f"the driver no longer knows GPU {self.device.index} by its handle; taking the driver up again"
            raise DriverGone(message, _STALE_HANDLE)

    def _follow_layout(self) -> None:
        enabled, instances = self._layout.read()
        if enabled != self.device.mig_enabled or instances != self._instances:
            layout = ", ".join(i.profile for i in instances) or "none"
            _log.info("GPU %d: MIG %s, instances: %s", self.device.index, "on" if enabled else "off", layout)
            self._drop_plans()
            self.device = replace(self.device, mig_enabled=enabled)
        self._instances = instances

    def _read_device(self, device: Device, handle: Any, now: float) -> Reading:
        plan = self._plans.get(device.key)
        if plan is None:
            plan = self._plans[device.key] = self._make_plan(device, handle)
        return Reading(device, plan.read(now))

    def _make_plan(self, device: Device, handle: Any) -> DevicePlan:
        if device.gi_id is None:
            return DevicePlan(self._driver, handle, self._take_gpm, self._fields)
        wanted = [f for f in self._fields if f.per_instance]
        gi_id = device.gi_id
        return DevicePlan(self._driver, handle, lambda s: self._take_mig_gpm(gi_id, s), wanted)

    def _take_gpm(self, sample: Any) -> None:
        self._driver.call("nvmlGpmSampleGet", self.handle, sample)

    def _take_mig_gpm(self, gi_id: int, sample: Any) -> None:
        self._driver.call("nvmlGpmMigSampleGet", self.handle, gi_id, sample)

    def _drop_plans(self) -> None:
        for plan in self._plans.values():
            plan.close()
        self._plans = {}

    def close(self) -> None:
        self._drop_plans()
        self.usage_reader.close()


class _MigLayout:
    """Whether a GPU is in MIG mode, and its instances. Parts that know no MIG are asked once."""

    def __init__(self, driver: NvmlDriver, handle: Any) -> None:
        self._driver = driver
        self._handle = handle
        self._knows_mig = True

    def read(self) -> tuple[bool, tuple[Instance, ...]]:
        if not self._knows_mig:
            return False, ()
        try:
            enabled = mig_enabled(self._driver, self._handle)
        except Unsupported:
            self._knows_mig = False
            return False, ()
        return enabled, read_instances(self._driver, self._handle) if enabled else ()
