"""Annotations as a source: a feed of pods in, assignments out; the API server may be away, a pod may be wrong."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.errors import SourceError
from podgpu.holders.annotation_formats import is_read
from podgpu.holders.annotations import AnnotationsAllocation
from podgpu.holders.source import AllocationSource
from podgpu.kube.objects import ContainerRecord, PodRecord, parse_pod
from podgpu.model import Allocation, Assignment, Device, Unmapped, Workload
from tests.holders.devices import uuid

KOORDINATOR = "scheduling.koordinator.sh/device-allocated"
HAMI = "hami.io/vgpu-devices-allocated"
CARDS = "tencent.com/predicate-gpu-idx-"


MIG = "MIG-aaaaaaaa-1111-2222-3333-444444444444"

# Minors run against the index: annotations go by minors.
NODE = (
    Device(0, uuid(0), "00000000:01:00.0", "NVIDIA A100", minor=1),
    Device(1, uuid(1), "00000000:02:00.0", "NVIDIA A100", minor=0),
    Device(2, uuid(2), "00000000:03:00.0", "NVIDIA A100", 2, True),
    Device(2, uuid(2), "00000000:03:00.0", "NVIDIA A100", 2, True, 13, "1g.5gb", (MIG,)),
)


@dataclass
class Feed:
    """What the kube Informer offers, held by hand."""

    pods: tuple[PodRecord, ...] = ()
    error: SourceError | None = None
    synced: bool = True

    def items(self) -> tuple[PodRecord, ...]:
        return self.pods


def container(name: str, asks: dict[str, str] | None = None, finished: bool = False) -> ContainerRecord:
    return ContainerRecord(name, tuple(sorted((asks or {}).items())), finished=finished)


def pod(
    name: str, key: str, text: str, *containers: ContainerRecord, init: tuple[ContainerRecord, ...] = ()
) -> PodRecord:
    return PodRecord(
        "ml",
        name,
        f"uid-{name}",
        "node-1",
        "Running",
        (),
        ((key, text),),
        init,
        containers or (ContainerRecord("main", container_id="id-m"),),
    )


def gpus(*entries: dict[str, object]) -> str:
    return json.dumps({"gpu": list(entries)})


def entry(device: int, core: int = 100) -> dict[str, object]:
    return {"minor": 0, "id": uuid(device), "resources": {"koordinator.sh/gpu-core": str(core)}}


def hami(*devices: str) -> str:
    return "".join(f"{one},NVIDIA,1000,25:" for one in devices) + ";"


def read(*pods: PodRecord, node: str = "") -> Allocation:
    return AnnotationsAllocation(lambda: Feed(pods), node).assignments(NODE)


def shares(allocation: Allocation) -> list[tuple[str, str, str, float | None]]:
    return [(one.device, one.holder.pod, one.holder.container, one.share) for one in allocation.assignments]


def failure(call: Callable[[], object]) -> SourceError:
    with pytest.raises(SourceError) as caught:
        call()
    return caught.value


# What it says


def test_it_is_an_allocation_source() -> None:
    as_one: AllocationSource = AnnotationsAllocation(lambda: Feed())
    assert as_one.name == "annotations"
    assert as_one.assignments(NODE) == Allocation()
    as_one.close()


def test_holders_are_known_in_full() -> None:
    body = {
        "metadata": {"namespace": "ml", "name": "train", "uid": "u-1", "annotations": {HAMI: hami(uuid(1))}},
        "spec": {
            "nodeName": "node-1",
            "containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}],
        },
        "status": {"phase": "Running", "containerStatuses": [{"name": "main", "containerID": "containerd://abc"}]},
    }
    record = parse_pod(body, is_read)
    assert record is not None
    holder = Workload("ml", "train", "main", "u-1", "abc")
    assert read(record) == Allocation((Assignment(uuid(1), holder, "annotations", share=0.25),))


def test_all_formats_at_once() -> None:
    mig = json.dumps([{"containerIndex": 0, "deviceIndex": 0, "gpuUUID": uuid(2), "migUUID": MIG}])
    instance = replace(
        pod("d", HAMI, hami(uuid(2))), annotations=((HAMI, hami(uuid(2))), ("hami.io/vgpu-mig-allocations", mig))
    )
    managed = replace(
        pod("e", "", "", container("main", {"tencent.com/vcuda-core": "20"})),
        annotations=((f"{CARDS}0", "1"), ("tencent.com/gpu-assigned", "true")),
    )
    allocation = read(
        pod("a", KOORDINATOR, gpus(entry(0, 50))),
        pod("b", "4pd.io/vgpu-ids-new", f"{uuid(0)},NVIDIA,1000,0:"),
        pod("c", "volcano.sh/vgpu-ids-new", f"{uuid(1)},NVIDIA,1000,10:"),
        instance,
        managed,
    )
    assert shares(allocation) == [
        (uuid(0), "a", "main", 0.5),
        (uuid(0), "b", "main", None),
        (uuid(0), "e", "main", 0.2),
        (uuid(1), "c", "main", 0.1),
        (f"{uuid(2)}/gi13", "d", "main", 1.0),
    ]
    assert allocation.unmapped == ()


def test_minors_are_not_indexes() -> None:
    assert shares(read(pod("a", KOORDINATOR, gpus({"minor": 0})))) == [(uuid(1), "a", "main", None)]


def test_parts_of_one_device_add_up() -> None:
    assert shares(read(pod("a", HAMI, hami(uuid(0), uuid(0))))) == [(uuid(0), "a", "main", 0.5)]
    assert shares(read(pod("a", HAMI, hami(*[uuid(0)] * 5)))) == [(uuid(0), "a", "main", 1.0)]
    unlimited = f"{uuid(0)},NVIDIA,1000,0:{hami(uuid(0))}"
    assert shares(read(pod("a", HAMI, unlimited))) == [(uuid(0), "a", "main", None)]


def test_finished_pods_and_pods_of_no_or_another_node_hold_nothing() -> None:
    one = pod("a", HAMI, hami(uuid(0)))
    assert read(replace(one, phase="Succeeded"), replace(one, phase="Failed"), replace(one, node="")) == Allocation()
    assert shares(read(replace(one, phase="Pending"))) == [(uuid(0), "a", "main", 0.25)]
    assert shares(read(one, node="node-1")) == [(uuid(0), "a", "main", 0.25)]
    assert read(one, node="node-2") == Allocation()


def test_an_init_container_holds_until_it_is_done() -> None:
    asks = {"nvidia.com/gpu": "1"}
    text = hami(uuid(0)) + hami(uuid(1))
    running = pod("a", HAMI, text, container("main", asks), init=(container("warm-up", asks),))
    done = replace(running, init_containers=(container("warm-up", asks, finished=True),))
    assert shares(read(running)) == [(uuid(0), "a", "warm-up", 0.25), (uuid(1), "a", "main", 0.25)]
    assert shares(read(done)) == [(uuid(1), "a", "main", 0.25)]


# What is given to a whole pod


def test_the_container_that_asks_holds_what_the_pod_was_given() -> None:
    one = pod("a", KOORDINATOR, gpus(entry(0)), container("proxy"), container("main", {"koordinator.sh/gpu": "100"}))
    assert shares(read(one)) == [(uuid(0), "a", "main", 1.0)]


def test_where_nobody_is_known_to_ask_the_first_container_holds() -> None:
    one = pod("a", KOORDINATOR, gpus(entry(0)), container("main"), container("proxy"), init=(container("init"),))
    assert shares(read(one)) == [(uuid(0), "a", "main", 1.0)]


def test_a_pod_without_containers_holds_as_a_pod() -> None:
    one = replace(pod("a", KOORDINATOR, gpus(entry(0))), containers=())
    assert shares(read(one)) == [(uuid(0), "a", "", 1.0)]


def test_several_that_ask_hold_in_proportion() -> None:
    one = pod(
        "a",
        KOORDINATOR,
        gpus(entry(0), entry(1)),
        container("big", {"koordinator.sh/gpu-core": "150", "koordinator.sh/gpu-memory": "8Gi"}),
        container("small", {"koordinator.sh/gpu-core": "50", "koordinator.sh/gpu-memory": "8Gi"}),
    )
    assert shares(read(one)) == [
        (uuid(0), "a", "big", 0.75),
        (uuid(0), "a", "small", 0.25),
        (uuid(1), "a", "big", 0.75),
        (uuid(1), "a", "small", 0.25),
    ]


def test_several_that_ask_for_different_things_hold_equally() -> None:
    one = pod(
        "a",
        KOORDINATOR,
        gpus(entry(0, 50)),
        container("a", {"koordinator.sh/gpu-core": "50"}),
        container("b", {"nvidia.com/gpu": "1"}),
    )
    assert shares(read(one)) == [(uuid(0), "a", "a", 0.25), (uuid(0), "a", "b", 0.25)]


def test_an_init_container_that_is_done_holds_no_part_of_it() -> None:
    init = container("init", {"nvidia.com/gpu": "1"}, finished=True)
    one = pod("a", KOORDINATOR, gpus(entry(0)), container("main", {"nvidia.com/gpu": "1"}), init=(init,))
    assert shares(read(one)) == [(uuid(0), "a", "main", 1.0)]


@given(st.lists(st.integers(1, 400), min_size=1, max_size=5), st.integers(1, 100))
def test_what_a_pod_was_given_is_neither_more_nor_less_in_its_containers(amounts: list[int], core: int) -> None:
    containers = [container(f"c{n}", {"koordinator.sh/gpu-core": str(amount)}) for n, amount in enumerate(amounts)]
    allocation = read(pod("a", KOORDINATOR, gpus(entry(0, core)), *containers))
    assert sum(one.share or 0 for one in allocation.assignments) == pytest.approx(core / 100)


# What cannot be mapped


def test_a_bad_annotation_costs_only_its_pod(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = pod("bad", KOORDINATOR, "{"), pod("good", KOORDINATOR, gpus(entry(0)))
    feed = Feed((bad, good))
    source = AnnotationsAllocation(lambda: feed)
    with caplog.at_level(logging.WARNING, "podgpu.holders.annotations"):
        allocation = source.assignments(NODE)
        feed.pods = (replace(bad, labels=(("a", "b"),)), good)
        assert source.assignments(NODE) == allocation
    assert shares(allocation) == [(uuid(0), "good", "main", 1.0)]
    holder = Workload("ml", "bad", uid="uid-bad")
    assert allocation.unmapped == (Unmapped("annotations", "bad_annotation", KOORDINATOR, KOORDINATOR, holder),)
    assert len(caplog.messages) == 1, "said once, however often the pod changes"
    assert "ml/bad" in caplog.messages[0]
    assert KOORDINATOR in caplog.messages[0]


def test_devices_that_are_not_there() -> None:
    holder = Workload("ml", "a", "main", "uid-a", "id-m")
    text = gpus({"id": uuid(9)}, {"minor": 7}, {"id": f"{uuid(0)}[0-1]"}, {"id": "all"}, {"id": uuid(0)})
    allocation = read(pod("a", KOORDINATOR, text))
    assert shares(allocation) == [(uuid(0), "a", "main", None)]
    assert allocation.unmapped == tuple(
        Unmapped("annotations", reason, device, KOORDINATOR, holder)
        for device, reason in (
            (f"{uuid(0)}[0-1]", "unrecognised_id"),
            (uuid(9), "unknown_device"),
            ("all", "unrecognised_id"),
            ("nvidia7", "unknown_device"),
        )
    )


# The feed


def test_before_the_pods_were_read_there_is_no_answer() -> None:
    error = failure(lambda: AnnotationsAllocation(lambda: Feed(synced=False)).assignments(NODE))
    assert (error.reason, "API server" in str(error)) == ("not_synced", True)


def test_why_the_pods_could_not_be_read() -> None:
    feed = Feed(error=SourceError("forbidden", "not allowed: add a rule"), synced=False)
    error = failure(lambda: AnnotationsAllocation(lambda: feed).assignments(NODE))
    assert (error.reason, str(error)) == ("forbidden", "not allowed: add a rule")
    assert error is not feed.error


def test_an_api_server_that_is_away_takes_nothing_from_anybody() -> None:
    feed = Feed((pod("a", HAMI, hami(uuid(0))),), error=SourceError("unreachable", "it is down"))
    assert shares(AnnotationsAllocation(lambda: feed).assignments(NODE)) == [(uuid(0), "a", "main", 0.25)]


def test_annotations_are_read_once_and_of_a_changed_pod_again() -> None:
    read: list[str] = []

    class Watched(tuple[tuple[str, str], ...]):
        """Annotations that tell when somebody reads them."""

        def __iter__(self) -> Iterator[tuple[str, str]]:
            read.extend(text for _, text in super().__iter__())
            return super().__iter__()

    def watched(one: PodRecord) -> PodRecord:
        return replace(one, annotations=Watched(one.annotations))

    feed = Feed(tuple(watched(pod(f"p{number}", HAMI, hami(uuid(0)))) for number in range(3)))
    source = AnnotationsAllocation(lambda: feed)
    first = source.assignments(NODE)
    read.clear()
    assert source.assignments(list(NODE)) == first
    assert read == []
    feed.pods = (*feed.pods[:2], replace(feed.pods[2], phase="Succeeded"), watched(pod("p3", HAMI, hami(uuid(1)))))
    read.clear()
    second = source.assignments(NODE)
    assert [who for _, who, *_ in shares(second)] == ["p0", "p1", "p3"]
    assert set(read) == {hami(uuid(1))}
    assert source.assignments(NODE[1:]) != second


@given(
    st.permutations([pod(f"p{n}", KOORDINATOR, gpus(entry(n % 3, 10 + n))) for n in range(4)]), st.permutations(NODE)
)
def test_order_does_not_matter(pods: list[PodRecord], devices: list[Device]) -> None:
    expected = read(*sorted(pods, key=lambda one: one.name))
    assert AnnotationsAllocation(lambda: Feed(tuple(pods))).assignments(devices) == expected


texts = st.text(max_size=20) | st.sampled_from([hami(uuid(0)), gpus(entry(0)), "0,1", "[]", ";"])
keys = st.sampled_from([KOORDINATOR, HAMI, "hami.io/vgpu-mig-allocations", "4pd.io/vgpu-ids-new", f"{CARDS}0"])


@given(st.lists(st.tuples(keys, texts), max_size=5))
def test_any_annotations_give_an_answer(pairs: list[tuple[str, str]]) -> None:
    pods = [pod(f"p{n}", key, text) for n, (key, text) in enumerate(pairs)]
    allocation = read(*pods, pod("good", KOORDINATOR, gpus(entry(1))))
    assert (uuid(1), "good", "main", 1.0) in shares(allocation)
