"""A CUDA load that knows how much it worked: python honest_load.py BUSY_MS PERIOD_MS LOG GO [random] [fp32] [cool]

It calibrates one matrix product while no other load does, waits for the file GO, and then does the same number of
products every period; twice a second LOG gets `monotonic seconds_of_work`. With `random` the pauses are exponentially
distributed around the period's: requests, not a metronome. Under a power limit a product takes longer than it did
alone: then it worked longer than it says. `fp32` has kernels that stay below the limit, and `cool` has those of bf16 on
matrices of zeros, which take half the power and the same time.
"""

from __future__ import annotations

import fcntl
import random
import sys
import time
from pathlib import Path

import torch

busy, period = float(sys.argv[1]) / 1e3, float(sys.argv[2]) / 1e3
log, go = Path(sys.argv[3]).open("w", buffering=1), Path(sys.argv[4])  # noqa: SIM115 - until it is killed
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
done, told = 0, time.monotonic()
while True:
    began = time.monotonic()
    for number in range(burst):
        torch.mm(matrix, matrix, out=result)
        if number % 64 == 63:
            torch.cuda.synchronize()
            now = time.monotonic()
            if now - told >= 0.5:
                log.write(f"{now:.4f} {(done + number + 1) * product:.5f}\n")
                told = now
    torch.cuda.synchronize()
    done += burst
    now = time.monotonic()
    if now - told >= 0.5:
        log.write(f"{now:.4f} {done * product:.5f}\n")
        told = now
    rest = max(0.0, period - (now - began))
    time.sleep(random.expovariate(1 / rest) if rest and "random" in sys.argv else rest)
