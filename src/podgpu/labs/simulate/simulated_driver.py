"""Simulates the driver: an object with the functions and constants of the pynvml module.

Functions that are not simulated raise "not supported". One lock protects all state.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType
from typing import Any

import pynvml

from podgpu.clock import Clock
from podgpu.labs.simulate import device_calls as calls
from podgpu.labs.simulate.gpu import SimulatedGpu, SimulatedInstance, SimulatedLoad
from podgpu.labs.simulate.models import MigProfile, parse_spec
from podgpu.model import Device
from podgpu.node.gpu.nvml.nvml_telemetry import NvmlTelemetry
from podgpu.node.gpu.nvml.switch_attribution import (
    FECS_RECORD,
    RECORD,
    SAVED,
    SWITCHED_IN,
    WHOLE_GPU,
)
from podgpu.node.gpu.nvml.switch_splitter import SwitchLogFactory

_MAX_WAIT_SECONDS = 0.1
"""Maximum real time to wait for events.

It is short, because stopping podgpu waits until it has passed.
"""
# Time slice and context switch, measured on an H200.
_SLICE_NS = 2_200_000
_SWITCH_NS = 84_000
_NUMBERS = 1 << 16  # records are numbered with 16 bits
_NO_NVLINK = pynvml.NVML_P2P_STATUS_NOT_SUPPORTED
_Target = tuple[SimulatedGpu, SimulatedInstance | None]


@dataclass(slots=True)
class EventSet:
    registered: set[int] = field(default_factory=set)  # numbers of GPUs
    waiting: deque[Any] = field(default_factory=deque)


class SimulatedNvml:
    """Replaces the pynvml module: `driver.nvmlInit()`, `driver.nvmlDeviceGetPowerUsage(handle)`.

    UUIDs are derived from the name of the node, so each node has different UUIDs.
    """

    def __init__(
        self,
        spec: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        driver_version: str = "580.159.04",
        node: str = "",
    ) -> None:
        self.calls: Counter[str] = Counter()  # number of calls per function
        self.lock = threading.RLock()

        # Notified when an event occurs or a session ends.
        self._changed = threading.Condition(self.lock)
        self._clock = clock
        self._node = node
        self._driver_version = driver_version

        self._sessions = 0
        self._addresses = itertools.count(0x7F00_0000_1000, 0x40)
        self._layouts = itertools.count()
        self._targets: dict[int, _Target] = {}  # address in a handle -> device
        self._event_sets: dict[int, EventSet] = {}
        self._gpm_samples: dict[int, calls.GpmSample] = {}

        # Computed once, so that the timestamp of a sample never changes.
        epoch = wall() - clock()
        self.gpus: list[SimulatedGpu] = []

        for number, gpu_spec in enumerate(parse_spec(spec)):
            gpu = SimulatedGpu(
                number=number,
                model=gpu_spec.model,
                uuid=f"GPU-{self._make_uuid('gpu', number)}",
                minor=number,
                at=clock(),
                epoch=epoch,
            )
            if gpu_spec.profiles:
                self._create_instances(gpu, gpu_spec.profiles)
            self.gpus.append(gpu)

        self._listed = list(self.gpus)  # GPUs in the order of their index
        # A single GPU has no active NVLink, as measured on an H200.
        linked = [gpu for gpu in self.gpus if gpu.model.nvlinks]
        if len(linked) > 1:
            for gpu in linked:
                gpu.nvlinks = gpu.model.nvlinks
                gpu.fabric_state = pynvml.NVML_GPU_FABRIC_STATE_COMPLETED

        self._functions = self._make_functions()

    def place(self, load: SimulatedLoad) -> None:
        with self.lock:
            self.advance(self.gpus[load.gpu]).place(load)

    def remove(self, pid: int) -> None:
        with self.lock:
            if not sum(self.advance(gpu).evict(pid) for gpu in self.gpus):
                raise ValueError(f"no simulated process {pid}")

    def lose(self, number: int) -> None:
        """Makes a GPU fall off the bus."""
        self.gpus[number].lost = True

    def recover(self, number: int) -> None:
        self.gpus[number].lost = False

    def reset(self, number: int) -> None:
        """Resets a GPU: ends its processes, invalidates its handles, and restores a lost GPU."""
        gpu = self.gpus[number]
        with self.lock:
            self.recover(number)
            self.advance(gpu).reset()
            for address, target in list(self._targets.items()):
                if target[0] is gpu:
                    del self._targets[address]

    def advise(self, number: int, action: int) -> None:
        """Sets the recovery action of a GPU. A reset clears it."""
        self.gpus[number].recovery = action

    def raise_xid(self, number: int, xid: int, gi_id: int | None = None) -> None:
        gpu = self.gpus[number]
        with self.lock:
            address = self._find_address((gpu, None))
            if address is None:
                # After a reload of the driver, a GPU has no handle until podgpu lists the GPUs.
                return

            event = calls.fill(
                pynvml.c_nvmlEventData_t(),
                device=calls.pointer_to(address, pynvml.c_nvmlDevice_t),
                eventType=pynvml.nvmlEventTypeXidCriticalError,
                eventData=xid,
                gpuInstanceId=calls.NO_INSTANCE if gi_id is None else gi_id,
            )

            for event_set in self._event_sets.values():
                if number in event_set.registered:
                    event_set.waiting.append(event)
            self._changed.notify_all()

    def __getattr__(self, name: str) -> Any:
        # Python calls this method only for missing attributes. The first access stores the function
        # as an attribute.
        known = getattr(pynvml, name)
        if name not in self._functions and not isinstance(known, FunctionType):
            return known
        call = partial(self._call, name)
        setattr(self, name, call)
        return call

    def _call(self, name: str, *arguments: Any) -> Any:
        with self.lock:
            self.calls[name] += 1
        return self._execute(name, *arguments)

    def _execute(self, name: str, *arguments: Any) -> Any:
        with self.lock:
            if name not in ("nvmlInit", "nvmlShutdown"):
                self._check_session()
            if name in self._functions:
                return self._functions[name](*arguments)
            if not name.startswith(("nvmlDevice", "nvmlGpm")):
                calls.raise_error()

            gpu, instance = self._find(self._targets, arguments[0])
            _check_present(gpu)
            return self._call_device(name, self.advance(gpu), instance, *arguments[1:])

    def _call_device(
        self, name: str, gpu: SimulatedGpu, instance: SimulatedInstance | None, *arguments: Any
    ) -> Any:
        if "RunningProcesses" in name:
            gi_id = None if instance is None else instance.gi_id
            return calls.list_processes(gpu.running(gi_id), name)
        if instance is not None:
            function = calls.MIG_CALLS.get(name) or calls.raise_error()
            return function(gpu, instance, *arguments)

        match name:
            case "nvmlDeviceGetIndex":
                return self._listed.index(gpu)
            case "nvmlDeviceGetMigDeviceHandleByIndex":
                return self._find_mig_handle(gpu, *arguments)
            case "nvmlDeviceGetP2PStatus":
                return self._find_link_status(gpu, arguments[0])
            case "nvmlDeviceGetFieldValues":
                return calls.read_field_values(gpu, arguments[0])
            case "nvmlDeviceRegisterEvents":
                event_set = self._find(self._event_sets, arguments[1])
                return event_set.registered.add(gpu.number)
            case "nvmlGpmSampleGet":
                return self._fill_gpm_sample(gpu, None, *arguments)
            case "nvmlGpmMigSampleGet":
                return self._fill_gpm_sample(gpu, *arguments)
        function = calls.GPU_CALLS.get(name) or calls.raise_error()
        return function(gpu, *arguments)

    def _find_link_status(self, gpu: SimulatedGpu, pointer: Any) -> Any:
        peer, _ = self._find(self._targets, pointer)
        _check_present(peer)
        if gpu.nvlinks and peer.nvlinks:
            return pynvml.NVML_P2P_STATUS_OK
        return _NO_NVLINK

    def _make_functions(self) -> dict[str, Callable[..., Any]]:
        """Returns the functions whose first argument is not a device."""
        return {
            "nvmlInit": self._init,
            "nvmlShutdown": self._shutdown,
            "nvmlSystemGetDriverVersion": lambda: self._driver_version,
            "nvmlSystemGetNVMLVersion": lambda: f"13.{self._driver_version}",
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 13000,
            "nvmlDeviceGetCount": lambda: len(self._listed),
            "nvmlDeviceGetHandleByIndex": self._find_by_index,
            "nvmlDeviceGetHandleByUUID": self._find_by_uuid,
            "nvmlDeviceGetHandleByPciBusId": self._find_by_bus_id,
            "nvmlGpmSampleAlloc": lambda: self._allocate(
                self._gpm_samples, calls.GpmSample(), pynvml.c_nvmlGpmSample_t
            ),
            "nvmlGpmSampleFree": lambda sample: self._free(self._gpm_samples, sample),
            "nvmlGpmMetricsGet": self._read_gpm,
            "nvmlEventSetCreate": lambda: self._allocate(
                self._event_sets, EventSet(), pynvml.c_nvmlEventSet_t
            ),
            "nvmlEventSetFree": lambda event_set: self._free(self._event_sets, event_set),
            "nvmlEventSetWait_v2": self._wait,
        }

    def _init(self) -> None:
        self._sessions += 1

    def _shutdown(self) -> None:
        if not self._sessions:
            calls.raise_error(pynvml.NVML_ERROR_UNINITIALIZED)
        self._sessions -= 1
        if not self._sessions:
            self._gpm_samples.clear()
            self._event_sets.clear()
        self._changed.notify_all()

    def _check_session(self) -> None:
        if not self._sessions:
            calls.raise_error(pynvml.NVML_ERROR_UNINITIALIZED)

    def advance(self, gpu: SimulatedGpu) -> SimulatedGpu:
        """Updates the state of the GPU to the current time. The caller must hold the lock."""
        gpu.advance(self._clock())
        return gpu

    def _find_address(self, wanted: _Target) -> int | None:
        for address, target in self._targets.items():
            if target == wanted:
                return address
        return None

    def _find_handle(self, gpu: SimulatedGpu, instance: SimulatedInstance | None = None) -> Any:
        _check_present(gpu)
        address = self._find_address((gpu, instance))
        if address is None:
            address = next(self._addresses)
            self._targets[address] = gpu, instance
        return calls.pointer_to(address, pynvml.c_nvmlDevice_t)

    def _find_by_index(self, index: int) -> Any:
        if index >= len(self._listed):
            calls.raise_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._find_handle(self._listed[index])

    def _find_by_bus_id(self, wanted: str) -> Any:
        for gpu in self._listed:
            if calls.pci_bus_id(gpu) == wanted:
                return self._find_handle(gpu)
        calls.raise_error(pynvml.NVML_ERROR_NOT_FOUND)

    def _find_by_uuid(self, wanted: str) -> Any:
        for gpu in self._listed:
            if gpu.uuid == wanted:
                return self._find_handle(gpu)
            for instance in gpu.instances:
                if instance.uuid == wanted:
                    return self._find_handle(gpu, instance)
        calls.raise_error(pynvml.NVML_ERROR_NOT_FOUND)

    def _find_mig_handle(self, gpu: SimulatedGpu, index: int) -> Any:
        if not gpu.model.profiles:
            calls.raise_error()
        for instance in gpu.instances:
            if instance.index == index:
                return self._find_handle(gpu, instance)
        calls.raise_error(pynvml.NVML_ERROR_NOT_FOUND)

    def _create_instances(self, gpu: SimulatedGpu, profiles: Sequence[MigProfile]) -> None:
        """Creates MIG instances.

        As in the real driver, a whole GPU has the id 0, halves begin at 1, quarters at 3.
        """
        layout = next(self._layouts)
        instances: dict[int, SimulatedInstance] = {}
        for index, profile in enumerate(profiles):
            gi_id = gpu.model.memory_slices // profile.memory_slices - 1
            while gi_id in instances:
                gi_id += 1

            number = self._make_uuid("mig", gpu.number, layout, index)
            instances[gi_id] = SimulatedInstance(index, gi_id, profile, f"MIG-{number}")

        gpu.set_instances(tuple(instances.values()))

    def _make_uuid(self, *parts: object) -> uuid.UUID:
        first = f"{self._node}/0" if self._node else "0"
        name = "/".join([first, *map(str, parts)])
        digest = hashlib.sha256(name.encode()).digest()
        return uuid.UUID(bytes=digest[:16], version=4)

    def _allocate(self, objects: dict[int, Any], new: Any, kind: Any) -> Any:
        address = next(self._addresses)
        objects[address] = new
        return calls.pointer_to(address, kind)

    def _find(self, objects: Mapping[int, Any], pointer: Any) -> Any:
        found = objects.get(calls.address_in(pointer))
        if found is None:
            calls.raise_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return found

    def _free(self, objects: dict[int, Any], pointer: Any) -> None:
        self._find(objects, pointer)
        del objects[calls.address_in(pointer)]
        self._changed.notify_all()

    def _wait(self, pointer: Any, timeout_ms: int) -> Any:
        """Implements nvmlEventSetWait_v2, but waits at most _MAX_WAIT_SECONDS."""
        if not self._find(self._event_sets, pointer).waiting:
            self._changed.wait(min(timeout_ms / 1000, _MAX_WAIT_SECONDS))

        # Meanwhile, the session or the set may have ended.
        self._check_session()
        waiting = self._find(self._event_sets, pointer).waiting
        if not waiting:
            calls.raise_error(pynvml.NVML_ERROR_TIMEOUT)
        return waiting.popleft()

    def _fill_gpm_sample(self, gpu: SimulatedGpu, gi_id: int | None, pointer: Any) -> Any:
        if not gpu.model.gpm:
            calls.raise_error()

        # Raises an error if the sample was not allocated.
        self._find(self._gpm_samples, pointer)
        meter = gpu.meter if gi_id is None else gpu.instance_meters[gi_id]
        sample = calls.GpmSample(gpu.number, gi_id, gpu.at, gpu.nvlinks, meter)
        self._gpm_samples[calls.address_in(pointer)] = sample
        return pointer

    def _read_gpm(self, request: Any) -> Any:
        first = self._find(self._gpm_samples, request.sample1)
        second = self._find(self._gpm_samples, request.sample2)
        return calls.evaluate_gpm(request, first, second)


def _check_present(gpu: SimulatedGpu) -> None:
    if gpu.lost:
        calls.raise_error(pynvml.NVML_ERROR_GPU_IS_LOST)


class RoundRobinLog:
    """Simulates the context-switch log of a GPU without MIG.

    Processes with work run in turn, for one time slice each. The context switches are computed when
    the log is read.
    """

    def __init__(self, driver: SimulatedNvml, uuid: str) -> None:
        self._driver = driver
        self._gpu = next(gpu for gpu in driver.gpus if gpu.uuid == uuid)
        self._at = self.now()
        self._resident = 0  # pid whose context is on the GPU; 0 before the first one
        self._works = False

        self._left: dict[int, int] = {}  # pid -> nanoseconds of work left in the current period
        self._next: dict[int, int] = {}  # pid -> start of the next period
        self._records: list[tuple[int, int, int]] = []
        """Time, tag and pid of the switches that have not been read yet."""
        self._number = 0  # of the next record

    def now(self) -> int:
        with self._driver.lock:
            return int((self._driver.advance(self._gpu).at + self._gpu.epoch) * 1e9)

    def drain(self) -> bytes:
        now = self.now()
        self._run(now)

        chunk = b""
        later = []
        for record in self._records:
            at, tag, pid = record
            # The slice that runs now is simulated to its end.
            if at > now:
                later.append(record)
                continue

            chunk += RECORD.pack(
                FECS_RECORD, 0, 0, tag, 0, self._number, pid, pid, 0, WHOLE_GPU, WHOLE_GPU, at
            )
            self._number = (self._number + 1) % _NUMBERS

        self._records = later
        return chunk

    def is_busy(self) -> bool:
        self._run(self.now())
        return self._works

    def close(self) -> None:
        self._records = []

    def _run(self, until: int) -> None:
        loads = {load.pid: load for load in self._gpu.running()}
        while self._at < until:
            for load in loads.values():
                self._begin_period(load)

            ready = sorted(pid for pid in loads if self._left.get(pid))
            self._works = bool(ready)
            # Nothing runs until the next period of a process begins.
            if not ready:
                self._at = min((self._next[pid] for pid in loads), default=until)
                continue

            # In the order of pids, and after the last one, the first one again.
            later = [pid for pid in ready if pid > self._resident]
            following = later or ready
            self._run_slice(following[0])

    def _begin_period(self, load: SimulatedLoad) -> None:
        """Adds the work of the load's next period, if the period begins now."""
        pid = load.pid
        period = int(load.period * 1e9)
        if pid not in self._next:
            phase = int(load.phase * 1e9)
            self._next[pid] = self._at + phase % period
        if self._next[pid] > self._at:
            return

        if not self._left.get(pid):
            start = self._at / 1e9 - self._gpu.epoch
            self._left[pid] = int(load.demand(start) * period)
        self._next[pid] += period

    def _run_slice(self, pid: int) -> None:
        if pid != self._resident:
            if self._resident:
                self._records.append((self._at, SAVED, self._resident))
                self._at += _SWITCH_NS
            self._records.append((self._at, SWITCHED_IN, pid))
            self._resident = pid

        ran = min(self._left[pid], _SLICE_NS)
        self._left[pid] -= ran
        self._at += ran


def read_simulated(
    driver: SimulatedNvml, clock: Clock, logs: SwitchLogFactory, sees_processes: bool = True
) -> NvmlTelemetry:
    """Returns the source that reads this driver.

    Keeps the method of `logs` (`--usage-from`), but opens simulated logs of context switches.
    """
    count = len(driver.gpus)

    def open_log(gpu: Device, _version: str) -> RoundRobinLog:
        return RoundRobinLog(driver, gpu.uuid)

    simulated_logs = replace(logs, open_log=open_log, privileged=lambda: True)
    return NvmlTelemetry(
        driver,
        name="simulated",
        count_expected=lambda: count,
        clock=clock.monotonic,
        wall=clock.wall,
        sees_processes=sees_processes,
        switch_logs=simulated_logs,
    )
