"""Pods, owners, ResourceSlices and EndpointSlices, reduced to records."""

from __future__ import annotations

from contextlib import suppress
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.holders.annotations import is_read, requests_gpu
from podgpu.kube.objects import (
    NVIDIA_DRIVER,
    ContainerRecord,
    EndpointRecord,
    EndpointSliceRecord,
    PodOwner,
    PodRecord,
    PoolSlice,
    SliceDevice,
    SlicePort,
    choose_version,
    current_devices,
    metrics_urls,
    parse_endpoint_slice,
    parse_owner,
    parse_pod,
    parse_quantity,
    parse_slice,
)

ID = "3f" * 32

POD: dict[str, Any] = {
    "metadata": {
        "name": "train-0",
        "namespace": "research",
        "uid": "c3a3a1f0-0000-4000-8000-000000000001",
        "labels": {"team": "vision", "app": "train"},
        "annotations": {
            "hami.io/vgpu-devices-allocated": ";",
            "tencent.com/predicate-gpu-idx-0": "1",
            "tencent.com/gpu-assigned": "true",
            "tencent.com/predicate-time": "1700000000000000000",
            "kubectl.kubernetes.io/last-applied-configuration": "x" * 10_000,
        },
        "managedFields": [{"manager": "kubectl", "fieldsV1": {"f:x": {}}}],
    },
    "spec": {
        "nodeName": "gpu-1",
        "initContainers": [{"name": "fetch"}],
        "containers": [
            {
                "name": "main",
                "image": "registry.example/train:1",
                "resources": {
                    "requests": {"cpu": "4", "memory": "8Gi", "tencent.com/vcuda-core": "20", "example.com/a": "1"},
                    "limits": {"memory": "8Gi", "tencent.com/vcuda-core": "50"},
                },
            },
            {"name": "sidecar"},
        ],
    },
    "status": {
        "phase": "Running",
        "initContainerStatuses": [
            {"name": "fetch", "containerID": "docker://aa", "state": {"terminated": {"exitCode": 0}}}
        ],
        "containerStatuses": [
            {"name": "sidecar", "state": {"waiting": {"reason": "ContainerCreating"}}},
            {"name": "main", "containerID": f"containerd://{ID}", "state": {"running": {}}},
        ],
    },
}


def pod_of(**changes: Any) -> dict[str, Any]:
    """POD with parts of metadata, spec and status replaced."""
    return {part: {**POD[part], **changes.get(part, {})} for part in POD}


def parsed(**changes: Any) -> PodRecord:
    record = parse_pod(pod_of(**changes), is_read)
    assert record is not None
    return record


def test_what_is_kept() -> None:
    assert parse_pod(POD, is_read) == PodRecord(
        "research",
        "train-0",
        "c3a3a1f0-0000-4000-8000-000000000001",
        "gpu-1",
        "Running",
        (("app", "train"), ("team", "vision")),
        (
            ("hami.io/vgpu-devices-allocated", ";"),
            ("tencent.com/gpu-assigned", "true"),
            ("tencent.com/predicate-gpu-idx-0", "1"),
        ),
        (ContainerRecord("fetch", (), "aa", finished=True),),
        (
            ContainerRecord("main", (("example.com/a", "1"), ("tencent.com/vcuda-core", "50")), ID),
            ContainerRecord("sidecar"),
        ),
    )


@pytest.mark.parametrize(
    ("container_id", "expected"),
    [
        (f"containerd://{ID}", ID),
        (f"cri-o://{ID}", ID),
        (f"docker://{ID}", ID),
        (ID, ID),
        ("", ""),
    ],
)
def test_container_ids_without_the_runtime(container_id: object, expected: str) -> None:
    record = parsed(status={"containerStatuses": [{"name": "main", "containerID": container_id}]})
    assert record.containers[0].container_id == expected


def test_a_static_pod_goes_by_the_uid_the_kubelet_gave_it() -> None:
    digest = "c63e0a9c87dc112faa66d5e798e17fdd"
    record = parsed(metadata={"annotations": {"kubernetes.io/config.mirror": digest}})
    assert (record.uid, record.api_uid, record.annotations) == (digest, POD["metadata"]["uid"], ())


@pytest.mark.parametrize(
    ("state", "finished"),
    [
        ({"terminated": {"exitCode": 0}}, True),
        ({"terminated": {"exitCode": 1}}, False),
        ({"running": {}}, False),
        ({"waiting": {}}, False),
        ({"terminated": None}, False),
        (None, False),
    ],
)
def test_only_init_containers_finish(state: object, finished: bool) -> None:
    record = parsed(
        status={
            "initContainerStatuses": [{"name": "fetch", "state": state}],
            "containerStatuses": [{"name": "main", "state": state}],
        }
    )
    assert (record.init_containers[0].finished, record.containers[0].finished) == (finished, False)


@pytest.mark.parametrize(
    ("requests", "asks"),
    [
        ({"nvidia.com/gpu": "1"}, True),
        ({"nvidia.com/gpu": 1}, True),
        ({"nvidia.com/gpu.shared": "1"}, True),
        ({"nvidia.com/gpumem": "3000"}, True),
        ({"nvidia.com/mig-1g.5gb": "1"}, True),
        ({"koordinator.sh/gpu-core": "50"}, True),
        ({"tencent.com/vcuda-core": "20"}, True),
        ({"volcano.sh/vgpu-number": "1"}, True),
        ({"nvidia.com/gpu": "0"}, False),
        ({"nvidia.com/gpu": "many"}, False),
        ({"nvidia.com/priority": "1"}, False),
        ({"koordinator.sh/rdma": "100"}, False),
        ({"cpu": "4"}, False),
        ({}, False),
        (None, False),
    ],
)
def test_who_asks_for_a_gpu(requests: object, asks: bool) -> None:
    container = parsed(spec={"containers": [{"name": "main", "resources": {"limits": requests}}]}).containers[0]
    assert requests_gpu(container) is asks


# Quantities


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("50", 50),
        ("+50", 50),
        ("50.5", Fraction(101, 2)),
        (".5", Fraction(1, 2)),
        ("5.", 5),
        ("500m", Fraction(1, 2)),
        ("50m", Fraction(1, 20)),
        ("3u", Fraction(3, 10**6)),
        ("3n", Fraction(3, 10**9)),
        ("8Gi", 8 * 2**30),
        ("1.5Gi", 3 * 2**29),
        ("85899345920", 85899345920),
        ("1Ki", 1024),
        ("1k", 1000),
        ("1M", 10**6),
        ("1E", 10**18),
        ("1Ei", 2**60),
        ("1e3", 1000),
        ("1E3", 1000),
        ("1e-3", Fraction(1, 1000)),
    ],
)
def test_quantities(text: str, expected: Fraction | int) -> None:
    assert parse_quantity(text) == expected


@pytest.mark.parametrize(
    "text", ["", ".", "-1", "m", "Gi", "1K", "1gi", "1 Gi", "1Gi ", "0x10", "1e", "1e999", "1_0", "٣", "9" * 31, "1\n"]
)
def test_what_is_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity(text)


@given(st.text(max_size=40))
def test_any_text_is_a_quantity_or_a_value_error(text: str) -> None:
    with suppress(ValueError):
        assert parse_quantity(text) >= 0


def owned_pod(*owners: Any, **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": "p", "namespace": "n", "labels": labels, "ownerReferences": list(owners)}}


def owner(kind: str, name: str, controller: Any = True) -> dict[str, Any]:
    return {"kind": kind, "name": name, "uid": "u", "controller": controller}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (owned_pod(owner("StatefulSet", "db")), ("StatefulSet", "db")),
        (owned_pod(owner("Job", "train")), ("Job", "train")),
        (owned_pod(owner("ReplicaSet", "chat-7d9c"), **{"pod-template-hash": "7d9c"}), ("Deployment", "chat")),
        (owned_pod(owner("ReplicaSet", "chat-7d9c")), ("ReplicaSet", "chat-7d9c")),
        (owned_pod(owner("ReplicaSet", "chat-7d9c"), **{"pod-template-hash": "other"}), ("ReplicaSet", "chat-7d9c")),
        (owned_pod(owner("ReplicaSet", "-7d9c"), **{"pod-template-hash": "7d9c"}), ("ReplicaSet", "-7d9c")),
        (owned_pod(owner("Job", "chat-7d9c"), **{"pod-template-hash": "7d9c"}), ("Job", "chat-7d9c")),
        (owned_pod(owner("A", "a", None), owner("B", "b", False), owner("C", "c")), ("C", "c")),
    ],
)
def test_owners(body: dict[str, Any], expected: tuple[str, str]) -> None:
    assert parse_owner(body) == PodOwner("n", "p", *expected)


@pytest.mark.parametrize(
    "body",
    [{"metadata": {"name": "p"}}, owned_pod(), owned_pod(owner("A", "a", False))],
)
def test_without_a_controller_there_is_none(body: dict[str, Any]) -> None:
    assert parse_owner(body) is None


GPU = "GPU-00000000-1111-2222-3333-444444444444"
MIG = "MIG-aaaaaaaa-1111-2222-3333-444444444444"

WHOLE = {
    "type": {"string": "gpu"},
    "uuid": {"string": GPU},
    "minor": {"int": 3},
    "productName": {"string": "NVIDIA A100-SXM4-40GB"},
    "cudaComputeCapability": {"version": "8.0.0"},
    "resource.kubernetes.io/pcieRoot": {"string": "pci0000:00"},
}
PART = {
    "type": {"string": "mig"},
    "uuid": {"string": MIG},
    "parentUUID": {"string": GPU},
    "profile": {"string": "1g.5gb"},
}
NESTED = {"v1": False, "v1beta2": False, "v1beta1": True, "v1alpha3": True}
"""API version -> whether it has a device's attributes under `basic`."""


def offered(name: str, attributes: dict[str, Any], nested: bool = False) -> dict[str, Any]:
    body = {"attributes": attributes, "capacity": {"memory": {"value": "40Gi"}}}
    return {"name": name, "basic": body} if nested else {"name": name} | body


def slice_of(*devices: dict[str, Any], driver: str = NVIDIA_DRIVER, **pool: Any) -> dict[str, Any]:
    said = {"name": "node-a", "generation": 1, "resourceSliceCount": 1} | pool
    return {"metadata": {"name": "node-a-x7k2p"}, "spec": {"driver": driver, "pool": said, "devices": list(devices)}}


def devices_of(body: dict[str, Any]) -> tuple[SliceDevice, ...]:
    found = parse_slice(body)
    assert found is not None
    return found.devices


# One slice


@pytest.mark.parametrize("version", NESTED)
def test_devices_in_every_api_version(version: str) -> None:
    nested = NESTED[version]
    body = slice_of(offered("gpu-3", WHOLE, nested), offered("gpu-3-mig-1g5gb-19-0", PART, nested), generation=7)
    assert parse_slice(body) == PoolSlice(
        NVIDIA_DRIVER,
        "node-a",
        7,
        (
            SliceDevice(NVIDIA_DRIVER, "node-a", "gpu-3", "gpu", GPU, minor=3),
            SliceDevice(NVIDIA_DRIVER, "node-a", "gpu-3-mig-1g5gb-19-0", "mig", MIG, GPU, "1g.5gb"),
        ),
    )


@pytest.mark.parametrize("nested", [False, True])
def test_attributes_with_their_domain(nested: bool) -> None:
    qualified = {f"{NVIDIA_DRIVER}/{name}": value for name, value in PART.items()}
    assert devices_of(slice_of(offered("a", qualified, nested))) == devices_of(slice_of(offered("a", PART, nested)))


def test_a_mig_device_that_is_made_when_claimed_has_no_uuid() -> None:
    attributes = {name: value for name, value in PART.items() if name != "uuid"}
    for unsaid in ({}, {"uuid": None}):
        (device,) = devices_of(slice_of(offered("gpu-3-mig-1g5gb-19-0", attributes | unsaid)))
        assert (device.type, device.uuid, device.parent_uuid, device.profile) == ("mig", "", GPU, "1g.5gb")


@pytest.mark.parametrize("driver", ["compute-domain.nvidia.com", "gpu.intel.com", "", None])
def test_slices_of_other_drivers_are_left_out(driver: Any) -> None:
    assert parse_slice(slice_of(offered("gpu-3", WHOLE), driver=driver)) is None


def test_a_slice_that_holds_only_counters_is_still_one_of_its_generation() -> None:
    body = slice_of()
    del body["spec"]["devices"]
    assert parse_slice(body) == PoolSlice(NVIDIA_DRIVER, "node-a", 1)


# Generations


def device(name: str, pool: str = "node-a", uuid: str = GPU) -> SliceDevice:
    return SliceDevice(NVIDIA_DRIVER, pool, name, "gpu", uuid)


def part(generation: int, *devices: SliceDevice, pool: str = "node-a") -> PoolSlice:
    return PoolSlice(NVIDIA_DRIVER, pool, generation, devices)


def test_an_older_generation_is_forgotten_at_once_even_where_the_new_one_is_not_complete() -> None:
    old, new = part(1, device("gpu-0"), device("gpu-1")), part(2, device("gpu-0", uuid=MIG))
    for slices in ([old, new], [new, old]):
        assert current_devices(slices) == {(NVIDIA_DRIVER, "node-a"): (device("gpu-0", uuid=MIG),)}


# Which version to ask for


def group(*versions: str) -> dict[str, Any]:
    listed = [{"groupVersion": f"resource.k8s.io/{one}", "version": one} for one in versions]
    return {"kind": "APIGroup", "name": "resource.k8s.io", "versions": listed, "preferredVersion": listed[0]}


@pytest.mark.parametrize(
    ("versions", "chosen"),
    [
        (["v1", "v1beta2", "v1beta1"], "v1"),
        (["v1beta1", "v1beta2", "v1"], "v1"),
        (["v1beta1", "v1beta2"], "v1beta2"),
        (["v1beta1"], "v1beta1"),
        (["v1alpha3", "v1beta1"], "v1beta1"),
        (["v1alpha3"], "v1alpha3"),
        (["v1alpha2"], None),
        (["v2"], None),
    ],
)
def test_the_newest_version_that_both_know(versions: list[str], chosen: str | None) -> None:
    assert choose_version(group(*versions)) == chosen


def endpoint(address: str, uid: str = "", ready: bool | None = True, **more: Any) -> dict[str, Any]:
    target = {"targetRef": {"kind": "Pod", "name": f"pod-{uid}", "uid": uid}} if uid else {}
    return {"addresses": [address], "conditions": {"ready": ready}, "nodeName": "node-a"} | target | more


def endpoint_slice(*endpoints: dict[str, Any], ports: Any = None, name: str = "s-1", **more: Any) -> dict[str, Any]:
    labels = {"kubernetes.io/service-name": "podgpu"}
    listed = [{"name": "metrics", "port": 9400, "protocol": "TCP"}] if ports is None else ports
    metadata = {"name": name, "namespace": "monitoring", "labels": labels}
    return {"metadata": metadata, "addressType": "IPv4", "endpoints": list(endpoints), "ports": listed} | more


def urls(*slices: dict[str, Any], https: bool = False) -> tuple[str, ...]:
    return metrics_urls(map(parse_endpoint_slice, slices), https=https).urls


def test_a_slice() -> None:
    assert parse_endpoint_slice(endpoint_slice(endpoint("10.0.0.1", "u1"))) == EndpointSliceRecord(
        "monitoring",
        "podgpu",
        (SlicePort("metrics", 9400, False),),
        (EndpointRecord("10.0.0.1", "u1", "pod-u1", "node-a"),),
    )


def test_endpoints_are_asked_ready_or_not() -> None:
    body = endpoint_slice(
        endpoint("10.0.0.1", "a"),
        endpoint("10.0.0.2", "b", ready=False),
        endpoint("10.0.0.3", "c", ready=None),
        {"addresses": ["10.0.0.4"]},
    )
    assert urls(body) == tuple(f"http://10.0.0.{n}:9400/metrics" for n in (1, 2, 3, 4))


def test_a_pod_of_both_families_and_two_services_is_asked_once() -> None:
    four = endpoint_slice(endpoint("10.0.0.1", "u1"), endpoint("10.0.0.2", "u2"), name="a")
    six = endpoint_slice(endpoint("fd00::1", "u1"), endpoint("fd00::3", "u3"), name="b", addressType="IPv6")
    headless = endpoint_slice(endpoint("10.0.0.2", "u2"), name="c")
    expected = ("http://10.0.0.1:9400/metrics", "http://10.0.0.2:9400/metrics", "http://[fd00::3]:9400/metrics")
    assert urls(four, six, headless) == expected
    assert urls(headless, six, four) == expected


METRICS = {"name": "metrics", "port": 9400}
WEB = {"name": "web", "port": 8080}


@pytest.mark.parametrize(
    ("ports", "chosen"),
    [
        ([METRICS, WEB], 9400),
        ([WEB], 8080),
        ([{"port": 8080}], 8080),
        ([{"name": "", "port": 8080}], 8080),
        ([METRICS | {"protocol": "UDP"}, WEB], 8080),
    ],
)
def test_the_port(ports: list[dict[str, Any]], chosen: int) -> None:
    assert urls(endpoint_slice(endpoint("h"), ports=ports)) == (f"http://h:{chosen}/metrics",)


@pytest.mark.parametrize("ports", [[WEB, {"name": "x", "port": 1}], []])
def test_a_service_without_the_port(ports: list[dict[str, Any]]) -> None:
    record = parse_endpoint_slice(endpoint_slice(endpoint("a"), endpoint("b"), ports=ports))
    found = metrics_urls([record, record])
    assert found.urls == ()
    (problem,) = found.problems
    assert "the Service monitoring/podgpu has no port named metrics" in problem


@pytest.mark.parametrize(
    ("port", "https", "scheme"),
    [
        ({"name": "https-metrics", "port": 1}, False, "https"),
        ({"name": "metrics", "port": 1, "appProtocol": "HTTPS"}, False, "https"),
        ({"name": "metrics", "port": 1, "appProtocol": "http"}, False, "http"),
        ({"name": "metrics", "port": 1}, True, "https"),
    ],
)
def test_https(port: dict[str, Any], https: bool, scheme: str) -> None:
    assert urls(endpoint_slice(endpoint("h"), ports=[port]), https=https) == (f"{scheme}://h:1/metrics",)


@pytest.mark.parametrize("address", ["", "a/b", "a@b", "a:80", "a b", "a?x", "a#x", "fe80::1%eth0", "ä"])
def test_an_address_cannot_be_more_than_one(address: Any) -> None:
    assert urls(endpoint_slice(endpoint(address))) == ()
