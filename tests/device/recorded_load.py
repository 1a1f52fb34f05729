"""A CUDA load that records its own busy and waiting time:

    python recorded_load.py BUSY_MS PERIOD_MS LOG GO [random] [fp32] [cool] [deep]

First measures the duration of one matrix product and of one burst, while no other load runs. Waits
for the file GO. Then computes the same number of products in each period. Twice a second writes
`monotonic_time seconds_of_work seconds_of_waiting` to LOG. The waiting time is the duration of a
burst minus the duration measured first.

`random` makes the pauses exponentially distributed. At the power limit products take longer than
measured, so the recorded time is too low. `fp32` stays below the power limit. `cool` multiplies
zeros and needs half the power. `deep` synchronizes after each burst instead of after 64 products,
so that the GPU always has queued work.
"""

from __future__ import annotations

import fcntl
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

busy, period = float(sys.argv[1]) / 1e3, float(sys.argv[2]) / 1e3
log, go = Path(sys.argv[3]).open("w", buffering=1), Path(sys.argv[4])  # noqa: SIM115 - open until the load is killed
launches = 1 << 30 if "deep" in sys.argv else 64  # products per synchronization
kind = torch.float32 if "fp32" in sys.argv else torch.bfloat16


def compute(count: int, write: Callable[[int], None] = lambda _: None) -> float:
    """Computes a burst and returns its duration."""
    began = time.monotonic()
    for number in range(1, count + 1):
        torch.mm(matrix, matrix, out=result)
        if number % launches == 0:
            torch.cuda.synchronize()
            write(number)
    torch.cuda.synchronize()
    return time.monotonic() - began


with Path(__file__).open() as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    matrix = (torch.zeros if "cool" in sys.argv else torch.randn)(
        2048, 2048, device="cuda", dtype=kind
    )
    result = torch.empty_like(matrix)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    compute(200)
    product = float("inf")
    for _ in range(20):
        begin.record()
        for _ in range(50):
            torch.mm(matrix, matrix, out=result)
        end.record()
        torch.cuda.synchronize()
        product = min(product, begin.elapsed_time(end) / 50e3)
    burst = max(1, round(busy / product)) if busy else 0
    alone = median(compute(burst) for _ in range(9 if busy < 0.1 else 1))
log.write(
    f"# one product takes {product * 1e6:.1f} us, a burst has {burst} and takes "
    f"{alone * 1e3:.3f} "
    "ms\n"
)
while not go.exists():
    time.sleep(0.05)
done, waited, began, written_at = 0, 0.0, 0.0, time.monotonic()


def write_log(number: int) -> None:
    """Writes the log every half second. `number`: products computed in the current burst."""
    global written_at
    now = time.monotonic()
    if now - written_at >= 0.5:
        waiting = waited + (max(0.0, now - began - alone * number / burst) if number else 0.0)
        log.write(f"{now:.4f} {(done + number) * product:.5f} {waiting:.5f}\n")
        written_at = now


while True:
    began = time.monotonic()
    took = compute(burst, write_log)
    done, waited = done + burst, waited + max(0.0, took - alone)
    write_log(0)
    rest = max(0.0, period - (time.monotonic() - began))
    time.sleep(random.expovariate(1 / rest) if rest and "random" in sys.argv else rest)
