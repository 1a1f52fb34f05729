"""Takes JSON that others write apart, and names the place where it is of another shape. Pure.

The kubelet's checkpoint, `podlist.json`, DRA's claims and the schedulers' annotations are all read with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

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
