"""Three loops that begin, publish and end at once, for real: whatever one brings, another may be reading."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pynvml
import pytest

from podgpu.accounting.containers import ContainerFinder
from podgpu.agent.loop import Agent, Settings
from podgpu.errors import SourceError
from podgpu.join import Policy
from podgpu.model import Allocation, Device
from podgpu.simulate.driver import SimulatedNvml
from podgpu.simulate.proc import SimulatedProc
from podgpu.telemetry.nvml import NvmlTelemetry
from tests.agent.gpu_bench import COUNTERS
from tests.nodes.clock import wait_until

SECONDS = 4.0
_CODES = [code for code in range(1, 200) if code not in (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,)]


class RestlessHolders:
    """Fails for another reason each time: each is a new counter."""

    name = "restless"

    def __init__(self) -> None:
        self.asked = 0

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        self.asked += 1
        raise SourceError(f"reason_{self.asked}", "another one")

    def close(self) -> None:
        pass


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    driver = SimulatedNvml("4xH100")
    SimulatedProc(tmp_path / "proc")
    self_healing = threading.Event()
    agent = Agent(
        NvmlTelemetry(driver, "simulated", lambda: 4),
        [RestlessHolders()],
        Settings(
            interval=0.001,
            allocation_interval=0.001,
            usage_interval=0.001,
            policy=Policy(counters=COUNTERS, hostname="h"),
        ),
        containers=ContainerFinder(str(tmp_path / "proc")),
    )

    def go_wrong() -> None:
        while not self_healing.is_set():
            for code in _CODES:
                driver.faults.fail("nvmlDeviceGetTotalEnergyConsumption", code, code % 4)
                self_healing.wait(0.002)

    spoiler = threading.Thread(target=go_wrong)
    spoiler.start()
    yield agent
    self_healing.set()
    spoiler.join()
    agent.stop()


@pytest.mark.fault(
    "All three cadences turn as fast as they can, each with new errors in every turn",
    "Each hands over a part that nobody changes any more: every page is whole, and the process goes on",
)
def test_three_cadences_against_each_other(agent: Agent) -> None:
    ended = threading.Event()
    agent.start(ended.set)
    until = time.monotonic() + SECONDS
    while time.monotonic() < until and not ended.is_set():
        ended.wait(0.01)
    assert agent.fatal is None
    wait_until(lambda: agent.published.snapshot.clock_events, "samples of clock events are counted")
    reasons = {reason for source, reason in agent.published.snapshot.errors if source == "restless"}
    assert len(reasons) > 100, "the loops did turn"
