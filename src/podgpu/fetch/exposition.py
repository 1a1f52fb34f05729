"""This module fetches an exporter's exposition from a URL or a file, as bytes: bounded in time and size, never half of
one."""

from __future__ import annotations

import asyncio
import re
import unicodedata
from typing import NamedTuple, Protocol

import aiohttp

from podgpu.clock import Clock
from podgpu.errors import SourceError, UsageError
from podgpu.fetch.access import Access, Credentials, without_secrets
from podgpu.fetch.endpoint import DEADLINE, Endpoint, with_scheme
from podgpu.files import FileIdentity, ReadOnChange, look_at
from podgpu.http.exchange import open_session

MAX_AGE = 300.0
LARGEST_EXPOSITION = 16 * 1024 * 1024
"""A node of 16 GPUs, seven MIG instances on each, and every field there is, has a third of this."""
_ACCEPT = "text/plain;version=0.0.4,text/plain;q=0.5"


class ExpositionSource(Protocol):
    shown: str
    """What to call it in messages: no secret in it."""

    def fetch(self) -> bytes:
        """The whole exposition, now. Raises SourceError."""


def exposition_at(
    place: str,
    access: Access | None = None,
    *,
    deadline: float = DEADLINE,
    max_age: float = MAX_AGE,
    largest: int = LARGEST_EXPOSITION,
) -> ExpositionSource:
    """`place` is a URL, HOST:PORT or the path of a file; a file that is named like a HOST:PORT is ./HOST:PORT. Raises
    UsageError for what can be none of these."""
    if with_scheme(place) != place:
        return UrlExposition(place, access, deadline, largest)
    scheme, separator, _ = place.partition("://")
    if separator and scheme.lower() in ("http", "https"):
        return UrlExposition(place, access, deadline, largest)
    if not place or separator or _has_login(place):
        shown = without_secrets(place)
        raise UsageError(f"{shown} cannot be read: write HOST:9400, http(s)://HOST:9400/metrics or the path of a file")
    return FileExposition(place, max_age, largest)


def _has_login(place: str) -> bool:
    """USER:PASSWORD@HOST, whatever is missing in front of it. A path that looks like that begins with / or ./ ."""
    name = unicodedata.normalize("NFKC", place)
    return not re.match(r"\.{0,2}/(?!/)", name) and re.search(r":.*(?:@|%40)", name, re.DOTALL) is not None


class FileExposition:
    def __init__(
        self,
        path: str,
        max_age: float = MAX_AGE,
        largest: int = LARGEST_EXPOSITION,
        clock: Clock | None = None,
    ) -> None:
        """`max_age`: seconds after which a file nobody writes any more is no reading of now."""
        self.shown = self.path = path
        self._max_age = max_age
        self._clock = clock or Clock()
        self._met: _Met | None = None
        self._reader: ReadOnChange[bytes] = ReadOnChange(lambda content, _path: content, largest)

    def fetch(self) -> bytes:
        age = self._age()
        if age > self._max_age:
            raise SourceError(
                "stale",
                f"{self.path} was last written {age:.0f} s ago, and after {self._max_age:g} s its figures count"
                " as too old: see that its writer runs",
            )
        content = self._reader.read(self.path)
        if not content.endswith(b"\n"):
            what = "ends in the middle of a line" if content else "is empty"
            raise SourceError(
                "being_written",
                f"{self.path} {what}: read again next time; if it lasts, have its writer replace it by rename",
            )
        return content

    def _age(self) -> float:
        """By the wall clock when the file is first seen as it is, from then on by one that nobody sets.

        A clock that is set forward makes no file old that was just written, one set back keeps none young for ever.
        """
        identity, now = look_at(self.path), self._clock.monotonic()
        if self._met is None or self._met.identity != identity:
            self._met = _Met(identity, now - max(0.0, self._clock.wall() - identity.modified_ns / 1e9))
        return now - self._met.written_at


class _Met(NamedTuple):
    """A file as it was first seen."""

    identity: FileIdentity
    written_at: float
    """By the monotonic clock."""


class UrlExposition:
    def __init__(
        self,
        url: str,
        access: Access | Credentials | None = None,
        deadline: float = DEADLINE,
        largest: int = LARGEST_EXPOSITION,
    ) -> None:
        """Raises UsageError for what is no URL. One without a path means /metrics."""
        self._endpoint = Endpoint(url, access, deadline=deadline, largest=largest, path="/metrics")
        self.shown = self._endpoint.shown
        self.host = self._endpoint.host

    def fetch(self) -> bytes:
        return asyncio.run(self._fetch_alone())

    async def _fetch_alone(self) -> bytes:
        async with open_session() as session:
            return await self.fetch_with(session)

    async def fetch_with(self, session: aiohttp.ClientSession) -> bytes:
        """The same on a session that stays open. Raises SourceError."""
        answer = await self._endpoint.ask(session, accept=_ACCEPT)
        if answer.status != 200:
            raise self._endpoint.refused(answer)
        if answer.content_type == "text/html" or looks_like_web_page(answer.body):
            raise not_prometheus(self.shown)
        return answer.body


def above_metrics(url: str) -> str:
    """Where the server of this exposition has everything else: what its path has before /metrics, without a query."""
    base = re.split(r"[?#]", url, maxsplit=1)[0].rstrip("/")
    return base.removesuffix("/metrics")


def looks_like_web_page(body: bytes) -> bool:
    return body[:512].lstrip()[:1] == b"<"


def not_prometheus(shown: str) -> SourceError:
    return SourceError("not_prometheus", f"{shown} is a web page, not metrics: name the path of the metrics")
