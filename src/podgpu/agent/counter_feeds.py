"""Reads the configured counters, and reads them again when they change. Invalid counters do not replace valid ones."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from podgpu.errors import SourceError, UsageError
from podgpu.files import ReadOnChange
from podgpu.holders.api import CONFIGMAP_KEY
from podgpu.metrics.counters import (
    SHIPPED,
    CounterSpec,
    parse_counters,
    shipped_counters,
)
from podgpu.metrics.names import NameSet
from podgpu.model import SourceStatus
from podgpu.workers import ErrorCounts, Workers

_log = logging.getLogger("podgpu")
_COUNTERS_DIRECTORY = "/etc/dcgm-exporter"
COUNTERS = "counters"  # name of this source in podgpu's own metrics
_MAX_BYTES = 1 << 20
CounterSpecs = tuple[CounterSpec, ...]
ReadCounters = Callable[[], CounterSpecs]
"""Returns the current counters. Raises SourceError if they are invalid; the caller then keeps the previous ones."""


def read_counters(chosen: str, names: NameSet = "4.8") -> tuple[CounterSpecs, ReadCounters | None]:
    """Returns the counters of `-f`, which is the name of a shipped set, `none` or a file."""
    if chosen == "none":
        return (), None
    if not chosen:
        default = f"{_COUNTERS_DIRECTORY}/{SHIPPED['default']}"
        chosen = default if os.path.exists(default) else "default"
    shipped = shipped_counters(chosen, names)
    if shipped is not None:
        return shipped, None
    path, read = Path(chosen), counters_in_file(chosen, names)
    try:
        return read(), read
    except SourceError as e:
        if e.reason != "file_missing":
            raise UsageError(str(e) if e.reason == "malformed" else f"-f {e}") from e
    ours = shipped_counters(path.name, names) if str(path.parent) == _COUNTERS_DIRECTORY else None
    if ours is None:
        raise UsageError(f"-f {path}: no such file; give a CSV file or one of {', '.join(SHIPPED)}, none")
    _log.info("%s does not exist; using podgpu's copy of it", path)
    return ours, None


def counters_in_file(path: str, names: NameSet = "4.8") -> ReadCounters:
    """Returns a function that reads a CSV file, and parses it again when it changes."""
    file = ReadOnChange(partial(_parse, names), _MAX_BYTES)
    return lambda: file.read(path)


def counters_in_configmap(name: str, read_text: Callable[[], str | None], names: NameSet = "4.8") -> ReadCounters:
    """Returns a function that parses the CSV text of a watched ConfigMap.

    `read_text` returns None if the ConfigMap or its key is missing.
    """

    def read() -> CounterSpecs:
        text = read_text()
        if text is None:
            message = (
                f"there is no ConfigMap {name} with the key {CONFIGMAP_KEY!r} (or podgpu has no permission to read it)"
            )
            raise SourceError("configmap_missing", message)
        return _parse(names, text.encode("utf-8", "replace"), f"ConfigMap {name}")

    return read


def _parse(names: NameSet, content: bytes, origin: str) -> CounterSpecs:
    try:
        return parse_counters(content.decode("utf-8"), origin, names)
    except UnicodeDecodeError as e:
        raise SourceError("malformed", f"{origin} is not UTF-8 text; is it a counters CSV?") from e
    except UsageError as e:
        raise SourceError("malformed", str(e)) from e


class CounterWatch:
    """Reads counters that can change, in a worker."""

    def __init__(self, read: ReadCounters | None, workers: Workers, errors: ErrorCounts, deadline: float) -> None:
        self._read = read
        self._workers = workers
        self._errors = errors
        self._deadline = deadline
        self.sources: tuple[SourceStatus, ...] = ()

    @property
    def is_active(self) -> bool:
        return self._read is not None

    def update(self, take: Callable[[CounterSpecs], None]) -> None:
        """Passes the current counters to `take`, which may reject them with a UsageError."""
        if self._read is None:
            return
        result = self._workers.run({COUNTERS: self._read}, self._deadline)[COUNTERS]
        if result.value is not None:
            try:
                take(result.value)
            except UsageError as e:  # a collection of the configuration file contains none of the counters
                result = replace(result, error=SourceError("malformed", str(e)))
        self.sources = (self._errors.make_status(COUNTERS, result),)
