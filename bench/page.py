"""Page: CPU to build the state of a cluster of 8,000 GPUs and to render it as /api/v1/view.

With an installed Chromium, also the time until the page shows all GPUs, and until it shows those of
a filter.
"""

from __future__ import annotations

import json
import time
from functools import partial
from statistics import median

from bench.figures import Figure, cpu_seconds_of_each
from bench.node import GPUS, rename, simulated_node
from podgpu.fleet.readings import ClusterReading, NodeReading
from podgpu.fleet.round import PublishedState
from podgpu.fleet.settings import ViewSettings
from podgpu.fleet.state import build_cluster_state
from podgpu.model import decode_node
from tests.browser.chromium import browser, chromium
from tests.browser.pictures import Showing, large

NODES = 1000
MAX_MS = 600
MAX_FIRST_MS = 2500
MAX_FILTER_MS = 100
FILTERS = ("a", "job-1", "dev-", "research", "h100 gpu-b", "gpu-c-0002", "idle", "")
# Time from the start of the navigation until the first frame with GPUs.
_FIRST = """new Promise(done => {
  const isThere = () => document.querySelector('.square, .tile[data-key]');
  const look = () => (isThere() ? done(performance.now()) : requestAnimationFrame(look));
  look();
})"""
# Time from a change of the filter until the filtered page is drawn.
_FILTER = """new Promise(done => {
  const field = document.querySelector('#q'), {port1, port2} = new MessageChannel(), start = performance.now();
  port1.onmessage = () => done(performance.now() - start);
  field.value = TEXT;
  field.dispatchEvent(new Event('input', {bubbles: true}));
  requestAnimationFrame(() => port2.postMessage(0));
})"""


def measure(nodes: int = NODES, turns: int = 5) -> list[Figure]:
    reading = read_cluster(nodes)
    now, wall = time.monotonic(), time.time()
    build = partial(build_cluster_state, reading, None, ViewSettings(), now, wall)
    state = build()
    building, rendering = cpu_seconds_of_each(turns, build, lambda: PublishedState(state).view_json)
    body, _ = PublishedState(state).view_json
    if len(state.nodes) != nodes:
        raise RuntimeError(f"{len(state.nodes)} of {nodes} nodes are shown")
    gpus = f"{nodes * GPUS:,} GPUs"
    return [
        Figure(
            f"{gpus}: state and /api/v1/view: CPU",
            (building + rendering) * 1e3,
            "ms",
            at_most=MAX_MS,
        ),
        Figure("  state", building * 1e3, "ms"),
        Figure("  /api/v1/view, with gzip", rendering * 1e3, "ms"),
        Figure("  size", len(body.plain) / 2**20, "MiB"),
        Figure("  size, gzip", len(body.zipped) / 2**20, "MiB"),
        *(measure_browser(nodes, turns) if chromium() else ()),
    ]


def measure_browser(nodes: int, turns: int) -> list[Figure]:
    first, filtered = [], []
    with Showing(large(nodes)).served() as client, browser() as tab:
        for _ in range(turns):
            tab.open("about:blank")
            tab.call("Page.navigate", url=client.address.url)
            first.append(float(tab.evaluate(_FIRST)))
        for text in FILTERS:
            filtered.append(float(tab.evaluate(_FILTER.replace("TEXT", json.dumps(text)))))
    gpus = f"{nodes * GPUS:,} GPUs in Chromium"
    return [
        Figure(f"{gpus}: first data", median(first), "ms", at_most=MAX_FIRST_MS),
        Figure(f"{gpus}: filter, median", median(filtered), "ms", at_most=MAX_FILTER_MS),
        Figure("  filter, slowest", max(filtered), "ms"),
    ]


def read_cluster(nodes: int) -> ClusterReading:
    with simulated_node() as node:
        document = node.agent.published.render("fresh_json").plain
    states = [decode_node(rename(document, number)) for number in range(nodes)]
    now = time.monotonic()
    return ClusterReading(
        tuple(NodeReading(f"http://{state.node}:9400", state, now, 0.0, True) for state in states)
    )
