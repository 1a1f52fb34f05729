"""NvmlTelemetry finds the GPUs by NVML, has each read by itself, and follows the driver's life.

Nothing here knows which fields exist: `metrics/fields.csv` does, and `plan.py` carries it out. NVML lists GPUs once, at
initialisation: what comes or goes is only seen by a new one, and that shuts everybody out for a moment. So it is made
when the PCI bus shows other GPUs than before, when not one GPU answers, and ever less often while the driver lists
fewer than are on the bus. One that is lost while the driver is up is found again without.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pynvml

from podgpu.errors import DeviceLost, DriverGone
from podgpu.gpu.nvml.driver import NvmlDriver
from podgpu.gpu.nvml.gpu import Gpu
from podgpu.gpu.nvml.roll_call import RollCall
from podgpu.gpu.nvml.usage import UsageReader
from podgpu.gpu.nvml.xid_watch import XidWatch
from podgpu.gpu.source import ErrorEvent, GpuAnswer, Inventory, Lane, UsageFlaws
from podgpu.metrics.fields import Field
from podgpu.model import Device, DeviceUsage, ProcessUsage

if TYPE_CHECKING:
    from podgpu.gpu.nvml.switches.opening import Opening, Outlook

_log = logging.getLogger(__name__)
_BUS_LOOK_SECONDS = 10.0
_CLOSE_WAIT = 0.45
"""Seconds for calls in flight to return, the wait for XIDs among them: within the shortest deadline that an inventory
is given."""
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 60.0
"""Seconds between two attempts to start over; they double until one is made and somebody answers."""
_FIRST_SEARCH, _LONGEST_SEARCH, _SEARCH_GROWTH = 30.0, 600.0, 1.25
"""Seconds between two attempts to have those listed that were lost when the driver was taken up."""
_MOST_REMEMBERED = 64
"""GPUs that are gone."""


class NvmlTelemetry:
    def __init__(
        self,
        nvml: Any = pynvml,
        name: str = "nvml",
        count_expected: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        sees_processes: bool = True,
        opening: Opening | None = None,
    ) -> None:
        """`sees_processes`: podgpu is in the host's PID namespace; elsewhere NVML's process lists are false.

        `count_expected`: how many GPUs the PCI bus shows; None: not known.

        `opening`: whether and how context switches are read (`--usage-from`); without it they are not.
        """
        self.name = name
        self._opening = opening
        self._driver = NvmlDriver(nvml)
        self._make_usage_reader = partial(
            UsageReader, self._driver, sees_processes=sees_processes, clock=clock, wall=wall, opening=opening
        )
        self._count_expected = count_expected
        self._clock = clock
        self._xids = XidWatch(self._driver, wall, clock)
        self._life = threading.Lock()
        """Held while the driver is taken up or let go of."""
        self._roll_call: RollCall | None = None
        self._gpus: dict[str, Gpu] = {}
        """By UUID, those that the driver lists and that were met."""
        self._gone: dict[str, Gpu] = {}
        """Those of before: what was summed up of one goes on when it is met again."""
        self.expected: int | None = None
        self._bus_looked_at = float("-inf")
        self._bus_changed = False
        self._not_before = float("-inf")
        self._pause = _FIRST_PAUSE
        self._listed = 0
        self._search_at = float("-inf")
        self._search_pause = _FIRST_SEARCH
        self._lanes: tuple[Sequence[Field], ...] = ()

    def schedule(self, lanes: Sequence[Lane]) -> None:
        self._lanes = tuple(lane.fields for lane in lanes)

    def inventory(self) -> Inventory:
        self._look_at_bus()
        with self._life:
            if self._must_start_over():
                self._start_over()
            if self._roll_call is None:
                self._roll_call = self._take_up()
            self._roll_call.ask_again()
            self._roll_call.wait()
            for handle, device in self._roll_call.met:
                if device.uuid not in self._gpus:
                    self._gpus[device.uuid] = self._welcome(handle, device)
            listed = (self._gpus[device.uuid].device for _, device in self._roll_call.met)
            return Inventory(tuple(listed), self._roll_call.unmet, self._roll_call.hung)

    def _look_at_bus(self) -> None:
        now = self._clock()
        if now - self._bus_looked_at >= _BUS_LOOK_SECONDS:
            before, self.expected, self._bus_looked_at = self.expected, self._count_expected(), now
            self._bus_changed |= before != self.expected

    # -- the driver's life ---------------------------------------------------------------------------------------

    def _must_start_over(self) -> bool:
        if self._roll_call is None:
            return False
        answers = [gpu.answers for gpu in self._gpus.values() if gpu.answers is not None]
        if any(answers) and not self._bus_changed:
            self._pause = _FIRST_PAUSE
        nobody = bool(answers or self._roll_call.failed) and not any(answers)
        if self._listed < (self.expected or 0) and self._clock() >= self._search_at:
            return True
        return (self._bus_changed or nobody) and self._clock() >= self._not_before

    def _start_over(self) -> None:
        """Where a call hangs the driver cannot be let go of: then everybody goes on with what there is."""
        self._not_before, self._search_at = self._clock() + self._pause, self._clock() + self._search_pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._let_go(_CLOSE_WAIT)

    def _take_up(self) -> RollCall:
        self._driver.open()
        self._bus_changed = False
        with self._driver.using():
            self._xids.start()
            count = self._driver.call("nvmlDeviceGetCount")
        if count != self._listed:
            self._listed, self._search_pause = count, _FIRST_SEARCH
            _log.info("%s: the driver lists %d GPU%s", self.name, count, "" if count == 1 else "s")
        self._search_at = self._clock() + self._search_pause
        self._search_pause = min(_SEARCH_GROWTH * self._search_pause, _LONGEST_SEARCH)
        return RollCall(self._driver, count, self._clock)

    def _welcome(self, handle: Any, device: Device) -> Gpu:
        known = self._gone.pop(device.uuid, None)
        if known is not None:
            known.take(handle, device)
            return known
        return Gpu(self._driver, handle, device, self._make_usage_reader, self._xids, self._clock)

    def release(self, wait: float) -> bool:
        if not self._life.acquire(timeout=wait):
            return False
        try:
            if not self._let_go(wait):
                return False
            for gpu in self._gone.values():
                gpu.answers = False  # the driver is let go of so that it can be unloaded
            return True
        finally:
            self._life.release()

    def _let_go(self, wait: float) -> bool:
        if not self._driver.close(wait, before=self._free):
            _log.warning("the driver cannot be let go: a call into it has not returned")
            return False
        self._gone |= self._gpus
        for uuid in list(self._gone)[:-_MOST_REMEMBERED]:
            del self._gone[uuid]
        self._gpus, self._roll_call = {}, None
        return True

    def _free(self) -> None:
        self._xids.free()
        for gpu in self._gpus.values():
            gpu.close()

    # -- one GPU -------------------------------------------------------------------------------------------------

    def read(self, gpu: Device, fields: Sequence[Field]) -> GpuAnswer:
        with self._using(gpu) as state:
            return state.read(fields, self._clock(), self._lanes)

    def processes(self, gpu: Device) -> Sequence[ProcessUsage]:
        with self._using(gpu) as state:
            return state.processes()

    def usage(self, gpu: Device, shared: Collection[str] = ()) -> tuple[DeviceUsage, ...]:
        with self._using(gpu) as state:
            return state.usage(shared)

    def is_quiet(self, gpu: Device) -> bool:
        with self._using(gpu) as state:
            return state.is_quiet()

    def usage_flaws(self, gpu: Device) -> UsageFlaws:
        state = self._gpus.get(gpu.uuid)
        return UsageFlaws() if state is None else state.usage_reader.flaws

    @property
    def opening(self) -> Opening:
        """Whether and how context switches are read. Where they are not, what reads them is not loaded until now."""
        from podgpu.gpu.nvml.switches.opening import Opening

        return self._opening or Opening()

    def outlook(self, gpu: Device) -> Outlook:
        """How well this GPU would be told apart if containers shared it. Raises SourceError."""
        with self._using(gpu) as state:
            return state.usage_reader.outlook(state.device, self.opening)

    @contextmanager
    def _using(self, gpu: Device) -> Iterator[Gpu]:
        with self._driver.using():
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
