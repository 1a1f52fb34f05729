"""Defines the errors that podgpu raises, and functions that format messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

MOST_NAMED = 5


def few_of(names: Iterable[object], most: int = MOST_NAMED, unnamed: int = 0) -> str:
    """Returns the first `most` names and the number of others: `a, b and 9 more`.

    A single further name is not longer than `and 1 more`, so it is written. `unnamed`: the number
    of others that are not in `names`.
    """
    texts = [str(name) for name in names]
    if len(texts) <= most + 1 and not unnamed:
        return ", ".join(texts) or "none"
    others = len(texts[most:]) + unnamed
    return f"{', '.join(texts[:most])} and {others:,} more"


def plural(number: int, noun: str) -> str:
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun}s"


def utc_text(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def one_line(text: str) -> str:
    """Escapes line breaks and control characters.

    They can occur because messages quote names from other programs.
    """
    return "".join(c if c.isprintable() else ascii(c).strip("'") for c in text)


class Note(NamedTuple):
    """A warning for people.

    The key says what it is about, so that a new number in the text is no new warning in the log.
    """

    key: str
    text: str
    is_logged: bool = False  # by the component itself


ReadNotes = Callable[[], Sequence[Note]]


def collect_notes(sources: Iterable[ReadNotes]) -> list[Note]:
    """Returns the current notes of all components."""
    notes: list[Note] = []
    for read_notes in sources:
        notes += read_notes()
    return notes


def texts_of(notes: Iterable[Note]) -> list[str]:
    return [note.text for note in notes]


class PodgpuError(Exception):
    """Base of all errors shown to users. The text is one line: what happened and what to do.

    `remedy` is what an administrator can apply, in several lines. Only commands print it.
    """

    remedy = ""


class UsageError(PodgpuError):
    """An option, an environment variable, or a file that an option names is invalid.

    podgpu exits with code 2. `facts` are further fields of the error in JSON, so that no program
    looks into the message.
    """

    def __init__(self, message: str, **facts: str | float) -> None:
        super().__init__(message)
        self.facts = facts


class StartError(PodgpuError):
    """The options are valid, but podgpu cannot run, for example because an address is in use.

    podgpu exits with code 1.
    """


class SourceError(PodgpuError):
    """A source (driver, kubelet, file) could not be read. The next attempt may succeed.

    `reason` is a short snake_case word for the `reason` label of
    podgpu_exporter_source_errors_total. `retry_after`: seconds that the server wants the client to
    wait. 0 if it does not say.
    """

    def __init__(self, reason: str, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after = retry_after


class Unsupported(SourceError):
    """The device or source does not provide this value.

    podgpu reads it again only after devices have changed.
    """

    def __init__(self, message: str, reason: str = "not_supported") -> None:
        super().__init__(reason, message)


class DeviceLost(SourceError):
    """The GPU fell off the bus or needs a reset."""

    def __init__(self, message: str) -> None:
        super().__init__("gpu_lost", message)


class DriverGone(SourceError):
    """The driver is not loaded, was unloaded, or was closed by podgpu. It must be opened again."""

    def __init__(self, message: str, reason: str = "driver_not_loaded") -> None:
        super().__init__(reason, message)
