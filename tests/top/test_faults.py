"""What breaks is seen in `top` in the words of /health, over real HTTP, from a simulated driver that fails."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podgpu.cli.main import run
from podgpu.cluster.collect import ClusterReading, NodeReading
from podgpu.cluster.loop import Cluster
from podgpu.cluster.settings import ViewSettings
from podgpu.web.cluster_app import cluster_application
from tests.agent.gpu_bench import GpuBench, bench_of
from tests.cluster.states import gpu, holder, node
from tests.cluster.test_loop import Script, Time, tell
from tests.web.server import Client, running


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[GpuBench]:
    with bench_of(tmp_path, "4xH100", 0, 1, 2, 3) as made:
        yield made


class Shown:
    """What one `top --once` prints."""

    def __init__(self, capsys: pytest.CaptureFixture[str], option: str, client: Client) -> None:
        capsys.readouterr()
        place = f"{client.address.host}:{client.address.port}"
        assert run(["top", "--once", "--interval", "100ms", option, place]) == 0
        output = capsys.readouterr()
        self.header, *self.lines = output.out.splitlines()
        self.notes = [line.removeprefix("podgpu: ") for line in output.err.splitlines()]

    def beneath(self, gpu: str) -> list[str]:
        """What is wrong with it, in words."""
        at = next(at for at, line in enumerate(self.lines) if re.match(rf"(?:\S+ +)?{gpu} ", line))
        found = []
        for line in self.lines[at + 1 :]:
            if not line.startswith("  ! "):
                break
            found.append(re.sub(r"^  ! [a-z ]+(?: for \w+)?: ", "", line))
        return found


def alerts(client: Client) -> list[str]:
    first, *lines = client.ask("/health").text.splitlines()
    assert first == "degraded"
    return lines


def says(alert: str) -> str:
    """`GPU 1 of node n (UUID): what is wrong: what to do`, what is wrong of it."""
    return alert.partition("): ")[2]


def test_all_well_is_said_by_neither(bench: GpuBench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.client.ask("/health").text == "OK\n"
    shown = Shown(capsys, "--url", bench.client)
    assert shown.notes == []
    assert not any("!" in line for line in shown.lines)


@pytest.mark.fault(
    "GPUs are lost, do not answer or tell of XIDs while somebody looks on with podgpu top",
    "They come first, red, without figures that are not of now, each with what is wrong in the words of /health",
)
def test_a_lost_gpu_and_an_xid_in_the_words_of_health(bench: GpuBench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.faults.lose(2)
    bench.faults.raise_xid(1, 79)
    bench.turn(0, 3)
    bench.turn(0, 3)
    lines = alerts(bench.client)
    shown = Shown(capsys, "--url", bench.client)
    assert [line for line in lines if line not in shown.notes] == []
    for number in (1, 2):
        (alert,) = (line for line in lines if f"({bench.uuid(number)})" in line)
        (wrong,) = shown.beneath(str(number))
        assert says(alert).startswith(wrong)
    assert [line.split()[0] for line in shown.lines if line[0] != " "] == ["1", "2", "0", "3"]
    (lost,) = (line for line in shown.lines if line.startswith("2 "))
    assert "ns/p2/main" in lost
    assert re.search(r"p2/main +– +–/– +– +– +– +–$", lost), lost


@pytest.mark.fault(
    "The driver goes away under podgpu top",
    "Every GPU stays on the screen with its holder, without figures; what is wrong is said in the words of /health",
)
def test_a_driver_that_is_away_in_the_words_of_health(bench: GpuBench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.faults.unload_driver()
    bench.turn()
    bench.turn()
    lines = alerts(bench.client)
    shown = Shown(capsys, "--url", bench.client)
    (away,) = (line for line in lines if "no driver answers" in line)
    assert away in shown.notes
    assert sum("no driver answers for it" in line for line in shown.lines) == 1, "said once for all of them"
    assert any(text.startswith("no driver answers for it") for text in shown.beneath("0"))
    for number in range(4):
        assert any(f"ns/p{number}/main" in line and "%" not in line for line in shown.lines)


@pytest.mark.fault(
    "A node's exporter does not answer any more while podgpu top looks at the cluster",
    "Its GPUs stay, first and red, without figures; that it is gone is said in the words of the cluster's /health",
)
def test_a_node_that_is_gone_in_the_words_of_health(capsys: pytest.CaptureFixture[str]) -> None:
    time = Time()
    settings = ViewSettings(interval=10.0, stale_after=30.0, drop_after=600.0)
    cluster = Cluster(Script, settings, clock=time.clock)
    idle = holder("notebook", "team", utilization_ratio=0.0, idle_since=1_000_100.0)

    def reading(name: str, at: float) -> NodeReading:
        return node(name, gpu(0, idle, uuid=f"GPU-{name}", busy=0.0), read_at=at, exporter_id=name)

    silent = reading("n-2", 100.0)
    asyncio.run(cluster.round(Script(tell(ClusterReading((reading("n-1", 100.0), silent))))))
    time.now += 60.0
    asyncio.run(cluster.round(Script(tell(ClusterReading((reading("n-1", time.now), silent))))))
    app: Any = cluster_application
    with running(cluster, app=app) as client:  # type: ignore[arg-type]
        lines = alerts(client)
        shown = Shown(capsys, "--cluster", client)
    (gone,) = (line for line in lines if "n-2" in line and "does not answer, with its" in line)
    assert gone in shown.notes
    assert shown.lines[0].startswith("n-2 ")
    assert re.search(r"notebook/main +– +–/– +– +– +– +–$", shown.lines[0]), shown.lines[0]
    assert any("its node does not answer" in line for line in shown.lines)
    (here,) = (line for line in shown.lines if line.startswith("n-1 "))
    assert re.search(r"0% .* 1m00s$", here), here
