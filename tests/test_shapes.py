"""Beside real dcgm-exporter output of an H200: the same families, texts, labels and number formats, byte for byte.

Only figures may differ, and the few things listed in DIFFERENCES.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.nodes.node import FIXTURES, Description, node_of
from tests.web.server import running

UUID = "GPU-11111111-2222-3333-4444-555555555555"
POD = {"namespace": "research", "name": "train-a", "containers": {"main": {"nvidia.com/gpu": [UUID]}}}
SLICES = [
    {"namespace": "serving", "name": name, "containers": {"main": {"nvidia.com/gpu.shared": [f"{UUID}::{replica}"]}}}
    for replica, name in enumerate(["infer-a", "infer-b", "idle-c"])
]

DIFFERENCES = {
    "DCGM_FI_DEV_XID_ERRORS": "dcgm-exporter has no series before the first XID; ours is there from the start, with 0",
    "dcgm_xid_errors": "the same, by its 1.x name",
}
"""Families that only podgpu has. NVLink bandwidth is none of them: a single H200 has it in neither."""
REPEATED = {"dcgm_fi_prof_pcie_tx_bytes", "dcgm_fi_prof_pcie_rx_bytes"}
"""dcgm-exporter prints these series twice over with its 1.x counters; podgpu once."""


@dataclass(frozen=True)
class Shape:
    """All of a family but its figures."""

    help: str
    type: str
    series: tuple[tuple[str, str], ...]
    """Label text, and the number with every digit before the point taken for any number of digits."""


def shapes(text: str) -> dict[str, Shape]:
    """By name, in the order of the text; podgpu's own families are not compared."""
    found: dict[str, Shape] = {}
    for block in re.split(r"^(?=# HELP )", text, flags=re.MULTILINE)[1:]:
        if block.startswith("# HELP podgpu_"):
            continue
        head, kind, *samples = block.splitlines()
        _, _, name, help_text = head.split(" ", 3)
        assert kind.startswith(f"# TYPE {name} ")
        assert name not in found
        found[name] = Shape(help_text, kind.split(" ")[3], tuple(_series(name, s) for s in samples))
    return found


def _series(name: str, line: str) -> tuple[str, str]:
    labels, number = re.fullmatch(rf"{name}(\{{.*\}}) (\S+)", line).groups()  # type: ignore[union-attr]
    labels = re.sub(r'pci_bus_id="[^"]*"', 'pci_bus_id=""', labels)
    return labels, re.sub(r"\d+", lambda digits: "N" if digits.start() == 0 else "d" * len(digits[0]), number)


def podgpu_text(folder: Path, arguments: Sequence[str], pods: Sequence[dict[str, object]] = (POD,)) -> str:
    described = Description(
        about="the machine the fixtures were recorded on",
        gpus="1xH200",
        uuids=[UUID],
        hostname="vm",
        loads=[{"gpu": 0, "pid": 100, "duty": 0.46, "memory": 15_714 << 20}],
        pods=pods,
        arguments=arguments,
    )
    with node_of(described, folder) as node, running(node.agent) as client:
        node.take_turns()
        return client.ask("/metrics").text


@pytest.mark.parametrize(
    ("recorded", "arguments"),
    [
        ("default", ["-f", "default"]),
        ("dcp_pod", ["-k", "-f", "dcp"]),
        ("old", ["-k", "-o", "-f", "1.x"]),
    ],
)
def test_same_as_dcgm_exporter(folder: Path, recorded: str, arguments: list[str]) -> None:
    theirs = shapes((FIXTURES / "h200" / f"{recorded}.prom").read_text(encoding="utf-8"))
    theirs |= {name: replace(theirs[name], series=theirs[name].series[:1]) for name in REPEATED & theirs.keys()}
    ours = shapes(podgpu_text(folder, arguments))
    assert {name for name in ours if name not in theirs} <= DIFFERENCES.keys()
    shared = {name: shape for name, shape in ours.items() if name not in DIFFERENCES}
    assert shared == theirs
    assert list(shared) == list(theirs)


def test_a_shared_gpu_is_given_to_nobody(folder: Path) -> None:
    """dcgm-exporter hands a time-sliced GPU's figures to one of its pods; to us they are none of theirs."""
    theirs = (FIXTURES / "h200" / "shared_noflag.prom").read_text(encoding="utf-8")
    without_pod = re.sub(r',container="main",namespace="serving",pod="[a-z-]+"', "", theirs)
    assert without_pod != theirs
    ours = shapes(podgpu_text(folder, ["-k", "-f", "dcp"], SLICES))
    assert {name: shape for name, shape in ours.items() if name not in DIFFERENCES} == shapes(without_pod)
