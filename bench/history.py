"""History of 8,000 GPUs in SQLite: CPU per round, and the time of one GPU's and one pod's day.

Every GPU has a holder; a tenth are shared by two. A day has `windows` rounds 5 min apart, then `steps` rounds of 15 s.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import mean, median

from bench.figures import Figure
from podgpu.clock import Clock
from podgpu.cluster.collect import ClusterReading, NodeReading
from podgpu.cluster.record import RoundReader
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.state import ClusterState, build_cluster_state
from podgpu.history.recorder import HistoryRecorder
from podgpu.model import DeviceState, Holder, HolderUsage, NodeState

GPUS = 8000
MAX_ROUND_MS = 100
MAX_GPU_MS = 50
_GIB = 1024**3


def _state(gpus: int, at: float, random: Random) -> ClusterState:
    nodes = []
    for first in range(0, gpus, 8):
        devices = tuple(_gpu(number, random.random()) for number in range(first, min(first + 8, gpus)))
        state = NodeState(
            node=f"gpu-a-{first // 8:04d}", producer="podgpu", exporter_id="x" * 8 + str(first), devices=devices
        )
        nodes.append(NodeReading("http://node", state, read_at=at))
    return build_cluster_state(ClusterReading(tuple(nodes)), None, ViewSettings(), at, at)


def _gpu(number: int, load: float) -> DeviceState:
    pods = [f"job-{number // 8}-worker-{number % 8}"] + [f"beside-{number}"] * (number % 10 == 0)
    usage = HolderUsage(utilization_ratio=load / len(pods), memory_used_bytes=8 * _GIB)
    return DeviceState(
        uuid=f"GPU-{number:08x}-1111-2222-3333-444444444444",
        index=number % 8,
        utilization_ratio=load,
        memory_used_bytes=int(load * 80 * _GIB),
        power_mw=round(100_000 + 500_000 * load),
        temperature_celsius=40 + 30 * load,
        holders=tuple(Holder("research", pod, "main", source="kubelet", usage=usage) for pod in pods),
    )


def measure(gpus: int = GPUS, windows: int = 288, steps: int = 240) -> list[Figure]:
    now, random, state = [1_794_744_000.0], Random(1), [_state(gpus, 0.0, Random(1))]
    clock = Clock(lambda: now[0], lambda: now[0])
    with tempfile.TemporaryDirectory(prefix="podgpu-bench-") as folder:
        recorder = HistoryRecorder(RoundReader(lambda: state[0], 60.0), clock, folder)
        rounds = []
        for pause in [300.0] * windows + [15.0] * steps:
            now[0] += pause
            state[0] = _state(gpus, now[0], random)
            rounds.append(_seconds(recorder.record))
        gpu = median(_seconds(lambda: asyncio.run(recorder.gpu(_uuid(0), "", 86_400))) for _ in range(9))
        pod = median(
            _seconds(lambda: asyncio.run(recorder.pod("research", "job-1-worker-0", 86_400))) for _ in range(9)
        )
        disk = sum(path.stat().st_size for path in Path(folder).iterdir())
        recorder.stop()
    return [
        Figure(f"one round written, mean, {gpus:,} GPUs", mean(rounds[-steps:]) * 1e3, "ms", MAX_ROUND_MS),
        Figure("a day of one GPU", gpu * 1e3, "ms", MAX_GPU_MS),
        Figure("a day of one pod", pod * 1e3, "ms", MAX_GPU_MS),
        Figure("  one round, max", max(rounds[-steps:]) * 1e3, "ms"),
        Figure("  on disk", disk / 2**20, "MiB"),
    ]


def _uuid(number: int) -> str:
    return f"GPU-{number:08x}-1111-2222-3333-444444444444"


def _seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began
