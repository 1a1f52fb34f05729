"""Serving a scrape against serving the same bytes as a constant: what podgpu's handler adds to aiohttp's own cost.

The exporter runs as a process of its own (8 simulated H100s, dcp counters, 8 pods from a gRPC kubelet) and its agent
rests, so that the text stays the same. Its aiohttp application has a second route which hands out the text as it was,
with the same headers, in a new `web.Response`: aiohttp's responses cannot be sent twice. One connection stays open;
blocks of requests to the one and to the other take turns, A B A B. After each block the server's own CPU clock is
read, once the server has come to rest. The ratio of the medians over the blocks is judged; seconds are never compared
between runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from bench.exporter_process import CONSTANT, CONSTANT_ZIPPED
from bench.figures import Figure
from bench.node import EIGHT_GPUS
from bench.running import Answer, ExporterProcess, Scraper, exporter_process

MOST_TIMES_CONSTANT = 1.5
_REST_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one request, in microseconds; medians."""

    cpu: float
    wall: float


def measure(blocks: int = 200, requests: int = 20) -> list[Figure]:
    with exporter_process(EIGHT_GPUS) as exporter:
        scraper = Scraper(exporter.port)
        plain = compare(exporter, scraper, CONSTANT, blocks, requests, zipped=False)
        zipped = compare(exporter, scraper, CONSTANT_ZIPPED, blocks, requests, zipped=True)
        scraper.close()
    return [*_figures("plain", *plain), *_figures("gzip", *zipped)]


def compare(
    exporter: ExporterProcess, scraper: Scraper, constant: str, blocks: int, requests: int, *, zipped: bool
) -> tuple[Cost, Cost]:
    """What a scrape costs, and what the constant costs."""
    ask_exposition = partial(scraper.get, "/metrics", zipped=zipped)
    ask_constant = partial(scraper.get, constant, zipped=zipped)
    _see_that_both_answer_alike(ask_exposition(), ask_constant())
    exposition, same = [], []
    for _ in range(blocks):
        exposition.append(_block(exporter, ask_exposition, requests))
        same.append(_block(exporter, ask_constant, requests))
    return _median(exposition), _median(same)


def _see_that_both_answer_alike(exposition: Answer, constant: Answer) -> None:
    if exposition.body != constant.body or exposition.headers | {"date": ""} != constant.headers | {"date": ""}:
        raise RuntimeError("the constant is not what /metrics serves: there is nothing to compare")


def _median(costs: Sequence[Cost]) -> Cost:
    return Cost(median(c.cpu for c in costs), median(c.wall for c in costs))


def _block(exporter: ExporterProcess, get: Callable[[], object], requests: int) -> Cost:
    time.sleep(_REST_SECONDS)
    cpu, wall = exporter.cpu_seconds(), time.perf_counter()
    for _ in range(requests):
        get()
    wall = time.perf_counter() - wall
    time.sleep(_REST_SECONDS)
    return Cost((exporter.cpu_seconds() - cpu) / requests * 1e6, wall / requests * 1e6)


def _figures(kind: str, scrape: Cost, constant: Cost) -> list[Figure]:
    return [
        Figure(f"scrape over constant, {kind}: server CPU", scrape.cpu / constant.cpu, "x", MOST_TIMES_CONSTANT),
        Figure(f"scrape over constant, {kind}: wall", scrape.wall / constant.wall, "x"),
        Figure(f"one scrape, {kind}: server CPU", scrape.cpu, "us"),
    ]
