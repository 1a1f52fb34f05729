"""gpu-manager's four families: the seed's table, cards and totals, parts of shared cards, and unknown values."""

from __future__ import annotations

from collections import Counter as Tally

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.metrics.encode import encode
from podgpu.metrics.gpu_manager import render_gpu_manager
from podgpu.metrics.render import Policy
from podgpu.model import DeviceState, Holder, HolderUsage, MigInstance, NodeState, VcudaRequest, Workload

MIB = 1024 * 1024
POLICY = Policy(hostname="n1", gpu_manager=True)
A100 = "NVIDIA A100-SXM4-40GB"
GPU0, GPU1, SMALL, LARGE = "GPU-0", "GPU-1", "GPU-2/7", "GPU-2/1"
MEMORY = {GPU0: 40960, GPU1: 40960, SMALL: 4864, LARGE: 19968}
PROFILES = {SMALL: "1g.5gb", LARGE: "3g.20gb"}
MAIN = Workload("ml", "train", "main")
OTHER = Workload("ml", "serve", "main")


def holder(
    workload: Workload = MAIN,
    share: float | None = None,
    utilization: float | None = None,
    mib: int | None = None,
    source: str = "annotations",
) -> Holder:
    usage = HolderUsage(utilization, None if mib is None else mib * MIB)
    return Holder(**msgspec.structs.asdict(workload), source=source, share_ratio=share, usage=usage)


def node(*vcuda: VcudaRequest, hidden: str = "", model: str = A100, **held: list[Holder]) -> NodeState:
    """`held`: holders by name of the slot in lower case."""
    holders = {slot: tuple(held.get(name, ())) for name, slot in SLOTS.items()}
    parts = {
        slot: {"holders": holders[slot], "memory_total_bytes": MEMORY[slot] * MIB, "hidden": slot == hidden}
        for slot in MEMORY
    }
    instances = tuple(
        MigInstance(id=int(slot[-1]), profile=PROFILES[slot], **parts[slot])  # type: ignore[arg-type]
        for slot in (SMALL, LARGE)
    )
    gpus = [DeviceState(index=n, uuid=slot, model=model, **parts[slot]) for n, slot in enumerate((GPU0, GPU1))]  # type: ignore[arg-type]
    mig = DeviceState(index=2, uuid="GPU-2", model=model, instances=instances)
    return NodeState(producer="podgpu", devices=(*gpus, mig), vcuda=vcuda)


SLOTS = {"gpu0": GPU0, "gpu1": GPU1, "small": SMALL, "large": LARGE}


def request(cores: int, blocks: int, workload: Workload = MAIN) -> VcudaRequest:
    return VcudaRequest(**msgspec.structs.asdict(workload), cores=cores, memory_blocks=blocks)


def figures(state: NodeState, family: str, pod: str = "train") -> dict[str, float]:
    """Card (or total) -> value, of one pod."""
    (found,) = (one for one in render_gpu_manager(state, POLICY) if one.name == family)
    labels = [(dict(sample.labels.pairs), sample.value) for sample in found.samples]
    return {list(pairs.values())[-1]: value for pairs, value in labels if pairs["pod_name"] == pod}


def utilization(state: NodeState, pod: str = "train") -> dict[str, float]:
    return figures(state, "container_gpu_utilization", pod)


def memory(state: NodeState, pod: str = "train") -> dict[str, float]:
    return figures(state, "container_gpu_memory_total", pod)


def requested(state: NodeState, pod: str = "train") -> float | None:
    return figures(state, "container_request_gpu_utilization", pod).get("total")


def requested_memory(state: NodeState, pod: str = "train") -> float | None:
    return figures(state, "container_request_gpu_memory", pod).get("total")


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
    assert utilization(state) == {"gpu0": 30.0, "total": 30.0}
    assert utilization(state, "serve") == {"gpu0": 10.0, "total": 10.0}
    assert memory(state, "serve") == {"gpu0": 100, "total": 100}
    assert (requested(state), requested(state, "serve")) == (0.5, 0.25)
    assert (requested_memory(state), requested_memory(state, "serve")) == (20480, 10240)


def test_unknown_use_is_absent_and_the_request_stays() -> None:
    state = node(gpu0=[holder(MAIN, 1.0)])
    assert utilization(state) == memory(state) == {}
    assert (requested(state), requested_memory(state)) == (1.0, 40960)
    partly = node(gpu0=[holder(MAIN, 1.0, 0.5, 10)], gpu1=[holder(MAIN, 1.0, None, 20)])
    assert utilization(partly) == {"gpu0": 50.0}, "no total"
    assert memory(partly) == {"gpu0": 10, "gpu1": 20, "total": 30}


def test_a_container_that_only_uses_a_card_has_no_request() -> None:
    state = node(gpu1=[holder(MAIN, None, 0.5, 10, source="")])
    assert utilization(state) == {"gpu1": 50.0, "total": 50.0}
    assert requested(state) is requested_memory(state) is None


def test_a_hidden_card_counts_for_the_request_only() -> None:
    state = node(gpu0=[holder(MAIN, 1.0, 0.5, 1)], gpu1=[holder(MAIN, 1.0, 0.5, 1)], hidden=GPU1)
    assert utilization(state) == {"gpu0": 50.0, "total": 50.0}
    assert requested(state) == 2.0
    assert requested_memory(state) is None


def test_a_vcuda_request_overrides_the_shares_for_cores_and_memory_separately() -> None:
    state = node(request(200, 0), gpu0=[holder(MAIN, 1.0)], gpu1=[holder(MAIN, 1.0)])
    assert (requested(state), requested_memory(state)) == (2.0, 81920)
    unknown = node(request(200, 0), gpu0=[holder(MAIN)])
    assert (requested(unknown), requested_memory(unknown)) == (2.0, None)


def test_mig_instances_count_as_their_part_of_the_card() -> None:
    state = node(small=[holder(MAIN, 1.0, 0.7, 10)], large=[holder(MAIN, 1.0, 0.35, 20)])
    assert utilization(state) == {"gpu2": 25.0, "total": 25.0}
    assert memory(state) == {"gpu2": 30, "total": 30}
    assert requested(state) == round(4 / 7, 6)
    assert requested_memory(state) == 4864 + 19968
    unknown = node(small=[holder(MAIN, 1.0, 0.7, 10)], large=[holder(MAIN, 1.0, None, 20)])
    assert utilization(unknown) == {}
    assert memory(unknown) == {"gpu2": 30, "total": 30}


workloads = st.builds(Workload, st.just("ns"), st.sampled_from(["", "p", "q"]), st.sampled_from(["a", "b"]))
ratios = st.none() | st.floats(0, 1)
held_lists = st.lists(
    st.builds(holder, workloads, ratios, ratios, st.none() | st.integers(0, 2**20), st.sampled_from(["", "kubelet"])),
    unique_by=lambda one: one.key,
)


@given(st.fixed_dictionaries(dict.fromkeys(SLOTS, held_lists)))
def test_totals_are_sums_and_cards_end_at_100(held: dict[str, list[Holder]]) -> None:
    state = node(**held)
    for family in render_gpu_manager(state, POLICY):
        assert max(Tally(sample.labels.text for sample in family.samples).values(), default=1) == 1
        by_container: dict[tuple[str, ...], dict[str, float]] = {}
        for sample in family.samples:
            *labels, card = (value for _, value in sample.labels.pairs)
            by_container.setdefault(tuple(labels), {})[card] = sample.value
        for cards in by_container.values():
            total = cards.pop("total", None)
            if total is not None and cards:
                assert total == pytest.approx(sum(cards.values()), abs=1e-6)
            if family.name == "container_gpu_utilization":
                assert all(0 <= value <= 100 for value in cards.values())
    turned = node(**{name: found[::-1] for name, found in held.items()})
    assert encode(render_gpu_manager(turned, POLICY)) == encode(render_gpu_manager(state, POLICY))
