"""This module says who was given which GPU, as a toy's file has it: `GPU-… namespace/pod/container` a line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from podgpu.errors import SourceError
from podgpu.holders.device_ids import parse_device_id
from podgpu.holders.holdings import HeldId, map_held
from podgpu.model import Allocation, Device, Workload

SOURCE = "toy"


class ToyAllocation:
    name = SOURCE

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        try:
            lines = self._path.read_text().splitlines()
        except OSError as error:
            raise SourceError("file_missing", f"{self._path} is not there: write it") from error
        return map_held(SOURCE, [self._held(*line.split()) for line in lines], devices)

    def _held(self, text: str, names: str) -> HeldId:
        return HeldId(Workload(*names.split("/")), SOURCE, text, parse_device_id(text))

    def close(self) -> None:
        """Nothing is open."""
