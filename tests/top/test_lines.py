"""Tests the lines of a view, their order, and filters."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from podgpu.fleet.view import ConditionView
from podgpu.model import RunningProcess, Workload
from podgpu.top.lines import Line, arrange, flatten, make_lines
from tests.top.scene import (
    BATCH,
    GIB,
    LOST,
    NOW,
    SERVER,
    TRAINER,
    busy_gpu,
    gpu,
    holder,
    instance,
    lines_of,
    node,
    view,
)

ALL_PODS = (TRAINER, SERVER, BATCH)
EXCLUSIVE = busy_gpu(0)
SHARED = gpu(
    1,
    holder(
        SERVER,
        utilization_ratio=0.0,
        memory_used_bytes=5 * GIB,
        power_watts=100.0,
        processes=1,
        use="idle",
        idle_since=NOW - 90,
    ),
    holder(BATCH, utilization_ratio=0.5, memory_used_bytes=9 * GIB, processes=2, use="used"),
    utilization_ratio=0.5,
    memory_used_bytes=14 * GIB,
    memory_total_bytes=80 * GIB,
    power_watts=300.0,
)
FREE = gpu(2, model="NVIDIA L4", utilization_ratio=0.0)
PARTED = gpu(
    3,
    utilization_ratio=0.3,
    power_watts=200.0,
    temperature_celsius=40.0,
    instances=[
        instance(11, utilization_ratio=0.0, memory_used_bytes=2 * GIB, memory_total_bytes=10 * GIB),
        instance(
            7,
            holder(BATCH),
            utilization_ratio=0.6,
            memory_used_bytes=2 * GIB,
            memory_total_bytes=10 * GIB,
        ),
    ],
)
ALL = lines_of(EXCLUSIVE, SHARED, FREE, PARTED)


def shape(lines: list[Line]) -> list[str]:
    return [
        "  " * depth + f"{line.number * line.is_slot} {line.label}".strip()
        for depth, line in flatten(lines)
    ]


def test_one_holder_is_one_line_with_the_figures_of_the_device() -> None:
    (line,) = lines_of(EXCLUSIVE)
    assert (line.utilization, line.memory, line.power, line.processes) == (0.93, 61 * GIB, 600.0, 1)
    silent = gpu(0, holder(utilization_ratio=0.4, memory_used_bytes=GIB))
    (line,) = lines_of(silent)
    assert (line.utilization, line.memory) == (0.4, GIB)


def test_processes_are_beneath_their_holder_and_others_beneath_the_device() -> None:
    running = [
        RunningProcess(30, GIB, 0.2, BATCH),
        RunningProcess(20, GIB, None, SERVER),
        RunningProcess(10, GIB),
        RunningProcess(5, GIB, 0.1, Workload("other", "pod", "c")),
    ]
    found = lines_of(SHARED, PARTED, processes={"GPU-1": running, "GPU-3/gi7": [RunningProcess(7)]})
    assert [f"{'  ' * depth}{line.label}" for depth, line in flatten(found)] == [
        "2 holders",
        "  batch/embed/worker",
        "    pid 30",
        "  serving/chat/engine",
        "    pid 20",
        "  pid 5, other/pod/c",
        "  pid 10, in no known container",
        "1 of 2 instances held",
        "  batch/embed/worker",
        "    pid 7, in no known container",
        "  -",
    ]


@pytest.mark.parametrize(
    "name", ["lost", "unreadable", "driver_away", "node_gone", "stale", "thermal"]
)
def test_figures_that_are_not_current_are_not_shown(name: str) -> None:
    condition = ConditionView(condition=name, since=NOW - 60, says="wrong", do="repair it")
    broken = replace(SHARED, conditions=[] if name == "stale" else [condition])
    (line,) = make_lines(view(node(broken, old=name == "stale")), NOW)
    is_current = name == "thermal"
    assert [
        line.utilization is not None,
        line.power is not None,
        line.slot.memory_total_bytes is not None,
    ] == ([is_current] * 3)
    holders = [inner for inner in line.beneath if inner.kind == "holder"]
    assert [inner.name for inner in holders] == ["batch/embed/worker", "serving/chat/engine"]
    assert [inner.idle is not None for inner in holders] == [False, is_current]
    assert line.severity == {"stale": "", "thermal": "warn"}.get(name, "bad")


def test_a_holder_of_a_shared_gpu_is_busy_only_if_its_own_use_is_known() -> None:
    unmeasured, measured = (
        holder(who, use="used", utilization_ratio=r) for who, r in ((TRAINER, None), (SERVER, 0.5))
    )
    (shared,) = lines_of(gpu(0, unmeasured, measured, utilization_ratio=0.5))
    assert [inner.use for inner in shared.beneath] == [None, "used"]
    (alone,) = lines_of(gpu(0, unmeasured, utilization_ratio=0.5))
    assert alone.use == "used"


def test_holders_never_show_more_than_their_gpu() -> None:
    for ratios in ((0.215, 0.225), (0.146, 0.147, 0.148), (0.335, 0.335, 0.33)):
        (line,) = lines_of(
            gpu(
                0,
                *(
                    holder(who, utilization_ratio=r)
                    for who, r in zip(ALL_PODS, ratios, strict=False)
                ),
                utilization_ratio=sum(ratios),
            )
        )
        shown = [round(100 * (inner.utilization or 0.0)) for inner in line.beneath]
        assert sum(shown) <= round(100 * sum(ratios)) <= sum(shown) + 1


def test_a_lost_gpu_names_its_last_holders() -> None:
    (line,) = lines_of(gpu(1, absent=True, last_holders=[BATCH], conditions=[LOST]))
    assert line.remark == "last held by batch/embed/worker"
    assert [(inner.kind, inner.age) for inner in line.beneath] == [("condition", 100.0)]


def test_a_tree_is_sorted_by_its_largest_value() -> None:
    assert shape(arrange(ALL, "utilisation")) == [
        "0 research/train/main",
        "3 1 of 2 instances held",
        "  3/7 batch/embed/worker",
        "  3/11 -",
        "1 2 holders",
        "  batch/embed/worker",
        "  serving/chat/engine",
        "2 -",
    ]
    assert shape(arrange(ALL, "idle"))[:3] == [
        "1 2 holders",
        "  serving/chat/engine",
        "  batch/embed/worker",
    ]


def test_a_condition_of_the_whole_node_is_shown_once() -> None:
    away = ConditionView(condition="driver_away", says="no driver answers", do="")
    found = arrange(lines_of(*(gpu(number, conditions=[away]) for number in range(3))), "gpu")
    assert [line.severity for line in found] == ["bad"] * 3
    assert [len(line.beneath) for line in found] == [1, 0, 0]


@pytest.mark.parametrize(
    ("wanted", "left"),
    [
        (
            "EMBED",
            [
                "1 2 holders",
                "  batch/embed/worker",
                "3 1 of 2 instances held",
                "  3/7 batch/embed/worker",
            ],
        ),
        ("l4", ["2 -"]),
        ("holders", []),
        ("1g.10", ["3 1 of 2 instances held", "  3/7 batch/embed/worker", "  3/11 -"]),
    ],
)
def test_filters(wanted: str, left: list[str]) -> None:
    assert shape(arrange(ALL, "gpu", wanted)) == left


def test_nodes_and_broken_gpus_can_be_filtered() -> None:
    lines = make_lines(view(node(gpu(0)), node(gpu(1, conditions=[LOST]), name="node-b")), NOW)
    for wanted in ("node-b", "broken", "fallen off"):
        assert [line.number for line in arrange(lines, "gpu", wanted)] == ["1"]
