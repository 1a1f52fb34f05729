"""This module is the simulated driver: an object with NVML's functions, spelled, called and answering as in the pynvml
module.

Constants and structs are pynvml's own. A function that is not simulated answers "not supported"; the real driver is
never reached. How each answer comes about lives in `device_calls`, `field_values`, `gpm` and `events`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import pynvml

from podgpu.simulate.device_calls import GPU_CALLS, MIG_CALLS, list_processes, pci_bus_id, refuse
from podgpu.simulate.engine import Engine, SimulatedSwitchLog
from podgpu.simulate.events import EventSets
from podgpu.simulate.faults import Answer, Faults
from podgpu.simulate.field_values import read_field_values
from podgpu.simulate.gpm import GpmSamples
from podgpu.simulate.gpu import SimulatedGpu
from podgpu.simulate.machine import Handle, Machine, Target, address_in
from podgpu.simulate.spec import GpuSpec, parse_spec
from podgpu.simulate.workload import SimulatedLoad

_PYNVML_NAMES = ("nvml", "NVML", "c_nvml", "struct_c_nvml")
_HARMLESS = frozenset({"nvmlStructToFriendlyObject", "nvmlFriendlyObjectToStruct", "nvmlExceptionClass"})
"""pynvml's functions that touch no driver."""
_GPU_CLOCK_LAG_NS = 1_000_000
"""How far the GPU's own clock is behind the machine's; on an H200 it drifts by 7 µs a second."""
_WITHOUT_SESSION = frozenset({"nvmlInit", "nvmlInitWithFlags", "nvmlShutdown", "nvmlErrorString"})


class SimulatedNvml:
    """Use it where the pynvml module is used: `driver.nvmlInit()`, `driver.nvmlDeviceGetPowerUsage(handle)`.

    `uuids` and `minors` go by GPU number, `mig_uuids` by (GPU number, MIG slot); what is not given is made from the
    seed and from `node`, the name of the node it is to be on: no two nodes have the same GPU. `unrest` is how far
    activity strays from its mean: 0 makes figures exact.
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
        unrest: float = 0.04,
        driver_version: str = "580.159.04",
        node: str = "",
    ) -> None:
        self.calls: Counter[str] = Counter()
        """How often each function was called."""
        self.machine = Machine(
            parse_spec(spec) if isinstance(spec, str) else spec,
            seed=seed,
            clock=clock,
            wall=wall,
            uuids=uuids,
            mig_uuids=mig_uuids or {},
            minors=minors,
            unrest=unrest,
            node=node,
        )
        self._events = EventSets(self.machine)
        self._gpm = GpmSamples(self.machine)
        self.faults = Faults(self.machine, self._events)
        self._driver_version = driver_version
        self._sessions = 0
        self._session_epoch = 0
        self._plain_calls = self._plain_table()
        self._target_calls = self._target_table()

    def place(self, load: SimulatedLoad) -> None:
        """Starts a process on a GPU or in a GPU instance."""
        self.machine.place(load)

    def remove(self, pid: int) -> None:
        """Ends a process, on every GPU it uses."""
        self.machine.remove(pid)

    def switch_log(self, uuid: str) -> SimulatedSwitchLog:
        """The context-switch log of a GPU, from now on."""
        gpu = next(gpu for gpu in self.machine.gpus if gpu.uuid == uuid)

        def engines() -> Mapping[int | None, Engine]:
            with self.machine.lock:
                return dict(self.machine.current(gpu).engines) or {None: Engine(int(gpu.at * 1e9))}

        return SimulatedSwitchLog(engines, lambda moment: moment + int(gpu.epoch * 1e9) - _GPU_CLOCK_LAG_NS)

    def __getattr__(self, name: str) -> Any:
        # Only reached for names that are not attributes yet; the functions made here become attributes.
        if not name.startswith(_PYNVML_NAMES):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        if name in self._plain_calls:
            call = partial(self._call, name, self._plain_calls[name])
        elif name in self._target_calls or name in GPU_CALLS or name in MIG_CALLS:
            call = partial(self._call_on_device, name)
        else:
            known = getattr(pynvml, name)
            if not isinstance(known, FunctionType) or name in _HARMLESS:
                return known
            call = partial(self._call_unknown, name)
        self.__dict__[name] = call
        return call

    # How every call goes ---------------------------------------------------------------------------------------

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        number = self._aimed_at(name, arguments)
        self._begin(name, number)
        with self.machine.lock:
            if name not in _WITHOUT_SESSION:
                self._require_session()
            told = self.faults.answer_for(name, number)
            if told is not None:
                return _tell(told)
            return function(*arguments)

    def _aimed_at(self, name: str, arguments: Sequence[Any]) -> int | None:
        """The GPU whose handle is asked for, so that a fault can be that GPU's alone."""
        with self.machine.lock:
            gpus = self.machine.enumeration()
            if name == "nvmlDeviceGetHandleByIndex":
                return next((gpu.number for index, gpu in enumerate(gpus) if index == arguments[0]), None)
            if name == "nvmlDeviceGetHandleByPciBusId":
                return next((gpu.number for gpu in gpus if _is_at(gpu, arguments[0])), None)
        return None

    def _call_on_device(self, name: str, handle: Any, *arguments: Any, **named: Any) -> Any:
        address = address_in(handle)
        aimed = self.machine.targets.get(address)
        self._begin(name, aimed.gpu.number if aimed else None)
        with self.machine.lock:
            self._require_session()
            # Looked up again: while the call hung, the device may have gone.
            target = self.machine.targets.get(address)
            if target is None:
                refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            _require_present(target.gpu)
            told = self.faults.answer_for(name, target.gpu.number)
            if told is not None:
                return _tell(told)
            self.machine.current(target.gpu)
            return self._answer(name, target, arguments, named)

    def _call_unknown(self, name: str, *arguments: Any, **named: Any) -> Any:
        if arguments and address_in(arguments[0]) in self.machine.targets:
            return self._call_on_device(name, *arguments, **named)
        return self._call(name, lambda *ignored: refuse(pynvml.NVML_ERROR_NOT_SUPPORTED), *arguments)

    def _begin(self, name: str, gpu: int | None) -> None:
        with self.machine.lock:
            self.calls[name] += 1
        self.faults.wait_out(name, gpu)

    def _answer(self, name: str, target: Target, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        if name in self._target_calls:
            return self._target_calls[name](target, *arguments)
        if target.instance is None and name in GPU_CALLS:
            return GPU_CALLS[name](target.gpu, *arguments, **named)
        if target.instance is not None and name in MIG_CALLS:
            return MIG_CALLS[name](target.gpu, target.instance, *arguments, **named)
        refuse(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def _require_session(self) -> None:
        if not self._sessions:
            refuse(pynvml.NVML_ERROR_UNINITIALIZED)
        if self._session_epoch != self.faults.driver_epoch:
            refuse(self.faults.session_error)

    # Calls without a device ------------------------------------------------------------------------------------

    def _plain_table(self) -> dict[str, Callable[..., Any]]:
        return {
            "nvmlInit": self._init,
            "nvmlInitWithFlags": lambda flags: self._init(),
            "nvmlShutdown": self._shutdown,
            "nvmlErrorString": lambda code: str(pynvml.NVMLError(code)),
            "nvmlSystemGetDriverVersion": lambda: self._driver_version,
            "nvmlSystemGetNVMLVersion": lambda: f"13.{self._driver_version}",
            "nvmlSystemGetCudaDriverVersion": lambda: 13000,
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 13000,
            "nvmlDeviceGetCount": lambda: len(self.machine.enumeration()),
            "nvmlDeviceGetHandleByIndex": self._by_index,
            "nvmlDeviceGetHandleByUUID": self._by_uuid,
            "nvmlDeviceGetHandleByPciBusId": self._by_pci_bus_id,
            "nvmlGpmSampleAlloc": self._gpm.allocate,
            "nvmlGpmSampleFree": self._gpm.free,
            "nvmlGpmMetricsGet": lambda request: self._gpm.evaluate(
                request, lambda metric, gpu: self.faults.answer_for(f"gpm {metric}", gpu)
            ),
            "nvmlEventSetCreate": self._events.create,
            "nvmlEventSetFree": self._events.free,
            "nvmlEventSetWait": self._wait,
            "nvmlEventSetWait_v2": self._wait,
        }

    def _init(self) -> None:
        if self.faults.init_error:
            refuse(self.faults.init_error)
        if not self._sessions:
            # A second nvmlInit only counts: a session from before a reload stays broken until it is shut down.
            self._session_epoch = self.faults.driver_epoch
        self._sessions += 1

    def _shutdown(self) -> None:
        if not self._sessions:
            refuse(pynvml.NVML_ERROR_UNINITIALIZED)
        self._sessions -= 1
        if not self._sessions:
            self._gpm.forget()
            self._events.forget()
        self.machine.changed.notify_all()

    def _by_index(self, index: int) -> Handle:
        gpus = self.machine.enumeration()
        if not 0 <= index < len(gpus):
            refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return self._handle(gpus[index])

    def _by_uuid(self, wanted: str | bytes) -> Handle:
        uuid = wanted.decode() if isinstance(wanted, bytes) else wanted
        for gpu in self.machine.enumeration():
            if gpu.uuid == uuid:
                return self._handle(gpu)
            for instance in gpu.instances:
                if instance.uuid == uuid:
                    _require_present(gpu)
                    return Handle(self.machine.address_of(gpu, instance))
        refuse(pynvml.NVML_ERROR_NOT_FOUND)

    def _by_pci_bus_id(self, wanted: str | bytes) -> Handle:
        for gpu in self.machine.enumeration():
            if _is_at(gpu, wanted):
                return self._handle(gpu)
        refuse(pynvml.NVML_ERROR_NOT_FOUND)

    def _handle(self, gpu: SimulatedGpu) -> Handle:
        _require_present(gpu)
        return Handle(self.machine.address_of(gpu))

    def _wait(self, event_set: Any, timeout_ms: int) -> Any:
        return self._events.wait(event_set, timeout_ms, self._require_session)

    # Calls on a device that need more than the device ----------------------------------------------------------

    def _target_table(self) -> dict[str, Callable[..., Any]]:
        table: dict[str, Callable[..., Any]] = {
            "nvmlDeviceGetIndex": _on_gpu(lambda gpu: self.machine.enumeration().index(gpu)),
            "nvmlDeviceGetMigDeviceHandleByIndex": _on_gpu(self._mig_handle),
            "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": self._parent,
            "nvmlDeviceGetFieldValues": _on_gpu(
                lambda gpu, fields: read_field_values(gpu, fields, self.faults.answer_for)
            ),
            "nvmlDeviceRegisterEvents": _on_gpu(self._events.register),
            "nvmlGpmSampleGet": _on_gpu(lambda gpu, sample: self._gpm.fill(gpu, None, sample)),
            "nvmlGpmMigSampleGet": _on_gpu(self._gpm.fill),
        }
        for name, kind in (("Compute", "compute"), ("Graphics", "graphics"), ("MPSCompute", "mps")):
            for version in ("", "_v2", "_v3"):
                table[f"nvmlDeviceGet{name}RunningProcesses{version}"] = partial(self._processes, kind)
        return table

    def _mig_handle(self, gpu: SimulatedGpu, index: int) -> Handle:
        if not gpu.model.profiles:
            refuse(pynvml.NVML_ERROR_NOT_SUPPORTED)
        for instance in gpu.instances:
            if instance.slot == index:
                return Handle(self.machine.address_of(gpu, instance))
        refuse(pynvml.NVML_ERROR_NOT_FOUND)

    def _parent(self, target: Target) -> Handle:
        if target.instance is None:
            refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return Handle(self.machine.address_of(target.gpu))

    def _processes(self, kind: str, target: Target) -> list[Any]:
        if self.faults.processes_hidden:
            return []
        return list_processes(target.gpu.running(target.instance.gi_id if target.instance else None), kind)


def _is_at(gpu: SimulatedGpu, bus_id: str | bytes) -> bool:
    """With the domain in eight digits, in four as the kernel writes it, or left out."""
    text = (bus_id.decode() if isinstance(bus_id, bytes) else bus_id).upper()
    return text in (pci_bus_id(gpu), pci_bus_id(gpu)[4:], pci_bus_id(gpu)[9:])


def _tell(told: Answer) -> Any:
    if told.error:
        refuse(told.error)
    return told.value


def _require_present(gpu: SimulatedGpu) -> None:
    if gpu.lost:
        refuse(pynvml.NVML_ERROR_GPU_IS_LOST)


def _on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """A call that only a whole GPU answers."""

    def call(target: Target, *arguments: Any) -> Any:
        if target.instance is not None:
            refuse(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return function(target.gpu, *arguments)

    return call
