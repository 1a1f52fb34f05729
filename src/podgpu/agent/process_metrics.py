"""Builds the `process_*` metrics of the exporter itself, as Prometheus client libraries do, from /proc."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from podgpu.metrics.encode import NO_LABELS, Family, Sample
from podgpu.metrics.families import families_in

_USER, _SYSTEM, _STARTED, _VIRTUAL, _RESIDENT = 11, 12, 19, 20, 21
"""Positions in /proc/PID/stat, counted after the command name, which may contain spaces and parentheses."""


def process_families(proc: str) -> tuple[Family, ...]:
    """Returns the families sorted by name, as in dcgm-exporter. Values that cannot be read are omitted."""
    values = dict(_read_values(Path(proc)))
    specs = families_in("process").values()
    return tuple(spec.of([Sample(NO_LABELS, values[spec.name])]) for spec in specs if spec.name in values)


def _read_values(proc: Path) -> Iterator[tuple[str, float]]:
    with suppress(OSError, ValueError, IndexError):
        ticks, figures = os.sysconf("SC_CLK_TCK"), _read_stat(proc)
        yield "process_cpu_seconds_total", (figures[_USER] + figures[_SYSTEM]) / ticks
        yield "process_resident_memory_bytes", figures[_RESIDENT] * os.sysconf("SC_PAGE_SIZE")
        yield "process_virtual_memory_bytes", figures[_VIRTUAL]
        yield "process_start_time_seconds", _read_boot_time(proc) + figures[_STARTED] / ticks
    with suppress(OSError):
        yield "process_open_fds", sum(1 for _ in (proc / "self" / "fd").iterdir()) - 1  # excludes this listing's own
    for name, limit in (
        ("process_max_fds", resource.RLIMIT_NOFILE),
        ("process_virtual_memory_max_bytes", resource.RLIMIT_AS),
    ):
        soft, _ = resource.getrlimit(limit)
        yield name, 2**64 - 1 if soft == resource.RLIM_INFINITY else soft


def _read_stat(proc: Path) -> list[int]:
    _, _, rest = (proc / "self" / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
    state_and_numbers = rest.split()
    return [0, *(int(number) for number in state_and_numbers[1:])]


def _read_boot_time(proc: Path) -> int:
    for line in (proc / "stat").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(" ")
        if name == "btime":
            return int(value)
    raise ValueError("no btime")
