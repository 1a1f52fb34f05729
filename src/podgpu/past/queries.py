"""Parses the parameters that the queries about the past have in common."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from podgpu.errors import UsageError

_UNITS = {"m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def parse_range(text: str, name: str = "range") -> int:
    """Converts a duration such as `30m` or `7d` to seconds. Raises UsageError for other texts.

    `name`: of the parameter, for the error message.
    """
    match = re.fullmatch(r"([1-9]\d{0,3})([mhdw])", text, re.ASCII)
    if match is None:
        raise UsageError(
            f"{name}={text[:40]!a}: write a length of time, such as 30m, 1h, 24h, 7d or 12w",
            parameter=name,
        )
    number, unit = match.groups()
    return int(number) * _UNITS[unit]


def parse_time(query: Mapping[str, str], name: str, most: float = 1e11) -> float | None:
    """Returns a Unix time of the query, or None if it is not given. Raises UsageError.

    `most`: later times are refused. By default the year 5138, because dates end with 9999.
    """
    if name not in query:
        return None

    try:
        time = float(query[name])
    except ValueError:
        time = math.nan

    if not 0 <= time < most:
        raise UsageError(
            f"{name}={query[name][:60]!r}: write a Unix time in seconds, from 0 to {most:.0f}",
            parameter=name,
        )

    return time


def parse_is_csv(query: Mapping[str, str]) -> bool:
    """Returns whether the query asks for CSV instead of JSON. Raises UsageError."""
    form = query.get("format", "json")
    if form not in ("json", "csv"):
        raise UsageError(f"format={form[:60]!r}: use json or csv")
    return form == "csv"
