"""This module owns the files of one ring: segments of an hour's and of a day's columns that grow at their end, and go
when old.

A new segment appears whole, by a rename; what is added to it later may be torn by whatever ends the process, and is
passed over then. One podgpu at a time writes to a directory; files that are not its own stay as they are.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from podgpu.errors import SourceError, UsageError
from podgpu.files import AtomicFile, OutputError, read_bounded
from podgpu.history.frames import Segment, load_segment

OPTION = "--history-dir"
Period = Literal["hour", "day"]
PERIODS: Mapping[Period, float] = {"hour": 3600.0, "day": 86_400.0}
"""For how many seconds the files of each are worth keeping."""
_NAME = re.compile(r"(hour|day)-(\d{8,15})\.history", re.ASCII)
_LOCK = "podgpu.lock"
_LEFT_BEHIND = ".*.podgpu-tmp"
_LARGEST = 56 * 1024 * 1024
"""Of one file: all of a full ring's day, written anew."""
_MOST_BYTES = 80 * 1024 * 1024
"""Of all that is read: a full ring. With more in hand at its start an exporter is ended by the chart's limit, and so is
the next."""
_MOST_FILES = 200


@dataclass(slots=True)
class _Growing:
    """The segment that is added to."""

    path: Path
    descriptor: int
    size: int


class Directory:
    def __init__(self, path: str) -> None:
        """Raises UsageError for what cannot be a directory."""
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{OPTION} {path}: is not a directory; name one that podgpu may write to")
        self._lock: int | None = None
        self._growing: dict[Period, _Growing] = {}
        self._newest: dict[Path, float] = {}
        self._next = 1

    # Reading

    def read(self) -> tuple[list[Segment], list[str]]:
        """What can be read, those of a period in the order they were written; and what to say of the rest. Raises
        OutputError when it cannot be known what is there: then nothing may be written either."""
        segments: list[Segment] = []
        words: list[str] = []
        left = _MOST_BYTES
        for number, path in reversed(self._numbered()):
            self._next = max(self._next, number + 1)
            try:
                content = read_bounded(str(path), min(_LARGEST, left))
                segment = load_segment(content)
            except SourceError as error:
                said = str(error) if str(path) in str(error) else f"{path} {error}"
                words.append(f"{said}; it is left as it is")
                continue
            left -= len(content)
            segments.append(segment)
            self._newest[path] = segment.newest
            if segment.damaged:
                words.append(f"{path} is damaged ({segment.damaged} bytes are lost): the rest of it was read")
        return segments[::-1], words

    def _numbered(self) -> list[tuple[int, Path]]:
        """Those that look like ours, in the order in which they were begun; the last of them."""
        try:
            found = [match for match in map(_NAME.fullmatch, os.listdir(self.path)) if match]
        except (FileNotFoundError, NotADirectoryError):  # it is made before the first file is
            return []
        except OSError as error:
            raise OutputError(f"{self.path} cannot be read ({error.strerror})") from error
        return sorted((int(match[2]), self.path / match[0]) for match in found)[-_MOST_FILES:]

    @property
    def files(self) -> int:
        return len(self._newest)

    # Writing

    def open(self) -> None:
        """Takes hold of the directory. Raises OutputError."""
        if self._lock is not None:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise OutputError(f"{self.path} cannot be written to ({error.strerror})") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise OutputError(f"{self.path} is in use by another podgpu: give each a directory of its own") from None
        except OSError:
            pass  # a file system that knows no locks
        self._lock = lock
        with suppress(OSError):
            for leftover in self.path.glob(_LEFT_BEHIND):
                leftover.unlink()

    def begin(self, period: Period, frames: Iterable[bytes], newest: float, alone: bool = False) -> None:
        """A new segment that is added to from now on. `alone`: it has all that is known, so that those before it go.
        Raises OutputError, and then nothing has changed."""
        while os.path.lexists(path := self.path / f"{period}-{self._next:08d}.history"):
            self._next += 1  # of a disk that was mounted after the start
        try:
            AtomicFile(str(path), mode=0o600, option=OPTION).write(b"".join(frames))
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        except UsageError as error:
            raise OutputError(str(error)) from error
        except OSError as error:
            raise OutputError(f"{path} cannot be written ({error.strerror})") from error
        self._next += 1
        before = [known for known in self._newest if known.name.startswith(f"{period}-")]
        self._finish(period)
        self._growing[period] = _Growing(path, descriptor, os.fstat(descriptor).st_size)
        self._newest[path] = newest
        if alone:
            self._remove(before)
            for path in before:  # one that cannot be removed says nothing new
                self._newest.pop(path, None)

    def add(self, period: Period, frames: Iterable[bytes], newest: float) -> None:
        """To the segment that grows. Raises OutputError, and then what was there before is there, and nothing else."""
        growing = self._growing[period]
        content = b"".join(frames)
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(growing.descriptor, rest) :]
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(growing.descriptor, growing.size)
            raise OutputError(f"{growing.path} cannot be written ({error.strerror})") from error
        growing.size += len(content)
        self._newest[growing.path] = max(self._newest[growing.path], newest)

    def grows(self, period: Period) -> bool:
        return period in self._growing

    def sync(self) -> None:
        """Brings to the disk what only the kernel has: a power cut loses it, the end of the process does not."""
        for growing in self._growing.values():
            with suppress(OSError):
                os.fdatasync(growing.descriptor)

    def remove_old(self, now: float) -> None:
        """Files of which even the last column, holder and mark are too old to be asked for."""
        growing = {growing.path for growing in self._growing.values()}
        for period, seconds in PERIODS.items():
            old = [path for path, newest in self._newest.items() if newest < now - seconds - 600.0]
            self._remove([path for path in old if path.name.startswith(f"{period}-") and path not in growing])

    def _remove(self, paths: Iterable[Path]) -> None:
        for path in paths:
            with suppress(OSError):  # what stays is read again, and is too old then
                path.unlink(missing_ok=True)
                self._newest.pop(path, None)

    def _finish(self, period: Period) -> None:
        growing = self._growing.pop(period, None)
        if growing is not None:
            with suppress(OSError):
                os.fdatasync(growing.descriptor)
            os.close(growing.descriptor)

    def close(self) -> None:
        for period in tuple(self._growing):
            self._finish(period)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
