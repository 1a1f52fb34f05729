"""The simulated machine below the driver: GPUs, handles, events and injected faults.

One lock guards everything. It is never held while a call hangs.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pynvml

from podgpu.simulate.gpu import SimulatedGpu, SimulatedInstance, lay_out
from podgpu.simulate.models import GpuSpec, MigProfile, parse_profiles
from podgpu.simulate.workload import SimulatedLoad

NO_INSTANCE = 0xFFFFFFFF
_T = TypeVar("_T")
_FIRST_ADDRESS = 0x7F00_0000_1000
_ADDRESS_STEP = 0x40


@dataclass(frozen=True, slots=True)
class Handle:
    """A device handle: a number that is never dereferenced.

    Inside ctypes structures (events, GPM requests) a pointer of pynvml's type carries the number.
    """

    address: int

    @property
    def _as_parameter_(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.address)


def pointer_to(address: int, pointer_type: Any) -> Any:
    return ctypes.cast(ctypes.c_void_p(address), pointer_type)


def address_in(handle: Any) -> int:
    """Returns the number of a handle or pointer, 0 for anything else."""
    if isinstance(handle, Handle):
        return handle.address
    try:
        return ctypes.cast(handle, ctypes.c_void_p).value or 0
    except ctypes.ArgumentError:
        return 0


@dataclass(frozen=True, slots=True)
class HandleTarget:
    """The device of a handle: a GPU or a MIG device."""

    gpu: SimulatedGpu
    instance: SimulatedInstance | None = None


class Machine:
    def __init__(
        self,
        specs: Sequence[GpuSpec],
        *,
        seed: int,
        clock: Callable[[], float],
        wall: Callable[[], float],
        uuids: Sequence[str],
        mig_uuids: Mapping[tuple[int, int], str],
        minors: Sequence[int],
        unrest: float,
        node: str = "",
    ) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        """Notified of changes that a waiting call may wait for."""
        self.clock = clock
        self.seed = seed
        self.unrest = unrest
        self.node = node
        # Computed once, so that the timestamp of a sample is the same in every call.
        self.epoch = wall() - clock()
        self.gpus: list[SimulatedGpu] = []
        self.targets: dict[int, HandleTarget] = {}
        self._addresses = itertools.count(_FIRST_ADDRESS, _ADDRESS_STEP)
        self._numbers = itertools.count()
        self._layouts = itertools.count()
        self._given_uuids = tuple(uuids)
        self._given_mig_uuids = dict(mig_uuids)
        self._given_minors = tuple(minors)
        for spec in specs:
            self._build(spec)
        self._wire()

    def new_address(self) -> int:
        """Returns a unique number for a handle, sample or event set."""
        return next(self._addresses)

    def enumeration(self) -> list[SimulatedGpu]:
        return [gpu for gpu in self.gpus if gpu.enumerated]

    def gpu(self, number: int) -> SimulatedGpu:
        for gpu in self.gpus:
            if gpu.number == number:
                return gpu
        raise ValueError(f"no simulated GPU {number}; there are {[gpu.number for gpu in self.gpus]}")

    def current(self, gpu: SimulatedGpu) -> SimulatedGpu:
        gpu.advance(self.clock())
        return gpu

    def address_of(self, gpu: SimulatedGpu, instance: SimulatedInstance | None = None) -> int:
        """Returns the address of a device, which is stable until its handles become stale."""
        for address, target in self.targets.items():
            if target.gpu is gpu and target.instance is instance:
                return address
        address = self.new_address()
        self.targets[address] = HandleTarget(gpu, instance)
        return address

    def place(self, load: SimulatedLoad) -> None:
        with self.lock:
            self.current(self.gpu(load.gpu)).place(load)

    def remove(self, pid: int) -> None:
        with self.lock:
            if not sum(self.current(gpu).evict(pid) for gpu in self.gpus):
                raise ValueError(f"no simulated process {pid}")

    def reset(self, number: int) -> None:
        with self.lock:
            gpu = self.current(self.gpu(number))
            gpu.lost, gpu.enumerated = False, True
            gpu.reset()
            self.forget_handles(gpu)

    def relayout(self, number: int, profiles: Sequence[str] | None) -> list[str]:
        """Changes the MIG layout (None: MIG off) and returns the UUIDs of the new MIG devices."""
        with self.lock:
            gpu = self.current(self.gpu(number))
            chosen = None if profiles is None else parse_profiles(gpu.model, profiles)
            stale = [address for address, target in self.targets.items() if target.gpu is gpu and target.instance]
            for address in stale:
                del self.targets[address]
            self._cut(gpu, chosen)
            return [instance.uuid for instance in gpu.instances]

    def forget_handles(self, gpu: SimulatedGpu | None = None) -> None:
        """Makes all handles of one GPU, or of all GPUs, stale."""
        self.targets = {a: t for a, t in self.targets.items() if gpu is not None and t.gpu is not gpu}

    def _build(self, spec: GpuSpec) -> SimulatedGpu:
        number = next(self._numbers)
        gpu = SimulatedGpu(
            number=number,
            model=spec.model,
            uuid=_given(self._given_uuids, number) or f"GPU-{self._uuid('gpu', number)}",
            minor=self._minor(number),
            seed=self.seed,
            unrest=self.unrest,
            at=self.clock(),
            epoch=self.epoch,
        )
        if spec.profiles:
            self._cut(gpu, spec.profiles, self._given_mig_uuids)
        self.gpus.append(gpu)
        return gpu

    def _wire(self) -> None:
        """A single GPU has no NVLink, as measured on an H200."""
        linked = [gpu for gpu in self.gpus if gpu.model.nvlinks]
        for gpu in linked:
            gpu.nvlinks = gpu.model.nvlinks if len(linked) > 1 else 0

    def _minor(self, number: int) -> int:
        given = _given(self._given_minors, number)
        return number if given is None else given

    def _cut(
        self,
        gpu: SimulatedGpu,
        profiles: Sequence[MigProfile] | None,
        given: Mapping[tuple[int, int], str] | None = None,
    ) -> None:
        if profiles is None:
            gpu.cut(None)
            return
        layout = next(self._layouts)
        uuids = [
            (given or {}).get((gpu.number, slot)) or f"MIG-{self._uuid('mig', gpu.number, layout, slot)}"
            for slot in range(len(profiles))
        ]
        gpu.cut(lay_out(gpu.model, profiles, uuids))

    def _uuid(self, *parts: object) -> uuid.UUID:
        named = (self.node, self.seed, *parts) if self.node else (self.seed, *parts)
        digest = hashlib.sha256("/".join(map(str, named)).encode()).digest()
        return uuid.UUID(bytes=digest[:16], version=4)


def _given(values: Sequence[_T], number: int) -> _T | None:
    return values[number] if number < len(values) else None


# Events

_MAX_WAIT_SECONDS = 0.025


@dataclass(slots=True)
class EventSet:
    registered: dict[int, int] = field(default_factory=dict)
    """GPU number -> mask of event types."""
    waiting: deque[Any] = field(default_factory=deque)


class EventSets:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._sets: dict[int, EventSet] = {}

    def create(self) -> Any:
        address = self._machine.new_address()
        self._sets[address] = EventSet()
        return pointer_to(address, pynvml.c_nvmlEventSet_t)

    def free(self, event_set: Any) -> None:
        self._find(event_set)
        del self._sets[address_in(event_set)]
        self._machine.changed.notify_all()

    def register(self, gpu: SimulatedGpu, types: int, event_set: Any) -> None:
        found = self._find(event_set)
        found.registered[gpu.number] = found.registered.get(gpu.number, 0) | types

    def take(self, event_set: Any) -> Any:
        """Returns the oldest event or None."""
        waiting = self._find(event_set).waiting
        return waiting.popleft() if waiting else None

    def wait(self, event_set: Any, timeout_ms: int, check_session: Callable[[], None]) -> Any:
        """Returns the oldest event. `check_session` raises once the session is over.

        Waits in real time, because an injected clock may stand still; and briefly, because closing the driver waits
        for it.
        """
        deadline = time.monotonic() + min(timeout_ms / 1000, _MAX_WAIT_SECONDS)
        with self._machine.changed:
            while True:
                check_session()
                event = self.take(event_set)
                if event is not None:
                    return event
                left = deadline - time.monotonic()
                if left <= 0:
                    raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
                self._machine.changed.wait(left)

    def raise_xid(self, gpu: SimulatedGpu, xid: int, gi_id: int | None) -> None:
        with self._machine.changed:
            for event_set in self._sets.values():
                if event_set.registered.get(gpu.number, 0) & pynvml.nvmlEventTypeXidCriticalError:
                    event_set.waiting.append(self._event(gpu, xid, gi_id))
            self._machine.changed.notify_all()

    def forget(self) -> None:
        self._sets.clear()

    def _event(self, gpu: SimulatedGpu, xid: int, gi_id: int | None) -> Any:
        event = pynvml.c_nvmlEventData_t()
        event.device = pointer_to(self._machine.address_of(gpu), pynvml.c_nvmlDevice_t)
        event.eventType = pynvml.nvmlEventTypeXidCriticalError
        event.eventData = xid
        event.gpuInstanceId = NO_INSTANCE if gi_id is None else gi_id
        event.computeInstanceId = NO_INSTANCE if gi_id is None else 0
        return event

    def _find(self, event_set: Any) -> EventSet:
        found = self._sets.get(address_in(event_set))
        if found is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return found


# FaultInjector

Subject = str | int
"""Name of a function, or number of a field value."""

_EVERY_GPU = None


@dataclass(frozen=True, slots=True)
class InjectedAnswer:
    """Overrides a result: a value or an error code."""

    value: Any = None
    error: int = 0


@dataclass(slots=True)
class Hang:
    function: str
    gpu: int | None
    released: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)
    """Set once a call hangs here."""

    def release(self) -> None:
        self.released.set()


class FaultInjector:
    """Injects faults. `gpu` is the number of a GPU, None for all GPUs and for calls without a device."""

    def __init__(self, machine: Machine, events: EventSets) -> None:
        self._machine = machine
        self._events = events
        self._hangs: list[Hang] = []
        self._answers: dict[tuple[Subject, int | None], InjectedAnswer] = {}
        self.init_error = 0
        self.session_error = 0
        """Error of calls in sessions from before the last reload."""
        self.driver_epoch = 0
        self.processes_hidden = False

    def hang(self, function: str, gpu: int | None = None) -> Hang:
        """Blocks calls of the function until released."""
        hang = Hang(function, gpu)
        with self._machine.lock:
            self._hangs.append(hang)
        return hang

    def release_all(self) -> None:
        with self._machine.lock:
            hangs, self._hangs = self._hangs, []
        for hang in hangs:
            hang.release()

    def answer(self, subject: Subject, value: Any, gpu: int | None = None) -> None:
        """Makes the function or field value return `value`."""
        with self._machine.lock:
            self._answers[subject, gpu] = InjectedAnswer(value=value)

    def fail(self, subject: Subject, error: int, gpu: int | None = None) -> None:
        """Makes the function or field value fail with this NVML error code."""
        with self._machine.lock:
            self._answers[subject, gpu] = InjectedAnswer(error=error)

    def unsupported(self, subject: Subject, gpu: int | None = None) -> None:
        self.fail(subject, pynvml.NVML_ERROR_NOT_SUPPORTED, gpu)

    def clear(self, subject: Subject, gpu: int | None = None) -> None:
        with self._machine.lock:
            self._answers.pop((subject, gpu), None)

    def hide_processes(self, hidden: bool = True) -> None:
        """Simulates a separate PID namespace: process lists are empty, process utilisation is not."""
        self.processes_hidden = hidden

    def lose(self, gpu: int, *, enumerated: bool = True) -> None:
        """Makes a GPU fall off the bus. Without `enumerated` it is no longer counted."""
        with self._machine.lock:
            lost = self._machine.gpu(gpu)
            lost.lost, lost.enumerated = True, enumerated

    def recover(self, gpu: int) -> None:
        with self._machine.lock:
            lost = self._machine.gpu(gpu)
            lost.lost, lost.enumerated = False, True

    def reset(self, gpu: int) -> None:
        """Resets counters, ends processes, makes handles stale and restores a lost GPU."""
        self._machine.reset(gpu)

    def relayout(self, gpu: int, profiles: Sequence[str] | None) -> list[str]:
        return self._machine.relayout(gpu, profiles)

    def cut_link(self, gpu: int, link: int) -> None:
        """Takes an NVLink down until the GPU is reset."""
        with self._machine.lock:
            self._machine.gpu(gpu).links_down.add(link)

    def raise_xid(self, gpu: int, xid: int, gi_id: int | None = None) -> None:
        self._events.raise_xid(self._machine.gpu(gpu), xid, gi_id)

    def unload_driver(self) -> None:
        self._take_driver_away(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    def remove_library(self) -> None:
        self._take_driver_away(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    def mismatch_versions(self) -> None:
        """Simulates a driver upgrade while the library stays."""
        self._take_driver_away(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    def load_driver(self) -> None:
        self.init_error = 0

    def reload_driver(self, error: int = pynvml.NVML_ERROR_UNKNOWN) -> None:
        """Makes all handles stale. Open sessions fail with `error` until they are shut down and opened again."""
        with self._machine.lock:
            self.driver_epoch += 1
            self.session_error = error
            self._machine.forget_handles()
            self._events.forget()
            self._machine.changed.notify_all()

    def _take_driver_away(self, error: int) -> None:
        self.init_error = error
        self.reload_driver()

    def wait_out(self, function: str, gpu: int | None) -> None:
        """Blocks while a hang matches. Call without the lock."""
        if not self._hangs:
            return
        for hang in list(self._hangs):
            if hang.function == function and hang.gpu in (_EVERY_GPU, gpu):
                hang.entered.set()
                hang.released.wait()

    def answer_for(self, subject: Subject, gpu: int | None) -> InjectedAnswer | None:
        if not self._answers:
            return None
        return self._answers.get((subject, gpu)) or self._answers.get((subject, _EVERY_GPU))
