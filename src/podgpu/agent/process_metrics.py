"""The `process_*` metrics of the exporter itself, as in Prometheus' client libraries. Reads /proc while rendering."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from podgpu.metrics.encode import NO_LABELS, Family, Sample
from podgpu.metrics.families import FamilySpec

CPU_SECONDS = FamilySpec(
    "process_cpu_seconds_total", "counter", "Total user and system CPU time spent by the exporter, in seconds.", ()
)
MAX_FDS = FamilySpec("process_max_fds", "gauge", "Maximum number of open file descriptors.", ())
OPEN_FDS = FamilySpec("process_open_fds", "gauge", "Number of open file descriptors.", ())
RESIDENT = FamilySpec("process_resident_memory_bytes", "gauge", "Resident memory size in bytes.", ())
START_TIME = FamilySpec(
    "process_start_time_seconds", "gauge", "Start time of the process since the Unix epoch, in seconds.", ()
)
VIRTUAL = FamilySpec("process_virtual_memory_bytes", "gauge", "Virtual memory size in bytes.", ())
MAX_VIRTUAL = FamilySpec(
    "process_virtual_memory_max_bytes", "gauge", "Maximum amount of virtual memory available, in bytes.", ()
)
PROCESS_FAMILIES = (CPU_SECONDS, MAX_FDS, OPEN_FDS, RESIDENT, START_TIME, VIRTUAL, MAX_VIRTUAL)

_USER, _SYSTEM, _STARTED, _VIRTUAL, _RESIDENT = 11, 12, 19, 20, 21
"""Fields of /proc/PID/stat after the command's name, which may contain spaces and parentheses."""


def process_families(proc: str) -> tuple[Family, ...]:
    """Sorted by name, as in dcgm-exporter. Values that cannot be read are left out."""
    values = dict(_read_values(Path(proc)))
    return tuple(spec.of([Sample(NO_LABELS, values[spec])]) for spec in PROCESS_FAMILIES if spec in values)


def _read_values(proc: Path) -> Iterator[tuple[FamilySpec, float]]:
    with suppress(OSError, ValueError, IndexError):
        ticks, figures = os.sysconf("SC_CLK_TCK"), _stat(proc)
        yield CPU_SECONDS, (figures[_USER] + figures[_SYSTEM]) / ticks
        yield RESIDENT, figures[_RESIDENT] * os.sysconf("SC_PAGE_SIZE")
        yield VIRTUAL, figures[_VIRTUAL]
        yield START_TIME, _read_boot_time(proc) + figures[_STARTED] / ticks
    with suppress(OSError):
        yield OPEN_FDS, sum(1 for _ in (proc / "self" / "fd").iterdir()) - 1  # one is open for this listing
    for spec, limit in ((MAX_FDS, resource.RLIMIT_NOFILE), (MAX_VIRTUAL, resource.RLIMIT_AS)):
        soft, _ = resource.getrlimit(limit)
        yield spec, 2**64 - 1 if soft == resource.RLIM_INFINITY else soft


def _stat(proc: Path) -> list[int]:
    _, _, behind = (proc / "self" / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
    state_and_numbers = behind.split()
    return [0, *(int(number) for number in state_and_numbers[1:])]


def _read_boot_time(proc: Path) -> int:
    for line in (proc / "stat").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(" ")
        if name == "btime":
            return int(value)
    raise ValueError("no btime")
