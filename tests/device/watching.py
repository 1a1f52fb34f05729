"""Measures the cost of the exporter while four pods share one GPU, and compares it with limits.
Takes four minutes:

    python tests/device/watching.py [OUTPUT_DIRECTORY [RUN…]]

A RUN is a name in `RUNS`, such as `fast`. A name may be repeated: `fast fast fast` measures three
times. Results are printed and written after each run.

Needs root, one NVIDIA GPU, cgroup v2 and PyTorch. CPU time includes all threads of the exporter,
but not the scraper and the kubelet. Exits 1 if a limit is exceeded.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

from shared_gpu import SharedGpu, cpu_seconds, resident_mib, wait_for

PORT = 9475
SCRAPES = 500
MAX_MIB, MAX_THREADS, MAX_SCRAPE_MS = 80.0, 16.0, 0.25


class Run(NamedTuple):
    options: Sequence[str]
    seconds: float
    scrape_every: float
    max_cpu_percent: float  # 0 if there is no limit


RUNS = {
    "fast": Run(("-c", "1000", "-f", "dcp"), 25.0, 1.0, 1.9),
    "virtual": Run(("-c", "1000", "-f", "dcp", "--kubernetes-virtual-gpus"), 25.0, 1.0, 2.2),
    "default": Run(("-f", "dcp"), 45.0, 15.0, 1.0),
    "switches": Run(("-c", "1000", "-f", "dcp", "--usage-from", "switches"), 25.0, 1.0, 0.0),
    "exact": Run(("-c", "1000", "-f", "dcp", "--usage-from", "exact"), 25.0, 1.0, 0.0),
}


class Row(NamedTuple):
    name: str
    value: float
    unit: str
    limit: float  # 0 if there is no limit


class Scraper:
    """Scrapes over a keep-alive connection. Has little overhead, because it shares the CPUs with
    the exporter.
    """

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
        assert b" 200 " in status, status
        return took, body.decode()


@contextmanager
def exporter(options: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the exporter with compiled modules, as in the image. A process that compiles them needs
    6 MiB more.
    """
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    environment["PYTHONPYCACHEPREFIX"] = f"{tempfile.gettempdir()}/podgpu-watching-compiled"
    command = [
        sys.executable,
        "-m",
        "podgpu",
        "exporter",
        "-k",
        "-a",
        f"127.0.0.1:{PORT}",
        *options,
    ]
    with subprocess.Popen(command, env=environment) as process:
        try:
            wait_for(
                lambda: "DCGM_FI_DEV_GPU_UTIL{" in Scraper().scrape()[1], 30, "metrics of the GPU"
            )
            time.sleep(6)  # holders are read every 5 s
            yield process
        finally:
            process.terminate()


def measure(name: str, run: Run, process: subprocess.Popen[bytes]) -> Iterator[Row]:
    scraper, waits = Scraper(), []
    began, cpu = time.monotonic(), cpu_seconds(process.pid)
    for number in range(round(run.seconds / run.scrape_every)):
        time.sleep(max(0.0, began + number * run.scrape_every - time.monotonic()))
        waits.append(scraper.scrape()[0])
    time.sleep(max(0.0, began + run.seconds - time.monotonic()))
    spent = (cpu_seconds(process.pid) - cpu) / (time.monotonic() - began)
    took = [scraper.scrape()[0] for _ in range(SCRAPES)]
    yield Row(f"CPU: {name}", 100 * spent, "%", run.max_cpu_percent)
    yield Row("  resident memory", resident_mib(process.pid), "MiB", MAX_MIB)
    yield Row("  threads", len(os.listdir(f"/proc/{process.pid}/task")), "", MAX_THREADS)
    yield Row("  consecutive scrapes, median", 1e3 * median(took), "ms", MAX_SCRAPE_MS)
    yield Row("  consecutive scrapes, maximum", 1e3 * max(took), "ms", 0)
    yield Row(f"  scrapes every {run.scrape_every:g} s, median", 1e3 * median(waits), "ms", 0)


def main() -> int:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "bench-out")
    out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        bench = SharedGpu(Path(folder))
        with (
            bench.loads([(485, 970), (280, 1130), (130, 1310), (0, 1000)]) as tenants,
            bench.kubelet(tenants) as kubelet,
        ):
            options = ["--pod-resources-kubelet-socket", kubelet]
            with exporter(options):
                pass  # compiles the modules
            for name in sys.argv[2:] or RUNS:
                with exporter([*options, *RUNS[name].options]) as process:
                    new = list(measure(name, RUNS[name], process))
                rows += new
                (out / "watching.json").write_text(json.dumps(rows, indent=1))
                for row in new:
                    verdict = "" if not row.limit else "met" if row.value <= row.limit else "MISSED"
                    print(
                        (
                            f"{row.name:<50} {row.value:>9.3g} {row.limit or '':>7} {row.unit:<5} "
                            f"{verdict}"
                        ),
                        flush=True,
                    )
    return int(any(row.limit and row.value > row.limit for row in rows))


if __name__ == "__main__":
    sys.exit(main())
