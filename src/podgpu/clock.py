"""Provides clocks that tests can replace, parses durations, and limits retries and log lines."""

from __future__ import annotations

import logging
import random
import re
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, TypeVar

from podgpu.errors import UsageError

K = TypeVar("K", bound=Hashable)
_MIN_STEP = 2.0  # seconds; smaller corrections of the wall clock do not change exported timestamps
_REPEAT_SECONDS = 60.0
_DURATION_PART = re.compile(r"([0-9]{1,12}(?:\.[0-9]{0,12})?|\.[0-9]{1,12})(ns|us|µs|μs|ms|s|m|h)")
_DURATION = re.compile(f"(?:{_DURATION_PART.pattern})+")
_UNIT_SECONDS = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "μs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
}

_AGE_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_AGE_PART = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhdw])")
_AGE = re.compile(f"(?:{_AGE_PART.pattern})+")
_UNIX_SECONDS = re.compile(r"[0-9]{9,11}(?:\.[0-9]{1,9})?")  # a date such as 20261119 is shorter


@dataclass(frozen=True)
class Clock:
    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


def parse_duration(text: str) -> float | None:
    """Converts a duration such as `1h30m`, `1.5s` or `500ms` to seconds.

    As in Go, only 0 needs no unit. Returns None if the duration is negative or invalid.
    """
    if text == "0":
        return 0.0
    if not _DURATION.fullmatch(text):
        return None
    return _add_parts(_DURATION_PART.findall(text), _UNIT_SECONDS)


def _add_parts(parts: list[tuple[str, str]], unit_seconds: Mapping[str, float]) -> float:
    """Returns the seconds of numbers with units."""
    seconds = 0.0
    for number, unit in parts:
        seconds += float(number) * unit_seconds[unit]
    return seconds


def parse_moment(text: str, now: float, needs_zone: bool = False) -> float:
    """Returns the Unix time of an age such as `90m` or `2d`, of an ISO time, or of Unix seconds.

    A time without a zone is local, or an error with `needs_zone`. Raises UsageError.
    """
    text = text.strip()
    if _AGE.fullmatch(text):
        return now - _add_parts(_AGE_PART.findall(text), _AGE_SECONDS)
    if _UNIX_SECONDS.fullmatch(text):
        return float(text)

    shown = f"{text[:80]!a}"
    try:
        moment = datetime.fromisoformat(text)
        seconds = moment.timestamp()
    except (ValueError, OverflowError):
        examples = "2026-11-19T14:30:00Z, or an age such as 90m or 2d"
        raise UsageError(f"{shown} is not a time such as {examples}") from None

    if needs_zone and moment.tzinfo is None:
        raise UsageError(f"{shown} has no time zone: add Z for UTC")

    return seconds


class UnixTime:
    """Converts monotonic times to Unix times.

    Small corrections of the wall clock do not change the results.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._offset = clock.wall() - clock.monotonic()

    def convert(self, monotonic: float) -> float:
        offset = self._clock.wall() - self._clock.monotonic()
        if abs(offset - self._offset) >= _MIN_STEP:
            self._offset = offset
        return monotonic + self._offset


def double_delay(failures: int, first: float, longest: float) -> float:
    """Returns the longest delay before the next attempt. It doubles with each failure."""
    # A power of more than 1,000 failures would be too large for a float.
    return min(longest, first * 2.0 ** min(failures, 30))


def spread_delay(longest: float) -> float:
    """Returns a random delay, because clients that fail together must not retry together."""
    return random.uniform(longest / 2, longest)


class FaultLog(Generic[K]):
    """Limits repeated log lines about faults.

    A key names what can fail, such as a source. While it fails, each reason is logged once. After a
    recovery, a reason is logged again only if its last line is older than `seconds`.
    """

    def __init__(self, clock: Callable[[], float], seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._failing: set[K] = set()  # keys whose failure was logged and that have not recovered
        self._logged_at: defaultdict[K, dict[str, float]] = defaultdict(dict)  # reason -> time

    def fail(self, key: K, reason: str) -> bool:
        """Records a failure. Returns True if it should be logged."""
        logged_at = self._logged_at[key]
        now = self._clock()
        if reason in logged_at:
            is_recent = now - logged_at[reason] < self._seconds
            if is_recent or key in self._failing:
                return False

        logged_at[reason] = now
        self._failing.add(key)
        return True

    def recover(self, key: K) -> bool:
        """Records a success. Returns True if the recovery should be logged.

        This is the case if a failure was logged before.
        """
        was_failing = key in self._failing
        self._failing.discard(key)
        return was_failing

    def remove(self, is_gone: Callable[[K], bool]) -> None:
        for key in [key for key in self._logged_at if is_gone(key)]:
            del self._logged_at[key]
            self._failing.discard(key)


class RepeatFilter(logging.Filter):
    """Passes each log message at most once a minute.

    Lines that differ only in arguments count as the same message.
    """

    def __init__(self) -> None:
        super().__init__()
        self._logged_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind = str(record.msg)
        now = time.monotonic()
        if now - self._logged_at.get(kind, float("-inf")) < _REPEAT_SECONDS:
            return False
        self._logged_at[kind] = now
        return True
