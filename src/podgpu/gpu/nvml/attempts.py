"""Attempts reads a device part by part: what it cannot give is not asked again, what fails costs only itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import pynvml

from podgpu.errors import DeviceLost, DriverGone, SourceError, Unsupported
from podgpu.gpu.source import Lack

T = TypeVar("T")
Number = TypeVar("Number", int, float)
_LACKS: Mapping[str, Lack] = {
    "nvmlDeviceGetProcessesUtilizationInfo": "no_process_utilization",  # the last that is tried
    "nvmlDeviceGetTotalEnergyConsumption": "no_energy",
    "nvmlDeviceGetMemoryInfo": "no_memory",
    "nvmlGpmMetricsGet": "no_instance_utilization",
    "process list": "no_process_list",
}
"""How a part's name begins -> what nobody is told without it. For other parts there is a second way."""
_GREW = f"nvml_{pynvml.NVML_ERROR_INSUFFICIENT_SIZE}"
_TRIES = 4


class Attempts:
    """One reading after the other of one GPU; `begin` starts the next."""

    def __init__(self) -> None:
        self.unsupported: dict[str, str] = {}
        """Part -> reason word, until `forget`."""
        self.errors: list[str] = []
        """Reason words of what failed in this reading."""
        self.dropped: list[str] = []
        """Parts that answered with no value (sentinel, impossible figure) in this reading, once per occurrence."""

    def begin(self) -> None:
        self.errors.clear()
        self.dropped.clear()

    def forget(self) -> None:
        """The topology changed: what was not supported may be now."""
        self.unsupported.clear()

    @property
    def lacks(self) -> tuple[tuple[str, Lack], ...]:
        """(part, what it would tell) of those that are not supported and have no substitute."""
        starts = [(part, start) for part in self.unsupported for start in _LACKS if part.startswith(start)]
        return tuple((part, _LACKS[start]) for part, start in starts)

    def of(self, part: str, read: Callable[[], T]) -> T | None:
        """None where there is no such part, or none this time. Raises DeviceLost and DriverGone."""
        if part in self.unsupported:
            return None
        try:
            return read()
        except Unsupported as e:
            self.unsupported[part] = e.reason
        except (DeviceLost, DriverGone):
            raise
        except SourceError as e:
            self.errors.append(e.reason)
        return None

    def within(self, part: str, value: Number, most: Number) -> Number | None:
        """The value when it lies between 0 and `most`; anything else, NaN too, is dropped and counted."""
        if 0 <= value <= most:
            return value
        self.dropped.append(part)
        return None


def again_while_it_grows(read: Callable[[], T]) -> T:
    """pynvml asks how many entries there are, then for the entries: more may have come in between."""
    for _ in range(_TRIES - 1):
        try:
            return read()
        except SourceError as e:
            if e.reason != _GREW:
                raise
    return read()
