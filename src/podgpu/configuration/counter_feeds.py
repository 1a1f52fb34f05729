"""Where the counters come from, read again whenever they may have changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from podgpu.catalog.counters import MOST_BYTES, Counter, parse_counters
from podgpu.errors import SourceError, UsageError
from podgpu.files import ReadOnChange

CONFIGMAP_KEY = "metrics"
"""The key dcgm-exporter reads in its ConfigMap."""


class CounterFeed(Protocol):
    def read(self) -> tuple[Counter, ...]:
        """The counters as they are now. Raises SourceError: the caller goes on with the last good ones."""


class FileCounters:
    """A CSV file; re-parsed when it changed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = ReadOnChange(_parse, MOST_BYTES)

    def read(self) -> tuple[Counter, ...]:
        return self._file.read(self._path)


class ConfigMapCounters:
    """The CSV text in a ConfigMap, kept current by a watch; `text` is None while the map has no such key."""

    def __init__(self, name: str, text: Callable[[], str | None]) -> None:
        self._name = name
        self._text = text
        self._last: tuple[str, tuple[Counter, ...]] | None = None

    def read(self) -> tuple[Counter, ...]:
        text = self._text()
        if text is None:
            message = f"there is no ConfigMap {self._name} with the key {CONFIGMAP_KEY!r} (or it may not be read)"
            raise SourceError("configmap_missing", message)
        if self._last is None or self._last[0] != text:
            self._last = (text, _parse(text.encode(), f"ConfigMap {self._name}"))
        return self._last[1]


def _parse(content: bytes, origin: str) -> tuple[Counter, ...]:
    try:
        return parse_counters(content.decode("utf-8"), origin)
    except UnicodeDecodeError as e:
        raise SourceError("malformed", f"{origin} is not UTF-8 text; is it a counters CSV?") from e
    except UsageError as e:
        raise SourceError("malformed", str(e)) from e
