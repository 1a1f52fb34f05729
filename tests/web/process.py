"""Runs podgpu as a process, on loopback and with simulated GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from podgpu.web.sockets import Address
from tests.nodes.clock import wait_until
from tests.web.server import Client

NO_LOGS = ("--path-varlog", "/nonexistent")
"""Machines with a kubelet have /var/log/pods, which the tests must not read."""
EXPORTER = ("exporter", "--telemetry", "simulated:2xH100", "-a", "127.0.0.1:0", "-c", "1s", *NO_LOGS)
CLUSTER = ("cluster", "--scrape", "http://127.0.0.1:9/metrics", "-a", "127.0.0.1:0", "--interval", "1s")
_LISTENING = re.compile(r"listening on https?://127\.0\.0\.1:(\d+)/metrics")


@dataclass(frozen=True)
class Process:
    popen: subprocess.Popen[bytes]
    client: Client
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.popen.pid}/fd"))


@contextmanager
def podgpu(
    arguments: Sequence[str], folder: Path, before: Callable[[], None] | None = None, wait: bool = True
) -> Iterator[Process]:
    """`before`: runs in the new process before podgpu. `wait`: until it is live."""
    log = folder / "podgpu.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [sys.executable, "-m", "podgpu", *arguments], stdout=output, stderr=output, preexec_fn=before
        ) as popen,
    ):
        try:
            wait_until(lambda: popen.poll() is not None or _LISTENING.search(log.read_text()), "podgpu listens")
            found = _LISTENING.search(log.read_text())
            assert found is not None, log.read_text()
            process = Process(popen, Client(Address("127.0.0.1", int(found[1]))), log)
            if wait:
                wait_until(lambda: process.client.ask("/livez").status == 200, "podgpu lives")
            yield process
        finally:
            popen.kill()
