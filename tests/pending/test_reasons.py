"""The texts of reasons: the only words about them, on the page, in the terminal and in JSON."""

from __future__ import annotations

import pytest

from podgpu.pending.reasons import Reason, amount, describe
from tests.pending.situations import GPU, node, pod
from tests.pending.test_explain import explain_one

GIB = 1024**3


@pytest.mark.parametrize(
    ("value", "resource", "text"),
    [
        (1, GPU, "1 nvidia.com/gpu"),
        (1, "cpu", "1 CPU"),
        (1.5, "cpu", "1.5 CPUs"),
        (0.01, "cpu", "0.01 CPUs"),
        (0.001, "cpu", "less than 0.01 CPUs"),
        (16 * GIB, "memory", "16 GiB of memory"),
        (GIB / 2, "ephemeral-storage", "0.5 GiB of ephemeral-storage"),
        (None, "memory", "an unknown amount of memory"),
        (1, "pods", "1 pod slot"),
        (0, "pods", "0 pod slots"),
        (8 * GIB, "gpu-memory", "8 GiB of GPU memory"),
        (1536 * 1024**2, "hugepages-2Mi", "1.5 GiB of hugepages-2Mi"),
        (0, "memory", "0 GiB of memory"),
        (GIB / 100, "memory", "0.01 GiB of memory"),
        (4 * 1024**2, "memory", "4 MiB of memory"),
        (512, "memory", "512 bytes of memory"),
        (1, "memory", "1 byte of memory"),
        (None, GPU, "an unknown number of nvidia.com/gpu"),
        (1234.5, GPU, "1,234.5 nvidia.com/gpu"),
    ],
)
def test_amounts(value: float | None, resource: str, text: str) -> None:
    assert amount(value, resource) == text


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (
            Reason(key="in_use", resource=GPU, needed=2, free=1, total=8, nodes=1),
            "It needs 2 nvidia.com/gpu; 1 of 8 is free on the node that it may use.",
        ),
        (
            Reason(key="in_use", resource=GPU, needed=2, free=0, total=16, nodes=2),
            "It needs 2 nvidia.com/gpu; 0 of 16 are free on the 2 nodes that it may use.",
        ),
        (
            Reason(key="too_large", resource=GPU, needed=16, largest=8, nodes=1),
            "It needs 16 nvidia.com/gpu on one node; the node has 8.",
        ),
        (
            Reason(key="too_large", resource=GPU, needed=16, largest=8, nodes=3),
            "It needs 16 nvidia.com/gpu on one node; the largest of 3 nodes has 8.",
        ),
        (
            Reason(key="other_in_use", resource="cpu", needed=4, largest=1, nodes=2),
            "It needs 4 CPUs; 2 nodes with enough free GPUs have at most 1 CPU left.",
        ),
        (
            Reason(key="cordoned", resource=GPU, free=0, nodes=2),
            "Cordoned nodes: 2 nodes without a free nvidia.com/gpu.",
        ),
        (
            Reason(key="not_offered", resource=GPU),
            "No node offers nvidia.com/gpu.",
        ),
        (
            Reason(key="not_offered", resource=GPU, names=("amd.com/gpu",)),
            "No node offers nvidia.com/gpu. Nodes offer amd.com/gpu.",
        ),
        (
            Reason(key="starting", names=("a",)),
            "It has its place on a and is starting.",
        ),
        (
            Reason(key="starting", names=("a", "ErrImagePull")),
            "It has its place on a and is starting: ErrImagePull.",
        ),
    ],
)
def test_texts(reason: Reason, text: str) -> None:
    assert describe(reason) == text


def test_numbers_of_other_resources() -> None:
    found = explain_one(
        node("a", cpu="16"), pod("old", gpus=1, cpu="14500m", on="a"), pod(cpu="4", memory="2Gi")
    )
    (reason,) = found.reasons
    assert (reason.needed, reason.free, reason.largest, reason.total) == (4.0, 1.5, 1.5, 16.0)
    assert [(need.resource, need.amount) for need in found.needs] == [
        (GPU, 1.0),
        ("cpu", 4.0),
        ("memory", 2.0 * GIB),
    ]
