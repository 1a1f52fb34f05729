"""The annotation formats of koordinator, HAMi, Volcano and gpu-manager: as they write them, and as they should not."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.errors import SourceError
from podgpu.holders.annotation_formats import (
    FORMATS,
    BadAnnotation,
    Grant,
    gpu_manager_grants,
    hami_1_grants,
    hami_grants,
    koordinator_grants,
    read_grants,
    volcano_grants,
)
from podgpu.kube.objects import ContainerRecord, PodRecord

KOORDINATOR = "scheduling.koordinator.sh/device-allocated"
HAMI = "hami.io/vgpu-devices-allocated"
MIG = "hami.io/vgpu-mig-allocations"
HAMI_1 = "4pd.io/vgpu-ids-new"
VOLCANO = "volcano.sh/vgpu-ids-new"
ASSIGNED = "tencent.com/gpu-assigned"
CARDS = "tencent.com/predicate-gpu-idx-"

A = "GPU-8dcd427f-483b-b48f-d7e5-75fb19a52b76"
B = "GPU-ebe7c3f7-303d-558d-435e-99a160631fe4"
MIG_A = "MIG-aaaaaaaa-1111-2222-3333-444444444444"
MIB = 1 << 20

Requests = dict[str, str]


def container(name: str, requests: Requests | None = None) -> ContainerRecord:
    return ContainerRecord(name, tuple(sorted((requests or {}).items())))


def pod(
    annotations: dict[str, str],
    containers: dict[str, Requests] | None = None,
    init: dict[str, Requests] | None = None,
) -> PodRecord:
    return PodRecord(
        "ml",
        "train",
        "uid-1",
        "node-1",
        "Running",
        annotations=tuple(sorted(annotations.items())),
        init_containers=tuple(container(*one) for one in (init or {}).items()),
        containers=tuple(container(*one) for one in ({"main": {}} if containers is None else containers).items()),
    )


def failure(call: Callable[[], object], key: str, *in_message: str) -> BadAnnotation:
    with pytest.raises(BadAnnotation) as caught:
        call()
    error = caught.value
    assert (error.reason, error.key) == ("bad_annotation", key)
    for part in (key, "ml/train", *in_message):
        assert part in str(error)
    assert str(error).isprintable()
    return error


# koordinator


def koordinator(value: object) -> list[Grant]:
    return koordinator_grants(pod({KOORDINATOR: json.dumps(value)}))


def gpu_entry(**changes: object) -> dict[str, object]:
    resources = {
        "koordinator.sh/gpu-core": "50",
        "koordinator.sh/gpu-memory-ratio": "25",
        "koordinator.sh/gpu-memory": "8Gi",
    }
    return {"minor": 3, "id": A, "resources": resources, **changes}


def test_koordinator_as_it_is_written() -> None:
    value = {
        "gpu": [
            {
                "id": A,
                "minor": 0,
                "resources": {
                    "koordinator.sh/gpu-core": "100",
                    "koordinator.sh/gpu-memory": "85197848576",
                    "koordinator.sh/gpu-memory-ratio": "100",
                },
            },
            gpu_entry(),
        ],
        "rdma": [
            {
                "id": "0000:09:00.0",
                "minor": 1,
                "resources": {"koordinator.sh/rdma": "1"},
                "extension": {"vfs": [{"minor": -1, "busID": "0000:09:00.4"}]},
            }
        ],
    }
    assert koordinator(value) == [
        Grant(None, A, KOORDINATOR, 1.0, 85197848576),
        Grant(None, A, KOORDINATOR, 0.5, 8 << 30),
    ]


@pytest.mark.parametrize(
    ("resources", "share", "memory"),
    [
        ({"koordinator.sh/gpu-core": "50"}, 0.5, None),
        ({"koordinator.sh/gpu-core": 50}, 0.5, None),
        ({"koordinator.sh/gpu-memory-ratio": "25"}, 0.25, None),
        ({"koordinator.sh/gpu-core": "0", "koordinator.sh/gpu-memory-ratio": "25"}, 0.25, None),
        ({"koordinator.sh/gpu-core": "500m"}, 0.005, None),
        ({"koordinator.sh/gpu-core": "33.5"}, 0.335, None),
        ({"koordinator.sh/gpu-core": "200"}, None, None),
        ({"koordinator.sh/gpu-memory": "16G"}, None, 16_000_000_000),
        ({"nvidia.com/gpu": "1"}, None, None),
        ({}, None, None),
        (None, None, None),
    ],
)
def test_koordinator_shares(resources: object, share: float | None, memory: int | None) -> None:
    assert koordinator({"gpu": [gpu_entry(resources=resources)]}) == [Grant(None, A, KOORDINATOR, share, memory)]


@pytest.mark.parametrize("missing", [None, ""])
def test_koordinator_without_ids_goes_by_minors(missing: object) -> None:
    assert [one.device for one in koordinator({"gpu": [gpu_entry(id=missing), gpu_entry(minor="no", id=B)]})] == [3, B]
    entry = {"minor": 0, "resources": {}}
    assert koordinator({"gpu": [entry]}) == [Grant(None, 0, KOORDINATOR)]


@pytest.mark.parametrize("value", [{}, {"gpu": None}, {"gpu": []}, {"rdma": [{}]}, {"fpga": 7}])
def test_koordinator_without_gpus(value: object) -> None:
    assert koordinator(value) == []


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("{", "Expecting"),
        ("[]", "the whole is not an object"),
        ("null", "the whole is not an object"),
        ('{"gpu": {}}', "gpu is not a list"),
        ('{"gpu": [7]}', "gpu entry 1 is not an object"),
        ('{"gpu": [{}]}', "gpu entry 1 has neither an id nor a minor number"),
        ('{"gpu": [{"minor": "0"}]}', "neither"),
        ('{"gpu": [{"minor": true}]}', "neither"),
        ('{"gpu": [{"minor": -1}]}', "neither"),
        ('{"gpu": [{"minor": 0.5}]}', "neither"),
        ('{"gpu": [{"id": 7, "minor": 0}]}', "gpu entry 1: id is not a text"),
        ('{"gpu": [{"id": "\\ud800"}]}', "surrogate"),
        ('{"gpu": [{"minor": 0, "resources": []}]}', "resources is not an object"),
        ('{"gpu": [{"minor": 0, "resources": {"koordinator.sh/gpu-core": "half"}}]}', "'half' is not a quantity"),
        ('{"gpu": [{"minor": 0, "resources": {"koordinator.sh/gpu-core": true}}]}', "gpu-core is not a text"),
        ('{"gpu": [{"minor": 0, "resources": {"koordinator.sh/gpu-core": NaN}}]}', "not a quantity"),
        ('{"gpu": [{"minor": 0, "resources": {"koordinator.sh/gpu-core": 1e999}}]}', "not a quantity"),
        ('{"gpu": [{"minor": 0, "resources": {"koordinator.sh/gpu-memory": "-8Gi"}}]}', "'-8Gi' is not a quantity"),
        ('{"gpu": [{"minor": ' + "9" * 5000 + "}]}", "digits"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_koordinator_refused(text: str, place: str) -> None:
    failure(lambda: koordinator_grants(pod({KOORDINATOR: text})), KOORDINATOR, place)


# HAMi

GPU: Requests = {"nvidia.com/gpu": "1"}


def granted(grants: list[Grant]) -> list[tuple[str | None, str | int]]:
    return [(one.container, one.device) for one in grants]


def test_hami_as_it_is_written() -> None:
    text = f"{A},NVIDIA,500,3:;{B},NVIDIA,500,0:;"
    assert hami_grants(pod({HAMI: text}, {"one": GPU, "two": GPU})) == [
        Grant("one", A, HAMI, 0.03, 500 * MIB),
        Grant("two", B, HAMI, None, 500 * MIB),
    ]


@pytest.mark.parametrize(
    ("text", "containers", "init", "expected"),
    [
        pytest.param(f"{A},NVIDIA,1,1", {"a": GPU}, {}, [("a", A)], id="no separators"),
        pytest.param(f"{A},NVIDIA,1,1:", {"a": GPU}, {}, [("a", A)], id="Volcano's end"),
        pytest.param(f"{A},NVIDIA,1,1:;", {"a": GPU}, {}, [("a", A)], id="HAMi's end"),
        pytest.param(f"{A},NVIDIA,1,1:{B},NVIDIA,1,1:;", {"a": GPU}, {}, [("a", A), ("a", B)], id="two devices"),
        pytest.param(f";{A},NVIDIA,1,1:;", {"a": {}, "b": GPU}, {}, [("b", A)], id="empty place"),
        pytest.param(f"{A},NVIDIA,1,1:;;;", {"a": GPU, "b": {}, "c": {}}, {}, [("a", A)], id="empty tail"),
        pytest.param(f",,0,0:;{A},NVIDIA,1,1:;,,0,0:;", {"a": {}, "b": GPU, "c": {}}, {}, [("b", A)], id="no device"),
        pytest.param(f";{A},NVIDIA,1,1:;", {"a": GPU}, {"i": {}}, [("a", A)], id="init containers first"),
        pytest.param(
            f"{A},NVIDIA,1,1:;{B},NVIDIA,1,1:;", {"a": GPU}, {"i": GPU}, [("i", A), ("a", B)], id="init with a GPU"
        ),
        pytest.param(f"{A},NVIDIA,1,1:;", {"a": GPU}, {"i": {}}, [("a", A)], id="before 2.9 and HAMi#3079"),
        pytest.param(f"{A},NVIDIA,1,1:;", {"a": GPU}, {"i": GPU}, [("a", A)], id="before 2.9, init asks"),
        pytest.param(
            f"{A},NVIDIA,2500,25:;{B},NVIDIA,2500,25:;",
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
        pytest.param(f";{A},NVIDIA,1,1:;", {"a": {}}, {"i": {}}, [("a", A)], id="nobody known to ask"),
        pytest.param(
            f"{A},NVIDIA,1,1:;", {"a": {}}, {"i": {}}, [("a", A)], id="nobody known to ask, as many as containers"
        ),
        pytest.param(f"{A},NVIDIA,1,1,extra:;", {"a": GPU}, {}, [("a", A)], id="a later version's field"),
        pytest.param(";", {"a": GPU}, {}, [], id="nothing"),
        pytest.param(";;", {"a": GPU}, {}, [], id="nothing for two"),
        pytest.param("", {"a": GPU}, {}, [], id="empty"),
    ],
)
def test_hami_places(
    text: str, containers: dict[str, Requests], init: dict[str, Requests], expected: list[tuple[str, str]]
) -> None:
    assert granted(hami_grants(pod({HAMI: text}, containers, init))) == expected


@pytest.mark.parametrize(("cores", "share"), [("0", None), ("1", 0.01), ("30", 0.3), ("100", 1.0), ("101", None)])
def test_hami_shares(cores: str, share: float | None) -> None:
    assert hami_grants(pod({HAMI: f"{A},NVIDIA,0,{cores}:;"})) == [Grant("main", A, HAMI, share, None)]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (A, "is not an id, a type, a memory size and a percentage"),
        (f"{A},NVIDIA,500:;", "is not an id"),
        (f"{A},NVIDIA,x,3:;", "memory size 'x' is not a number"),
        (f"{A},NVIDIA,500,-3:;", "percentage '-3' is not a number"),
        (f"{A},NVIDIA,500,٣:;", "is not a number"),
        (f"{A},NVIDIA,500,3.5:;", "is not a number"),
        (f"{A},NVIDIA,{'9' * 5000},3:;", "is not a number"),
        (f"{A}:1,2,8,17,NVIDIA,NVIDIA A100 80GB PCIe", "is not an id"),
        (f";;{A},NVIDIA,500,3:;", "place 3 is filled, but the pod has 1 containers"),
        ('[{"id": "x"}]', "is not an id"),
        ("\n\x00", "is not an id"),
    ],
)
@pytest.mark.parametrize(("key", "grants"), [(HAMI, hami_grants), (HAMI_1, hami_1_grants), (VOLCANO, volcano_grants)])
def test_hami_refused(key: str, grants: Callable[[PodRecord], list[Grant]], text: str, place: str) -> None:
    failure(lambda: grants(pod({key: text})), key, place)


def test_older_mig_ids_of_hami_are_left_as_they_are() -> None:
    """`[template-position]` does not say which instance it became: not a GPU id, and reported as such."""
    assert granted(hami_grants(pod({HAMI: f"{A}[0-1],NVIDIA,4864,0:;"}))) == [("main", f"{A}[0-1]")]


def mig_entry(**changes: object) -> dict[str, object]:
    return {
        "containerIndex": 1,
        "deviceIndex": 0,
        "gpuUUID": A,
        "profile": "1g.5gb",
        "placement": {"start": 6, "size": 1},
        "migUUID": MIG_A,
        "gpuInstanceID": 13,
        "computeInstanceID": 0,
        **changes,
    }


def with_mig(mig: object, text: str = f";{A},NVIDIA,4864,14:{B},NVIDIA,100,20:;") -> list[Grant]:
    annotations = {HAMI: text, MIG: mig if isinstance(mig, str) else json.dumps(mig)}
    return hami_grants(pod(annotations, {"a": {}, "b": GPU}))


def test_hami_mig_instances_take_the_place_of_their_gpu() -> None:
    assert with_mig([mig_entry()]) == [
        Grant("b", MIG_A, HAMI, 1.0, 4864 * MIB),
        Grant("b", B, HAMI, 0.2, 100 * MIB),
    ]
    assert granted(with_mig([mig_entry(deviceIndex=1, gpuUUID=B.lower())])) == [("b", A), ("b", MIG_A)]


def test_a_mig_instance_that_is_not_made_yet_is_held_by_nobody() -> None:
    assert granted(with_mig([mig_entry(migUUID="", gpuInstanceID=None)])) == [("b", B)]
    entry = mig_entry()
    del entry["migUUID"]
    assert granted(with_mig([entry], f";{A},NVIDIA,4864,14:;")) == []


@pytest.mark.parametrize("mig", ["", "[]", "null"])
def test_no_mig_instances(mig: str) -> None:
    assert granted(with_mig(mig)) == [("b", A), ("b", B)]


def test_mig_instances_without_devices_are_nothing() -> None:
    assert hami_grants(pod({MIG: json.dumps([mig_entry()])})) == []


@pytest.mark.parametrize(
    ("mig", "place"),
    [
        ("{", "Expecting"),
        ({}, "the whole is not a list"),
        ([7], "entry 1 is not an object"),
        ([mig_entry(), {}], "entry 2: containerIndex is not a number"),
        ([mig_entry(containerIndex=True)], "containerIndex is not a number"),
        ([mig_entry(containerIndex=-1)], "containerIndex is not a number"),
        ([mig_entry(containerIndex=9)], "device 0 of container 9 is not in"),
        ([mig_entry(deviceIndex=2)], "device 2 of container 1 is not in"),
        ([mig_entry(gpuUUID=B)], "entry 1: gpuUUID is another than in"),
        ([mig_entry(gpuUUID=7)], "gpuUUID is not a text"),
        ([mig_entry(migUUID=[])], "migUUID is not a text"),
        ([mig_entry(), mig_entry()], "entry 2: gpuUUID is another"),
    ],
)
def test_hami_mig_refused(mig: object, place: str) -> None:
    failure(lambda: with_mig(mig), MIG, place)


# HAMi 1 and Volcano


def test_hami_1_counts_containers_only_and_passes_over_other_cards() -> None:
    text = f"{A},NVIDIA,3000,30:mlu-1,MLU,8,50:;;{B},NVIDIA-Tesla V100,1000,0:"
    pods = pod({HAMI_1: text}, {"a": GPU, "b": {}, "c": GPU}, {"i": {}})
    assert hami_1_grants(pods) == [
        Grant("a", A, HAMI_1, 0.3, 3000 * MIB),
        Grant("c", B, HAMI_1, None, 1000 * MIB),
    ]


VGPU: Requests = {"volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "3000"}


def test_volcano_has_places_for_those_only_who_ask() -> None:
    pods = pod({VOLCANO: f"{A},NVIDIA,1126,0:;{B},NVIDIA,3000,25:"}, {"a": VGPU, "b": {}, "c": VGPU}, {"i": {}})
    assert volcano_grants(pods) == [
        Grant("a", A, VOLCANO, None, 1126 * MIB),
        Grant("c", B, VOLCANO, 0.25, 3000 * MIB),
    ]


def test_volcano_with_places_for_all() -> None:
    for containers in ({"a": {}, "b": VGPU}, {"a": {}, "b": {"example.com/vgpu": "1"}}):
        assert granted(volcano_grants(pod({VOLCANO: f";{A},NVIDIA,1126,0:"}, containers))) == [("b", A)]


# gpu-manager


def gpu_manager(cards: dict[int, str], containers: dict[str, Requests], assigned: str = "true") -> list[Grant]:
    annotations = {f"{CARDS}{number}": text for number, text in cards.items()}
    return gpu_manager_grants(pod({**annotations, ASSIGNED: assigned}, containers))


def vcuda(core: int, memory: int = 0) -> Requests:
    return {"tencent.com/vcuda-core": str(core), "tencent.com/vcuda-memory": str(memory)}


def test_gpu_manager_as_it_is_written() -> None:
    containers = {"log": {}, "part": vcuda(50, 30), "whole": vcuda(200)}
    assert gpu_manager({1: "0", 2: "1,3"}, containers) == [
        Grant("part", 0, f"{CARDS}1", 0.5, 30 * 256 * MIB),
        Grant("whole", 1, f"{CARDS}2", 1.0),
        Grant("whole", 3, f"{CARDS}2", 1.0),
    ]


def test_gpu_manager_does_not_count_init_containers() -> None:
    pods = pod({f"{CARDS}0": "2", ASSIGNED: "true"}, {"main": vcuda(20, 4)}, {"init": {}})
    assert granted(gpu_manager_grants(pods)) == [("main", 2)]


@pytest.mark.parametrize("assigned", ["false", "", "True", "1"])
def test_what_the_scheduler_of_gpu_manager_wishes_is_held_by_nobody_yet(assigned: str) -> None:
    assert gpu_manager({0: "0"}, {"main": vcuda(50)}, assigned) == []


@pytest.mark.parametrize(
    ("requests", "cards", "share", "memory"),
    [
        (vcuda(1, 1), "0", 0.01, 256 * MIB),
        (vcuda(100, 60), "0", 1.0, 60 * 256 * MIB),
        (vcuda(0), "0", None, None),
        ({}, "0", None, None),
        (vcuda(50, 8), "0,1", None, None),
    ],
)
def test_gpu_manager_shares(requests: Requests, cards: str, share: float | None, memory: int | None) -> None:
    grants = gpu_manager({0: cards}, {"main": requests})
    assert {(one.share, one.memory) for one in grants} == {(share, memory)}


def test_gpu_manager_without_cards() -> None:
    assert gpu_manager({0: ""}, {"main": {}}) == []
    assert gpu_manager({0: " 1, 1"}, {"main": {}}) == [Grant("main", 1, f"{CARDS}0")]


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        (f"{CARDS}1", "0", "there is no container 1: the pod has 1"),
        (f"{CARDS}x", "0", "container 'x' is not a number"),
        (CARDS, "0", "container '' is not a number"),
        (f"{CARDS}-1", "0", "is not a number"),
        (f"{CARDS}0", "0,", "card '' is not a number"),
        (f"{CARDS}0", "/dev/nvidia0", "is not a number"),
        (f"{CARDS}0", "-1", "is not a number"),
        (f"{CARDS}0", "²", "is not a number"),
    ],
)
def test_gpu_manager_refused(name: str, text: str, place: str) -> None:
    failure(lambda: gpu_manager_grants(pod({name: text, ASSIGNED: "true"})), name, place)


# All of them


def test_a_pod_without_annotations_was_given_nothing() -> None:
    assert read_grants(pod({})) == []


def test_the_first_format_that_says_anything_stands() -> None:
    rdma_only = json.dumps({"rdma": [{"minor": 0}]})
    both = {HAMI: f"{A},NVIDIA,1,1:;", HAMI_1: f"{B},NVIDIA,1,1:;"}
    assert granted(read_grants(pod({**both, KOORDINATOR: rdma_only}))) == [("main", A)]
    assert granted(read_grants(pod({**both, KOORDINATOR: json.dumps({"gpu": [{"minor": 1}]})}))) == [(None, 1)]
    assert granted(read_grants(pod({VOLCANO: f"{B},NVIDIA,1,1:"}))) == [("main", B)]
    assert granted(read_grants(pod({f"{CARDS}0": "1", ASSIGNED: "true"}))) == [("main", 1)]
    failure(lambda: read_grants(pod({**both, HAMI: "x"})), HAMI)


keys = st.sampled_from([KOORDINATOR, HAMI, MIG, HAMI_1, VOLCANO, f"{CARDS}0", f"{CARDS}1", CARDS])
pieces = st.sampled_from([A, B, MIG_A, ",", ",,", ":", ";", "NVIDIA", "0", "50", "{", "}", "[", "]", '"gpu"', '"', " "])
texts = st.text(max_size=30) | st.lists(pieces, max_size=12).map("".join)
json_texts = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["gpu", "minor", "id", "resources", "koordinator.sh/gpu-core", "containerIndex", "migUUID"]
            ),
            inner,
            max_size=3,
        )
    ),
).map(json.dumps)


@given(st.dictionaries(keys, texts | json_texts, max_size=4), st.integers(0, 2), st.integers(0, 1))
def test_any_text_is_a_grant_or_a_bad_annotation(annotations: dict[str, str], containers: int, init: int) -> None:
    one = pod(
        {**annotations, ASSIGNED: "true"}, {f"c{n}": GPU for n in range(containers)}, {f"i{n}": {} for n in range(init)}
    )
    names = {None, *(c.name for c in (*one.init_containers, *one.containers))}
    for format_ in (*FORMATS, read_grants):
        grants, error = outcome(format_, one)
        assert error is None or (error.reason == "bad_annotation" and str(error).isprintable())
        assert all(grant.share is None or 0 < grant.share <= 1 for grant in grants)
        assert {grant.container for grant in grants} <= names


def outcome(format_: Callable[[PodRecord], list[Grant]], one: PodRecord) -> tuple[list[Grant], SourceError | None]:
    try:
        return format_(one), None
    except SourceError as error:
        return [], error


slots = st.lists(st.lists(st.tuples(st.sampled_from([A, B]), st.integers(0, 99999), st.integers(0, 100)), max_size=3))


@given(slots.filter(bool))
def test_hami_round_trip(given_slots: list[list[tuple[str, int, int]]]) -> None:
    text = "".join("".join(f"{i},NVIDIA,{m},{c}:" for i, m, c in slot) + ";" for slot in given_slots)
    containers = {f"c{n}": GPU if slot else {} for n, slot in enumerate(given_slots)}
    assert hami_grants(pod({HAMI: text}, containers)) == [
        Grant(f"c{n}", i, HAMI, c / 100 or None, m * MIB or None)
        for n, slot in enumerate(given_slots)
        for i, m, c in slot
    ]
