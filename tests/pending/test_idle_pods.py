"""Which pods are listed as idle, for the explanations of the queue."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from podgpu.fleet.prices import Price, Prices
from podgpu.fleet.settings import ViewSettings
from podgpu.fleet.state import ClusterState
from podgpu.pending.idle_pods import list_idle_pods
from tests.fleet.states import World, gpu, holder, node

PRICES = Prices("EUR", {"H100": Price(2.0)})


def make_state(cluster: str = "") -> ClusterState:
    world = World(ViewSettings(idle_after=30.0))
    for at in range(0, 61, 15):
        idle = holder("idle", "ml", utilization_ratio=0.0)
        half = holder("half", "ml", utilization_ratio=0.0)
        gpus = [
            gpu(0, idle, busy=0.0, model="H100"),
            gpu(1, idle, busy=0.0, model="L4"),  # has no price
            gpu(2, holder("cheap", "ml", utilization_ratio=0.0), busy=0.0, model="L4"),
            gpu(3, half, busy=0.0, model="H100"),
            gpu(4, holder("half", "ml", utilization_ratio=0.5), busy=0.5, model="H100"),
            gpu(5, busy=0.0, model="H100"),
        ]
        reading = replace(node("a", *gpus, read_at=float(at)), cluster=cluster)
        state = world.round(reading, at=float(at), prices=PRICES)
    return state


def test_a_pod_is_idle_if_all_its_gpus_are() -> None:
    found = list_idle_pods(make_state())
    assert found.keys() == {("ml", "idle"), ("ml", "cheap")}
    idle = found["ml", "idle"]
    assert idle.gpus == 2.0
    assert idle.cost_per_hour == pytest.approx(2.0)
    cheap = found["ml", "cheap"]
    assert (cheap.gpus, cheap.cost_per_hour) == (1.0, None)


def test_pods_of_other_clusters_are_left_out() -> None:
    """The API server of the queue does not know them."""
    assert list_idle_pods(make_state(cluster="west")) == {}
