"""The rows of /api/v1/pods: sums over the holders of a view."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from podgpu.fleet.pod_list import make_pods
from podgpu.fleet.prices import Price, Prices
from podgpu.fleet.view import make_view
from podgpu.model import Holder, HolderUsage, WorkloadOwner
from podgpu.web.redaction import hide_in_view
from tests.fleet.states import H100, WALL, World, gpu, holder, mig, node, state_of

PRICES = Prices("EUR", {H100: Price(8.0)})


def rows_of(state: Any) -> dict[str, dict[str, Any]]:
    answer = make_pods(make_view(state))
    documents = json.loads(msgspec.json.encode(answer))["pods"]
    return {row.name: document for row, document in zip(answer.pods, documents, strict=True)}


def test_a_pod_is_the_sum_of_its_containers_and_gpus() -> None:
    owners = {("ml", "train"): WorkloadOwner("Job", "train")}
    first = gpu(0, holder(utilization_ratio=0.2, memory_used_bytes=2), busy=0.2)
    second = gpu(
        1,
        holder(container="a", share=0.25, utilization_ratio=0.6, memory_used_bytes=3),
        holder("other", "web", share=0.5, utilization_ratio=0.1),
        busy=0.7,
    )
    state = state_of(node("n1", first), node("n2", second), owners=owners, prices=PRICES)
    rows = rows_of(state)
    assert list(rows) == ["ml/train", "web/other"]
    row = rows["ml/train"]
    assert row["owner"] == {"kind": "Job", "name": "train"}
    assert row["nodes"] == ["n1", "n2"]
    assert (row["allocated_gpus"], row["used_gpus"], row["idle_gpus"]) == (1.25, 1.25, 0.0)
    assert row["utilization_ratio"] == round((0.2 + 0.25 * 0.6) / 1.25, 4)
    assert row["memory_used_bytes"] == 5
    assert (row["cost_per_hour"], row["wasted_per_hour"]) == (10.0, 0.0)
    assert "idle_since" not in row


def test_containers_of_a_pod_are_one_row() -> None:
    containers = []
    for name, utilization in (("a", 0.2), ("b", 0.4)):
        usage = HolderUsage(utilization_ratio=utilization)
        held = Holder(
            "ml", "train", name, f"uid-{name}", f"id-{name}", source="kubelet", usage=usage
        )
        containers.append(held)
    job = [Holder(job="7", container_id=f"id-{number}", source="slurm") for number in (1, 2)]
    first = gpu(0, containers[0], busy=0.9, memory_used_bytes=5)
    state = state_of(node("n1", first, gpu(1, containers[1]), gpu(2, job[0]), gpu(3, job[1])))
    rows = rows_of(state)
    assert set(rows) == {"ml/train", "job 7"}
    row = rows["ml/train"]
    assert row["nodes"] == ["n1"]
    # Its own utilisation counts, not that of the device.
    assert row["utilization_ratio"] == 0.3
    assert row["memory_used_bytes"] == 5
    assert rows["job 7"]["allocated_gpus"] == 2.0


def test_a_sole_holder_has_the_figures_of_its_device() -> None:
    shared = gpu(0, holder("a", share=0.5), holder("b", share=0.5), busy=0.4, memory_used_bytes=9)
    part = mig(1, holder("c"), busy=0.3)
    whole = gpu(1, holder("d"), busy=0.9, memory_used_bytes=7)
    rows = rows_of(state_of(node("n1", shared, whole, gpu(2, instances=(part,)))))
    assert "utilization_ratio" not in rows["ml/a"]
    assert "memory_used_bytes" not in rows["ml/a"]
    assert (rows["ml/d"]["utilization_ratio"], rows["ml/d"]["memory_used_bytes"]) == (0.9, 7)
    assert rows["ml/c"]["utilization_ratio"] == 0.3
    assert rows["ml/c"]["allocated_gpus"] == round(1 / 7, 6)
    assert "cost_per_hour" not in rows["ml/d"]
    assert "wasted_per_hour" not in rows["ml/d"]


def test_idle_since_is_that_of_the_last_gpu_and_only_if_all_are_idle() -> None:
    world = World()
    idle = gpu(0, holder(utilization_ratio=0.0), busy=0.0)
    late = gpu(1, holder(utilization_ratio=0.5), busy=0.5)
    world.round(node("n1", idle, late), prices=PRICES)
    row = rows_of(world.round(node("n1", idle, late, read_at=15.0), at=15.0, prices=PRICES))
    assert "idle_since" not in row["ml/train"]
    assert (row["ml/train"]["idle_gpus"], row["ml/train"]["used_gpus"]) == (1.0, 1.0)
    assert row["ml/train"]["wasted_per_hour"] == 8.0

    late = gpu(1, holder(utilization_ratio=0.0), busy=0.0)
    row = rows_of(world.round(node("n1", idle, late, read_at=30.0), at=30.0, prices=PRICES))
    assert row["ml/train"]["idle_since"] == WALL + 15.0
    assert row["ml/train"]["idle_gpus"] == 2.0


def test_use_of_a_stale_node_is_unknown() -> None:
    world = World()
    reading = node("n1", gpu(0, holder(utilization_ratio=0.5, memory_used_bytes=1), busy=0.5))
    world.round(reading)
    row = rows_of(world.round(reading, at=60.0))["ml/train"]
    assert (row["unknown_gpus"], row["used_gpus"]) == (1.0, 0.0)
    assert "utilization_ratio" not in row
    assert "memory_used_bytes" not in row


def test_jobs_and_users_are_rows_of_their_own() -> None:
    job = Holder(job="4711", user="ben", source="slurm")
    user = Holder(user="ben", source="processes")
    container = Holder(container_id="0123456789abcdef", source="cgroup")
    rows = rows_of(state_of(node("n1", gpu(0, job), gpu(1, user), gpu(2, container))))
    assert set(rows) == {"job 4711 (ben)", "user ben", "container 0123456789ab"}


def test_hidden_pods_are_one_row() -> None:
    both = [holder(name, "secret", utilization_ratio=0.5) for name in ("a", "b")]
    state = state_of(node("n1", gpu(0, holder()), gpu(1, both[0]), gpu(2, both[1])))
    answer = make_pods(hide_in_view(make_view(state), frozenset({"ml"})))
    assert [row.name for row in answer.pods] == ["ml/train", "other namespaces"]
    hidden = answer.pods[1]
    assert (hidden.hidden, hidden.allocated_gpus, hidden.namespace) == (True, 2.0, "")
