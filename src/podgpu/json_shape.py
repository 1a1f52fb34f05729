"""Reads members of foreign JSON. A value of another type counts as absent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def mapping_in(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def list_in(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def objects_in(value: object) -> list[dict[str, Any]]:
    return [item for item in list_in(value) if isinstance(item, dict)]


def text_in(value: object) -> str:
    return value if isinstance(value, str) else ""


def number_in(value: object) -> float | None:
    """Finite; `true` is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def whole_in(value: object) -> int | None:
    number = number_in(value)
    return None if number is None else round(number)
