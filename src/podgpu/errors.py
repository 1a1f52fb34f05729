"""This module has the few errors podgpu raises itself, and how a message names many things in a line.

Foreign exceptions become one of these errors where they enter.
"""

from __future__ import annotations

from collections.abc import Iterable

MOST_NAMED = 5


def few_of(names: Iterable[object], most: int = MOST_NAMED) -> str:
    """`1, 2, 3, 4, 5 and 995 more`, `none` where there are none. The last one is named, not counted."""
    texts = [str(name) for name in names]
    if len(texts) <= most + 1:
        return ", ".join(texts) or "none"
    return f"{', '.join(texts[:most])} and {len(texts) - most:,} more"


class PodgpuError(Exception):
    """Base of all errors a person may see; str() is one line saying what happened and what to do."""


class UsageError(PodgpuError):
    """An option, a file named by an option or a variable is wrong: exit code 2."""


class StartError(PodgpuError):
    """The options are right but podgpu cannot run here (address in use, library mismatch): exit code 1."""


class SourceError(PodgpuError):
    """A source (driver, kubelet, file) could not be read this time.

    `reason` is a short snake_case word for the `reason` label of podgpu_exporter_source_errors_total.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Unsupported(SourceError):
    """The device or source does not have what was asked; asking again is pointless until the topology changes."""

    def __init__(self, message: str, reason: str = "not_supported") -> None:
        super().__init__(reason, message)


class DeviceLost(SourceError):
    """The GPU fell off the bus or needs a reset."""

    def __init__(self, message: str) -> None:
        super().__init__("gpu_lost", message)


class DriverGone(SourceError):
    """No driver to talk to (not loaded, unloaded, re-loaded, let go): initialise again before the next call."""

    def __init__(self, message: str, reason: str = "driver_not_loaded") -> None:
        super().__init__(reason, message)


def one_line(text: str) -> str:
    """Names of others are in what is said: none of them begins a line of its own, or tells a terminal anything."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
