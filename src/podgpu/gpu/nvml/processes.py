"""Lists the processes on one GPU: compute processes, MPS clients and graphics, each process once per device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from podgpu.errors import Unsupported
from podgpu.gpu.nvml.driver import NvmlDriver, parse_instance_id
from podgpu.gpu.nvml.mig import Instance
from podgpu.model import ProcessUsage, device_key

# Function names have a version, because pynvml's unversioned functions raise other exceptions with older drivers.
_LISTS = tuple(
    tuple(f"nvmlDeviceGet{kind}RunningProcesses_{version}" for version in ("v3", "v2"))
    for kind in ("Compute", "MPSCompute", "Graphics")
)
_NOT_AVAILABLE = 0xFFFFFFFFFFFFFFFF
MAX_PID = 1 << 22
"""Linux's PID_MAX_LIMIT. Larger numbers are uninitialized memory of the driver."""


class _Target(NamedTuple):
    """The GPU or one of its MIG devices."""

    handle: Any
    uuid: str
    key: str
    """Device key for entries without a GPU instance."""


class ProcessList:
    def __init__(self, driver: NvmlDriver, handle: Any, uuid: str) -> None:
        self._driver = driver
        self._gpu = _Target(handle, uuid, uuid)
        self._in_mig = False
        self._unsupported: dict[str, dict[str, str]] = {}
        """UUID of the GPU or MIG device -> unsupported functions and their reason words."""

    def read(self, in_mig: bool, instances: Sequence[Instance]) -> tuple[ProcessUsage, ...]:
        """Raises Unsupported if the driver provides no list at all, SourceError if a call fails."""
        if in_mig != self._in_mig:
            self._in_mig, self._unsupported = in_mig, {}
        mig_devices = self._find_mig_devices(instances)
        if in_mig and not mig_devices:
            return ()
        # A MIG device that is destroyed during a call returns "not supported". Another one may get its UUID later, so
        # entries of missing devices are removed.
        self._unsupported = {t.uuid: self._unsupported.get(t.uuid, {}) for t in (self._gpu, *mig_devices)}
        lists = [entries for versions in _LISTS for entries in self._read_lists(versions, mig_devices)]
        if all(entries is None for entries in lists):
            reason = next(iter(self._unsupported[self._gpu.uuid].values()))
            raise Unsupported(f"NVML lists no processes on {self._gpu.uuid}", reason)
        return _deduplicate(usage for entries in lists for usage in entries or ())

    def _find_mig_devices(self, instances: Iterable[Instance]) -> list[_Target]:
        """Opens the MIG devices. A GPU instance has one per compute instance."""
        return [
            _Target(
                self._driver.call("nvmlDeviceGetHandleByUUID", uuid), uuid, device_key(self._gpu.uuid, instance.gi_id)
            )
            for instance in instances
            for uuid in instance.mig_uuids
        ]

    def _read_lists(
        self, versions: Sequence[str], mig_devices: Sequence[_Target]
    ) -> Iterator[list[ProcessUsage] | None]:
        """Yields the lists of the GPU and its MIG devices, None for unsupported ones.

        The MIG devices are only read if the GPU lists nothing: without privileges it does not list their processes.
        """
        whole = self._read_list(self._gpu, versions)
        yield whole
        if not whole:
            yield from (self._read_list(target, versions) for target in mig_devices)

    def _read_list(self, target: _Target, versions: Sequence[str]) -> list[ProcessUsage] | None:
        unsupported = self._unsupported[target.uuid]
        for function in versions:
            if function in unsupported:
                continue
            try:
                entries = self._driver.call_list(function, target.handle)
            except Unsupported as e:
                unsupported[function] = e.reason
                continue
            mps = "MPS" in function
            return [self._parse(target, entry, mps) for entry in entries if 0 < entry.pid <= MAX_PID]
        return None

    def _parse(self, target: _Target, entry: Any, mps: bool) -> ProcessUsage:
        gi_id = parse_instance_id(entry.gpuInstanceId)
        memory = None if entry.usedGpuMemory == _NOT_AVAILABLE else entry.usedGpuMemory
        key = target.key if gi_id is None else device_key(self._gpu.uuid, gi_id)
        return ProcessUsage(key, entry.pid, memory, mps)


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
