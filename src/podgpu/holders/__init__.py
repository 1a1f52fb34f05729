"""Finds which workloads hold which devices: one file per allocation source, then merging, identities and a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from podgpu.model import Allocation, Device, Workload

Complete = Callable[[Workload], Workload]
"""Returns the workload with all known fields of its identity. Raises SourceError if they contradict each other."""


class AllocationSource(Protocol):
    """Reports which devices are allocated to which workloads."""

    name: str  # value of the `source` label in podgpu's own metrics

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        """Reads the source once. Raises SourceError if it cannot be read."""
        ...
