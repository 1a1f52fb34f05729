"""How busy a pod was in every 5 minutes: two bytes for each of these steps, the lower one first."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from podgpu.past.time_steps import COARSE, HOUR

CERTAINLY_IDLE = 0.999
"""In a step in which a pod was idle for this part of its time, it certainly ran nothing. Also in
podgpu-savings.yaml.
"""
FULL = 2000
"""Value of a step in which one GPU was busy all the time."""
UNKNOWN = 0xFFFF
STEP_BYTES = 2
UNKNOWN_STEP = UNKNOWN.to_bytes(STEP_BYTES, "little")
STEPS_PER_HOUR = HOUR // COARSE
HOUR_BYTES = STEPS_PER_HOUR * STEP_BYTES
_MAX_STEP = UNKNOWN - 1


def step_value(busy_gpus: float, is_idle: bool) -> int:
    """`is_idle`: the pod certainly ran nothing. Only then is the value 0."""
    if is_idle:
        return 0
    value = min(_MAX_STEP, round(busy_gpus * FULL))
    return max(1, value)


def read_steps(steps: bytes) -> array[int]:
    """Returns the values in the byte order of the machine."""
    values = array("H", steps)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def write_steps(values: Sequence[int]) -> bytes:
    steps = array("H", values)
    if sys.byteorder == "big":
        steps.byteswap()
    return steps.tobytes()
