"""This module is the allocation source "processes": a container that works on a device is taken for its holder.

For devices nobody else knows the holder of. It sees who runs something there, not who was given it, so it knows no
shares and no idle holders. Reads no driver: whoever makes it hands in what the driver lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from podgpu.holders.holdings import in_order
from podgpu.model import Allocation, Assignment, Device, ProcessUsage, Unmapped, Workload
from podgpu.usage.containers import (
    UNSEEN,
    ContainerFinder,
    Whereabouts,
    require_host_pid_namespace,
    require_sight,
)

SOURCE = "processes"
RESOURCE = "pid"
"""Stands where other sources name the resource that was given."""


class ProcessHolders:
    """`processes` gives what runs on a physical GPU now, and may raise SourceError."""

    name = SOURCE

    def __init__(self, processes: Callable[[Device], Sequence[ProcessUsage]], finder: ContainerFinder) -> None:
        self._processes = processes
        self._finder = finder

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        require_host_pid_namespace(self._finder.proc)
        processes = [process for gpu in devices if not gpu.is_instance for process in self._processes(gpu)]
        pids = {process.pid for process in processes}
        self._finder.forget_others(pids)
        seen = {pid: self._finder.find(pid) for pid in pids}
        require_sight(seen, self._finder.proc)
        return map_processes(processes, seen, devices)

    def close(self) -> None:
        """Nothing stays open between readings."""


def map_processes(
    processes: Iterable[ProcessUsage], seen: Mapping[int, Whereabouts], devices: Sequence[Device]
) -> Allocation:
    """Which containers work on which of the devices; each holds a device once, however many processes it has there."""
    known = {device.key for device in devices}
    assignments: set[Assignment] = set()
    unmapped: set[Unmapped] = set()
    for process in processes:
        whereabouts = seen[process.pid]
        if whereabouts.sight in UNSEEN:
            unmapped.add(Unmapped(SOURCE, whereabouts.sight, process.device, RESOURCE, Workload()))
        elif whereabouts.sight != "found":
            continue  # a host's own process holds nothing, nor does one that has ended
        elif process.device in known:
            assignments.add(Assignment(process.device, whereabouts.workload, SOURCE))
        else:
            unmapped.add(Unmapped(SOURCE, "unknown_device", process.device, RESOURCE, whereabouts.workload))
    return in_order(assignments, unmapped)
