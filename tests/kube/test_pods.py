"""Pods cut down to records: what is kept, what is left out, and objects that are none."""

from __future__ import annotations

import json
import sys
import tracemalloc
from contextlib import suppress
from dataclasses import fields
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.holders.annotations import is_read, requests_gpu
from podgpu.kube.pods import ContainerRecord, PodRecord, parse_pod, parse_quantity

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


def test_the_order_of_maps_does_not_make_another_record() -> None:
    turned = json.loads(json.dumps(POD, sort_keys=True))
    assert parse_pod(turned, is_read) == parse_pod(POD, is_read)


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
        (None, ""),
        (7, ""),
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
    [("Succeeded", True), ("Failed", True), ("Running", False), ("Pending", False), ("Unknown", False), (None, False)],
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
        ({"nvidia.com/gpu": True}, False),
        ({}, False),
        (None, False),
        ([], False),
    ],
)
def test_who_asks_for_a_gpu(requests: object, asks: bool) -> None:
    container = parsed(spec={"containers": [{"name": "main", "resources": {"limits": requests}}]}).containers[0]
    assert requests_gpu(container) is asks


def test_annotations_are_kept_only_for_who_reads_them() -> None:
    record = parse_pod(POD)
    assert record is not None
    assert record.annotations == ()
    kept = parse_pod(POD, lambda name: name == "tencent.com/gpu-assigned")
    assert kept is not None
    assert kept.annotations == (("tencent.com/gpu-assigned", "true"),)


def test_amounts_and_annotations_by_name() -> None:
    record = parsed()
    assert record.containers[0].amount("tencent.com/vcuda-core") == 50
    assert record.containers[1].amount("tencent.com/vcuda-core") == 0
    assert record.annotation("tencent.com/gpu-assigned") == "true"
    assert record.annotation("clusterName") == ""


@pytest.mark.parametrize("body", [None, [], "pod", 7, {}, {"metadata": []}, {"metadata": {"name": "a"}}])
def test_what_is_no_pod(body: object) -> None:
    assert parse_pod(body) is None


@pytest.mark.parametrize("value", [None, "", 7, ["a"], {}, "\ud800"])
@pytest.mark.parametrize("key", ["name", "uid"])
def test_a_pod_has_a_name_and_a_uid(key: str, value: object) -> None:
    assert parse_pod(pod_of(metadata={key: value})) is None


def test_a_container_that_is_none_keeps_its_place() -> None:
    record = parsed(spec={"containers": [None, {"name": 7}, {"name": "main"}]})
    assert [one.name for one in record.containers] == ["", "", "main"]


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("\udfff"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
PATHS = [
    ("metadata",),
    ("metadata", "labels"),
    ("metadata", "annotations"),
    ("metadata", "namespace"),
    ("spec",),
    ("spec", "nodeName"),
    ("spec", "containers"),
    ("spec", "containers", 0, "resources", "limits"),
    ("spec", "containers", 0, "resources"),
    ("status",),
    ("status", "containerStatuses"),
    ("status", "containerStatuses", 0, "name"),
    ("status", "initContainerStatuses", 0, "state"),
]


@given(junk, st.sampled_from(PATHS))
def test_anything_anywhere_is_a_record_or_none(value: object, path: tuple[str | int, ...]) -> None:
    body: Any = json.loads(json.dumps(POD))
    place = body
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    record = parse_pod(body, is_read)
    if record is not None:
        assert record.uid
        assert all(is_read(key) for key, _ in record.annotations)
        repr(record).encode()
        hash(record)


@given(junk)
def test_anything_at_all_is_a_record_or_none(value: object) -> None:
    parse_pod(value)


def test_a_thousand_records_are_small() -> None:
    bodies = (json.dumps(POD).replace("train-0", f"train-{number}") for number in range(1000))
    tracemalloc.start()
    try:
        kept = [parse_pod(json.loads(body), is_read) for body in bodies]
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size / len(kept) < 2500
    assert not hasattr(kept[0], "__dict__")
    assert {sys.getsizeof(one) for one in kept} == {sys.getsizeof(kept[0])}
    assert len(fields(PodRecord)) == 10


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


@given(st.integers(0, 10**18), st.sampled_from(["", "m", "k", "Mi", "Gi"]))
def test_quantities_are_exact(number: int, unit: str) -> None:
    assert parse_quantity(f"{number}{unit}") == number * parse_quantity(f"1{unit}")


@given(st.text(max_size=40))
def test_any_text_is_a_quantity_or_a_value_error(text: str) -> None:
    with suppress(ValueError):
        assert parse_quantity(text) >= 0
