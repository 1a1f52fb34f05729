"""Resident memory of the exporter: of the real command with everything on, and that 10,000 ticks need no more.

The kubelet and the scraper live in this process. The simulated driver must live in the exporter's; what it and each
import add is measured apart, step by step in one interpreter, so that it can be taken off.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress

from bench.figures import Figure
from bench.node import EIGHT_GPUS
from bench.running import ExporterProcess, Memory, Scraper, exporter_process, free_port, kubelet_of, memory_of

MOST_MIB = 58
MOST_GROWTH_MIB = 1
LADDER = (
    ("bare Python", "pass"),
    ("+ logging, asyncio, ssl", "import logging, asyncio, ssl"),
    ("+ click", "import click"),
    ("+ pynvml", "import pynvml"),
    ("+ aiohttp.web", "import podgpu.http_client, aiohttp.web"),
    ("+ podgpu, but for what follows", "import podgpu.cli.exporter, podgpu.gpu.nvml, podgpu.web.app"),
    ("+ the kubelet's messages (protobuf)", "from podgpu.holders import kubelet, podresources_pb2"),
    (
        "+ the simulated driver of 8 GPUs",
        "from bench.node import *; kept = simulated_driver(EIGHT_GPUS, TickClock())",
    ),
)
"""Where the exporter's memory is: what each step adds in one interpreter. What it stands at beyond is what it keeps."""


def measure(first: int = 1_000, last: int = 10_000, scrape_every: int = 100, seconds: float = 40) -> list[Figure]:
    command = of_the_command(seconds)
    with exporter_process(EIGHT_GPUS) as exporter:
        scraper = Scraper(exporter.port)
        early = _memory_after(exporter, scraper, first, scrape_every)
        late = _memory_after(exporter, scraper, last - first, scrape_every)
        scraper.close()
    return [
        Figure(f"`podgpu exporter`, everything on, RSS after {seconds:g} s", command.rss, "MiB", MOST_MIB),
        Figure("  of it anonymous", command.anonymous, "MiB"),
        Figure(f"exporter's RSS after {first:,} ticks", early.rss, "MiB", MOST_MIB),
        Figure(f"exporter's RSS after {last:,} ticks", late.rss, "MiB", MOST_MIB),
        Figure(f"growth from {first:,} to {last:,} ticks", late.rss - early.rss, "MiB", MOST_GROWTH_MIB),
        Figure("  most it ever was (VmHWM)", late.peak, "MiB"),
        Figure("  of it anonymous (the rest is mapped libraries)", late.anonymous, "MiB"),
        *ladder(),
    ]


def of_the_command(seconds: float) -> Memory:
    """Telemetry, holders, usage, history and waste at their own pace, scraped every second."""
    port = free_port()
    with kubelet_of(EIGHT_GPUS) as kubelet:
        options = ["--telemetry", f"simulated:{EIGHT_GPUS.gpus}", "-k", "--pod-resources-kubelet-socket", kubelet]
        options += ["-f", "dcp", "-c", "1000", "-a", f"127.0.0.1:{port}"]
        command = [sys.executable, "-m", "podgpu", "exporter", *options]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                scraper = _first_scraper(process, port)
                until = time.monotonic() + seconds
                while time.monotonic() < until:
                    scraper.get("/metrics", zipped=True)
                    time.sleep(1)
                scraper.close()
                return memory_of(process.pid)
            finally:
                process.kill()


def _first_scraper(process: subprocess.Popen[bytes], port: int) -> Scraper:
    while process.poll() is None:
        with suppress(ConnectionError):
            return Scraper(port)
        time.sleep(0.1)
    raise RuntimeError(f"the exporter ended with {process.returncode}")


def _memory_after(exporter: ExporterProcess, scraper: Scraper, ticks: int, scrape_every: int) -> Memory:
    for done in range(0, ticks, scrape_every):
        exporter.tick(min(scrape_every, ticks - done))
        for zipped in (False, True):
            if scraper.get("/metrics", zipped=zipped).status != "HTTP/1.1 200 OK":
                raise RuntimeError("a scrape failed, so the figures would mean nothing")
    return exporter.memory()


def ladder() -> list[Figure]:
    script = "def say(): print(next(l.split()[1] for l in open('/proc/self/status') if l.startswith('VmRSS')))\n"
    script += "".join(f"{code}\nsay()\n" for _, code in LADDER)
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    stands = [int(line) / 1024 for line in done.stdout.split()]
    added = [now - before for before, now in zip([0.0, *stands], stands, strict=False)]
    return [Figure(f"  {name}", more, "MiB") for (name, _), more in zip(LADDER, added, strict=True)]
