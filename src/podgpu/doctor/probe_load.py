"""This module is a load for `podgpu doctor --probe-switches` that knows how long it works: python -m
podgpu.doctor.probe_load

Needs PyTorch or cuda-python. It times one unit of work while nobody else works, says `ready`, and then does what it is
told: each line of its input is `BUSY_MS PERIOD_MS`, the rhythm from now on, and is answered with the moment and the
seconds it has worked so far. The end of its input is its end. `ProbeLoad` starts it and talks to it.
"""

from __future__ import annotations

import importlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_READY = "ready"
_START_SECONDS = 120.0
"""PyTorch from a cold disk takes a while."""
_ANSWER_SECONDS = 10.0
_CHUNK_SECONDS = 0.005
"""It waits for the GPU after so much work: no longer is it late in answering."""
_SPIN = b"""
.version 6.3
.target sm_75
.address_size 64
.visible .entry spin(.param .u64 rounds, .param .u64 out)
{
    .reg .pred %p;
    .reg .u64 %r, %n, %x, %o;
    ld.param.u64 %n, [rounds];
    ld.param.u64 %o, [out];
    mov.u64 %r, 0;
    mov.u64 %x, 1;
again:
    mad.lo.u64 %x, %x, 6364136223846793005, %r;
    add.u64 %r, %r, 1;
    setp.lt.u64 %p, %r, %n;
    @%p bra again;
    st.global.u64 [%o], %x;
    ret;
}
"""
"""A loop of so many rounds whose result is kept, so that no compiler leaves it out."""


class NoLoad(Exception):
    """No load can be made or reached here; the message says what is missing."""


class ProbeLoad:
    """The load as a process of its own, on one GPU. It ends with this process at the latest: its input does."""

    def __init__(self, uuid: str) -> None:
        """Comes back when it is ready to work. Raises NoLoad."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,  # a line that waited in a buffer would be none to select()
            env={**os.environ, "CUDA_VISIBLE_DEVICES": uuid},
        )
        self.pid = self._process.pid
        self._last = ""
        try:
            while (line := self._line(_START_SECONDS)) != _READY:
                self._last = line
        except NoLoad:
            self.stop()
            raise

    def work(self, busy_ms: float, period_ms: float) -> tuple[float, float]:
        stdin = self._process.stdin
        try:
            if stdin is not None:
                stdin.write(f"{busy_ms} {period_ms}\n".encode())
                stdin.flush()
            moment, worked = self._line(_ANSWER_SECONDS).split()
            return float(moment), float(worked)
        except (OSError, ValueError) as e:
            raise NoLoad(f"the load does not do what it should: {e}") from e

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _line(self, patience: float) -> str:
        """Of what it says; what it wrote before it ended tells why it did."""
        out = self._process.stdout
        if out is None or not select.select([out], [], [], patience)[0]:
            raise NoLoad(f"the load says nothing for {patience:.0f} s")
        line = out.readline()
        if not line:
            raise NoLoad(self._last or "the load ended and did not say why")
        return line.decode(errors="replace").strip()


Work = Callable[[int], None]
"""Does so many units and waits until they are done."""


def with_torch() -> Work:
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        raise ImportError("PyTorch is here, but it finds no GPU")
    matrix = torch.ones(1024, 1024, device="cuda")
    result = torch.empty_like(matrix)

    def work(units: int) -> None:
        for _ in range(units):
            torch.mm(matrix, matrix, out=result)
        torch.cuda.synchronize()

    return work


def with_cuda_python() -> Work:
    cuda: Any = importlib.import_module("cuda.bindings.driver")
    numpy: Any = importlib.import_module("numpy")

    def done(answer: Any) -> Any:
        error, *values = answer
        if int(error):
            raise ImportError(f"cuda-python is here, but the driver answers {error}")
        return values[0] if values else None

    done(cuda.cuInit(0))
    context = done(cuda.cuDevicePrimaryCtxRetain(done(cuda.cuDeviceGet(0))))
    done(cuda.cuCtxSetCurrent(context))
    kernel = done(cuda.cuModuleGetFunction(done(cuda.cuModuleLoadData(_SPIN + b"\0")), b"spin"))
    out = numpy.array([int(done(cuda.cuMemAlloc(8)))], dtype=numpy.uint64)
    rounds = numpy.array([20_000], dtype=numpy.uint64)
    arguments = numpy.array([rounds.ctypes.data, out.ctypes.data], dtype=numpy.uint64)

    def work(units: int) -> None:
        for _ in range(units):
            done(cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, arguments.ctypes.data, 0))
        done(cuda.cuCtxSynchronize())

    return work


def main() -> int:
    missing = []
    for make in (with_torch, with_cuda_python):
        try:
            work = make()
        except ImportError as e:
            missing.append(str(e))
        else:
            _obey(work, _time_unit(work))
            return 0
    print("; ".join(missing), flush=True)
    return 1


def _time_unit(work: Work) -> float:
    """Seconds. Two batches are compared, so that starting them and waiting for them do not count."""
    work(200)
    found = []
    for _ in range(10):
        began = time.perf_counter()
        work(20)
        between = time.perf_counter()
        work(120)
        found.append((time.perf_counter() - between - (between - began)) / 100)
    return max(min(found), 1e-7)


def _obey(work: Work, unit: float) -> None:
    chunk = max(1, round(_CHUNK_SECONDS / unit))
    busy = period = worked = 0.0
    print(_READY, flush=True)
    while True:
        began = time.monotonic()
        left = max(1, round(busy / unit)) if busy else 0
        while left > 0:
            units = min(left, chunk)
            work(units)
            left, worked = left - units, worked + units * unit
            if _told(0.0):
                break
        if _told(max(0.0, period - (time.monotonic() - began)) if period else None):
            line = sys.stdin.readline()
            if not line:
                return
            busy, period = (float(word) / 1e3 for word in line.split())
            print(f"{time.monotonic():.6f} {worked:.6f}", flush=True)


def _told(wait: float | None) -> bool:
    return bool(select.select([sys.stdin], [], [], wait)[0])


if __name__ == "__main__":
    sys.exit(main())
