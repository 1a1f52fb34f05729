"""Tests the allocation source that reads annotations of koordinator, HAMi, Volcano and
gpu-manager.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.errors import SourceError
from podgpu.kube.objects import ContainerRecord, PodRecord
from podgpu.model import Allocation, Device, Unmapped, VcudaRequest, Workload
from podgpu.node.holders.annotations import (
    FORMATS,
    AnnotationsAllocation,
    BadAnnotation,
    read_grants,
)
from tests.holders.devices import failure, uuid

KOORDINATOR = "scheduling.koordinator.sh/device-allocated"
HAMI = "hami.io/vgpu-devices-allocated"
HAMI_MIG = "hami.io/vgpu-mig-allocations"
HAMI_1 = "4pd.io/vgpu-ids-new"
VOLCANO = "volcano.sh/vgpu-ids-new"
CARDS = "tencent.com/predicate-gpu-idx-"
ASSIGNED = {"tencent.com/gpu-assigned": "true"}
A, B = uuid(0), uuid(1)
MIG = "MIG-aaaaaaaa-1111-2222-3333-444444444444"
GPU = {"nvidia.com/gpu": "1"}
VGPU = {"volcano.sh/vgpu-number": "1"}

# Annotations contain minors. These differ from the indices here, so that a mix-up fails.
NODE = (
    Device(0, A, "00000000:01:00.0", "NVIDIA A100", minor=1),
    Device(1, B, "00000000:02:00.0", "NVIDIA A100", minor=0),
    Device(2, uuid(2), "00000000:03:00.0", "NVIDIA A100", 2, True),
    Device(2, uuid(2), "00000000:03:00.0", "NVIDIA A100", 2, True, 13, "1g.5gb", (MIG,)),
)

Requests = dict[str, str]


@dataclass
class Feed:
    pods: tuple[PodRecord, ...] = ()
    error: SourceError | None = None
    synced: bool = True

    def items(self) -> tuple[PodRecord, ...]:
        return self.pods


def container(
    name: str, requests: Requests | None = None, finished: bool = False
) -> ContainerRecord:
    return ContainerRecord(name, tuple(sorted((requests or {}).items())), f"id-{name}", finished)


def pod(
    annotations: dict[str, str],
    containers: dict[str, Requests] | None = None,
    init: dict[str, Requests] | None = None,
    name: str = "a",
) -> PodRecord:
    return PodRecord(
        *("ml", name, f"uid-{name}", "node-1", "Running"),
        annotations=tuple(sorted(annotations.items())),
        init_containers=tuple(container(*entry) for entry in (init or {}).items()),
        containers=tuple(
            container(*entry)
            for entry in ({"main": {}} if containers is None else containers).items()
        ),
    )


def koordinator(*entries: dict[str, object]) -> dict[str, str]:
    return {KOORDINATOR: json.dumps({"gpu": list(entries)})}


def entry(device: int, core: int = 100) -> dict[str, object]:
    return {"minor": 0, "id": uuid(device), "resources": {"koordinator.sh/gpu-core": str(core)}}


def source_of(feed: Any) -> AnnotationsAllocation:
    return AnnotationsAllocation(feed)


def read(*pods: PodRecord) -> Allocation:
    return source_of(Feed(pods)).assignments(NODE)


def shares(*pods: PodRecord) -> list[tuple[str, str, float | None]]:
    return [(one.device, one.holder.container, one.share) for one in read(*pods).assignments]


def granted(one: PodRecord) -> list[tuple[str, str]]:
    return [(held.holder.container, held.text) for held in read_grants(one)]


def test_finished_and_unbound_pods_hold_nothing() -> None:
    one = pod({HAMI: f"{A},NVIDIA,1000,25:;"}, {"main": {"tencent.com/vcuda-core": "50"}})
    assert (
        read(replace(one, phase="Succeeded"), replace(one, phase="Failed"), replace(one, node=""))
        == Allocation()
    )
    assert shares(replace(one, phase="Pending")) == [(A, "main", 0.25)]


def test_the_first_format_with_grants_is_used() -> None:
    both = {HAMI: f"{A},NVIDIA,1,1:;", HAMI_1: f"{B},NVIDIA,1,1:;"}
    assert granted(pod({**both, KOORDINATOR: '{"rdma": [{"minor": 0}]}'})) == [("main", A)]
    assert granted(pod({**both, KOORDINATOR: '{"gpu": [{"minor": 1}]}'})) == [("main", "nvidia1")]
    assert granted(pod({})) == []


# koordinator


@pytest.mark.parametrize(
    ("resources", "share"),
    [
        ({"koordinator.sh/gpu-core": "50", "koordinator.sh/gpu-memory-ratio": "25"}, 0.5),
        ({"koordinator.sh/gpu-core": "0", "koordinator.sh/gpu-memory-ratio": "25"}, 0.25),
        ({"koordinator.sh/gpu-core": "500m"}, 0.005),
        ({"koordinator.sh/gpu-core": "200", "koordinator.sh/gpu-memory": "16G"}, None),
        (None, None),
    ],
)
def test_koordinator_shares(resources: object, share: float | None) -> None:
    assert [
        grant.share for grant in read_grants(pod(koordinator({"id": A, "resources": resources})))
    ] == [share]


def test_koordinator_minors() -> None:
    assert shares(pod(koordinator({"minor": 0}))) == [(B, "main", None)]
    assert granted(pod(koordinator({"minor": 3, "id": ""}, {"id": B}))) == [
        ("main", "nvidia3"),
        ("main", B),
    ]


def test_a_grant_to_the_pod_is_split_between_the_containers_that_request_gpus() -> None:
    one = koordinator(entry(0))
    assert shares(pod(one, {"proxy": {}, "main": {"koordinator.sh/gpu": "100"}})) == [
        (A, "main", 1.0)
    ]
    assert shares(pod(one, {"main": {}, "proxy": {}}, {"init": {}})) == [(A, "main", 1.0)], (
        "default: first container"
    )
    assert shares(pod(one, {})) == [(A, "", 1.0)]
    big = {"koordinator.sh/gpu-core": "150", "koordinator.sh/gpu-memory": "8Gi"}
    small = {"koordinator.sh/gpu-core": "50", "koordinator.sh/gpu-memory": "8Gi"}
    assert shares(pod(one, {"big": big, "small": small})) == [(A, "big", 0.75), (A, "small", 0.25)]
    assert shares(pod(one, {"a": {"koordinator.sh/gpu-core": "50"}, "b": GPU})) == [
        (A, "a", 0.5),
        (A, "b", 0.5),
    ]


def test_an_init_container_holds_until_it_is_finished() -> None:
    running = pod({HAMI: f"{A},NVIDIA,1,25:;{B},NVIDIA,1,25:;"}, {"main": GPU}, {"warm-up": GPU})
    finished = replace(running, init_containers=(container("warm-up", GPU, finished=True),))
    assert shares(running) == [(A, "warm-up", 0.25), (B, "main", 0.25)]
    assert shares(finished) == [(B, "main", 0.25)]
    whole_pod = replace(finished, annotations=tuple(koordinator(entry(0)).items()))
    assert shares(whole_pod) == [(A, "main", 1.0)]


# HAMi and Volcano


@pytest.mark.parametrize(
    ("text", "containers", "init", "expected"),
    [
        pytest.param(
            f"{A},NVIDIA,1,1:{B},NVIDIA,1,1:;",
            {"a": GPU},
            {},
            [("a", A), ("a", B)],
            id="two devices",
        ),
        pytest.param(f";{A},NVIDIA,1,1:;", {"a": {}, "b": GPU}, {}, [("b", A)], id="empty place"),
        pytest.param(
            f",,0,0:;{A},NVIDIA,1,1:;,,0,0:;",
            {"a": {}, "b": GPU, "c": {}},
            {},
            [("b", A)],
            id="no device",
        ),
        pytest.param(
            f";{A},NVIDIA,1,1:;", {"a": GPU}, {"i": {}}, [("a", A)], id="init containers first"
        ),
        pytest.param(
            f"{A},NVIDIA,1,1:;", {"a": GPU}, {"i": {}}, [("a", A)], id="before 2.9 and HAMi#3079"
        ),
        pytest.param(
            f"{A},NVIDIA,1,1:;", {"a": GPU}, {"i": GPU}, [("a", A)], id="before 2.9, init requests"
        ),
        pytest.param(
            f"{A},NVIDIA,1,1:;{B},NVIDIA,1,1:;",
            {"a": GPU, "b": GPU},
            {"i": {}},
            [("a", A), ("b", B)],
            id="HAMi#2899",
        ),
        pytest.param(
            f"{A},NVIDIA,1000,0:;;,,0,0:;,,0,0:;,,0,0:;",
            {"a": {}, "b": {"nvidia.com/vgpu": "1"}, "c": {}, "d": {}, "e": {}},
            {},
            [("b", A)],
            id="HAMi#991",
        ),
        pytest.param(f";{A},NVIDIA,1,1:;", {"a": {}}, {"i": {}}, [("a", A)], id="no known request"),
        pytest.param(
            f"{A},NVIDIA,1,1,extra:;", {"a": GPU}, {}, [("a", A)], id="a later version's field"
        ),
        pytest.param(
            f"{A}[0-1],NVIDIA,4864,0:;", {"a": GPU}, {}, [("a", f"{A}[0-1]")], id="old MIG form"
        ),
    ],
)
def test_hami_positions(
    text: str,
    containers: dict[str, Requests],
    init: dict[str, Requests],
    expected: list[tuple[str, str]],
) -> None:
    assert granted(pod({HAMI: text}, containers, init)) == expected


def test_parts_of_one_device_add_up() -> None:
    part = f"{A},NVIDIA,1000,25:"
    assert shares(pod({HAMI: part * 2 + ";"})) == [(A, "main", 0.5)]
    assert shares(pod({HAMI: part * 5 + ";"})) == [(A, "main", 1.0)]
    assert shares(pod({HAMI: f"{A},NVIDIA,1000,0:{part};"})) == [(A, "main", None)]


def test_hami_1_and_volcano_positions() -> None:
    text = f"{A},NVIDIA,3000,30:mlu-1,MLU,8,50:;;{B},NVIDIA-Tesla V100,1000,0:"
    assert granted(pod({HAMI_1: text}, {"a": GPU, "b": {}, "c": GPU}, {"i": {}})) == [
        ("a", A),
        ("c", B),
    ]
    text = f"{A},NVIDIA,1126,0:;{B},NVIDIA,3000,25:"
    assert granted(pod({VOLCANO: text}, {"a": VGPU, "b": {}, "c": VGPU}, {"i": {}})) == [
        ("a", A),
        ("c", B),
    ]
    assert granted(pod({VOLCANO: f";{A},NVIDIA,1126,0:"}, {"a": {}, "b": VGPU})) == [("b", A)]


def mig_entry(**changes: object) -> dict[str, object]:
    known = {
        "containerIndex": 1,
        "deviceIndex": 0,
        "gpuUUID": A,
        "profile": "1g.5gb",
        "migUUID": MIG,
    }
    return {**known, "placement": {"start": 6, "size": 1}, "gpuInstanceID": 13, **changes}


def with_mig(mig: object) -> PodRecord:
    text = mig if isinstance(mig, str) else json.dumps(mig)
    return pod(
        {HAMI: f";{A},NVIDIA,4864,14:{B},NVIDIA,100,20:;", HAMI_MIG: text}, {"a": {}, "b": GPU}
    )


def test_hami_mig_instances_replace_their_gpu() -> None:
    assert granted(with_mig([mig_entry()])) == [("b", MIG), ("b", B)]
    assert granted(with_mig([mig_entry(deviceIndex=1, gpuUUID=B.lower())])) == [
        ("b", A),
        ("b", MIG),
    ]
    assert granted(with_mig([mig_entry(migUUID="", gpuInstanceID=None)])) == [("b", B)], (
        "MIG instance not created yet"
    )
    assert granted(with_mig("null")) == granted(with_mig("")) == [("b", A), ("b", B)]


# gpu-manager


def vcuda(core: int, memory: int = 0) -> Requests:
    return {"tencent.com/vcuda-core": str(core), "tencent.com/vcuda-memory": str(memory)}


def test_gpu_manager() -> None:
    containers = {"log": {}, "part": vcuda(50, 30), "whole": vcuda(200)}
    annotations = {f"{CARDS}1": "0", f"{CARDS}2": "1,2", **ASSIGNED}
    assert shares(pod(annotations, containers, {"init": {}})) == [
        (A, "whole", 1.0),
        (B, "part", 0.5),
        (uuid(2), "whole", 1.0),
    ]
    assert granted(pod({**annotations, "tencent.com/gpu-assigned": "false"}, containers)) == []
    assert granted(pod({f"{CARDS}0": "", **ASSIGNED})) == []
    assert shares(pod({f"{CARDS}0": " 1, 1", **ASSIGNED})) == [(A, "main", None)]


def test_vcuda_requests_do_not_depend_on_the_annotations() -> None:
    expected = (VcudaRequest("ml", "a", "main", "uid-a", "id-main", cores=50, memory_blocks=30),)
    for cards, holds in (({}, 0), ({f"{CARDS}0": "0"}, 1), ({f"{CARDS}0": "zero"}, 0)):
        allocation = read(pod({**cards, **ASSIGNED}, {"main": vcuda(50, 30)}))
        assert (allocation.vcuda, len(allocation.assignments)) == (expected, holds)


# Errors


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        (KOORDINATOR, "{", "truncated"),
        (KOORDINATOR, '{"gpu": [{}]}', "gpu entry 1 has neither an id nor a minor number"),
        (KOORDINATOR, '{"gpu": [{"minor": -1}]}', "$.gpu[0].minor"),
        (KOORDINATOR, '{"gpu": [{"id": "\\ud800"}]}', ""),
        (
            KOORDINATOR,
            '{"gpu": [{"minor": 0, "resources": {"koordinator.sh/gpu-core": "half"}}]}',
            "not a quantity",
        ),
        (KOORDINATOR, "[" * 100_000, ""),
        *(
            (key, A, "must be an id, a type, a memory size and a percentage")
            for key in (HAMI, HAMI_1, VOLCANO)
        ),
        (HAMI, f"{A},NVIDIA,x,3:;", "memory size 'x' is not a number"),
        (HAMI, f"{A},NVIDIA,{'9' * 5000},3:;", "is not a number"),
        (
            HAMI,
            f";;{A},NVIDIA,500,3:;",
            "devices to container number 3, but the pod has 1 containers",
        ),
        (f"{CARDS}1", "0", "there is no container 1: the pod has 1"),
        (f"{CARDS}0", "0,", "card '' is not a number"),
    ],
)
def test_bad_annotations(key: str, text: str, message: str) -> None:
    error = failure(lambda: read_grants(pod({key: text, **ASSIGNED})), "ml/a", message)
    assert isinstance(error, BadAnnotation)
    assert error.reason == "bad_annotation"
    assert key.startswith(error.key)


@pytest.mark.parametrize(
    ("mig", "message"),
    [
        ([mig_entry(), {}], "containerIndex"),
        ([mig_entry(containerIndex=9)], "names another GPU for device 0 of container 9"),
        ([mig_entry(gpuUUID=B)], "names another GPU"),
        ([mig_entry(), mig_entry()], "names another GPU"),
    ],
)
def test_bad_mig_annotations(mig: object, message: str) -> None:
    assert failure(lambda: read_grants(with_mig(mig)), message).reason == "bad_annotation"


def test_a_bad_annotation_affects_only_its_pod() -> None:
    bad, good = pod({KOORDINATOR: "{"}, name="bad"), pod(koordinator(entry(0)), name="good")
    allocation = source_of(Feed((bad, good))).assignments(NODE)
    assert [one.holder.pod for one in allocation.assignments] == ["good"]
    holder = Workload("ml", "bad", uid="uid-bad")
    assert allocation.unmapped == (
        Unmapped("annotations", "bad_annotation", KOORDINATOR, KOORDINATOR, holder),
    )


def test_unknown_devices() -> None:
    allocation = read(
        pod(
            koordinator(
                {"id": uuid(9)}, {"minor": 7}, {"id": f"{A}[0-1]"}, {"id": "all"}, {"id": A}
            )
        )
    )
    assert [one.device for one in allocation.assignments] == [A]
    assert [(one.device_id, one.reason) for one in allocation.unmapped] == [
        (f"{A}[0-1]", "unrecognised_id"),
        (uuid(9), "unknown_device"),
        ("all", "unrecognised_id"),
        ("nvidia7", "unknown_device"),
    ]


def test_the_api_server_is_unavailable() -> None:
    assert failure(lambda: source_of(Feed(synced=False)).assignments(NODE)).reason == "not_synced"
    one = pod({HAMI: f"{A},NVIDIA,1,25:;"})
    feed = Feed((one,), SourceError("unreachable", "it is down"))
    assert len(source_of(feed).assignments(NODE).assignments) == 1
    feed.error = SourceError("forbidden", "not allowed: add a rule")
    error = failure(lambda: source_of(feed).assignments(NODE), "not allowed: add a rule")
    assert error.reason == "forbidden"


keys = st.sampled_from(
    [KOORDINATOR, HAMI, HAMI_MIG, HAMI_1, VOLCANO, f"{CARDS}0", f"{CARDS}1", CARDS]
)
pieces = st.sampled_from(
    [A, B, MIG, ",", ",,", ":", ";", "NVIDIA", "0", "50", "{", "}", "[", "]", '"gpu"', '"', " "]
)
texts = st.text(max_size=30) | st.lists(pieces, max_size=12).map("".join)


@given(st.dictionaries(keys, texts, max_size=4), st.integers(0, 2), st.integers(0, 1))
def test_any_text_is_a_grant_or_a_bad_annotation(
    annotations: dict[str, str], containers: int, init: int
) -> None:
    one = pod(
        {**annotations, **ASSIGNED},
        {f"c{n}": GPU for n in range(containers)},
        {f"i{n}": {} for n in range(init)},
    )
    names = {"", *(c.name for c in one.all_containers)}
    for read_format in FORMATS.values():
        with suppress(ValueError, RecursionError):
            grants = read_format(one)
            assert all(grant.share is None or 0 < grant.share <= 1 for grant in grants)
            assert {grant.holder.container for grant in grants} <= names
    good = pod(koordinator(entry(1)), name="good")
    assert [a.holder.pod for a in read(one, good).assignments if a.holder.pod == "good"] == ["good"]
