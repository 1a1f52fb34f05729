"""`podgpu cluster` as a process of its own beside the fleet, scraped by its Prometheus."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.deploy.fleet import Server
from tests.net import free_port
from tests.nodes.clock import wait_until


class ClusterProcess:
    """Its port is chosen before it starts, so that Prometheus can be told of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._address = f"127.0.0.1:{free_port()}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def scrape_jobs(self) -> list[dict[str, Any]]:
        targets = [{"targets": [self._address]}]
        return [{"job_name": "podgpu-cluster", "honor_labels": True, "static_configs": targets}]

    def start(self, exporters: Sequence[str]) -> None:
        prices = self._folder / "prices.yaml"  # JSON is YAML
        prices.write_text(json.dumps({"currency": "EUR", "models": {"*": {"gpu_hour": 2.5, "kwh": 0.3}}}))
        command = [sys.executable, "-m", "podgpu", "cluster", "-a", self._address, "--prices", str(prices)]
        command += ["--scrape", ",".join(f"http://{one}/metrics" for one in exporters)]
        command += ["--interval", "500ms", "--window", "5s", "--idle-after", "1s"]
        log = self._folder / "cluster.log"
        with log.open("wb") as output:
            self._process = process = subprocess.Popen(command, stdout=output, stderr=output)
        wait_until(lambda: process.poll() is not None or self._answers(), "podgpu cluster answers")
        assert process.poll() is None, log.read_text()

    def _answers(self) -> bool:
        try:
            Server(f"http://{self._address}").get("/ready")
        except OSError:
            return False
        return True

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


@contextmanager
def cluster_process(folder: Path) -> Iterator[ClusterProcess]:
    process = ClusterProcess(folder)
    try:
        yield process
    finally:
        process.stop()
