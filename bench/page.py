"""Page: CPU to build the state of a cluster of 8,000 GPUs and to render it as /api/v1/view."""

from __future__ import annotations

import time
from functools import partial

from bench.figures import Figure, cpu_seconds_of_each
from bench.node import GPUS, rename, simulated_node
from podgpu.cluster.collect import ClusterReading, NodeReading, ViewSettings
from podgpu.cluster.loop import PublishedState
from podgpu.cluster.state import build_cluster_state
from podgpu.model import decode_node

NODES = 1000
MAX_MS = 600


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
        Figure(f"{gpus}: state and /api/v1/view: CPU", (building + rendering) * 1e3, "ms", at_most=MAX_MS),
        Figure("  state", building * 1e3, "ms"),
        Figure("  /api/v1/view, with gzip", rendering * 1e3, "ms"),
        Figure("  size", len(body.plain) / 2**20, "MiB"),
        Figure("  size, gzip", len(body.zipped) / 2**20, "MiB"),
    ]


def read_cluster(nodes: int) -> ClusterReading:
    with simulated_node() as node:
        document = node.agent.published.render("fresh_json").plain
    states = [decode_node(rename(document, number)) for number in range(nodes)]
    now = time.monotonic()
    return ClusterReading(tuple(NodeReading(f"http://{state.node}:9400", state, now, 0.0, True) for state in states))
