"""Reads parts of JSON documents. A part of another type counts as absent."""

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


def integer_in(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def number_in(value: object) -> float | None:
    """Returns None for infinite numbers and for `true`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def whole_in(value: object) -> int | None:
    number = number_in(value)
    return None if number is None else round(number)
