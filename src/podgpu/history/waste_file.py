"""Keeps the waste of each pod in a file beside the history, so that a restart continues to count.

The file is replaced as a whole every minute and read once. A file that cannot be read is moved aside, not overwritten:
a newer podgpu may have written it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from podgpu.atomic_file import AtomicFile, OutputError
from podgpu.errors import SourceError, UsageError
from podgpu.files import read_bounded
from podgpu.history.directory import OPTION
from podgpu.model import WorkloadOwner

VERSION = 2
NAME, SET_ASIDE = "waste.json", "waste.unread"
_MAX_BYTES = 64 * 1024 * 1024
_CLOCK_STEP = 60.0
_Amount = Annotated[float, Meta(ge=0, le=1e15)]
_Moment = Annotated[float, Meta(ge=-1e11, le=1e11)]
_Name = Annotated[str, Meta(max_length=1024)]


class WasteAmounts(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, gc=False):
    """GPU-hours and money since counting began. `wasted` is None if nothing had a price."""

    allocated_hours: _Amount = 0.0
    idle_hours: _Amount = 0.0
    wasted: _Amount | None = None


class WastedPod(WasteAmounts, frozen=True, kw_only=True):
    """What a pod (or a job, or a container that is not identified further) holds now, and what it wasted."""

    namespace: _Name = ""
    pod: _Name = ""
    job: _Name = ""
    uid: _Name = ""
    container_id: _Name = ""
    owner: WorkloadOwner | None = None
    gpus: _Amount = 0.0
    idle_gpus: _Amount = 0.0
    cost_per_hour: _Amount | None = None
    wasted_per_hour: _Amount | None = None
    idle_since: _Moment | None = None  # since when nothing that it holds is used
    ended_at: _Moment | None = None


class EndedPods(WasteAmounts, frozen=True, kw_only=True):
    """Sum over the pods of one owner that ended long ago."""

    namespace: _Name = ""
    owner: WorkloadOwner | None = None


class WasteStatement(msgspec.Struct, frozen=True, kw_only=True):
    counting_since: _Moment | None = None
    currency: _Name = ""
    pods: tuple[WastedPod, ...] = ()
    ended: tuple[EndedPods, ...] = ()


class EarlierWaste(msgspec.Struct, frozen=True):
    """What an earlier process counted, and when it wrote that."""

    version: int
    written_at: _Moment
    statement: WasteStatement

    def shifted_to(self, wall: float) -> EarlierWaste:
        """If the clock was set back since, all moments move along."""
        back = self.written_at - wall
        if back <= _CLOCK_STEP:
            return self
        pods = tuple(p if p.ended_at is None else replace(p, ended_at=p.ended_at - back) for p in self.statement.pods)
        since = self.statement.counting_since
        moved = replace(self.statement, pods=pods, counting_since=None if since is None else since - back)
        return EarlierWaste(self.version, wall, moved)


class WasteFile:
    def __init__(
        self,
        directory: str,
        statement: Callable[[], WasteStatement | None],
        restore: Callable[[EarlierWaste], None],
        wall: Callable[[], float],
    ) -> None:
        """`statement` returns None while restored amounts are not included yet."""
        self._path = Path(directory) / NAME
        self._statement = statement
        self._restore = restore
        self._wall = wall

    def load(self) -> list[str]:
        """Returns notes on a file that cannot be used. Raises OutputError if it cannot be read now."""
        try:
            content = read_bounded(str(self._path), _MAX_BYTES)
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
        self._restore(earlier.shifted_to(self._wall()))
        return []

    def _set_aside(self, reason: str) -> str:
        aside = self._path.with_name(SET_ASIDE)
        try:
            os.replace(self._path, aside)
        except OSError as error:
            raise OutputError(f"{reason}; it cannot be moved aside ({error.strerror})") from error
        return f"{reason}: waste is counted from zero, and the file is now {aside}"

    def save(self) -> None:
        """Raises OutputError; the file before then stays."""
        statement = self._statement()
        if statement is None or statement.counting_since is None:
            return
        try:
            AtomicFile(str(self._path), mode=0o600, option=OPTION).write(dump_waste(statement, self._wall()))
        except UsageError as error:
            raise OutputError(str(error)) from error


def dump_waste(statement: WasteStatement, at: float) -> bytes:
    counted = tuple(pod for pod in statement.pods if pod.allocated_hours)
    return msgspec.json.encode(EarlierWaste(VERSION, at, replace(statement, pods=counted)))


def load_waste(content: bytes) -> EarlierWaste:
    """Raises SourceError: foreign or damaged."""
    try:
        earlier = msgspec.json.decode(content, type=EarlierWaste)
    except msgspec.DecodeError as error:
        raise SourceError("damaged", f"is damaged or was written by another podgpu ({error})") from error
    if earlier.version != VERSION:
        raise SourceError("foreign", f"was written by another podgpu (version {earlier.version}, {VERSION} is known)")
    return earlier
