"""Allocation source `processes`: containers with processes on a device, for devices without a holder in other sources.

It cannot detect idle holders, and detects shares only of KAI Scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from podgpu.holders import AllocationSource
from podgpu.holders.device_ids import sort_allocation
from podgpu.model import Allocation, Assignment, Device, ProcessUsage, Unmapped, Workload
from podgpu.usage.containers import (
    FAILED_LOOKUPS,
    ContainerFinder,
    require_host_pid_namespace,
    require_permission,
)

SOURCE = "processes"
_RESOURCE = "pid"
_MAX_ENVIRONMENT_BYTES = 256 * 1024


class ProcessHolders(AllocationSource):
    """`processes` lists the processes on a physical GPU and may raise SourceError."""

    name = SOURCE

    def __init__(self, processes: Callable[[Device], Sequence[ProcessUsage]], finder: ContainerFinder) -> None:
        self._processes = processes
        self._finder = finder

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        require_host_pid_namespace(self._finder.proc)
        processes = [process for gpu in devices if not gpu.is_instance for process in self._processes(gpu)]
        places = self._finder.find_all({process.pid for process in processes})
        require_permission(places, self._finder.proc)
        keys = {device.key for device in devices}
        shares: dict[tuple[str, Workload], float | None] = {}
        unmapped: set[Unmapped] = set()
        for process in processes:
            place = places[process.pid]
            if place.outcome in FAILED_LOOKUPS:
                unmapped.add(Unmapped(SOURCE, place.outcome, process.device, _RESOURCE, Workload()))
            elif place.outcome != "found":
                continue  # a process of the host, or one that ended
            elif process.device in keys:
                key = process.device, place.workload
                shares[key] = shares.get(key) or _read_share(f"{self._finder.proc}/{process.pid}/environ")
            else:
                unmapped.add(Unmapped(SOURCE, "unknown_device", process.device, _RESOURCE, place.workload))
        return sort_allocation((Assignment(*key, SOURCE, share=share) for key, share in shares.items()), unmapped)


def _read_share(path: str) -> float | None:
    """Returns the fraction of a GPU that KAI Scheduler wrote into the environment, or None.

    Only a process with CAP_SYS_PTRACE can read the environments of others.
    """
    with suppress(OSError, ValueError):
        with open(path, "rb") as file:
            variables = file.read(_MAX_ENVIRONMENT_BYTES).split(b"\0")
        shares = (float(text.partition(b"=")[2]) for text in variables if text.startswith(b"GPU_PORTION="))
        return next((share for share in shares if 0 < share <= 1), None)
    return None
