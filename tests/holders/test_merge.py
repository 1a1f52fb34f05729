"""Sources that agree, complete and contradict each other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from podgpu.errors import SourceError
from podgpu.holders.merge import Complete, merge
from podgpu.model import Allocation, Assignment, Workload

MAIN = Workload("ns", "p", "main")


def told(*assignments: Assignment) -> Allocation:
    return Allocation(assignments)


def merged_of(*readings: Allocation, complete: Complete = lambda w: w) -> Allocation:
    return merge({reading.assignments[0].source: reading for reading in readings if reading.assignments}, complete)


def test_two_that_agree_are_one() -> None:
    merged = merged_of(told(Assignment("GPU-1", MAIN, "kubelet")), told(Assignment("GPU-1", MAIN, "checkpoint")))
    assert merged == told(Assignment("GPU-1", MAIN, "kubelet", share=1.0))


def test_the_second_completes_the_first() -> None:
    identified = Workload("ns", "p", "main", uid="u-1", container_id="c-1")
    merged = merged_of(
        told(Assignment("GPU-1", MAIN, "kubelet", replica="0")),
        told(Assignment("GPU-1", identified, "annotations", share=0.25, attributes=(("a", "b"),))),
    )
    assert merged == told(Assignment("GPU-1", identified, "kubelet", "0", 0.25, (("a", "b"),)))


def test_a_contradiction_is_refused_and_counted() -> None:
    """HAMi's annotation says which GPU is used; the kubelet's id for the same container names another."""
    merged = merged_of(told(Assignment("GPU-1", MAIN, "annotations")), told(Assignment("GPU-2", MAIN, "kubelet")))
    assert [a.device for a in merged.assignments] == ["GPU-1"]
    assert [(u.source, u.reason, u.device_id) for u in merged.unmapped] == [("kubelet", "contradicted", "GPU-2")]


def test_identities_that_disagree_are_refused() -> None:
    def complete(workload: Workload) -> Workload:
        raise SourceError("identity_conflict", "uid and names of different pods")

    merged = merged_of(told(Assignment("GPU-1", MAIN, "kubelet")), complete=complete)
    assert merged.assignments == ()
    assert [u.reason for u in merged.unmapped] == ["identity_conflict"]


def test_a_pod_that_was_made_anew_is_not_taken_for_the_one_before() -> None:
    """Same names, other uid: what is said of the one is not true of the other."""
    old, new = Workload("ns", "p", "main", uid="u-1"), Workload("ns", "p", "main", uid="u-2")
    merged = merged_of(told(Assignment("GPU-1", old, "annotations")), told(Assignment("GPU-1", new, "kubelet", "3")))
    assert merged.assignments == (Assignment("GPU-1", old, "annotations", share=1.0),)
    assert [(u.source, u.reason, u.holder.uid) for u in merged.unmapped] == [("kubelet", "identity_conflict", "u-2")]


def test_names_from_elsewhere_join_what_uid_and_names_tell_apart() -> None:
    def complete(workload: Workload) -> Workload:
        return Workload("ns", "p", workload.container, "u-1")

    by_uid = Assignment("GPU-1", Workload(uid="u-1", container="main"), "checkpoint", share=0.5)
    merged = merged_of(told(Assignment("GPU-1", MAIN, "kubelet")), told(by_uid), complete=complete)
    assert merged == told(Assignment("GPU-1", Workload("ns", "p", "main", "u-1"), "kubelet", share=0.5))


def test_who_is_seen_at_work_counts_only_on_a_device_nobody_holds() -> None:
    seen = Workload("ns", "q", "main")
    merged = merged_of(
        told(Assignment("GPU-1", MAIN, "kubelet")),
        told(
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


def test_shares_where_nobody_said() -> None:
    a, b = Workload("ns", "a", "c"), Workload("ns", "b", "c")
    sliced = merged_of(told(Assignment("GPU-1", a, "kubelet", "0"), Assignment("GPU-1", b, "kubelet", "1")))
    assert [x.share for x in sliced.assignments] == [None, None], "how many slices there are nobody told"
    alone = merged_of(told(Assignment("GPU-1", a, "kubelet", "0")))
    assert [x.share for x in alone.assignments] == [None], "a slice is not the whole, though nobody holds another"
    unknown = merged_of(told(Assignment("GPU-1", a, "podlist"), Assignment("GPU-1", b, "podlist")))
    assert [x.share for x in unknown.assignments] == [None, None]


def test_the_kubelets_checkpoint_completes_the_kubelet_and_adds_no_ghosts() -> None:
    """It keeps pods that ended until the next one comes."""
    ghost = Assignment("GPU-2", Workload("ns", "ended", "main"), "checkpoint", share=1.0)
    noted = Assignment("GPU-1", MAIN, "checkpoint", share=0.25)
    merged = merged_of(told(Assignment("GPU-1", MAIN, "kubelet", "3")), told(noted, ghost))
    assert merged == told(Assignment("GPU-1", MAIN, "kubelet", "3", 0.25))
    assert len(merge({"checkpoint": told(noted, ghost)}).assignments) == 2, "alone it is all there is"
    assert merge({"kubelet": told(), "checkpoint": told(ghost)}) == Allocation()


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
def test_nothing_is_invented_and_nothing_is_lost_silently(
    readings: list[tuple[str, list[tuple[str, Workload]]]],
) -> None:
    allocations = [told(*(Assignment(d, w, name) for d, w in dict.fromkeys(pairs))) for name, pairs in readings]
    merged = merged_of(*allocations)
    claimed = {(a.device, a.holder): a.source for reading in allocations for a in reading.assignments}
    kept = {(a.device, a.holder) for a in merged.assignments}
    refused = {(u.device_id, u.holder) for u in merged.unmapped}
    assert kept <= set(claimed)
    assert len(kept) == len(merged.assignments), "a holder once per device"
    for pair, source in claimed.items():
        assert pair in kept or pair in refused or source == "processes"
    if allocations:
        assert {(a.device, a.holder) for a in allocations[0].assignments} <= kept or readings[0][0] == "processes"
