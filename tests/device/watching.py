"""What watching costs: podgpu beside three pods that share one GPU, held against the goals. By hand, as root, on a
machine with one NVIDIA GPU, cgroup v2 and PyTorch; about three minutes:

    python tests/device/watching.py [--profile] [--simulated SPEC] [--out DIRECTORY]

CPU is the exporter's own, all threads, by its CPU clock; the scraper and the kubelet are other processes. With
`--profile` it prints which calls into the driver and which threads the CPU went to (the timers cost a little
themselves, so the goals are judged without). `--simulated 1xH200` needs no GPU and proves nothing but this script.
Exits 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

from container_usage import tenant  # beside this file
from tenants import resident_mib  # beside this file

from podgpu.simulate.kubelet import SimulatedKubelet, SimulatedPod

PORT = 9475
WARM_UP_SECONDS = 20.0
TENANTS = [
    tenant("research", "train-a", 0.5, 0.97, 10),
    tenant("serving", "serve-b", 0.25, 1.13, 4),
    tenant("notebooks", "idle-c", 0.0, 1.0, 0),
]
EVERY_SECOND = ("-c", "1000", "-f", "dcp")
RUNS: dict[str, tuple[Sequence[str], float, float]] = {
    "one tick and scrape a second": (EVERY_SECOND, 25.0, 1.0),
    "the same, virtual GPUs": ((*EVERY_SECOND, "--kubernetes-virtual-gpus"), 25.0, 1.0),
    "default intervals, usage on": (("-f", "dcp"), 45.0, 15.0),
}
"""Options, for how many seconds, and how far apart scrapes are."""
CPU_GOALS = {"one tick and scrape a second": 1.9, "the same, virtual GPUs": 2.2, "default intervals, usage on": 1.0}
MOST_MIB, MOST_THREADS, MOST_SCRAPE_MS = 80.0, 16.0, 0.25
SCRAPES = 500


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--simulated", default="")
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[str, float, str, float]] = []
    with three_pods(given.simulated) as options:
        with exporter([*options, *EVERY_SECOND], profiled=False):
            pass  # so that its modules are compiled
        for name, (own, seconds, apart) in RUNS.items():
            with exporter([*options, *own], given.profile) as process:
                rows += measure(name, process, seconds, apart, given.out)
    return report(rows, given.out)


def report(rows: Sequence[tuple[str, float, str, float]], out: Path) -> int:
    print(f"\n{'goal':<58} {'measured':>9} {'goal':>7}")
    for name, value, unit, goal in rows:
        verdict = "" if not goal else "met" if value <= goal else "MISSED"
        print(f"{name:<58} {value:>9.3g} {goal or '':>7} {unit:<7} {verdict}")
    (out / "watching.json").write_text(json.dumps(rows, indent=1))
    missed = [name for name, value, _, goal in rows if goal and value > goal]
    print(f"MISSED: {', '.join(missed)}" if missed else "every goal is met")
    return int(bool(missed))


def measure(
    name: str, process: subprocess.Popen[bytes], seconds: float, apart: float, out: Path
) -> Iterator[tuple[str, float, str, float]]:
    scraper = Scraper()
    before, cpu = profile_of(process.pid), cpu_seconds(process.pid)
    began = time.monotonic()
    waits = []
    for number in range(round(seconds / apart)):
        time.sleep(max(0.0, began + number * apart - time.monotonic()))
        waits.append(scraper.scrape()[0])
    time.sleep(max(0.0, began + seconds - time.monotonic()))
    elapsed = time.monotonic() - began
    spent = cpu_seconds(process.pid) - cpu
    print_profile(name, before, profile_of(process.pid), elapsed, spent)
    took, exposition = zip(*(scraper.scrape() for _ in range(SCRAPES)), strict=True)
    (out / f"{name.replace(' ', '-').replace(',', '')}.prom").write_text(exposition[-1])
    yield f"CPU: {name}", 100 * spent / elapsed, "%", CPU_GOALS[name]
    yield "  series", sum(not line.startswith("#") for line in exposition[-1].splitlines()), "", 0
    yield "  resident", resident_mib(process.pid), "MiB", MOST_MIB
    yield "  threads", float(len(os.listdir(f"/proc/{process.pid}/task"))), "", MOST_THREADS
    yield "  scrape, back to back, median", 1e3 * median(took), "ms", MOST_SCRAPE_MS
    yield "  scrape, back to back, worst", 1e3 * max(took), "ms", 0
    yield f"  scrape, once in {apart:g} s, median", 1e3 * median(waits), "ms", 0


class Scraper:
    """A kept-open connection, as thin as can be: it shares the machine with what is measured."""

    def __init__(self) -> None:
        self._socket = socket.create_connection(("127.0.0.1", PORT), timeout=10)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb")

    def scrape(self) -> tuple[float, str]:
        began = time.perf_counter()
        self._socket.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        status = self._file.readline()
        length = 0
        while line := self._file.readline().strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        body = self._file.read(length)
        took = time.perf_counter() - began
        if b" 200 " not in status:
            raise RuntimeError(f"a scrape got {status!r}, so the figures would mean nothing")
        return took, body.decode()


def cpu_seconds(pid: int) -> float:
    return time.clock_gettime(~pid << 3 | 2)  # CPUCLOCK_SCHED: all threads, to the nanosecond


# The node


@contextmanager
def three_pods(simulated: str) -> Iterator[list[str]]:
    """The GPU shared by three, two of which work; the exporter's options for it."""
    gpu, telemetry = (
        (simulated_uuid(simulated), ["--telemetry", f"simulated:{simulated}"]) if simulated else (uuid(), [])
    )
    ids = {t.pod: f"{gpu}::{n}" for n, t in enumerate(TENANTS)}
    pods = [SimulatedPod(t.namespace, t.pod, {"main": {"nvidia.com/gpu.shared": [ids[t.pod]]}}) for t in TENANTS]
    with tempfile.TemporaryDirectory() as folder, SimulatedKubelet(f"{folder}/k.sock", pods) as kubelet:
        try:
            for one in [] if simulated else TENANTS:
                one.start()
            time.sleep(0.0 if simulated else WARM_UP_SECONDS)  # loads compile and warm up
            yield ["-k", "-a", f"127.0.0.1:{PORT}", "--pod-resources-kubelet-socket", kubelet.socket, *telemetry]
        finally:
            for one in TENANTS:
                one.kill()


def uuid() -> str:
    import pynvml

    pynvml.nvmlInit()
    return str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(0)))


def simulated_uuid(spec: str) -> str:
    from podgpu.cli.node import simulated_driver

    return str(simulated_driver(spec).gpus[0].uuid)


@contextmanager
def exporter(options: Sequence[str], profiled: bool) -> Iterator[subprocess.Popen[bytes]]:
    how = [__file__, "--as-exporter"] if profiled else ["-m", "podgpu"]
    process = subprocess.Popen([sys.executable, *how, "exporter", *options], env=compiled_environment())
    try:
        wait_for_exposition(process)
        time.sleep(6)  # holders are read every 5 s
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)


def compiled_environment() -> dict[str, str]:
    """With compiled modules, as the image has them: a process that compiles them itself keeps 6 MiB more."""
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return plain | {"PYTHONPYCACHEPREFIX": f"{tempfile.gettempdir()}/podgpu-watching-compiled"}


def wait_for_exposition(process: subprocess.Popen[bytes]) -> None:
    give_up_at = time.monotonic() + 30
    while time.monotonic() < give_up_at and process.poll() is None:
        with suppress(OSError, RuntimeError):
            if "DCGM_FI_DEV_GPU_UTIL{" in Scraper().scrape()[1]:
                return
        time.sleep(0.2)
    raise RuntimeError("the exporter shows no GPU")


# Where the CPU goes


def as_exporter() -> None:
    """The exporter in this process, with a timer in every call into the driver; what they say lies in a file."""
    from podgpu.cli import main as run_podgpu
    from podgpu.gpu.nvml.driver import NvmlDriver

    calls: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    plain = NvmlDriver.call

    def timed(self: NvmlDriver, function: str, *arguments: object) -> object:
        with timer(function):
            return plain(self, function, *arguments)

    @contextmanager
    def timer(function: str) -> Iterator[None]:
        began = time.thread_time()
        try:
            yield
        finally:
            entry = calls[function]
            entry[0] += 1
            entry[1] += time.thread_time() - began

    NvmlDriver.call = timed  # type: ignore[method-assign]

    def tell() -> None:
        while True:
            threads = {}
            for one in threading.enumerate():
                with suppress(OSError, RuntimeError):
                    spent = time.clock_gettime(time.pthread_getcpuclockid(one.ident or 0))
                    threads[f"{one.name} {one.native_id}"] = spent
            file = Path(profile_path(os.getpid()))
            file.with_suffix(".new").write_text(json.dumps({"calls": calls, "threads": threads}))
            file.with_suffix(".new").replace(file)
            time.sleep(1)

    threading.Thread(target=tell, name="(this profile)", daemon=True).start()
    run_podgpu()


def profile_path(pid: int) -> str:
    return f"{tempfile.gettempdir()}/podgpu-watching-{pid}.json"


def profile_of(pid: int) -> dict[str, dict[str, object]]:
    with suppress(OSError, ValueError):
        return dict(json.loads(Path(profile_path(pid)).read_text()))
    return {}


def print_profile(name: str, before: dict, after: dict, elapsed: float, spent: float) -> None:  # type: ignore[type-arg]
    if not after or not before:
        return
    print(f"\n{name}: {1e3 * spent / elapsed:.2f} ms of CPU a second, of it")
    calls = {
        f: (n - before["calls"].get(f, (0, 0))[0], s - before["calls"].get(f, (0, 0))[1])
        for f, (n, s) in after["calls"].items()
    }
    for function, (number, seconds) in sorted(calls.items(), key=lambda item: -item[1][1])[:15]:
        print(f"  {1e3 * seconds / elapsed:8.3f} ms/s  {number / elapsed:6.2f} calls/s  {function}")
    print(f"  {1e3 * sum(s for _, s in calls.values()) / elapsed:8.3f} ms/s  all calls into the driver")
    threads = {thread: s - before["threads"].get(thread, 0.0) for thread, s in after["threads"].items()}
    for thread, seconds in sorted(threads.items(), key=lambda item: -item[1]):
        print(f"  {1e3 * seconds / elapsed:8.3f} ms/s  thread {thread}")
    others = spent - sum(threads.values())
    print(f"  {1e3 * others / elapsed:8.3f} ms/s  threads that are not Python's (gRPC, the driver)")


if __name__ == "__main__":
    if "--as-exporter" in sys.argv:
        sys.argv.remove("--as-exporter")
        as_exporter()
    else:
        sys.exit(main())
