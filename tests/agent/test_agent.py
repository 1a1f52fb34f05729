"""The agent's turns with a simulated driver, a simulated source of holders and a simulated
clock.
"""

from __future__ import annotations

import gc
import threading
import tracemalloc
from collections.abc import Sequence

import pytest

from podgpu.metrics.counters import parse_counters
from podgpu.metrics.labels import Policy
from podgpu.model import Allocation, Assignment, Device, Workload
from podgpu.node.agent.agent import Settings
from podgpu.node.gpu.nvml.driver import VersionMismatch
from podgpu.web import exporter_app
from tests.agent.simulated_node import SimulatedNode as Node

EXTRA = parse_counters(
    "DCGM_FI_DEV_GPU_TEMP,gauge,t\nDCGM_FI_DEV_XID_ERRORS,gauge,x\nDCGM_EXP_XID_ERRORS_COUNT,gauge,n\n"
    "DCGM_EXP_XID_ERRORS_TOTAL,counter,n\nDCGM_EXP_CLOCK_EVENTS_TOTAL,counter,c\n"
    "DCGM_EXP_CLOCK_EVENTS_COUNT,gauge,c\nDCGM_FI_DEV_NVSWITCH_LINK_STATUS,gauge,s\n",
    "test",
)


SETTINGS = Settings(interval=1.0, policy=Policy(counters=EXTRA, hostname="h"))


@pytest.fixture
def node() -> Node:
    return Node("2xH100", SETTINGS)


def test_memory_does_not_grow_with_the_number_of_ended_pods() -> None:
    """100 pods share a GPU for one turn, then 100 other pods."""
    node = Node("1xH100", SETTINGS)
    uuid = node.uuid(0)
    used = []
    tracemalloc.start()
    for turn in range(45):
        pods = [Workload("ns", f"p{turn}-{n}", "c", f"uid{turn}-{n}") for n in range(100)]
        node.holders.now = [
            Assignment(uuid, pod, "kubelet", str(n), 0.01) for n, pod in enumerate(pods)
        ]
        node.turn()
        if turn in (25, 44):
            gc.collect()
            used.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert used[1] - used[0] < 500_000


def test_past_three_intervals_the_figures_are_withheld(node: Node) -> None:
    node.turn()
    published = node.agent.published
    assert node.agent.is_fresh(published)
    node.time += SETTINGS.stale_after
    assert node.agent.is_fresh(published)
    node.time += 0.001
    assert not node.agent.is_fresh(published)
    assert exporter_app.is_live(node.agent)[0] is False
    assert exporter_app.is_ready(node.agent)[0] is False
    stale = published.render("stale").plain.decode()
    assert "podgpu_exporter_snapshot_timestamp_seconds" in stale
    assert "\nDCGM_" not in stale
    assert "podgpu_device" not in stale


def test_xids_are_counted_from_zero_per_gpu(node: Node) -> None:
    exposition = node.turn()
    assert 'podgpu_device_xid_errors_total{gpu="0"' in exposition
    assert 'err_code="0"' in exposition
    assert "DCGM_EXP_XID_ERRORS_TOTAL{" not in exposition, "there is no series before the first XID"
    assert 'DCGM_EXP_XID_ERRORS_COUNT{gpu="0"' in exposition
    for xid in (79, 79, 31):
        node.driver.faults.raise_xid(0, xid)
    seen = ""
    while 'xid="31"' not in seen:  # events are read in a thread
        seen = node.turn(0.0)
    key = f'UUID="{node.driver.gpus[0].uuid}"'
    lines = [line for line in seen.splitlines() if key in line]
    assert any(
        line.startswith("podgpu_xid_errors_total{") and 'xid="79"} 2' in line for line in lines
    )
    assert any(
        line.startswith("podgpu_device_xid_errors_total{") and line.endswith(" 3") for line in lines
    )
    assert any(
        line.startswith("DCGM_FI_DEV_XID_ERRORS{") and line.endswith(" 31") for line in lines
    )
    assert any('window_size_in_ms="300000",xid="79"} 2' in line for line in lines)
    node.turn(301)
    gone = node.exposition
    totals = [x for x in gone.splitlines() if x.startswith("DCGM_EXP_XID_ERRORS_TOTAL")]
    assert [line.partition("xid=")[2] for line in totals] == ['"31"} 1', '"79"} 2']
    assert 'xid="79"} 2' in gone, "the counter keeps its value"
    assert 'window_size_in_ms="300000",xid="79"' not in gone, "the XID is older than the window"


def test_clock_events_are_samples_within_the_window(node: Node) -> None:
    node.run(4)
    idle = [
        x
        for x in node.exposition.splitlines()
        if "CLOCK_EVENTS_COUNT" in x and 'clock_event="gpu_idle"' in x
    ]
    assert [line.rsplit(" ", 1)[1] for line in idle] == ["4", "4"]


def test_clock_events_that_begin_are_counted_for_good(node: Node) -> None:
    """Each start of a reason is counted. Reasons that are active at the first reading are not."""
    reasons = "nvmlDeviceGetCurrentClocksEventReasons"
    node.turn()
    for mask in (0x1 | 0x4, 0x4, 0x0, 0x4 | 0x20):
        node.driver.faults.answer(reasons, mask, 0)
        node.turn()
    exposition = node.turn(4000.0)
    totals = [x for x in exposition.splitlines() if x.startswith("DCGM_EXP_CLOCK_EVENTS_TOTAL")]
    assert [line.partition("clock_event=")[2] for line in totals] == [
        '"power_cap"} 2',
        '"sw_thermal"} 1',
    ]


def test_release_of_the_driver_for_a_time(node: Node) -> None:
    node.turn()
    assert node.agent.release(30.0)
    assert node.driver.calls["nvmlShutdown"] == 1
    assert "GPU_TEMP" not in node.exposition
    assert 'podgpu_exporter_source_up{source="nvml"} 0' in node.exposition
    assert "GPU_TEMP" not in node.turn(29.0)
    assert exporter_app.is_live(node.agent)[0], "the loop is alive"
    assert "GPU_TEMP" in node.turn(2.0)


def test_library_and_driver_apart_is_fatal(node: Node) -> None:
    node.driver.faults.mismatch_versions()
    with pytest.raises(VersionMismatch):
        node.turn()


def test_the_loops_run_and_end(node: Node) -> None:
    read = threading.Event()

    def assignments(devices: Sequence[Device]) -> Allocation:
        if devices:
            read.set()
        return Allocation()

    node.holders.assignments = assignments  # type: ignore[method-assign]
    node.agent.start(on_fatal=lambda: None)
    assert read.wait(30), "the allocation loop runs as soon as devices are known"


def test_a_bug_in_a_loop_ends_the_process_instead_of_leaving_old_figures(node: Node) -> None:
    ended = threading.Event()

    node.agent.read_allocation = lambda: 1 / 0  # type: ignore[assignment]
    node.agent.start(on_fatal=ended.set)
    assert ended.wait(30)
    assert node.agent.fatal is not None
    assert "allocation loop stopped because of a bug" in str(node.agent.fatal)
