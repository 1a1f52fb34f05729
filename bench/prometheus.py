"""A round of `podgpu cluster --prometheus` over 1,000 nodes with eight GPUs in a real Prometheus (Debian's).

The exporters run in one process (`fleet_process`), and Prometheus scrapes them every 15 s. Every round has other
figures. The limit is for a round after the first one, with Prometheus on the same machine.
`PODGPU_BENCH_NODES=200` is a smaller trial without a limit.
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
from podgpu.cluster.prometheus import PrometheusCollector
from podgpu.cluster.promql import PrometheusServer
from podgpu.cluster.settings import ViewSettings

NODES, GPUS = 1000, 8
MAX_SECONDS = 8.0
_SCRAPED_EVERY = 15
_PATIENCE = 240.0
_ROUNDS = 6
_EXPOSITIONS = 4
_SIZE = "PODGPU_BENCH_NODES"


def measure(nodes: int = int(os.environ.get(_SIZE, NODES))) -> list[Figure]:
    if shutil.which("prometheus") is None:
        print("prometheus is not installed, so nothing is measured (apt-get install prometheus)")
        return []
    with (
        tempfile.TemporaryDirectory(prefix="podgpu-bench-") as folder,
        process("bench.fleet_process", str(nodes), str(_EXPOSITIONS)) as fleet,
        _prometheus(Path(folder), fleet.answer()["ports"]) as (url, server),
    ):
        _wait_until_scraped(url, nodes)
        return asyncio.run(_run_rounds(fleet, url, server, nodes))


async def _run_rounds(fleet: Conversation, url: str, server: int, nodes: int) -> list[Figure]:
    settings = ViewSettings(interval=_SCRAPED_EVERY, window=60.0)
    collector = PrometheusCollector(PrometheusServer(url, timeout=60.0), settings, keep_fields=settings.keep_fields)
    took: list[tuple[float, float, float]] = []
    try:
        for _ in range(1 + _ROUNDS):
            fleet.ask("next")
            await asyncio.sleep(_SCRAPED_EVERY - time.time() % _SCRAPED_EVERY)
            before = time.perf_counter(), time.process_time(), cpu_seconds_of(server)
            await collector.run_round()
            after = time.perf_counter(), time.process_time(), cpu_seconds_of(server)
            took.append((after[0] - before[0], after[1] - before[1], after[2] - before[2]))
            _check(collector, nodes)
    finally:
        await collector.close()
    first, steady = took[0], took[1:]
    wall, ours, theirs = (median(round_[kind] for round_ in steady) for kind in range(3))
    return [
        Figure(f"a round, {nodes * GPUS:,} GPUs", wall, "s", MAX_SECONDS if nodes >= NODES else None),
        Figure("  the longest", max(round_[0] for round_ in steady), "s"),
        Figure("  CPU of podgpu in it", ours, "s"),
        Figure("  CPU of Prometheus in it, its scrapes included", theirs, "s"),
        Figure("  the first round, with all instants of the rolling mean", first[0], "s"),
        Figure("  cores", len(os.sched_getaffinity(0)), ""),
    ]


def _check(collector: PrometheusCollector, nodes: int) -> None:
    reading = collector.reading()
    failed = [outcome.message for outcome in reading.outcomes if outcome.error]
    gpus = sum(len(node.state.devices) for node in reading.nodes)
    if failed or gpus != nodes * GPUS:
        raise RuntimeError(f"{gpus} GPUs were read: {failed[:3]}")


@contextmanager
def _prometheus(folder: Path, ports: list[int]) -> Iterator[tuple[str, int]]:
    """Yields its URL and its process id."""
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
    """Waits for two scrapes of each node, because Prometheus spends more on new series."""
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
