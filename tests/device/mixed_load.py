"""A load that logs its own work and its own time, for `savings_mixes.py`:

    python mixed_load.py NAME KIND BUSY_MS PERIOD_MS LOG GO [random] [syncs] [clustered]

First finds how many operations take BUSY_MS, while no other load calibrates. Then it runs as long as
its NAME is in the file GO: one burst per period. After each burst it adds to LOG:
`monotonic_time seconds`, the time from the start of the burst until its result was there.

`random` makes pauses exponentially distributed. `syncs` waits for the GPU after each operation, so
the model predicts too little.
`clustered` does four bursts at once, and then pauses for four periods. The kind `sleep` needs no
GPU; it is for a trial of the scripts.
"""

from __future__ import annotations

import fcntl
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

name, kind, busy_ms, period_ms, log_name, go_name, *options = sys.argv[1:]
busy, period = float(busy_ms) / 1e3, float(period_ms) / 1e3
log = Path(log_name).open("w", buffering=1)  # noqa: SIM115 - open until the load is killed
go = Path(go_name)
Operation = Callable[[], object]


def make_operation() -> tuple[Operation, Operation]:
    """Returns an operation of about 0.1 to 5 ms on an H200, and a function that waits for the GPU."""
    if kind == "sleep":
        return (lambda: time.sleep(0.001)), (lambda: None)

    import torch
    import torch.nn.functional as functions

    def numbers(*shape: int, of: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=of)

    half = torch.float16
    if kind == "fft":
        x = numbers(2**22).to(torch.complex64)
        run: Operation = lambda: torch.fft.fft(x)  # noqa: E731
    elif kind == "sort":
        x = numbers(2**21)
        run = lambda: torch.sort(x)  # noqa: E731
    elif kind == "softmax":
        x = numbers(8192, 4096)
        run = lambda: functions.softmax(x, dim=1)  # noqa: E731
    elif kind == "gather":
        x = numbers(2**20, 64)
        places = torch.randint(2**20, (2**19,), device="cuda")
        run = lambda: x.index_select(0, places)  # noqa: E731
    elif kind == "conv":
        x = numbers(16, 64, 112, 112, of=half)
        weights = numbers(64, 64, 3, 3, of=half)
        run = lambda: functions.conv2d(x, weights, padding=1)  # noqa: E731
    elif kind == "attention":
        q = numbers(8, 16, 1024, 64, of=half)
        run = lambda: functions.scaled_dot_product_attention(q, q, q)  # noqa: E731
    elif kind == "double":
        x = numbers(1024, 1024, of=torch.float64)
        run = lambda: torch.mm(x, x)  # noqa: E731
    elif kind == "scan":
        x = numbers(2**24)
        run = lambda: torch.cumsum(x, 0)  # noqa: E731
    elif kind == "special":
        x = numbers(2**23)
        run = lambda: torch.sin(torch.exp(torch.tanh(x)))  # noqa: E731
    elif kind == "batched":
        x = numbers(256, 256, 256)
        run = lambda: torch.bmm(x, x)  # noqa: E731
    elif kind == "transpose":
        x = numbers(8192, 4096)
        run = lambda: x.t().contiguous()  # noqa: E731
    elif kind == "histogram":
        x = torch.randint(4096, (2**26,), device="cuda")
        run = lambda: torch.bincount(x, minlength=4096)  # noqa: E731
    else:
        sys.exit(f"unknown kind {kind}")
    return run, torch.cuda.synchronize


def compute(operations: int) -> float:
    began = time.monotonic()
    for _ in range(operations):
        operate()
        if "syncs" in options:
            wait()
    wait()
    return time.monotonic() - began


with Path(__file__).open() as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    operate, wait = make_operation()
    compute(50)
    one = min(compute(100) for _ in range(3)) / 100
    count = max(1, round(busy / one))
    # Launches of short bursts take longer, so the count is corrected once.
    alone = sorted(compute(count) for _ in range(9))[4]
    count = max(1, round(count * busy / alone))
log.write(f"# {name}: an operation takes {one * 1e6:.0f} us, a burst has {count}\n")

bursts = 4 if "clustered" in options else 1
while True:
    try:
        is_running = name in go.read_text().split()
    except OSError:
        is_running = False
    if not is_running:
        time.sleep(0.01)
        continue
    began = time.monotonic()
    for _ in range(bursts):
        took = compute(count)
        log.write(f"{time.monotonic():.5f} {took:.6f}\n")
    rest = max(0.0, bursts * period - (time.monotonic() - began))
    time.sleep(random.expovariate(1 / rest) if rest and "random" in options else rest)
