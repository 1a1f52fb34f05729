"""Allocation source `processes`: containers with processes on a device, for devices without a holder in other sources.

It cannot detect shares or idle holders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
        assignments: set[Assignment] = set()
        unmapped: set[Unmapped] = set()
        for process in processes:
            place = places[process.pid]
            if place.outcome in FAILED_LOOKUPS:
                unmapped.add(Unmapped(SOURCE, place.outcome, process.device, _RESOURCE, Workload()))
            elif place.outcome != "found":
                continue  # a process of the host, or one that ended
            elif process.device in keys:
                assignments.add(Assignment(process.device, place.workload, SOURCE))
            else:
                unmapped.add(Unmapped(SOURCE, "unknown_device", process.device, _RESOURCE, place.workload))
        return sort_allocation(assignments, unmapped)
