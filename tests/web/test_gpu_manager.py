"""Tests gpu-manager's metrics over real HTTP on both addresses. The kubelet lists vcuda ids over
real gRPC.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from podgpu.metrics.encode import CONTENT_TYPE
from podgpu.web.exporter_app import gpu_manager_application
from tests.nodes.node import Description, Node, node_of
from tests.web.server import Client, running
from tests.web.test_metrics import families

GIB = 1024**3
THEIRS = {
    "container_gpu_utilization",
    "container_gpu_memory_total",
    "container_request_gpu_utilization",
    "container_request_gpu_memory",
}
UIDS = {
    name: f"{n}f1f4ffc-0b8c-4d53-9b1e-6b2d0f9b8a1{n}"
    for n, name in enumerate(("train", "serve", "idle"))
}
IDS = {name: f"{n:x}" * 64 for n, name in enumerate(UIDS, 1)}


def vcuda(name: str, cores: range, blocks: range) -> dict[str, object]:
    ids = {
        "tencent.com/vcuda-core": [f"tencent.com/vcuda-core-{n}" for n in cores],
        "tencent.com/vcuda-memory": [f"tencent.com/vcuda-memory-268435456-{n}" for n in blocks],
    }
    return {"namespace": "ml", "name": name, "containers": {"main": ids}}


SHARED = Description(
    about=(
        "Two GPUs under gpu-manager: one pod uses both, another a part of the first, a third none."
    ),
    gpus="2xH100",
    pods=[
        vcuda("train", range(200), range(0)),
        vcuda("serve", range(200, 250), range(30)),
        vcuda("idle", range(250, 270), range(30, 34)),
    ],
    loads=[
        {"gpu": 0, "pid": 41, "duty": 0.25, "memory": 2 * GIB},
        {"gpu": 1, "pid": 42, "duty": 0.5, "memory": 4 * GIB},
        {"gpu": 0, "pid": 43, "duty": 0.12, "memory": GIB},
    ],
    processes={
        pid: {"uid": UIDS[name], "container_id": IDS[name]}
        for pid, name in (("41", "train"), ("42", "train"), ("43", "serve"))
    },
    logs=[
        name
        for pod in UIDS
        for name in (f"pods/ml_{pod}_{UIDS[pod]}", f"containers/{pod}_ml_main-{IDS[pod]}.log")
    ],
    usage_turns=2,
    arguments=["-k", "--gpu-manager-metrics"],
)


@pytest.fixture
def shared(folder: Path) -> Iterator[Node]:
    with node_of(SHARED, folder) as built:
        yield built


@pytest.fixture
def client(shared: Node) -> Iterator[Client]:
    with running(shared.agent) as found:
        yield found


@pytest.fixture
def second(shared: Node) -> Iterator[Client]:
    with running(shared.agent, app=gpu_manager_application) as found:
        yield found


def values(text: str) -> dict[tuple[str, str, str], float]:
    """Returns (family, pod, card) -> value."""
    found = re.findall(
        r'^(container_\w+)\{pod_name="(\w+)".*,\w+="(\w+)"\} (\S+)$', text, re.MULTILINE
    )
    return {(family, pod, card): float(value) for family, pod, card, value in found}


def test_figures(shared: Node, client: Client) -> None:
    """The card of the idle pod is unknown, so the pod has only request metrics."""
    shared.take_turns()
    assert values(client.ask("/metric").text) == {
        ("container_gpu_utilization", "train", "gpu0"): 25,
        ("container_gpu_utilization", "train", "gpu1"): 50,
        ("container_gpu_utilization", "train", "total"): 75,
        ("container_gpu_utilization", "serve", "gpu0"): 12,
        ("container_gpu_utilization", "serve", "total"): 12,
        ("container_gpu_memory_total", "train", "gpu0"): 2048,
        ("container_gpu_memory_total", "train", "gpu1"): 4096,
        ("container_gpu_memory_total", "train", "total"): 6144,
        ("container_gpu_memory_total", "serve", "gpu0"): 1024,
        ("container_gpu_memory_total", "serve", "total"): 1024,
        ("container_request_gpu_utilization", "train", "total"): 2,
        ("container_request_gpu_utilization", "serve", "total"): 0.5,
        ("container_request_gpu_utilization", "idle", "total"): 0.2,
        ("container_request_gpu_memory", "serve", "total"): 7680,
        ("container_request_gpu_memory", "idle", "total"): 1024,
    }


def test_paths_of_both_addresses(shared: Node, client: Client, second: Client) -> None:
    shared.take_turns()
    alone, exposition = client.ask("/metric"), client.ask("/metrics")
    assert families(alone) == THEIRS
    assert exposition.body.endswith(alone.body)
    assert "podgpu_exporter_build_info" in families(exposition)
    assert '<a href="metric">' in client.ask("/").text
    for path in ("/metric", "/metrics"):
        answer = second.ask(path)
        assert (answer.status, answer.body, answer.headers["Content-Type"]) == (
            200,
            alone.body,
            CONTENT_TYPE,
        )
        assert gzip.decompress(second.ask(path, Accept_Encoding="gzip").body) == alone.body
    assert [second.ask(path).status for path in ("/", "/health", "/metric/")] == [404, 404, 404]
    assert second.ask("/-/release", "POST").status == 404


def test_absent_by_default(node: Node) -> None:
    node.take_turns()
    with running(node.agent) as plain:
        assert plain.ask("/metric").status == 404
        assert not families(plain.ask("/metrics")) & THEIRS


def test_no_figures_before_the_first_reading_or_if_too_old(
    shared: Node, client: Client, second: Client
) -> None:
    def all_of_them() -> set[tuple[int, bytes]]:
        answers = [client.ask("/metric"), second.ask("/metric"), second.ask("/metrics")]
        assert (
            gzip.decompress(second.ask("/metric", Accept_Encoding="gzip").body) == answers[1].body
        )
        return {(answer.status, answer.body) for answer in answers}

    assert all_of_them() == {(200, b"")}
    shared.take_turns()
    shared.clock.advance(88.0)
    assert all_of_them() != {(200, b"")}
    shared.clock.advance(3.0)
    assert all_of_them() == {(200, b"")}
    assert not families(client.ask("/metrics")) & THEIRS
