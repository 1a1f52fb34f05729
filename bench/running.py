"""Starts the exporter's process next to a simulated kubelet, scrapes it over a kept-open connection, reads its cost."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.node import NodeShape, pods
from podgpu.simulate.kubelet import SimulatedKubelet

_CPU_CLOCK_OF_PROCESS = 2  # CPUCLOCK_SCHED of the kernel's clock ids, which hold the complement of the pid above it
_KIB_PER_MIB = 1024


@dataclass(frozen=True, slots=True)
class Memory:
    """MiB, from /proc/PID/status."""

    rss: float
    peak: float
    anonymous: float


class ExporterProcess:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.port: int = self._answer()["port"]

    @property
    def pid(self) -> int:
        return self._process.pid

    def tick(self, count: int) -> dict[str, Any]:
        """Has it make so many ticks; what they cost and what stands in the metrics afterwards."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"tick {count}\n")
        self._process.stdin.flush()
        answer = self._answer()
        if answer["failed"]:
            raise RuntimeError(f"a source failed, so the figures would mean nothing: {answer['failed']}")
        return answer

    def cpu_seconds(self) -> float:
        return cpu_seconds_of(self.pid)

    def memory(self) -> Memory:
        return memory_of(self.pid)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the exporter process ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def kubelet_of(shape: NodeShape) -> Iterator[str]:
    """A kubelet in this process that lists the node's pods; the path of its socket."""
    with tempfile.TemporaryDirectory(prefix="podgpu-bench-") as directory:
        path = os.path.join(directory, "kubelet.sock")
        with SimulatedKubelet(path, pods(shape)):
            yield path


@contextmanager
def exporter_process(shape: NodeShape) -> Iterator[ExporterProcess]:
    """The kubelet lives in this process, so that its memory and time are not counted as the exporter's."""
    with kubelet_of(shape) as kubelet:
        command = [sys.executable, "-m", "bench.exporter_process"]
        command += ["--gpus", shape.gpus, "--pods", str(shape.pods), "--kubelet", kubelet]
        root = Path(__file__).parents[1]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
        with process:
            try:
                yield ExporterProcess(process)
            finally:
                process.kill()  # nothing it could still write matters


def cpu_seconds_of(pid: int) -> float:
    """CPU time of all its threads. Exact once it sleeps: a running process's clock moves in steps."""
    return time.clock_gettime(~pid << 3 | _CPU_CLOCK_OF_PROCESS)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def memory_of(pid: int | str) -> Memory:
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        lines = dict(line.split(":", 1) for line in file)
    rss, peak, anonymous = (int(lines[name].split()[0]) / _KIB_PER_MIB for name in ("VmRSS", "VmHWM", "RssAnon"))
    return Memory(rss, peak, anonymous)


@dataclass(frozen=True, slots=True)
class Answer:
    status: str
    headers: dict[str, str]
    body: bytes


class Scraper:
    """A scraper's kept-open connection, as thin as can be: it shares the machine with what is measured."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb")

    def get(self, path: str, *, zipped: bool = False) -> Answer:
        coding = "gzip" if zipped else "identity"
        request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: {coding}\r\n\r\n"
        self._socket.sendall(request.encode())
        status = self._file.readline().decode().strip()
        headers = dict(self._header_lines())
        return Answer(status, headers, self._file.read(int(headers["content-length"])))

    def _header_lines(self) -> Iterator[tuple[str, str]]:
        while line := self._file.readline().decode().strip():
            name, _, value = line.partition(":")
            yield name.lower(), value.strip()

    def close(self) -> None:
        self._file.close()
        self._socket.close()
