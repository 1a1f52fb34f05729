"""GPUs of which less is known, or that answer less, than the plain cases of test_health: nothing is made up of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from podgpu.simulate.faults import Faults
from tests.agent.gpu_bench import GpuBench, bench_of
from tests.agent.told_health import FORGET, broken, known, view

A30_LINKS = 4


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[GpuBench]:
    with bench_of(tmp_path, "4xH100", 0, 1, 2, 3) as made:
        yield made


def forget(bench: GpuBench, number: int) -> int:
    return bench.client.ask(f"/-/forget?gpu={bench.uuid(number)}", "POST", **FORGET).status


def turns(bench: GpuBench, number: int) -> None:
    for _ in range(number):
        bench.turn(seconds=5.0)


def test_a_gpu_that_has_no_bridge_while_two_others_have(tmp_path: Path) -> None:
    """Three GPUs, and one bridge for two of them."""

    def without_bridge(faults: Faults) -> None:
        for link in range(A30_LINKS):
            faults.cut_link(2, link)

    with bench_of(tmp_path, "3xA30", before=without_bridge) as bench:
        assert broken(bench, 2) == []
        assert not known(bench, 2, "nvlink"), "it never had a link: nothing is said of it"
        assert known(bench, 0, "nvlink")
        bench.faults.cut_link(1, 3)
        bench.turn(seconds=30.0)
        assert broken(bench, 1) == ["nvlink"]


def test_a_forgotten_gpu_that_the_bus_still_shows(bench: GpuBench) -> None:
    """Somebody has seen to it: the node is well, until another is lost."""
    bench.faults.lose(1, enumerated=False)
    bench.expected = 3
    turns(bench, 8)
    bench.expected = 4
    turns(bench, 8)
    assert broken(bench, 1) == ["lost"]
    assert forget(bench, 1) == 200
    turns(bench, 2)
    assert view(bench)["alerts"] == []
    assert bench.client.ask("/health").text == "OK\n"
    assert 'podgpu_device_count{state="lost",Hostname="h"} 0' in bench.page
    bench.faults.lose(3)
    turns(bench, 30)
    assert [alert["uuid"] for alert in view(bench)["alerts"]] == [bench.uuid(3)]
    assert 'podgpu_device_count{state="lost",Hostname="h"} 1' in bench.page
