"""Where an exporter's page comes from: a URL or a file, as bytes. Bounded in time and size, never half a page.

No redirect is followed: it could lead credentials elsewhere. No secret is logged, nor printed in a URL.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import SplitResult, unquote, urlsplit

import aiohttp

from podgpu import __version__
from podgpu.errors import SourceError, UsageError
from podgpu.files import FileIdentity, ReadOnChange, look_at, read_bounded

LARGEST_PAGE = 64 * 1024 * 1024
DEADLINE = 4.0
MAX_AGE = 300.0
_PIECE = 256 * 1024
_LARGEST_SECRET = 64 * 1024
_HEADERS = {
    "Accept": "text/plain;version=0.0.4,text/plain;q=0.5",
    "Accept-Encoding": "gzip",
    "User-Agent": f"podgpu/{__version__}",
}


class PageSource(Protocol):
    shown: str
    """What to call it in messages: no secret in it."""

    def fetch(self) -> bytes:
        """The whole page, now. Raises SourceError."""


@dataclass(frozen=True)
class Access:
    """How to be let in at a URL. The files are read at every fetch: secrets are renewed under their names."""

    ca_file: str = ""
    insecure: bool = False
    """Take any certificate."""
    username: str = ""
    password_file: str = ""
    token_file: str = ""

    def check(self) -> None:
        if self.token_file and self.username:
            raise UsageError("--exporter-token-file and --exporter-username: only one of them can be sent")
        if bool(self.username) != bool(self.password_file):
            raise UsageError("--exporter-username and --exporter-password-file go together")
        if self.ca_file and self.insecure:
            raise UsageError("--exporter-ca-file: nothing is checked against it with --exporter-insecure-skip-verify")


def open_page_source(
    place: str,
    access: Access | None = None,
    *,
    deadline: float = DEADLINE,
    max_age: float = MAX_AGE,
    largest: int = LARGEST_PAGE,
) -> PageSource:
    """`place` is a URL or the path of a file. Raises UsageError for what can be neither."""
    scheme, separator, _ = place.partition("://")
    if separator and scheme.lower() in ("http", "https"):
        return UrlPage(place, access or Access(), deadline, largest)
    if not place or separator:
        raise UsageError(f"{place!r} is no page: write http://HOST:9400/metrics, https://… or the path of a file")
    return FilePage(place, max_age, largest)


# A file


class FilePage:
    def __init__(
        self,
        path: str,
        max_age: float = MAX_AGE,
        largest: int = LARGEST_PAGE,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`max_age`: seconds after which a file nobody writes any more is no reading of now."""
        self.shown = self.path = path
        self._max_age = max_age
        self._clock = clock
        self._reader: ReadOnChange[bytes] = ReadOnChange(lambda content, _path: content, largest)

    def fetch(self) -> bytes:
        age = self._clock() - look_at(self.path).modified_ns / 1e9
        if age > self._max_age:
            raise SourceError(
                "stale",
                f"{self.path} was last written {age:.0f} s ago, and after {self._max_age:g} s its figures are not"
                " taken for today's: see that its writer runs",
            )
        content = self._reader.read(self.path)
        if not content.endswith(b"\n"):
            what = "ends in the middle of a line" if content else "is empty"
            raise SourceError(
                "being_written",
                f"{self.path} {what}: read again next time; if it lasts, have its writer replace it by rename",
            )
        return content


# A URL


class UrlPage:
    def __init__(
        self, url: str, access: Access | None = None, deadline: float = DEADLINE, largest: int = LARGEST_PAGE
    ) -> None:
        """Raises UsageError for what is no URL. One without a path means /metrics."""
        parts = _split(url)
        host = parts.netloc.rpartition("@")[2]
        path = parts.path or "/metrics"
        self._url = parts._replace(netloc=host, path=path, fragment="").geturl()
        self.shown = parts._replace(netloc=host, path=path, query="…" if parts.query else "", fragment="").geturl()
        self._access = access or Access()
        self._access.check()
        self._login = "" if parts.username is None else f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        if self._login and (self._access.username or self._access.token_file):
            raise UsageError(f"{self.shown}: a login in the URL and one by option; keep one, better not in the URL")
        self._deadline = deadline
        self._largest = largest
        self._tls = _Tls(self._access)

    def fetch(self) -> bytes:
        headers = _HEADERS | self._authorization()
        tls = self._tls.context() if self._url.startswith("https") else None
        try:
            return asyncio.run(self._ask(headers, tls))
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self._explain(error) from error

    async def _ask(self, headers: dict[str, str], tls: ssl.SSLContext | None) -> bytes:
        timeout = aiohttp.ClientTimeout(total=self._deadline)
        async with (
            aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session,
            session.get(self._url, headers=headers, ssl=tls or True, allow_redirects=False) as response,
        ):
            self._refuse_status(response)
            body = await self._read(response)
        body = self._decode(body, response.headers.get("Content-Encoding", "").strip().lower())
        if response.content_type == "text/html":
            raise not_prometheus(self.shown)
        return body

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        if (response.content_length or 0) > self._largest:
            raise self._too_large()
        body = bytearray()
        async for piece in response.content.iter_chunked(_PIECE):
            body += piece
            if len(body) > self._largest:
                raise self._too_large()
        return bytes(body)

    def _decode(self, body: bytes, encoding: str) -> bytes:
        if encoding in ("", "identity"):
            return body
        if encoding not in ("gzip", "x-gzip", "deflate"):
            raise SourceError("not_prometheus", f"{self.shown} answers in {encoding!r}, which it was not asked for")
        unpacker = zlib.decompressobj(wbits=47)  # gzip or zlib, as the header says
        try:
            plain = unpacker.decompress(body, self._largest + 1)
        except zlib.error as error:
            raise SourceError("malformed", f"{self.shown}: the compressed answer is broken ({error})") from error
        if len(plain) > self._largest:
            raise self._too_large()
        if not unpacker.eof:
            raise SourceError("malformed", f"{self.shown}: the compressed answer ends too early")
        return plain

    def _too_large(self) -> SourceError:
        return SourceError(
            "too_large", f"{self.shown} answers with more than {self._largest} bytes: see that it is the right page"
        )

    def _refuse_status(self, response: aiohttp.ClientResponse) -> None:
        status = response.status
        if status == 200:
            return
        if status in (401, 403):
            raise SourceError(
                "unauthorized",
                f"{self.shown} lets nobody in without the right credentials ({status}): see --exporter-username,"
                " --exporter-password-file and --exporter-token-file",
            )
        if 300 <= status < 400:
            target = _without_secrets(response.headers.get("Location", ""))
            raise SourceError(
                f"http_{status}", f"{self.shown} sends on to {target}, which is not followed: name that URL"
            )
        raise SourceError(f"http_{status}", f"{self.shown} answers {status} {response.reason}: is the path right?")

    def _authorization(self) -> dict[str, str]:
        if self._access.token_file:
            return {"Authorization": f"Bearer {_secret(self._access.token_file)}"}
        login = self._login
        if self._access.username:
            login = f"{self._access.username}:{_secret(self._access.password_file)}"
        return {"Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"} if login else {}

    def _explain(self, error: Exception) -> SourceError:
        if isinstance(error, TimeoutError):
            return SourceError("timeout", f"{self.shown}: no whole answer within {self._deadline:g} s")
        if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError):
            return SourceError(
                "tls", f"{self.shown}: no trusted connection ({_first_line(error)}): see --exporter-ca-file"
            )
        if isinstance(error, aiohttp.ClientPayloadError):
            return SourceError("truncated", f"{self.shown}: the answer ended too early")
        return SourceError(
            "unreachable", f"{self.shown} cannot be reached ({_first_line(error)}): see that the exporter runs there"
        )


class _Tls:
    """The context for https, made again only when the file of authorities changed: loading them takes milliseconds."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._kept: tuple[FileIdentity | None, ssl.SSLContext] | None = None

    def context(self) -> ssl.SSLContext:
        file = self._access.ca_file
        identity = look_at(file) if file else None
        if self._kept is None or self._kept[0] != identity:
            self._kept = (identity, self._make())
        return self._kept[1]

    def _make(self) -> ssl.SSLContext:
        file = self._access.ca_file
        try:
            context = ssl.create_default_context(cafile=file or None)
        except OSError as error:  # ssl.SSLError is one
            raise SourceError("tls", f"{file} has no certificates in it ({_first_line(error)})") from error
        if self._access.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


def _secret(path: str) -> str:
    try:
        secret = read_bounded(path, _LARGEST_SECRET).decode().strip()
    except UnicodeDecodeError:
        secret = ""
    if not secret or not secret.isprintable():  # a line break would begin another header
        raise SourceError("unauthorized", f"{path} holds no secret that could be sent: one line of text is wanted")
    return secret


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        if parts.hostname and (parts.port is None or parts.port > 0):
            return parts
    except ValueError:
        pass
    raise UsageError(f"{_without_secrets(url)}: no URL of a page; write http://HOST:9400/metrics")


def _without_secrets(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    rest = rest if separator else scheme
    shown = rest.partition("?")[0].rpartition("@")[2]
    return ascii(f"{scheme}://{shown}" if separator else shown)[:200]


def not_prometheus(shown: str) -> SourceError:
    return SourceError("not_prometheus", f"{shown} is a web page, not metrics: name the path of the metrics")


def _first_line(error: Exception) -> str:
    """An aiohttp error may quote the request: its first line is enough."""
    return (str(error) or type(error).__name__).partition("\n")[0][:200]
