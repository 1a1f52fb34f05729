"""Who holds a GPU and runs nothing on it, since when, and how it is counted."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from podgpu.cluster.counts import Counts
from podgpu.cluster.reading import ClusterReading, NodeReading
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.view import ClusterView, Memory, assemble
from podgpu.figures.device import DeviceFigures, HolderFigures
from podgpu.figures.parts import WHOLE, holder_parts
from podgpu.model import Workload
from tests.cluster.view_readings import DEVICES, H100, HOLDERS, WALL, gpu, holder, node, series, value, view_of

SINCE = "podgpu_idle_allocated_gpu_since_timestamp_seconds"
SETTINGS = ViewSettings(idle_after=60.0)
PLACE = {"node": "n1", "gpu": "0", "gpu_id": "GPU-0", "model": H100}
POD = {"namespace": "ml", "pod": "train", "container": "main"}


class World:
    """Rounds of 15 s on one node."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.at = -15.0

    def turn(self, *devices: DeviceFigures, rounds: int = 1, **more: object) -> ClusterView:
        for _ in range(rounds):
            self.at += 15.0
            reading = ClusterReading((node("n1", *devices, read_at=self.at),), **more)  # type: ignore[arg-type]
            view = assemble(reading, self.memory, SETTINGS, self.at, WALL + self.at)
        return view


def since(view: ClusterView) -> float | None:
    """Of the only idle holder, in seconds after the first round."""
    return next((one.since - WALL for one in view.idle), None)


def test_idle_since_it_was_first_seen_and_reported_after_a_while() -> None:
    world, idle = World(), gpu(0, holder(utilization=0.0))
    assert since(world.turn(idle)) == 0
    assert series(world.turn(idle, rounds=4), SINCE) == {}
    view = world.turn(idle)
    assert value(view, SINCE, **PLACE, **POD) == WALL
    assert value(view, "podgpu_namespace_idle_gpus", namespace="ml", model=H100) == 1


def test_idle_since_it_was_last_seen_busy() -> None:
    world = World()
    world.turn(gpu(0, holder(utilization=0.5)), rounds=3)
    assert since(world.turn(gpu(0, holder(utilization=0.0)), rounds=4)) == 30
    assert since(world.turn(gpu(0, holder(utilization=0.1)))) is None


def test_the_holders_own_utilisation_goes_before_the_devices() -> None:
    world = World()
    assert since(world.turn(gpu(0, holder(utilization=0.0), utilization=0.9))) == 0
    assert since(World().turn(gpu(0, holder(), utilization=0.9))) is None
    assert since(World().turn(gpu(0, holder(), utilization=0.0))) == 0
    assert since(World().turn(gpu(0, holder()))) is None  # nobody knows


def test_who_has_a_process_beside_a_busy_one_is_not_called_idle() -> None:
    assert since(World().turn(gpu(0, holder(utilization=0.0, processes=1), utilization=0.9))) is None
    assert since(World().turn(gpu(0, holder(utilization=0.0, processes=0), utilization=0.9))) == 0
    assert since(World().turn(gpu(0, holder(utilization=0.0, processes=1), utilization=0.0))) == 0


def test_what_ran_between_two_rounds_was_no_idleness() -> None:
    world = World()
    world.turn(gpu(0, holder(utilization=0.0, busy_seconds=10.0)), rounds=3)
    assert since(world.turn(gpu(0, holder(utilization=0.0, busy_seconds=10.5)))) is None
    assert since(world.turn(gpu(0, holder(utilization=0.0, busy_seconds=10.5)))) == 45
    assert since(world.turn(gpu(0, holder(utilization=0.0, busy_seconds=0.0)))) == 45  # the exporter began anew


def test_a_node_that_does_not_answer_changes_nothing() -> None:
    world = World()
    silent = node("n1", gpu(0, holder(utilization=0.0)), read_at=0.0)
    world.turn(*silent.devices)
    for at in (15.0, 30.0, 45.0):
        view = assemble(ClusterReading((silent,)), world.memory, SETTINGS, at, WALL + at)
    assert since(view) == 0
    old = assemble(ClusterReading((silent,)), world.memory, SETTINGS, 90.0, WALL + 90.0)
    assert (since(old), series(old, SINCE)) == (0, {})


def test_a_holder_that_is_gone_is_forgotten() -> None:
    world = World()
    world.turn(gpu(0, holder(utilization=0.0)), rounds=3)
    world.turn(gpu(0))
    assert len(world.memory.idle) == 0
    assert since(world.turn(gpu(0, holder(utilization=0.0)))) == 60


def test_a_pod_that_moves_with_its_gpu_is_the_same() -> None:
    memory, idle = Memory(), gpu(0, holder(utilization=0.0))
    view_of(node("10.0.0.1:9400", idle, named=False), memory=memory)
    view = view_of(node("n1", idle, read_at=15.0), at=15.0, memory=memory)
    assert since(view) == 0


def test_a_restart_does_not_begin_anew() -> None:
    """Prometheus knows it, or the holder's own counters say that it never did anything."""
    knows = World().turn(gpu(0, holder(), utilization=0.0), idle_for={("GPU-0", ""): 7200.0})
    assert since(knows) == -7200
    never = World().turn(gpu(0, holder(utilization=0.0, busy_seconds=0.0, idle_seconds=500.0)))
    assert since(never) == -500
    came_later = holder(utilization=0.0, busy_seconds=1.0, idle_seconds=100.0)
    assert since(World().turn(gpu(0, came_later), idle_for={("GPU-0", ""): 7200.0})) == -100


def test_who_comes_to_an_idle_gpu_has_not_been_idle() -> None:
    world = World()
    world.turn(gpu(0))
    assert since(world.turn(gpu(0, holder("new"), utilization=0.0), idle_for={("GPU-0", ""): 7200.0})) == 15


def test_holders_without_a_pod_have_labels_of_their_own() -> None:
    world = World()
    jobs = [HolderFigures(Workload(job=job), utilization=0.0) for job in ("1", "2")]
    nameless = HolderFigures(Workload(uid="u", container_id="c"), utilization=0.0)
    instance = DeviceFigures("GPU-1", 1, H100, instance="3", profile="1g.10gb", holders=(nameless,))
    view = world.turn(gpu(0, *jobs), instance, rounds=6)
    assert [dict(labels).get("hpc_job") for labels in series(view, SINCE)] == ["1", "2", None]
    of_instance = {"node": "n1", "gpu": "1", "gpu_id": "GPU-1", "gpu_instance": "3", "model": f"{H100} MIG 1g.10gb"}
    assert value(view, SINCE, **of_instance, pod_uid="u", container_id="c") == WALL


# Counts


def test_counts_of_a_node_with_everything() -> None:
    instances = [
        DeviceFigures(
            "GPU-3", 3, H100, instance=str(n), profile="1g.10gb", holders=(holder(),) * (n == 1), utilization=0.1
        )
        for n in (1, 2)
    ]
    view = view_of(
        node(
            "n1", gpu(0, holder("a"), holder("b", "web"), measured=5.0), gpu(1, holder(), measured=0.0), gpu(2), gpu(3)
        ),
        node("n2", *(replace(d, uuid="GPU-9") for d in instances), gpu(4, uuid="GPU-9")),
    )
    whole = {"node": "n1", "model": H100}
    assert [value(view, f"podgpu_node_{of}gpus", **whole) for of in ("", "allocated_", "used_", "free_")] == [
        4,
        2,
        1,
        2,
    ]
    part = {"model": f"{H100} MIG 1g.10gb"}
    assert [value(view, f"podgpu_model_{of}gpus", **part) for of in ("", "allocated_", "used_", "free_")] == [
        2,
        1,
        2,
        1,
    ]
    assert value(view, "podgpu_node_gpus", node="n2", model=H100) is None  # cut into instances
    held = {"namespace": "ml", "model": H100}
    assert [value(view, f"podgpu_namespace_{of}_gpus", **held) for of in ("allocated", "used", "idle")] == [1.5, 0.5, 0]


def test_parts_as_given_else_equal() -> None:
    def of(*shares: float | None) -> list[float]:
        return [part / WHOLE for _, part in holder_parts([holder(share=share) for share in shares])]

    assert of(None) == [1.0]
    assert of(0.25) == [0.25]
    assert of(None, None, None) == [1 / 3] * 3
    assert of(0.5, None, None) == [0.5, 0.25, 0.25]
    assert of(1.0, 1.0) == [0.5, 0.5]
    assert of(1.0, None) == [1.0, 0.0]
    assert of() == []


@given(st.lists(HOLDERS, max_size=20))
def test_a_device_is_never_held_more_than_whole(holders: list[HolderFigures]) -> None:
    given_out = [part for _, part in holder_parts(holders)]
    assert all(part >= 0 for part in given_out)
    assert sum(given_out) <= WHOLE
    if any(h.share is None for h in holders):
        assert sum(given_out) == WHOLE


@given(st.lists(st.lists(DEVICES, max_size=5), max_size=3), st.sampled_from(["busy", "allocated", "processes"]))
def test_what_is_counted_adds_up(nodes: list[list[DeviceFigures]], means: str) -> None:
    settings = ViewSettings(used_means=means, idle_after=0.0)  # type: ignore[arg-type]
    memory = Memory()
    for at in (0.0, 15.0):
        told: list[NodeReading] = [node(f"n{n}", *devices, read_at=at) for n, devices in enumerate(nodes)]
        view = view_of(*told, at=at, memory=memory, settings=settings)
    counts: Counts = view.counts
    for count in (*counts.nodes.values(), *counts.models.values()):
        assert count.allocated + count.free == count.devices
        assert 0 <= (count.used or 0) <= count.devices
    for model, count in counts.models.items():
        held = [of for (_, other), of in counts.namespaces.items() if other == model]
        assert sum(of.allocated for of in held) <= count.allocated * WHOLE
        assert all((of.used or 0) <= of.allocated and of.idle <= of.allocated for of in held)
    for _, model in counts.namespaces:
        assert model in counts.models
