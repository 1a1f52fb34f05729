"""A simulated driver: an object with the functions, constants and structures of the pynvml module.

Functions that are not simulated are not supported. The real driver is never called.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import pynvml

from podgpu.simulate.device_calls import (
    GPU_CALLS,
    MIG_CALLS,
    GpmSamples,
    list_processes,
    pci_bus_id,
    read_field_values,
    refuse,
)
from podgpu.simulate.engine import Engine, SimulatedSwitchLog
from podgpu.simulate.gpu import SimulatedGpu
from podgpu.simulate.machine import EventSets, FaultInjector, Handle, HandleTarget, InjectedAnswer, Machine, address_in
from podgpu.simulate.models import GpuSpec, parse_spec
from podgpu.simulate.workload import SimulatedLoad

_PYNVML_NAMES = ("nvml", "NVML", "c_nvml", "struct_c_nvml")
_HARMLESS = frozenset({"nvmlStructToFriendlyObject", "nvmlFriendlyObjectToStruct", "nvmlExceptionClass"})
"""Functions of pynvml that call no driver."""
_GPU_CLOCK_LAG_NS = 1_000_000
"""Lag of the GPU's clock behind the machine's; on an H200 it drifts by 7 µs a second."""
_WITHOUT_SESSION = frozenset({"nvmlInit", "nvmlShutdown"})


class SimulatedNvml:
    """Replaces the pynvml module: `driver.nvmlInit()`, `driver.nvmlDeviceGetPowerUsage(handle)`.

    `uuids` and `minors` are by GPU number, `mig_uuids` by (GPU number, MIG slot). Missing ones are derived from the
    seed and the node's name, so that GPUs of different nodes differ. `unrest`: relative variation of the activity.
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
        """Number of calls per function."""
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
        self.faults = FaultInjector(self.machine, self._events)
        self._driver_version = driver_version
        self._sessions = 0
        self._session_epoch = 0
        self._plain_calls = self._plain_table()
        self._target_calls = self._target_table()

    def place(self, load: SimulatedLoad) -> None:
        self.machine.place(load)

    def remove(self, pid: int) -> None:
        self.machine.remove(pid)

    def switch_log(self, uuid: str) -> SimulatedSwitchLog:
        """Opens the context-switch log of a GPU."""
        gpu = next(gpu for gpu in self.machine.gpus if gpu.uuid == uuid)

        def engines() -> Mapping[int | None, Engine]:
            with self.machine.lock:
                return dict(self.machine.current(gpu).engines) or {None: Engine(int(gpu.at * 1e9))}

        return SimulatedSwitchLog(engines, lambda moment: moment + int(gpu.epoch * 1e9) - _GPU_CLOCK_LAG_NS)

    def __getattr__(self, name: str) -> Any:
        # Only called for names that are not attributes yet; the functions created here become attributes.
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

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        number = self._aimed_at(name, arguments)
        self._begin(name, number)
        with self.machine.lock:
            if name not in _WITHOUT_SESSION:
                self._require_session()
            answer = self.faults.answer_for(name, number)
            if answer is not None:
                return _return(answer)
            return function(*arguments)

    def _aimed_at(self, name: str, arguments: Sequence[Any]) -> int | None:
        """Returns the GPU whose handle is requested, so that faults can apply to it."""
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
            # Looked up again, because the device may have been removed while the call hung.
            target = self.machine.targets.get(address)
            if target is None:
                refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT)
            _require_present(target.gpu)
            answer = self.faults.answer_for(name, target.gpu.number)
            if answer is not None:
                return _return(answer)
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

    def _answer(self, name: str, target: HandleTarget, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
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

    def _plain_table(self) -> dict[str, Callable[..., Any]]:
        return {
            "nvmlInit": self._init,
            "nvmlShutdown": self._shutdown,
            "nvmlSystemGetDriverVersion": lambda: self._driver_version,
            "nvmlSystemGetNVMLVersion": lambda: f"13.{self._driver_version}",
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
            "nvmlEventSetWait_v2": self._wait,
        }

    def _init(self) -> None:
        if self.faults.init_error:
            refuse(self.faults.init_error)
        if not self._sessions:
            # A session from before a reload stays broken until it is shut down.
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

    def _target_table(self) -> dict[str, Callable[..., Any]]:
        table: dict[str, Callable[..., Any]] = {
            "nvmlDeviceGetIndex": _on_gpu(lambda gpu: self.machine.enumeration().index(gpu)),
            "nvmlDeviceGetMigDeviceHandleByIndex": _on_gpu(self._mig_handle),
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

    def _processes(self, kind: str, target: HandleTarget) -> list[Any]:
        if self.faults.processes_hidden:
            return []
        return list_processes(target.gpu.running(target.instance.gi_id if target.instance else None), kind)


def _is_at(gpu: SimulatedGpu, bus_id: str | bytes) -> bool:
    """Accepts a domain of eight digits, of four digits (Linux), or none."""
    text = (bus_id.decode() if isinstance(bus_id, bytes) else bus_id).upper()
    return text in (pci_bus_id(gpu), pci_bus_id(gpu)[4:], pci_bus_id(gpu)[9:])


def _return(answer: InjectedAnswer) -> Any:
    if answer.error:
        refuse(answer.error)
    return answer.value


def _require_present(gpu: SimulatedGpu) -> None:
    if gpu.lost:
        refuse(pynvml.NVML_ERROR_GPU_IS_LOST)


def _on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Restricts a call to whole GPUs."""

    def call(target: HandleTarget, *arguments: Any) -> Any:
        if target.instance is not None:
            refuse(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return function(target.gpu, *arguments)

    return call
