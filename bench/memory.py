"""Resident memory of the exporter's process: after 1,000 ticks, and that 10,000 need no more.

The kubelet and the scraper live in this process. The simulated driver must live in the exporter's; what it and the
big dependencies take is measured apart, each in a fresh interpreter, so that it can be taken off.
"""

from __future__ import annotations

import subprocess
import sys

from bench.figures import Figure
from bench.node import EIGHT_GPUS
from bench.running import ExporterProcess, Memory, Scraper, exporter_process

MOST_MIB = 64
MOST_GROWTH_MIB = 1
_WITHOUT_SIMULATION = (
    "import grpc, pynvml, podgpu.cli.exporter, podgpu.telemetry.nvml, podgpu.allocation.kubelet, podgpu.serve.app;"
    "from podgpu.allocation import podresources_pb2"
)
_IMPORTS = {
    "bare Python": "",
    "Python + aiohttp.web": "import aiohttp.web",
    "Python + grpc": "import grpc",
    "Python + protobuf messages": "from podgpu.allocation import podresources_pb2",
    "Python + pynvml": "import pynvml",
    "everything the exporter imports": _WITHOUT_SIMULATION,
    "the same + the simulated driver of 8 GPUs": (
        f"{_WITHOUT_SIMULATION}\nfrom bench.node import *\nkept = simulated_driver(EIGHT_GPUS, TickClock())"
    ),
}


def measure(first: int = 1_000, last: int = 10_000, scrape_every: int = 100) -> list[Figure]:
    with exporter_process(EIGHT_GPUS) as exporter:
        scraper = Scraper(exporter.port)
        early = _memory_after(exporter, scraper, first, scrape_every)
        late = _memory_after(exporter, scraper, last - first, scrape_every)
        scraper.close()
    return [
        Figure(f"exporter's RSS after {first:,} ticks", early.rss, "MiB", MOST_MIB),
        Figure(f"exporter's RSS after {last:,} ticks", late.rss, "MiB", MOST_MIB),
        Figure(f"growth from {first:,} to {last:,} ticks", late.rss - early.rss, "MiB", MOST_GROWTH_MIB),
        Figure("  most it ever was (VmHWM)", late.peak, "MiB"),
        Figure("  of it anonymous (the rest is mapped libraries)", late.anonymous, "MiB"),
        *(Figure(f"  {name}: RSS", import_rss(code), "MiB") for name, code in _IMPORTS.items()),
    ]


def _memory_after(exporter: ExporterProcess, scraper: Scraper, ticks: int, scrape_every: int) -> Memory:
    for done in range(0, ticks, scrape_every):
        exporter.tick(min(scrape_every, ticks - done))
        for zipped in (False, True):
            if scraper.get("/metrics", zipped=zipped).status != "HTTP/1.1 200 OK":
                raise RuntimeError("a scrape failed, so the figures would mean nothing")
    return exporter.memory()


def import_rss(code: str) -> float:
    """MiB of an interpreter that ran only this."""
    script = f"{code}\nprint([int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmRSS')][0])"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return int(done.stdout) / 1024
