"""Lists the processes on one GPU: compute processes, MPS clients and graphics, each process once per device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from podgpu.errors import Unsupported
from podgpu.gpu.nvml.driver import NvmlDriver, parse_instance_id
from podgpu.gpu.nvml.mig import Instance
from podgpu.model import Device, ProcessUsage, device_key

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
