"""A cluster with pods, prices and 24 minutes of history, served over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from podgpu.fleet.prices import Price, Prices
from podgpu.fleet.readings import ClusterReading
from podgpu.fleet.round import Cluster
from podgpu.fleet.settings import ViewSettings
from podgpu.model import WorkloadOwner
from podgpu.past.books.record import cluster_recorder
from podgpu.past.sqlite.sqlite_past import SqlitePast
from podgpu.web.app import Address
from podgpu.web.cluster_app import cluster_application
from tests.fleet.states import gpu, holder, lost, mig, node
from tests.fleet.test_loop import Script, Time, tell
from tests.web.server import LOOPBACK, running

PRICES = Prices("EUR", {"*": Price(100.0)}, "example")
HOSTILE = "\x1b[31mred"
_ROUNDS = 97
_SECONDS = 15


@contextmanager
def served_cluster(address: Address = LOOPBACK) -> Iterator[str]:
    """Yields the URL.

    Pods: one on two GPUs, two that share a GPU, one on a MIG instance, and an idle one.
    """
    time = Time()
    cluster = Cluster(Script, ViewSettings(), lambda: (PRICES, ()), time.clock)
    recorder = cluster_recorder(cluster)
    owners = {
        ("ml", "train"): WorkloadOwner("Job", "train"),
        ("notes", "idle"): WorkloadOwner("Deployment", HOSTILE),
    }
    for _ in range(_ROUNDS):
        reading = ClusterReading(_make_nodes(time.now), owners=owners)
        asyncio.run(cluster.round(Script(tell(reading))))
        recorder.record()
        time.now += _SECONDS
    past = SqlitePast(recorder, lambda: cluster.published.state)
    app: Any = partial(cluster_application, past=past)
    try:
        with running(cluster, address, app=app) as client:  # type: ignore[arg-type]
            yield f"http://{client.address.host}:{client.address.port}"
    finally:
        recorder.stop()


def _make_nodes(now: float) -> tuple[Any, ...]:
    train = holder("train", utilization_ratio=0.75, memory_used_bytes=30 * 1024**3)
    shared = [
        holder("a", share=0.5, utilization_ratio=0.3, memory_used_bytes=1024**3),
        holder("b", "web", share=0.5, utilization_ratio=0.1, wait_ratio=0.25),
    ]
    idle = holder("idle", "notes", utilization_ratio=0.0)
    part = mig(1, holder("small", "web"), busy=0.5)
    first = node("n-1", gpu(0, train, busy=0.75), gpu(1, *shared, busy=0.4), read_at=now)
    second = node(
        "n-2",
        gpu(2, train, busy=0.75),
        gpu(3, idle, busy=0.0),
        gpu(4, instances=(part,)),
        gpu(5),
        lost(6),
        read_at=now,
    )
    return first, second
