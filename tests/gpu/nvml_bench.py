"""NvmlTelemetry on a simulated driver, with clocks that tests advance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from podgpu.labs.simulate.gpu import SimulatedLoad
from podgpu.metrics.counters import shipped_counters
from podgpu.metrics.fields import Field
from podgpu.model import DeviceUsage, GpuReading, UsageProblems, Value
from podgpu.node.gpu.nvml.nvml_telemetry import NvmlTelemetry
from tests.simulated import FaultyNvml, stop_after_test

DCP = tuple(c.field for c in shipped_counters("dcp") or ())


class NvmlBench:
    def __init__(
        self,
        spec: str = "1xH100",
        sees_processes: bool = True,
        wrap: Callable[[FaultyNvml], Any] = lambda driver: driver,
    ) -> None:
        self.now = 1000.0
        self.epoch = 1_700_000_000.0
        self.driver = self.faults = FaultyNvml(spec, clock=lambda: self.now, wall=self.wall)
        self.telemetry = NvmlTelemetry(
            wrap(self.driver),
            count_expected=lambda: len(self.driver.gpus),
            clock=lambda: self.now,
            wall=self.wall,
            sees_processes=sees_processes,
        )
        self.problems = UsageProblems()  # of the last reading of usage
        stop_after_test.append(self.stop)

    def wall(self) -> float:
        return self.epoch + self.now

    def place(self, pid: int, duty: float = 0.5, **more: Any) -> None:
        self.driver.place(SimulatedLoad(0, pid, duty=duty, **more))

    def pass_time(self, seconds: float = 1.0) -> None:
        self.now += seconds

    @property
    def gpu(self) -> Any:
        return self.telemetry.inventory().gpus[0]

    def read(self, index: int = 0, fields: tuple[Field, ...] = DCP) -> GpuReading:
        return self.telemetry.read(self.telemetry.inventory().gpus[index], fields)

    def usages(self) -> tuple[DeviceUsage, ...]:
        usage = self.telemetry.usage(self.gpu)
        self.problems = usage.problems
        return usage, *usage.instances

    def usages_after(self, seconds: float) -> tuple[DeviceUsage, ...]:
        self.now += seconds
        return self.usages()

    def after(self, seconds: float) -> DeviceUsage:
        return self.usages_after(seconds)[0]

    def start(self) -> None:
        """Takes the first reading and discards it, because it covers time before the test."""
        self.after(1)

    @property
    def lacks(self) -> set[str]:
        return {lack for _, lack in self.problems.lacks}

    def stop(self) -> None:
        self.faults.release_all()
        self.telemetry.release(1.0)


def of_gpu(reading: GpuReading) -> dict[int, Value]:
    """Returns the values of the GPU without those of its MIG instances."""
    return dict(next(iter(reading.values.values())))
