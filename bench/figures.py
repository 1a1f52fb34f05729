"""A measured value with its limit, as a row of a table."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    value: float
    unit: str = ""
    at_most: float | None = None
    at_least: float | None = None

    @property
    def missed(self) -> bool:
        too_large = self.at_most is not None and self.value > self.at_most
        return too_large or (self.at_least is not None and self.value < self.at_least)

    @property
    def limit(self) -> str:
        if self.at_most is not None:
            return f"<= {self.at_most:g} {self.unit}".rstrip()
        return "" if self.at_least is None else f">= {self.at_least:g} {self.unit}".rstrip()

    @property
    def verdict(self) -> str:
        """Returns the result of the comparison. Empty without a limit."""
        if not self.limit:
            return ""
        return "MISSED" if self.missed else "pass"


def row(figure: Figure) -> str:
    return (
        f"{figure.name:<58} {figure.value:>10.4g} {figure.unit:<6} {figure.limit:<14} "
        f"{figure.verdict}"
    ).rstrip()


def heading() -> str:
    return f"{'figure':<58} {'measured':>10} {'unit':<6} {'limit':<14} verdict"


def any_missed(figures: Iterable[Figure]) -> bool:
    return any(figure.missed for figure in figures)


def cpu_seconds(call: Callable[[], object]) -> float:
    """Returns the CPU time of all threads of this process."""
    started = time.process_time()
    call()
    return time.process_time() - started


def cpu_seconds_of_each(turns: int, *calls: Callable[[], object]) -> list[float]:
    """Returns the smallest CPU time of each call. Calls alternate, so that a busy machine affects
    all of them.
    """
    seconds = [[cpu_seconds(call) for call in calls] for _ in range(turns)]
    return [min(column) for column in zip(*seconds, strict=True)]


def read_status(pid: int | str, name: str) -> int:
    """Returns a number from /proc/PID/status, such as VmRSS in KiB."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
