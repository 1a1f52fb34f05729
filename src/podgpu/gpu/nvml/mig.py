"""Finds a GPU, its MIG instances and its processes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from podgpu.errors import SourceError, Unsupported
from podgpu.gpu.nvml.driver import NvmlDriver, parse_instance_id
from podgpu.model import Device, ProcessUsage, device_key

_OFF_SECONDS = 1.5
"""Disabled MIG mode is cached for this long, because reading the mode costs 0.4 ms of CPU (H200)."""
_PROFILE = re.compile(r"MIG (?:\d+c\.)?(\S+)")  # "NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb": the instance is 3g.20gb


@dataclass(frozen=True, slots=True)
class DeviceHandle:
    """A GPU or MIG instance with its NVML handle."""

    device: Device
    handle: Any = field(compare=False, hash=False)
    """For an instance, the handle of one of its MIG devices. It returns the memory of the whole instance."""


def open_gpu(driver: NvmlDriver, index: int) -> DeviceHandle:
    """Returns the GPU with this index. Raises SourceError."""
    handle = driver.call("nvmlDeviceGetHandleByIndex", index)
    minor: int | None = None
    with suppress(Unsupported):
        minor = int(driver.call("nvmlDeviceGetMinorNumber", handle))
    device = Device(
        index=index,
        uuid=driver.call("nvmlDeviceGetUUID", handle),
        pci_bus_id=driver.call("nvmlDeviceGetPciInfo", handle).busId,
        model=driver.call("nvmlDeviceGetName", handle),
        minor=minor,
    )
    return DeviceHandle(device, handle)


class MigLayout:
    """Reads the MIG mode and the instances of one GPU. All readers of the GPU use the same object."""

    def __init__(self, driver: NvmlDriver, gpu: DeviceHandle, clock: Callable[[], float]) -> None:
        self._driver = driver
        self._gpu = gpu
        self._clock = clock
        self._is_supported = True
        self._off_at = float("-inf")
        """Time of the last reading that found MIG disabled."""

    def read(self) -> tuple[DeviceHandle, ...]:
        """Returns the GPU, then each of its instances."""
        gpu = replace(self._gpu.device, mig_enabled=self._is_enabled())
        return DeviceHandle(gpu, self._gpu.handle), *(self._read_instances(gpu) if gpu.mig_enabled else ())

    def _is_enabled(self) -> bool:
        now, enabled = self._clock(), False
        if self._is_supported and now - self._off_at >= _OFF_SECONDS:
            try:
                enabled = bool(self._driver.call("nvmlDeviceGetMigMode", self._gpu.handle)[0])
            except Unsupported:
                self._is_supported = False
            if not enabled:
                self._off_at = now
        return enabled

    def _read_instances(self, gpu: Device) -> list[DeviceHandle]:
        instances: dict[int, DeviceHandle] = {}
        for slot in range(self._driver.call("nvmlDeviceGetMaxMigDeviceCount", self._gpu.handle)):
            try:
                mig = self._driver.call("nvmlDeviceGetMigDeviceHandleByIndex", self._gpu.handle, slot)
            except SourceError as e:
                if e.reason == "not_found" or isinstance(e, Unsupported):
                    continue  # an empty slot; older drivers return INVALID_ARGUMENT
                raise
            gi_id = self._driver.call("nvmlDeviceGetGpuInstanceId", mig)
            name = self._driver.call("nvmlDeviceGetName", mig)
            profile = _PROFILE.search(name)
            device = replace(gpu, gi_id=gi_id, profile=profile[1] if profile else name)
            known = instances.get(gi_id, DeviceHandle(device, mig))  # an instance may have several compute instances
            mig_uuids = (*known.device.mig_uuids, self._driver.call("nvmlDeviceGetUUID", mig))
            instances[gi_id] = replace(known, device=replace(known.device, mig_uuids=mig_uuids))
        return [instances[gi_id] for gi_id in sorted(instances)]


# Processes

# Function names have a version, because pynvml's unversioned functions raise other exceptions with older drivers.
_LISTS = tuple(f"nvmlDeviceGet{kind}RunningProcesses_v3" for kind in ("Compute", "MPSCompute", "Graphics"))
_NOT_AVAILABLE = 0xFFFFFFFFFFFFFFFF
MAX_PID = 1 << 22
"""Linux's PID_MAX_LIMIT. Larger numbers are uninitialized memory of the driver."""


def list_processes(driver: NvmlDriver, layout: Sequence[DeviceHandle]) -> tuple[ProcessUsage, ...]:
    """Lists the processes on a GPU and its instances.

    Raises Unsupported if the driver provides no list at all, SourceError if a call fails.
    """
    gpu, *instances = layout
    targets = [(gpu.handle, gpu.device.uuid)]
    for instance in instances:
        uuids = instance.device.mig_uuids
        targets += [(driver.call("nvmlDeviceGetHandleByUUID", uuid), instance.device.key) for uuid in uuids]
    if gpu.device.mig_enabled and len(targets) == 1:
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
            mps = "MPS" in function
            usages += [_parse(gpu.device.uuid, key, entry, mps) for entry in entries if 0 < entry.pid <= MAX_PID]
            if entries and target is gpu.handle:
                break  # with privileges, the GPU lists the processes of its MIG devices, too
    if len(refusals) == len(_LISTS) * len(targets):
        raise Unsupported(f"NVML lists no processes on {gpu.device.uuid}", refusals[0].reason)
    return _deduplicate(usages)


def _parse(gpu: str, key: str, entry: Any, mps: bool) -> ProcessUsage:
    gi_id = parse_instance_id(entry.gpuInstanceId)
    memory = None if entry.usedGpuMemory == _NOT_AVAILABLE else entry.usedGpuMemory
    return ProcessUsage(key if gi_id is None else device_key(gpu, gi_id), entry.pid, memory, mps)


def _deduplicate(usages: Iterable[ProcessUsage]) -> tuple[ProcessUsage, ...]:
    """Merges entries of the same process. An MPS client, or a process with compute and graphics, is in two lists, and
    each entry has all of its memory."""
    merged: dict[tuple[str, int], ProcessUsage] = {}
    for usage in usages:
        key = (usage.device, usage.pid)
        known = merged.get(key, usage)
        merged[key] = replace(max(known, usage, key=_bytes), mps=known.mps or usage.mps)
    return tuple(merged[key] for key in sorted(merged))


def _bytes(usage: ProcessUsage) -> int:
    return -1 if usage.memory is None else usage.memory
