"""History: the SQLite file with 8,000 GPUs. A tenth of them is shared by two pods.

A day has a round every 5 minutes for 23 hours and every 15 seconds for one hour. These are as many
rows as a real day has after its roll-up.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from random import Random
from statistics import mean, median

from bench.figures import Figure, cpu_seconds_of_each
from podgpu.charge import Amounts, Charge, Figures, UsageAccount
from podgpu.past.books.gpu_sample import GpuSample
from podgpu.past.books.store import HistoryStore
from podgpu.past.sqlite.sqlite_charges import read_range
from podgpu.past.sqlite.sqlite_series import read_gpu

GPUS = 8000
MAX_WRITE_MS = 100
MAX_GPU_MS = 50
INTERVAL, COARSE_INTERVAL = 15, 300
DAY = 86_400
_START = 1_794_700_800
_GIB = 1024**3


def make_round(gpus: int, random: Random) -> list[GpuSample]:
    return [_make_gpu(number, random.random()) for number in range(gpus)]


def _make_gpu(number: int, load: float) -> GpuSample:
    node, shared = f"gpu-node-{number // 8:05}", number % 10 == 0
    names = [f"job-{number}", f"beside-{number}"] if shared else [f"job-{number}"]
    part = Figures(load / 2, 8 * _GIB, 200.0) if shared else None
    amounts = Amounts(INTERVAL / len(names), (1 - load) * INTERVAL)
    holders = [Charge(UsageAccount("research", name), "main", amounts, part) for name in names]
    figures = Figures(load, load * 80 * _GIB, 100 + 500 * load, 40 + 30 * load)
    return GpuSample(uuid_of(number), "", node, number % 8, figures, holders)


def uuid_of(number: int) -> str:
    return f"GPU-{number:08x}-1111-2222-3333-444444444444"


def measure(gpus: int = GPUS, coarse_rounds: int = 276, fine_rounds: int = 240) -> list[Figure]:
    random, at = Random(1), _START
    rounds = [make_round(gpus, random) for _ in range(4)]
    with tempfile.TemporaryDirectory(prefix="podgpu-bench-") as folder:
        store = HistoryStore(Path(folder) / "history.db")
        seconds, wall = [], []
        for number, interval in enumerate(
            [COARSE_INTERVAL] * coarse_rounds + [INTERVAL] * fine_rounds
        ):
            at += interval
            samples = rounds[number % len(rounds)]
            started, cpu_started = time.perf_counter(), time.process_time()
            store.append(at, samples)
            seconds.append(time.process_time() - cpu_started)
            wall.append(time.perf_counter() - started)
        with store.reader() as db:
            gpu, usage = cpu_seconds_of_each(
                9,
                lambda: read_gpu(db, uuid_of(0), at - DAY, at),
                lambda: read_range(db, at - DAY, at),
            )
            history = read_gpu(db, uuid_of(0), at - DAY, at)
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        store.close()
    if history is None:
        raise RuntimeError("the GPU is not in the history")
    fine = seconds[-fine_rounds:]
    return [
        Figure(
            f"one round written, {gpus:,} GPUs, mean: CPU",
            mean(fine) * 1e3,
            "ms",
            at_most=MAX_WRITE_MS,
        ),
        Figure("  longest: CPU", max(fine) * 1e3, "ms"),
        Figure("  median: wall", median(wall[-fine_rounds:]) * 1e3, "ms"),
        Figure("one GPU's day", gpu * 1e3, "ms", at_most=MAX_GPU_MS),
        Figure("  a day of usage of all pods", usage * 1e3, "ms"),
        Figure("  size of the file", size / 2**20, "MiB"),
    ]
