"""The steps of time in which the past is recorded and shown. All times are Unix times."""

from __future__ import annotations

FINE = 15  # seconds
COARSE = 300
HOUR = 3600
DAY = 86_400  # days are UTC days


def floor_time(time: float, step: int) -> int:
    return int(time // step) * step


def ceil_time(time: float, step: int) -> int:
    return -int(-time // step) * step
