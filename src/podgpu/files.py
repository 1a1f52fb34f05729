"""Reads files up to a size limit, and replaces files without showing incomplete content."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from podgpu.errors import Note, PodgpuError, SourceError, UsageError

T = TypeVar("T")
_MIN_CACHED_AGE_NS = 2_000_000_000
"""Newer files are not cached.

File systems may store time stamps in steps of 2 s, so a second change may be missed.
"""


class FileIdentity(NamedTuple):
    """Identifies one version of a file. A file that was replaced or written has a new identity."""

    filesystem: int
    inode: int
    modified_ns: int
    size: int
    changed_ns: int


def identify_file(path: str) -> FileIdentity:
    """Returns the identity of a file. Raises SourceError if `path` is not a regular file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        raise explain_read_error(error, path) from error
    _require_regular(status, path)
    return FileIdentity(
        status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size, status.st_ctime_ns
    )


def read_bounded(path: str, limit: int) -> bytes:
    """Reads a regular file.

    Raises SourceError if it cannot be read, or is larger than `limit` bytes.
    """
    return _read(path, limit).content


def read_settled(path: str, limit: int) -> bytes | None:
    """Like `read_bounded`, but returns None if the file was written over at the same time."""
    reading = _read(path, limit)
    return reading.content if reading.is_settled else None


class _FileContent(NamedTuple):
    content: bytes
    is_settled: bool  # the file had the same size and time before and after


def _read(path: str, limit: int) -> _FileContent:
    # Rejects devices and FIFOs before they are opened, because opening them has side effects.
    if identify_file(path).size > limit:
        raise _too_large(path, limit)
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            before = os.fstat(file.fileno())
            _require_regular(before, path)
            content = file.read(limit + 1)
            after = os.fstat(file.fileno())
    except (OSError, ValueError) as error:
        raise explain_read_error(error, path) from error
    # The size of files in /proc and /sys is reported as 0.
    if len(content) > limit:
        raise _too_large(path, limit)

    has_same_time = before.st_mtime_ns == after.st_mtime_ns
    has_same_size = before.st_size == after.st_size == len(content)
    return _FileContent(content, is_settled=has_same_time and has_same_size)


def _open_without_waiting(name: str, flags: int) -> int:
    # Without O_NONBLOCK, opening a FIFO would wait for its writer.
    return os.open(name, flags | os.O_NONBLOCK)


def _too_large(path: str, limit: int) -> SourceError:
    return SourceError(
        "too_large", f"{path} is larger than the limit of {limit} bytes: is it the right file?"
    )


def _require_regular(status: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise SourceError(
            "not_a_file",
            f"{path} is a directory or a device: "
            "set the path of the file itself, and mount its directory "
            "(mounting a file that does not exist yet creates a directory with its name)",
        )


def explain_read_error(error: OSError | ValueError, path: str) -> SourceError:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return SourceError(
            "file_missing",
            f"{path} does not exist: mount the host's directory that contains it, "
            "or set the path where it is mounted",
        )
    if isinstance(error, PermissionError):
        return SourceError(
            "permission_denied",
            f"no permission to read {path}: set securityContext.runAsUser "
            "to a user with permission, usually 0 (no capability is needed)",
        )
    why = "the path contains a null byte"
    if isinstance(error, OSError):
        why = error.strerror or str(error)
    return SourceError("unreadable", f"cannot read {path} ({why}): check the path and its disk")


class ReadOnChange(Generic[T]):
    """Caches the parsed content of a file until the file changes."""

    def __init__(self, parse: Callable[[bytes, str], T], limit: int) -> None:
        self._parse = parse
        self._limit = limit
        self._cached: tuple[FileIdentity, T] | None = None
        self.identity: FileIdentity | None = None  # of the content that was read last

    def read(self, path: str) -> T:
        """Returns the result of `parse(content, path)`.

        Raises SourceError if the file cannot be read.
        """
        now = time.time_ns()
        identity = identify_file(path)
        if self._cached is not None:
            cached_identity, parsed = self._cached
            if cached_identity == identity:
                return parsed

        self.identity = identity
        content = read_bounded(path, self._limit)
        # The size is compared too, because two writes within one tick of the kernel's clock get the
        # same time stamp.
        if identify_file(path) != identity or len(content) != identity.size:
            raise SourceError(
                "being_written",
                f"{path} changed while it was read: podgpu retries; if this persists, "
                "the program that writes it should replace it by rename, and less often",
            )
        parsed = self._parse(content, path)
        is_old = now - identity.changed_ns >= _MIN_CACHED_AGE_NS
        self._cached = (identity, parsed) if is_old else None
        return parsed


class OutputError(PodgpuError):
    """The file could not be written or removed. It still has its previous content."""

    reason = "not_written"


class AtomicFile:
    """Writes a temporary file and renames it, so that readers always see complete content.

    Rejects symbolic links.
    """

    def __init__(self, path: str, mode: int = 0o644, option: str = "--out") -> None:
        """Raises UsageError if no file can be created at `path`.

        `option` is the flag to name in error messages.
        """
        self.path = Path(path)
        self._mode = mode
        self._temporary = self.path.parent / f".{self.path.name}.podgpu-tmp"
        # Methods of Path raise PermissionError in a directory that cannot be searched.
        is_no_file = os.path.exists(path) and not os.path.isfile(path)
        if os.path.islink(path) or is_no_file:
            raise UsageError(
                f"{option} {path}: is a symbolic link or not a regular file; set the path of a file"
            )
        directory = self.path.parent
        if not os.path.isdir(directory):
            raise UsageError(
                f"{option} {path}: the directory {directory} does not exist; create or mount it"
            )

    def write(self, content: bytes) -> None:
        try:
            try:
                # A killed process may have left this file.
                self._temporary.unlink(missing_ok=True)
                with open(self._temporary, "xb") as file:
                    os.fchmod(file.fileno(), self._mode)
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                os.rename(self._temporary, self.path)
            finally:
                self._temporary.unlink(missing_ok=True)
        except OSError as e:
            raise OutputError(
                f"{self.path} was not written ({e.strerror}); the previous file is unchanged"
            ) from e

    def touch(self) -> None:
        """Sets the time of the file to now."""
        try:
            os.utime(self.path)
        except OSError as e:
            raise OutputError(
                f"the time of {self.path} was not updated ({e.strerror}): "
                "check the permissions of its directory"
            ) from e

    def remove(self) -> None:
        try:
            self.path.unlink(missing_ok=True)
        except OSError as e:
            raise OutputError(
                f"{self.path} was not removed ({e.strerror}): "
                "check the permissions of its directory"
            ) from e


def read_last_valid(
    option: str, what: str, path: str, parse: Callable[[bytes, str], T], max_bytes: int
) -> Callable[[], tuple[T, tuple[Note, ...]]]:
    """Returns a function that reads a file again when it changes.

    If the new content is invalid, it returns the last valid one, and a note. Raises UsageError if
    the file is invalid now.
    """
    file = ReadOnChange(parse, max_bytes)
    try:
        valid = file.read(path)
    except (SourceError, UsageError) as error:
        raise UsageError(f"{option}: {error}") from error

    def read() -> tuple[T, tuple[Note, ...]]:
        nonlocal valid
        try:
            valid = file.read(path)
        except (SourceError, UsageError) as error:
            # A mistake in a changed file is logged, even if the former content was invalid, too.
            fault = error.reason if isinstance(error, SourceError) else file.identity
            text = f"{option}: {error}; the last valid {what} are used"
            return valid, (Note(f"{option} {fault}", text),)
        return valid, ()

    return read
