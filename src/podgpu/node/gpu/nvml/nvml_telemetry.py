"""Lists and reads the GPUs of the node through NVML.

NVML updates its list of GPUs only when it is initialized, which interrupts all readers. So podgpu
restarts NVML only if the number of GPUs on the PCI bus changes, or if no GPU answers. While NVML
lists fewer GPUs than the bus, podgpu restarts it every 2 minutes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pynvml

from podgpu.errors import DeviceLost, DriverGone, SourceError, StartError, Unsupported
from podgpu.known import select_known
from podgpu.metrics.fields import P2P_FIELD, Field, detail_helps, fields
from podgpu.model import (
    Detail,
    Device,
    DeviceUsage,
    ErrorEvent,
    FieldValues,
    GpuReading,
    Inventory,
    ProcessUsage,
    device_key,
)
from podgpu.node.gpu.nvml.driver import (
    CallGuard,
    DeviceHandle,
    DevicePlan,
    GpmSampler,
    GpuLayout,
    NvmlDriver,
    handle_address,
    list_instances,
    list_processes,
    open_gpu,
    parse_instance_id,
)
from podgpu.node.gpu.nvml.process_usage import CounterReading, UsageReader, UsageSettings
from podgpu.node.gpu.nvml.switch_splitter import SwitchListener, SwitchLogFactory
from podgpu.node.gpu.source import ErrorEvents, FindProcesses, find_no_processes, list_peer_state

_log = logging.getLogger(__name__)
_MAX_PLANS = 64  # of one GPU; each set of fields has a plan for each device
_ENERGY_FIELD = 156  # in fields.csv
_BUS_SECONDS = 10.0
# Maximum wait for calls in progress before the driver is closed. It is longer than a wait for XIDs,
# and shorter than the shortest deadline of `inventory`.
_CLOSE_WAIT = 0.45
_RESTART_SECONDS = 10.0  # minimum time between two restarts of NVML
SEARCH_SECONDS = 120.0  # interval of restarts while NVML lists fewer GPUs than the PCI bus

# Interval at which additional fields and links of a GPU are read. This needs about fifty short
# calls.
_SLOW_SECONDS = 60.0
# How long podgpu assumes that MIG stays disabled, because reading the mode costs 0.4 ms of CPU
# (H200).
_MIG_OFF_SECONDS = 1.5
_LINK_STATES = [(pynvml.NVML_FI_DEV_NVLINK_GET_STATE, link) for link in range(36)]
_NVIDIA = "0x10de"
# VGA controller and 3D controller. NVSwitches have another class.
_DISPLAY_CLASSES = ("0x0300", "0x0302")

# Opening GPUs

# Maximum wait until all GPUs are open. It is shorter than the usual deadline of `inventory`.
_MAX_WAIT_SECONDS = 4.5
# Minimum wait for the next GPU after one was opened. The wait is longer if GPUs open slowly.
# Without persistence mode, opening a GPU takes one or two seconds.
_QUIET_SECONDS = 0.5
_OpenResult = tuple[int, DeviceHandle | SourceError | StartError]  # index of a GPU, and the result


def _open_in_thread(driver: NvmlDriver, index: int, results: SimpleQueue[_OpenResult]) -> None:
    try:
        with driver.hold():
            results.put((index, open_gpu(driver, index)))
    except (SourceError, StartError) as e:
        results.put((index, e))


@dataclass(slots=True)
class GpuOpener:
    """Opens each GPU in its own thread, so that a GPU that hangs does not delay the others."""

    _driver: NvmlDriver
    _clock: Callable[[], float]
    _results: SimpleQueue[_OpenResult] = field(default_factory=SimpleQueue)
    # Indices of the GPUs that are being opened, and when this began.
    pending: dict[int, float] = field(default_factory=dict)
    # Indices of the GPUs that could not be opened, and why.
    errors: dict[int, SourceError | StartError] = field(default_factory=dict)

    def open(self, indices: Iterable[int], quiet: float) -> Iterator[DeviceHandle]:
        """Opens these GPUs, unless they are pending. Also yields GPUs that were pending before.

        Waits until all new GPUs are open, or until no other GPU was opened for `quiet` seconds. The
        next call yields slower GPUs.
        """
        new = [index for index in indices if index not in self.pending]
        for index in new:
            self.pending[index] = self._clock()
            target = partial(_open_in_thread, self._driver, index, self._results)
            threading.Thread(target=target, name=f"open-gpu{index}", daemon=True).start()

        began = time.monotonic()
        deadline = began + _MAX_WAIT_SECONDS
        while self.pending:
            # GPUs that are pending for longer may hang, so they are not waited for.
            wait = 0.0
            if any(index in self.pending for index in new):
                wait = min(quiet, deadline - time.monotonic())
            try:
                index, result = self._results.get(timeout=max(0.0, wait))
            except Empty:
                break

            # If opening takes long, so may opening the next one.
            elapsed = time.monotonic() - began
            quiet = max(_QUIET_SECONDS, 1.5 * elapsed)
            del self.pending[index]
            self.errors.pop(index, None)
            if isinstance(result, DeviceHandle):
                yield result
            else:
                self.errors[index] = result

    def explain_missing(self) -> dict[int, str]:
        """Returns the indices of the GPUs that are not open, and why."""
        reasons = {index: str(error) for index, error in self.errors.items()}
        now = self._clock()
        for index, began in self.pending.items():
            seconds = now - began
            reasons[index] = f"the driver has not answered for {seconds:.0f} s"
        return reasons

    def check_errors(self, listed: int) -> None:
        """Raises an error that affects all GPUs. `listed`: how many the driver lists."""
        errors = list(self.errors.values())
        for error in errors:
            if isinstance(error, StartError):
                raise error

        gone = [error for error in errors if isinstance(error, DriverGone)]
        if gone and len(gone) == listed:
            raise gone[0]


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
        """Does not open the driver.

        `count_expected`: function that returns the number of GPUs on the PCI bus, or None if it is
        unknown. `sees_processes`: True if podgpu is in the host's PID namespace. Otherwise, NVML's
        process lists are empty.
        """
        self.name = name
        self.switch_logs = switch_logs or SwitchLogFactory()
        self._settings = UsageSettings(sees_processes, self.switch_logs, clock, wall)
        self._driver = NvmlDriver(nvml)
        self._count_expected = count_expected
        self._clock = clock
        self._xids = XidWatcher(self._driver, wall)
        self._opening = threading.Lock()  # held while the driver is opened or closed
        self._is_open = False  # True if the driver is open and has listed its GPUs
        self._opener = GpuOpener(self._driver, clock)
        self._gpus: dict[str, NvmlGpu] = {}  # GPUs by UUID
        # GPUs with an invalid handle. They are freed only when the driver is closed: workers may
        # still use them.
        self._replaced: list[NvmlGpu] = []
        # GPUs by UUID, from before the driver was reopened. If a GPU is found again, its usage has
        # no gap.
        self._previous: dict[str, NvmlGpu] = {}
        self.expected: int | None = None
        self._bus_read_at = float("-inf")
        # True if the PCI bus changed, or if the last restart failed because a call hung.
        self._wants_restart = False
        self._restarted_at = float("-inf")
        self._listed = 0  # number of GPUs that the driver lists

    def inventory(self) -> Inventory:
        self._read_bus()
        with self._opening:
            if self._is_open and self._must_restart():
                self._restarted_at = self._clock()
                # If a call hangs, the driver stays open.
                self._wants_restart = not self._close(_CLOSE_WAIT)
            if not self._is_open:
                self._open()
            self._open_gpus()
            self._opener.check_errors(self._listed)
            return self._make_inventory()

    def _make_inventory(self) -> Inventory:
        gpus = [gpu.device for gpu in self._gpus.values()]
        gpus.sort(key=lambda device: device.index or 0)
        hung = frozenset(self._opener.pending)
        return Inventory(tuple(gpus), self._opener.explain_missing(), hung)

    def _open_gpus(self) -> None:
        """Opens the GPUs that are not open yet. Waits longer for the first one."""
        opened = {gpu.device.index for gpu in self._gpus.values()}
        missing = [index for index in range(self._listed) if index not in opened]
        quiet = _QUIET_SECONDS if self._gpus else _MAX_WAIT_SECONDS
        for handle in self._opener.open(missing, quiet):
            self._add_gpu(handle)

    def _add_gpu(self, handle: DeviceHandle) -> None:
        gpu = NvmlGpu(self._driver, handle, self._settings, self._xids)
        uuid = gpu.device.uuid
        previous = self._previous.pop(uuid, None)
        if previous is not None:
            # The MIG mode is known until it is read again.
            device = replace(gpu.device, mig_enabled=previous.device.mig_enabled)
            gpu.layout = GpuLayout(replace(handle, device=device))
            gpu.usage_reader.continue_after(previous.usage_reader)

        self._gpus[uuid] = gpu

    def _read_bus(self) -> None:
        now = self._clock()
        if now - self._bus_read_at < _BUS_SECONDS:
            return

        self._bus_read_at = now
        before = self.expected
        self.expected = self._count_expected()
        if self.expected != before:
            self._wants_restart = True

    def _must_restart(self) -> bool:
        elapsed = self._clock() - self._restarted_at
        if elapsed < _RESTART_SECONDS:
            return False

        answers = select_known(gpu.answers for gpu in self._gpus.values())
        # A GPU that could not be opened does not answer, either.
        are_known = bool(answers or self._opener.errors)
        none_answers = are_known and not any(answers)
        if self._wants_restart or none_answers:
            return True

        some_missing = self.expected is not None and self._listed < self.expected
        return some_missing and elapsed >= SEARCH_SECONDS

    def _open(self) -> None:
        self._driver.open()
        self._wants_restart = False
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
            closed = self._close(wait)
            if not closed:
                _log.warning("the driver cannot be closed, because a call into it has not returned")
            self._previous = {}  # the released driver may be unloaded, which resets its counters
            return closed
        finally:
            self._opening.release()

    def _close(self, wait: float) -> bool:
        if not self._driver.close(wait, self._free):
            return False

        # Omits GPUs that did not answer, because their counters may have been reset.
        for uuid, gpu in self._gpus.items():
            if gpu.answers is not False:
                self._previous[uuid] = gpu

        self._gpus = {}
        self._replaced = []
        self._opener = GpuOpener(self._driver, self._clock)
        self._is_open = False
        return True

    def _free(self) -> None:
        self._xids.free()
        for gpu in [*self._gpus.values(), *self._replaced]:
            gpu.close()

    def read(self, gpu: Device, fields: Sequence[Field]) -> GpuReading:
        with self._hold(gpu) as opened:
            reading = opened.read(fields)
            ids = [field.id for field in fields]
            if P2P_FIELD in ids:
                peers = self._read_peers(opened)
                reading = replace(reading, details=tuple(peers))
            return reading

    def _read_peers(self, gpu: NvmlGpu) -> Iterator[Detail]:
        """Yields the state of the NVLink connection between the GPU and each other GPU."""
        index = self._driver.constant("NVML_P2P_CAPS_INDEX_NVLINK")
        # A copy, because the next inventory can add GPUs during a reading that takes long.
        for peer in list(self._gpus.values()):
            if peer.device.uuid == gpu.device.uuid:
                continue
            # The peer may be lost, which is no error of this GPU.
            with suppress(SourceError):
                state = self._driver.call("nvmlDeviceGetP2PStatus", gpu.handle, peer.handle, index)
                yield from list_peer_state(peer.device.index, state)

    def processes(self, gpu: Device) -> Sequence[ProcessUsage]:
        with self._hold(gpu) as opened:
            return list_processes(self._driver, opened.read_layout())

    def usage(
        self, gpu: Device, shared: Collection[str] = (), find: FindProcesses = find_no_processes
    ) -> DeviceUsage:
        with self._hold(gpu) as opened:
            return opened.usage_reader.read(opened.read_layout(), shared, find)

    def open_switch_log(self, gpu: Device) -> SwitchListener:
        """Opens the GPU's context-switch log. Raises SourceError."""
        with self._hold(gpu) as opened:
            return self.switch_logs.open_listener(
                self._driver, opened.layout.gpu, self._settings.wall
            )

    @contextmanager
    def _hold(self, gpu: Device) -> Iterator[NvmlGpu]:
        with self._driver.hold():
            opened = self._gpus.get(gpu.uuid)
            if opened is None:
                raise DeviceLost(f"GPU {gpu.uuid} is not listed by the driver")
            try:
                opened = self._check_handle(opened)
                yield opened
                opened.answers = True
            except (DeviceLost, DriverGone):
                opened.answers = False
                raise

    def _check_handle(self, gpu: NvmlGpu) -> NvmlGpu:
        """Reopens the GPU if its handle is invalid, for example after a reset.

        With an invalid handle, NVML calls fail as if they were not supported. So this reads the
        UUID, which every GPU supports. Raises DeviceLost, or DriverGone if the driver may have been
        restarted.
        """
        device = gpu.device
        with gpu.handle_lock:
            # Another worker may have just reopened the GPU.
            current = self._gpus[device.uuid]
            if current is not gpu:
                return current

            with suppress(SourceError):
                if self._driver.call("nvmlDeviceGetUUID", gpu.handle) == device.uuid:
                    return gpu

            reopened = NvmlGpu(self._driver, self._reopen(gpu), self._settings, self._xids)
            self._replaced.append(gpu)
            self._gpus[device.uuid] = reopened
            return reopened

    def _reopen(self, gpu: NvmlGpu) -> DeviceHandle:
        device = gpu.device
        try:
            handle = self._driver.call("nvmlDeviceGetHandleByPciBusId", device.pci_bus_id)
            uuid = self._driver.call("nvmlDeviceGetUUID", handle)
        except (DeviceLost, DriverGone):
            raise
        except SourceError as e:
            raise DriverGone(
                f"the driver no longer finds {device.text} by its handle or its PCI slot: {e}",
                "stale_handle",
            ) from e

        if uuid != device.uuid:
            raise DeviceLost(
                f"another GPU has replaced {device.text} at PCI slot {device.pci_bus_id}"
            )

        _log.info(
            "%s was reopened at PCI slot %s, because its handle was invalid",
            device.text,
            device.pci_bus_id,
        )
        return DeviceHandle(device, handle)

    def error_events(self) -> Sequence[ErrorEvent]:
        return self._xids.events.drain()


class NvmlGpu:
    """One physical GPU.

    `read`, `read_layout` and `usage_reader` may be used in different threads.
    """

    def __init__(
        self, driver: NvmlDriver, gpu: DeviceHandle, settings: UsageSettings, xids: XidWatcher
    ) -> None:
        self._driver = driver
        self.layout = GpuLayout(gpu)  # at the last reading
        self.handle_lock = threading.Lock()  # held while the handle is checked
        # True if the last reading succeeded. None before the first reading.
        self.answers: bool | None = None

        self._clock = settings.clock
        self._has_mig = True
        self._mig_off_at = float("-inf")  # when MIG was last found to be disabled
        self.usage_reader = UsageReader(driver, gpu.handle, settings)

        # State of `read`
        self._xids = xids
        # False if the GPU cannot be registered. None if this is not known yet.
        self._xids_registered: bool | None = None

        # Plans by field ids and device key.
        self._plans: dict[tuple[tuple[int, ...], str], DevicePlan] = {}
        self._slow_values_at = float("-inf")
        self._slow_values: FieldValues = {}
        self._links_up: int | None = None

    def read(self, fields: Sequence[Field]) -> GpuReading:
        now = self._clock()
        self._register_xids()
        self._follow_layout()

        values: dict[Device, FieldValues] = {}
        unsupported: list[tuple[str, int]] = []
        dropped = []
        errors = []
        for target in (self.layout.gpu, *self.layout.instances):
            plan = self._find_plan(target, fields)
            values[target.device] = plan.read(now)
            for field_id in sorted(plan.guard.unsupported):
                unsupported.append((target.device.key, field_id))
            dropped += plan.guard.dropped
            errors += plan.guard.errors

        energy = values[self.device].get(_ENERGY_FIELD)
        if isinstance(energy, int):
            self.usage_reader.energy.shared = CounterReading(now, energy)
        # A reading without fields only needs the devices, see `CompanionDriver`.
        if fields:
            self._read_slow_values(now)
        return GpuReading(
            values,
            unsupported=tuple(unsupported),
            dropped=tuple(dropped),
            errors=tuple(errors),
            slow_values=self._slow_values if fields else {},
            reports_errors=bool(self._xids_registered),
            links_up=self._links_up if fields else None,
        )

    def close(self) -> None:
        """Frees the driver's resources. No other method may run at the same time."""
        self._drop_plans()
        self.usage_reader.close()

    @property
    def device(self) -> Device:
        return self.layout.gpu.device

    @property
    def handle(self) -> Any:
        return self.layout.gpu.handle

    def _register_xids(self) -> None:
        """Registers the GPU for XIDs. If this fails, the next reading retries."""
        if self._xids_registered is not None:
            return

        try:
            self._xids_registered = self._xids.register(self.device.uuid, self.handle)
        except Unsupported:
            self._xids_registered = False
            _log.info("%s does not support XID events", self.device.text)
        except SourceError as e:
            _log.debug("XID errors of %s cannot be watched: %s", self.device.text, e)

    def read_layout(self) -> GpuLayout:
        now = self._clock()
        enabled = False
        if self._has_mig and now - self._mig_off_at >= _MIG_OFF_SECONDS:
            try:
                enabled = bool(self._driver.call("nvmlDeviceGetMigMode", self.handle)[0])
            except Unsupported:
                self._has_mig = False
            if not enabled:
                self._mig_off_at = now

        gpu = self.layout.gpu
        if gpu.device.mig_enabled != enabled:
            gpu = replace(gpu, device=replace(gpu.device, mig_enabled=enabled))

        instances = list_instances(self._driver, gpu) if enabled else []
        return GpuLayout(gpu, tuple(instances))

    def _follow_layout(self) -> None:
        layout = self.read_layout()
        if layout != self.layout:
            state = "on" if layout.gpu.device.mig_enabled else "off"
            profiles = ", ".join(each.device.profile for each in layout.instances) or "none"
            _log.info("GPU %d: MIG %s, instances: %s", self.device.index, state, profiles)
            self._drop_plans()

        self.layout = layout

    def _find_plan(self, target: DeviceHandle, fields: Sequence[Field]) -> DevicePlan:
        device = target.device
        key = tuple(field.id for field in fields), device.key
        plan = self._plans.get(key)
        if plan is not None:
            return plan

        # The fields to read may have changed many times.
        if len(self._plans) >= _MAX_PLANS:
            self._drop_plans()
        wanted = fields
        if device.is_instance:
            wanted = [field for field in fields if field.per_instance]
        gpm = GpmSampler(self._driver, self.handle, device.gi_id)
        plan = DevicePlan(self._driver, target.handle, gpm, wanted)
        self._plans[key] = plan
        return plan

    def _read_slow_values(self, now: float) -> None:
        if now - self._slow_values_at < _SLOW_SECONDS:
            return

        self._slow_values_at = now
        details = [fields()[number] for number in detail_helps()]
        plan = self._find_plan(self.layout.gpu, details)
        self._slow_values = plan.read(now)
        self._links_up = self._count_links()

    def _count_links(self) -> int | None:
        """Returns the number of active NVLinks, or None if the GPU does not report NVLinks."""
        answer: Sequence[Any] = ()
        with CallGuard[str]().catch():
            answer = self._driver.call("nvmlDeviceGetFieldValues", self.handle, _LINK_STATES)

        states = [entry.value.uiVal for entry in answer if not entry.nvmlReturn]
        if not states:
            return None
        return states.count(pynvml.NVML_FEATURE_ENABLED)

    def _drop_plans(self) -> None:
        for plan in self._plans.values():
            plan.gpm.close()
        self._plans = {}
        self._slow_values_at = float("-inf")


def count_pci_gpus(sysfs: str = "/sys") -> int | None:
    """Counts the NVIDIA GPUs in sysfs. Returns None if sysfs lists none, as on WSL and Tegra."""
    try:
        devices = list(Path(sysfs, "bus/pci/devices").iterdir())
    except OSError:
        return None
    return sum(_is_gpu(device) for device in devices) or None


def _is_gpu(device: Path) -> bool:
    """Returns True for an NVIDIA GPU, unless it belongs to another driver.

    Another driver is, for example, vfio-pci for virtual machines. Returns True for a GPU without a
    driver, because it may be lost.
    """
    try:
        vendor = (device / "vendor").read_text().strip()
        kind = (device / "class").read_text()
    except OSError:
        return False  # the device was removed after it was listed

    driver = (device / "driver").resolve().name  # "driver" if there is no such link
    is_available = driver in ("nvidia", "driver")
    return vendor == _NVIDIA and kind.startswith(_DISPLAY_CLASSES) and is_available


# XIDs

_WAIT_MS = 400
"""Maximum wait for events. A longer wait would delay closing the driver.

Each wait costs 0.17 ms of CPU (H200).
"""


@dataclass(eq=False)
class XidWatcher:
    """Waits for the XID errors of registered GPUs in a separate thread."""

    _driver: NvmlDriver
    _wall: Callable[[], float]
    _event_set: Any = None
    _uuids: dict[int | None, str] = field(default_factory=dict)
    events: ErrorEvents = field(default_factory=ErrorEvents)

    def start(self) -> None:
        """Starts the thread. The driver must be open and held by the caller."""
        self._uuids = {}
        try:
            self._event_set = self._driver.call("nvmlEventSetCreate")
        except DriverGone:
            raise
        except SourceError as e:
            _log.warning("XID errors cannot be watched on this node: %s", e)
            return

        target = partial(self._run, self._event_set)
        threading.Thread(target=target, name="xid-watch", daemon=True).start()

    def register(self, uuid: str, handle: Any) -> bool:
        """Registers a GPU. Returns False if this node does not support XID events.

        Raises Unsupported if the GPU does not support them, and SourceError if the call fails.
        """
        if self._event_set is None:
            return False

        self._uuids[handle_address(handle)] = uuid
        xid = self._driver.constant("nvmlEventTypeXidCriticalError")
        self._driver.call("nvmlDeviceRegisterEvents", handle, xid, self._event_set)
        return True

    def free(self) -> None:
        """Frees the event set, which ends the thread. No driver call may be in progress."""
        event_set = self._event_set
        self._event_set = None
        if event_set is not None:
            with suppress(SourceError):
                self._driver.call("nvmlEventSetFree", event_set)

    def _run(self, event_set: Any) -> None:
        while True:
            try:
                with self._driver.hold(gives_way=True):
                    if event_set is not self._event_set:
                        return
                    data = self._driver.call("nvmlEventSetWait_v2", event_set, _WAIT_MS)
            except DriverGone:
                return
            except SourceError as e:
                # A lost GPU makes each wait fail at once, which would make this a busy loop.
                if e.reason != "timeout":
                    time.sleep(_WAIT_MS / 1000)
                continue

            # NVML cannot return the UUID of a lost GPU.
            uuid = self._uuids.get(handle_address(data.device), "unknown")
            key = device_key(uuid, parse_instance_id(data.gpuInstanceId))
            self.events.add(ErrorEvent(key, int(data.eventData), self._wall()))
