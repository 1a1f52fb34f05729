"""Ids in somebody's hands onto devices: a holder holds each once, in whatever order the ids come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from podgpu.holders.holdings import HeldId, count_replicas, map_held, parse_id, replicas_of
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


def ids(held: list[tuple[Workload, str]]) -> list[HeldId]:
    return [HeldId(holder, "nvidia.com/gpu", text, parse_id(text)) for holder, text in held]


@given(HELD, st.sampled_from(NODES), st.randoms())
def test_the_order_does_not_matter(held: list[tuple[Workload, str]], node: tuple[Device, ...], dice: object) -> None:
    replicas = count_replicas(ids(held), replicas_of(TEXTS))
    first = map_held("kubelet", ids(held), node, replicas)
    dice.shuffle(held)  # type: ignore[attr-defined]
    assert map_held("kubelet", ids(held), node, replicas) == first


@given(HELD, st.sampled_from(NODES))
def test_every_id_has_a_device_or_a_reason(held: list[tuple[Workload, str]], node: tuple[Device, ...]) -> None:
    allocation = map_held("kubelet", ids(held), node)
    pairs = [(one.device, one.holder) for one in allocation.assignments]
    assert len(set(pairs)) == len(pairs)
    named = {holder for _, holder in pairs} | {one.holder for one in allocation.unmapped}
    # "all" on a node without a GPU names no device, and says so.
    assert named == {holder for holder, _ in held}


def test_replicas_in_somebodys_hands_count_though_they_are_not_healthy() -> None:
    held = ids([(Workload("ns", "p", "a"), f"{UUIDS[0]}::5")])
    (shared,) = count_replicas(held, replicas_of([f"{UUIDS[0]}::0", f"{UUIDS[0]}::1", "a card"])).items()
    assert shared == (held[0].device_id.shared, 3)  # type: ignore[union-attr]
    assert count_replicas(held, {}) == {}
