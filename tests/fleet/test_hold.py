"""Which holders are idle, for how long, and what no holder has: limits of the definitions."""

from __future__ import annotations

from typing import Any

import pytest

from podgpu.fleet.hold import estimate_idle, find_unheld, wasteful_since
from podgpu.fleet.parts import HeldPart
from tests.fleet.states import WALL, World, gpu, holder, node, state_of


def first_part(device_busy: float | None, **usage: Any) -> HeldPart:
    state = state_of(node("a", gpu(0, holder(**usage), busy=device_busy)))
    return state.nodes[0].held[0]


@pytest.mark.parametrize(
    ("device_busy", "usage", "use"),
    [
        (0.5, {"utilization_ratio": 0.0, "processes": 0}, "idle"),
        # The driver attributes a whole sample to the busiest process.
        (0.5, {"utilization_ratio": 0.0, "processes": 1}, "unknown"),
        (0.5, {"utilization_ratio": 0.0}, "unknown"),
        (0.0, {"utilization_ratio": 0.0, "processes": 1}, "idle"),
        (None, {"processes": 0}, "idle"),
        (None, {"processes": 1}, "unknown"),
        (None, {}, "unknown"),
        (0.5, {}, "used"),
        (0.0, {}, "idle"),
    ],
)
def test_use_in_one_reading(device_busy: float | None, usage: dict[str, Any], use: str) -> None:
    assert first_part(device_busy, **usage).use == use


def test_the_estimate_of_idle_time_is_within_the_window() -> None:
    world = World()
    world.round(node("a", gpu(0, holder(), busy=0.5)))
    state = world.round(node("a", gpu(0, holder(), busy=0.0), read_at=20.0), at=20.0)
    part = state.nodes[0].held[0]
    since = part.idle_since
    assert since is not None
    assert WALL <= since <= WALL + 20.0
    assert estimate_idle(part, 30.0, since + 12.0) == 12.0
    assert estimate_idle(part, 30.0, since + 50.0) == 30.0
    assert estimate_idle(part, 30.0, since - 5.0) == 0.0


def test_a_holder_is_wasteful_after_a_longer_time_than_the_limit() -> None:
    part = first_part(0.0, idle_since=WALL - 300.0, utilization_ratio=0.0)
    assert wasteful_since(part, WALL, 299.0) == WALL - 300.0
    assert wasteful_since(part, WALL, 300.0) is None
    assert wasteful_since(part, WALL, None) is None
    assert wasteful_since(part, None, 1.0) is None
    assert wasteful_since(first_part(0.5), WALL, 0.0) is None


def test_what_no_holder_has_of_a_node_that_is_gone_is_unknown() -> None:
    shared = gpu(0, holder(share=0.25), busy=0.0)
    present = state_of(node("a", shared)).nodes[0]
    rest = find_unheld(present, next(iter(present.gpus)), present.held_by_device())
    assert (rest.unknown, rest.unallocated.gpus.unallocated) == (0.0, 0.75)

    gone = state_of(node("a", shared, listed=True), at=3600.0).nodes[0]
    assert gone.gone
    rest = find_unheld(gone, next(iter(gone.gpus)), gone.held_by_device())
    assert rest.unknown == 0.75
    assert not rest.unallocated.gpus.unallocated
