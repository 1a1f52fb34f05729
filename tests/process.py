"""Runs podgpu as a process, on loopback and with simulated GPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from podgpu.web.app import Address
from tests.net import free_port, lines_of
from tests.nodes.clock import PATIENCE, wait_until
from tests.web.server import Client

ROOT = Path(__file__).parents[1]
PODGPU = (sys.executable, "-W", "error", "-m", "podgpu")
NO_LOGS = ("--path-varlog", "/nonexistent")
"""Machines with a kubelet have /var/log/pods, which the tests must not read."""
EXPORTER = ("exporter", "--telemetry", "simulated:2xH100", "-c", "1s", *NO_LOGS)
CLUSTER = ("cluster", "--interval", "1s")


@dataclass(frozen=True)
class Process:
    popen: subprocess.Popen[bytes]
    port: int
    log_file: Path

    @property
    def client(self) -> Client:
        return Client(Address("127.0.0.1", self.port))

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.popen.pid}/fd"))

    def series(self, family: str) -> dict[str, float]:
        """Returns values by UUID. Empty if the exporter does not answer or has no current
        values.
        """
        try:
            return {
                labels["UUID"]: value
                for labels, value in lines_of(self.client.ask("/metrics").text, family)
            }
        except OSError:
            return {}

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Sends the signal and checks that the process ends cleanly."""
        self.popen.send_signal(number)
        assert self.popen.wait(PATIENCE) == 0
        assert "Traceback" not in self.log


def has_values(process: Process) -> bool:
    return bool(process.series("DCGM_FI_DEV_GPU_TEMP"))


def is_listening(process: Process) -> bool:
    return "listening on" in process.log


def is_live(process: Process) -> bool:
    return is_listening(process) and process.client.ask("/livez").status == 200


@contextmanager
def podgpu(
    arguments: Sequence[str],
    folder: Path,
    is_ready: Callable[[Process], bool] = is_live,
    *,
    program: Sequence[str] = PODGPU,
    before: Callable[[], None] | None = None,
    stderr: IO[bytes] | None = None,
    variables: Mapping[str, str] | None = None,
    port: int = 0,
) -> Iterator[Process]:
    """Runs a command with `-a` until the end of the context. `before` runs in the new process
    before podgpu.
    """
    port = port or free_port()
    command = [*program, *arguments, "-a", f"127.0.0.1:{port}"]
    environment = {**os.environ, "NODE_NAME": "node-1", **(variables or {})}
    with (
        (folder / "podgpu.log").open("wb") as log,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=stderr or log, preexec_fn=before
        ) as popen,
    ):
        process = Process(popen, port, Path(log.name))
        try:
            wait_until(lambda: popen.poll() is not None or is_ready(process), "podgpu is ready")
            assert popen.poll() is None, process.log
            yield process
        finally:
            popen.kill()
