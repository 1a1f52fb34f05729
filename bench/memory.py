"""Memory: the process of `podgpu exporter` with all features after many scrapes. It includes the
simulated driver.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.figures import Figure, read_status
from bench.node import MODEL
from podgpu.labs.simulate.simulated_driver import SimulatedNvml
from podgpu.labs.simulate.simulated_kubelet import SimulatedKubelet
from podgpu.labs.simulate.simulated_node import create_host_files, pods, tenants

MAX_MIB = 80
MAX_GROWTH_MIB = 2
START_SECONDS = 60.0


def measure(first: int = 300, last: int = 1200, pause: float = 0.1) -> list[Figure]:
    with _exporter() as (process, url):
        early = _rss_after(process, url, first, pause)
        late = _rss_after(process, url, last - first, pause)
        threads = read_status(process.pid, "Threads")
    return [
        Figure(f"resident memory after {last:,} scrapes", late, "MiB", at_most=MAX_MIB),
        Figure(
            f"growth from {first:,} to {last:,} scrapes",
            late - early,
            "MiB",
            at_most=MAX_GROWTH_MIB,
        ),
        Figure("  threads", threads),
    ]


@contextmanager
def _exporter() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="podgpu-bench-") as folder:
        kubelet = f"{folder}/kubelet.sock"
        command = [
            sys.executable,
            "-m",
            "podgpu",
            "exporter",
            "--telemetry",
            f"simulated:{MODEL}",
            "-k",
            "-f",
            "dcp",
        ]
        command += [
            "--pod-resources-kubelet-socket",
            kubelet,
            "-c",
            "1000",
            "-a",
            f"127.0.0.1:{port}",
        ]
        # Without these files, the exporter would not read the simulated processes.
        on_node = tenants(SimulatedNvml(MODEL))
        create_host_files(Path(folder), on_node)
        command += ["--path-proc", f"{folder}/proc", "--path-varlog", folder]
        with (
            SimulatedKubelet(kubelet, pods(on_node)),
            subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            ) as process,
        ):
            try:
                url = f"http://127.0.0.1:{port}/metrics"
                _wait_for_holders(process, url)
                yield process, url
            finally:
                process.kill()


def _wait_for_holders(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if b"podgpu_allocation_info{" in _scrape(url):
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"the exporter did not start (exit code {process.poll()})")


def _scrape(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as response:
        body: bytes = response.read()
        return body


def _rss_after(process: subprocess.Popen[bytes], url: str, scrapes: int, pause: float) -> float:
    for _ in range(scrapes):
        _scrape(url)
        time.sleep(pause)
    return read_status(process.pid, "VmRSS") / 1024
