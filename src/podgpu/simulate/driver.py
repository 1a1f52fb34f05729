"""A simulated driver: an object with the functions, constants and structures of the pynvml module.

Functions that are not simulated return "not supported". The real driver is never called. One lock protects all state.
It is not held while a call hangs.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import pynvml

from podgpu.simulate.device_calls import (
    GPU_CALLS,
    MIG_CALLS,
    NO_INSTANCE,
    GpmSample,
    address_in,
    evaluate_gpm,
    list_processes,
    pci_bus_id,
    pointer_to,
    raise_error,
    read_field_values,
)
from podgpu.simulate.engine import Engine, SimulatedSwitchLog
from podgpu.simulate.gpu import Meter, SimulatedGpu, SimulatedInstance, SimulatedLoad, lay_out
from podgpu.simulate.models import GpuSpec, MigProfile, parse_profiles, parse_spec

_PYNVML_NAMES = ("nvml", "NVML", "c_nvml", "struct_c_nvml")
_HARMLESS = frozenset({"nvmlStructToFriendlyObject", "nvmlFriendlyObjectToStruct", "nvmlExceptionClass"})
"""Functions of pynvml that do not call the driver."""
_GPU_CLOCK_LAG_NS = 1_000_000  # how far the GPU's clock is behind the system clock; on an H200 it drifts by 7 µs/s
_MAX_WAIT_SECONDS = 0.025
"""Maximum wait for events, in real time, because an injected clock may not advance. Short, because closing the driver
waits for the end of this wait."""
_FIRST_ADDRESS, _ADDRESS_STEP = 0x7F00_0000_1000, 0x40


@dataclass(slots=True)
class EventSet:
    registered: set[int] = field(default_factory=set)  # numbers of GPUs
    waiting: deque[Any] = field(default_factory=deque)


class SimulatedNvml:
    """Replaces the pynvml module: `driver.nvmlInit()`, `driver.nvmlDeviceGetPowerUsage(handle)`.

    `uuids` and `minors` are indexed by GPU number, `mig_uuids` by (GPU number, MIG slot). Missing values are derived
    from the seed and the node's name, so that GPUs of different nodes differ. `jitter`: relative variation of the
    activity.
    """

    def __init__(
        self,
        spec: str | Sequence[GpuSpec],
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        uuids: Sequence[str] = (),
        mig_uuids: Mapping[tuple[int, int], str] | None = None,
        minors: Sequence[int] = (),
        jitter: float = 0.04,
        driver_version: str = "580.159.04",
        node: str = "",
    ) -> None:
        self.calls: Counter[str] = Counter()  # number of calls per function
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)  # notified when an event occurs or a session ends
        self._clock = clock
        self._seed = seed
        self._node = node
        self._driver_version = driver_version
        self._sessions = self._session_epoch = 0
        self._addresses = itertools.count(_FIRST_ADDRESS, _ADDRESS_STEP)
        self._layouts = itertools.count()
        self._targets: dict[int, tuple[SimulatedGpu, SimulatedInstance | None]] = {}
        """Address of a handle -> its device."""
        self._event_sets: dict[int, EventSet] = {}
        self._gpm_samples: dict[int, GpmSample] = {}
        self.faults = FaultInjector(self)
        epoch = wall() - clock()  # computed once, so that a sample's timestamp is the same in every call
        self.gpus: list[SimulatedGpu] = []
        for number, one in enumerate(parse_spec(spec) if isinstance(spec, str) else spec):
            gpu = SimulatedGpu(
                number=number,
                model=one.model,
                uuid=uuids[number] if number < len(uuids) else f"GPU-{self._make_uuid('gpu', number)}",
                minor=minors[number] if number < len(minors) else number,
                seed=seed,
                jitter=jitter,
                at=clock(),
                epoch=epoch,
            )
            if one.profiles:
                self._cut(gpu, one.profiles, mig_uuids or {})
            self.gpus.append(gpu)
        linked = [gpu for gpu in self.gpus if gpu.model.nvlinks]
        for gpu in linked:  # a single GPU has no active NVLink, as measured on an H200
            gpu.nvlinks = gpu.model.nvlinks if len(linked) > 1 else 0
        self._functions = self._make_functions()

    def gpu(self, number: int) -> SimulatedGpu:
        return self.gpus[number]

    def place(self, load: SimulatedLoad) -> None:
        with self.lock:
            self._advance(self.gpus[load.gpu]).place(load)

    def remove(self, pid: int) -> None:
        with self.lock:
            if not sum(self._advance(gpu).evict(pid) for gpu in self.gpus):
                raise ValueError(f"no simulated process {pid}")

    def switch_log(self, uuid: str) -> SimulatedSwitchLog:
        """Opens the context-switch log of a GPU."""
        gpu = next(gpu for gpu in self.gpus if gpu.uuid == uuid)

        def engines() -> Mapping[int | None, Engine]:
            with self.lock:
                return dict(self._advance(gpu).engines) or {None: Engine(int(gpu.at * 1e9))}

        return SimulatedSwitchLog(engines, lambda moment: moment + int(gpu.epoch * 1e9) - _GPU_CLOCK_LAG_NS)

    # Calls

    def __getattr__(self, name: str) -> Any:
        # Python calls this only for missing attributes. Functions are stored as attributes when they are first used.
        if not name.startswith(_PYNVML_NAMES):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        known = getattr(pynvml, name)
        if name not in self._functions and (not isinstance(known, FunctionType) or name in _HARMLESS):
            return known
        call = self.__dict__[name] = partial(self._call, name)
        return call

    def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        gpu = self._find_gpu(name, arguments)
        with self.lock:
            self.calls[name] += 1
        self.faults.wait_for_release(name, gpu)
        with self.lock:
            if name not in ("nvmlInit", "nvmlShutdown"):
                self._check_session()
            is_device_call = name not in self._functions and name.startswith(("nvmlDevice", "nvmlGpm"))
            if is_device_call:
                # Looked up again, because the device may have been removed while the call hung.
                target = self._targets.get(address_in(arguments[0])) or raise_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
                _check_present(target[0])
            injected = self.faults.answer_for(name, gpu)
            if injected is not None:
                return raise_error(injected.error) if injected.error else injected.value
            if is_device_call:
                return self._call_device(name, self._advance(target[0]), target[1], *arguments[1:], **named)
            function = self._functions.get(name)
            return function(*arguments) if function else raise_error(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def _find_gpu(self, name: str, arguments: Sequence[Any]) -> int | None:
        """Returns the number of the GPU that a call refers to, for the selection of injected faults."""
        with self.lock:
            listed = self._list_gpus()
            if name == "nvmlDeviceGetHandleByIndex":
                return listed[arguments[0]].number if arguments[0] < len(listed) else None
            if name == "nvmlDeviceGetHandleByPciBusId":
                return next((gpu.number for gpu in listed if _is_at(gpu, arguments[0])), None)
            target = self._targets.get(address_in(arguments[0])) if arguments else None
            return target[0].number if target else None

    def _call_device(
        self, name: str, gpu: SimulatedGpu, instance: SimulatedInstance | None, *arguments: Any, **named: Any
    ) -> Any:
        if "RunningProcesses" in name:
            gi_id = None if instance is None else instance.gi_id
            return [] if self.faults.processes_hidden else list_processes(gpu.running(gi_id), name)
        if instance is not None:
            function = MIG_CALLS.get(name) or raise_error(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return function(gpu, instance, *arguments, **named)
        match name:
            case "nvmlDeviceGetIndex":
                return self._list_gpus().index(gpu)
            case "nvmlDeviceGetMigDeviceHandleByIndex":
                return self._find_mig_handle(gpu, *arguments)
            case "nvmlDeviceGetFieldValues":
                return read_field_values(gpu, arguments[0], self.faults.answer_for)
            case "nvmlDeviceRegisterEvents":
                return self._find(self._event_sets, arguments[1]).registered.add(gpu.number)
            case "nvmlGpmSampleGet":
                return self._fill_gpm_sample(gpu, None, *arguments)
            case "nvmlGpmMigSampleGet":
                return self._fill_gpm_sample(gpu, *arguments)
        function = GPU_CALLS.get(name) or raise_error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return function(gpu, *arguments, **named)

    def _make_functions(self) -> dict[str, Callable[..., Any]]:
        """Returns the functions whose first argument is not a device."""
        return {
            "nvmlInit": self._init,
            "nvmlShutdown": self._shutdown,
            "nvmlSystemGetDriverVersion": lambda: self._driver_version,
            "nvmlSystemGetNVMLVersion": lambda: f"13.{self._driver_version}",
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 13000,
            "nvmlDeviceGetCount": lambda: len(self._list_gpus()),
            "nvmlDeviceGetHandleByIndex": self._find_by_index,
            "nvmlDeviceGetHandleByUUID": self._find_by_uuid,
            "nvmlDeviceGetHandleByPciBusId": self._find_by_pci_bus_id,
            "nvmlGpmSampleAlloc": lambda: self._allocate(self._gpm_samples, GpmSample(), pynvml.c_nvmlGpmSample_t),
            "nvmlGpmSampleFree": lambda sample: self._free(self._gpm_samples, sample),
            "nvmlGpmMetricsGet": self._read_gpm,
            "nvmlEventSetCreate": lambda: self._allocate(self._event_sets, EventSet(), pynvml.c_nvmlEventSet_t),
            "nvmlEventSetFree": lambda event_set: self._free(self._event_sets, event_set),
            "nvmlEventSetWait_v2": self._wait,
        }

    # Sessions

    def _init(self) -> None:
        if self.faults.init_error:
            raise_error(self.faults.init_error)
        if not self._sessions:
            # A session that was opened before a reload fails until it is shut down.
            self._session_epoch = self.faults.driver_epoch
        self._sessions += 1

    def _shutdown(self) -> None:
        if not self._sessions:
            raise_error(pynvml.NVML_ERROR_UNINITIALIZED)
        self._sessions -= 1
        if not self._sessions:
            self._gpm_samples.clear()
            self._event_sets.clear()
        self._changed.notify_all()

    def _check_session(self) -> None:
        if not self._sessions:
            raise_error(pynvml.NVML_ERROR_UNINITIALIZED)
        if self._session_epoch != self.faults.driver_epoch:
            raise_error(self.faults.session_error)

    def reload(self) -> None:
        """Invalidates all handles and event sets."""
        self._targets.clear()
        self._event_sets.clear()
        self._changed.notify_all()

    # Handles

    def _advance(self, gpu: SimulatedGpu) -> SimulatedGpu:
        gpu.advance(self._clock())
        return gpu

    def _list_gpus(self) -> list[SimulatedGpu]:
        return [gpu for gpu in self.gpus if gpu.enumerated]

    def _find_handle(self, gpu: SimulatedGpu, instance: SimulatedInstance | None = None) -> Any:
        """Returns the handle of a device, which stays the same until it is invalidated."""
        _check_present(gpu)
        target = (gpu, instance)
        address = next((address for address, known in self._targets.items() if known == target), None)
        if address is None:
            address = next(self._addresses)
            self._targets[address] = target
        return pointer_to(address, pynvml.c_nvmlDevice_t)

    def _find_by_index(self, index: int) -> Any:
        gpus = self._list_gpus()
        return self._find_handle(gpus[index]) if index < len(gpus) else raise_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    def _find_by_uuid(self, wanted: str) -> Any:
        for gpu in self._list_gpus():
            if gpu.uuid == wanted:
                return self._find_handle(gpu)
            for instance in gpu.instances:
                if instance.uuid == wanted:
                    return self._find_handle(gpu, instance)
        raise_error(pynvml.NVML_ERROR_NOT_FOUND)

    def _find_by_pci_bus_id(self, wanted: str) -> Any:
        gpu = next((gpu for gpu in self._list_gpus() if _is_at(gpu, wanted)), None)
        return self._find_handle(gpu) if gpu else raise_error(pynvml.NVML_ERROR_NOT_FOUND)

    def _find_mig_handle(self, gpu: SimulatedGpu, index: int) -> Any:
        if not gpu.model.profiles:
            raise_error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        instance = next((instance for instance in gpu.instances if instance.slot == index), None)
        return self._find_handle(gpu, instance) if instance else raise_error(pynvml.NVML_ERROR_NOT_FOUND)

    def reset(self, gpu: SimulatedGpu) -> None:
        """Resets the counters, ends processes, invalidates handles and restores a lost GPU."""
        with self.lock:
            gpu.lost, gpu.enumerated = False, True
            self._advance(gpu).reset()
            self._targets = {address: target for address, target in self._targets.items() if target[0] is not gpu}

    def relayout(self, gpu: SimulatedGpu, profiles: Sequence[str] | None) -> list[str]:
        """Changes the MIG layout and returns the UUIDs of the new MIG devices. `profiles`: None disables MIG."""
        with self.lock:
            chosen = None if profiles is None else parse_profiles(gpu.model, profiles)
            self._targets = {a: t for a, t in self._targets.items() if t[0] is not gpu or t[1] is None}
            self._cut(self._advance(gpu), chosen, {})
            return [instance.uuid for instance in gpu.instances]

    def _cut(
        self, gpu: SimulatedGpu, profiles: Sequence[MigProfile] | None, given: Mapping[tuple[int, int], str]
    ) -> None:
        if profiles is None:
            gpu.cut(None)
            return
        layout = next(self._layouts)
        uuids = [
            given.get((gpu.number, slot)) or f"MIG-{self._make_uuid('mig', gpu.number, layout, slot)}"
            for slot in range(len(profiles))
        ]
        gpu.cut(lay_out(gpu.model, profiles, uuids))

    def _make_uuid(self, *parts: object) -> uuid.UUID:
        named = (self._node, self._seed, *parts) if self._node else (self._seed, *parts)
        digest = hashlib.sha256("/".join(map(str, named)).encode()).digest()
        return uuid.UUID(bytes=digest[:16], version=4)

    # Event sets and GPM samples

    def _allocate(self, objects: dict[int, Any], new: Any, kind: Any) -> Any:
        address = next(self._addresses)
        objects[address] = new
        return pointer_to(address, kind)

    def _find(self, objects: Mapping[int, Any], pointer: Any) -> Any:
        found = objects.get(address_in(pointer))
        return raise_error(pynvml.NVML_ERROR_INVALID_ARGUMENT) if found is None else found

    def _free(self, objects: dict[int, Any], pointer: Any) -> None:
        self._find(objects, pointer)
        del objects[address_in(pointer)]
        self._changed.notify_all()

    def _wait(self, event_set: Any, timeout_ms: int) -> Any:
        deadline = time.monotonic() + min(timeout_ms / 1000, _MAX_WAIT_SECONDS)
        while True:
            self._check_session()
            waiting = self._find(self._event_sets, event_set).waiting
            if waiting:
                return waiting.popleft()
            left = deadline - time.monotonic()
            if left <= 0:
                raise_error(pynvml.NVML_ERROR_TIMEOUT)
            self._changed.wait(left)

    def raise_xid(self, gpu: SimulatedGpu, xid: int, gi_id: int | None) -> None:
        with self.lock:
            for event_set in self._event_sets.values():
                if gpu.number in event_set.registered:
                    event = pynvml.c_nvmlEventData_t()
                    event.device = next(
                        pointer_to(address, pynvml.c_nvmlDevice_t)
                        for address, target in self._targets.items()
                        if target == (gpu, None)
                    )
                    event.eventType = pynvml.nvmlEventTypeXidCriticalError
                    event.eventData = xid
                    event.gpuInstanceId = NO_INSTANCE if gi_id is None else gi_id
                    event.computeInstanceId = NO_INSTANCE if gi_id is None else 0
                    event_set.waiting.append(event)
            self._changed.notify_all()

    def _fill_gpm_sample(self, gpu: SimulatedGpu, gi_id: int | None, pointer: Any) -> Any:
        if not gpu.model.gpm:
            raise_error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        meter = gpu.meter if gi_id is None else gpu.instance_meters.get(gi_id)
        if meter is None:
            raise_error(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        sample = self._find(self._gpm_samples, pointer)
        sample.gpu, sample.gi_id, sample.at, sample.nvlinks = gpu.number, gi_id, gpu.at, gpu.nvlinks
        sample.meter = Meter(meter.busy, meter.tensor, meter.dram)
        return pointer

    def _read_gpm(self, request: Any) -> Any:
        first, second = (self._find(self._gpm_samples, sample) for sample in (request.sample1, request.sample2))
        return evaluate_gpm(request, first, second, self.faults.answer_for)


def _is_at(gpu: SimulatedGpu, bus_id: str) -> bool:
    """Compares PCI addresses. The domain may have eight digits, four digits (Linux), or be missing."""
    known = pci_bus_id(gpu)
    return bus_id.upper() in (known, known[4:], known[9:])


def _check_present(gpu: SimulatedGpu) -> None:
    if gpu.lost:
        raise_error(pynvml.NVML_ERROR_GPU_IS_LOST)


# Faults

Subject = str | int  # name of a function, number of a field value, or `gpm <metric>`


@dataclass(frozen=True, slots=True)
class InjectedAnswer:
    """A value or an error code that is returned instead of the real result."""

    value: Any = None
    error: int = 0


@dataclass(slots=True)
class Hang:
    function: str
    gpu: int | None
    released: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)  # set when the first call hangs

    def release(self) -> None:
        self.released.set()


class FaultInjector:
    """Injects faults. `gpu` is the number of a GPU, None for all GPUs and for calls without a device."""

    def __init__(self, driver: SimulatedNvml) -> None:
        self._driver = driver
        self._hangs: list[Hang] = []
        self._answers: dict[tuple[Subject, int | None], InjectedAnswer] = {}
        self.init_error = 0
        self.session_error = 0  # error code of calls in sessions that were opened before the last reload
        self.driver_epoch = 0
        self.processes_hidden = False

    def hang(self, function: str, gpu: int | None = None) -> Hang:
        """Blocks calls of the function until the hang is released."""
        hang = Hang(function, gpu)
        self._hangs = [*self._hangs, hang]
        return hang

    def release_all(self) -> None:
        hangs, self._hangs = self._hangs, []
        for hang in hangs:
            hang.release()

    def answer(self, subject: Subject, value: Any, gpu: int | None = None) -> None:
        """Makes the function or field value return `value`."""
        self._answers[subject, gpu] = InjectedAnswer(value=value)

    def fail(self, subject: Subject, error: int, gpu: int | None = None) -> None:
        """Makes the function or field value fail with this NVML error code."""
        self._answers[subject, gpu] = InjectedAnswer(error=error)

    def unsupported(self, subject: Subject, gpu: int | None = None) -> None:
        self.fail(subject, pynvml.NVML_ERROR_NOT_SUPPORTED, gpu)

    def clear(self, subject: Subject, gpu: int | None = None) -> None:
        self._answers.pop((subject, gpu), None)

    def hide_processes(self) -> None:
        """Simulates a separate PID namespace: process lists are empty, but process utilization is still returned."""
        self.processes_hidden = True

    def lose(self, gpu: int, *, enumerated: bool = True) -> None:
        """Makes a GPU fall off the bus. With `enumerated=False` the driver does not list it any more."""
        with self._driver.lock:
            lost = self._driver.gpus[gpu]
            lost.lost, lost.enumerated = True, enumerated

    def recover(self, gpu: int) -> None:
        with self._driver.lock:
            lost = self._driver.gpus[gpu]
            lost.lost, lost.enumerated = False, True

    def reset(self, gpu: int) -> None:
        self._driver.reset(self._driver.gpus[gpu])

    def relayout(self, gpu: int, profiles: Sequence[str] | None) -> list[str]:
        return self._driver.relayout(self._driver.gpus[gpu], profiles)

    def cut_link(self, gpu: int, link: int) -> None:
        """Takes an NVLink down until the GPU is reset."""
        self._driver.gpus[gpu].links_down.add(link)

    def raise_xid(self, gpu: int, xid: int, gi_id: int | None = None) -> None:
        self._driver.raise_xid(self._driver.gpus[gpu], xid, gi_id)

    def unload_driver(self) -> None:
        self._take_driver_away(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    def remove_library(self) -> None:
        self._take_driver_away(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    def mismatch_versions(self) -> None:
        """Simulates an upgrade of the kernel driver without the library."""
        self._take_driver_away(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    def _take_driver_away(self, init_error: int) -> None:
        self.init_error = init_error
        self.reload_driver()

    def load_driver(self) -> None:
        self.init_error = 0

    def reload_driver(self, error: int = pynvml.NVML_ERROR_UNKNOWN) -> None:
        """Invalidates all handles. Open sessions fail with `error` until they are shut down and opened again."""
        with self._driver.lock:
            self.driver_epoch += 1
            self.session_error = error
            self._driver.reload()

    def wait_for_release(self, function: str, gpu: int | None) -> None:
        """Blocks while there is a hang for this function and GPU. Call without holding the lock."""
        for hang in self._hangs:
            if hang.function == function and hang.gpu in (None, gpu):
                hang.entered.set()
                hang.released.wait()

    def answer_for(self, subject: Subject, gpu: int | None) -> InjectedAnswer | None:
        if not self._answers:
            return None
        return self._answers.get((subject, gpu)) or self._answers.get((subject, None))
