"""Reads the MIG mode, the instances and the processes of one GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from podgpu.errors import SourceError, Unsupported
from podgpu.gpu.nvml.driver import NvmlDriver, parse_instance_id
from podgpu.model import Device, ProcessUsage, device_key

_OFF_SECONDS = 1.5
"""Disabled MIG mode is cached for this long, because reading the mode costs 0.4 ms of CPU (H200)."""
_PROFILE = re.compile(r"MIG (?:\d+c\.)?(\S+)")  # "NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb": the instance is 3g.20gb


@dataclass(frozen=True, slots=True)
class Instance:
    gi_id: int
    profile: str
    mig_uuids: tuple[str, ...]
    handle: Any = field(compare=False, hash=False)
    """Handle of a MIG device in the instance. Memory figures read with it are those of the whole instance."""

    def make_device(self, gpu: Device) -> Device:
        return replace(gpu, gi_id=self.gi_id, profile=self.profile, mig_uuids=self.mig_uuids)


class MigLayout:
    """Reads the MIG mode and the instances of one GPU. All readers of the GPU use the same object."""

    def __init__(self, driver: NvmlDriver, handle: Any, clock: Callable[[], float]) -> None:
        self._driver = driver
        self._handle = handle
        self._clock = clock
        self._is_supported = True
        self._off_at = float("-inf")
        """Time when MIG was last read as disabled."""

    def read(self) -> tuple[bool, tuple[Instance, ...]]:
        now = self._clock()
        if not self._is_supported or now - self._off_at < _OFF_SECONDS:
            return False, ()
        try:
            enabled = bool(self._driver.call("nvmlDeviceGetMigMode", self._handle)[0])
        except Unsupported:
            self._is_supported = False
            return False, ()
        if not enabled:
            self._off_at = now
            return False, ()
        return True, self._read_instances()

    def _read_instances(self) -> tuple[Instance, ...]:
        instances: dict[int, Instance] = {}
        for slot in range(self._driver.call("nvmlDeviceGetMaxMigDeviceCount", self._handle)):
            try:
                mig = self._driver.call("nvmlDeviceGetMigDeviceHandleByIndex", self._handle, slot)
            except SourceError as e:
                if e.reason == "not_found" or isinstance(e, Unsupported):
                    continue  # an empty slot; older drivers return INVALID_ARGUMENT
                raise
            instance = self._read_instance(mig)
            known = instances.get(instance.gi_id)
            if known is not None:  # several compute instances in one GPU instance
                instance = replace(known, mig_uuids=(*known.mig_uuids, *instance.mig_uuids))
            instances[instance.gi_id] = instance
        return tuple(instances[gi] for gi in sorted(instances))

    def _read_instance(self, mig: Any) -> Instance:
        name = self._driver.call("nvmlDeviceGetName", mig)
        profile = _PROFILE.search(name)
        return Instance(
            gi_id=self._driver.call("nvmlDeviceGetGpuInstanceId", mig),
            profile=profile[1] if profile else name,
            mig_uuids=(self._driver.call("nvmlDeviceGetUUID", mig),),
            handle=mig,
        )


# Processes

# Function names have a version, because pynvml's unversioned functions raise other exceptions with older drivers.
_LISTS = tuple(f"nvmlDeviceGet{kind}RunningProcesses_v3" for kind in ("Compute", "MPSCompute", "Graphics"))
_NOT_AVAILABLE = 0xFFFFFFFFFFFFFFFF
MAX_PID = 1 << 22
"""Linux's PID_MAX_LIMIT. Larger numbers are uninitialized memory of the driver."""


def list_processes(
    driver: NvmlDriver, handle: Any, gpu: Device, instances: Sequence[Instance]
) -> tuple[ProcessUsage, ...]:
    """Raises Unsupported if the driver provides no list at all, SourceError if a call fails."""
    targets = [(handle, gpu.uuid)]
    for instance in instances:
        key = device_key(gpu.uuid, instance.gi_id)
        targets += [(driver.call("nvmlDeviceGetHandleByUUID", uuid), key) for uuid in instance.mig_uuids]
    if gpu.mig_enabled and len(targets) == 1:
        return ()
    usages: list[ProcessUsage] = []
    refusals: list[Unsupported] = []
    for function in _LISTS:
        for target, key in targets:
            try:
                entries = driver.call_list(function, target)
            except Unsupported as e:
                refusals.append(e)
                continue
            usages += [_parse(gpu.uuid, key, entry, "MPS" in function) for entry in entries if 0 < entry.pid <= MAX_PID]
            if entries and target is handle:
                break  # with privileges, the GPU lists the processes of its MIG devices, too
    if len(refusals) == len(_LISTS) * len(targets):
        raise Unsupported(f"NVML lists no processes on {gpu.uuid}", refusals[0].reason)
    return _deduplicate(usages)


def _parse(gpu: str, key: str, entry: Any, mps: bool) -> ProcessUsage:
    gi_id = parse_instance_id(entry.gpuInstanceId)
    memory = None if entry.usedGpuMemory == _NOT_AVAILABLE else entry.usedGpuMemory
    return ProcessUsage(key if gi_id is None else device_key(gpu, gi_id), entry.pid, memory, mps)


def _deduplicate(usages: Iterable[ProcessUsage]) -> tuple[ProcessUsage, ...]:
    """Merges entries of the same process. A process with compute and graphics, and an MPS client, is in two lists, each
    time with all of its memory."""
    merged: dict[tuple[str, int], ProcessUsage] = {}
    for usage in usages:
        key = (usage.device, usage.pid)
        known = merged.get(key, usage)
        merged[key] = replace(max(known, usage, key=_bytes), mps=known.mps or usage.mps)
    return tuple(merged[key] for key in sorted(merged))


def _bytes(usage: ProcessUsage) -> int:
    return -1 if usage.memory is None else usage.memory
