"""Tests the table on terminals of any width, its texts, and the line of totals."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from rich.cells import cell_len

from podgpu.charge import Waste
from podgpu.fleet.parts import Totals, WasteRate
from podgpu.model import Workload
from podgpu.past.gpu_history import NO_DATA
from podgpu.top.feed import Sparklines
from podgpu.top.lines import make_lines
from podgpu.top.table import (
    Table,
    as_text,
    draw_sparkline,
    fit_holder,
    format_duration,
    format_gib,
    render_totals,
)
from tests.top.scene import GIB, LOST, NOW, busy_gpu, gpu, holder, lines_of, node, view
from tests.top.test_lines import ALL

PODS = (
    Workload("ml-serving", "vllm-llama-3-70b-6d4f9c7b5d-x2x9z", "inference-server"),
    Workload("kubeflow-user-example-com", "train-bert-large-worker-11-kq8vl", "pytorch"),
    Workload("notebooks", "jupyter-ada-0", "notebook"),
)


def table(width: int | None, nodes: int = 1, live: bool = True) -> Table:
    gpus = [busy_gpu(number, who) for number, who in enumerate(PODS)]
    lines = make_lines(
        view(*(node(*gpus, name=f"gpu-node-{number}") for number in range(nodes))), NOW
    )
    points = {line.device: bytes([200, 100, 0] * 20) for line in lines}
    return Table(lines, "gpu", width, Sparklines(points, 3600.0) if live else None)


def texts(of: Table) -> list[str]:
    return [as_text(row) for row in (of.header(), *of.render())]


def test_without_a_width_nothing_is_cut() -> None:
    assert texts(Table(ALL, "gpu")) == [
        "GPU  MODEL          HOLDER                UTIL   MEM GiB POWER TEMP PROC   IDLE",
        "0    H100 80GB HBM3 research/train/main    93% 61.0/80.0  600W  67C    1     0s",
        "1    H100 80GB HBM3 2 holders              50% 14.0/80.0  300W    –    3",
        "                      batch/embed/worker   50%  9.0          –         2     0s",
        "                      serving/chat/engine   0%  5.0       100W         1  1m30s",
        "2    L4             -                       0%    –/–        –    –    –",
        "3    H100 80GB HBM3 1 of 2 instances held  30%    –/–     200W  40C    –",
        "3/7  1g.10gb          batch/embed/worker   60%  2.0/10.0     –         –      –",
        "3/11 1g.10gb          -                     0%  2.0/10.0     –         –",
    ]


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("live", [True, False], ids=["live", "once"])
@pytest.mark.parametrize("width", [60, 80, 100, 132, 200])
def test_pod_names_are_complete(width: int, live: bool, nodes: int) -> None:
    for line, who in zip(texts(table(width, nodes, live))[1:], PODS * nodes, strict=True):
        assert who.pod in line
        assert "93%" in line
        assert cell_len(line) <= width


@pytest.mark.parametrize(
    ("width", "shown", "left_out"),
    [
        (60, ["GPU", "HOLDER", "LAST 1h", "UTIL"], ["MODEL", "TEMP", "PROC"]),
        (80, ["GPU", "HOLDER", "LAST 1h", "UTIL", "MEM GiB", "POWER", "IDLE"], ["MODEL"]),
        (100, ["GPU", "HOLDER", "LAST 1h", "UTIL", "MEM GiB", "POWER", "TEMP", "PROC", "IDLE"], []),
        (
            132,
            ["MODEL", "HOLDER", "LAST 1h", "UTIL", "MEM GiB", "POWER", "TEMP", "PROC", "IDLE"],
            [],
        ),
    ],
)
def test_columns_by_width(width: int, shown: list[str], left_out: list[str]) -> None:
    header = texts(table(width))[0]
    assert [title for title in shown if title not in header] == []
    assert [title for title in left_out if title in header] == []


@pytest.mark.parametrize("nodes", [1, 2])
def test_never_wider_than_the_terminal(nodes: int) -> None:
    for width in range(10, 220):
        assert all(cell_len(line) <= max(width, 20) for line in texts(table(width, nodes))), width


def test_names_cannot_contain_control_sequences() -> None:
    bad = holder(Workload("ns", "p\x1b[2J\n\u202e", "c"))
    rows = texts(Table(lines_of(gpu(0, bad, model="M\x07")), "gpu"))
    assert len(rows) == 2
    assert "ns/p?[2J??/c" in rows[1]
    assert all(row.isprintable() for row in rows)


def test_a_holder_loses_container_then_namespace_then_the_middle_of_the_pod() -> None:
    assert [fit_holder(PODS[1], width).rstrip() for width in (80, 57, 40, 36, 20)] == [
        "kubeflow-user-example-com/train-bert-large-worker-11-kq8vl/pytorch",
        "kubeflow-user-example-c…/train-bert-large-worker-11-kq8vl",
        "kubefl…/train-bert-large-worker-11-kq8vl",
        "train-bert-large-worker-11-kq8vl",
        "train-bert…-11-kq8vl",
    ]


@pytest.mark.parametrize(
    ("points", "width", "text"),
    [
        (bytes([0, 100, 200]), 3, "▁▅█"),
        (bytes([0, 100, 200]), 6, "   ▁▅█"),
        (bytes([NO_DATA, 0, 1]), 3, " ▁▂"),
        (bytes([0, 0, 200, 200]), 2, "▁█"),
        (bytes([200, NO_DATA]), 1, "█"),
        (bytes([0, 200]), 1, "▅"),
        (b"", 4, "    "),
        (bytes([0, 100]), 0, ""),
    ],
)
def test_sparklines(points: bytes, width: int, text: str) -> None:
    assert draw_sparkline(points, width) == text


def test_times() -> None:
    durations = (0, 59.9, 60, 3599, 3600, 86399, 90000)
    assert [format_duration(s) for s in durations] == [
        "0s",
        "59s",
        "1m00s",
        "59m59s",
        "1h00m",
        "23h59m",
        "1d01h",
    ]


TOTALS = Totals(
    gpus=4,
    allocated=3.0,
    used=1.5,
    idle=1.0,
    unknown=0.5,
    unheld_unknown=0.5,
    free=0.5,
    broken=1,
    power_watts=110.0,
    cost_per_hour=1.6,
    wasted_per_hour=0.8,
)


def test_totals() -> None:
    line = as_text(render_totals(TOTALS, "EUR", 200))
    assert line.startswith(
        "3/4 allocated  1.5 used  1 idle  0.5 use unknown  0.5 free  0.5 holder unknown  1 broken"
    )
    assert line.endswith("1 broken  110 W  1.60 EUR/h")
    waste = WasteRate(Waste(1.0, 0.5, 0.5), Waste(0.8, 0.2, 0.4))
    line = as_text(render_totals(replace(TOTALS, waste=waste), "EUR", 200))
    assert line.endswith("110 W  2.00 EUR/h, 1.40 wasted"), "all parts, and the cost of free GPUs"
    refused = as_text(render_totals(replace(TOTALS, kubernetes_unhealthy=1), "EUR", 200))
    assert "1 broken  1 unhealthy in Kubernetes" in refused
    free = Totals(gpus=1, allocated=0.0, used=0.0, idle=0.0, unknown=0.0, free=1.0, broken=0)
    line = as_text(render_totals(free, "", 200))
    assert line == "0/1 allocated  0 used  0 idle  1 free  0 broken  – W"


def test_totals_stand_out_if_something_is_wrong() -> None:
    waste = WasteRate(Waste(1.0), Waste(0.8))
    wrong = replace(TOTALS, waste=waste, kubernetes_unhealthy=1)
    styles = {text.strip(): style for text, style in render_totals(wrong, "EUR", 200) if style}
    assert styles == {
        "1 idle": "warn",
        "1 broken": "bad",
        "1 unhealthy in Kubernetes": "warn",
        "1.60 EUR/h, 0.80 wasted": "warn",
    }
    healthy = replace(TOTALS, idle=0.0, broken=0)
    assert not any(style for _, style in render_totals(healthy, "EUR", 200))


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "–"),
        (0, "0.0"),
        (0.04 * GIB, "<0.1"),
        (0.05 * GIB, "0.1"),
        (998.5 * GIB, "998.5"),
        (999 * GIB, "999"),
    ],
)
def test_memory(size: float | None, text: str) -> None:
    assert format_gib(size) == text


def test_a_hot_device_stands_out() -> None:
    for celsius, expected in ((79.0, ""), (80.0, "warn"), (89.0, "warn"), (90.0, "bad")):
        row = Table(lines_of(gpu(0, temperature_celsius=celsius)), "gpu").render()[0]
        styles = {text.strip(): style for text, style in row}
        assert styles[f"{celsius:.0f}C"] == expected


def test_a_long_name_of_a_node_makes_room_for_the_holder() -> None:
    nodes = [node(busy_gpu(0, PODS[0]), name=f"{number}-{'n' * 30}") for number in range(2)]
    lines = make_lines(view(*nodes), NOW)
    row = texts(Table(lines, "gpu", 130))[1]
    assert row.split()[0] == "0-nnnnnn…nnnnnnn"
    assert PODS[0].pod in row


def test_several_nodes_have_a_column() -> None:
    assert "NODE" not in texts(table(None))[0]
    header, *rows = texts(table(None, nodes=2))
    assert header.startswith("NODE")
    assert [row.split()[0] for row in rows] == ["gpu-node-0"] * 3 + ["gpu-node-1"] * 3


def test_only_devices_have_a_sparkline() -> None:
    first, second = (holder(who) for who in PODS[:2])
    lines = make_lines(view(node(gpu(0, first, second))), NOW)
    points = {line.device: bytes([200, 100, 0]) for line in lines}
    rows = texts(Table(lines, "gpu", 200, Sparklines(points, 3600.0)))[1:]
    assert ["█" in row for row in rows] == [True, False, False]


def test_a_broken_device_stands_out_but_not_its_holders() -> None:
    lost = replace(LOST, since=None)
    first, second = (holder(who) for who in PODS[:2])
    broken = gpu(0, first, second, conditions=[lost])
    rows = Table(make_lines(view(node(broken)), NOW), "gpu").render()
    styles = [{style for _, style in row} for row in rows]
    assert [as_text(row).strip() for row in rows][1] == "! lost: GPU 1 has fallen off the bus"
    assert ["bad" in own for own in styles] == [True, True, False, False]
