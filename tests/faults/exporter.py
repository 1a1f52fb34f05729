"""Runs the exporter as a process on simulated GPUs."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.host.guard import NODE_PATHS, NOTES
from tests.net import free_port, lines_of
from tests.nodes.clock import PATIENCE, wait_until

ROOT = Path(__file__).parents[2]
AILING = ("-m", "tests.faults.ailing_exporter")
"""The exporter with two GPUs that hang."""


@dataclass
class Exporter:
    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def get(self, path: str = "/metrics") -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def series(self, family: str) -> dict[str, float]:
        """Returns values by UUID. Empty if the exporter does not answer or has no current values."""
        try:
            _, exposition = self.get()
        except OSError:
            return {}
        return {labels["UUID"]: value for labels, value in lines_of(exposition, family)}


def environment() -> dict[str, str]:
    """Returns the environment without variables of this machine that podgpu reads."""
    guarded = ("PATH", "HOME", "LANG", "PYTHONPATH", NOTES, *NODE_PATHS)
    kept = {name: value for name, value in os.environ.items() if name in guarded}
    return {**kept, "NODE_NAME": "node-1"}


def words(folder: Path, *arguments: str) -> list[str]:
    roots = ["--path-proc", str(folder / "proc"), "--path-varlog", str(folder / "log")]
    return ["exporter", "-c", "1000", *roots, *arguments]


@contextmanager
def running(
    folder: Path,
    *arguments: str,
    module: Sequence[str] = ("-m", "podgpu"),
    stderr: IO[bytes] | int | None = None,
    variables: Mapping[str, str] | None = None,
    wait_for_values: bool = True,
) -> Iterator[Exporter]:
    """Runs the exporter and waits until it has values, or only until it listens. Kills it at the end."""
    port = free_port()
    command = [sys.executable, *module, *words(folder, "-a", f"127.0.0.1:{port}", *arguments)]
    log = (folder / "exporter.log").open("wb")
    with (
        log,
        subprocess.Popen(
            command, cwd=ROOT, env={**environment(), **(variables or {})}, stdout=log, stderr=stderr or log
        ) as process,
    ):
        exporter = Exporter(process, port, Path(log.name))

        def is_ready() -> bool:
            if wait_for_values:
                return bool(exporter.series("DCGM_FI_DEV_GPU_TEMP"))
            return "listening on" in exporter.log.read_text()

        try:
            wait_until(lambda: process.poll() is not None or is_ready(), "the exporter is ready")
            assert process.poll() is None, exporter.log.read_text()
            yield exporter
        finally:
            process.kill()
