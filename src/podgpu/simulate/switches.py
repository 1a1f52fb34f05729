"""The context-switch log of a simulated GPU: while several loads have work, they take turns of one time slice."""

from __future__ import annotations

from podgpu.gpu.nvml.switch_attribution import FECS_RECORD, RECORD, SAVED, SWITCHED_IN, WHOLE_GPU
from podgpu.simulate.driver import SimulatedNvml

_SLICE_NS, _SWITCH_NS = 2_200_000, 84_000  # as measured on an H200


class TurnLog:
    """Implements `SwitchLog` for a GPU without MIG. Computes the switches when they are read."""

    def __init__(self, driver: SimulatedNvml, uuid: str) -> None:
        self._driver = driver
        self._gpu = next(gpu for gpu in driver.gpus if gpu.uuid == uuid)
        self._at = self.now()
        self._resident = 0
        self._works = False
        self._left: dict[int, int] = {}
        """Pid -> nanoseconds of work in the current period."""
        self._next: dict[int, int] = {}
        """Pid -> start of the next period."""
        self._records: list[tuple[int, int, int]] = []
        """Time, tag and pid of switches that were not read yet."""
        self._number = 0

    def now(self) -> int:
        with self._driver.lock:
            return int((self._driver.advance(self._gpu).at + self._gpu.epoch) * 1e9)

    def drain(self) -> bytes:
        now = self.now()
        self._run(now)
        chunk = b""
        while self._records and self._records[0][0] <= now:
            at, tag, pid = self._records.pop(0)
            where = WHOLE_GPU, WHOLE_GPU
            chunk += RECORD.pack(FECS_RECORD, 0, 0, tag, 0, self._number, pid, pid, 0, *where, at)
            self._number = (self._number + 1) % (1 << 16)
        return chunk

    def is_busy(self) -> bool:
        self._run(self.now())
        return self._works

    def close(self) -> None:
        self._records.clear()

    def _run(self, until: int) -> None:
        loads = {load.pid: load for load in self._gpu.running()}
        while self._at < until:
            for pid, load in loads.items():
                period = int(load.period * 1e9)
                if self._next.setdefault(pid, self._at + int(load.phase * 1e9) % period) <= self._at:
                    start = self._at / 1e9 - self._gpu.epoch
                    self._left[pid] = self._left.get(pid, 0) or int(load.demand(start, start + 1) * period)
                    self._next[pid] += period
            ready = sorted(pid for pid in loads if self._left.get(pid))
            self._works = bool(ready)
            if ready:
                self._give_turn(next((pid for pid in ready if pid > self._resident), ready[0]))
            else:
                self._at = min((self._next[pid] for pid in loads), default=until)

    def _give_turn(self, pid: int) -> None:
        if pid != self._resident:
            if self._resident:
                self._records.append((self._at, SAVED, self._resident))
                self._at += _SWITCH_NS
            self._records.append((self._at, SWITCHED_IN, pid))
            self._resident = pid
        turn = min(self._left[pid], _SLICE_NS)
        self._left[pid] -= turn
        self._at += turn
