"""Pods cut down to records: what is kept, what is left out, and objects that are none."""

from __future__ import annotations

from contextlib import suppress
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.holders.annotation_formats import asks_for_gpu, is_read
from podgpu.kube.objects import ContainerRecord, PodRecord, parse_pod, parse_quantity

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


def test_heartbeats_do_not_make_another_record() -> None:
    statuses = [{**one, "ready": True, "restartCount": 3} for one in POD["status"]["containerStatuses"]]
    changed = parsed(metadata={"resourceVersion": "77"}, status={"conditions": [{}], "containerStatuses": statuses})
    assert changed == parse_pod(POD, is_read)


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
    ("phase", "finished"),
    [("Succeeded", True), ("Failed", True), ("Running", False), ("Pending", False), ("Unknown", False)],
)
def test_is_finished(phase: object, finished: bool) -> None:
    assert parsed(status={"phase": phase}).is_finished is finished


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
    assert asks_for_gpu(container) is asks


def test_amounts_and_annotations_by_name() -> None:
    record = parsed()
    assert record.containers[0].amount("tencent.com/vcuda-core") == 50
    assert record.containers[1].amount("tencent.com/vcuda-core") == 0
    assert record.annotation("tencent.com/gpu-assigned") == "true"
    assert record.annotation("clusterName") == ""


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
