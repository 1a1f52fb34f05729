"""The detector of slow GPUs: false alarms in simulated jobs without a fault, and time to detect.

`tests/fleet/straggler_simulation.py` describes the jobs. 1,000 GPU-days need about five minutes of CPU.
"""

from __future__ import annotations

import random

from bench.figures import Figure, cpu_seconds
from podgpu.fleet.stragglers import MINUTE
from tests.fleet.straggler_simulation import (
    ALL_KNOWN,
    LEAKING,
    LOWER_CAP,
    LOWER_CLOCK,
    Fault,
    Known,
    detect,
    find_false_alarms,
    make_equal_job,
)

_SEED = 43
_IN_TIME = 600.0
_BEFORE = 7200.0  # seconds without the fault
_FAULTS = {"5 % lower clock": LOWER_CLOCK, "5 % lower power limit": LOWER_CAP}


def measure(gpu_days: float = 1000.0, jobs: int = 50) -> list[Figure]:
    figures = _measure_false_alarms(gpu_days)
    for name, fault in _FAULTS.items():
        figures.append(_measure_detection(f"{name}, all values known", fault, jobs, 0.9, ALL_KNOWN))
    for name, fault in _FAULTS.items():
        figures.append(_measure_detection(f"{name}, some values missing", fault, jobs))
    figures.append(_measure_detection("clock at the power limit 5 % lower", LEAKING, jobs))
    return figures


def _measure_false_alarms(gpu_days: float) -> list[Figure]:
    days = 0.0
    alarms = 0

    def simulate() -> None:
        nonlocal days, alarms
        for job_days, found in find_false_alarms(_SEED, gpu_days):
            days += job_days
            alarms += len(found)

    seconds = cpu_seconds(simulate)
    gpu_minutes = days * 86_400 / MINUTE
    return [
        Figure("false alarms per 1,000 GPU-days", alarms / days * 1000, at_most=1.0),
        Figure("simulated", days, "days"),
        Figure("CPU per GPU and minute, with the simulation", seconds / gpu_minutes * 1e6, "us"),
    ]


def _measure_detection(
    name: str,
    fault: Fault,
    jobs: int,
    at_least: float | None = None,
    known: Known | None = None,
) -> Figure:
    """Half of the jobs reach their power limit. Half have the fault from their start."""
    rng = random.Random(_SEED)
    in_time = 0
    for number in range(jobs):
        is_capped = fault is not LOWER_CLOCK or number % 2 == 0
        job = make_equal_job(rng, is_capped, known)
        seconds = detect(job, fault, healthy=_BEFORE if number % 4 < 2 else 0.0)
        in_time += seconds is not None and seconds <= _IN_TIME
    return Figure(f"found in 10 min: {name}", in_time / jobs, at_least=at_least)
