"""This module owns how podgpu reads a file: whole, within a limit, and parsed again only after a change.

It waits for no writer, reads past no limit, and never hands out a file that changed while it was read.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import msgspec

from podgpu.errors import SourceError

T = TypeVar("T")

TRIES = 3
_PAUSE_S = 0.01
SETTLED_NS = 2_000_000_000
"""A younger change may hide another: kernels stamp files with a clock of 1 to 10 ms, some file systems with 2 s."""


# Reading


class FileIdentity(NamedTuple):
    """Tells a file from the one that takes its place, and its content from what is written over it."""

    filesystem: int
    inode: int
    modified_ns: int
    size: int
    changed_ns: int


def look_at(path: str) -> FileIdentity:
    """Who the regular file at the path is now. Costs one stat."""
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        raise explain(error, path) from error
    _refuse_irregular(found, path)
    return FileIdentity(found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size, found.st_ctime_ns)


def read_bounded(path: str, limit: int) -> bytes:
    """The bytes of a regular file of at most `limit` bytes."""
    if look_at(path).size > limit:  # before it is opened: opening a device or a FIFO is not without effect
        raise _too_large(path, limit)
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            _refuse_irregular(os.fstat(file.fileno()), path)
            content = file.read(limit + 1)
    except (OSError, ValueError) as error:
        raise explain(error, path) from error
    if len(content) > limit:  # it grew, or is one of the kernel's, which have no size
        raise _too_large(path, limit)
    return content


def _too_large(path: str, limit: int) -> SourceError:
    return SourceError(
        "too_large", f"{path} has more than {limit} bytes, which is all that is read: see that it is the right file"
    )


def _open_without_waiting(path: str, flags: int) -> int:
    # Without O_NONBLOCK, opening a FIFO that was put here a moment ago would wait for its writer.
    return os.open(path, flags | os.O_NONBLOCK)


def _refuse_irregular(found: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = "a directory" if stat.S_ISDIR(found.st_mode) else "a pipe, socket or device"
        raise SourceError(
            "not_a_file",
            f"{path} is {kind}, not a file: name the file itself, and mount the directory it is in"
            " (mounting a file that is not there yet makes a directory of its name)",
        )


def explain(error: OSError | ValueError, path: str) -> SourceError:
    """What a failure to open or read means to the person who runs podgpu."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return SourceError(
            "file_missing",
            f"{path} is not there: mount the host's directory that holds it, or name the path it is mounted at",
        )
    if isinstance(error, PermissionError):
        return SourceError(
            "permission_denied",
            f"not allowed to read {path}: set securityContext.runAsUser to the user that may, usually 0"
            " (no capability is needed)",
        )
    why = getattr(error, "strerror", None) or str(error)
    return SourceError("unreadable", f"cannot read {path} ({why}): see that the path is right and its disk is well")


@dataclass(frozen=True, slots=True)
class _Kept(Generic[T]):
    path: str
    identity: FileIdentity
    parsed: T


class ReadOnChange(Generic[T]):
    """Keeps what was parsed while the file is the same: a reading of an unchanged file costs one stat."""

    def __init__(
        self,
        parse: Callable[[bytes, str], T],
        limit: int,
        read: Callable[[str, int], bytes] = read_bounded,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._parse = parse
        self._limit = limit
        self._read = read
        self._clock = clock
        self._kept: _Kept[T] | None = None

    def read(self, path: str) -> T:
        """What the file says now. `parse` gets its bytes and its path, and raises SourceError if it makes no sense."""
        now, identity, kept = self._clock(), look_at(path), self._kept
        if kept is not None and (kept.path, kept.identity) == (path, identity):
            return kept.parsed
        content, identity = self._read_whole(path, identity)
        parsed = self._parse(content, path)
        is_settled = now - identity.changed_ns >= SETTLED_NS
        self._kept = _Kept(path, identity, parsed) if is_settled else None
        return parsed

    def _read_whole(self, path: str, before: FileIdentity) -> tuple[bytes, FileIdentity]:
        for _ in range(TRIES):
            content = self._read(path, self._limit)
            after = look_at(path)
            # The length too: within one tick of the kernel's clock a file written over may look untouched.
            if after == before and len(content) == after.size:
                return content, after
            before = after
            time.sleep(_PAUSE_S)
        raise SourceError(
            "being_written",
            f"{path} changed {TRIES} times while it was read: read again next time; if it lasts, have its writer"
            " replace it by rename, and less often",
        )


def decode_json(content: bytes, path: str, type_: type[T]) -> T:
    """Decodes the JSON of a file. Raises SourceError with the place of the first error."""
    try:
        return msgspec.json.decode(content, type=type_)
    except (ValueError, RecursionError) as error:
        reason = str(error)[:200] if content else "it is empty"
        raise SourceError(
            "malformed",
            f"cannot parse {path} ({reason}); will retry; if this persists, check the program that writes it",
        ) from error
