"""Reads the counters from a file or a ConfigMap, again when they change. Invalid ones do not replace valid ones."""

from __future__ import annotations

import logging
from collections import Counter as Tally
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from podgpu.errors import SourceError, UsageError
from podgpu.files import ReadOnChange
from podgpu.metrics.counters import MOST_BYTES, Counter, Naming
from podgpu.model import SourceStatus
from podgpu.workers import Workers

_log = logging.getLogger("podgpu")

_NAME = "counters"
"""Name of the source in podgpu's own metrics."""
CONFIGMAP_KEY = "metrics"
"""The key dcgm-exporter reads in its ConfigMap."""


class CounterFeed(Protocol):
    def read(self) -> tuple[Counter, ...]:
        """Returns the current counters. Raises SourceError; the caller then keeps the previous ones."""


class FileCounters:
    """A CSV file, parsed again when it changes."""

    def __init__(self, path: str, naming: Naming = Naming()) -> None:  # noqa: B008 - frozen
        self._path = path
        self._file = ReadOnChange(partial(_parse, naming), MOST_BYTES)

    def read(self) -> tuple[Counter, ...]:
        return self._file.read(self._path)


class ConfigMapCounters:
    """The CSV text in a watched ConfigMap. `text` returns None if the map or its key is missing."""

    def __init__(self, name: str, text: Callable[[], str | None], naming: Naming = Naming()) -> None:  # noqa: B008
        self._name = name
        self._naming = naming
        self._text = text
        self._last: tuple[str, tuple[Counter, ...] | SourceError] | None = None

    def read(self) -> tuple[Counter, ...]:
        text = self._text()
        if text is None:
            self._last = None
            message = f"there is no ConfigMap {self._name} with the key {CONFIGMAP_KEY!r} (or it may not be read)"
            raise SourceError("configmap_missing", message)
        if self._last is None or self._last[0] != text:
            self._last = (text, self._take(text))
        found = self._last[1]
        if isinstance(found, SourceError):
            raise SourceError(found.reason, str(found))
        return found

    def _take(self, text: str) -> tuple[Counter, ...] | SourceError:
        try:
            return _parse(self._naming, text.encode("utf-8", "replace"), f"ConfigMap {self._name}")
        except SourceError as error:
            if self._last is not None and isinstance(self._last[1], SourceError):
                # The failure of this source is already logged, so the change log would suppress this new error.
                _log.warning("counters: changed, but still invalid: %s; the last valid ones stay", error)
            return error


def _parse(naming: Naming, content: bytes, origin: str) -> tuple[Counter, ...]:
    try:
        counters = naming.parse(content.decode("utf-8"), origin)
    except UnicodeDecodeError as e:
        raise SourceError("malformed", f"{origin} is not UTF-8 text; is it a counters CSV?") from e
    except UsageError as e:
        raise SourceError("malformed", str(e)) from e
    for sentence in naming.remarks(counters):
        _log.info("%s: %s", origin, sentence)
    return counters


class CounterWatch:
    def __init__(self, feed: CounterFeed | None, isolation: Workers, deadline: float) -> None:
        self._feed = feed
        self._isolation = isolation
        self._deadline = deadline
        self.sources: tuple[SourceStatus, ...] = ()
        self.errors: Mapping[tuple[str, str], int] = {}
        """Number of errors by (source, reason). Replaced, not changed, because other threads read it."""

    @property
    def watches(self) -> bool:
        """True if the counters may change."""
        return self._feed is not None

    def read(self, take: Callable[[tuple[Counter, ...]], None]) -> None:
        """Passes the current counters to `take`, which may reject them with a UsageError."""
        if self._feed is None:
            return
        result = self._isolation.run({_NAME: self._feed.read}, self._deadline)[_NAME]
        if isinstance(result.error, SourceError):
            self._refuse(result.error)
        elif result.value is not None:
            try:
                take(result.value)
            except UsageError as e:  # a collection of the configuration file has none of them
                self._refuse(SourceError("malformed", str(e)))
            else:
                self.sources = (SourceStatus(_NAME, True, result.seconds),)

    def _refuse(self, error: SourceError) -> None:
        self.errors = Tally(self.errors) + Tally([(_NAME, error.reason)])
        self.sources = (SourceStatus(_NAME, False, 0.0, error.reason, str(error)),)
