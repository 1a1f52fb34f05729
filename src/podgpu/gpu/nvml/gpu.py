"""Gpu is one physical GPU through NVML: it keeps its handle, its plans and its MIG layout, and is found again.

It lives by its UUID: a driver taken up anew hands it another handle, and its sums go on. What it needs to recover it
does itself, in its own worker.
"""

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
from podgpu.gpu.nvml.driver import Grip, NvmlDriver
from podgpu.gpu.nvml.energy import EnergyCounter
from podgpu.gpu.nvml.mig import IN_ONE_SECOND, IN_ONE_TURN, Instance, MigLayout
from podgpu.gpu.nvml.plan import DevicePlan
from podgpu.gpu.nvml.process_list import ProcessList
from podgpu.gpu.nvml.usage import UsageReader
from podgpu.gpu.nvml.xid_watch import XidWatch, address_in
from podgpu.gpu.source import GpuAnswer
from podgpu.metrics.fields import Field, detail_fields
from podgpu.model import Device, DeviceUsage, ProcessUsage, Reading, Value

_log = logging.getLogger(__name__)
_DETAIL_SECONDS = 60.0
_LINK_STATE = pynvml.NVML_FI_DEV_NVLINK_GET_STATE
_MOST_LINKS = 36
_LOOK_SECONDS = 25.0
"""A link that went down is seen after this long: at default intervals by the next reading."""


def meet(driver: NvmlDriver, index: int) -> tuple[Any, Device]:
    """The handle of the GPU with this index, and who it is. Raises SourceError."""
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


class Gpu:
    """`read`, `processes` and `usage` may each have a worker, so each of the latter has a process list of its own. They
    share the handle, which `_taking` guards, who the GPU is, how it is cut, and what the energy counter said."""

    def __init__(
        self,
        driver: NvmlDriver,
        handle: Any,
        device: Device,
        make_usage_reader: Callable[..., UsageReader],
        xids: XidWatch,
        clock: Callable[[], float],
    ) -> None:
        self._driver = driver
        self._xids = xids
        self._grip = grip = Grip(handle)
        self._taking = threading.Lock()
        self.device = device
        self.answers: bool | None = None
        """Whether it did when it was last asked; None: it was not asked since the driver was taken up."""
        self._watch_failed = False
        self._tells_xids = False
        self._read_with = self._used_with = self._watched_with = 0
        """Which grip each was last done with."""
        self._reset_with = 0
        """Which grip came after the driver or the GPU was away, and its counters and samples may have begun anew."""
        self._layout = MigLayout(driver, grip, clock)
        self._instances: tuple[Instance, ...] = ()
        self._asked: dict[int, Sequence[Field]] = {}
        """By their identity, the sets of fields there are plans for: each has its own rates and samples."""
        self._plans: dict[tuple[int, str], DevicePlan] = {}
        self._details: DevicePlan | None = None
        self._detailed_at = float("-inf")
        self._told_details: Mapping[int, Value] = {}
        self._process_list = ProcessList(driver, grip, device.uuid)
        self._energy = EnergyCounter(driver, grip, clock)
        self._links = LinkStates(driver, grip, clock)
        self.usage_reader = make_usage_reader(grip, energy=self._energy)
        self._usage_processes = ProcessList(driver, grip, device.uuid)

    def take(self, handle: Any, device: Device) -> None:
        """Go on with this handle. To be called when nobody reads it: the driver was just taken up again."""
        self._grip.take(handle)
        if self.answers is False:
            self._reset_with = self._grip.taken
        self.device = replace(device, mig_enabled=self.device.mig_enabled)
        self.answers = None

    def read(self, fields: Sequence[Field], now: float, beside: Sequence[Sequence[Field]] = ()) -> GpuAnswer:
        """`beside`: sets of fields that are read at other times; plans are kept for them, and no others.

        A lane's set is the same object in every turn, so it is known by its identity."""
        self._check_handle()
        self._watch_xids()
        if self._read_with != self._grip.taken:
            self._drop_plans()
            self._read_with = self._grip.taken
        self._follow_layout()
        if id(fields) not in self._asked:
            self._drop_plans(but=beside)
            self._asked[id(fields)] = fields
        targets: dict[Device, Any] = {self.device: self._grip}
        targets |= {i.device(self.device): i.handle for i in self._instances}
        readings = tuple(self._read_device(device, handle, fields, now) for device, handle in targets.items())
        plans = {device.key: self._plans[id(fields), device.key] for device in targets}
        return GpuAnswer(
            readings,
            unsupported=tuple((key, i) for key, plan in plans.items() for i in sorted(plan.unsupported)),
            dropped=tuple(i for plan in plans.values() for i in plan.dropped),
            errors=tuple(e for plan in plans.values() for e in plan.errors),
            details=self._read_details(now) if fields else {},
            tells_errors=self._tells_xids,
            links_up=self._links.read() if fields else None,
        )

    def processes(self) -> tuple[ProcessUsage, ...]:
        self._check_handle()
        return self._process_list.read(*self._layout.read(IN_ONE_SECOND))

    def usage(self, shared: Collection[str] = ()) -> tuple[DeviceUsage, ...]:
        self._check_handle()
        if self._used_with != self._grip.taken:
            was_away = self._used_with < self._reset_with
            self._used_with = self._grip.taken
            if was_away:
                self.usage_reader.begin_anew()
            else:
                self.usage_reader.close()
        enabled, instances = self._layout.read(IN_ONE_SECOND)
        device = replace(self.device, mig_enabled=enabled)
        processes = partial(self._usage_processes.read, enabled, instances)
        return self.usage_reader.read(device, instances, processes, shared)

    def is_quiet(self) -> bool:
        return self._used_with == self._grip.taken and self.usage_reader.is_quiet()

    def _check_handle(self) -> None:
        """A re-loaded driver refuses old handles in words that also mean "not supported": ask what always works.

        A handle that is no good is taken anew, which is all that a GPU needs that was reset or came back to its slot.
        """
        with self._taking:
            if self._is_it(self._grip):
                return
            handle = self._find_again()
            if address_in(handle) != address_in(self._grip.handle):  # else it was one call that failed
                self._grip.take(handle)
                self._reset_with = self._grip.taken
                _log.info("GPU %d (%s) is found again at %s", self.device.index, self.device.uuid, self._slot)

    @property
    def _slot(self) -> str:
        return self.device.pci_bus_id

    def _is_it(self, handle: Any) -> bool:
        try:
            return bool(self._driver.call("nvmlDeviceGetUUID", handle) == self.device.uuid)
        except SourceError:
            return False

    def _find_again(self) -> Any:
        """Raises DeviceLost, or DriverGone where it may be the driver that is no more."""
        what = f"GPU {self.device.index} ({self.device.uuid})"
        try:
            handle = self._driver.call("nvmlDeviceGetHandleByPciBusId", self._slot)
        except (DeviceLost, DriverGone):
            raise
        except SourceError as e:
            raise DriverGone(
                f"the driver no longer knows {what} by its handle, nor its slot: {e}", "stale_handle"
            ) from e
        if not self._is_it(handle):
            raise DeviceLost(f"{what} does not answer at {self._slot}, or another has taken its place")
        return handle

    def _watch_xids(self) -> None:
        """Tried again with every reading until it is done; that it cannot be costs the GPU no reading."""
        if self._watched_with == self._grip.taken:
            return
        taken, self._tells_xids = self._grip.taken, False
        try:
            self._tells_xids = self._xids.register(self.device.uuid, self._grip)
        except Unsupported:
            _log.info("GPU %d (%s) reports no XID errors", self.device.index, self.device.uuid)
        except SourceError as e:
            if not self._watch_failed:
                _log.warning("XID errors of GPU %d (%s) cannot be watched: %s", self.device.index, self.device.uuid, e)
            self._watch_failed = True
            return
        self._watched_with, self._watch_failed = taken, False

    def _follow_layout(self) -> None:
        enabled, instances = self._layout.read(IN_ONE_TURN)
        if enabled != self.device.mig_enabled or instances != self._instances:
            layout = ", ".join(i.profile for i in instances) or "none"
            _log.info("GPU %d: MIG %s, instances: %s", self.device.index, "on" if enabled else "off", layout)
            self._drop_plans()
            self.device = replace(self.device, mig_enabled=enabled)
        self._instances = instances

    def _read_device(self, device: Device, handle: Any, fields: Sequence[Field], now: float) -> Reading:
        plan = self._plans.get((id(fields), device.key))
        if plan is None:
            plan = self._plans[id(fields), device.key] = self._make_plan(device, handle, fields)
        return Reading(device, plan.read(now))

    def _read_details(self, now: float) -> Mapping[int, Value]:
        """Some fifty calls of a few microseconds, of which many are made once; the others once a minute."""
        if self._details is None:
            self._details = DevicePlan(self._driver, self._grip, self._take_gpm, detail_fields())
            self._detailed_at = float("-inf")
        if now - self._detailed_at >= _DETAIL_SECONDS:
            self._detailed_at = now
            self._told_details = self._details.read(now)
        return self._told_details

    def _make_plan(self, device: Device, handle: Any, fields: Sequence[Field]) -> DevicePlan:
        if device.gi_id is None:
            return DevicePlan(self._driver, handle, self._take_gpm, fields, self._energy)
        wanted = [f for f in fields if f.per_instance]
        gi_id = device.gi_id
        return DevicePlan(self._driver, handle, lambda s: self._take_mig_gpm(gi_id, s), wanted)

    def _take_gpm(self, sample: Any) -> None:
        self._driver.call("nvmlGpmSampleGet", self._grip, sample)

    def _take_mig_gpm(self, gi_id: int, sample: Any) -> None:
        self._driver.call("nvmlGpmMigSampleGet", self._grip, gi_id, sample)

    def _drop_plans(self, but: Sequence[Sequence[Field]] = ()) -> None:
        """Before a set of fields is asked for anew: those that are asked for beside it keep theirs."""
        kept = {id(fields) for fields in but}
        for key in [key for key in self._plans if key[0] not in kept]:
            self._plans.pop(key).close()
        self._details = None
        self._asked = {number: fields for number, fields in self._asked.items() if number in kept}

    def close(self) -> None:
        self._drop_plans()
        self.usage_reader.close()


class LinkStates:
    """How many NVLinks of one GPU are up: one call for all of them, and that seldom; from the worker that reads it."""

    def __init__(self, driver: NvmlDriver, grip: Grip, clock: Callable[[], float]) -> None:
        self._driver = driver
        self._grip = grip
        self._clock = clock
        self._asked_at = float("-inf")
        self._asked_with = 0
        self._count = _MOST_LINKS
        """Links to ask about: those the GPU said it has. 0: it has none, and is not asked until it is met anew."""
        self._up: int | None = None

    def read(self) -> int | None:
        """How many are up; None: it has none, or cannot tell. Raises DeviceLost and DriverGone."""
        if self._asked_with != self._grip.taken:
            self._asked_with, self._count, self._asked_at = self._grip.taken, _MOST_LINKS, float("-inf")
        now = self._clock()
        if self._count and now - self._asked_at >= _LOOK_SECONDS:
            self._asked_at = now
            self._up = self._ask()
        return self._up

    def _ask(self) -> int | None:
        asked = [(_LINK_STATE, link) for link in range(self._count)]
        try:
            answer = self._driver.call("nvmlDeviceGetFieldValues", self._grip, asked)
        except (DeviceLost, DriverGone):
            raise
        except SourceError:
            return None
        known = {link: entry.value.uiVal for link, entry in enumerate(answer) if not entry.nvmlReturn}
        if self._count == _MOST_LINKS:
            self._count = max(known, default=-1) + 1
        return sum(state == 1 for state in known.values()) if known else None
