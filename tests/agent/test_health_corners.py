"""GPUs of which less is known, or that answer less, than the plain cases of test_health: nothing is made up of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from podgpu.clock import Clock
from tests.agent.gpu_bench import GpuBench, bench_of
from tests.agent.told_health import FORGET, broken, view


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[GpuBench]:
    with bench_of(tmp_path, "4xH100", 0, 1, 2, 3) as made:
        yield made


def forget(bench: GpuBench, number: int) -> int:
    return bench.client.ask(f"/-/forget?gpu={bench.uuid(number)}", "POST", **FORGET).status


def turns(bench: GpuBench, number: int) -> None:
    for _ in range(number):
        bench.turn(seconds=5.0)


def test_a_forgotten_gpu_that_the_bus_still_shows(bench: GpuBench) -> None:
    """Somebody has seen to it: the node is well, until another is lost."""
    bench.faults.lose(1, enumerated=False)
    bench.expected = 3
    turns(bench, 8)
    bench.expected = 4
    turns(bench, 8)
    assert broken(bench, 1) == ["lost"]
    assert forget(bench, 1) == 200
    assert view(bench)["alerts"] == []
    turns(bench, 2)
    assert view(bench)["alerts"] == []
    assert bench.client.ask("/health").text == "OK\n"
    assert 'podgpu_device_count{state="lost",Hostname="h"} 0' in bench.exposition
    bench.faults.lose(3)
    turns(bench, 30)
    assert [alert["uuid"] for alert in view(bench)["alerts"]] == [bench.uuid(3)]
    assert 'podgpu_device_count{state="lost",Hostname="h"} 1' in bench.exposition


def test_forgetting_in_the_middle_of_a_turn(bench: GpuBench) -> None:
    """The turn's own look at the clock is when somebody asks: what the turn began with does not bring the GPU back."""
    bench.faults.lose(1, enumerated=False)
    bench.expected = 3
    turns(bench, 8)
    answers: list[int] = []
    asks = threading.Thread(target=lambda: answers.append(forget(bench, 1)))

    def wall() -> float:
        if asks.ident is None:
            asks.start()
            asks.join(0.3)  # it has to wait for the turn, which waits for it here
        return bench.wall()

    bench.agent.clock = Clock(lambda: bench.time, wall)
    bench.agent.read_telemetry()
    asks.join()
    assert answers == [200]
    assert bench.uuid(1) not in bench.client.ask("/metrics").text
    assert bench.client.ask("/health").text == "OK\n"


def numbers(bench: GpuBench) -> list[int]:
    return [shown["index"] for shown in view(bench)["nodes"][0]["gpus"]]


def test_a_lost_gpu_that_the_driver_still_lists_is_forgotten_until_it_answers(bench: GpuBench) -> None:
    bench.faults.lose(1)
    turns(bench, 2)
    assert broken(bench, 1) == ["lost"]
    assert forget(bench, 1) == 200
    assert numbers(bench) == [0, 2, 3]
    turns(bench, 5)
    assert numbers(bench) == [0, 2, 3]
    assert f'podgpu_device_health{{gpu="1",UUID="{bench.uuid(1)}"' not in bench.exposition
    assert bench.client.ask("/health").text == "OK\n"
    assert forget(bench, 1) == 404
    bench.faults.recover(1)
    turns(bench, 3)
    assert numbers(bench) == [0, 1, 2, 3]
    assert broken(bench, 1) == []
