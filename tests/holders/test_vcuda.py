"""What containers asked gpu-manager for: from ids over real gRPC, from specs, and from several sources at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from podgpu.errors import SourceError
from podgpu.holders.annotations import AnnotationsAllocation, requested_vcuda
from podgpu.holders.holdings import HeldId, parse_id
from podgpu.holders.kubelet import KubeletAllocation
from podgpu.holders.merge import merge
from podgpu.holders.vcuda import count_vcuda
from podgpu.kube.objects import ContainerRecord, PodRecord
from podgpu.model import Allocation, Device, VcudaRequest, Workload
from podgpu.simulate.kubelet import SimulatedClaim, SimulatedKubelet, SimulatedPod

UUID = "GPU-00000000-1111-2222-3333-444444444444"
NODE = (Device(0, UUID, "00000000:01:00.0", "NVIDIA T4", minor=0),)
MAIN = Workload("ml", "train", "main")
CORE, MEMORY = "tencent.com/vcuda-core", "tencent.com/vcuda-memory"


def cores(count: int, first: int = 0) -> list[str]:
    return [f"{CORE}-{number}" for number in range(first, first + count)]


def blocks(count: int, first: int = 0) -> list[str]:
    return [f"{MEMORY}-268435456-{number}" for number in range(first, first + count)]


# Ids


def test_the_kubelets_ids_are_counted_by_container(kubelet: SimulatedKubelet, source: KubeletAllocation) -> None:
    kubelet.pods = (
        SimulatedPod("ml", "train", {"main": {CORE: cores(200)}, "side": {CORE: cores(50, 200), MEMORY: blocks(30)}}),
        SimulatedPod("ml", "whole", {"main": {"nvidia.com/gpu": [UUID]}}),
    )
    allocation = source.assignments(NODE)
    side = structs.replace(MAIN, container="side")
    assert allocation.vcuda == (VcudaRequest(MAIN, 200, 0), VcudaRequest(side, 50, 30))
    assert [one.holder.pod for one in allocation.assignments] == ["whole"]
    assert allocation.unmapped == ()


def test_an_id_counts_once_on_two_numa_nodes(kubelet: SimulatedKubelet, source: KubeletAllocation) -> None:
    kubelet.pods = (SimulatedPod("ml", "train", {"main": {CORE: cores(20), MEMORY: blocks(4)}}),)
    kubelet.numa_nodes = (0, 1)
    assert source.assignments(NODE).vcuda == (VcudaRequest(MAIN, 20, 4),)


def test_claims_beside_them_take_nothing_away(kubelet: SimulatedKubelet) -> None:
    class Claims:
        def held(self, response: object, devices: object) -> Allocation:
            return Allocation()

    source = KubeletAllocation(kubelet.socket, claims=Claims())
    claim = SimulatedClaim("ml", "claim", ())
    kubelet.pods = (SimulatedPod("ml", "train", {"main": {CORE: cores(20)}}, {"main": [claim]}),)
    try:
        assert source.assignments(NODE).vcuda == (VcudaRequest(MAIN, 20, 0),)
    finally:
        source.close()


@pytest.mark.parametrize(
    "text",
    [
        UUID,
        "nvidia0",
        CORE,
        f"{CORE}-",
        f"{CORE}-x",
        f"{CORE}-1 ",
        f"{CORE}-1\n",
        f"{CORE}-\N{ARABIC-INDIC DIGIT THREE}",
        f"{MEMORY}-3",
        f"{MEMORY}-1048576-3",
        f"x{CORE}-1",
        "tencent.com/vcuda-3",
    ],
)
def test_other_ids_are_not_counted(text: str) -> None:
    assert count_vcuda([HeldId(MAIN, CORE, text, parse_id(text))]) == ()


def test_another_plugins_resource_is_none_of_gpu_managers() -> None:
    assert count_vcuda([HeldId(MAIN, "example.com/nic", f"{CORE}-1", None)]) == ()


@given(st.sets(st.integers(0, 800)), st.sets(st.integers(0, 400)), st.randoms())
def test_any_ids_in_any_order(core: set[int], memory: set[int], random: object) -> None:
    texts = [f"{CORE}-{n}" for n in core] + [f"{MEMORY}-268435456-{n}" for n in memory]
    random.shuffle(texts)  # type: ignore[attr-defined]
    counted = count_vcuda(HeldId(MAIN, CORE, text, None) for text in texts)
    assert counted == ((VcudaRequest(MAIN, len(core), len(memory)),) if texts else ())


# Specs


def container(name: str, core: str = "", memory: str = "", finished: bool = False) -> ContainerRecord:
    asks = tuple((resource, text) for resource, text in ((CORE, core), (MEMORY, memory)) if text)
    return ContainerRecord(name, asks, f"id-{name}", finished)


def pod(*containers: ContainerRecord, init: tuple[ContainerRecord, ...] = (), **parts: object) -> PodRecord:
    made = PodRecord("ml", "train", "uid-1", "node-1", "Running", init_containers=init, containers=containers)
    return replace(made, **parts)  # type: ignore[arg-type]


def of(name: str, core: int, memory: int) -> VcudaRequest:
    return VcudaRequest(Workload("ml", "train", name, "uid-1", f"id-{name}"), core, memory)


def test_a_spec_asks_for_each_of_its_containers() -> None:
    asked = requested_vcuda(pod(container("a", "200"), container("b"), container("c", "50", "30")))
    assert list(asked) == [of("a", 200, 0), of("c", 50, 30)]


def test_an_init_container_asks_until_it_is_done() -> None:
    at_work, done = container("a", "10", "1"), container("b", "20", "2", finished=True)
    assert list(requested_vcuda(pod(container("main"), init=(at_work, done)))) == [of("a", 10, 1)]


class Feed:
    synced, error = True, None

    def __init__(self, *pods: PodRecord) -> None:
        self.pods = pods

    def items(self) -> tuple[PodRecord, ...]:
        return self.pods


def read(*pods: PodRecord) -> Allocation:
    return AnnotationsAllocation(lambda: Feed(*pods), "node-1").assignments(NODE)


def test_a_pods_request_is_there_before_and_beside_its_cards() -> None:
    """Bound, but not yet given a card; given one; and with an annotation that nobody can read."""
    cards, assigned = "tencent.com/predicate-gpu-idx-0", ("tencent.com/gpu-assigned", "true")
    for notes, holds in [((), 0), (((cards, "0"), assigned), 1), (((cards, "zero"), assigned), 0)]:
        allocation = read(pod(container("main", "50", "30"), annotations=notes))
        assert allocation.vcuda == (of("main", 50, 30),)
        assert len(allocation.assignments) == holds


def test_pods_that_hold_nothing_here_ask_for_nothing() -> None:
    asking = container("main", "50", "30")
    assert read(pod(asking, phase="Succeeded"), pod(asking, node="node-2"), pod(asking, node="")).vcuda == ()


# Several sources


def told(*requests: VcudaRequest) -> Allocation:
    return Allocation(vcuda=requests)


def test_the_first_source_that_names_a_workload_has_the_word() -> None:
    other = VcudaRequest(Workload("ml", "serve", "main"), 10, 1)
    merged = merge(
        {"annotations": told(VcudaRequest(MAIN, 200, 0)), "kubelet": told(VcudaRequest(MAIN, 100, 7), other)}
    )
    assert merged.vcuda == (other, VcudaRequest(MAIN, 200, 0))


def test_names_are_completed_before_they_are_compared() -> None:
    nameless = Workload(container="main", uid="u-1")
    known = structs.replace(MAIN, uid="u-1")
    sources = {"podlist": told(VcudaRequest(nameless, 20, 2)), "kubelet": told(VcudaRequest(MAIN, 10, 1))}
    assert merge(sources, lambda _: known).vcuda == (VcudaRequest(known, 20, 2),)


def test_a_lagging_source_adds_nothing_beside_the_one_it_lags_behind() -> None:
    gone = VcudaRequest(Workload("ml", "gone", "main"), 10, 1)
    now = VcudaRequest(MAIN, 10, 1)
    assert merge({"kubelet": told(now), "checkpoint": told(gone)}).vcuda == (now,)
    assert merge({"checkpoint": told(gone)}).vcuda == (gone,)


def test_an_identity_that_is_refused_is_counted() -> None:
    def refuse(workload: Workload) -> Workload:
        raise SourceError("identity_conflict", "uid and names of different pods")

    merged = merge({"kubelet": told(VcudaRequest(MAIN, 10, 1))}, refuse)
    assert merged.vcuda == ()
    assert [(one.source, one.reason, one.resource) for one in merged.unmapped] == [
        ("kubelet", "identity_conflict", CORE)
    ]
