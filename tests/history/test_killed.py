"""`podgpu cluster --history-dir` as a process, killed with SIGKILL: the day it kept is there again."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from podgpu.clock import Clock
from podgpu.history.keeper import Keeper
from podgpu.history.ring import Told
from tests.history.figures import gpu, holder, pod
from tests.nodes.clock import wait_until
from tests.web.process import EXPORTER, Process, podgpu

DAY = 86_400.0


class Past:
    """A clock that passes through the day before now in a moment."""

    def __init__(self) -> None:
        self.now = time.time() - DAY + 600

    def clock(self) -> Clock:
        return Clock(lambda: self.now, lambda: self.now)


def write_a_day(directory: Path, uuid: str) -> None:
    """As a podgpu would have that ran until a minute ago."""
    from dataclasses import replace

    past = Past()
    device = replace(gpu(0, 0.25, holder(pod("yesterday"))), uuid=uuid)
    keeper = Keeper(lambda: [Told([device])], past.clock(), str(directory))
    keeper.write()
    while past.now < time.time() - 60:
        keeper.take()
        past.now += 60
        if past.now % 1800 < 60:
            keeper.write()
    keeper.stop()


def get(process: Process, path: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(process.client.ask(path).body)
    return found


def known(process: Process, uuid: str, asked: str = "1h") -> list[float]:
    said = get(process, f"/api/v1/history/gpus/{uuid}?range={asked}")
    return [value for value in said.get("series", {}).get("utilization_ratio", []) if value is not None]


@pytest.mark.fault(
    "podgpu cluster with --history-dir is killed with SIGKILL",
    "the next one has the whole day again, but for the last 15 s",
)
def test_the_day_is_there_again(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("exporter", "first", "second")]
    for folder in folders:
        folder.mkdir()
    directory = tmp_path / "history"
    with podgpu(EXPORTER, folders[0]) as exporter:
        wait_until(lambda: get(exporter, "/api/v1/view")["nodes"][0]["gpus"], "the exporter has GPUs")
        uuid = get(exporter, "/api/v1/view")["nodes"][0]["gpus"][0]["uuid"]
        write_a_day(directory, uuid)
        target = f"http://127.0.0.1:{exporter.client.address.port}/metrics"
        cluster = ["cluster", "--scrape", target, "-a", "127.0.0.1:0", "--interval", "1s"]
        words = [*cluster, "--history-dir", str(directory)]
        with podgpu(words, folders[1]) as first:
            wait_until(lambda: len(known(first, uuid, "24h")) > 280, "the day is there")
            wait_until(lambda: known(first, uuid)[-1] != 0.25, "and a sample of now")
            before = get(first, f"/api/v1/history/gpus/{uuid}?range=24h")
            written = sum(path.stat().st_size for path in directory.iterdir())
            wait_until(lambda: sum(p.stat().st_size for p in directory.iterdir()) >= written, "it is written")
            first.popen.send_signal(signal.SIGKILL)
            first.popen.wait()
        with podgpu(words, folders[2]) as second:
            wait_until(lambda: len(known(second, uuid, "24h")) > 280, "the day is there again")
            after = get(second, f"/api/v1/history/gpus/{uuid}?range=24h")
            of_pod = get(second, "/api/v1/history/pods/research/yesterday?range=24h")
    series = before["series"]["utilization_ratio"][:-2]
    moved = round((after["from"] - before["from"]) / 300)
    assert after["series"]["utilization_ratio"][: len(series) - moved] == series[moved:]
    assert [held["pod"] for held in after["holders"]][:1] == ["yesterday"]
    assert len([v for v in of_pod["devices"][0]["series"]["utilization_ratio"] if v is not None]) > 280


def test_an_exporter_says_that_its_directory_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with podgpu([*EXPORTER, "--history-dir", str(tmp_path / "file" / "h")], tmp_path) as exporter:
        wait_until(lambda: "history is kept in memory only" in exporter.client.ask("/health").text, "it is said")
        assert exporter.client.ask("/health").status == 200
        wait_until(lambda: exporter.client.ask("/ready").status == 200, "it is ready all the same")
        assert any("history is kept" in note for note in get(exporter, "/api/v1/view")["notes"])
        assert "Traceback" not in exporter.log
