"""Arithmetic with values that may be unknown (None)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")
N = TypeVar("N", int, float)


def select_known(values: Iterable[T | None]) -> list[T]:
    return [value for value in values if value is not None]


def add_known(first: N | None, second: N | None) -> N | None:
    """Returns the sum of the values that are not None. None if both are."""
    if first is None:
        return second
    if second is None:
        return first
    return first + second


def sum_all(values: Iterable[float | None]) -> float | None:
    """Returns the sum, or None if one of the values is unknown."""
    total: list[float] = []
    for value in values:
        if value is None:
            return None
        total.append(value)
    return math.fsum(total)


def mean_known(values: Iterable[float | None]) -> float | None:
    """Returns the mean of the known values, or None if there are none."""
    known = select_known(values)
    if not known:
        return None
    return sum(known) / len(known)


def round_known(value: float | None, digits: int = 4) -> float | None:
    if value is None:
        return None
    return round(value, digits)


def divide_known(value: float | None, by: float) -> float | None:
    if value is None:
        return None
    return value / by
