"""A CUDA load that records its own busy time: python recorded_load.py BUSY_MS PERIOD_MS LOG GO [random] [fp32] [cool]

First it measures the duration of one matrix product, while no other load does. It waits for the file GO, and then
computes the same number of products in each period. Twice a second it writes `monotonic_time seconds_of_work` to LOG.

`random` makes the pauses exponentially distributed. At the power limit a product takes longer than measured, and the
recorded time is too low. `fp32` stays below the power limit; `cool` multiplies zeros, which takes half the power.
"""

from __future__ import annotations

import fcntl
import random
import sys
import time
from pathlib import Path

import torch

busy, period = float(sys.argv[1]) / 1e3, float(sys.argv[2]) / 1e3
log, go = Path(sys.argv[3]).open("w", buffering=1), Path(sys.argv[4])  # noqa: SIM115 - open until the load is killed
with Path(__file__).open() as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    kind = torch.float32 if "fp32" in sys.argv else torch.bfloat16
    matrix = (torch.zeros if "cool" in sys.argv else torch.randn)(2048, 2048, device="cuda", dtype=kind)
    result = torch.empty_like(matrix)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(200):
        torch.mm(matrix, matrix, out=result)
    product = float("inf")
    for _ in range(20):
        begin.record()
        for _ in range(50):
            torch.mm(matrix, matrix, out=result)
        end.record()
        torch.cuda.synchronize()
        product = min(product, begin.elapsed_time(end) / 50e3)
burst = max(1, round(busy / product)) if busy else 0
log.write(f"# one product takes {product * 1e6:.1f} us, a burst has {burst}\n")
while not go.exists():
    time.sleep(0.05)
done, written_at = 0, time.monotonic()
while True:
    began = time.monotonic()
    for number in range(burst):
        torch.mm(matrix, matrix, out=result)
        if number % 64 == 63:
            torch.cuda.synchronize()
            now = time.monotonic()
            if now - written_at >= 0.5:
                log.write(f"{now:.4f} {(done + number + 1) * product:.5f}\n")
                written_at = now
    torch.cuda.synchronize()
    done += burst
    now = time.monotonic()
    if now - written_at >= 0.5:
        log.write(f"{now:.4f} {done * product:.5f}\n")
        written_at = now
    rest = max(0.0, period - (now - began))
    time.sleep(random.expovariate(1 / rest) if rest and "random" in sys.argv else rest)
