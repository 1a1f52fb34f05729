"""Tests gpu-manager's metric families: values per card, totals, shared cards, unknown values."""

from __future__ import annotations

import msgspec

from podgpu.metrics.encode import encode
from podgpu.metrics.labels import Policy
from podgpu.metrics.render import render_gpu_manager
from podgpu.model import (
    MIB,
    DeviceState,
    Holder,
    HolderUsage,
    MigInstance,
    NodeState,
    VcudaRequest,
    Workload,
)

POLICY = Policy(hostname="n1", gpu_manager=True)
MAIN = Workload("ml", "train", "main")
OTHER = Workload("ml", "serve", "main")
MEMORY = {"gpu0": 40960, "gpu1": 40960, "small": 4864, "large": 19968}


def holder(
    workload: Workload = MAIN,
    share: float | None = None,
    utilization: float | None = None,
    mib: int | None = None,
    source: str = "annotations",
) -> Holder:
    usage = HolderUsage(utilization, None if mib is None else mib * MIB)
    return Holder(**msgspec.structs.asdict(workload), source=source, share_ratio=share, usage=usage)


def node(*vcuda: VcudaRequest, hidden: str = "", **held: list[Holder]) -> NodeState:
    """Returns a node with two GPUs and a GPU with two MIG instances. `held`: device -> holders."""
    slots = {
        name: {
            "holders": tuple(held.get(name, ())),
            "memory_total_bytes": mib * MIB,
            "hidden": name == hidden,
        }
        for name, mib in MEMORY.items()
    }
    instances = (
        MigInstance(id=7, profile="1g.5gb", **slots["small"]),  # type: ignore[arg-type]
        MigInstance(id=1, profile="3g.20gb", **slots["large"]),  # type: ignore[arg-type]
    )
    model = "NVIDIA A100-SXM4-40GB"
    gpus = [DeviceState(index=n, uuid=f"GPU-{n}", model=model, **slots[f"gpu{n}"]) for n in (0, 1)]  # type: ignore[arg-type]
    mig = DeviceState(index=2, uuid="GPU-2", model=model, instances=instances)
    return NodeState(producer="podgpu", devices=(*gpus, mig), vcuda=vcuda)


def request(cores: int, blocks: int) -> VcudaRequest:
    return VcudaRequest.for_holder(MAIN, cores, blocks)


def figures(state: NodeState, pod: str = "train") -> tuple[dict[str, float], ...]:
    """Returns utilisation, memory, requested cards and memory of one pod, each by card."""
    found = []
    for family in render_gpu_manager(state, POLICY):
        labels = [(dict(sample.labels.pairs), sample.value) for sample in family.samples]
        found.append(
            {list(pairs.values())[-1]: value for pairs, value in labels if pairs["pod_name"] == pod}
        )
    return tuple(found)


def test_the_text_is_gpu_managers() -> None:
    state = node(request(100, 30), gpu0=[holder(MAIN, 1.0, 0.57, 1024)])
    labels = 'pod_name="train",namespace="ml",node="n1",container_name="main"'
    assert encode(render_gpu_manager(state, POLICY)).decode().splitlines() == [
        "# HELP container_gpu_utilization gpu utilization",
        "# TYPE container_gpu_utilization gauge",
        f'container_gpu_utilization{{{labels},gpu="gpu0"}} 57.0',
        f'container_gpu_utilization{{{labels},gpu="total"}} 57.0',
        "# HELP container_gpu_memory_total gpu memory usage in MiB",
        "# TYPE container_gpu_memory_total gauge",
        f'container_gpu_memory_total{{{labels},gpu_memory="gpu0"}} 1024',
        f'container_gpu_memory_total{{{labels},gpu_memory="total"}} 1024',
        "# HELP container_request_gpu_utilization request of gpu utilization",
        "# TYPE container_request_gpu_utilization gauge",
        f'container_request_gpu_utilization{{{labels},req_of_gpu="total"}} 1.0',
        "# HELP container_request_gpu_memory request of gpu memory in MiB",
        "# TYPE container_request_gpu_memory gauge",
        f'container_request_gpu_memory{{{labels},req_of_gpu_memory="total"}} 7680',
    ]
    without_host = encode(render_gpu_manager(state, Policy(gpu_manager=True))).decode()
    assert "node=" not in without_host


def test_each_holder_of_a_shared_card_has_its_own_part() -> None:
    state = node(gpu0=[holder(MAIN, 0.5, 0.3, 300), holder(OTHER, 0.25, 0.1, 100)])
    assert figures(state) == (
        {"gpu0": 30, "total": 30},
        {"gpu0": 300, "total": 300},
        {"total": 0.5},
        {"total": 20480},
    )
    assert figures(state, "serve") == (
        {"gpu0": 10, "total": 10},
        {"gpu0": 100, "total": 100},
        {"total": 0.25},
        {"total": 10240},
    )


def test_unknown_use_is_absent_and_the_request_stays() -> None:
    assert figures(node(gpu0=[holder(MAIN, 1.0)])) == ({}, {}, {"total": 1.0}, {"total": 40960})
    partly = node(gpu0=[holder(MAIN, 1.0, 0.5, 10)], gpu1=[holder(MAIN, 1.0, None, 20)])
    assert figures(partly)[:2] == ({"gpu0": 50}, {"gpu0": 10, "gpu1": 20, "total": 30})


def test_a_container_that_only_uses_a_card_has_no_request() -> None:
    state = node(gpu1=[holder(MAIN, None, 0.5, 10, source="")])
    assert figures(state) == ({"gpu1": 50, "total": 50}, {"gpu1": 10, "total": 10}, {}, {})


def test_a_hidden_card_counts_for_the_request_only() -> None:
    state = node(gpu0=[holder(MAIN, 1.0, 0.5, 1)], gpu1=[holder(MAIN, 1.0, 0.5, 1)], hidden="gpu1")
    assert figures(state) == (
        {"gpu0": 50, "total": 50},
        {"gpu0": 1, "total": 1},
        {"total": 2.0},
        {},
    )


def test_a_vcuda_request_overrides_the_shares_for_cores_and_memory_separately() -> None:
    state = node(request(200, 0), gpu0=[holder(MAIN, 1.0)], gpu1=[holder(MAIN, 1.0)])
    assert figures(state)[2:] == ({"total": 2.0}, {"total": 81920})
    assert figures(node(request(200, 0), gpu0=[holder(MAIN)]))[2:] == ({"total": 2.0}, {})


def test_mig_instances_count_as_their_part_of_the_card() -> None:
    state = node(small=[holder(MAIN, 1.0, 0.7, 10)], large=[holder(MAIN, 1.0, 0.35, 20)])
    assert figures(state) == (
        {"gpu2": 25, "total": 25},
        {"gpu2": 30, "total": 30},
        {"total": round(4 / 7, 6)},
        {"total": 4864 + 19968},
    )
    unknown = node(small=[holder(MAIN, 1.0, 0.7, 10)], large=[holder(MAIN, 1.0, None, 20)])
    assert figures(unknown)[0] == {}
