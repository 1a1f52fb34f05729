"""While nobody comes or goes, use is accounted for less often: nothing is lost by it, and who comes is seen at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from podgpu.agent.usage_turn import patience
from tests.agent.test_usage import GIB, UIDS, Node
from tests.nodes.clock import wait_until

BUSY, ENERGY = "nvmlDeviceGetProcessUtilization", "nvmlDeviceGetTotalEnergyConsumption"
LISTS = "nvmlDeviceGetComputeRunningProcesses_v3"
MEMORY = "nvmlDeviceGetMemoryInfo"


def quiet_node(root: Path, interval: float = 30.0, spec: str = "1xH100") -> Node:
    """Three pods hold the GPU, two of them work, and all of that was seen."""
    node = Node(root, spec, interval=interval)
    node.give("train", "serve", "idle")
    node.work("train", 41, 0.5, 10 * GIB)
    node.work("serve", 42, 0.2, 2 * GIB)
    node.turn()
    node.turn()
    seconds(node, 10)
    return node


def seconds(node: Node, number: int) -> Counter[str]:
    """As the loop would; which calls that took."""
    before = Counter(node.driver.calls)
    for _ in range(number):
        node.time += 1.0
        node.agent.read_due_usage()
    return node.driver.calls - before


@pytest.mark.parametrize(
    ("interval", "turns", "energy"), [(30.0, 12, 12), (10.0, 12, 12), (3.0, 20, 10), (1.0, 30, 10), (0.1, 30, 10)]
)
def test_it_is_as_seldom_as_the_gpus_own_figures(tmp_path: Path, interval: float, turns: int, energy: int) -> None:
    node = quiet_node(tmp_path, interval)
    calls = seconds(node, 60)
    assert (calls[BUSY], calls[LISTS]) == (turns, turns)
    assert calls[ENERGY] == energy
    node.agent.stop()


@pytest.mark.parametrize(
    ("usage_interval", "interval", "apart"),
    [
        *((1.0, 30.0, 5.0), (1.0, 1.0, 2.0), (1.0, 3.5, 3.0), (0.1, 30.0, 0.5), (0.5, 1.0, 1.0)),
        *((2.0, 30.0, 4.0), (2.5, 30.0, 5.0), (4.0, 30.0, 0.0), (30.0, 30.0, 0.0)),
    ],
)
def test_how_seldom(usage_interval: float, interval: float, apart: float) -> None:
    """Always so many turns, so that they can be in step; 0 where every turn is taken."""
    assert patience(usage_interval, interval) == pytest.approx(apart)


@pytest.mark.parametrize("comes", [1, 2, 3, 4])
def test_turns_stay_in_step_whoever_comes_between(tmp_path: Path, comes: int) -> None:
    """Prometheus looks every 15 s: counters that are as old each time make rates that are right."""
    node = quiet_node(tmp_path)
    while not seconds(node, 1)[BUSY]:
        pass
    seconds(node, comes)
    node.work("idle", 50, 0.1, GIB)
    turns = [second for second in range(comes + 1, 41) if seconds(node, 1)[BUSY]]
    assert turns[0] == comes + 1
    assert [second for second in turns if second % 5 == 0] == list(range(5, 41, 5))
    assert len(turns) <= 8 + 3, "who comes is seen at once, and again when it has been there for a turn"
    node.agent.stop()


def test_nothing_is_lost_by_it(tmp_path: Path) -> None:
    (tmp_path / "often").mkdir()
    (tmp_path / "seldom").mkdir()
    often, seldom = quiet_node(tmp_path / "often"), quiet_node(tmp_path / "seldom")
    seconds(seldom, 60)
    while not seconds(seldom, 1)[BUSY]:
        pass
    while often.time < seldom.time:
        often.time += 1.0
        often.agent.read_usage()
    for pod in UIDS:
        for what in ("busy_seconds_total", "energy_joules_total", "allocated_seconds_total", "idle_seconds_total"):
            told = seldom.value(f"podgpu_container_gpu_{what}", pod)
            assert told == pytest.approx(often.value(f"podgpu_container_gpu_{what}", pod), rel=0.01), (pod, what)
    for what in ("busy_seconds_total", "energy_joules_total"):
        parts = sum(seldom.value(f"podgpu_container_gpu_{what}", pod) or 0 for pod in UIDS)
        rest = seldom.value(f"podgpu_device_unattributed_{what}") or 0
        assert parts + rest == pytest.approx(seldom.value(f"podgpu_device_{what}"), rel=1e-12)
    often.agent.stop()
    seldom.agent.stop()


def test_who_comes_is_there_within_a_second(tmp_path: Path) -> None:
    node = quiet_node(tmp_path)
    for pid in range(50, 57):  # at every moment between two turns
        seconds(node, 2 + pid % 5)
        node.work("idle", pid, 0.1, GIB)
        seconds(node, 1)
        assert node.value("podgpu_container_gpu_processes", "idle") == pid - 49
    node.agent.stop()


def test_what_somebody_did_before_it_left_is_its_own(tmp_path: Path) -> None:
    node = quiet_node(tmp_path)
    before = node.value("podgpu_container_gpu_busy_seconds_total", "train") or 0.0
    told_at = node.time
    while seconds(node, 1)[BUSY]:
        told_at = node.time
    seconds(node, 2)
    ran = node.time - told_at
    node.driver.remove(41)
    node.proc.remove(41)
    seconds(node, 1)
    assert node.value("podgpu_container_gpu_processes", "train") == 0
    after = node.value("podgpu_container_gpu_busy_seconds_total", "train") or 0.0
    assert after - before > 0.35 * ran, "three seconds of which nothing was told when it ended"
    node.agent.stop()


def test_a_holder_more_is_accounted_for_at_once(tmp_path: Path) -> None:
    node = quiet_node(tmp_path)
    seconds(node, 2)
    node.give("train", "serve")
    node.agent.read_allocation()
    assert seconds(node, 1)[BUSY] == 1
    assert node.value("podgpu_container_gpu_allocated_seconds_total", "idle") is None
    node.agent.stop()


@pytest.mark.fault("the GPU is lost while its use is put off", "says so a second later")
def test_a_gpu_that_is_lost_is_noticed(tmp_path: Path) -> None:
    node = quiet_node(tmp_path)
    node.driver.faults.lose(0)
    seconds(node, 1)
    (outcome,) = (o for o in node.agent.published.snapshot.outcomes if o.source == "usage")
    assert outcome.error == "gpu_lost"
    node.agent.stop()


def test_an_xid_is_told_meanwhile(tmp_path: Path) -> None:
    node = quiet_node(tmp_path)
    seconds(node, 1)
    before = node.driver.calls[BUSY]
    node.driver.faults.raise_xid(0, 79)

    def is_told() -> bool:
        node.agent.read_due_usage()
        return bool(node.agent.published.snapshot.xids)

    wait_until(is_told, "the XID is published")
    assert node.driver.calls[BUSY] == before
    node.agent.stop()


def forget_memory(node: Node) -> None:
    node.driver.faults.fail(MEMORY, pynvml.NVML_ERROR_NOT_SUPPORTED)


def hide_names(node: Node) -> None:
    """A process of a container that nobody knows."""
    node.work("train", 77, 0.1, GIB)
    node.proc.move(77, node.proc.root.joinpath("41", "cgroup").read_text().replace("0f1f4ffc", "9f1f4ffc"))


def fail_energy(node: Node) -> None:
    node.driver.faults.fail(ENERGY, pynvml.NVML_ERROR_UNKNOWN)


@pytest.mark.parametrize("trouble", [forget_memory, hide_names, fail_energy])
def test_where_something_is_not_known_every_turn_looks(tmp_path: Path, trouble: Callable[[Node], None]) -> None:
    node = quiet_node(tmp_path)
    trouble(node)
    seconds(node, 6)
    assert seconds(node, 10)[BUSY] == 10
    node.agent.stop()


def test_in_mig_mode_every_turn_looks(tmp_path: Path) -> None:
    node = Node(tmp_path, "1xH100/2x3g.40gb", interval=30.0)
    node.turn()
    node.turn()
    seconds(node, 5)
    assert seconds(node, 10)["nvmlGpmMigSampleGet"] == 20
    node.agent.stop()


def test_usage_takes_telemetrys_word_for_how_the_gpu_is_cut(tmp_path: Path) -> None:
    node = quiet_node(tmp_path)
    before = node.driver.calls["nvmlDeviceGetMigMode"]
    node.turn()  # telemetry, holders, usage
    assert node.driver.calls["nvmlDeviceGetMigMode"] == before + 1
    node.time += 1.0
    node.agent.read_usage()
    assert node.driver.calls["nvmlDeviceGetMigMode"] == before + 2
    node.agent.stop()
