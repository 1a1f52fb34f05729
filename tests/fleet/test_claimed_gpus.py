"""An exporter that reports GPUs of other nodes does not get them."""

from __future__ import annotations

import pytest

from podgpu.fleet.readings import NodeReading
from tests.fleet.states import World, gpu, holder, lost, node, state_of, uuids

LIE = holder("invented", "evil")


def thief(at: float, *numbers: int, name: str = "a-thief") -> NodeReading:
    """A node whose name sorts first. It reports holders on GPUs that are not its own."""
    return node(name, *(gpu(number, LIE) for number in numbers), read_at=at, listed=True)


@pytest.mark.fault(
    "An exporter reports the GPUs of another node as its own, with invented holders",
    "The node that had the GPUs keeps them while it answers; a warning names both exporters",
)
@pytest.mark.parametrize("producer", ["podgpu", "dcgm-exporter"])
def test_the_node_that_had_the_gpu_keeps_it(producer: str) -> None:
    world = World()
    for at, holders in ((0.0, [holder()]), (15.0, [holder()]), (30.0, []), (45.0, [holder()])):
        honest = node("n1", gpu(0, *holders), read_at=at, listed=True, producer=producer)
        nodes = [honest] if at == 0 else [honest, thief(at, 0)]
        state = world.round(*nodes, at=at)
        assert uuids(state) == {"n1": ["GPU-0"]}
        assert len(state.alerts) == (at > 0)


def test_a_podgpu_keeps_its_idle_gpus_for_many_rounds() -> None:
    world = World()
    world.round(node("n1", gpu(0), gpu(1), listed=True))
    for at in range(15, 150, 15):
        honest = node("n1", gpu(0), gpu(1), read_at=at, listed=True)
        state = world.round(thief(at, 0, 1, 2), honest, at=at)
        assert uuids(state) == {"a-thief": ["GPU-2"], "n1": ["GPU-0", "GPU-1"]}


@pytest.mark.parametrize("away", ["stale", "gone"])
def test_a_node_gets_its_gpus_back_after_a_restart_of_its_exporter(away: str) -> None:
    world = World()
    world.round(node("n1", gpu(0), listed=True))
    for at in (60.0, 75.0, 400.0, 415.0):
        old = [node("n1", gpu(0), listed=True)] if away == "stale" else []
        assert uuids(world.round(thief(at, 0), *old, at=at)) == {"a-thief": ["GPU-0"]}
    for at in (430.0, 445.0):
        state = world.round(thief(at, 0), node("n1", gpu(0), read_at=at, listed=True), at=at)
        assert uuids(state) == {"n1": ["GPU-0"]}


def test_an_exporter_that_uses_the_name_of_another_node_does_not_replace_it() -> None:
    world = World()
    world.round(node("n1", gpu(0), target="http://b", listed=True))
    for at in (15.0, 30.0, 45.0):
        honest = node("n1", gpu(0), target="http://b", read_at=at, listed=True)
        copy = node("n1", gpu(0, LIE), target="http://a", read_at=at, listed=True)
        state = world.round(copy, honest, at=at)
        assert [entry.reading.target for entry in state.nodes] == ["http://b"]
        assert len(state.alerts) == 1


def test_after_a_restart_the_node_with_fewer_conflicts_has_the_gpu() -> None:
    honest = [node("n1", gpu(0), gpu(1)), node("n2", gpu(2))]
    expected = {"n1": ["GPU-0", "GPU-1"], "n2": ["GPU-2"]}
    assert uuids(state_of(thief(0, 0, 1, 2), *honest)) == expected
    one_exporter = [node(f"a{n}", gpu(n, LIE), target="http://thief") for n in range(3)]
    assert uuids(state_of(*one_exporter, *honest)) == expected, "it reports each GPU on a new node"


@pytest.mark.parametrize("how", ["stale", "lost", "not listed", "gone"])
def test_a_gpu_that_moves_is_shown_on_its_new_node(how: str) -> None:
    world = World()
    world.round(node("n1", gpu(0, holder()), gpu(1), listed=True), node("n2", gpu(2), listed=True))
    new = node("n2", gpu(2), gpu(0), read_at=60, listed=True)
    old = {
        "stale": [node("n1", gpu(0, holder()), gpu(1), listed=True)],
        "lost": [node("n1", lost(0), gpu(1), read_at=60, listed=True)],
        "not listed": [node("n1", gpu(0, holder()), gpu(1), read_at=60, listed=False)],
        "gone": [],
    }
    state = world.round(new, *old[how], at=60)
    assert uuids(state)["n2"] == ["GPU-2", "GPU-0"]


def test_a_gpu_that_moved_stays_on_its_new_node() -> None:
    """Its former node is gone. Another exporter names holders while its own has none."""
    world = World()
    world.round(node("n1", gpu(0), listed=True), node("n2", gpu(1), listed=True))
    for at in (400.0, 415.0, 430.0):
        thieves = [thief(at, 0)] if at > 400 else []
        new = node("n2", gpu(1), gpu(0), read_at=at, listed=True)
        state = world.round(*thieves, new, at=at)
        assert uuids(state) == {"n2": ["GPU-1", "GPU-0"]}


def test_podgpu_replaces_an_exporter_that_reports_no_holders() -> None:
    world = World()
    world.round(node("alpha", gpu(0), producer="dcgm-exporter", listed=True))
    for at in (15.0, 30.0):
        plain = node("alpha", gpu(0), read_at=at, producer="dcgm-exporter", listed=True)
        named = node("zeta", gpu(0, *([holder()] if at == 15.0 else [])), read_at=at, listed=True)
        assert uuids(world.round(plain, named, at=at)) == {"zeta": ["GPU-0"]}
