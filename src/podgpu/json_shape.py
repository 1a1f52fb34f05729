"""This module takes JSON that others write apart, in two ways. Pure.

Strictly, naming the place where it is of another shape (`parse_json`, `as_*`): the kubelet's checkpoint, the hook's
`podlist.json`, DRA's claims, the schedulers' annotations. Loosely (`*_in`), where a part of another shape is no reason
to lose the others: the API server's objects, podgpu's own JSON of another version.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from podgpu.errors import SourceError

T = TypeVar("T")


def parse_json(content: bytes, path: str, shape: Callable[[object], T]) -> T:
    """JSON of one shape. `shape` raises ValueError, naming the place, for any other."""
    try:
        return shape(json.loads(content.decode()))
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, a number of 5,000 digits
        what = " ".join(str(error).split())[:200] if content else "it is empty"
        raise SourceError(
            "malformed",
            f"{path} cannot be understood ({what}): read again next time; if it lasts, look at what writes it",
        ) from error


def as_list(value: object, where: str) -> list[object]:
    """The list at that place; null is none, as Go writes a list that never had an entry."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise ValueError(f"{where} is not a list")
    return value


def as_object(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not an object")
    return value


def as_text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} is not a text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:  # "\ud800" is JSON, but no exposition could carry it
            raise ValueError(f"{where} has half a surrogate pair") from None
    return value


# Loosely: what is of another shape is not there


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
