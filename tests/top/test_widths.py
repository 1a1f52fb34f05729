"""What a terminal of a given width shows: the pod's name is readable, model and container give way first."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.model import Workload
from podgpu.top.cells import ASCII, PLAIN, RICH, fit_holder, width_of
from podgpu.top.figures import Condition, DeviceFigures, FlatView
from podgpu.top.history import History
from podgpu.top.lines import Line, lines_of
from podgpu.top.table import Table, Watched, as_text, table_of
from tests.top.scene import GIB, holder

WIDTHS = (60, 80, 100, 132, 200)
PODS = (
    Workload("ml-serving", "vllm-llama-3-70b-6d4f9c7b5d-x2x9z", "inference-server"),
    Workload("kubeflow-user-example-com", "train-bert-large-worker-11-kq8vl", "pytorch"),
    Workload("notebooks", "jupyter-ada-0", "notebook"),
)


def device(number: int, who: Workload, node: str = "gpu-node-1") -> DeviceFigures:
    return DeviceFigures(
        f"GPU-{node}-{number}",
        number,
        "NVIDIA H100 80GB HBM3",
        node,
        utilization=0.93,
        memory_used=61 * GIB,
        memory_total=80 * GIB,
        power_watts=600.0,
        temperature=67.0,
        holders=(holder(who, processes=1, busy_seconds=0.0, idle_seconds=90.0, utilization=0.0),),
    )


ONE_NODE = [device(number, who) for number, who in enumerate(PODS)]
TWO_NODES = [*ONE_NODE, *(device(number, who, "gpu-node-2") for number, who in enumerate(PODS))]


def table(devices: list[DeviceFigures], width: int | None, live: bool = True) -> Table:
    view, history = FlatView(tuple(devices)), History()
    history.note(view, 1000.0)
    lines = lines_of(view, history)
    points = {line.row: bytes([200, 100, 0] * 20) for line in lines}
    return table_of(lines, "gpu", RICH, width, Watched(points, 3600.0) if live else None)


def texts(of: Table) -> list[str]:
    return [as_text(row) for row in (of.header, *of.body)]


@pytest.mark.parametrize("devices", [ONE_NODE, TWO_NODES], ids=["one node", "two nodes"])
@pytest.mark.parametrize("live", [True, False], ids=["live", "once"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_pods_name_is_whole(width: int, live: bool, devices: list[DeviceFigures]) -> None:
    shown = texts(table(devices, width, live))
    for at, of in enumerate(devices, start=1):
        pod = of.holders[0].holder.pod
        assert pod in shown[at], shown[at]
        assert "93%" in shown[at]
        assert width_of(shown[at]) <= width


@pytest.mark.parametrize(
    ("width", "there", "away"),
    [
        (60, ["GPU", "HOLDER", "LAST 1h", "UTIL"], ["MODEL", "TEMP", "PROC"]),
        (80, ["GPU", "HOLDER", "LAST 1h", "UTIL", "MEM GiB", "POWER", "IDLE"], ["MODEL"]),
        (100, ["GPU", "HOLDER", "LAST 1h", "UTIL", "MEM GiB", "POWER", "TEMP", "PROC", "IDLE"], []),
        (132, ["MODEL", "HOLDER", "LAST 1h", "UTIL", "MEM GiB", "POWER", "TEMP", "PROC", "IDLE"], []),
        (200, ["MODEL", "HOLDER", "LAST 1h", "UTIL", "MEM GiB", "POWER", "TEMP", "PROC", "IDLE"], []),
    ],
)
def test_columns_by_width(width: int, there: list[str], away: list[str]) -> None:
    header = texts(table(ONE_NODE, width))[0]
    assert [title for title in there if title not in header] == []
    assert [title for title in away if title in header] == []


def test_containers_are_there_where_there_is_room() -> None:
    for of, line in zip(ONE_NODE, texts(table(ONE_NODE, 150))[1:], strict=True):
        assert of.holders[0].holder.container in line
    at_80 = texts(table(ONE_NODE, 80))
    assert "inference-server" not in at_80[1]
    assert "notebooks/jupyter-ada-0/notebook" in at_80[3]  # it is short


def test_model_and_container_go_before_any_figure() -> None:
    """From wide to narrow: as long as one of them is there, no other column is away."""
    figures = ("UTIL", "MEM GiB", "POWER", "TEMP", "PROC", "IDLE")
    for width in range(200, 40, -1):
        header, _, longest, _ = texts(table(ONE_NODE, width))
        if "MODEL" in header or "pytorch" in longest:
            assert all(title in header for title in figures), width


@pytest.mark.parametrize("devices", [ONE_NODE, TWO_NODES], ids=["one node", "two nodes"])
def test_never_wider_than_the_terminal(devices: list[DeviceFigures]) -> None:
    for width in range(10, 220):
        assert all(width_of(line) <= max(width, 20) for line in texts(table(devices, width))), width


def test_the_namespace_gives_way_before_the_pod() -> None:
    who = PODS[1]
    widths = (80, 57, 40, 36, 32, 20)
    assert [fit_holder(who, width, PLAIN).rstrip() for width in widths] == [
        "kubeflow-user-example-com/train-bert-large-worker-11-kq8vl/pytorch",
        "kubeflow-user-example-c…/train-bert-large-worker-11-kq8vl",
        "kubefl…/train-bert-large-worker-11-kq8vl",
        "train-bert-large-worker-11-kq8vl",
        "train-bert-large-worker-11-kq8vl",
        "train-bert…-11-kq8vl",
    ]
    assert fit_holder(who, 40, ASCII).isascii()


@given(
    st.text(max_size=20),
    st.text(min_size=1, max_size=20),
    st.text(max_size=20),
    st.integers(1, 60),
)
def test_a_fitted_holder_has_the_width_asked_for(namespace: str, pod: str, container: str, width: int) -> None:
    assert width_of(fit_holder(Workload(namespace, pod, container), width, PLAIN)) == width


def test_a_condition_stands_across_the_columns() -> None:

    broken = replace(
        ONE_NODE[0], conditions=(Condition("xid", 940.0, "XID 79: it has fallen off the bus", "Reset it."),)
    )
    lines: list[Line] = lines_of(FlatView((broken,)), History(), 1000.0)
    shown = [as_text(row) for row in table_of(lines, "gpu", PLAIN, 60).body]
    assert shown[1] == "  ! xid for 1m00s: XID 79: it has fallen off the bus"
