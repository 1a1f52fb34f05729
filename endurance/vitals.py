"""Memory, threads and descriptors of a process, and their growth."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import linear_regression

_KIB_PER_MIB = 1024


@dataclass(frozen=True, slots=True)
class Vitals:
    at: float
    """Seconds since the start."""
    rss: float
    """MiB."""
    peak: float
    threads: int
    descriptors: int


def vitals_of(pid: int | str, at: float) -> Vitals:
    """Reads the values. Raises FileNotFoundError if the process has ended."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        lines = dict(line.split(":", 1) for line in file)
    rss, peak = (int(lines[name].split()[0]) / _KIB_PER_MIB for name in ("VmRSS", "VmHWM"))
    return Vitals(at, rss, peak, int(lines["Threads"]), len(os.listdir(f"/proc/{pid}/fd")))


def growth(seen: Sequence[Vitals]) -> Vitals:
    """Returns the growth from first to last: memory by linear regression, the others as maxima of
    the two halves.
    """
    if len(seen) < 2:
        return Vitals(0.0, 0.0, 0.0, 0, 0)
    slope = linear_regression([vitals.at for vitals in seen], [vitals.rss for vitals in seen]).slope
    half = len(seen) // 2
    early, late = seen[:half], seen[half:]
    span = seen[-1].at - seen[0].at
    return Vitals(
        span,
        slope * span,
        max(vitals.peak for vitals in late) - max(vitals.peak for vitals in early),
        max(vitals.threads for vitals in late) - max(vitals.threads for vitals in early),
        max(vitals.descriptors for vitals in late) - max(vitals.descriptors for vitals in early),
    )
