"""Simulated parts of a node with faults and variants for tests."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pynvml

from podgpu.labs.simulate.device_calls import address_in, pci_bus_id, raise_error
from podgpu.labs.simulate.models import parse_profiles
from podgpu.labs.simulate.simulated_driver import SimulatedNvml
from podgpu.labs.simulate.simulated_node import SimulatedProc
from tests.engine import BurstGpu, SimulatedSwitchLog, open_log

_LINK_STATE = pynvml.NVML_FI_DEV_NVLINK_GET_STATE
_MEMBERS = {
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
}
Subject = str | int  # name of a function, number of a field value, or `gpm <metric>`


@dataclass(slots=True)
class Hang:
    function: str
    gpu: int | None
    released: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(
        default_factory=threading.Event
    )  # set when the first call hangs
    threads: set[int] = field(default_factory=set)  # ids of the threads of all calls that hung

    def release(self) -> None:
        self.released.set()


stop_after_test: list[Callable[[], None]] = []
"""Called at the end of each test. Otherwise threads would poll the test's drivers for XIDs until
the last test ends.
"""


class FaultyNvml(SimulatedNvml):
    """Injects faults. `gpu` is the number of a GPU, None for all GPUs and for calls without a
    device.
    """

    def __init__(
        self,
        *arguments: Any,
        uuids: Sequence[str] = (),
        mig_uuids: Mapping[tuple[int, int], str] | None = None,
        minors: Sequence[int] = (),
        **named: Any,
    ) -> None:
        """`uuids` and `minors` are indexed by GPU number, `mig_uuids` by (GPU number, index of the
        MIG device).
        """
        self.faults = self
        self._hangs: list[Hang] = []
        self._answers: dict[tuple[Subject, int | None], tuple[Any, int]] = {}
        """Subject and GPU -> value and error code that are returned instead of the real result."""
        self._loads_of_driver = self._session_load = 0
        self._unlisted: set[int] = set()
        """Numbers of the GPUs that the driver does not list at its next initialization."""
        self._session_error = 0
        self._processes_hidden = False
        self._links_down: set[tuple[int, int]] = set()
        super().__init__(*arguments, **named)
        self.gpus = [BurstGpu(**vars(gpu)) for gpu in self.gpus]
        self._listed = self._session_gpus = list(self.gpus)
        for gpu, uuid in zip(self.gpus, uuids, strict=False):
            gpu.uuid = uuid
        for gpu, minor in zip(self.gpus, minors, strict=False):
            gpu.minor = minor
        for gpu in self.gpus:
            known = mig_uuids or {}
            gpu.instances = tuple(
                replace(i, uuid=known.get((gpu.number, i.index), i.uuid)) for i in gpu.instances
            )

    def gpu(self, number: int) -> Any:
        return self.gpus[number]

    def switch_log(self, uuid: str) -> SimulatedSwitchLog:
        return open_log(self, uuid)

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
        self._answers[subject, gpu] = value, 0

    def fail(self, subject: Subject, error: int, gpu: int | None = None) -> None:
        """Makes the function or field value fail with this NVML error code."""
        self._answers[subject, gpu] = None, error

    def unsupported(self, subject: Subject, gpu: int | None = None) -> None:
        self.fail(subject, pynvml.NVML_ERROR_NOT_SUPPORTED, gpu)

    def clear(self, subject: Subject, gpu: int | None = None) -> None:
        self._answers.pop((subject, gpu), None)

    def hide_processes(self) -> None:
        """Simulates a separate PID namespace: process lists are empty, but process utilization is
        still returned.
        """
        self._processes_hidden = True

    def lose(self, number: int, *, enumerated: bool = True) -> None:
        """Makes the GPU fail. With `enumerated=False`, the driver no longer lists it."""
        with self.lock:
            super().lose(number)
            if not enumerated:
                self._unlisted.add(number)
                self._listed = [gpu for gpu in self._listed if gpu.number != number]

    def recover(self, number: int) -> None:
        """Repairs the GPU. If the driver was initialized without it, the driver lists it after the
        next time.
        """
        with self.lock:
            super().recover(number)
            self._unlisted.discard(number)
            self._listed = [
                gpu for gpu in self._session_gpus if gpu.number == number or gpu in self._listed
            ]

    def relayout(self, gpu: int, profiles: Sequence[str] | None) -> list[str]:
        """Changes the MIG layout and returns the UUIDs of the new MIG devices. `profiles`: None
        disables MIG.
        """
        cut = self.gpus[gpu]
        with self.lock:
            self._targets = {
                a: t for a, t in self._targets.items() if t[0] is not cut or t[1] is None
            }
            self.advance(cut)
            if profiles is None:
                cut.set_instances(None)
            else:
                self._create_instances(cut, parse_profiles(cut.model, profiles))
            return [instance.uuid for instance in cut.instances]

    def cut_link(self, gpu: int, link: int) -> None:
        """Takes an NVLink down."""
        self._links_down.add((gpu, link))

    def unload_driver(self, error: int = pynvml.NVML_ERROR_DRIVER_NOT_LOADED) -> None:
        self.fail("nvmlInit", error)
        self.reload_driver()

    def mismatch_versions(self) -> None:
        """Simulates an upgrade of the kernel driver without the library."""
        self.unload_driver(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    def load_driver(self) -> None:
        self.clear("nvmlInit")

    def reload_driver(self, error: int = pynvml.NVML_ERROR_UNKNOWN) -> None:
        """Invalidates all handles. Open sessions fail with `error` until they are shut down and
        opened again.
        """
        with self.lock:
            self._loads_of_driver += 1
            self._session_error = error
            self._targets.clear()
            self._event_sets.clear()
            self._changed.notify_all()

    def _init(self) -> None:
        if not self._sessions:
            self._session_load = self._loads_of_driver
            self._listed = self._session_gpus = [
                gpu for gpu in self.gpus if gpu.number not in self._unlisted
            ]
        super()._init()

    def _check_session(self) -> None:
        super()._check_session()
        if self._session_load != self._loads_of_driver:
            raise_error(self._session_error)

    def _execute(self, name: str, *arguments: Any) -> Any:
        gpu = self._find_gpu(name, arguments)
        for hang in self._hangs:
            if hang.function == name and hang.gpu in (None, gpu):
                hang.threads.add(threading.get_ident())
                hang.entered.set()
                hang.released.wait()
        with self.lock:
            injected = self._find_answer(name, gpu)
            if injected is not None and self._is_reachable(name, arguments):
                return raise_error(injected[1]) if injected[1] else injected[0]
            answer = super()._execute(name, *arguments)
            if name == "nvmlDeviceGetFieldValues":
                self._change_field_values(answer, gpu)
            if name == "nvmlGpmMetricsGet":
                self._change_metrics(answer)
            return [] if self._processes_hidden and "RunningProcesses" in name else answer

    def _find_answer(self, subject: Subject, gpu: int | None) -> tuple[Any, int] | None:
        return self._answers.get((subject, gpu)) or self._answers.get((subject, None))

    def _is_reachable(self, name: str, arguments: Sequence[Any]) -> bool:
        """Returns False if the call fails before it reaches the function."""
        if name == "nvmlInit":
            return True
        self._check_session()
        target = self._targets.get(address_in(arguments[0])) if arguments else None
        return name in self._functions or (target is not None and not target[0].lost)

    def _find_gpu(self, name: str, arguments: Sequence[Any]) -> int | None:
        """Returns the number of the GPU that a call refers to."""
        with self.lock:
            if name == "nvmlDeviceGetHandleByIndex":
                return (
                    self._listed[arguments[0]].number if arguments[0] < len(self._listed) else None
                )
            if name == "nvmlDeviceGetHandleByPciBusId":
                return next(
                    (gpu.number for gpu in self._listed if pci_bus_id(gpu) == arguments[0]), None
                )
            target = self._targets.get(address_in(arguments[0])) if arguments else None
            return target[0].number if target else None

    def _change_field_values(self, values: Any, gpu: int | None) -> None:
        for value in values:
            injected = self._find_answer(value.fieldId, gpu)
            if injected is not None:
                value.nvmlReturn = injected[1]
                if not injected[1]:
                    setattr(value.value, _MEMBERS[value.valueType], injected[0])
            if value.fieldId == _LINK_STATE and (gpu, value.scopeId) in self._links_down:
                value.value.uiVal = 0

    def _change_metrics(self, request: Any) -> None:
        gpu = self._gpm_samples[address_in(request.sample2)].gpu
        for metric in request.metrics[: request.numMetrics]:
            injected = self._find_answer(f"gpm {metric.metricId}", gpu)
            if injected is not None:
                metric.value, metric.nvmlReturn = injected[0] or 0.0, injected[1]


# /proc

OTHER_PID_NAMESPACE = "pid:[4026532881]"
Driver = Literal["systemd", "cgroupfs"]
Qos = Literal["guaranteed", "burstable", "besteffort"]
Runtime = Literal["containerd", "crio", "docker"]
_SCOPES: dict[Runtime, str] = {"containerd": "cri-containerd", "crio": "crio", "docker": "docker"}
_V1_HIERARCHIES = (
    "cpuset",
    "cpu,cpuacct",
    "blkio",
    "memory",
    "devices",
    "freezer",
    "pids",
    "name=systemd",
)


class FaultyProc(SimulatedProc):
    def __init__(self, root: Path, pid_namespace: str = "") -> None:
        """`pid_namespace`: PID namespace of the process that reads the directory, if it is not the
        host's.
        """
        super().__init__(root)
        if pid_namespace:
            (root / "self" / "ns" / "pid").unlink()
            os.symlink(pid_namespace, root / "self" / "ns" / "pid")

    def reuse(self, pid: int, cgroup: str, name: str = "python3") -> None:
        """Replaces the process by another one with the same pid."""
        self.remove(pid)
        self.add(pid, cgroup, name)

    def run(
        self,
        pid: int,
        uid: int,
        *arguments: str,
        cgroup: str = "/user.slice",
        environment: str | None = None,
    ) -> None:
        """Adds a process of a user. Without `environment`, the environment of the process cannot be
        read.
        """
        self.add(pid, cgroup_text(cgroup))
        folder = self.root / str(pid)
        (folder / "status").write_text(f"Name:\tpython3\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
        (folder / "cmdline").write_text("".join(f"{text}\0" for text in arguments))
        if environment is not None:
            (folder / "environ").write_text(environment)

    def move(self, pid: int, cgroup: str) -> None:
        (self.root / str(pid) / "cgroup").write_text(cgroup)

    def forbid(self, pid: int) -> None:
        (self.root / str(pid) / "cgroup").chmod(0)


def container_cgroup(
    uid: str,
    container_id: str,
    *,
    version: Literal[1, 2] = 2,
    driver: Driver = "systemd",
    qos: Qos = "burstable",
    runtime: Runtime = "containerd",
) -> str:
    """Returns the text of the cgroup file of a process in a pod's container."""
    make = _systemd_path if driver == "systemd" else _cgroupfs_path
    return cgroup_text(make(uid, container_id, qos, runtime), version)


def cgroup_text(path: str, version: Literal[1, 2] = 2) -> str:
    if version == 2:
        return f"0::{path}\n"
    numbered = enumerate(_V1_HIERARCHIES, 1)
    return "".join(
        f"{number}:{controllers}:{path}\n" for number, controllers in reversed(list(numbered))
    )


def _systemd_path(uid: str, container_id: str, qos: Qos, runtime: Runtime) -> str:
    top = "kubepods" if qos == "guaranteed" else f"kubepods-{qos}"
    middle = "" if qos == "guaranteed" else f"/{top}.slice"
    pod = f"{top}-pod{uid.replace('-', '_')}.slice"
    return f"/kubepods.slice{middle}/{pod}/{_SCOPES[runtime]}-{container_id}.scope"


def _cgroupfs_path(uid: str, container_id: str, qos: Qos, runtime: Runtime) -> str:
    middle = "" if qos == "guaranteed" else f"/{qos}"
    name = f"crio-{container_id}" if runtime == "crio" else container_id
    return f"/kubepods{middle}/pod{uid}/{name}"
