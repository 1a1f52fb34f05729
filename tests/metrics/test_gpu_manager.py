"""gpu-manager's four families: the seed's table, cards and totals, parts of shared cards, and what cannot be known."""

from __future__ import annotations

from collections import Counter as Tally
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from podgpu.agent.publish import Published
from podgpu.metrics.families import GPU_MANAGER_FAMILIES
from podgpu.metrics.gpu_manager import gpu_manager_families
from podgpu.metrics.render import Policy
from podgpu.metrics.text import encode
from podgpu.model import (
    Assignment,
    ContainerUsage,
    Device,
    Reading,
    Snapshot,
    Usage,
    VcudaRequest,
    Workload,
)
from podgpu.snapshot_json import dump_snapshot, load_snapshot

MIB = 1024 * 1024
POLICY = Policy(hostname="n1", gpu_manager=True)

GPUS = tuple(Device(i, f"GPU-{i}", f"0000:{i}", "NVIDIA A100-SXM4-40GB", minor=i) for i in range(3))
MIG = replace(GPUS[2], mig_enabled=True)
SMALL = replace(MIG, gi_id=7, profile="1g.5gb", mig_uuids=("MIG-a",))
LARGE = replace(MIG, gi_id=1, profile="3g.20gb", mig_uuids=("MIG-b",))
DEVICES = (*GPUS[:2], MIG, SMALL, LARGE)
MEMORY = {GPUS[0].key: 40960, GPUS[1].key: 40960, MIG.key: 40960, SMALL.key: 4864, LARGE.key: 19968}
READINGS = tuple(Reading(device, {250: MEMORY[device.key]}) for device in DEVICES)

MAIN = Workload("ml", "train", "main")
OTHER = Workload("ml", "serve", "main")


def node(
    *assignments: Assignment, usage: tuple[ContainerUsage, ...] = (), vcuda: tuple[VcudaRequest, ...] = ()
) -> Snapshot:
    return Snapshot(1.0, DEVICES, READINGS, assignments, vcuda=vcuda, usage=Usage(usage))


def held(device: Device, holder: Workload = MAIN, share: float | None = 1.0) -> Assignment:
    return Assignment(device.key, holder, "annotations", share=share)


def used(device: Device, utilization: float | None, mib: int | None = 0, holder: Workload = MAIN) -> ContainerUsage:
    return ContainerUsage(device.key, holder, utilization, None if mib is None else mib * MIB)


def figures(snapshot: Snapshot, family: str, pod: str = "train", policy: Policy = POLICY) -> dict[str, float]:
    """Card (or total) -> value, of one pod."""
    (found,) = (one for one in gpu_manager_families(snapshot, policy) if one.name == family)
    labels = [(dict(sample.labels.pairs), sample.value) for sample in found.samples]
    return {list(pairs.values())[-1]: value for pairs, value in labels if pairs["pod_name"] == pod}


def utilization(snapshot: Snapshot, pod: str = "train") -> dict[str, float]:
    return figures(snapshot, "container_gpu_utilization", pod)


def memory(snapshot: Snapshot, pod: str = "train") -> dict[str, float]:
    return figures(snapshot, "container_gpu_memory_total", pod)


def requested(snapshot: Snapshot, pod: str = "train") -> float | None:
    return figures(snapshot, "container_request_gpu_utilization", pod).get("total")


def requested_memory(snapshot: Snapshot, pod: str = "train") -> float | None:
    return figures(snapshot, "container_request_gpu_memory", pod).get("total")


# The seed's table


def test_as_it_is_printed() -> None:
    snapshot = node(held(GPUS[0]), usage=(used(GPUS[0], 0.57, 1024),), vcuda=(VcudaRequest(MAIN, 100, 30),))
    assert encode(gpu_manager_families(snapshot, POLICY)).decode() == (
        "# HELP container_gpu_utilization gpu utilization\n"
        "# TYPE container_gpu_utilization gauge\n"
        'container_gpu_utilization{pod_name="train",namespace="ml",node="n1",container_name="main",gpu="gpu0"} 57.0\n'
        'container_gpu_utilization{pod_name="train",namespace="ml",node="n1",container_name="main",gpu="total"} 57.0\n'
        "# HELP container_gpu_memory_total gpu memory usage in MiB\n"
        "# TYPE container_gpu_memory_total gauge\n"
        "container_gpu_memory_total"
        '{pod_name="train",namespace="ml",node="n1",container_name="main",gpu_memory="gpu0"} 1024\n'
        "container_gpu_memory_total"
        '{pod_name="train",namespace="ml",node="n1",container_name="main",gpu_memory="total"} 1024\n'
        "# HELP container_request_gpu_utilization request of gpu utilization\n"
        "# TYPE container_request_gpu_utilization gauge\n"
        "container_request_gpu_utilization"
        '{pod_name="train",namespace="ml",node="n1",container_name="main",req_of_gpu="total"} 1.0\n'
        "# HELP container_request_gpu_memory request of gpu memory in MiB\n"
        "# TYPE container_request_gpu_memory gauge\n"
        "container_request_gpu_memory"
        '{pod_name="train",namespace="ml",node="n1",container_name="main",req_of_gpu_memory="total"} 7680\n'
    )


@pytest.mark.parametrize(("cores", "cards"), [(200, 2.0), (100, 1.0), (50, 0.5), (1, 0.01)])
def test_vcuda_core_is_in_hundredths_of_a_card(cores: int, cards: float) -> None:
    assert requested(node(vcuda=(VcudaRequest(MAIN, cores, 0),))) == cards


@pytest.mark.parametrize(("blocks", "mib"), [(30, 7680), (1, 256)])
def test_vcuda_memory_is_in_blocks_of_256_mib(blocks: int, mib: int) -> None:
    assert requested_memory(node(vcuda=(VcudaRequest(MAIN, 50, blocks),))) == mib


def test_every_label_is_declared() -> None:
    snapshot = node(held(GPUS[0]), usage=(used(GPUS[0], 0.1),))
    for family, spec in zip(gpu_manager_families(snapshot, POLICY), GPU_MANAGER_FAMILIES, strict=True):
        assert (family.name, family.type, family.help) == (spec.name, spec.type, spec.help)
        assert {tuple(name for name, _ in sample.labels.pairs) for sample in family.samples} == {spec.labels}


def test_without_a_host_label_there_is_no_node() -> None:
    (family, *_) = gpu_manager_families(node(usage=(used(GPUS[0], 0.1),)), Policy(gpu_manager=True))
    assert all("node" not in dict(sample.labels.pairs) for sample in family.samples)


# What is used


def test_each_card_and_their_plain_sum() -> None:
    """Which may come to more than 100."""
    snapshot = node(held(GPUS[0]), held(GPUS[1]), usage=(used(GPUS[0], 0.75, 1000), used(GPUS[1], 0.5, 24)))
    assert utilization(snapshot) == {"gpu0": 75.0, "gpu1": 50.0, "total": 125.0}
    assert memory(snapshot) == {"gpu0": 1000, "gpu1": 24, "total": 1024}


def test_a_shared_card_is_each_ones_own_part() -> None:
    snapshot = node(
        held(GPUS[0], MAIN, 0.5),
        held(GPUS[0], OTHER, 0.25),
        usage=(used(GPUS[0], 0.3, 300, MAIN), used(GPUS[0], 0.1, 100, OTHER)),
    )
    assert utilization(snapshot) == {"gpu0": 30.0, "total": 30.0}
    assert utilization(snapshot, "serve") == {"gpu0": 10.0, "total": 10.0}
    assert memory(snapshot, "serve") == {"gpu0": 100, "total": 100}
    assert (requested(snapshot), requested(snapshot, "serve")) == (0.5, 0.25)
    assert (requested_memory(snapshot), requested_memory(snapshot, "serve")) == (20480, 10240)


def test_two_containers_of_one_pod_are_kept_apart() -> None:
    side = structs.replace(MAIN, container="side")
    snapshot = node(usage=(used(GPUS[0], 0.3), used(GPUS[0], 0.1, holder=side)))
    (family, *_) = gpu_manager_families(snapshot, POLICY)
    values = {(dict(s.labels.pairs)["container_name"], s.value) for s in family.samples}
    assert values == {("main", 30.0), ("side", 10.0)}


def test_who_holds_a_card_and_rests_is_at_zero() -> None:
    snapshot = node(held(GPUS[0]), usage=(used(GPUS[0], 0.0, 0),))
    assert utilization(snapshot) == {"gpu0": 0.0, "total": 0.0}
    assert memory(snapshot) == {"gpu0": 0, "total": 0}


def test_use_that_cannot_be_known_is_absent_and_the_request_stays() -> None:
    """Outside the host's PID namespace, say; or with --container-usage false, where nobody looks."""
    for usage in ((used(GPUS[0], None, None),), ()):
        snapshot = node(held(GPUS[0]), usage=usage)
        assert utilization(snapshot) == memory(snapshot) == {}
        assert (requested(snapshot), requested_memory(snapshot)) == (1.0, 40960)


def test_one_card_that_cannot_be_known_costs_its_series_and_the_total() -> None:
    snapshot = node(held(GPUS[0]), held(GPUS[1]), usage=(used(GPUS[0], 0.5, 10), used(GPUS[1], None, 20)))
    assert utilization(snapshot) == {"gpu0": 50.0}
    assert memory(snapshot) == {"gpu0": 10, "gpu1": 20, "total": 30}


def test_who_uses_a_card_without_having_been_given_it_has_asked_for_nothing() -> None:
    snapshot = node(usage=(used(GPUS[1], 0.5, 10),))
    assert utilization(snapshot) == {"gpu1": 50.0, "total": 50.0}
    assert requested(snapshot) is requested_memory(snapshot) is None


def test_who_has_no_pod_has_no_series() -> None:
    nobody = (Workload(job="17"), Workload(uid="u-1", container="main"))
    assignments = (held(GPUS[0], one) for one in nobody)
    usage = tuple(used(GPUS[0], 0.5, holder=one) for one in nobody)
    snapshot = node(*assignments, usage=usage, vcuda=tuple(VcudaRequest(one, 10, 10) for one in nobody))
    assert encode(gpu_manager_families(snapshot, POLICY)) == b""


def test_a_card_that_is_not_shown_is_still_asked_for() -> None:
    """With `-d g:0`, or when it fell off the bus: its use is not told, and neither is how much memory it has."""
    snapshot = replace(node(held(GPUS[0]), held(GPUS[1])), devices=GPUS[:1], readings=READINGS[:1])
    snapshot = replace(snapshot, usage=Usage((used(GPUS[0], 0.5), used(GPUS[1], 0.5))))
    assert utilization(snapshot) == {"gpu0": 50.0, "total": 50.0}
    assert requested(snapshot) == 2.0
    assert requested_memory(snapshot) is None


# What was asked for, where nobody asked gpu-manager


def test_shares_of_several_cards_add_up() -> None:
    snapshot = node(held(GPUS[0], share=0.1), held(GPUS[1], share=0.2))
    assert requested(snapshot) == 0.3
    assert requested_memory(snapshot) == 12288


def test_a_share_nobody_knows_is_no_request() -> None:
    snapshot = node(held(GPUS[0]), held(GPUS[1], share=None))
    assert requested(snapshot) is requested_memory(snapshot) is None


def test_gpu_managers_word_goes_before_shares_each_by_itself() -> None:
    whole_cards = VcudaRequest(MAIN, 200, 0)
    snapshot = node(held(GPUS[0]), held(GPUS[1]), vcuda=(whole_cards,))
    assert (requested(snapshot), requested_memory(snapshot)) == (2.0, 81920)
    unknown = node(held(GPUS[0], share=None), vcuda=(whole_cards,))
    assert (requested(unknown), requested_memory(unknown)) == (2.0, None)


# MIG


def test_instances_are_their_part_of_the_card_and_add_up() -> None:
    snapshot = node(held(SMALL), held(LARGE), usage=(used(SMALL, 0.7, 10), used(LARGE, 0.35, 20)))
    assert utilization(snapshot) == {"gpu2": 25.0, "total": 25.0}
    assert memory(snapshot) == {"gpu2": 30, "total": 30}
    assert requested(snapshot) == round(4 / 7, 6)
    assert requested_memory(snapshot) == 4864 + 19968


def test_an_instance_whose_use_is_unknown_hides_that_of_its_card() -> None:
    snapshot = node(held(SMALL), held(LARGE), usage=(used(SMALL, 0.7, 10), used(LARGE, None, 20)))
    assert utilization(snapshot) == {}
    assert memory(snapshot) == {"gpu2": 30, "total": 30}


@pytest.mark.parametrize(
    ("model", "profile", "percent"),
    [
        ("NVIDIA H100 80GB HBM3", "7g.80gb", 50.0),
        ("NVIDIA H100 80GB HBM3", "1g.10gb+me", 7.142857),
        ("NVIDIA A30", "4g.24gb", 50.0),
        ("NVIDIA A30", "1g.6gb", 12.5),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "2g.48gb", 25.0),
        ("NVIDIA A100-SXM4-40GB", "odd", None),
    ],
)
def test_how_much_of_a_card_an_instance_is(model: str, profile: str, percent: float | None) -> None:
    device = replace(SMALL, model=model, profile=profile)
    snapshot = replace(node(usage=(used(device, 0.5),)), devices=(device,))
    assert utilization(snapshot).get("gpu2") == percent


# Whatever there is

workloads = st.builds(Workload, st.just("ns"), st.sampled_from(["", "p", "q"]), st.sampled_from(["a", "b"]))
keys = st.sampled_from([*(d.key for d in DEVICES), "GPU-gone", "GPU-gone/gi1"])
used_keys = keys.filter(lambda key: key != MIG.key)  # in MIG mode nothing runs on the GPU as such
ratios = st.none() | st.floats(0, 1)
snapshots = st.builds(
    Snapshot,
    st.just(1.0),
    st.just(DEVICES),
    st.just(READINGS),
    st.lists(
        st.builds(Assignment, keys, workloads, st.just("kubelet"), share=ratios),
        unique_by=lambda a: (a.device, a.holder),
    ).map(tuple),
    vcuda=st.lists(
        st.builds(VcudaRequest, workloads, st.integers(0, 800), st.integers(0, 400)), unique_by=lambda r: r.holder
    ).map(tuple),
    usage=st.builds(
        Usage,
        st.lists(
            st.builds(ContainerUsage, used_keys, workloads, ratios, st.none() | st.integers(0, 2**40)),
            unique_by=lambda u: (u.device, u.holder),
        ).map(tuple),
    ),
)


def no_series_twice_totals_are_sums_and_cards_end_at_100(snapshot: Snapshot) -> None:
    for family in gpu_manager_families(snapshot, POLICY):
        assert max(Tally(sample.labels.text for sample in family.samples).values(), default=1) == 1
        by_container: dict[tuple[str, ...], dict[str, float]] = {}
        for sample in family.samples:
            *who, card = (value for _, value in sample.labels.pairs)
            by_container.setdefault(tuple(who), {})[card] = sample.value
        for cards in by_container.values():
            total = cards.pop("total", None)
            if total is not None and cards:
                assert total == pytest.approx(sum(cards.values()), abs=1e-6)
            if family.name == "container_gpu_utilization":
                assert all(0 <= value <= 100 for value in cards.values())


def the_order_of_everything_does_not_matter(snapshot: Snapshot) -> None:
    turned = replace(
        snapshot,
        assignments=snapshot.assignments[::-1],
        vcuda=snapshot.vcuda[::-1],
        usage=Usage(snapshot.usage.containers[::-1]),
    )
    assert encode(gpu_manager_families(turned, POLICY)) == encode(gpu_manager_families(snapshot, POLICY))


def a_dump_is_a_fixture(snapshot: Snapshot) -> None:
    assert load_snapshot(dump_snapshot(snapshot)) == snapshot


@given(snapshots)
def test_any_snapshot(snapshot: Snapshot) -> None:
    no_series_twice_totals_are_sums_and_cards_end_at_100(snapshot)
    the_order_of_everything_does_not_matter(snapshot)
    a_dump_is_a_fixture(snapshot)


def test_they_are_published_only_when_asked_for() -> None:
    snapshot = node(held(GPUS[0]), usage=(used(GPUS[0], 0.5),))
    theirs = encode(gpu_manager_families(snapshot, POLICY))
    without, with_them = Published(snapshot, Policy(hostname="n1"), 0.0), Published(snapshot, POLICY, 0.0)
    assert without.gpu_manager.plain == b""
    assert with_them.gpu_manager.plain == theirs != b""
    assert with_them.fresh.plain == without.fresh.plain + theirs
    assert with_them.stale.plain == without.stale.plain
