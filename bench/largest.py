"""The largest node promised: 16 GPUs in 112 MIG slices, 250 pods. Memory, CPU of a tick, size of the text. Informs."""

from __future__ import annotations

from statistics import median

from bench.figures import Figure
from bench.node import LARGEST, NodeShape
from bench.running import Scraper, exporter_process


def measure(shape: NodeShape = LARGEST, ticks: int = 100) -> list[Figure]:
    with exporter_process(shape) as exporter:
        answer = exporter.tick(ticks)
        scraper = Scraper(exporter.port)
        served = len(scraper.get("/metrics").body)
        scraper.close()
        memory = exporter.memory()
    cost, exposition = answer["cost"], answer["exposition"]
    return [
        Figure("telemetry turn: CPU, simulated driver included", median(cost["telemetry"]) * 1e3, "ms"),
        Figure("allocation turn: CPU", median(cost["allocation"]) * 1e3, "ms"),
        Figure("assignments", answer["assignments"], ""),
        Figure("the exposition as served", served / 1024, "KiB"),
        Figure("the exposition with gzip", exposition["zipped"] / 1024, "KiB"),
        Figure("exporter's RSS", memory.rss, "MiB"),
        Figure("  most it ever was (VmHWM)", memory.peak, "MiB"),
    ]
