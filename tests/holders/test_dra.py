"""Tests GPUs held through ResourceClaims: slices, the driver's checkpoint, adminAccess and
shares.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from podgpu.kube.config import ApiConfig
from podgpu.labs.simulate.simulated_kubelet import SimulatedPod
from podgpu.model import (
    Allocation,
    Device,
    Pairs,
    Unmapped,
    Workload,
)
from podgpu.node.holders.dra import (
    NVIDIA_DRIVER,
    ClaimReader,
    DraClaims,
    DriverCheckpoint,
    PoolSlice,
    SliceDevice,
    parse_driver_checkpoint,
    parse_slice,
)
from podgpu.node.holders.kubelet import KubeletAllocation, decode_list
from podgpu.node.holders.reader import merge
from tests.holders.devices import gpu, mig_uuid, uuid
from tests.kube.api_server import SimulatedApiServer
from tests.nodes.clock import FakeClock
from tests.simulated_kubelet import (
    ClaimingPod,
    FaultyKubelet,
    SimulatedClaim,
    SimulatedDevice,
    list_answer,
)

MakeSource = Callable[..., KubeletAllocation]
POOL = "node-a"


def instance(number: int, gi_id: int, profile: str, *mig_uuids: str) -> Device:
    parent = gpu(number)
    return Device(
        number,
        parent.uuid,
        parent.pci_bus_id,
        parent.model,
        number,
        True,
        gi_id,
        profile,
        mig_uuids,
    )


NODE = (
    *(gpu(number) for number in range(4)),
    instance(3, 1, "3g.20gb", mig_uuid("a"), mig_uuid("b")),
    instance(3, 11, "1g.5gb", mig_uuid("c")),
    instance(3, 12, "1g.5gb", mig_uuid("d")),
    instance(3, 5, "2g.10gb", mig_uuid("e")),
)


def offer(name: str, number: int) -> SliceDevice:
    return SliceDevice(name, uuid(number))


# The numbers in device names are minors, which may differ from the driver's indices.
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
    """A store of ResourceSlices that tests set."""

    slices: tuple[PoolSlice, ...] = ()
    synced: bool = True

    def items(self) -> tuple[PoolSlice, ...]:
        return self.slices


def feed_of(*devices: SliceDevice) -> Any:
    return GivenSlices((PoolSlice(POOL, 1, devices),))


def claim(
    name: str, *devices: str, pool: str = POOL, driver: str = NVIDIA_DRIVER
) -> SimulatedClaim:
    cdi = "k8s.gpu.nvidia.com/device="
    return SimulatedClaim(
        "team", name, tuple(SimulatedDevice(driver, pool, one, (cdi + one,)) for one in devices)
    )


def pod(name: str, *claims: SimulatedClaim, **resources: list[str]) -> SimulatedPod:
    return ClaimingPod(
        "team", name, {"main": {"nvidia.com/gpu": resources.get("ids", [])}}, {"main": claims}
    )


def holder(name: str, container: str = "main") -> Workload:
    return Workload("team", name, container)


def held(*pods: SimulatedPod, feed: Any = None) -> Allocation:
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
            Unmapped(
                "kubelet",
                reason,
                f"gpu.nvidia.com/{device.pool}/{device.device}",
                "claim team/x",
                holder("a"),
            ),
        )
    )


def test_a_new_generation_of_the_pool_replaces_devices() -> None:
    feed = feed_of(offer("gpu-0", 0), offer("gpu-1", 1))
    claims, answer = (
        DraClaims(feed),
        decode_list(list_answer([pod("a", claim("x", "gpu-0")), pod("b")])),
    )
    assert pods_by_device(claims.held(answer, NODE)) == [(uuid(0), "a")]
    feed.slices += (PoolSlice(POOL, 2, (offer("gpu-0", 1),)),)
    assert pods_by_device(claims.held(answer, NODE)) == [(uuid(1), "a")]
    feed.slices += (PoolSlice(POOL, 3),)
    assert pods_by_device(claims.held(answer, NODE)) == [(uuid(1), "a")], (
        "the device of a held claim must not change"
    )
    later = decode_list(list_answer([pod("c", claim("z", "gpu-1"))]))
    assert reasons(claims.held(later, NODE)) == [
        ("unknown_claim_device", "gpu.nvidia.com/node-a/gpu-1")
    ]
    assert reasons(claims.held(answer, NODE)) == [
        ("unknown_claim_device", "gpu.nvidia.com/node-a/gpu-0")
    ]


def slice_of(*devices: dict[str, Any]) -> dict[str, Any]:
    spec = {
        "driver": NVIDIA_DRIVER,
        "pool": {"name": "node-a", "generation": 7},
        "devices": list(devices),
    }
    return {"metadata": {"name": "node-a-x7k2p"}, "spec": spec}


@pytest.mark.parametrize("name", ["uuid", f"{NVIDIA_DRIVER}/uuid"])
@pytest.mark.parametrize("nested", [False, True])
def test_resource_slice(nested: bool, name: str) -> None:
    """v1beta1 and older nest the attributes. MIG devices that are created when claimed have no
    UUID.
    """
    devices = []
    for device, attributes in (
        ("gpu-3", {name: {"string": uuid(3)}}),
        ("mig", {"type": {"string": "mig"}}),
    ):
        body = {
            "attributes": attributes,
            "capacity": {name.replace("uuid", "memory"): {"value": "80Gi"}},
        }
        devices.append({"name": device, "basic": body} if nested else {"name": device} | body)
    memory = (("memory", "80Gi"),)
    expected = (SliceDevice("gpu-3", uuid(3), memory), SliceDevice("mig", "", memory))
    assert parse_slice(slice_of(*devices)) == PoolSlice("node-a", 7, expected)


# A kubelet that lists both device ids and claims


def test_ids_and_claims_of_a_kubelet(kubelet: FaultyKubelet, make_source: MakeSource) -> None:
    source = make_source(kubelet.socket, claims=DraClaims(feed_of(*OFFERED)))
    kubelet.pods = (
        pod("claims", claim("one", "gpu-2"), claim("bad", "gpu-7")),
        pod("plain", ids=[uuid(0), uuid(9)]),
        pod("small", claim("mig", "small-c")),
    )
    allocation = source.assignments(NODE)
    assert pods_by_device(allocation) == [
        (uuid(0), "plain"),
        (uuid(2), "claims"),
        (f"{uuid(3)}/gi11", "small"),
    ]
    assert reasons(allocation) == [
        ("unknown_device", uuid(9)),
        ("unknown_claim_device", "gpu.nvidia.com/node-a/gpu-7"),
    ]


def test_a_gpu_listed_both_ways_is_held_once_with_share_and_labels(
    kubelet: FaultyKubelet, make_source: MakeSource
) -> None:
    source = make_source(kubelet.socket, claims=DraClaims(feed_of(*OFFERED)))
    kubelet.pods = (
        pod("a", claim("extended", "gpu-2"), ids=[uuid(2)]),
        pod("b", claim("extended", "gpu-2")),
    )
    first, second = source.assignments(NODE).assignments
    assert (first.device, first.holder, first.share) == (uuid(2), holder("a"), 1.0)
    assert (second.device, second.holder, second.share) == (uuid(2), holder("b"), None)
    assert first.attributes == second.attributes != ()


SMALL = [f"gpu-3-mig-1g5gb-19-{place}" for place in range(2)]
DYNAMIC = feed_of(*map(SliceDevice, SMALL))
"""MIG devices that the driver creates for a claim. Only the driver's checkpoint has their UUIDs."""


def result(device: str, admin: bool | None = None, **consumed: str) -> dict[str, Any]:
    """Returns an element of a claim's `status.allocation.devices.results`."""
    found: dict[str, Any] = {
        "request": "gpus",
        "driver": NVIDIA_DRIVER,
        "pool": POOL,
        "device": device,
    }
    if consumed:
        found |= {"shareID": "a671734a-e8e5-11e4-8fde-42010af09327", "consumedCapacity": consumed}
    return found if admin is None else found | {"adminAccess": admin}


def status(*results: dict[str, Any]) -> dict[str, Any]:
    return {"allocation": {"devices": {"results": list(results)}}}


def prepared_device(device: str, live: str) -> dict[str, Any]:
    """Returns a device in the format of k8s-dra-driver-gpu 25.12's checkpoint."""
    named = {"Requests": ["gpus"], "PoolName": POOL, "DeviceName": device, "CDIDeviceIDs": ["x"]}
    if live.startswith("GPU-"):
        return {"gpu": {"info": {"uuid": live}, "device": named}, "mig": None}
    concrete = {"parentMinor": 3, "giId": 11, "ciId": 0, "migUUID": live, "parentUUID": uuid(3)}
    return {"gpu": None, "mig": {"concrete": concrete, "device": named}}


def prepared(
    name: str, *devices: dict[str, Any], admin: bool | None = None, **consumed: str
) -> Any:
    names = [(one["gpu"] or one["mig"])["device"]["DeviceName"] for one in devices]
    return {
        "checkpointState": "PrepareCompleted",
        "status": status(*(result(each, admin, **consumed) for each in names)),
        "preparedDevices": [{"devices": list(devices), "configState": {}}],
        "name": name,
        "namespace": "team",
    }


def checkpoint(*claims: Any) -> str:
    """Returns a checkpoint file. The driver also writes version 1, without names of claims, for
    downgrades.
    """
    by_uid = {f"uid-{number}": one for number, one in enumerate(claims)}
    second = {"checksum": 2, "preparedClaims": by_uid, "nodeBootID": "x"}
    return json.dumps({"checksum": 1, "v1": {"preparedClaims": {}}, "v2": second})


@pytest.fixture
def file(folder: Path) -> Path:
    return folder / "checkpoint.json"


# Slices that are deleted


@pytest.mark.fault(
    "the DRA driver does not run: its ResourceSlices are deleted while its claims are held",
    "the devices of held claims stay known: the pod keeps the GPU and its labels",
)
def test_holders_stay_while_the_driver_is_away(
    kubelet: FaultyKubelet, make_source: MakeSource
) -> None:
    feed = feed_of(*OFFERED)
    whole = feed.slices
    source = make_source(kubelet.socket, claims=DraClaims(feed))
    kubelet.pods = (pod("a", claim("x", "gpu-0")), pod("b", claim("y", "small-c")))
    before = source.assignments(NODE)
    assert pods_by_device(before) == [(uuid(1), "a"), (f"{uuid(3)}/gi11", "b")]
    for feed.slices, feed.synced in (((), True), ((), False), ((PoolSlice(POOL, 2, ()),), True)):
        assert source.assignments(NODE) == before
    feed.slices, feed.synced = (), True
    held, kubelet.pods = kubelet.pods, ()
    source.assignments(NODE)
    kubelet.pods = (*held, pod("c", claim("z", "gpu-2", pool="node-b")))
    late = source.assignments(NODE)
    assert pods_by_device(late) == pods_by_device(before), (
        "a single empty answer of the kubelet must have no effect"
    )
    assert reasons(late) == [("unknown_pool", "gpu.nvidia.com/node-b/gpu-2")]
    feed.slices = whole
    assert len(source.assignments(NODE).assignments) == 2


# The driver's checkpoint


def test_the_checkpoint_distinguishes_instances_of_one_profile(
    kubelet: FaultyKubelet, make_source: MakeSource, file: Path
) -> None:
    source = make_source(
        kubelet.socket, claims=DraClaims(DYNAMIC, checkpoint=DriverCheckpoint(str(file)))
    )
    kubelet.pods = tuple(
        pod(name, claim(name, device)) for name, device in zip("ab", SMALL, strict=True)
    )
    assert {reason for reason, _ in reasons(source.assignments(NODE))} == {
        "claim_device_without_uuid"
    }
    made = [
        prepared_device(device, mig_uuid(letter))
        for device, letter in zip(SMALL, "dc", strict=True)
    ]
    file.write_text(checkpoint(prepared("a", made[0]), prepared("b", made[1])))
    found = source.assignments(NODE)
    assert pods_by_device(found) == [(f"{uuid(3)}/gi11", "b"), (f"{uuid(3)}/gi12", "a")]
    assert dict(found.assignments[0].attributes)["dra_mig_device_uuid"] == mig_uuid("c")
    assert dict(found.assignments[0].attributes)["dra_mig_profile"] == "1g.5gb"


@pytest.mark.parametrize("part", [{"created": {"uuid": "MIG-1"}}, {"info": {"uuid": "MIG-1"}}])
def test_checkpoints_of_older_drivers(part: dict[str, Any]) -> None:
    device = {"gpu": None, "mig": {**part, "device": {"PoolName": POOL, "DeviceName": "m"}}}
    old = {"v2": {"preparedClaims": {"uid": {"preparedDevices": [{"devices": [device]}]}}}}
    assert parse_driver_checkpoint(json.dumps(old).encode(), "checkpoint.json").uuids == {
        (POOL, "m"): "MIG-1"
    }


def test_without_the_api_server_the_checkpoint_is_enough(
    kubelet: FaultyKubelet, make_source: MakeSource, file: Path
) -> None:
    file.write_text(checkpoint(prepared("x", prepared_device("gpu-0", uuid(1)))))
    source = make_source(
        kubelet.socket, claims=DraClaims(None, checkpoint=DriverCheckpoint(str(file)))
    )
    kubelet.pods = (pod("a", claim("x", "gpu-0")), pod("b", claim("y", "gpu-1")))
    found = source.assignments(NODE)
    assert pods_by_device(found) == [(uuid(1), "a")]
    assert reasons(found) == [("slices_not_synced", "gpu.nvidia.com/node-a/gpu-1")]


@pytest.mark.fault(
    "the DRA driver's checkpoint is half written, or replaced while it is read",
    "its last content is kept and the error is logged once; it is read again at every reading",
)
def test_a_malformed_checkpoint_keeps_the_last_content(
    kubelet: FaultyKubelet, make_source: MakeSource, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = checkpoint(
        *(
            prepared(n, prepared_device(d, mig_uuid(x)))
            for n, d, x in zip("ab", SMALL, "cd", strict=True)
        )
    )
    file.write_text(whole)
    source = make_source(
        kubelet.socket, claims=DraClaims(DYNAMIC, checkpoint=DriverCheckpoint(str(file)))
    )
    kubelet.pods = tuple(
        pod(name, claim(name, device)) for name, device in zip("ab", SMALL, strict=True)
    )
    before = source.assignments(NODE)
    assert len(before.assignments) == 2
    for bad in (whole[:200], "", "[]", '{"v2": {"preparedClaims": [1]}}'):
        file.write_text(bad)
        assert source.assignments(NODE) == before
    (logged,) = (message for message in caplog.messages if "checkpoint" in message)
    assert str(file) in logged
    new = file.with_suffix(".new")
    new.write_text(checkpoint(prepared("a", prepared_device(SMALL[0], mig_uuid("c")))))
    os.replace(new, file)
    assert pods_by_device(source.assignments(NODE)) == [(f"{uuid(3)}/gi11", "a")]


# Claims with adminAccess


def claim_object(name: str, *results: dict[str, Any]) -> dict[str, Any]:
    metadata = {"namespace": "team", "name": name}
    return {"metadata": metadata, "spec": {"devices": {"requests": []}}, "status": status(*results)}


@pytest.fixture
def api() -> Iterator[SimulatedApiServer]:
    with SimulatedApiServer() as server:
        yield server


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_each_claim_is_read_once(
    kubelet: FaultyKubelet, make_source: MakeSource, api: SimulatedApiServer, version: str
) -> None:
    api.resource_api_versions = (version,)
    api.put(
        "resourceclaims",
        claim_object("all", result("gpu-0", True)),
        claim_object("mine", result("gpu-0")),
    )
    reader = ClaimReader(ApiConfig(server=api.url, origin="the test"), FakeClock().monotonic)
    source = make_source(kubelet.socket, claims=DraClaims(feed_of(*OFFERED), reader=reader))
    kubelet.pods = (pod("monitor", claim("all", "gpu-0")), pod("train", claim("mine", "gpu-0")))
    for _ in range(3):
        assert pods_by_device(source.assignments(NODE)) == [(uuid(1), "train")]
    requests = [one.path for one in api.requests if "resourceclaims" in one.path]
    assert len(requests) == 2, requests


def test_a_forbidden_read_keeps_all_holders(
    kubelet: FaultyKubelet,
    make_source: MakeSource,
    api: SimulatedApiServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = FakeClock()
    api.put("resourceclaims", claim_object("all", result("gpu-0", True)))
    api.refusal = (403, "resourceclaims is forbidden")
    reader = ClaimReader(ApiConfig(server=api.url, origin="the test"), clock.monotonic)
    source = make_source(kubelet.socket, claims=DraClaims(feed_of(*OFFERED), reader=reader))
    kubelet.pods = (pod("monitor", claim("all", "gpu-0")),)
    for seconds in (0.0, 59.0, 2.0, 58.0):
        clock.advance(seconds)
        assert pods_by_device(source.assignments(NODE)) == [(uuid(1), "monitor")]
    assert len([one for one in caplog.messages if "cannot read resourceclaims" in one]) == 1
    api.refusal = None
    clock.advance(81.0)
    assert source.assignments(NODE).assignments == ()


@pytest.mark.fault(
    (
        "the API server is unavailable when podgpu starts, and a monitoring pod has claimed the "
        "GPUs "
        "with adminAccess"
    ),
    "claims are not mapped until adminAccess is known, so the monitor never becomes a holder",
)
def test_a_monitor_is_no_holder_if_the_api_server_starts_late(
    kubelet: FaultyKubelet, make_source: MakeSource, api: SimulatedApiServer
) -> None:
    clock, feed = FakeClock(), feed_of(*OFFERED)
    feed.synced, api.refusal = False, (503, "starting")
    api.put(
        "resourceclaims",
        claim_object("all", result("gpu-0", True)),
        claim_object("mine", result("gpu-0")),
    )
    reader = ClaimReader(ApiConfig(server=api.url, origin="the test"), clock.monotonic)
    source = make_source(kubelet.socket, claims=DraClaims(feed, reader=reader))
    kubelet.pods = (pod("monitor", claim("all", "gpu-0")), pod("train", claim("mine", "gpu-0")))
    assert source.assignments(NODE).assignments == ()
    feed.synced, api.refusal = True, None
    assert pods_by_device(source.assignments(NODE)) == [(uuid(1), "train")]


def test_a_claim_that_was_allocated_again_is_read_again(
    kubelet: FaultyKubelet, make_source: MakeSource, api: SimulatedApiServer
) -> None:
    """A claim that is not made from a template keeps its name when it is allocated to other
    pods.
    """
    reader = ClaimReader(ApiConfig(server=api.url, origin="the test"), FakeClock().monotonic)
    source = make_source(kubelet.socket, claims=DraClaims(feed_of(*OFFERED), reader=reader))
    for name, device, memory in (
        ("a-1", "gpu-0", "20Gi"),
        ("a-2", "gpu-0", "40Gi"),
        ("a-2", "gpu-1", "60Gi"),
    ):
        api.put("resourceclaims", claim_object("named", result(device, memory=memory)))
        kubelet.pods = (pod(name, claim("named", device)),)
        assert shares(source) == [(name, int(memory[:2]) / 80)]


@pytest.mark.fault(
    "the API server is upgraded and has another version of DRA",
    "the next claim is read in the new version, including its adminAccess",
)
def test_an_upgraded_api_server(
    kubelet: FaultyKubelet, make_source: MakeSource, api: SimulatedApiServer
) -> None:
    """As from kube-apiserver 1.33 to 1.34. Requests with a removed version or for a deleted claim
    return 404.
    """
    api.resource_api_versions = ("v1beta1",)
    claims = (
        claim_object(name, result("gpu-0", admin))
        for name, admin in (("all", True), ("mine", False))
    )
    api.put("resourceclaims", *claims)
    reader = ClaimReader(ApiConfig(server=api.url, origin="the test"), FakeClock().monotonic)
    source = make_source(kubelet.socket, claims=DraClaims(feed_of(*OFFERED), reader=reader))
    kubelet.pods = (pod("train", claim("mine", "gpu-0")),)
    assert pods_by_device(source.assignments(NODE)) == [(uuid(1), "train")]
    api.resource_api_versions = ("v1",)
    kubelet.pods = (*kubelet.pods, pod("monitor", claim("all", "gpu-0")))
    assert pods_by_device(source.assignments(NODE)) == [(uuid(1), "train")]


# Consumable capacity


MEMORY = (("memory", "80Gi"),)
SHARES = (("memory", "80Gi"), ("shares", "10"))
NODE_WITH_MEMORY = tuple(replace(device, memory_bytes=80 * 2**30) for device in NODE)


@pytest.mark.parametrize(
    ("capacity", "consumed", "share"),
    [
        pytest.param(MEMORY, {"memory": "20Gi"}, 0.25, id="memory"),
        pytest.param(
            MEMORY,
            {"gpu.nvidia.com/memory": "8589934592"},
            0.1,
            id="with the driver's domain, in bytes",
        ),
        pytest.param(SHARES, {"shares": "3", "memory": "0"}, 0.3, id="shares"),
        pytest.param(
            SHARES, {"shares": "3", "memory": "60Gi"}, 0.3, id="shares come before memory"
        ),
        pytest.param(MEMORY, {"memory": "0"}, None, id="unlimited"),
        pytest.param((), {"memory": "20Gi"}, 0.25, id="memory by the GPU driver"),
        pytest.param((), {"shares": "3", "memory": "0"}, None, id="slice without the capacity"),
        pytest.param(MEMORY, {"memory": "200Gi"}, 1.0, id="outdated slice"),
        pytest.param(MEMORY, {"memory": "much"}, None, id="no quantity"),
    ],
)
def test_the_share_is_the_consumed_part_of_the_capacity(
    kubelet: FaultyKubelet,
    make_source: MakeSource,
    file: Path,
    capacity: Pairs,
    consumed: dict[str, Any],
    share: float | None,
) -> None:
    feed = feed_of(SliceDevice("gpu-0", uuid(1), capacity, is_shared=True))
    file.write_text(checkpoint(prepared("x", prepared_device("gpu-0", uuid(1)), **consumed)))
    source = make_source(kubelet.socket, claims=DraClaims(feed, DriverCheckpoint(str(file))))
    kubelet.pods = (pod("a", claim("x", "gpu-0")),)
    reading = source.assignments(NODE_WITH_MEMORY)
    (one,) = merge({"kubelet": reading}).assignments
    assert one.share == share, "the share of a sole holder without a limit is unknown"


def shares(source: KubeletAllocation) -> list[tuple[str, float | None]]:
    return [(one.holder.pod, one.share) for one in source.assignments(NODE_WITH_MEMORY).assignments]


def test_a_claim_of_several_containers_is_one_share(
    kubelet: FaultyKubelet, make_source: MakeSource, file: Path
) -> None:
    gpu_0 = prepared_device("gpu-0", uuid(1))
    monitor = prepared("all", gpu_0, admin=True, memory="80Gi")
    twice = prepared("twice", gpu_0, gpu_0, memory="10Gi")
    file.write_text(checkpoint(prepared("shared", gpu_0, memory="40Gi"), twice, monitor))
    source = make_source(
        kubelet.socket, claims=DraClaims(feed_of(*OFFERED), DriverCheckpoint(str(file)))
    )
    kubelet.pods = (
        pod("a", claim("shared", "gpu-0")),
        pod("b", claim("shared", "gpu-0"), claim("twice", "gpu-0", "gpu-0")),
        pod("monitor", claim("all", "gpu-0")),
    )
    assert shares(source) == [("a", 0.25), ("b", 0.5)]
