"""This module simulates NVML's GPU performance monitoring: samples of a GPU's meters, and percentages from the
difference of two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pynvml

from podgpu.simulate.gpu import NVLINK_BYTES, PCIE_RX_BYTES, PCIE_TX_BYTES, Meter, SimulatedGpu
from podgpu.simulate.machine import Machine, address_in, pointer_to
from podgpu.simulate.models import MIB

_FIRST_LINK_METRIC = 62
"""Metrics 62, 63, 64 ... are received and sent by link 0, received by link 1 ..."""

_PERCENT: dict[int, tuple[float, float, float]] = {
    1: (1.0, 0.0, 0.0),  # graphics engine
    2: (0.6, 0.4, 0.0),  # SM: never less than the tensor cores inside it
    3: (0.1, 0.1, 0.0),  # SM occupancy
    4: (0.02, 0.0, 0.0),  # integer
    5: (0.0, 1.0, 0.0),  # any tensor
    6: (0.0, 0.0, 0.0),  # tensor DFMA
    7: (0.0, 1.0, 0.0),  # tensor HMMA
    8: (0.0, 0.0, 0.0),  # tensor DMMA
    9: (0.0, 0.0, 0.0),  # tensor IMMA
    10: (0.0, 0.0, 1.0),  # DRAM bandwidth
    11: (0.0, 0.0, 0.0),  # FP64
    12: (0.2, -0.2, 0.0),  # FP32: what the tensor cores leave
    13: (0.05, -0.05, 0.0),  # FP16
} | dict.fromkeys((*range(30, 37), *range(40, 47), 50), (0.0, 0.0, 0.0))  # NVDEC, NVJPG, OFA engines
"""Metric -> weights of busy, tensor and memory time."""


@dataclass(slots=True)
class GpmSample:
    gpu: int | None = None
    """None until it was filled."""
    gi_id: int | None = None
    at: float = 0.0
    nvlinks: int = 0
    meter: Meter = field(default_factory=Meter)


class GpmSamples:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._samples: dict[int, GpmSample] = {}

    def allocate(self) -> Any:
        address = self._machine.new_address()
        self._samples[address] = GpmSample()
        return pointer_to(address, pynvml.c_nvmlGpmSample_t)

    def free(self, pointer: Any) -> None:
        self._find(pointer)
        del self._samples[address_in(pointer)]

    def fill(self, gpu: SimulatedGpu, gi_id: int | None, pointer: Any) -> Any:
        if not gpu.model.gpm:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        meter = gpu.meter if gi_id is None else gpu.instance_meters.get(gi_id)
        if meter is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        sample = self._find(pointer)
        sample.gpu, sample.gi_id, sample.at, sample.nvlinks = gpu.number, gi_id, gpu.at, gpu.nvlinks
        sample.meter = Meter(meter.busy, meter.tensor, meter.dram)
        return pointer

    def evaluate(self, request: Any, answer_for: Callable[[int, int], Any]) -> Any:
        """Fills in a c_nvmlGpmMetricsGet_t; `answer_for(metric, gpu)` may know better."""
        first, second = self._find(request.sample1), self._find(request.sample2)
        if second.gpu is None or (first.gpu, first.gi_id) != (second.gpu, second.gi_id):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        for index in range(request.numMetrics):
            metric = request.metrics[index]
            told = answer_for(metric.metricId, second.gpu)
            if told is not None:
                metric.nvmlReturn, metric.value = told.error, told.value or 0.0
                continue
            value = _evaluate(metric.metricId, first, second)
            metric.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED if value is None else pynvml.NVML_SUCCESS
            metric.value = value or 0.0
        return request

    def forget(self) -> None:
        self._samples.clear()

    def _find(self, pointer: Any) -> GpmSample:
        sample = self._samples.get(address_in(pointer))
        if sample is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return sample


def _evaluate(metric: int, first: GpmSample, second: GpmSample) -> float | None:
    before, after = first.meter, second.meter
    seconds = second.at - first.at
    if seconds <= 0:
        # Nothing can be said of no time at all; what a real driver answers here was not measured.
        return None
    busy = (after.busy - before.busy) / seconds
    rate = _mib_per_second(metric, busy, second.nvlinks)
    if rate is not None:
        return rate
    weights = _PERCENT.get(metric)
    if weights is None:
        return None
    tensor = (after.tensor - before.tensor) / seconds
    dram = (after.dram - before.dram) / seconds
    ratio = weights[0] * busy + weights[1] * tensor + weights[2] * dram
    return min(100.0, max(0.0, 100.0 * ratio))


def _mib_per_second(metric: int, busy: float, nvlinks: int) -> float | None:
    if metric in (20, 21):
        return busy * (PCIE_TX_BYTES if metric == 20 else PCIE_RX_BYTES) / MIB
    if metric in (60, 61) and nvlinks:
        return busy * nvlinks * NVLINK_BYTES / MIB
    if _FIRST_LINK_METRIC <= metric < _FIRST_LINK_METRIC + 2 * nvlinks:
        return busy * NVLINK_BYTES / MIB
    return None
