"""A turn of `podgpu cluster --prometheus` over a thousand nodes of eight GPUs in a real Prometheus (Debian's).

The exporters live in one process (`fleet_process`); Prometheus scrapes them all every 15 s. Their figures are others in
every turn, and turns begin at multiples of the interval, as the command's do. Judged is how long a turn takes once the
first is over: Prometheus' part and ours, on the same machine. Without a Prometheus nothing is measured.
`PODGPU_BENCH_NODES=200` is a smaller trial, which is not judged.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from bench.cluster import Conversation, process
from bench.figures import Figure
from bench.running import cpu_seconds_of, free_port
from podgpu.cluster.prom.backend import PrometheusBackend, PrometheusPlace
from podgpu.cluster.settings import ViewSettings

NODES, GPUS = 1000, 8
MOST_SECONDS = 2.0
_SCRAPED_EVERY = 15
_PATIENCE = 240.0
_TURNS = 8
"""A round in every minute is whole, the others are slim."""
_EXPOSITIONS = 4
_SIZE = "PODGPU_BENCH_NODES"


def measure(nodes: int = int(os.environ.get(_SIZE, NODES))) -> list[Figure]:
    if shutil.which("prometheus") is None:
        print("prometheus is not installed: nothing is measured (apt-get install prometheus)")
        return []
    with (
        tempfile.TemporaryDirectory(prefix="podgpu-bench-") as folder,
        process("bench.fleet_process", str(nodes), str(_EXPOSITIONS)) as fleet,
        _prometheus(Path(folder), fleet.answer()["ports"]) as (url, server),
    ):
        _wait_until_scraped(url, nodes)
        return asyncio.run(_turns(fleet, url, server, nodes))


async def _turns(fleet: Conversation, url: str, server: int, nodes: int) -> list[Figure]:
    backend = PrometheusBackend(PrometheusPlace(url, timeout=60.0), ViewSettings(interval=_SCRAPED_EVERY, window=60.0))
    took: list[tuple[float, float, float]] = []
    try:
        for _ in range(1 + _TURNS):
            fleet.ask("next")
            await asyncio.sleep(_SCRAPED_EVERY - time.time() % _SCRAPED_EVERY)
            before = time.perf_counter(), time.process_time(), cpu_seconds_of(server)
            await backend.turn()
            after = time.perf_counter(), time.process_time(), cpu_seconds_of(server)
            took.append((after[0] - before[0], after[1] - before[1], after[2] - before[2]))
            _check(backend, nodes)
    finally:
        await backend.close()
    first, steady = took[0], took[1:]
    wall, ours, theirs = (median(turn[kind] for turn in steady) for kind in range(3))
    return [
        Figure(f"a turn, {nodes * GPUS:,} GPUs", wall, "s", MOST_SECONDS if nodes >= NODES else None),
        Figure("  the longest", max(turn[0] for turn in steady), "s"),
        Figure("  CPU of podgpu in it", ours, "s"),
        Figure("  CPU of Prometheus in it, its scrapes included", theirs, "s"),
        Figure("  the first turn, with all instants of the average", first[0], "s"),
        Figure("  cores", len(os.sched_getaffinity(0)), ""),
    ]


def _check(backend: PrometheusBackend, nodes: int) -> None:
    reading = backend.reading()
    failed = [outcome.message for outcome in reading.outcomes if outcome.error]
    gpus = sum(len(node.devices) for node in reading.nodes)
    if failed or gpus != nodes * GPUS:
        raise RuntimeError(f"{gpus} GPUs were read, so the figures would mean nothing: {failed[:3]}")


@contextmanager
def _prometheus(folder: Path, ports: list[int]) -> Iterator[tuple[str, int]]:
    """Its URL and its process."""
    targets = [f"127.0.0.1:{port}" for port in ports]
    scrape = {"job_name": "gpu", "honor_labels": True, "static_configs": [{"targets": targets}]}
    config = {"global": {"scrape_interval": f"{_SCRAPED_EVERY}s"}, "scrape_configs": [scrape]}
    (folder / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    port = free_port()
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"], stdout=log, stderr=log
        )
    try:
        yield f"http://127.0.0.1:{port}", server.pid
    finally:
        server.kill()
        server.wait()


def _wait_until_scraped(url: str, nodes: int) -> None:
    """Twice each: what Prometheus does for a series it meets is none of a turn's cost."""
    query = urllib.parse.urlencode({"query": "count(count_over_time(up[5m]) >= 2)"})
    give_up_at = time.monotonic() + _PATIENCE
    while time.monotonic() < give_up_at:
        try:
            with urllib.request.urlopen(f"{url}/api/v1/query?{query}", timeout=30) as answer:
                result = json.load(answer)["data"]["result"]
        except OSError:
            result = []
        if result and float(result[0]["value"][1]) == nodes:
            return
        time.sleep(1)
    raise RuntimeError(f"Prometheus has not scraped {nodes} nodes within {_PATIENCE:.0f} s")
