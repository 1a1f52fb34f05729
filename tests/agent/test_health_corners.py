"""GPUs of which less is known, or that answer less, than the plain cases of test_health: nothing is made up of them."""

from __future__ import annotations

from pathlib import Path

from podgpu.simulate.faults import Faults
from tests.agent.gpu_bench import bench_of
from tests.agent.told_health import broken, known

A30_LINKS = 4


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
