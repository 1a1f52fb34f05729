"""Lines, their order and what a filter leaves of them, and how they are printed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.model import Workload
from podgpu.top.arrange import Order, arrange
from podgpu.top.cells import ASCII, PLAIN, RICH, bar, duration, fit, fit_start, idle, printable, width_of
from podgpu.top.figures import DeviceFigures, ProcessFigures
from podgpu.top.history import History, Idle
from podgpu.top.lines import Line, flatten, lines_of
from podgpu.top.table import as_text, table_of
from tests.top.scene import BATCH, GIB, SERVER, TRAINER, holder, view

H100 = "NVIDIA H100 80GB HBM3"
EXCLUSIVE = DeviceFigures(
    "GPU-0", 0, H100, "n", "", "", 0.93, 61 * GIB, 80 * GIB, 600.0, 67.0, holders=(holder(TRAINER, processes=1),)
)
SHARED = DeviceFigures(
    "GPU-1",
    1,
    H100,
    "n",
    utilization=0.5,
    memory_used=14 * GIB,
    memory_total=80 * GIB,
    power_watts=300.0,
    holders=(
        holder(SERVER, utilization=0.15, memory=5 * GIB, processes=1, busy_seconds=0.0, idle_seconds=90.0),
        holder(BATCH, utilization=0.35, memory=9 * GIB, processes=2),
    ),
)
FREE = DeviceFigures("GPU-2", 2, "NVIDIA L4", "n", utilization=0.0)
PARENT = DeviceFigures("GPU-3", 3, H100, "n", utilization=0.3, power_watts=200.0, temperature=40.0)
PART = DeviceFigures("GPU-3", 3, H100, "n", "7", "1g.10gb", 0.6, 2 * GIB, 10 * GIB, holders=(holder(BATCH),))
EMPTY_PART = replace(PART, instance="11", utilization=0.0, holders=())


def lines(*devices: DeviceFigures) -> list[Line]:
    history = History()
    history.note(view(*devices), 1000.0)
    return lines_of(view(*devices), history)


def shape(of: list[Line]) -> list[str]:
    return ["  " * depth + f"{line.gpu} {line.holder or line.remark}".strip() for depth, line in flatten(of)]


ALL = lines(FREE, EMPTY_PART, PART, PARENT, SHARED, EXCLUSIVE)


def test_the_tree() -> None:
    assert shape(ALL) == [
        "0 research/train/main",
        "1 2 holders",
        "  batch/embed/worker",
        "  serving/chat/engine",
        "2 -",
        "3 1 of 2 instances held",
        "  3/7 batch/embed/worker",
        "  3/11 -",
    ]


def test_one_holder_is_one_line_with_the_devices_figures() -> None:
    (line,) = lines(EXCLUSIVE)
    assert (line.utilization, line.memory, line.power, line.processes) == (0.93, 61 * GIB, 600.0, 1)


def test_what_the_device_does_not_tell_its_one_holder_may() -> None:
    silent = replace(EXCLUSIVE, utilization=None, memory_used=None)
    (line,) = lines(replace(silent, holders=(holder(TRAINER, utilization=0.4, memory=GIB),)))
    assert (line.utilization, line.memory) == (0.4, GIB)


def test_a_page_of_instances_only_still_has_a_gpu_above_them() -> None:
    assert shape(lines(PART)) == ["3 1 of 1 instance held", "  3/7 batch/embed/worker"]


def test_processes_stand_beneath_their_holder_and_strangers_beneath_the_device() -> None:
    running = (
        ProcessFigures(30, GIB, 0.2, BATCH),
        ProcessFigures(20, GIB, None, SERVER),
        ProcessFigures(10, GIB),
        ProcessFigures(5, GIB, 0.1, Workload("other", "pod", "c")),
    )
    found = lines(replace(SHARED, processes=running))
    assert shape(found) == [
        "1 2 holders",
        "  batch/embed/worker",
        "    batch/embed/worker",
        "  serving/chat/engine",
        "    serving/chat/engine",
        "  other/pod/c",
        "  pid 10, in no known container",
    ]
    assert [line.remark for _, line in flatten(found) if line.kind == "process"][:2] == ["pid 30", "pid 20"]


@pytest.mark.parametrize(
    ("order", "first"),
    [
        ("gpu", "0 research/train/main"),
        ("utilisation", "0 research/train/main"),
        ("memory", "0 research/train/main"),
        ("power", "0 research/train/main"),
        ("idle", "1 2 holders"),
    ],
)
def test_orders(order: Order, first: str) -> None:
    assert shape(arrange(ALL, order))[0] == first


def test_sorting_goes_by_the_largest_beneath_and_keeps_what_belongs_together() -> None:
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
    assert shape(arrange(ALL, "idle"))[:3] == ["1 2 holders", "  serving/chat/engine", "  batch/embed/worker"]


@pytest.mark.parametrize(
    ("wanted", "left"),
    [
        ("EMBED", ["1 2 holders", "  batch/embed/worker", "3 1 of 2 instances held", "  3/7 batch/embed/worker"]),
        ("l4", ["2 -"]),
        ("holders", []),
        ("research", ["0 research/train/main"]),
        ("1g.10", ["3 1 of 2 instances held", "  3/7 batch/embed/worker", "  3/11 -"]),
    ],
)
def test_filters(wanted: str, left: list[str]) -> None:
    assert shape(arrange(ALL, "gpu", wanted)) == left


def test_a_node_may_be_filtered_for() -> None:
    other = replace(EXCLUSIVE, uuid="GPU-9", index=0, node="node-b")
    assert len(arrange(lines(EXCLUSIVE, other), "gpu", "node-b")) == 1


@given(st.sampled_from(["utilisation", "memory", "power", "idle", "gpu"]), st.text(max_size=3))
def test_sorting_and_filtering_invent_nothing(order: Order, wanted: str) -> None:
    everything = [(line.kind, line.gpu, line.holder) for _, line in flatten(ALL)]
    left = [(line.kind, line.gpu, line.holder) for _, line in flatten(arrange(ALL, order, wanted))]
    assert all(left.count(one) <= everything.count(one) for one in left)
    if not wanted:
        assert sorted(left) == sorted(everything)


# Printing


def printed(of: list[Line], width: int | None = None) -> list[str]:
    table = table_of(of, "gpu", PLAIN, width)
    return [as_text(row) for row in (table.header, *table.body)]


def test_as_wide_as_it_takes() -> None:
    assert printed(ALL) == [
        "GPU  MODEL          HOLDER                UTIL              MEM GiB POWER TEMP PROC   IDLE",
        "0    H100 80GB HBM3 research/train/main   #########.  93% 61.0/80.0  600W  67C    1      –",
        "1    H100 80GB HBM3 2 holders             #####.....  50% 14.0/80.0  300W    –    3",
        "                      batch/embed/worker  ####......  35%  9.0          –         2      –",
        "                      serving/chat/engine ##........  15%  5.0          –         1   busy",
        "2    L4             -                     ..........   0%    –/–        –    –    –",
        "3    H100 80GB HBM3 1 of 2 instances held ###.......  30%    –/–     200W  40C    –",
        "3/7  1g.10gb          batch/embed/worker  ######....  60%  2.0/10.0     –         –      –",
        "3/11 1g.10gb          -                   ..........   0%  2.0/10.0     –         –",
    ]


def test_never_wider_than_the_terminal() -> None:
    for width in range(10, 200):
        table = table_of(ALL, "gpu", RICH, width)
        (drawn,) = {sum(width_of(text) for text, _ in row) for row in (table.header, *table.body)}
        assert drawn <= max(width, 15), width


def test_narrow_terminals_lose_columns_and_not_the_holder() -> None:
    header = printed(ALL, 40)[0]
    assert "HOLDER" in header
    assert "UTIL" in header
    assert "MODEL" not in header


def test_a_hostile_name_moves_no_cursor() -> None:
    bad = holder(Workload("ns", "p\x1b[2J\n\u202e", "c"))
    text = "\n".join(printed(lines(replace(EXCLUSIVE, holders=(bad,), model="M\x07"))))
    assert "\x1b" not in text
    assert text.count("\n") == 1
    assert "ns/p?[2J??/c" in text


def test_bars() -> None:
    assert [bar(r, 4, PLAIN) for r in (None, 0.0, 0.5, 1.0, 7.0, -1.0)] == [
        "    ",
        "....",
        "##..",
        "####",
        "####",
        "....",
    ]
    assert [bar(r, 4, RICH) for r in (0.0, 0.5, 0.53, 1.0)] == ["    ", "██  ", "██▏ ", "████"]


@given(st.floats(0, 1), st.integers(0, 30))
def test_bars_have_their_width(ratio: float, width: int) -> None:
    assert len(bar(ratio, width, RICH)) == len(bar(ratio, width, PLAIN)) == width


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.9, "59s"), (60, "1m00s"), (3599, "59m59s"), (3600, "1h00m"), (86399, "23h59m"), (90000, "1d01h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_idle_times() -> None:
    texts = [idle(value, PLAIN) for value in (None, Idle(0), Idle(0, True), Idle(61), Idle(61, True))]
    assert texts == ["–", "busy", ">0s", "1m01s", ">1m01s"]
    assert idle(None, ASCII) == "-"


def test_little_memory_is_not_none() -> None:
    small = printed(lines(replace(EXCLUSIVE, memory_used=1)))[1]
    assert "<0.1/80.0" in small


@given(st.text(), st.integers(1, 40))
def test_fitted_text_has_the_width_asked_for(text: str, width: int) -> None:
    clean = printable(text)
    assert clean.isprintable()
    for fitted in (fit(clean, width, PLAIN), fit_start(clean, width, PLAIN), fit(clean, width, PLAIN, right=True)):
        assert width_of(fitted) == width


def test_what_is_too_long_keeps_both_ends_or_the_beginning() -> None:
    assert fit("namespace/pod-abcdef", 11, PLAIN) == "names…bcdef"
    assert fit_start("H100 80GB", 6, PLAIN) == "H100… "
