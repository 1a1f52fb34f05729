"""An agent on simulated GPUs. Time passes only when a test advances it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from podgpu.clock import Clock
from podgpu.errors import SourceError
from podgpu.model import Allocation, Assignment, Device
from podgpu.node.agent.agent import Agent, Settings
from podgpu.node.gpu.nvml.nvml_telemetry import NvmlTelemetry
from podgpu.node.holders.identity import Identities
from podgpu.node.holders.reader import HolderSources
from podgpu.node.usage.containers import ContainerFinder
from tests.simulated import FaultyNvml, FaultyProc, stop_after_test


class Holders:
    """A source whose assignments and error are set by the test."""

    name = "kubelet"

    def __init__(self) -> None:
        self.now: list[Assignment] = []
        self.more: dict[str, Any] = {}
        self.error: SourceError | None = None

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        if self.error is not None:
            raise self.error
        return Allocation(tuple(self.now), **self.more)


class SimulatedNode:
    def __init__(
        self,
        gpus: str,
        settings: Settings,
        *,
        sources: Sequence[Any] | None = None,
        proc: FaultyProc | None = None,
        telemetry: dict[str, Any] | None = None,
        identities: Callable[[], Identities] = Identities,
        driver_version: str = "580.159.04",
        **agent: Any,
    ) -> None:
        self.time, self.leapt = 1000.0, 0.0
        self.on_time: Callable[[], object] = lambda: None
        """Called by each look at the clock, so also in the middle of a reading."""
        self.driver = FaultyNvml(
            gpus, clock=self.monotonic, wall=self.wall, driver_version=driver_version
        )
        self.faults = self.driver.faults
        self.expected = len(self.driver.gpus)
        self.holders = Holders()
        if proc is not None:
            agent["containers"] = ContainerFinder(str(proc.root), self.monotonic)
        self.agent = Agent(
            NvmlTelemetry(
                self.driver,
                "nvml",
                lambda: self.expected,
                self.monotonic,
                self.wall,
                **(telemetry or {}),
            ),
            HolderSources([self.holders] if sources is None else sources, identities),
            settings,
            Clock(self.monotonic, self.wall),
            **agent,
        )
        stop_after_test.append(self.stop)

    def monotonic(self) -> float:
        self.on_time()
        return self.time

    def wall(self) -> float:
        return 1_700_000_000 + self.time + self.leapt

    def uuid(self, gpu: int) -> str:
        return self.driver.gpu(gpu).uuid

    def turn(self, seconds: float = 1.0) -> str:
        """Runs all three cadences once and returns the metrics text."""
        self.time += seconds
        self.agent.read_telemetry()
        self.agent.read_allocation()
        self.agent.read_usage()
        return self.exposition

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.turn()

    @property
    def exposition(self) -> str:
        return self.agent.published.fresh.plain.decode()

    def stop(self) -> None:
        self.faults.release_all()
        self.faults.unload_driver()  # ends the wait for XIDs
        self.agent.stop()
