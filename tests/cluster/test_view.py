"""The view as a whole: nodes that report twice, GPUs that move, old data, and that it holds together whatever comes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podgpu.cluster.reading import ClusterReading, TargetOutcome
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.view import ClusterView, Memory, assemble
from podgpu.figures.device import Condition, DeviceFigures, Trouble
from podgpu.model import Workload
from tests.cluster.view_readings import (
    WALL,
    duplicates,
    expositions_of,
    gpu,
    holder,
    node,
    node_readings,
    readings,
    text_of,
    value,
    view_of,
)


def devices(view: ClusterView) -> dict[str, list[str]]:
    return {one.name: [device.uuid for device in one.devices] for one in view.nodes}


# A node that reports twice


def test_of_two_targets_that_tell_of_one_node_the_newest_counts() -> None:
    older = node("n1", gpu(0, utilization=0.1), target="http://10.0.0.1:9400", read_at=1)
    newer = node("n1", gpu(0, utilization=0.2), target="http://10.0.0.2:9400", read_at=2)
    for order in ((older, newer), (newer, older)):
        view = view_of(*order, at=3)
        (one,) = view.nodes
        assert one.target == newer.target
        assert [d.utilization for d in one.devices] == [0.2]
        assert any(older.target in note for note in one.notes)
        assert value(view, "podgpu_node_gpus", node="n1", model=one.devices[0].model) == 1


def test_ties_are_broken_by_the_nodes_clock_and_then_by_the_target() -> None:
    first = node("n1", target="b", taken_at=5.0)
    assert view_of(first, node("n1", target="a", taken_at=4.0)).nodes[0].target == "b"
    assert view_of(first, node("n1", target="a", taken_at=5.0)).nodes[0].target == "a"
    assert view_of(first, node("n1", target="a", taken_at=None)).nodes[0].target == "b"


def test_two_targets_do_not_take_turns() -> None:
    memory = Memory()
    for at in range(0, 90, 15):
        readings = [node("n1", target="a", read_at=at + (at % 2)), node("n1", target="b", read_at=at + 0.5)]
        assert view_of(*readings, at=at + 2, memory=memory).nodes[0].target == "b"
    gone = node("n1", target="b", read_at=75.5)
    assert view_of(gone, node("n1", target="a", read_at=105), at=106, memory=memory).nodes[0].target == "a"


def test_a_node_without_a_name_that_has_a_named_nodes_gpus_is_that_node() -> None:
    named = node("n1", gpu(0), gpu(1), read_at=1)
    address = node("10.0.0.1:9400", gpu(0), gpu(1), named=False, read_at=2)
    view = view_of(address, named, at=3)
    assert devices(view) == {"n1": ["GPU-0", "GPU-1"]}
    assert view.nodes[0].notes == ("also read as 10.0.0.1:9400: the same GPUs under another address",)


def test_two_addresses_of_one_node_are_one_and_the_same_one_every_time() -> None:
    memory = Memory()
    for at, newer in enumerate("abab"):
        nodes = (node(name, gpu(0), named=False, read_at=at + (name == newer) / 2) for name in "ab")
        assert list(devices(view_of(*nodes, at=at + 1, memory=memory))) == ["a"]


def test_an_address_that_fell_silent_gives_way_to_the_other() -> None:
    silent = node("a", gpu(0), named=False, read_at=0)
    assert list(devices(view_of(silent, node("b", gpu(0), named=False, read_at=60), at=61))) == ["b"]


def test_gpus_without_uuids_are_not_each_others() -> None:
    view = view_of(node("n1", gpu(0, uuid="gpu 0"), named=False), node("n2", gpu(0, uuid="gpu 0"), named=False))
    assert devices(view) == {"n1": ["gpu 0"], "n2": ["gpu 0"]}
    assert not view.nodes[0].notes


# A GPU that moved


def test_a_gpu_that_moved_is_where_it_was_seen_last() -> None:
    before = node("n1", gpu(0), gpu(1), read_at=0)
    after = node("n2", gpu(0), read_at=60)
    view = view_of(before, after, at=61)
    assert devices(view) == {"n1": ["GPU-1"], "n2": ["GPU-0"]}
    assert view.nodes[0].old
    assert view.nodes[0].notes == ("GPU-0 is on n2 now",)
    assert view.nodes[1].notes == ("GPU-0 was on n1 before",)


def lost(index: int) -> DeviceFigures:
    return gpu(index, conditions=(Condition.of("lost", 1.0),), present=False)


@pytest.mark.parametrize(("first", "then"), [("n1", "n2"), ("n2", "n1")])
def test_a_gpu_that_one_node_misses_is_where_it_answers(first: str, then: str) -> None:
    """It was put into another machine; the exporter of the first remembers it until it is told to forget."""
    view = view_of(node(first, lost(0), gpu(1), trouble=Trouble(lost=1)), node(then, gpu(0, holder("a"))))
    assert devices(view) == {first: ["GPU-1"], then: ["GPU-0"]}
    notes = {n.name: n.notes for n in view.nodes}
    assert notes == {first: (f"GPU-0 is on {then} now",), then: (f"GPU-0 was on {first} before",)}
    assert view.alerts == (), "nor is it missed"


def test_a_gpu_that_both_nodes_miss_is_broken_on_both() -> None:
    view = view_of(node("n1", lost(0)), node("n2", lost(0)))
    assert devices(view) == {"n1": ["GPU-0"], "n2": ["GPU-0"]}
    assert view.nodes[0].notes == ("GPU-0 is on n2 too, it says",)


def test_a_gpu_that_two_fresh_nodes_claim_stays_on_both_and_counts_once() -> None:
    view = view_of(
        node("n1", gpu(0, holder("a"), measured=50.0)),
        node("n2", gpu(0, holder("b"), measured=70.0), gpu(1, measured=30.0)),
    )
    assert devices(view) == {"n1": ["GPU-0"], "n2": ["GPU-0", "GPU-1"]}
    assert view.nodes[0].notes == ("GPU-0 is on n2 too, it says",)
    assert value(view, "avg_GPU_utilization") == 40
    assert value(view, "podgpu_used_gpus", scope="cluster") == 2
    assert value(view, "podgpu_used_gpus", scope="node", node="n2") == 2
    model = view.nodes[0].devices[0].model
    assert value(view, "podgpu_model_gpus", model=model) == 2
    assert value(view, "podgpu_namespace_allocated_gpus", namespace="ml", model=model) == 1


# Old, and then gone


def test_old_nodes_are_marked_left_out_of_counts_and_then_dropped() -> None:
    held = gpu(0, holder(), measured=80.0)
    fresh = view_of(node("n1", held), at=45)
    assert (fresh.nodes[0].old, value(fresh, "avg_GPU_utilization")) == (False, 80)
    old = view_of(node("n1", held), at=46)
    assert old.nodes[0].old
    assert not old.has_fresh_nodes
    assert value(old, "avg_GPU_utilization") is None
    assert value(old, "podgpu_cluster_node_up", node="n1") == 0
    assert value(old, "podgpu_cluster_node_last_seen_timestamp_seconds", node="n1") == WALL
    assert "pod_and_gpu_map_info{" in text_of(old)
    assert "podgpu_node_gpus" not in text_of(old)
    assert view_of(node("n1", held), at=301).nodes == ()


def test_notes_say_what_is_wrong_and_where() -> None:
    failed = TargetOutcome("http://n1:9400/metrics", 5.0, "timeout", "no answer within 5 s")
    lost = TargetOutcome("http://n9:9400/metrics", 0.1, "refused", "connection refused")
    view = view_of(
        node("n1", gpu(0), skew_seconds=90.0, notes=("the exporter cannot read: gpu3",)),
        outcomes=(failed, lost),
        notes=("partial data",),
    )
    assert view.nodes[0].notes == (
        "the exporter cannot read: gpu3",
        "http://n1:9400/metrics: no answer within 5 s",
        "its clock is 90 s ahead",
    )
    assert view.notes == ("partial data", "http://n9:9400/metrics: connection refused")
    assert value(view, "podgpu_cluster_target_up", target=lost.target) == 0


def test_a_thousand_notes_are_not_read_by_anybody() -> None:
    outcomes = tuple(TargetOutcome(f"http://n{n:04}", 1.0, "refused", "refused") for n in range(1000))
    notes = view_of(outcomes=outcomes).notes
    assert (len(notes), notes[-1]) == (13, "and 988 more")


# Whatever comes


@given(st.lists(readings(now=0.0), min_size=1, max_size=3), st.sampled_from(["busy", "allocated", "processes"]))
@settings(max_examples=60)
def test_no_series_comes_twice_and_every_exposition_can_be_read(rounds: list[ClusterReading], means: str) -> None:
    memory, chosen = Memory(), ViewSettings(used_means=means, idle_after=1.0, legacy_map_metrics=True)  # type: ignore[arg-type]
    for number, reading in enumerate(rounds):
        view = assemble(reading, memory, chosen, 15.0 * number, WALL + 15.0 * number)
        for exposition in expositions_of(view):
            assert duplicates(exposition) == []
            assert all(sample.value == sample.value for family in exposition for sample in family.samples)


@given(st.lists(node_readings(), max_size=6), st.randoms(use_true_random=False))
def test_the_order_of_targets_does_not_matter(nodes: list, order: random.Random) -> None:  # type: ignore[type-arg]
    """A target has one reading in a round."""
    once = list({one.target: one for one in nodes}.values())
    shuffled = order.sample(once, len(once))
    assert text_of(view_of(*once)) == text_of(view_of(*shuffled))


@pytest.mark.parametrize("whole", [True, False])
def test_only_whole_rounds_are_instants_of_the_average(whole: bool) -> None:
    memory, chosen = Memory(), ViewSettings(interval=10.0)
    for at, measured in ((0.0, 40.0), (10.0, 80.0)):
        reading = ClusterReading((node("n1", gpu(0, measured=measured), read_at=at),))
        view = assemble(reading, memory, chosen, at, WALL + at, whole_round=whole or at == 0)
    average = value(view, "podgpu_used_gpu_utilization_average_ratio", window="5m", scope="cluster")
    assert average == pytest.approx(0.6 if whole else 0.4)


def test_devices_are_by_index_and_each_once() -> None:
    view = view_of(node("n1", gpu(1), gpu(0), gpu(1)))
    assert devices(view) == {"n1": ["GPU-0", "GPU-1"]}
    twice = view_of(node("n1", gpu(0, uuid="GPU-x"), replace(gpu(1, uuid="GPU-x"), holders=(holder(),))))
    assert devices(twice) == {"n1": ["GPU-x"]}


def test_a_holder_without_a_pod_is_in_no_map() -> None:
    job = replace(holder(), holder=Workload(job="17"))
    assert view_of(node("n1", gpu(0, job))).rows == ()


def test_an_exporter_without_gpus_does_not_hide_another_of_the_same_node() -> None:
    memory = Memory()
    for at in (0.0, 15.0):
        blind = node("n1", read_at=at + 1, target="http://blind")
        seeing = node("n1", gpu(0), read_at=at, target="http://seeing")
        view = assemble(ClusterReading((blind, seeing) if at else (blind,)), memory, ViewSettings(), at + 1, WALL + at)
    assert [len(one.devices) for one in view.nodes] == [1]
