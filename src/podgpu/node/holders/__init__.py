"""Finds which workloads hold which devices. Reads several allocation sources and merges their
results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from podgpu.errors import SourceError
from podgpu.model import Allocation, Device, Workload

KUBELET = "kubelet"
"""Name of the only source that lists all allocations of the node."""
Complete = Callable[[Workload], Workload]
"""Adds the known fields of a workload's identity. Raises SourceError if the fields contradict each
other.
"""


def kubelet_answers(allocation: Allocation) -> bool:
    """Returns True if the last reading of the kubelet succeeded."""
    return any(source.name == KUBELET and source.up for source in allocation.sources)


def complete_if_certain(complete: Complete, workload: Workload) -> Workload:
    """Returns the workload unchanged if its fields contradict each other."""
    try:
        return complete(workload)
    except SourceError:
        return workload


class AllocationSource(Protocol):
    """Reports which devices are allocated to which workloads."""

    name: str  # value of the `source` label in podgpu's own metrics

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        """Reads the source once. Raises SourceError if it cannot be read."""
        ...
