"""A source of holders that says what a test tells it to."""

from __future__ import annotations

from collections.abc import Sequence

from podgpu.model import Allocation, Assignment, Device


class Holders:
    name = "kubelet"

    def __init__(self) -> None:
        self.now: list[Assignment] = []

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        return Allocation(tuple(self.now))

    def close(self) -> None:
        pass
