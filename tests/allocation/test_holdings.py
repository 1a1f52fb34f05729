"""Ids onto devices, reading after reading: what is remembered of the last one must not show."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from podgpu.allocation.holdings import HeldId, HeldMapping, count_replicas, map_held, parse_id, replicas_of
from podgpu.model import Device, Workload

UUIDS = [f"GPU-0000000{number}-1111-2222-3333-444444444444" for number in range(3)]
MIG = "MIG-aaaaaaaa-1111-2222-3333-444444444444"
NODES = [
    tuple(Device(number, uuid, "", "A100", minor=number) for number, uuid in enumerate(UUIDS)),
    (Device(0, UUIDS[0], "", "A100", 0, True), Device(0, UUIDS[0], "", "A100", 0, True, 7, "1g.5gb", (MIG,))),
    (),
]
TEXTS = [*UUIDS, *(f"{uuid}::{replica}" for uuid in UUIDS for replica in (0, 1, 10)), "nvidia1", MIG, "all", "a card"]

HOLDERS = st.builds(Workload, st.just("ns"), st.sampled_from("pq"), st.sampled_from("ab"))
HELD = st.lists(st.tuples(HOLDERS, st.sampled_from(TEXTS)), max_size=8)
READINGS = st.lists(st.tuples(HELD, st.sampled_from(NODES), st.sets(st.sampled_from(TEXTS))), max_size=6)


def ids(held: list[tuple[Workload, str]]) -> list[HeldId]:
    return [HeldId(holder, "nvidia.com/gpu", text, parse_id(text)) for holder, text in held]


@given(READINGS)
def test_a_mapping_that_remembers_says_what_a_new_one_says(
    readings: list[tuple[list[tuple[Workload, str]], tuple[Device, ...], set[str]]],
) -> None:
    remembering = HeldMapping("kubelet")
    for held, devices, registered in readings:
        replicas = count_replicas(ids(held), replicas_of(sorted(registered)))
        assert remembering.of(ids(held), devices, replicas) == map_held("kubelet", ids(held), devices, replicas)


@given(HELD, st.randoms())
def test_the_order_does_not_matter(held: list[tuple[Workload, str]], dice: object) -> None:
    remembering = HeldMapping("podlist")
    first = remembering.of(ids(held), NODES[0])
    dice.shuffle(held)  # type: ignore[attr-defined]
    assert remembering.of(ids(held), NODES[0]) == first


def test_who_is_as_before_is_not_mapped_again() -> None:
    mapping = HeldMapping("kubelet")
    held = [(Workload("ns", "p", "a"), UUIDS[0]), (Workload("ns", "q", "a"), UUIDS[1])]
    first = mapping.of(ids(held), NODES[0])
    again = mapping.of(ids([*reversed(held)]), NODES[0])
    assert all(one is other for one, other in zip(first.assignments, again.assignments, strict=True))


def test_replicas_in_somebodys_hands_count_though_they_are_not_healthy() -> None:
    held = ids([(Workload("ns", "p", "a"), f"{UUIDS[0]}::5")])
    (shared,) = count_replicas(held, replicas_of([f"{UUIDS[0]}::0", f"{UUIDS[0]}::1", "a card"])).items()
    assert shared == (held[0].device_id.shared, 3)  # type: ignore[union-attr]
    assert count_replicas(held, {}) == {}
