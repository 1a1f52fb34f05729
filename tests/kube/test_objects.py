"""Tests the conversion of pods, owners and EndpointSlices to records."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from podgpu.fleet.read.discover import merge_urls, parse_endpoint_slice
from podgpu.kube.objects import ContainerRecord, PodRecord, parse_owner, parse_pod, parse_quantity
from podgpu.model import WorkloadOwner
from podgpu.node.holders.annotations import is_read

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
                    "requests": {
                        "cpu": "4",
                        "memory": "8Gi",
                        "tencent.com/vcuda-core": "20",
                        "example.com/a": "1",
                    },
                    "limits": {"memory": "8Gi", "tencent.com/vcuda-core": "50"},
                },
            },
            {"name": "sidecar"},
        ],
    },
    "status": {
        "phase": "Running",
        "initContainerStatuses": [
            {
                "name": "fetch",
                "containerID": "docker://aa",
                "state": {"terminated": {"exitCode": 0}},
            }
        ],
        "containerStatuses": [
            {"name": "sidecar", "state": {"waiting": {"reason": "ContainerCreating"}}},
            {"name": "main", "containerID": f"containerd://{ID}", "state": {"running": {}}},
        ],
    },
}


def pod_of(**changes: Any) -> dict[str, Any]:
    """Returns POD with some fields of metadata, spec and status replaced."""
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


def test_a_static_pod_has_the_kubelets_uid() -> None:
    digest = "c63e0a9c87dc112faa66d5e798e17fdd"
    record = parsed(metadata={"annotations": {"kubernetes.io/config.mirror": digest}})
    assert (record.uid, record.api_uid, record.annotations) == (digest, POD["metadata"]["uid"], ())


@pytest.mark.parametrize(
    ("state", "finished"),
    [
        ({"terminated": {"exitCode": 0}}, True),
        ({"terminated": {"exitCode": 1}}, False),
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
    ("text", "expected"),
    [
        ("+50", 50),
        ("50.5", Fraction(101, 2)),
        (".5", Fraction(1, 2)),
        ("5.", 5),
        ("3n", Fraction(3, 10**9)),
        ("1.5Gi", 3 * 2**29),
        ("1k", 1000),
        ("1E", 10**18),
        ("1Ei", 2**60),
        ("1E3", 1000),
        ("1e-3", Fraction(1, 1000)),
    ],
)
def test_quantities(text: str, expected: Fraction | int) -> None:
    assert parse_quantity(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "-1",
        "m",
        "Gi",
        "1K",
        "1gi",
        "1 Gi",
        "1Gi ",
        "0x10",
        "1e",
        "1e999",
        "1_0",
        "٣",
        "1\n",
    ],
)
def test_what_is_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a quantity|Invalid literal"):
        parse_quantity(text)


def owned_pod(*owners: Any, **labels: str) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "p",
            "namespace": "n",
            "labels": labels,
            "ownerReferences": list(owners),
        }
    }


def owner(kind: str, name: str, controller: Any = True) -> dict[str, Any]:
    return {"kind": kind, "name": name, "uid": "u", "controller": controller}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            owned_pod(owner("ReplicaSet", "chat-7d9c"), **{"pod-template-hash": "7d9c"}),
            ("Deployment", "chat"),
        ),
        (
            owned_pod(owner("ReplicaSet", "chat-7d9c"), **{"pod-template-hash": "other"}),
            ("ReplicaSet", "chat-7d9c"),
        ),
        (
            owned_pod(owner("Job", "chat-7d9c"), **{"pod-template-hash": "7d9c"}),
            ("Job", "chat-7d9c"),
        ),
        (
            owned_pod(owner("Job", "run-w-0"), **{"jobset.sigs.k8s.io/jobset-name": "run"}),
            ("JobSet", "run"),
        ),
        (
            owned_pod(owner("StatefulSet", "llm-1"), **{"leaderworkerset.sigs.k8s.io/name": "llm"}),
            ("LeaderWorkerSet", "llm"),
        ),
        (
            owned_pod(
                owner("Job", "mpi-launcher"),
                **{
                    "training.kubeflow.org/job-name": "mpi",
                    "training.kubeflow.org/operator-name": "mpi-operator",
                },
            ),
            ("MPIJob", "mpi"),
        ),
        # Without the operator's name, the kind is unknown.
        (
            owned_pod(owner("Job", "mpi-launcher"), **{"training.kubeflow.org/job-name": "mpi"}),
            ("Job", "mpi-launcher"),
        ),
        (
            owned_pod(
                owner("PyTorchJob", "bert"),
                **{
                    "training.kubeflow.org/job-name": "other",
                    "training.kubeflow.org/operator-name": "pytorchjob-controller",
                },
            ),
            ("PyTorchJob", "bert"),
        ),
        (
            owned_pod(owner("RayCluster", "ray"), **{"ray.io/cluster": "other"}),
            ("RayCluster", "ray"),
        ),
        # A label of a user does not move a pod to another owner.
        (
            owned_pod(owner("StatefulSet", "db"), **{"jobset.sigs.k8s.io/jobset-name": "run"}),
            ("StatefulSet", "db"),
        ),
        (owned_pod(owner("A", "a", None), owner("B", "b", False), owner("C", "c")), ("C", "c")),
    ],
)
def test_owners(body: dict[str, Any], expected: tuple[str, str]) -> None:
    assert parse_owner(body) == (("n", "p"), WorkloadOwner(*expected))


def endpoint(address: str, uid: str = "", ready: bool | None = True, **more: Any) -> dict[str, Any]:
    target = {"targetRef": {"kind": "Pod", "name": f"pod-{uid}", "uid": uid}} if uid else {}
    return (
        {"addresses": [address], "conditions": {"ready": ready}, "nodeName": "node-a"}
        | target
        | more
    )


def endpoint_slice(
    *endpoints: dict[str, Any],
    ports: Any = None,
    name: str = "s-1",
    service: str = "podgpu",
    **more: Any,
) -> dict[str, Any]:
    labels = {"kubernetes.io/service-name": service}
    listed = [{"name": "metrics", "port": 9400, "protocol": "TCP"}] if ports is None else ports
    metadata = {"name": name, "namespace": "monitoring", "labels": labels}
    return {
        "metadata": metadata,
        "addressType": "IPv4",
        "endpoints": list(endpoints),
        "ports": listed,
    } | more


def urls(*slices: dict[str, Any], https: bool = False) -> tuple[str, ...]:
    return merge_urls(parse_endpoint_slice(each, https) for each in slices)


def test_endpoints_are_scraped_ready_or_not() -> None:
    body = endpoint_slice(
        endpoint("10.0.0.1", "a"),
        endpoint("10.0.0.2", "b", ready=False),
        endpoint("10.0.0.3", "c", ready=None),
        {"addresses": ["10.0.0.4"]},
    )
    assert urls(body) == tuple(f"http://10.0.0.{n}:9400/metrics" for n in (1, 2, 3, 4))


def test_a_pod_of_both_families_and_two_services_is_scraped_once() -> None:
    four = endpoint_slice(endpoint("10.0.0.1", "u1"), endpoint("10.0.0.2", "u2"), name="a")
    six = endpoint_slice(
        endpoint("fd00::1", "u1"), endpoint("fd00::3", "u3"), name="b", addressType="IPv6"
    )
    headless = endpoint_slice(endpoint("10.0.0.2", "u2"), name="c")
    expected = (
        "http://10.0.0.1:9400/metrics",
        "http://10.0.0.2:9400/metrics",
        "http://[fd00::3]:9400/metrics",
    )
    assert urls(four, six, headless) == expected
    assert urls(headless, six, four) == expected


METRICS = {"name": "metrics", "port": 9400}
WEB = {"name": "web", "port": 8080}


@pytest.mark.parametrize(
    ("ports", "chosen"),
    [
        ([METRICS, WEB], 9400),
        ([WEB], 8080),
        ([{"name": "", "port": 8080}], 8080),
        ([METRICS | {"protocol": "UDP"}, WEB], 8080),
    ],
)
def test_the_port(ports: list[dict[str, Any]], chosen: int) -> None:
    assert urls(endpoint_slice(endpoint("h"), ports=ports)) == (f"http://h:{chosen}/metrics",)


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
    assert urls(endpoint_slice(endpoint("h"), ports=[port]), https=https) == (
        f"{scheme}://h:1/metrics",
    )
