"""Sources of an exporter's metrics text: a URL or a file."""

from __future__ import annotations

import re
import time
from typing import Protocol

from podgpu.errors import SourceError, UsageError
from podgpu.files import ReadOnChange, look_at
from podgpu.http_client import (
    DEFAULT_TIMEOUT,
    MAX_METRICS_BYTES,
    METRICS_TYPES,
    Access,
    HttpClient,
    check_is_metrics,
    redact_url,
    with_scheme,
)

DEFAULT_MAX_AGE = 300.0


class ExpositionSource(Protocol):
    shown: str
    """Its name in messages, without secrets."""

    def fetch(self) -> bytes:
        """Returns the complete text. Raises SourceError."""


def open_exposition_source(
    place: str,
    access: Access | None = None,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    max_age: float = DEFAULT_MAX_AGE,
    max_bytes: int = MAX_METRICS_BYTES,
) -> ExpositionSource:
    """`place` is a URL, HOST:PORT or the path of a file. A file named like a HOST:PORT is ./HOST:PORT. Raises
    UsageError."""
    scheme, separator, _ = place.partition("://")
    if with_scheme(place) != place or (separator and scheme.lower() in ("http", "https")):
        return UrlExposition(place, access, timeout, max_bytes)
    may_have_login = not re.match(r"\.{0,2}/(?!/)", place) and re.search(r"(?s):.*(?:@|%40|\uff20)", place)
    if not place or separator or may_have_login:
        advice = "write HOST:9400, http(s)://HOST:9400/metrics or the path of a file"
        raise UsageError(f"{redact_url(place)} cannot be read: {advice}")
    return FileExposition(place, max_age, max_bytes)


class UrlExposition:
    def __init__(
        self,
        url: str,
        access: Access | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        max_bytes: int = MAX_METRICS_BYTES,
    ) -> None:
        """A URL without a path means /metrics. Raises UsageError."""
        self._client = HttpClient(url, access, timeout=timeout, max_bytes=max_bytes, default_path="/metrics")
        self.shown = self._client.shown

    def fetch(self) -> bytes:
        body = self._client.get_blocking(accept=METRICS_TYPES)
        check_is_metrics(body, self.shown)
        return body


class FileExposition:
    def __init__(self, path: str, max_age: float = DEFAULT_MAX_AGE, max_bytes: int = MAX_METRICS_BYTES) -> None:
        """`max_age`: seconds after which the content is too old."""
        self.shown = self.path = path
        self._max_age = max_age
        self._reader: ReadOnChange[bytes] = ReadOnChange(lambda content, _path: content, max_bytes)

    def fetch(self) -> bytes:
        age = time.time() - look_at(self.path).modified_ns / 1e9
        if age > self._max_age:
            raise SourceError(
                "stale",
                f"{self.path} was last written {age:.0f} s ago, and after {self._max_age:g} s its figures are too old:"
                " check that its writer runs",
            )
        content = self._reader.read(self.path)
        if not content.endswith(b"\n"):
            what = "ends in the middle of a line" if content else "is empty"
            raise SourceError(
                "being_written",
                f"{self.path} {what}: read again next time; if it lasts, have its writer replace it by rename",
            )
        return content
