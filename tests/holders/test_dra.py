"""GPUs held through claims: the kubelet over real gRPC, slices from an API server over real HTTP or given outright."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.holders.dra import DraClaims
from podgpu.holders.kubelet import KubeletAllocation
from podgpu.holders.pod_resources import decode_list
from podgpu.kube.config import ApiConfig
from podgpu.kube.objects import NVIDIA_DRIVER, PoolSlice, SliceDevice, parse_slice, slices_params, slices_path
from podgpu.kube.reflector import Informer, ReflectorSettings
from podgpu.model import Allocation, Assignment, Device, Unmapped, Workload
from podgpu.simulate.kubelet import ClaimedDevice, SimulatedClaim, SimulatedKubelet, SimulatedPod, list_answer
from tests.holders.devices import gpu, mig_uuid, uuid
from tests.kube.api_server import SimulatedApiServer

MakeSource = Callable[..., KubeletAllocation]
POOL = "node-a"


def instance(number: int, gi_id: int, profile: str, *mig_uuids: str) -> Device:
    parent = gpu(number)
    return Device(number, parent.uuid, parent.pci_bus_id, parent.model, number, True, gi_id, profile, mig_uuids)


NODE = (
    *(gpu(number) for number in range(4)),
    instance(3, 1, "3g.20gb", mig_uuid("a"), mig_uuid("b")),
    instance(3, 11, "1g.5gb", mig_uuid("c")),
    instance(3, 12, "1g.5gb", mig_uuid("d")),
    instance(3, 5, "2g.10gb", mig_uuid("e")),
)


def offer(name: str, number: int) -> SliceDevice:
    return SliceDevice(NVIDIA_DRIVER, POOL, name, "gpu", uuid(number))


def offer_mig(name: str, mig: str, profile: str, parent: int = 3) -> SliceDevice:
    return SliceDevice(NVIDIA_DRIVER, POOL, name, "mig", mig, uuid(parent), profile)


# Numbers in names are minors and need not be the driver's indices.
OFFERED = (
    offer("gpu-0", 1),
    offer("gpu-1", 0),
    offer("gpu-2", 2),
    offer("gone", 9),
    offer_mig("small-c", mig_uuid("c"), "1g.5gb"),
    offer_mig("small-d", mig_uuid("d"), "1g.5gb"),
    offer_mig("big-a", mig_uuid("a"), "3g.20gb"),
    offer_mig("big-b", mig_uuid("b"), "3g.20gb"),
    SliceDevice(NVIDIA_DRIVER, POOL, "mute"),
)


@dataclass
class GivenSlices:
    """A feed that holds what it is told to."""

    slices: tuple[PoolSlice, ...] = ()
    synced: bool = True

    def items(self) -> tuple[PoolSlice, ...]:
        return self.slices


def feed_of(*devices: SliceDevice) -> GivenSlices:
    return GivenSlices((PoolSlice(NVIDIA_DRIVER, POOL, 1, devices),))


def claim(name: str, *devices: str, pool: str = POOL, driver: str = NVIDIA_DRIVER) -> SimulatedClaim:
    cdi = "k8s.gpu.nvidia.com/device="
    return SimulatedClaim("team", name, tuple(ClaimedDevice(driver, pool, one, (cdi + one,)) for one in devices))


def pod(name: str, *claims: SimulatedClaim, **resources: list[str]) -> SimulatedPod:
    return SimulatedPod("team", name, {"main": {"nvidia.com/gpu": resources.get("ids", [])}}, {"main": claims})


def holder(name: str, container: str = "main") -> Workload:
    return Workload("team", name, container)


def held(*pods: SimulatedPod, feed: GivenSlices | None = None) -> Allocation:
    return DraClaims(feed or feed_of(*OFFERED)).held(decode_list(list_answer(pods)), NODE)


def pods_by_device(allocation: Allocation) -> list[tuple[str, str]]:
    return [(one.device, one.holder.pod) for one in allocation.assignments]


def reasons(allocation: Allocation) -> list[tuple[str, str]]:
    return [(one.reason, one.device_id) for one in allocation.unmapped]


# What a claim becomes


def test_a_claimed_gpu() -> None:
    assert held(pod("a", claim("one", "gpu-0"))) == Allocation(
        (
            Assignment(
                uuid(1),
                holder("a"),
                "kubelet",
                attributes=(
                    ("dra_claim_name", "one"),
                    ("dra_claim_namespace", "team"),
                    ("dra_device_name", "gpu-0"),
                    ("dra_driver_name", "gpu.nvidia.com"),
                    ("dra_pool_name", "node-a"),
                ),
            ),
        )
    )


def test_a_claimed_mig_device() -> None:
    (one,) = held(pod("a", claim("small", "small-d"))).assignments
    assert (one.device, one.share, one.replica) == (f"{uuid(3)}/gi12", None, "")
    assert one.attributes == (
        ("dra_claim_name", "small"),
        ("dra_claim_namespace", "team"),
        ("dra_device_name", "small-d"),
        ("dra_driver_name", "gpu.nvidia.com"),
        ("dra_mig_device_uuid", mig_uuid("d")),
        ("dra_mig_profile", "1g.5gb"),
        ("dra_pool_name", "node-a"),
    )


def test_two_compute_instances_of_one_gpu_instance_are_one_assignment_with_the_labels_of_the_first() -> None:
    for devices in (("big-a", "big-b"), ("big-b", "big-a")):
        (one,) = held(pod("a", claim("big", *devices))).assignments
        assert one.device == f"{uuid(3)}/gi1"
        assert dict(one.attributes)["dra_mig_device_uuid"] == mig_uuid("a")


def test_cdi_names_that_the_kubelet_repeats_add_nobody() -> None:
    pods = [pod("a", claim("two", "gpu-0", "gpu-1")), pod("b", claim("one", "gpu-2"))]
    listed = decode_list(list_answer(pods)).pod_resources[0].containers[0].dynamic_resources[0].claim_resources
    assert [len(one.cdi_devices) for one in listed] == [1, 2]
    assert pods_by_device(held(*pods)) == [(uuid(0), "a"), (uuid(1), "a"), (uuid(2), "b")]


def test_a_claim_shared_by_pods_and_containers_is_as_many_assignments() -> None:
    shared = claim("shared", "gpu-0")
    duo = SimulatedPod("team", "duo", {"main": {}, "side": {}, "idle": {}}, {"main": [shared], "side": [shared]})
    allocation = held(duo, pod("solo", shared))
    assert [one.holder for one in allocation.assignments] == [holder("duo"), holder("duo", "side"), holder("solo")]
    assert {one.device for one in allocation.assignments} == {uuid(1)}
    assert {dict(one.attributes)["dra_claim_name"] for one in allocation.assignments} == {"shared"}


def test_two_claims_on_one_gpu_in_one_container_are_one_assignment() -> None:
    for claims in ((claim("x", "gpu-0"), claim("y", "gpu-0")), (claim("y", "gpu-0"), claim("x", "gpu-0"))):
        (one,) = held(pod("a", *claims)).assignments
        assert dict(one.attributes)["dra_claim_name"] == "x"


def test_claims_on_other_drivers_are_none_of_our_business() -> None:
    others = [claim("net", "gpu-0", driver="dra.example.com"), claim("imex", "d", driver="compute-domain.nvidia.com")]
    assert held(pod("a", *others)) == Allocation()


def test_gpus_that_nobody_claimed_have_no_assignment() -> None:
    assert pods_by_device(held(pod("a", claim("one", "gpu-0")), pod("b"))) == [(uuid(1), "a")]
    assert held() == Allocation()


# What cannot be mapped


@pytest.mark.parametrize(
    ("claimed", "reason"),
    [
        (claim("x", "gpu-0", pool="node-b"), "unknown_pool"),
        (claim("x", "gpu-7"), "unknown_claim_device"),
        (claim("x", "gone"), "unknown_device"),
        (claim("x", "mute"), "claim_device_without_uuid"),
    ],
)
def test_what_cannot_be_mapped_says_why(claimed: SimulatedClaim, reason: str) -> None:
    (device,) = claimed.devices
    assert held(pod("a", claimed)) == Allocation(
        unmapped=(
            Unmapped("kubelet", reason, f"gpu.nvidia.com/{device.pool}/{device.device}", "claim team/x", holder("a")),
        )
    )


@pytest.mark.parametrize("wrong", ["all", "tegra", "nvidia0", "GPU-", "0"])
def test_only_a_uuid_is_a_uuid(wrong: str) -> None:
    feed = feed_of(SliceDevice(NVIDIA_DRIVER, POOL, "odd", "gpu", wrong))
    assert reasons(held(pod("a", claim("x", "odd")), feed=feed)) == [("unknown_device", "gpu.nvidia.com/node-a/odd")]


def test_before_the_slices_are_read() -> None:
    allocation = held(pod("a", claim("x", "gpu-0"), claim("y", "gpu-7")), feed=GivenSlices(synced=False))
    assert reasons(allocation) == [
        ("slices_not_synced", "gpu.nvidia.com/node-a/gpu-0"),
        ("slices_not_synced", "gpu.nvidia.com/node-a/gpu-7"),
    ]
    assert allocation.assignments == ()


def test_a_new_generation_of_the_pool_gives_names_a_new_meaning() -> None:
    feed = feed_of(offer("gpu-0", 0), offer("gpu-1", 1))
    claims, answer = DraClaims(feed), decode_list(list_answer([pod("a", claim("x", "gpu-0")), pod("b")]))
    assert pods_by_device(claims.held(answer, NODE)) == [(uuid(0), "a")]
    feed.slices += (PoolSlice(NVIDIA_DRIVER, POOL, 2, (offer("gpu-0", 1),)),)
    assert pods_by_device(claims.held(answer, NODE)) == [(uuid(1), "a")]
    feed.slices += (PoolSlice(NVIDIA_DRIVER, POOL, 3),)
    assert pods_by_device(claims.held(answer, NODE)) == [(uuid(1), "a")], "held, it stays what it was"
    later = decode_list(list_answer([pod("c", claim("z", "gpu-1"))]))
    assert reasons(claims.held(later, NODE)) == [("unknown_claim_device", "gpu.nvidia.com/node-a/gpu-1")]
    assert reasons(claims.held(answer, NODE)) == [("unknown_claim_device", "gpu.nvidia.com/node-a/gpu-0")]


# MIG devices made when they are claimed: their slices have no UUID


DYNAMIC = feed_of(
    *(offer_mig(f"gpu-3-mig-1g5gb-19-{place}", "", "1g.5gb") for place in range(7)),
    *(offer_mig(f"gpu-3-mig-2g10gb-14-{place}", "", "2g.10gb") for place in (0, 2)),
    offer_mig("gpu-2-mig-2g10gb-14-0", "", "2g.10gb", parent=2),
)


def test_the_only_instance_of_its_profile_is_the_claimed_one() -> None:
    (one,) = held(pod("a", claim("x", "gpu-3-mig-2g10gb-14-2")), feed=DYNAMIC).assignments
    assert one.device == f"{uuid(3)}/gi5"
    assert dict(one.attributes)["dra_mig_device_uuid"] == mig_uuid("e")
    assert dict(one.attributes)["dra_mig_profile"] == "2g.10gb"


def test_a_shared_one_is_still_the_only_one() -> None:
    shared = claim("x", "gpu-3-mig-2g10gb-14-2")
    assert len(held(pod("a", shared), pod("b", shared), feed=DYNAMIC).assignments) == 2


@pytest.mark.parametrize(
    ("claimed", "reason"),
    [
        (["gpu-3-mig-1g5gb-19-0"], "ambiguous_mig_device"),  # two such instances
        (["gpu-3-mig-2g10gb-14-0", "gpu-3-mig-2g10gb-14-2"], "ambiguous_mig_device"),  # one seen so far, two held
        (["gpu-2-mig-2g10gb-14-0"], "unknown_device"),  # not seen yet
    ],
)
def test_which_instance_it_became_is_never_guessed(claimed: list[str], reason: str) -> None:
    allocation = held(pod("a", claim("x", *claimed)), feed=DYNAMIC)
    assert reasons(allocation) == [(reason, f"gpu.nvidia.com/node-a/{one}") for one in claimed]
    assert allocation.assignments == ()


# Kubelets 1.27 to 1.30 give CDI names only


def old_claim(*cdi_names: str, driver: str = "") -> SimulatedClaim:
    return SimulatedClaim("team", "old", (ClaimedDevice(driver=driver, cdi_names=cdi_names),))


def test_cdi_names_with_a_uuid() -> None:
    gpu_name, mig_name = f"nvidia.com/gpu={uuid(0)}", f"k8s.gpu.nvidia.com/claim=c-{mig_uuid('c')}"
    allocation = held(pod("a", old_claim(gpu_name, mig_name, "nvidia.com/gpu=all")), feed=GivenSlices(synced=False))
    assert allocation.unmapped == ()
    claimed = (("dra_claim_name", "old"), ("dra_claim_namespace", "team"))
    mig = (("dra_mig_device_uuid", mig_uuid("c")), ("dra_mig_profile", "1g.5gb"))
    assert [(one.device, one.attributes) for one in allocation.assignments] == [
        (uuid(0), claimed),
        (f"{uuid(3)}/gi11", claimed + mig),
    ]


@pytest.mark.parametrize(
    "name",
    [
        "k8s.gpu.nvidia.com/claim=0f7bbd4c-9a43-4c6b-8f10-3c1f2a7d5e11-gpu-0",
        "k8s.gpu.resource.nvidia.com/claim=0f7bbd4c-9a43-4c6b-8f10-3c1f2a7d5e11",
        "nvidia.com/gpu=0",
    ],
)
def test_cdi_names_without_a_uuid(name: str) -> None:
    assert held(pod("a", old_claim(name, name))).unmapped == (
        Unmapped("kubelet", "claim_without_device_name", name, "claim team/old", holder("a")),
    )


def test_a_device_of_the_driver_without_any_name() -> None:
    allocation = held(pod("a", old_claim(driver=NVIDIA_DRIVER)))
    assert reasons(allocation) == [("claim_without_device_name", "gpu.nvidia.com//")]


def test_a_cdi_name_of_a_gpu_that_is_not_here() -> None:
    name = f"nvidia.com/gpu={uuid(9)}"
    assert reasons(held(pod("a", old_claim(name)))) == [("unknown_device", name)]


@pytest.mark.parametrize(
    "names",
    [(), ("k8s.compute-domain.nvidia.com/channel=0",), ("example.com/nic=eth0",), ("gpu",), ("intel.com/gpu=card0",)],
)
def test_cdi_names_of_other_devices_are_none_of_our_business(names: tuple[str, ...]) -> None:
    assert held(pod("a", old_claim(*names))) == Allocation()


def test_an_old_mig_name_is_not_taken_for_its_parent() -> None:
    assert held(pod("a", old_claim(f"example.com/x=MIG-{uuid(3)}_1_0"))) == Allocation()


# Ids and claims together, from a kubelet


def test_ids_and_claims_of_a_kubelet(kubelet: SimulatedKubelet, make_source: MakeSource) -> None:
    source = make_source(kubelet.socket, claims=DraClaims(feed_of(*OFFERED)))
    kubelet.pods = (
        pod("claims", claim("one", "gpu-2"), claim("bad", "gpu-7")),
        pod("plain", ids=[uuid(0), uuid(9)]),
        pod("small", claim("mig", "small-c")),
    )
    allocation = source.assignments(NODE)
    assert pods_by_device(allocation) == [(uuid(0), "plain"), (uuid(2), "claims"), (f"{uuid(3)}/gi11", "small")]
    assert reasons(allocation) == [("unknown_device", uuid(9)), ("unknown_claim_device", "gpu.nvidia.com/node-a/gpu-7")]


def test_a_gpu_listed_both_ways_is_held_once_with_share_and_labels(
    kubelet: SimulatedKubelet, make_source: MakeSource
) -> None:
    source = make_source(kubelet.socket, claims=DraClaims(feed_of(*OFFERED)))
    kubelet.pods = (pod("a", claim("extended", "gpu-2"), ids=[uuid(2)]), pod("b", claim("extended", "gpu-2")))
    first, second = source.assignments(NODE).assignments
    assert (first.device, first.holder, first.share) == (uuid(2), holder("a"), 1.0)
    assert (second.device, second.holder, second.share) == (uuid(2), holder("b"), None)
    assert first.attributes == second.attributes != ()


def test_without_asking_for_them_claims_are_passed_over(kubelet: SimulatedKubelet, source: KubeletAllocation) -> None:
    kubelet.pods = (pod("a", claim("one", "gpu-2"), claim("bad", "gpu-7")),)
    assert source.assignments(NODE) == Allocation()


def test_a_kubelet_too_old_for_claims_has_none(kubelet: SimulatedKubelet, make_source: MakeSource) -> None:
    kubelet.versions = frozenset({"v1alpha1"})
    kubelet.pods = (pod("a", claim("one", "gpu-2"), ids=[uuid(0)]),)
    source = make_source(kubelet.socket, claims=DraClaims(feed_of(*OFFERED)))
    assert pods_by_device(source.assignments(NODE)) == [(uuid(0), "a")]


# Slices from an API server


def slice_object(generation: int, *devices: SliceDevice, name: str = "node-a-1") -> dict[str, Any]:
    listed = [{"name": one.name, "attributes": attributes_of(one)} for one in devices]
    pool = {"name": POOL, "generation": generation, "resourceSliceCount": 1}
    spec = {"driver": NVIDIA_DRIVER, "nodeName": "node-a", "pool": pool, "devices": listed}
    return {"metadata": {"name": name}, "spec": spec}


def attributes_of(one: SliceDevice) -> dict[str, Any]:
    said = {"type": one.type, "uuid": one.uuid, "parentUUID": one.parent_uuid, "profile": one.profile}
    return {name: {"string": value} for name, value in said.items() if value}


def eventually(true: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until, "did not become true in time"
        time.sleep(0.002)


@pytest.fixture
def api() -> Iterator[SimulatedApiServer]:
    with SimulatedApiServer() as running:
        yield running


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_slices_as_an_api_server_has_them(
    version: str, api: SimulatedApiServer, kubelet: SimulatedKubelet, make_source: MakeSource
) -> None:
    api.put("resourceslices", slice_object(1, *OFFERED))
    other = slice_object(9, offer("gpu-2", 0), name="other")
    other["spec"]["nodeName"] = "node-b"
    api.put("resourceslices", other)
    kubelet.pods = (pod("a", claim("one", "gpu-2")), pod("small", claim("mig", "small-c")))
    config, settings = (
        ApiConfig(server=api.url, origin="the test"),
        ReflectorSettings(first_delay=0.01, max_delay=0.02, request_seconds=5.0),
    )
    with Informer(config, slices_path(version), slices_params("node-a"), parse_slice, settings=settings) as feed:
        source = make_source(kubelet.socket, claims=DraClaims(feed))
        assert feed.wait_synced(30)
        assert pods_by_device(source.assignments(NODE)) == [(uuid(2), "a"), (f"{uuid(3)}/gi11", "small")]
        api.put("resourceslices", slice_object(2, offer("gpu-2", 0)))
        eventually(lambda: pods_by_device(source.assignments(NODE))[0] == (uuid(0), "a"))
        api.refusal = (500, "etcd is away")
        api.cut_watches()
        eventually(lambda: feed.error is not None)
        assert pods_by_device(source.assignments(NODE))[0] == (uuid(0), "a")


def test_an_api_server_that_refuses_leaves_the_other_holders(
    api: SimulatedApiServer, kubelet: SimulatedKubelet, make_source: MakeSource
) -> None:
    api.refusal = (403, "resourceslices is forbidden")
    kubelet.pods = (pod("a", claim("one", "gpu-2")), pod("plain", ids=[uuid(0)]))
    config = ApiConfig(server=api.url, origin="the test")
    with Informer(config, slices_path("v1"), slices_params("node-a"), parse_slice) as feed:
        source = make_source(kubelet.socket, claims=DraClaims(feed))
        eventually(lambda: feed.error is not None)
        allocation = source.assignments(NODE)
    assert pods_by_device(allocation) == [(uuid(0), "plain")]
    assert reasons(allocation) == [("slices_not_synced", "gpu.nvidia.com/node-a/gpu-2")]


# Whatever comes


claimed_devices = st.builds(
    ClaimedDevice,
    st.sampled_from([NVIDIA_DRIVER, "", "example.com"]),
    st.sampled_from([POOL, "", "node-b"]),
    st.sampled_from([*(one.name for one in OFFERED), "", "gpu-7"]),
    st.lists(st.sampled_from([f"nvidia.com/gpu={uuid(0)}", "nvidia.com/gpu=0", "x/y=z", ""]), max_size=2).map(tuple),
)
claims_of_all_kinds = st.builds(
    SimulatedClaim,
    st.sampled_from(["team", ""]),
    st.sampled_from(["one", "two"]),
    st.lists(claimed_devices, max_size=3).map(tuple),
)
pods_of_all_kinds = st.builds(
    lambda name, claims: pod(name, *claims), st.sampled_from("ab"), st.lists(claims_of_all_kinds, max_size=4)
)


@given(st.lists(pods_of_all_kinds, max_size=4), st.booleans(), st.randoms(use_true_random=False))
def test_order_does_not_matter_and_nobody_holds_a_device_twice(
    pods: list[SimulatedPod], synced: bool, chance: random.Random
) -> None:
    feed = GivenSlices(feed_of(*OFFERED).slices, synced)
    allocation = held(*pods, feed=feed)
    shuffled = [pod(one.name, *chance.sample(list(one.claims["main"]), len(one.claims["main"]))) for one in pods]
    chance.shuffle(shuffled)
    assert held(*shuffled, feed=feed) == allocation
    pairs = [(one.device, one.holder) for one in allocation.assignments]
    assert pairs == sorted(set(pairs), key=lambda pair: (pair[0], pair[1].pod))
    assert {device for device, _ in pairs} <= {one.key for one in NODE}
