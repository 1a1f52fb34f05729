"""Tests the reader of all allocation sources: caching, ended pods, statuses, and messages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from podgpu.clock import Clock
from podgpu.errors import SourceError
from podgpu.kube.objects import PodRecord
from podgpu.model import Allocation, Assignment, Device, Unmapped, VcudaRequest, Workload
from podgpu.node.holders import AllocationSource
from podgpu.node.holders.identity import Identities, parse_log_name
from podgpu.node.holders.reader import (
    GRACE_SECONDS,
    AllocationReader,
    HolderSources,
    describe,
    explain,
    find_existing_gpus,
    merge,
    reject_ended,
)
from podgpu.workers import ErrorCounts, Workers
from tests.nodes.clock import FakeClock

DEVICES = (Device(0, "GPU-1"), Device(1, "GPU-2"))
TRAIN, SERVE = Workload("ns", "train", "main"), Workload("ns", "serve", "main")
UID = "0f1f4ffc-0b8c-4d53-9b1e-6b2d0f9b8a10"
FAILED = SourceError("unavailable", "it is stopped")


def held(
    source: str, *holders: tuple[str, Workload], instance: int = 0, **more: object
) -> Allocation:
    assignments = tuple(Assignment(device, holder, source) for device, holder in holders)
    return Allocation(assignments, source_instance=instance, **more)  # type: ignore[arg-type]


@dataclass
class FakeSource(AllocationSource):
    """Returns its current answer, or raises it."""

    name: str
    answer: Allocation | Exception

    def assignments(self, devices: Sequence[Device]) -> Allocation:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@dataclass
class Node:
    """Reads fake sources. The identities, processes and clock can be changed."""

    sources: list[FakeSource]
    identities: Identities = field(default_factory=Identities)
    processes: tuple[Workload, ...] | None = None
    clock: FakeClock = field(default_factory=FakeClock)
    process_reads: int = 0

    def __post_init__(self) -> None:
        self.workers = Workers()
        self.errors = ErrorCounts()
        sources = HolderSources(self.sources, lambda: self.identities, self._read_processes)
        clock = Clock(self.clock.monotonic, self.clock.wall)
        self.reader = AllocationReader(sources, self.workers, self.errors, clock)

    def _read_processes(self) -> tuple[Workload, ...] | None:
        self.process_reads += 1
        return self.processes

    def read(self, seconds: float = 0.0, devices: Sequence[Device] = DEVICES) -> Allocation:
        self.clock.advance(seconds)
        return self.reader.read(devices)

    def pods(self, seconds: float = 0.0) -> list[str]:
        return sorted(one.holder.pod for one in self.read(seconds).assignments)


MakeNode = Callable[..., Node]


@pytest.fixture
def make_node() -> Iterator[MakeNode]:
    nodes: list[Node] = []

    def make(*sources: tuple[str, Allocation | Exception], **more: object) -> Node:
        node = Node([FakeSource(*source) for source in sources], **more)  # type: ignore[arg-type]
        nodes.append(node)
        return node

    yield make
    for node in nodes:
        node.workers.close()


def logs(*names: str) -> Identities:
    return Identities(frozenset(filter(None, map(parse_log_name, names))))


# Sources that do not answer or have restarted


def test_holders_stay_for_a_while_if_a_source_fails(make_node: MakeNode) -> None:
    vcuda = VcudaRequest.for_holder(TRAIN, 100, 4)
    unmapped = Unmapped("kubelet", "unrecognised_id", "card", "nvidia.com/gpu", SERVE)
    answer = held("kubelet", ("GPU-1", TRAIN), unmapped=(unmapped,), vcuda=(vcuda,))
    node = make_node(("kubelet", Allocation(answer.assignments, (unmapped,), (vcuda,), {"GPU-1"})))  # type: ignore[arg-type]
    first = node.read()
    node.sources[0].answer = FAILED
    for allocation in (node.read(1.0), node.read(GRACE_SECONDS - 1.0)):
        assert allocation.assignments == first.assignments
        assert (allocation.unmapped, allocation.vcuda) == ((unmapped,), (vcuda,))
        assert allocation.offered == {"GPU-1"}
        (status,) = allocation.sources
        assert (status.up, status.error) == (False, "unavailable")
    late = node.read(1.0)
    assert (late.assignments, late.unmapped, late.vcuda, late.offered) == ((), (), (), frozenset())


def test_a_source_that_never_answered_has_no_holders(make_node: MakeNode) -> None:
    node = make_node(("kubelet", FAILED), ("hpc", held("hpc", ("GPU-1", Workload(job="7")))))
    allocation = node.read()
    assert [one.holder.job for one in allocation.assignments] == ["7"]
    assert [(one.name, one.up) for one in allocation.sources] == [("kubelet", False), ("hpc", True)]


def test_an_empty_answer_is_kept_while_a_source_fails(make_node: MakeNode) -> None:
    """A lagging source then still only adds details."""
    ghost = held("checkpoint", ("GPU-1", TRAIN))
    node = make_node(("kubelet", Allocation()), ("checkpoint", ghost))
    assert node.pods() == []
    node.sources[0].answer = FAILED
    assert node.pods(GRACE_SECONDS) == []
    assert node.pods(1.0) == ["train"]


def test_holders_that_a_source_no_longer_lists_are_removed_at_once(make_node: MakeNode) -> None:
    node = make_node(("kubelet", held("kubelet", ("GPU-1", TRAIN), ("GPU-2", SERVE))))
    assert node.pods() == ["serve", "train"]
    node.sources[0].answer = held("kubelet", ("GPU-2", SERVE))
    assert node.pods(1.0) == ["serve"]


def test_a_restarted_source_keeps_its_holders_for_a_while(
    make_node: MakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    node = make_node(("kubelet", held("kubelet", ("GPU-1", TRAIN), ("GPU-2", SERVE))))
    assert node.pods() == ["serve", "train"]
    node.sources[0].answer = held("kubelet", ("GPU-2", SERVE), instance=1)
    for _ in range(6):
        assert node.pods(10.0) == ["serve", "train"]
    (message,) = caplog.messages
    assert message.startswith("kubelet restarted and no longer lists 1 GPU containers")
    assert "60 s" in message
    assert node.pods(10.0) == ["serve"]
    node.sources[0].answer = held("kubelet", ("GPU-1", TRAIN), ("GPU-2", SERVE), instance=1)
    assert node.pods() == ["serve", "train"]


def test_a_holder_returns_to_a_restarted_source(make_node: MakeNode) -> None:
    node = make_node(("kubelet", held("kubelet", ("GPU-1", TRAIN))))
    assert node.pods() == ["train"]
    node.sources[0].answer = held("kubelet", instance=1)
    assert node.pods(30.0) == ["train"]
    node.sources[0].answer = held("kubelet", ("GPU-1", TRAIN), instance=1)
    assert node.pods(40.0) == ["train"]
    node.sources[0].answer = held("kubelet", instance=1)
    assert node.pods(1.0) == []


def test_a_new_holder_of_the_device_replaces_the_old_one(make_node: MakeNode) -> None:
    """A device that was shared can have another holder more."""
    node = make_node(("kubelet", held("kubelet", ("GPU-1", TRAIN))))
    node.pods()
    node.sources[0].answer = held("kubelet", ("GPU-1", SERVE), instance=1)
    assert node.pods() == ["serve"]

    shared = make_node(("kubelet", held("kubelet", ("GPU-1", TRAIN), ("GPU-1", SERVE))))
    shared.pods()
    new = Workload("ns", "new", "main")
    shared.sources[0].answer = held("kubelet", ("GPU-1", new), instance=1)
    assert shared.pods() == ["new", "serve", "train"]


def test_holders_stay_while_their_containers_run(make_node: MakeNode) -> None:
    directory = f"ns_train_{UID}"
    node = make_node(
        ("kubelet", held("kubelet", ("GPU-1", TRAIN))),
        identities=logs(directory),
        processes=(Workload(uid=UID),),
    )
    assert node.pods() == ["train"]
    assert node.process_reads == 0
    node.sources[0].answer = FAILED
    assert node.pods(10 * GRACE_SECONDS) == ["train"]
    assert node.process_reads == 1
    node.processes = (Workload(uid="another"),)
    assert node.pods(1.0) == []


# Pods that have ended, in a file that nobody maintains


def test_the_pods_of_podlist_are_compared_with_the_kubelet(make_node: MakeNode) -> None:
    listed = Allocation(listed_pods=frozenset({("ns", "other")}))
    node = make_node(("podlist", held("podlist", ("GPU-1", TRAIN))), ("kubelet", listed))
    assert node.pods() == ["train"]
    assert node.pods(GRACE_SECONDS) == ["train"]
    node.sources[1].answer = FAILED
    assert node.pods(1.0) == ["train"]
    node.sources[1].answer = listed
    assert node.pods(1.0) == ["train"]
    allocation = node.read(GRACE_SECONDS)
    assert allocation.assignments == ()
    assert allocation.unmapped == (Unmapped("podlist", "ended", "GPU-1", "", TRAIN),)


def test_processes_prove_that_a_pod_runs_or_has_ended(make_node: MakeNode) -> None:
    identified = Workload("ns", "train", "main", UID)
    node = make_node(
        ("podlist", held("podlist", ("GPU-1", identified))), processes=(Workload(uid=UID),)
    )
    assert node.pods() == ["train"]
    node.processes = (Workload(uid="another"),)
    assert node.pods() == []


def test_only_outdated_sources_are_checked() -> None:
    readings = {
        "podlist": held("podlist", ("GPU-1", TRAIN), ("GPU-2", SERVE)),
        "kubelet": held("kubelet", ("GPU-1", TRAIN)),
    }
    checked = reject_ended(readings, lambda workload: workload, TRAIN.__eq__)
    assert checked["kubelet"] == readings["kubelet"]
    assert [one.holder for one in checked["podlist"].assignments] == [SERVE]
    assert checked["podlist"].unmapped == (Unmapped("podlist", "ended", "GPU-1", "", TRAIN),)

    def contradict(workload: Workload) -> Workload:
        raise SourceError("identity_conflict", "different pods")

    assert reject_ended(readings, contradict, lambda _: False) == readings


# Identities, statuses and messages


def test_problems_of_identities_are_a_status(make_node: MakeNode) -> None:
    """A directory that does not exist is not a problem, because not every node mounts it."""
    missing = Identities(problems=(SourceError("file_missing", "no directory"),))
    node = make_node(("hpc", Allocation()), identities=missing)
    assert [one.name for one in node.read().sources] == ["hpc"]
    denied = SourceError("permission_denied", "not allowed")
    node.identities = Identities(problems=(*missing.problems, denied))
    _, status = node.read().sources
    assert (status.name, status.up, status.error) == ("identities", False, "permission_denied")
    node.identities = Identities()
    _, status = node.read().sources
    assert (status.name, status.up) == ("identities", True)
    assert node.errors.add_to((), ())[0].errors == {"permission_denied": 1}


def test_identities_that_cannot_be_read_are_kept(make_node: MakeNode) -> None:
    node = make_node(("kubelet", held("kubelet", ("GPU-1", TRAIN))))
    node.identities = logs(f"ns_train_{UID}")
    assert node.read().assignments[0].holder.uid == UID
    assert node.reader.complete(TRAIN).uid == UID
    node.identities = None  # type: ignore[assignment]
    assert node.read().assignments[0].holder.uid == UID


def test_what_a_reading_says_about_itself(make_node: MakeNode) -> None:
    unknown = Unmapped("kubelet", "unknown_device", "GPU-9", "nvidia.com/gpu", TRAIN)
    other = Unmapped("kubelet", "unrecognised_id", "card", "nvidia.com/gpu", TRAIN)
    pod = PodRecord("ns", "train", "node-uid", api_uid="api-uid")
    node = make_node(
        ("kubelet", Allocation(unmapped=(unknown, other))), identities=Identities(pods=(pod,))
    )
    allocation = node.read()
    assert allocation.unmapped == (unknown, other)
    assert allocation.at == node.clock.wall()
    assert allocation.api_uids == {"node-uid": "api-uid"}
    assert node.read(devices=()).unmapped == (other,), "without GPUs, all ids are unknown"


def test_merged_readings_keep_what_each_source_offers() -> None:
    unmapped = [Unmapped(name, "ended", "GPU-1", "", TRAIN) for name in ("podlist", "kubelet")]
    merged = merge(
        {
            "podlist": Allocation(unmapped=(unmapped[0],), offered=frozenset({"GPU-1"})),
            "kubelet": Allocation(unmapped=(unmapped[1],), offered=frozenset({"GPU-2"})),
        }
    )
    assert merged.unmapped == tuple(unmapped)
    assert merged.offered == {"GPU-1", "GPU-2"}


def test_a_holder_has_the_fields_of_all_its_sources() -> None:
    """The first source decides, and later ones fill what it does not know."""
    first = Assignment("GPU-1", TRAIN, "podlist", attributes=(("a", "first"),))
    second = Assignment(
        "GPU-1",
        Workload("ns", "train", "main", UID),
        "kubelet",
        "3",
        0.5,
        (("a", "second"), ("b", "second")),
    )
    (one,) = merge({"podlist": Allocation((first,)), "kubelet": Allocation((second,))}).assignments
    assert one == Assignment(
        "GPU-1", second.holder, "podlist", "3", 0.5, (("a", "first"), ("b", "second"))
    )


def test_a_claim_on_another_device_contradicts_the_first_source() -> None:
    merged = merge(
        {
            "podlist": held("podlist", ("GPU-1", TRAIN)),
            "kubelet": held("kubelet", ("GPU-1", TRAIN), ("GPU-2", TRAIN)),
        }
    )
    assert [one.device for one in merged.assignments] == ["GPU-1"]
    assert merged.unmapped == (Unmapped("kubelet", "contradicted", "GPU-2", "", TRAIN),)


def test_a_share_of_a_sole_holder_is_one_only_if_it_is_certain() -> None:
    def share(source: str, **more: object) -> float | None:
        claim = Assignment("GPU-1", TRAIN, source, **more)  # type: ignore[arg-type]
        return merge({source: Allocation((claim,))}).assignments[0].share

    assert share("kubelet") == 1.0
    assert share("kubelet", share=0.25) == 0.25
    assert share("kubelet", replica="1") is None
    assert share("kubelet", is_shared=True) is None
    assert share("processes") is None


def test_merged_assignments_are_sorted() -> None:
    merged = merge(
        {"kubelet": held("kubelet", ("GPU-2", SERVE), ("GPU-1", TRAIN), ("GPU-1", SERVE))}
    )
    assert [(one.device, one.holder.pod) for one in merged.assignments] == [
        ("GPU-1", "serve"),
        ("GPU-1", "train"),
        ("GPU-2", "serve"),
    ]


def test_requests_with_contradictory_identities_are_left_out() -> None:
    def complete(workload: Workload) -> Workload:
        if workload.pod == "train":
            raise SourceError("identity_conflict", "different pods")
        return Workload(workload.namespace, workload.pod, workload.container, UID)

    requests = tuple(VcudaRequest.for_holder(one, 50, 2) for one in (TRAIN, SERVE))
    merged = merge({"kubelet": Allocation(vcuda=requests)}, complete)
    (request,) = merged.vcuda
    assert (request.pod, request.uid, request.cores, request.memory_blocks) == (
        "serve",
        UID,
        50,
        2,
    )


@pytest.mark.parametrize(
    ("unmapped", "text"),
    [
        (("kubelet", "unknown_device", "GPU-9", "a/gpu", TRAIN), "ns/train/main holds a/gpu GPU-9"),
        (("podlist", "unknown_device", "7", "podlist", TRAIN), "ns/train/main holds 7"),
        (("processes", "unknown_device", "GPU-9", "pid", TRAIN), "ns/train/main uses GPU-9"),
        (("processes", "not_permitted", "GPU-9", "pid", Workload()), "a process uses GPU-9"),
        (("hpc", "unknown_device", "7", "hpc", Workload(job="9")), "job 9 is in the job file 7"),
        (("hpc", "permission_denied", "7", "hpc", Workload()), "job file 7"),
        (
            ("annotations", "bad_annotation", "a/b", "", TRAIN),
            "ns/train/main has the annotation a/b",
        ),
        (("kubelet", "unknown_device", "a\nb", "", TRAIN), "ns/train/main holds a\\nb"),
    ],
)
def test_descriptions(unmapped: tuple[str, str, str, str, Workload], text: str) -> None:
    assert describe(Unmapped(*unmapped)) == text


def test_explanations() -> None:
    def explained(source: str, reason: str) -> str:
        return explain(Unmapped(source, reason, "x", "", TRAIN)).reason

    assert explained("kubelet", "unknown_device") == "no GPU of this node has that id"
    assert explained("hpc", "unknown_device") == "no such GPU or GPU instance on this node"
    assert explained("kubelet", "new") == "it cannot be used (new)"
    assert explain(Unmapped("kubelet", "new", "x", "", TRAIN)).advice == "check the exporter's log"
    assert explain(Unmapped("kubelet", "contradicted", "x", "", TRAIN)).harmless
    assert not explain(Unmapped("kubelet", "unknown_device", "x", "", TRAIN)).harmless


def test_lost_gpus() -> None:
    gpu = "GPU-5d3c1f2e-8a31-4d5b-9f0a-2f6c0b1d7e10"
    unknown = Unmapped("kubelet", "unknown_device", gpu, "nvidia.com/gpu", TRAIN)
    others = [
        Unmapped("kubelet", "unknown_device", "no id", "nvidia.com/gpu", TRAIN),
        Unmapped("kubelet", "contradicted", gpu[:-1] + "1", "", TRAIN),
        Unmapped("podlist", "unknown_device", gpu[:-1] + "2", "", TRAIN),
    ]
    assert find_existing_gpus({"GPU-1"}, [*others, unknown], some_lost=True) == {"GPU-1", gpu}
    assert find_existing_gpus({"GPU-1"}, [*others, unknown], some_lost=False) == {"GPU-1"}
