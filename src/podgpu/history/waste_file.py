"""WasteFile keeps what pods came to in a file beside the history, so that a restart does not begin to count anew.

The file is small and always whole: it is replaced every minute, and read once. One that cannot be understood is set
aside, never written over: it may be a newer podgpu's.
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from podgpu.errors import SourceError, UsageError
from podgpu.figures.device import Owner
from podgpu.figures.waste import MOST_ENDED, MOST_LEFT, Amounts, Left, Pod, PodWaste, WasteStatement
from podgpu.files import AtomicFile, OutputError, read_bounded
from podgpu.history.directory import OPTION

VERSION = 1
NAME, SET_ASIDE = "waste.json", "waste.unread"
_HEAD = re.compile(rb"podgpu waste (\d{1,6}) ([0-9a-f]{8})\n")
_LARGEST = 64 * 1024 * 1024
_MOST_ROWS = 50_000 + MOST_ENDED + MOST_LEFT
"""Holders that a cluster keeps, those that ended, and what made those that ended before."""
_LONGEST_NAME = 1024
_MOST_AMOUNT = 1 << 128
_LAST_MOMENT = 1e11
_SET_SECONDS = 60.0
_TOO_MANY_DIGITS = 40


@dataclass(frozen=True, slots=True)
class EarlierWaste:
    """What an earlier podgpu had counted, and when that was written."""

    statement: WasteStatement
    written_at: float
    """Unix time."""

    def seen_at(self, wall: float) -> EarlierWaste:
        """With its moments as long before `wall` as they were, where the clock was set back since."""
        back = self.written_at - wall
        if back <= _SET_SECONDS:
            return self
        pods = tuple(
            pod if pod.ended_at is None else pod._replace(ended_at=pod.ended_at - back) for pod in self.statement.pods
        )
        since = self.statement.counting_since
        moved = replace(self.statement, pods=pods, counting_since=None if since is None else since - back)
        return EarlierWaste(moved, wall)


class WasteFile:
    def __init__(
        self,
        directory: str,
        told: Callable[[], WasteStatement | None],
        restore: Callable[[EarlierWaste], None],
        wall: Callable[[], float],
    ) -> None:
        """`told`: what was counted until now, None while what was restored is not in it; `restore`: is given what the
        file has."""
        self._path = Path(directory) / NAME
        self._told = told
        self._restore = restore
        self._wall = wall

    def load(self) -> list[str]:
        """What to say of a file that is of no use. Raises OutputError where it cannot be known what is there; it can
        be tried again."""
        try:
            content = read_bounded(str(self._path), _LARGEST)
        except SourceError as error:
            if error.reason == "file_missing":
                return []
            if error.reason not in ("too_large", "not_a_file"):
                raise OutputError(str(error)) from error
            return [self._set_aside(str(error))]
        try:
            earlier = load_waste(content)
        except SourceError as error:
            return [self._set_aside(f"{self._path} {error}")]
        self._restore(earlier.seen_at(self._wall()))
        return []

    def _set_aside(self, why: str) -> str:
        aside = self._path.with_name(SET_ASIDE)
        try:
            os.replace(self._path, aside)
        except OSError as error:
            raise OutputError(f"{why}; it cannot be set aside ({error.strerror})") from error
        return f"{why}: waste is counted anew, and the file is now {aside}"

    def save(self) -> None:
        """Raises OutputError, and then the file before is still there."""
        statement = self._told()
        if statement is None or statement.counting_since is None:
            return
        try:
            AtomicFile(str(self._path), mode=0o600, option=OPTION).write(dump_waste(statement, self._wall()))
        except UsageError as error:
            raise OutputError(str(error)) from error


# The file


def dump_waste(statement: WasteStatement, at: float) -> bytes:
    """Who has counted nothing yet has no row."""
    document = {
        "written_at": at,
        "counting_since": statement.counting_since,
        "currency": statement.currency,
        "pods": [
            [*pod.pod, *(pod.owner or ("", "")), *pod.amounts, pod.ended_at] for pod in statement.pods if pod.amounts[0]
        ],
        "left": [[of.namespace, *(of.owner or ("", "")), *amounts] for of, amounts in statement.left.items()],
    }
    text = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    return b"podgpu waste %d %08x\n%s" % (VERSION, zlib.crc32(text), text)


def load_waste(content: bytes) -> EarlierWaste:
    """Raises SourceError: foreign, damaged."""
    head = _HEAD.match(content)
    if head is None:
        raise SourceError("foreign", "is not a file of waste that podgpu wrote")
    if int(head[1]) != VERSION:
        raise SourceError(
            "foreign", f"is of another podgpu (version {int(head[1])} of the file, {VERSION} is understood)"
        )
    text = content[head.end() :]
    if zlib.crc32(text) != int(head[2], 16):
        raise SourceError("damaged", "is damaged (its checksum is wrong)")
    try:
        return _earlier(json.loads(text, parse_int=_whole))
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise SourceError("damaged", "is damaged (what is in it makes no sense)") from error


def _earlier(document: Any) -> EarlierWaste:
    """Raises ValueError, KeyError or TypeError."""
    pods, left = document["pods"], document["left"]
    if not isinstance(pods, list) or not isinstance(left, list) or len(pods) + len(left) > _MOST_ROWS:
        raise ValueError("rows")
    since = document["counting_since"]
    statement = WasteStatement(
        None if since is None else _moment(since),
        _text(document["currency"]),
        tuple(_pods(pods)),
        dict(map(_left, left)),
    )
    return EarlierWaste(statement, _moment(document["written_at"]))


def _pods(rows: list[Any]) -> Iterator[PodWaste]:
    found: set[Pod] = set()
    for namespace, pod, job, uid, container, kind, name, allocated, idle, wasted, ended_at in rows:
        of = Pod(_text(namespace), _text(pod), _text(job), _text(uid), _text(container))
        if of in found:
            raise ValueError("twice")
        found.add(of)
        ended = None if ended_at is None else _moment(ended_at)
        yield PodWaste(of, _owner(kind, name), _amounts(allocated, idle, wasted), ended_at=ended)


def _left(row: Any) -> tuple[Left, Amounts]:
    namespace, kind, name, *amounts = row
    return Left(_text(namespace), _owner(kind, name)), _amounts(*amounts)


def _owner(kind: Any, name: Any) -> Owner | None:
    owner = Owner(_text(kind), _text(name))
    return owner if any(owner) else None


def _amounts(allocated: Any, idle: Any, wasted: Any) -> Amounts:
    found = Amounts(_amount(allocated), _amount(idle), None if wasted is None else _amount(wasted))
    if found.idle > found.allocated:
        raise ValueError("more idle than allocated")
    return found


def _amount(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST_AMOUNT:
        raise ValueError("amount")
    return value


def _moment(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or abs(value) > _LAST_MOMENT:
        raise ValueError("moment")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST_NAME:
        raise ValueError("text")
    return value


def _whole(digits: str) -> int:
    """Thousands of digits would take long to read."""
    if len(digits) > _TOO_MANY_DIGITS:
        raise ValueError("number")
    return int(digits)
