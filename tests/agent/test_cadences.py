"""Three real loops that start, publish and stop concurrently. Each may publish while another one
reads.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pynvml
import pytest

from podgpu.errors import SourceError
from podgpu.metrics.labels import Policy
from podgpu.model import Allocation, Device
from podgpu.node.agent.agent import Agent, Settings
from podgpu.node.gpu.nvml.nvml_telemetry import NvmlTelemetry
from podgpu.node.holders.reader import HolderSources
from podgpu.node.usage.containers import ContainerFinder
from tests.agent.gpu_bench import COUNTERS
from tests.nodes.clock import wait_until
from tests.simulated import FaultyNvml, FaultyProc

SECONDS = 2.0
_CODES = [
    code for code in range(1, 200) if code not in (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,)
]


class FailingHolders:
    """Fails with a new reason each time, so that each failure creates a new counter."""

    name = "holders"

    def __init__(self) -> None:
        self.asked = 0

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        self.asked += 1
        raise SourceError(f"reason_{self.asked}", "another one")


@contextmanager
def running_agent(proc: Path, holders: FailingHolders) -> Iterator[tuple[Agent, FaultyNvml]]:
    often = sys.getswitchinterval()
    sys.setswitchinterval(
        1e-6
    )  # switches threads after a few instructions, to provoke race conditions
    driver = FaultyNvml("4xH100")
    FaultyProc(proc)
    agent = Agent(
        NvmlTelemetry(driver, "simulated", lambda: 4),
        HolderSources([holders]),
        Settings(
            interval=0.001,
            allocation_interval=0.001,
            usage_interval=0.001,
            policy=Policy(counters=COUNTERS, hostname="h"),
        ),
        containers=ContainerFinder(str(proc)),
    )
    try:
        yield agent, driver
    finally:
        agent.stop()
        sys.setswitchinterval(often)


@pytest.mark.fault(
    "All three cadences turn as fast as they can, each with new errors in every turn",
    (
        "Each hands over a part that nobody changes any more: every exposition is whole, and the "
        "process goes on"
    ),
)
def test_three_cadences_against_each_other(tmp_path: Path) -> None:
    ended, holders = threading.Event(), FailingHolders()
    with running_agent(tmp_path / "proc", holders) as (agent, driver):
        agent.start(ended.set)
        codes, until = itertools.cycle(_CODES), time.monotonic() + SECONDS
        while time.monotonic() < until and not ended.wait(0.002):
            code = next(codes)
            driver.faults.fail("nvmlDeviceGetTotalEnergyConsumption", code, code % 4)
        assert agent.fatal is None
        wait_until(lambda: holders.asked > 50, "the loops have turned")
        wait_until(
            lambda: agent.published.state.devices[0].clock_events,
            "samples of clock events are counted",
        )
