"""How much a turn asks for: less than the one before where that tells the rest, never at the cost of a figure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from podgpu.cluster.prom.backend import PrometheusBackend, PrometheusPlace
from podgpu.cluster.reading import ClusterReading, Scope
from podgpu.cluster.settings import ViewSettings
from podgpu.figures.device import DeviceFigures
from tests.cluster.prometheus_double import PrometheusDouble, error, running_double, some_gpus

MIB = 1024 * 1024
INSTANT = 1_800_000_000.0
"""A multiple of the interval."""
FREE = "DCGM_FI_DEV_FB_FREE"
ROLLING = "(("


class Turns:
    def __init__(self, double: PrometheusDouble) -> None:
        self.double = double
        self._runner = asyncio.Runner()
        self._backend = PrometheusBackend(PrometheusPlace(double.url), ViewSettings(interval=15, window=60))

    def turn(self, after: float = 0.0) -> ClusterReading:
        """`asked` has this turn's queries alone."""
        self.double.now += after
        self.double.asked.clear()
        self._runner.run(self._backend.turn())
        return self._backend.reading()

    def asked_for(self, what: str) -> list[str]:
        return [asked.query for asked in self.double.asked if what in asked.query]

    def rolling(self) -> set[str]:
        return {
            a.form["time"] for a in self.double.asked if a.query.startswith(ROLLING) and "_over_time" not in a.query
        }

    def close(self) -> None:
        self._runner.run(self._backend.close())
        self._runner.close()


@pytest.fixture
def double() -> Iterator[PrometheusDouble]:
    with running_double() as found:
        found.now = INSTANT + 0.4
        yield found


@pytest.fixture
def turns(double: PrometheusDouble) -> Iterator[Turns]:
    found = Turns(double)
    yield found
    found.close()


def gpu(double: PrometheusDouble, number: int, used: float = 1024, **labels: str) -> None:
    of = {
        **{"job": "dcgm", "instance": "10.0.0.1:9400", "Hostname": "node", "modelName": "H200"},
        **{"gpu": str(number), "UUID": f"GPU-{number}"},
        **labels,
    }
    double.put("DCGM_FI_DEV_GPU_TEMP", 50, **of)
    double.put("DCGM_FI_DEV_FB_USED", used, **of)
    double.put(FREE, 4096 - used, **of)


def devices(reading: ClusterReading) -> dict[str, DeviceFigures]:
    """Those that tell of their memory or power, by UUID: with instances on it, a GPU itself does not."""
    found = [device for node in reading.nodes for device in node.devices]
    return {d.uuid: d for d in found if d.memory_used is not None or d.power_watts is not None}


def test_memory_in_all_is_asked_for_once_a_minute(double: PrometheusDouble, turns: Turns) -> None:
    gpu(double, 0)
    gpu(double, 1)
    first = devices(turns.turn())
    assert turns.asked_for(FREE)
    assert [device.memory_total for device in first.values()] == [4096 * MIB] * 2
    for _ in range(3):
        assert devices(turns.turn(after=15)) == first
        assert not turns.asked_for(FREE)
        assert not any("modelName" in query for query in turns.asked_for("DCGM_FI_DEV_FB_USED"))
    assert devices(turns.turn(after=15)) == first
    assert turns.asked_for(FREE)


def test_what_is_used_of_it_is_asked_for_every_time(double: PrometheusDouble, turns: Turns) -> None:
    gpu(double, 0, used=1024)
    turns.turn()
    double.series.clear()
    gpu(double, 0, used=2048)
    (device,) = devices(turns.turn(after=15)).values()
    assert (device.memory_used, device.memory_total) == (2048 * MIB, 4096 * MIB)


def appears(double: PrometheusDouble) -> None:
    gpu(double, 1)


def changes_its_layout(double: PrometheusDouble) -> None:
    """An instance of another size under the number of one that was."""
    double.series.clear()
    gpu(double, 0, used=2048, GPU_I_ID="1", GPU_I_PROFILE="3g.40gb")


@pytest.mark.parametrize(("happens", "profiles"), [(appears, ["1g.10gb", ""]), (changes_its_layout, ["3g.40gb"])])
def test_a_gpu_that_is_new_is_told_whole_at_once(
    double: PrometheusDouble, turns: Turns, happens: Callable[[PrometheusDouble], None], profiles: list[str]
) -> None:
    gpu(double, 0, GPU_I_ID="1", GPU_I_PROFILE="1g.10gb")
    turns.turn()
    happens(double)
    found = turns.turn(after=15)
    assert turns.asked_for(FREE)
    assert {device.memory_total for device in devices(found).values()} == {4096 * MIB}
    assert [device.profile for device in devices(found).values()] == profiles
    turns.turn(after=15)
    assert not turns.asked_for(FREE), "known from now on"


def test_memory_that_only_podgpu_tells_of(double: PrometheusDouble, turns: Turns) -> None:
    gpu(double, 0)
    own = {"job": "dcgm", "instance": "10.0.0.1:9400", "Hostname": "node", "modelName": "H200", "UUID": "GPU-1"}
    double.put("DCGM_FI_DEV_GPU_TEMP", 50, **own)
    double.put("podgpu_device_memory_used_bytes", 7 * MIB, **own)
    for _ in range(2):
        assert devices(turns.turn(after=15))["GPU-1"].memory_used == 7 * MIB
    assert not turns.asked_for(FREE)


@pytest.mark.parametrize(
    "labels",
    [
        pytest.param(
            {"UUID": "GPU-9", "gpu": "9", "modelName": "H200", "Hostname": "node"}, id="only its power is told"
        ),
        pytest.param({"gpu": "9", "modelName": "H200", "Hostname": "node"}, id="no UUID"),
    ],
)
def test_a_gpu_that_little_is_told_of_has_its_model_in_every_turn(
    double: PrometheusDouble, turns: Turns, labels: dict[str, str]
) -> None:
    gpu(double, 0)
    double.put("DCGM_FI_DEV_POWER_USAGE", 300, job="dcgm", instance="10.0.0.1:9400", **labels)
    for _ in range(3):
        found = devices(turns.turn(after=15))
        assert {device.model for device in found.values()} == {"H200"}
        assert [d.power_watts for d in found.values() if d.index == 9] == [300]


def test_a_question_that_failed_in_a_whole_turn_is_asked_in_the_next(double: PrometheusDouble, turns: Turns) -> None:
    gpu(double, 0)
    double.misbehave = lambda asked: error(503, "busy") if FREE in asked.query else None
    assert "GPU-0" not in devices(turns.turn()), "nothing is known of its memory"
    double.misbehave = lambda asked: None
    assert devices(turns.turn(after=15))["GPU-0"].memory_total == 4096 * MIB


def test_a_turn_at_an_instant_of_the_average_works_it_out_itself(double: PrometheusDouble, turns: Turns) -> None:
    some_gpus(double)
    turns.turn()
    assert turns.rolling() == {f"{INSTANT - before:.3f}" for before in (15, 30, 45)}, "the past is the server's to tell"
    double.series.clear()
    some_gpus(double, nodes=1)
    found = turns.turn(after=15)
    assert turns.rolling() == set()
    assert {asked.form.get("time", "now") for asked in double.asked} == {"now", f"{INSTANT + 15:.3f}"}
    assert found.rolling is not None
    assert found.rolling[Scope("cluster")] > 0


def test_a_turn_between_two_instants_asks_for_the_last(double: PrometheusDouble, turns: Turns) -> None:
    some_gpus(double)
    turns.turn()
    turns.turn(after=22)
    assert turns.rolling() == {f"{INSTANT + 15:.3f}"}
