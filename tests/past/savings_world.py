"""A recorded cluster with a pod for each kind of savings, made by rounds of its exporters' counters."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from podgpu.fleet.prices import Price, Prices
from podgpu.fleet.readings import ClusterReading, NodeReading
from podgpu.fleet.round import Cluster
from podgpu.fleet.settings import ViewSettings
from podgpu.model import NS, DeviceState, DeviceTotals, Holder, HolderUsage, WorkloadOwner
from podgpu.past.books.record import cluster_recorder
from podgpu.past.books.recorder import HistoryRecorder
from podgpu.past.savings.slowdown import stretch, weigh
from podgpu.past.sqlite.sqlite_past import SqlitePast
from podgpu.web.cluster_app import cluster_application
from tests.fleet.real_servers import Point
from tests.fleet.states import gpu, node
from tests.fleet.test_loop import Script, Time, tell
from tests.web.server import Client, running

GIB = 1024**3
STEP = 300.0
MODEL = "NVIDIA L40S"
PRICES = Prices("EUR", {"*": Price(2.0)}, "file")
SETTINGS = ViewSettings(
    interval=STEP, stale_after=900.0, savings_skip_namespaces=frozenset({"secret"})
)
OWNERS = {
    ("ml", "train-0"): WorkloadOwner("PyTorchJob", "train"),
    ("ml", "quiet-a"): WorkloadOwner("Deployment", "quiet"),
}
# Pod -> GPUs of its node, and what it is in each round: the busy share of each GPU.
Use = Callable[[int], float]


class _Counters:
    """What the exporters of the nodes count."""

    def __init__(self, step: float = STEP) -> None:
        self.step = step
        self.busy: dict[tuple[str, int], float] = defaultdict(float)
        self.idle: dict[tuple[str, int], float] = defaultdict(float)
        self.waited: dict[tuple[str, int], float] = defaultdict(float)
        self.held: dict[tuple[str, int], float] = defaultdict(float)
        self.underused: dict[tuple[str, int], float] = defaultdict(float)

    def hold(
        self, pod: str, index: int, busy: float, memory: float, share: float = 1.0, wait: float = 0
    ) -> Holder:
        key = pod, index
        self.busy[key] += busy * self.step
        self.idle[key] += 0.0 if busy else self.step
        self.held[key] += self.step * share
        if busy:
            self.underused[key] += self.step * max(0.0, share - busy)
        self.waited[key] += wait * self.step
        namespace, _, name = pod.rpartition("/")
        shared: dict[str, Any] = {}
        if share < 1:
            shared = {
                "busy_min_ns": _ns(self.busy[key]),
                "busy_max_ns": _ns(self.busy[key]),
                "wait_ns": _ns(self.waited[key]),
            }
        usage = HolderUsage(
            utilization_ratio=busy,
            memory_used_bytes=round(memory * GIB),
            allocated_ns=_ns(self.held[key]),
            busy_ns=_ns(self.busy[key]),
            idle_ns=_ns(self.idle[key]),
            wasted_underused_ns=_ns(self.underused[key]),
            **shared,
        )
        return Holder(
            namespace or "ml", name, "main", source="kubelet", share_ratio=share, usage=usage
        )


def _ns(seconds: float) -> int:
    return round(seconds * NS)


def _device(
    index: int, *holders: Holder, method: str = "samples", model: str = MODEL, name: str = "a"
) -> DeviceState:
    memory = sum(one.known_usage.memory_used_bytes or 0 for one in holders)
    busy = sum(one.known_usage.utilization_ratio or 0.0 for one in holders)
    return gpu(
        index,
        *holders,
        busy=min(1.0, busy),
        uuid=f"GPU-{name}{index}",
        model=model,
        memory_used_bytes=memory,
        memory_total_bytes=80 * GIB,
        usage=DeviceTotals(method=method),
    )


def read_nodes(counters: _Counters, number: int, at: float) -> tuple[NodeReading, ...]:
    """Two nodes in the round with this number."""
    hold = counters.hold
    is_day = number % 24 < 12
    first = node(
        "node-a",
        _device(0, hold("idle", 0, 0.0, 5)),
        _device(1, hold("idle", 1, 0.0, 5)),
        _device(2, hold("quiet-a", 2, 0.15, 20)),
        _device(3, hold("quiet-b", 3, 0.10, 20)),
        _device(4, hold("wide", 4, 0.3, 10)),
        _device(5, hold("wide", 5, 0.2, 30 if number == 100 else 10)),
        _device(6, hold("hot", 6, 0.9, 20)),
        _device(7),
        read_at=at,
        exporter_id="a",
    )
    shared = (
        hold("pair-a", 9, 0.2, 8, share=0.5, wait=0.05),
        hold("pair-b", 9, 0.1, 8, share=0.5, wait=0.03),
    )
    second = node(
        "node-b",
        _device(0, hold("train-0", 0, 0.05, 20), name="b"),
        _device(1, hold("train-0", 1, 0.05, 20), name="b"),
        _device(2, hold("secret/quiet", 2, 0.1, 20), name="b"),
        _device(3, hold("kept", 3, 0.1, 20), name="b"),
        _device(4, *shared, method="exact", name="b"),
        _device(5, hold("day", 5, 0.8 if is_day else 0.0, 20), name="b"),
        _device(6, hold("night", 6, 0.0 if is_day else 0.8, 20), name="b"),
        _device(7, name="b"),
        read_at=at,
        exporter_id="b",
    )
    return first, second


Read = Callable[[_Counters, int, float], tuple[NodeReading, ...]]


def record(hours: float, read: Read = read_nodes) -> tuple[Cluster, HistoryRecorder]:
    """Runs a round every 5 minutes. Call `stop` of the recorder afterwards."""
    cluster, recorder, _ = record_with(hours, read)
    return cluster, recorder


def record_with(
    hours: float, read: Read = read_nodes
) -> tuple[Cluster, HistoryRecorder, Callable[[], None]]:
    """Like `record`. The function runs one more round."""
    time = Time()
    time.now = 800.0  # a step begins
    cluster = Cluster(Script, SETTINGS, lambda: (PRICES, ()), time.clock)
    recorder = cluster_recorder(cluster)
    counters = _Counters()
    rounds = round(hours * 12)

    def run_round(number: int = rounds) -> None:
        reading = ClusterReading(
            read(counters, number, time.now),
            owners=OWNERS,
            kept_pods=frozenset({("ml", "kept")}),
        )
        asyncio.run(cluster.round(Script(tell(reading))))

    for number in range(rounds):
        run_round(number)
        recorder.record()
        time.now += STEP
    return cluster, recorder, run_round


@contextmanager
def serving(cluster: Cluster, recorder: HistoryRecorder) -> Iterator[Client]:
    past = SqlitePast(recorder, lambda: cluster.published.state)
    app: Any = partial(cluster_application, past=past)
    with running(cluster, app=app) as client:  # type: ignore[arg-type]
        yield client


def points(end: float, hours: float) -> Iterator[Point]:
    """What Prometheus stores of the same cluster, a sample per minute, until the time `end`."""
    counters = _Counters(60.0)
    minutes = round(hours * 60)
    for minute in range(minutes + 1):
        at = end - 60 * (minutes - minute)
        # The use of a step of 5 minutes is counted in its last sample.
        for reading in read_nodes(counters, (minute - 1) // 5 + 1, at):
            for device in reading.state.devices:
                yield from _points_of(reading.state.node, device, at)


def _points_of(node: str, device: DeviceState, at: float) -> Iterator[Point]:
    target = {"job": "podgpu", "instance": node, "Hostname": node}
    of_gpu = target | {"gpu": str(device.index), "UUID": device.uuid, "modelName": MODEL}
    yield Point("DCGM_FI_DEV_GPU_UTIL", of_gpu, 100 * (device.utilization_ratio or 0.0), at)
    yield Point("podgpu_device_memory_used_bytes", of_gpu, device.memory_used_bytes or 0, at)
    for one in device.holders:
        labels = of_gpu | {"namespace": one.namespace, "pod": one.pod, "container": one.container}
        usage = one.known_usage
        yield Point("podgpu_allocation_info", labels | {"source": "kubelet"}, 1, at)
        counted = {
            "allocated_seconds_total": usage.allocated_ns,
            "busy_seconds_total": usage.busy_ns,
            "busy_seconds_max_total": usage.busy_max_ns,
            "idle_seconds_total": usage.idle_ns,
            "wait_seconds_total": usage.wait_ns,
        }
        for name, value in counted.items():
            if value is not None:
                yield Point(f"podgpu_container_gpu_{name}", labels, value / NS, at)
        memory = usage.memory_used_bytes or 0
        yield Point("podgpu_container_gpu_memory_used_bytes", labels, memory, at)


def predict_waits(busy: Sequence[float]) -> list[float]:
    """Returns the share of time for which each pod would wait.

    `busy`: share of time for which each pod is busy alone. Their sum is at most `MAX_BUSY`.
    """
    weights = [weigh(share) for share in busy]
    factor = stretch(sum(weights))
    waits = []
    for weight, share in zip(weights, busy, strict=True):
        waits.append(weight * factor - share)
    return waits
