"""Tests `make soak`, shortened to twenty simulated minutes, and its judge with wrong metrics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from endurance.soak.__main__ import soak
from endurance.soak.judge import Judge
from endurance.soak.truth import SoakClock
from endurance.soak.world import World
from endurance.vitals import Vitals, growth

HEAD = "# TYPE podgpu_device_energy_joules_total counter\n"


@pytest.mark.fault(
    (
        "pods, processes and MIG layouts change all the time while kubelet, driver and single GPUs "
        "fail and recover"
    ),
    (
        "every sample names a true holder, healthy GPUs are always there, counters never decrease, "
        "parts add up"
    ),
)
def test_twenty_minutes_of_churn() -> None:
    figures, judge = soak(1200.0)
    assert judge.expositions > 100
    assert judge.attributed > 5000
    assert judge.examples == {}
    assert [figure.name for figure in figures if figure.missed] == []


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    made = World(folder, SoakClock(), Random(1))
    with made.kubelet:
        yield made


def pod_on(world: World) -> dict[str, str]:
    """Starts a pod, and returns the labels of its device after five minutes."""
    world.start_pod()
    world.clock.advance(300.0)
    (held,) = world.truth.held
    return {"UUID": held.uuid, "GPU_I_ID": held.gi_id, "namespace": held.namespace, "pod": held.pod}


def exposition(name: str, value: float, **labels: str) -> str:
    pairs = ",".join(f'{key}="{text}"' for key, text in labels.items() if text)
    return f"{name}{{{pairs}}} {value}\n"


def everything(world: World, **labels: str) -> str:
    gpus = "".join(
        exposition("DCGM_FI_DEV_GPU_TEMP", 40, UUID=world.uuid_of(number))
        for number in world.numbers
    )
    return gpus + exposition("podgpu_allocation_info", 1, **labels)


def test_a_true_exposition_breaks_no_rule(world: World) -> None:
    judge = Judge(world)
    judge.look(everything(world, **pod_on(world)))
    assert judge.breaches == {}


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (
            lambda text: text.replace('pod="job-1"', 'pod="other"'),
            "metrics name a pod that does not hold the device",
        ),
        (
            lambda text: text.replace("podgpu_allocation_info", "podgpu_other"),
            "a holder is not in the metrics",
        ),
        (lambda text: text.partition("\n")[2], "a healthy GPU is not in the metrics"),
        (
            lambda text: text + 'DCGM_FI_X{UUID="GPU-x",namespace="n",pod="p"} 1\n',
            "a sample names a pod that never held the device",
        ),
    ],
)
def test_an_exposition_that_is_not_true_is_noticed(world: World, spoil, rule: str) -> None:  # type: ignore[no-untyped-def]
    judge = Judge(world)
    judge.look(spoil(everything(world, **pod_on(world))))
    assert rule in judge.breaches


def test_a_gpu_may_be_missing_until_the_driver_lists_its_gpus_again(world: World) -> None:
    judge, gpu = Judge(world), world.numbers[0]
    _, _, others = everything(world, **pod_on(world)).partition("\n")
    world.truth.unlisted.add(gpu)
    world.truth.gpu_broken_until[gpu] = world.clock.monotonic()
    for seconds, breaches in ((125.0, 0), (10.0, 1)):
        world.clock.advance(seconds)
        judge.look(others)
        assert judge.breaches["a healthy GPU is not in the metrics"] == breaches


def test_a_counter_that_falls_is_noticed_across_a_gap(world: World) -> None:
    judge = Judge(world)
    series = exposition("podgpu_device_energy_joules_total", 10, UUID="GPU-x")
    for text in (HEAD + series, "", HEAD + series.replace("10", "9")):
        judge.look(text)
    assert judge.breaches["a counter decreases"] == 1


def test_parts_that_are_not_the_whole_are_noticed(world: World) -> None:
    judge = Judge(world)
    world.clock.advance(1000.0)
    for whole, part in ((10, 4), (30, 14)):
        judge.look(
            exposition("podgpu_device_energy_joules_total", whole, UUID="GPU-x")
            + exposition("podgpu_device_unattributed_energy_joules_total", part, UUID="GPU-x")
        )
    assert judge.breaches["parts do not add up to the device"] == 1


def test_energy_that_no_namespace_has_and_nobody_is_noticed_whoever_left(world: World) -> None:
    judge, device = Judge(world), {"UUID": world.uuid_of(0)}
    for used, unattributed, paid in ((50.0, 20.0, 30.0), (90.0, 40.0, 50.0), (95.0, 40.0, 50.0)):
        told = exposition("podgpu_device_energy_joules_total", used, **device)
        told += exposition("podgpu_device_unattributed_energy_joules_total", unattributed, **device)
        told += exposition(
            "podgpu_namespace_gpu_energy_joules_total", paid, namespace="research", modelName="H100"
        )
        judge.look(told)
    assert judge.breaches["namespaces and the rest do not add up to the devices"] == 1
    assert (
        "90.0 J of 95.0 J" in judge.examples["namespaces and the rest do not add up to the devices"]
    )


def test_growth_is_that_of_the_line_through_all() -> None:
    seen = [Vitals(float(at), 50.0 + at / 10, 60.0, 5 + at // 50, 9) for at in range(0, 100, 10)]
    grown = growth(seen)
    assert (round(grown.rss, 6), grown.threads, grown.descriptors) == (9.0, 1, 0)
    assert growth(seen[:1]).rss == 0.0
