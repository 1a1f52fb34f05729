"""Tests the merging of sources that agree, complement or contradict each other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from podgpu.errors import SourceError
from podgpu.model import Allocation, Assignment, VcudaRequest, Workload
from podgpu.node.holders import Complete
from podgpu.node.holders.reader import merge

MAIN = Workload("ns", "p", "main")


def allocation(*assignments: Assignment) -> Allocation:
    return Allocation(assignments)


def merged_of(*readings: Allocation, complete: Complete = lambda w: w) -> Allocation:
    return merge(
        {reading.assignments[0].source: reading for reading in readings if reading.assignments},
        complete,
    )


def test_contradictory_identities_are_rejected() -> None:
    def complete(workload: Workload) -> Workload:
        raise SourceError("identity_conflict", "uid and names of different pods")

    merged = merged_of(allocation(Assignment("GPU-1", MAIN, "kubelet")), complete=complete)
    assert merged.assignments == ()
    assert [u.reason for u in merged.unmapped] == ["identity_conflict"]


def test_a_recreated_pod_is_another_pod() -> None:
    old, new = Workload("ns", "p", "main", uid="u-1"), Workload("ns", "p", "main", uid="u-2")
    merged = merged_of(
        allocation(Assignment("GPU-1", old, "annotations")),
        allocation(Assignment("GPU-1", new, "kubelet", "3")),
    )
    assert merged.assignments == (Assignment("GPU-1", old, "annotations", share=1.0),)
    assert [(u.source, u.reason, u.holder.uid) for u in merged.unmapped] == [
        ("kubelet", "identity_conflict", "u-2")
    ]


def test_identities_join_assignments_by_name_and_by_uid() -> None:
    def complete(workload: Workload) -> Workload:
        return Workload("ns", "p", workload.container, "u-1")

    by_uid = Assignment("GPU-1", Workload(uid="u-1", container="main"), "checkpoint", share=0.5)
    merged = merged_of(
        allocation(Assignment("GPU-1", MAIN, "kubelet")), allocation(by_uid), complete=complete
    )
    assert merged == allocation(
        Assignment("GPU-1", Workload("ns", "p", "main", "u-1"), "kubelet", share=0.5)
    )


def test_processes_are_used_only_for_devices_without_a_holder() -> None:
    seen = Workload("ns", "q", "main")
    merged = merged_of(
        allocation(Assignment("GPU-1", MAIN, "kubelet")),
        allocation(
            Assignment("GPU-1", seen, "processes"),
            Assignment("GPU-2", seen, "processes"),
            Assignment("GPU-3", MAIN, "processes"),
        ),
    )
    assert {(a.device, a.holder.pod, a.share) for a in merged.assignments} == {
        ("GPU-1", "p", 1.0),
        ("GPU-2", "q", None),
    }
    assert merged.unmapped == ()


def test_unknown_shares() -> None:
    a, b = Workload("ns", "a", "c"), Workload("ns", "b", "c")
    sliced = merged_of(
        allocation(Assignment("GPU-1", a, "kubelet", "0"), Assignment("GPU-1", b, "kubelet", "1"))
    )
    assert [x.share for x in sliced.assignments] == [None, None], "the number of slices is unknown"
    alone = merged_of(allocation(Assignment("GPU-1", a, "kubelet", "0")))
    assert [x.share for x in alone.assignments] == [None], "a slice is not a whole device"
    unknown = merged_of(
        allocation(Assignment("GPU-1", a, "podlist"), Assignment("GPU-1", b, "podlist"))
    )
    assert [x.share for x in unknown.assignments] == [None, None]


def test_the_checkpoint_completes_the_kubelet_and_adds_no_holders() -> None:
    ghost = Assignment("GPU-2", Workload("ns", "ended", "main"), "checkpoint", share=1.0)
    noted = Assignment("GPU-1", MAIN, "checkpoint", share=0.25)
    merged = merged_of(
        allocation(Assignment("GPU-1", MAIN, "kubelet", "3")), allocation(noted, ghost)
    )
    assert merged == allocation(Assignment("GPU-1", MAIN, "kubelet", "3", 0.25))
    assert len(merge({"checkpoint": allocation(noted, ghost)}).assignments) == 2, (
        "the checkpoint is the only source"
    )
    assert merge({"kubelet": allocation(), "checkpoint": allocation(ghost)}) == Allocation()


WORKLOADS = st.builds(Workload, st.just("ns"), st.sampled_from("pqr"), st.sampled_from(["a", "b"]))
READINGS = st.lists(
    st.tuples(
        st.sampled_from(["kubelet", "podlist", "processes"]),
        st.lists(st.tuples(st.sampled_from(["G1", "G2", "G3"]), WORKLOADS), max_size=6),
    ),
    max_size=3,
    unique_by=lambda r: r[0],
)


@given(READINGS)
def test_every_assignment_is_merged_or_counted(
    readings: list[tuple[str, list[tuple[str, Workload]]]],
) -> None:
    allocations = [
        allocation(*(Assignment(d, w, name) for d, w in dict.fromkeys(pairs)))
        for name, pairs in readings
    ]
    merged = merged_of(*allocations)
    claimed = {
        (a.device, a.holder): a.source for reading in allocations for a in reading.assignments
    }
    kept = {(a.device, a.holder) for a in merged.assignments}
    refused = {(u.device_id, u.holder) for u in merged.unmapped}
    assert kept <= set(claimed)
    assert len(kept) == len(merged.assignments), "each holder must be listed once per device"
    for pair, source in claimed.items():
        assert pair in kept or pair in refused or source == "processes"
    if allocations:
        assert {(a.device, a.holder) for a in allocations[0].assignments} <= kept or readings[0][
            0
        ] == "processes"


def test_vcuda_requests_of_several_sources() -> None:
    first, second, other = (
        VcudaRequest.for_holder(workload, cores, 1)
        for workload, cores in ((MAIN, 200), (MAIN, 100), (Workload("ns", "a", "main"), 10))
    )
    sources = {
        "annotations": Allocation(vcuda=(first,)),
        "kubelet": Allocation(vcuda=(second, other)),
    }
    assert merge(sources).vcuda == (other, first)
    lagging = {"kubelet": Allocation(vcuda=(first,)), "checkpoint": Allocation(vcuda=(other,))}
    assert merge(lagging).vcuda == (first,)
