"""GPUs held through ResourceClaims, with a kubelet over real gRPC and given ResourceSlices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from podgpu.holders.dra import DraClaims
from podgpu.holders.kubelet import KubeletAllocation, decode_list
from podgpu.kube.objects import NVIDIA_DRIVER, PoolSlice, SliceDevice
from podgpu.model import Allocation, Device, Unmapped, Workload
from podgpu.simulate.kubelet import SimulatedPod
from tests.holders.devices import gpu, mig_uuid, uuid
from tests.simulated_kubelet import ClaimingPod, FaultyKubelet, SimulatedClaim, SimulatedDevice, list_answer

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
    return SliceDevice(name, uuid(number))


# Numbers in names are minors and need not be the driver's indices.
OFFERED = (
    offer("gpu-0", 1),
    offer("gpu-1", 0),
    offer("gpu-2", 2),
    offer("gone", 9),
    SliceDevice("small-c", mig_uuid("c")),
    SliceDevice("small-d", mig_uuid("d")),
    SliceDevice("mute"),
)


@dataclass
class GivenSlices:
    """A store with given slices."""

    slices: tuple[PoolSlice, ...] = ()
    synced: bool = True

    def items(self) -> tuple[PoolSlice, ...]:
        return self.slices


def feed_of(*devices: SliceDevice) -> GivenSlices:
    return GivenSlices((PoolSlice(POOL, 1, devices),))


def claim(name: str, *devices: str, pool: str = POOL, driver: str = NVIDIA_DRIVER) -> SimulatedClaim:
    cdi = "k8s.gpu.nvidia.com/device="
    return SimulatedClaim("team", name, tuple(SimulatedDevice(driver, pool, one, (cdi + one,)) for one in devices))


def pod(name: str, *claims: SimulatedClaim, **resources: list[str]) -> SimulatedPod:
    return ClaimingPod("team", name, {"main": {"nvidia.com/gpu": resources.get("ids", [])}}, {"main": claims})


def holder(name: str, container: str = "main") -> Workload:
    return Workload("team", name, container)


def held(*pods: SimulatedPod, feed: GivenSlices | None = None) -> Allocation:
    return DraClaims(feed or feed_of(*OFFERED)).held(decode_list(list_answer(pods)), NODE)


def pods_by_device(allocation: Allocation) -> list[tuple[str, str]]:
    return [(one.device, one.holder.pod) for one in allocation.assignments]


def reasons(allocation: Allocation) -> list[tuple[str, str]]:
    return [(one.reason, one.device_id) for one in allocation.unmapped]


@pytest.mark.parametrize(
    ("claimed", "reason"),
    [
        (claim("x", "gpu-0", pool="node-b"), "unknown_pool"),
        (claim("x", "gpu-7"), "unknown_claim_device"),
        (claim("x", "gone"), "unknown_device"),
        (claim("x", "mute"), "claim_device_without_uuid"),
    ],
)
def test_unmapped_claims_have_a_reason(claimed: SimulatedClaim, reason: str) -> None:
    (device,) = claimed.devices
    assert held(pod("a", claimed)) == Allocation(
        unmapped=(
            Unmapped("kubelet", reason, f"gpu.nvidia.com/{device.pool}/{device.device}", "claim team/x", holder("a")),
        )
    )


def test_a_new_generation_of_the_pool_replaces_devices() -> None:
    feed = feed_of(offer("gpu-0", 0), offer("gpu-1", 1))
    claims, answer = DraClaims(feed), decode_list(list_answer([pod("a", claim("x", "gpu-0")), pod("b")]))
    assert pods_by_device(claims.held(answer, NODE)) == [(uuid(0), "a")]
    feed.slices += (PoolSlice(POOL, 2, (offer("gpu-0", 1),)),)
    assert pods_by_device(claims.held(answer, NODE)) == [(uuid(1), "a")]
    feed.slices += (PoolSlice(POOL, 3),)
    assert pods_by_device(claims.held(answer, NODE)) == [(uuid(1), "a")], "a held device does not change"
    later = decode_list(list_answer([pod("c", claim("z", "gpu-1"))]))
    assert reasons(claims.held(later, NODE)) == [("unknown_claim_device", "gpu.nvidia.com/node-a/gpu-1")]
    assert reasons(claims.held(answer, NODE)) == [("unknown_claim_device", "gpu.nvidia.com/node-a/gpu-0")]


# Ids and claims together, from a kubelet


def test_ids_and_claims_of_a_kubelet(kubelet: FaultyKubelet, make_source: MakeSource) -> None:
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
    kubelet: FaultyKubelet, make_source: MakeSource
) -> None:
    source = make_source(kubelet.socket, claims=DraClaims(feed_of(*OFFERED)))
    kubelet.pods = (pod("a", claim("extended", "gpu-2"), ids=[uuid(2)]), pod("b", claim("extended", "gpu-2")))
    first, second = source.assignments(NODE).assignments
    assert (first.device, first.holder, first.share) == (uuid(2), holder("a"), 1.0)
    assert (second.device, second.holder, second.share) == (uuid(2), holder("b"), None)
    assert first.attributes == second.attributes != ()
