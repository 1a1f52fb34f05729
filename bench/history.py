"""The ring over 8,000 GPUs: what a sample costs, what a day takes in memory and on disk, how soon it is told.

Every GPU has a holder; a tenth are shared by two whose use is kept apart. A day is 288 samples 5 min apart, and an hour
of samples 15 s apart: as many columns as the ring ever has. Times are CPU of the process; memory is what its resident
set grew by. The answers are asked of the ring itself: what HTTP adds does not depend on it.
"""

from __future__ import annotations

import gc
import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median

from bench.figures import Figure
from podgpu.clock import Clock
from podgpu.figures.device import DeviceFigures, HolderFigures
from podgpu.history.answering import RingHistory
from podgpu.history.asking import RANGES, points_asked
from podgpu.history.keeper import Keeper
from podgpu.history.ring import Told
from podgpu.history.rows import Key
from podgpu.model import Workload

GPUS = 8000
MOST_PERCENT = 3
MOST_MIB = 100
MOST_POD_MS = 300
_ROUND = 15.0
_DIFFERENT = 4
_GIB = 1024**3


class Fleet:
    """Figures of a moment: objects of their own in every round, as those that are read from expositions."""

    def __init__(self, gpus: int) -> None:
        self._gpus = gpus
        self._random = Random(1)

    def now(self) -> list[Told]:
        return [Told([self._gpu(number) for number in range(self._gpus)])]

    def _gpu(self, number: int) -> DeviceFigures:
        load = self._random.random()
        pods = [f"job-{number // 8}-worker-{number % 8}"] + [f"beside-{number}"] * (number % 10 == 0)
        part = load / len(pods)
        holders = tuple(HolderFigures(Workload("research", pod, "main"), part, 8 * _GIB) for pod in pods)
        return DeviceFigures(
            uuid=f"GPU-{number:08x}-1111-2222-3333-444444444444",
            index=number % 8,
            node=f"gpu-a-{number // 8:04d}",
            utilization=load,
            memory_used=int(load * 80 * _GIB),
            power_watts=100 + 500 * load,
            temperature=40 + 30 * load,
            holders=holders,
        )


def measure(gpus: int = GPUS, windows: int = 288, steps: int = 240) -> list[Figure]:
    fleet, now = Fleet(gpus), [1_794_744_000.0]
    clock = Clock(lambda: now[0], lambda: now[0])
    with tempfile.TemporaryDirectory(prefix="podgpu-bench-") as folder:
        rounds = [fleet.now() for _ in range(_DIFFERENT)]
        round_ = rounds[0]
        keeper = Keeper(lambda: round_, clock, folder)
        keeper.write()
        before = _resident()
        samples, writes = [], []
        for number, pause in enumerate([300.0] * windows + [_ROUND] * steps):
            now[0] += pause
            round_ = rounds[number % _DIFFERENT]
            samples.append(_cpu(keeper.take))
            writes.append(_cpu(keeper.write))
        grown = _resident() - before
        history = RingHistory(keeper.ring, keeper.clock)
        first = _cpu(lambda: history.sparklines_now(points_asked("60")))
        now[0] += _ROUND
        keeper.take()
        again = _cpu(lambda: history.sparklines_now(points_asked("60")))
        size = len(history.sparklines_now(points_asked("60")))
        pod = median(_cpu(lambda: history.pod_now("research", "job-1-worker-0", RANGES["24h"])) for _ in range(9))
        gpu = median(_cpu(lambda: history.gpu_now(_key(0), RANGES["24h"])) for _ in range(9))
        disk = sum(path.stat().st_size for path in Path(folder).iterdir())
        keeper.stop()
        read = _cpu(lambda: Keeper(tuple, clock, folder).write())
    steady = sum(samples[-steps:]) + sum(writes[-steps:])
    of_all = f"{gpus:,} GPUs"
    return [
        Figure(f"a core, at a sample every 15 s, {of_all}", 100 * steady / (steps * _ROUND), "%", MOST_PERCENT),
        Figure(f"a day in memory, {of_all}", grown / 2**20, "MiB", MOST_MIB),
        Figure("a day of one pod", pod * 1e3, "ms", MOST_POD_MS),
        Figure("  a day of one GPU", gpu * 1e3, "ms"),
        Figure("  one sample, median", median(samples[-steps:]) * 1e3, "ms"),
        Figure("  the longest, with five minutes to be averaged", max(samples[-steps:]) * 1e3, "ms"),
        Figure("  one sample written, median", median(writes[-steps:]) * 1e3, "ms"),
        Figure("  sparklines of all, the first time", first * 1e3, "ms"),
        Figure("  sparklines of all, 15 s later", again * 1e3, "ms"),
        Figure("  sparklines of all: size", size / 1024, "KiB"),
        Figure("  on disk", disk / 2**20, "MiB"),
        Figure("  read at the start", read * 1e3, "ms"),
        Figure(
            "  most resident memory of the process", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "MiB"
        ),
        Figure("  cores", len(os.sched_getaffinity(0)), ""),
    ]


def _key(number: int) -> Key:
    return Key(f"GPU-{number:08x}-1111-2222-3333-444444444444")


def _cpu(act: Callable[[], object]) -> float:
    began = time.process_time()
    act()
    return time.process_time() - began


def _resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
