"""What it costs to read who ran on a shared GPU: CPU for a second of the context-switch log, when it is busiest.

Two simulated loads take turns 5,000 times a second, so the log has 10,000 records. Each second is what a turn does with
it: the records read and checked, busy samples taken, the window's residency attributed to the processes. The driver's
own time is not in it (0.34 ms for each busy sample on an H200). Judged is the least of many seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from random import Random
from statistics import median

from bench.figures import Figure
from podgpu.gpu.nvml.switch_attribution import RECORD, Habits, estimate_without_samples
from podgpu.gpu.nvml.switch_splitter import SwitchListener
from podgpu.simulate.engine import Bursts, Engine, SimulatedSwitchLog

MOST_MS = 50
"""Of a second: 5 % of a core."""
SWITCHES = 5000
_SECOND = 10**9
_SAMPLES = 20


class Recorded:
    """A log whose seconds were played before anything is measured."""

    drain_seconds = 2.0

    def __init__(self, seconds: int) -> None:
        engine = Engine()
        for pid in (1, 2):
            period = 2 * _SECOND // SWITCHES
            engine.start(Bursts(pid, period // 20, period, pid * period // 2))
        log = SimulatedSwitchLog(lambda: {None: engine}, lambda moment: moment)
        self.chunks = []
        for second in range(1, seconds + 1):
            engine.advance(second * _SECOND)
            self.chunks.append(log.drain())
        self.second = 0
        self._random = Random(1)

    def drain(self) -> bytes:
        return self.chunks[self.second - 1]

    def now(self) -> int:
        return self.second * _SECOND

    def is_busy(self) -> bool:
        return self._random.random() < 0.3

    def close(self) -> None:
        pass


def measure(seconds: int = 12) -> list[Figure]:
    exact, switches = (list(_costs(Recorded(seconds), sampled)) for sampled in (True, False))
    records = min(count for _, count in exact)
    return [
        Figure("a second of the context-switch log, exact: CPU", min(cost for cost, _ in exact) * 1e3, "ms", MOST_MS),
        Figure("  median of them all, other work on the machine included", median(c for c, _ in exact) * 1e3, "ms"),
        Figure("the same, switches", min(cost for cost, _ in switches) * 1e3, "ms", MOST_MS),
        Figure("records in the second with the fewest", records, "", at_least=2 * SWITCHES * 0.95),
        Figure("  CPU for each", min(cost for cost, _ in exact) / records * 1e6, "µs"),
    ]


def _costs(log: Recorded, sampled: bool) -> Iterator[tuple[float, int]]:
    """CPU seconds, and the records that were read in them. The first second is not counted: nobody is resident yet."""
    listener = SwitchListener(
        log, sampled=sampled, wall=lambda: log.second, clock=lambda: log.second, in_background=False
    )
    habits = Habits()
    for second, chunk in enumerate(log.chunks, 1):
        log.second = second
        began = time.process_time()
        for _ in range(_SAMPLES if sampled else 1):
            listener.step()
        residency, samples = listener.take_window(second)
        if sampled:
            habits.learn(residency, samples)
            habits.estimate(residency, residency.window // 3)
        else:
            estimate_without_samples(residency, residency.window // 3)
        if second > 1:
            yield time.process_time() - began, len(chunk) // RECORD.size
