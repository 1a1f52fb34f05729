"""What the hook costs a pod's start: 1,000 creations in a burst, as a runtime waits for them.

The hook is the real command in a process of its own, the runtime lives in this one. Before it comes a plugin that
answers the same frames with nothing at all, in as little Python as can be: what a creation takes beyond that is what
the hook adds.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles

from bench.figures import Figure
from bench.running import memory_of
from tests.hook.runtime import Container, Pod, Runtime, uuid

MOST_MEDIAN_MS = 1.0
MOST_MIB = 60.0
MOST_GROWTH_MIB = 2.0
MOST_WRITES = 0.25
"""Of the creations: one write for at least four of them."""


def measure(creations: int = 1_000, bursts: int = 5) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="podgpu-bench-") as name:
        folder = Path(name)
        runtime = Runtime(folder / "nri.sock")
        with _started([sys.executable, "-c", _ANSWERS_ONLY, str(runtime.path)]):
            runtime.accept()
            alone = _burst(runtime, creations, 0)
        _forget(runtime)
        with _started(_hook(folder)) as pid:
            runtime.accept()
            seconds = _burst(runtime, creations, 0)
            _wait_written(runtime, folder)
            writes = _writes(folder)
            first = memory_of(pid)
            for burst in range(1, bursts):
                _end_all(runtime)
                _burst(runtime, creations, burst)
            _wait_written(runtime, folder)
            last = memory_of(pid)
        runtime.stop()
    added = [(taken - median(alone)) * 1e3 for taken in seconds]
    return [
        Figure(f"{creations:,} creations in a burst: added, median", median(added), "ms", MOST_MEDIAN_MS),
        Figure("  added, 99th percentile", quantiles(added, n=100)[98], "ms"),
        Figure("  the whole answer, median", median(seconds) * 1e3, "ms"),
        Figure("writes of podlist.json per creation", writes / creations, "", MOST_WRITES),
        Figure("hook's RSS after the first burst", first.rss, "MiB", MOST_MIB),
        Figure(f"hook's RSS after {bursts} bursts, all pods replaced", last.rss, "MiB", MOST_MIB),
        Figure("  growth", last.rss - first.rss, "MiB", MOST_GROWTH_MIB),
    ]


def _container(number: int, burst: int) -> Container:
    """As koordinator's scheduler makes them, with what else a pod has."""
    given = {"gpu": [{"minor": number % 8, "id": uuid(number % 8), "resources": {"koordinator.sh/gpu-core": "100"}}]}
    annotations = {"scheduling.koordinator.sh/device-allocated": json.dumps(given), "kubernetes.io/config.seen": "now"}
    pod = Pod(f"{burst}-{number:064}", f"train-{burst}-{number}", annotations=annotations)
    env = (*(f"SERVICE_{service}=10.0.0.{service}" for service in range(30)), f"NVIDIA_VISIBLE_DEVICES={number % 8}")
    return Container(f"c{burst}-{number:063}", pod, env=env, mounts=("/data", "/etc/hosts"), gpus=(uuid(number % 8),))


def _burst(runtime: Runtime, creations: int, burst: int) -> list[float]:
    made = [_container(number, burst) for number in range(creations)]
    seconds = []
    for container in made:
        began = time.perf_counter()
        runtime.create(container)
        seconds.append(time.perf_counter() - began)
    return seconds


def _end_all(runtime: Runtime) -> None:
    for pod in list(runtime.pods.values()):
        runtime.end_pod(pod)


def _forget(runtime: Runtime) -> None:
    runtime.drop()
    runtime.pods.clear()
    runtime.containers.clear()


def _wait_written(runtime: Runtime, folder: Path) -> None:
    path, expected = folder / "podlist.json", runtime.expected()
    _until(lambda: path.exists() and json.loads(path.read_bytes()) == expected)


def _until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not holds():
        if time.monotonic() > end:
            raise RuntimeError("podlist.json never came to be what the runtime has, so the figures would mean nothing")
        time.sleep(0.05)


def _writes(folder: Path) -> int:
    """Each write is another file under the name; the hook counts them."""
    port = (folder / "port").read_text()
    exposition = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    line = next(line for line in exposition.splitlines() if line.startswith("podgpu_hook_podlist_writes_total "))
    return int(line.split()[1])


def _hook(folder: Path) -> list[str]:
    """With its port, which is what it is with in a cluster: the web server is in the memory."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    (folder / "port").write_text(port)
    paths = ["--socket", str(folder / "nri.sock"), "--podlist", str(folder / "podlist.json")]
    return [sys.executable, "-m", "podgpu", "hook", *paths, "--path-proc", str(folder), "-a", f"127.0.0.1:{port}"]


@contextmanager
def _started(command: list[str]) -> Iterator[int]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
    with process:
        try:
            yield process.pid
        finally:
            process.kill()


_ANSWERS_ONLY = """
import socket, struct, sys, time
while True:
    try:
        c = socket.socket(socket.AF_UNIX); c.connect(sys.argv[1]); break
    except OSError:
        time.sleep(0.05)
def send(service, stream, kind, data):
    whole = struct.pack(">IIBB", len(data), stream, kind, 0) + data
    c.sendall(struct.pack(">II", service, len(whole)) + whole)
def text(key, data):
    return bytes([key << 3 | 2, len(data)]) + data
named = text(1, b"nri.pkg.api.v1alpha1.Runtime") + text(2, b"RegisterPlugin")
send(2, 1, 1, named + text(3, text(1, b"x") + text(2, b"00")))
waiting = b""
while more := c.recv(262144):
    waiting += more
    while len(waiting) >= 18 and len(waiting) >= 8 + struct.unpack_from(">I", waiting, 4)[0]:
        service, length, _, stream, kind, _ = struct.unpack_from(">IIIIBB", waiting)
        waiting = waiting[8 + length:]
        if kind == 1:
            send(service, stream, 2, b"")
"""
