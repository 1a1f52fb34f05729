"""Compares the metrics with recorded output of dcgm-exporter on an H200.

Families, help texts, labels and numbers must be the same.
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
POD: dict[str, object] = {
    "namespace": "research",
    "name": "train-a",
    "containers": {"main": {"nvidia.com/gpu": [UUID]}},
}
SLICES: list[dict[str, object]] = [
    {
        "namespace": "serving",
        "name": name,
        "containers": {"main": {"nvidia.com/gpu.shared": [f"{UUID}::{replica}"]}},
    }
    for replica, name in enumerate(["infer-a", "infer-b", "idle-c"])
]

DIFFERENCES = {
    "DCGM_FI_DEV_XID_ERRORS": (
        "dcgm-exporter has no series before the first XID; podgpu starts with 0"
    ),
    "dcgm_xid_errors": "the same with its 1.x name",
    "dcgm_low_util_violation": "in seed 000, but commented out in dcgm-exporter's 1.x counters",
}
"""Families that only podgpu has."""
REPEATED = {"dcgm_fi_prof_pcie_tx_bytes", "dcgm_fi_prof_pcie_rx_bytes"}
"""With its 1.x counters, dcgm-exporter prints these series twice; podgpu prints them once."""


@dataclass(frozen=True)
class Shape:
    """A family without its values."""

    help: str
    type: str
    series: tuple[tuple[str, str], ...]
    """Text of the labels, and format of the value: `N` for the digits before the point, `d` for
    each digit after it.
    """


def shapes(text: str) -> dict[str, Shape]:
    """Returns the shapes by name, in the order of the text, without podgpu's own families."""
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
    return labels, re.sub(
        r"\d+", lambda digits: "N" if digits.start() == 0 else "d" * len(digits[0]), number
    )


def podgpu_text(
    folder: Path, arguments: Sequence[str], pods: Sequence[dict[str, object]] = (POD,)
) -> str:
    described = Description(
        about="the machine on which the fixtures were recorded",
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
    theirs |= {
        name: replace(theirs[name], series=theirs[name].series[:1])
        for name in REPEATED & theirs.keys()
    }
    ours = shapes(podgpu_text(folder, arguments))
    assert {name for name in ours if name not in theirs} <= DIFFERENCES.keys()
    shared = {name: shape for name, shape in ours.items() if name not in DIFFERENCES}
    assert shared == theirs
    assert list(shared) == list(theirs)


def test_values_of_a_shared_gpu_have_no_pod(folder: Path) -> None:
    """For a time-sliced GPU, dcgm-exporter adds the labels of one of its pods; podgpu adds none."""
    theirs = (FIXTURES / "h200" / "shared_noflag.prom").read_text(encoding="utf-8")
    without_pod = re.sub(r',container="main",namespace="serving",pod="[a-z-]+"', "", theirs)
    assert without_pod != theirs
    ours = shapes(podgpu_text(folder, ["-k", "-f", "dcp"], SLICES))
    assert {name: shape for name, shape in ours.items() if name not in DIFFERENCES} == shapes(
        without_pod
    )
