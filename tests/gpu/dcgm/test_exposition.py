"""Compares the metrics text with a golden file: a GPU, a GPU in MIG mode, switches, links and CPUs.

`pytest tests/gpu/dcgm --rewrite-golden` rewrites the file. Read the diff before you commit it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from podgpu.clock import Clock
from podgpu.metrics.counters import parse_counters
from podgpu.metrics.labels import Policy
from podgpu.model import Allocation, Assignment, Device, Workload
from podgpu.node.agent.agent import Agent, Settings
from podgpu.node.holders.reader import HolderSources
from tests.gpu.dcgm.double import (
    CORE,
    CPU,
    FB_USED,
    GI,
    GPU,
    GR_ACTIVE,
    LINK,
    SWITCH,
    Bench,
    Double,
    uuid_of,
)
from tests.nodes.test_nodes import MASKED, VARYING
from tests.web.server import running

HERE = Path(__file__).parent
COUNTERS = parse_counters((HERE / "counters.csv").read_text(encoding="utf-8"), "counters.csv")
GOLDEN = HERE / "expected.prom"


class Holders:
    name = "kubelet"

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        return Allocation(
            (
                Assignment(uuid_of(0), Workload("research", "train-a", "main"), "kubelet"),
                Assignment(f"{uuid_of(1)}/gi2", Workload("serving", "infer-b", "main"), "kubelet"),
            )
        )


@pytest.fixture
def node(double: Double) -> Iterator[tuple[Bench, Agent]]:
    describe(double)
    bench = Bench(double)
    clock = Clock(bench.clock.monotonic, bench.clock.wall)
    policy = Policy(counters=COUNTERS, hostname="node-1")
    agent = Agent(
        bench.telemetry, HolderSources([Holders()]), Settings(interval=10.0, policy=policy), clock
    )
    yield bench, agent
    agent.stop()


def describe(double: Double) -> None:
    double.gpu(0)
    double.gpu(1, mig=True)
    double.instance(7, 1, 2, "3g.40gb")
    double.instance(8, 1, 5, "1g.10gb")
    double.call("peer", 0, 1, 0)
    double.call("peer", 1, 0, 0)
    double.call("incident", 0, 0x10, 10, 5)
    double.call("gpu_link", 0, 0, 3)
    double.call("switch", 0)
    double.call("switch_link", 0, 4, 3)
    double.call("cpu", 0, 12)
    speak(double)


def speak(double: Double) -> None:
    double.tick()
    for index in (0, 1):
        double.speak(index, temperature=40 + index)
        double.text((GPU, index), 1, "580.105.08")
        double.double((GPU, index), GR_ACTIVE, 0.25)
    for entity in (7, 8):
        double.int((GI, entity), FB_USED, 100 * entity)
        double.double((GI, entity), GR_ACTIVE, entity / 10)
    double.int((LINK, 1), 1508, 1)
    double.int((SWITCH, 0), 858, 51)
    double.text((SWITCH, 0), 1524, "2.1")
    double.int((LINK, 3 | 4 << 8), 786, 17)
    double.double((CPU, 0), 1130, 150.5)
    double.double((CORE, 12), 1100, 0.5)


def test_the_exposition(node: tuple[Bench, Agent], request: pytest.FixtureRequest) -> None:
    bench, agent = node
    agent.read_telemetry()
    bench.pass_time()
    speak(bench.double)
    bench.double.call("xid", GPU, 0, bench.double.now, 79)
    agent.read_telemetry()
    agent.read_allocation()
    with running(agent) as client:
        text = VARYING.sub(MASKED, client.ask("/metrics").text)
    if request.config.getoption("--rewrite-golden"):
        GOLDEN.write_text(text, encoding="utf-8")
    expected = GOLDEN.read_text(encoding="utf-8")
    if text != expected:
        lines = difflib.unified_diff(
            expected.splitlines(True), text.splitlines(True), "expected", "got", n=0
        )
        pytest.fail("".join(lines), pytrace=False)


def test_without_the_engine_there_are_no_values_and_a_reason(node: tuple[Bench, Agent]) -> None:
    bench, agent = node
    agent.read_telemetry()
    bench.double.call("disconnect")
    agent.read_telemetry()
    exposition = agent.published.fresh.plain.decode()
    assert not re.search(r"^DCGM_", exposition, re.MULTILINE)
    assert 'podgpu_exporter_source_up{source="dcgm"} 0' in exposition
    assert (
        'podgpu_exporter_source_errors_total{source="dcgm",reason="connection_lost"} 1'
        in exposition
    )
    speak(bench.double)
    bench.pass_time()
    agent.read_telemetry()
    assert 'DCGM_FI_DEV_GPU_TEMP{gpu="0"' in agent.published.fresh.plain.decode()
