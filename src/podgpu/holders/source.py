"""This module says what every allocation source is and gives. Touches nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from podgpu.model import Allocation, Device

LAST_RESORT = frozenset({"processes"})
"""Sources that see who works on a device, not who was given it."""

LAGGING = {"checkpoint": "kubelet"}
"""A source that can be behind another: where the other answers, it completes what that said and adds nothing."""


class AllocationSource(Protocol):
    """Knows who was given which device."""

    name: str
    """Its word in the `source` label of podgpu's own metrics."""

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        """One reading. Raises SourceError when there is none this time; the caller decides what to keep."""
        ...

    def close(self) -> None:
        """Let go of what was opened."""
        ...
