"""The exporter's page in a real browser, for a simulated node."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from podgpu.labs.simulate.simulated_node import create_host_files, place_loads, pods, tenants
from podgpu.metrics.counters import shipped_counters
from podgpu.metrics.labels import Policy
from podgpu.node.agent.agent import Agent, Settings
from podgpu.node.gpu.nvml.nvml_telemetry import NvmlTelemetry
from podgpu.node.holders.identity import IdentityReader
from podgpu.node.holders.kubelet import KubeletAllocation
from podgpu.node.holders.reader import HolderSources
from podgpu.node.usage.containers import ContainerFinder
from tests.browser.chromium import Tab, visited
from tests.browser.test_states import SHARED
from tests.nodes.node import Description, node_of
from tests.simulated import FaultyNvml
from tests.simulated_kubelet import FaultyKubelet
from tests.web.server import running

STATE = "document.querySelector('#status').dataset.state"


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    """An agent with the node of `podgpu demo`: whole, shared, idle and free GPUs, and one in MIG
    mode.
    """
    folder = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))
    driver = FaultyNvml("8xH100,1xH100/7x1g.10gb")
    on_node = tenants(driver)
    place_loads(driver, on_node)
    create_host_files(folder, on_node)
    with FaultyKubelet(str(folder / "kubelet.sock"), pods(on_node)):
        names = IdentityReader(str(folder / "pods"), str(folder / "containers"))
        policy = Policy(counters=shipped_counters("dcp") or (), hostname="simulated-node")
        agent = Agent(
            NvmlTelemetry(driver, "simulated", count_expected=lambda: 9, sees_processes=True),
            HolderSources([KubeletAllocation(str(folder / "kubelet.sock"))], names.read),
            Settings(
                interval=30.0, policy=policy
            ),  # no loop runs, so values must stay current during a test
            containers=ContainerFinder(str(folder / "proc")),
        )
        agent.warm_up()
        yield agent
        driver.faults.unload_driver()
        agent.stop()
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def served(agent: Agent, chrome: Tab) -> Iterator[str]:
    with running(agent) as client:
        yield client.address.url
        chrome.open("about:blank")


@pytest.fixture
def page(agent: Agent, served: str) -> str:
    """Updates the values first, because earlier tests may have taken long."""
    agent.read_telemetry()
    return served


def test_every_gpu_is_a_tile_with_its_holders(tab: Tab, page: str) -> None:
    visited(tab, page)
    tab.wait_for("document.querySelectorAll('.tile[data-key]').length === 9", "nine tiles")
    assert tab.text("#scope") == "simulated-node"
    assert tab.texts("#simulated") == ["SIMULATED"] or tab.texts("#simulated") == ["Simulated"]
    first, *_ = tiles = tab.texts(".tile[data-key]")
    assert first.startswith("GPU 0 H100")
    assert first.endswith("research/ llm-train-0"), (
        "the container is shown only if the pod has several"
    )
    assert tab.texts(".total-value")[0] == "9"
    rows = (
        "[...document.querySelectorAll('.tile[data-key]')].map(t => "
        "t.querySelectorAll('.row').length)"
    )
    assert tab.evaluate(rows) == [1, 1, 1, 1, 2, 1, 1, 1, 7], (
        "shared GPUs and MIG instances are rows of the tile"
    )
    fills = (
        "[...document.querySelectorAll('.tile[data-key]')].map(t => "
        "t.querySelectorAll('.segment').length)"
    )
    assert tab.evaluate(fills)[-1] == 7
    *_, mig = tiles
    assert (mig.count("1g.10gb"), mig.count("Free")) == (7, 2)
    assert "embed-0" in tiles[4]
    assert "ocr-0" in tiles[4]


def test_parts_and_whole_are_of_the_same_time(tab: Tab, page: str, agent: Agent) -> None:
    visited(tab, page)
    for _ in range(6):
        tab.evaluate("new Promise(done => setTimeout(done, 300))")
        agent.read_telemetry()
        agent.read_usage()
        tab.look_again()
        taken_at = agent.published.state.taken_at
        tab.wait_for(
            f"fetch('api/v1/view').then(r => r.json()).then(v => v.taken_at >= {taken_at})"
        )
        (shared, _) = tab.evaluate(SHARED)
        assert 0 < sum(shared[1:]) <= shared[0], shared


def test_what_does_not_work_is_said_and_never_parsed(tab: Tab, folder: Path) -> None:
    with (
        node_of(Description("two GPUs", "2xH100", arguments=["-k"]), folder) as node,
        running(node.agent) as client,
    ):
        node.kubelet.refusal = ("INTERNAL", "<img src=x onerror=alert(1)>")
        node.take_turns()
        tab.open(client.address.url)
        tab.wait_for("!document.querySelector('#notes').hidden", "notes")
        tab.click("#notes summary")
        assert "<img src=x onerror=alert(1)>" in tab.text("#notes-list")
        assert tab.evaluate("document.images.length") == 0


def test_figures_that_are_missing_or_too_old(tab: Tab, folder: Path) -> None:
    with (
        node_of(Description("two GPUs", "2xH100", arguments=["-k"]), folder) as node,
        running(node.agent) as client,
    ):
        tab.open(client.address.url)
        tab.wait_for(f"{STATE} === 'old'", "the state is old")
        assert (tab.text("#status-text"), tab.text("#updated")) == (
            "1 alert. No figures yet",
            "No figures yet",
        )
        assert "no readings yet" in tab.text("#alerts-list")
        node.take_turns()
        tab.look_again()
        tab.wait_for("document.querySelectorAll('.tile[data-key]').length === 2")
        node.clock.advance(1000.0)
        tab.look_again()
        tab.wait_for("document.querySelectorAll('.tile[data-key]').length === 0", "no tiles")
        assert "too old" in tab.text("#alerts-list"), "the alert is open"
