"""AtomicFile is the one writer of files that others read at any moment: each is always whole.

What is new is written beside, brought to the disk, and renamed. A symbolic link is never written through: at the start
it is refused, and one put there later is replaced by the file.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from podgpu.errors import PodgpuError, UsageError

_SUFFIX = ".podgpu-tmp"
_LEFT_BEHIND_SECONDS = 60.0


class OutputError(PodgpuError):
    """The file could not be written; the one before is untouched."""

    reason = "not_written"


@dataclass(frozen=True)
class Owner:
    uid: int
    gid: int = -1
    """-1: as it is."""


class AtomicFile:
    def __init__(
        self,
        path: str,
        mode: int = 0o644,
        owner: Owner | None = None,
        option: str = "--out",
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Raises UsageError, which names the option, for a place no file can be put at."""
        self.path = Path(path)
        self._option = option
        self._mode = mode
        self._owner = owner
        self._wall = wall
        self._check()
        self._remove_left_behind()

    def _check(self) -> None:
        path, named = self.path, f"{self._option} {self.path}"
        try:
            found = path.lstat()
        except FileNotFoundError:
            found = None
        except OSError as e:
            raise UsageError(f"{named}: {e.strerror}") from e
        if found is not None and stat.S_ISLNK(found.st_mode):
            raise UsageError(f"{named}: is a symbolic link, which is not written through; name the file itself")
        if found is not None and not stat.S_ISREG(found.st_mode):
            raise UsageError(f"{named}: is not a file; name a file in a directory")
        if not path.parent.is_dir():
            raise UsageError(f"{named}: there is no directory {path.parent}; make or mount it")

    def _remove_left_behind(self) -> None:
        """What a killed process left; what another is writing at this moment stays. The clock may have been set back
        since."""
        for leftover in self.path.parent.glob(f".{self.path.name}.*{_SUFFIX}"):
            with suppress(OSError):
                if abs(self._wall() - leftover.stat().st_mtime) > _LEFT_BEHIND_SECONDS:
                    leftover.unlink()

    @property
    def age(self) -> float | None:
        """Seconds since it was written; None: it is not there. One from the future was written just now."""
        try:
            return max(0.0, self._wall() - self.path.stat().st_mtime)
        except OSError:
            return None

    def write(self, content: bytes) -> None:
        """Raises OutputError, and then the file before still stands."""
        try:
            with self._beside() as (descriptor, temporary):
                _write_all(descriptor, content)
                os.fchmod(descriptor, self._mode)
                if self._owner is not None:
                    os.fchown(descriptor, self._owner.uid, self._owner.gid)
                os.fsync(descriptor)
                os.rename(temporary, self.path)
            _sync_directory(self.path.parent)
        except OSError as e:
            raise OutputError(f"{self.path} was not written ({e.strerror}); the previous one is still there") from e

    def remove(self) -> None:
        """Works on a full disk too. Raises OutputError when it is still there."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError as e:
            raise OutputError(f"{self.path} was not removed ({e.strerror}): see who may write there") from e

    @contextmanager
    def _beside(self) -> Iterator[tuple[int, str]]:
        """A new file in the same directory, gone afterwards unless it was renamed."""
        descriptor, temporary = tempfile.mkstemp(_SUFFIX, f".{self.path.name}.", self.path.parent)
        try:
            yield descriptor, temporary
        finally:
            os.close(descriptor)
            with suppress(FileNotFoundError):
                os.unlink(temporary)


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _sync_directory(directory: Path) -> None:
    """So that the new name outlives a power cut; some network file systems know no such thing."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
