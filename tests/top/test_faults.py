"""Tests how `top` shows faults of a simulated driver and of nodes, over real HTTP."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podgpu.cli.main import run
from podgpu.fleet.readings import ClusterReading, NodeReading
from podgpu.fleet.round import Cluster
from podgpu.fleet.settings import ViewSettings
from podgpu.web.cluster_app import cluster_application
from tests.agent.gpu_bench import GpuBench, bench_of
from tests.fleet.states import gpu, holder, node
from tests.fleet.test_loop import Script, Time, tell
from tests.nodes.clock import wait_until
from tests.web.server import Client, running


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[GpuBench]:
    with bench_of(tmp_path, "4xH100", 0, 1, 2, 3) as made:
        yield made


def show(
    capsys: pytest.CaptureFixture[str], option: str, client: Client
) -> tuple[list[str], list[str]]:
    """Returns the table and the notes of `top --once`."""
    capsys.readouterr()
    assert run(["top", "--once", option, f"{client.address.host}:{client.address.port}"]) == 0
    output = capsys.readouterr()
    return output.out.splitlines()[1:], [
        line.removeprefix("podgpu: ") for line in output.err.splitlines()
    ]


def read_alerts(client: Client) -> list[str]:
    first, *lines = client.ask("/health").text.splitlines()
    assert first == "degraded"
    return lines


@pytest.mark.fault(
    "GPUs are lost or report XIDs while podgpu top runs",
    "They are shown first, in red, without old figures, and with the words of /health",
)
def test_a_lost_gpu_and_an_xid(bench: GpuBench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.faults.lose(2)
    bench.faults.raise_xid(1, 79)
    counted = ("podgpu_xid_errors_total", 1, 'xid="79"')
    wait_until(
        lambda: bench.turn(0, 3, seconds=0.5) and bench.value(*counted) == 1, "the XID is counted"
    )
    bench.turn(0, 3)
    alerts = read_alerts(bench.client)
    table, notes = show(capsys, "--url", bench.client)
    assert set(alerts) <= set(notes)
    assert [line.split()[0] for line in table] == ["1", "!", "2", "!", "0", "3"]
    for number, line in ((1, table[1]), (2, table[3])):
        (alert,) = (line for line in alerts if f"({bench.uuid(number)})" in line)
        assert line.partition(": ")[2] in alert
    assert re.search(r"ns/p2/main +– +–/– +– +– +– +–$", table[2]), table[2]


@pytest.mark.fault(
    "The driver is unloaded while podgpu top runs",
    (
        "Every GPU is still shown with its holder, without figures; the reason is shown in the "
        "words "
        "of /health"
    ),
)
def test_a_driver_that_is_away(bench: GpuBench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.faults.unload_driver()
    bench.turn()
    bench.turn()
    alerts = read_alerts(bench.client)
    table, notes = show(capsys, "--url", bench.client)
    assert any("no driver answers" in alert and alert in notes for alert in alerts)
    assert ["no driver answers for it" in line for line in table] == [
        False,
        True,
        False,
        False,
        False,
    ]
    for number in range(4):
        assert any(f"ns/p{number}/main" in line and "%" not in line for line in table)


@pytest.mark.fault(
    "A node's exporter stops answering while podgpu top shows the cluster",
    (
        "Its GPUs are shown first, in red, without figures; the reason is shown in the words of "
        "the "
        "cluster's /health"
    ),
)
def test_a_node_that_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
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
        alerts = read_alerts(client)
        table, notes = show(capsys, "--cluster", client)
    assert any(
        "n-2" in alert and "does not answer, with its" in alert and alert in notes
        for alert in alerts
    )
    assert re.search(r"^n-2 .*notebook/main +– +–/– +– +– +– +–$", table[0]), table[0]
    assert "its node does not answer" in table[1]
    assert re.search(r"^n-1 .* 0% .* 1m00s$", table[2]), table[2]
