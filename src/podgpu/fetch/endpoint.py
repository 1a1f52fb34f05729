"""One place that is asked over HTTP. Any status is an answer; what keeps an answer away is a SourceError.

No redirect is followed: it could lead credentials elsewhere. No secret is logged, nor printed in a URL.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import zlib
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

import aiohttp
from yarl import URL

from podgpu import __version__
from podgpu.errors import SourceError, UsageError
from podgpu.fetch.access import Access, Credentials

LARGEST_ANSWER = 64 * 1024 * 1024
DEADLINE = 4.0
KEEP_ALIVE_SECONDS = 70.0
"""Less than the 75 s after which aiohttp's servers, and podgpu's, hang up; more than most intervals."""
_PIECE = 256 * 1024
_LONGEST_REASON = 100
_MOST_MEMBERS = 16
"""Of a compressed answer: what is left is copied for each, and a small answer may have a million of them."""
_AGENT = f"podgpu/{__version__}"


class Answer(NamedTuple):
    status: int
    body: bytes
    """Unpacked."""
    content_type: str
    """Without parameters, in lower case."""
    reason: str = ""
    """What the server wrote behind the status, in one short line of text."""
    location: str = ""
    """Where a redirect points; may have secrets in it."""


class _Request(NamedTuple):
    method: str
    url: URL
    headers: dict[str, str]
    form: Mapping[str, str] | None
    tls: ssl.SSLContext | bool


def open_session(keep_alive: float = KEEP_ALIVE_SECONDS) -> aiohttp.ClientSession:
    """For `ask`, on the loop that runs now. How many requests are under way at a time is for the caller to limit.

    `keep_alive`: seconds for which a connection stays open after its last answer; 0: not at all.
    """
    connector = (
        aiohttp.TCPConnector(limit=0, keepalive_timeout=keep_alive)
        if keep_alive
        else aiohttp.TCPConnector(limit=0, force_close=True)
    )
    return aiohttp.ClientSession(
        connector=connector,
        auto_decompress=False,  # aiohttp would unpack a small answer to any size
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),  # `ask` has its own
        headers={"User-Agent": _AGENT, "Accept-Encoding": "gzip"},
    )


class Endpoint:
    def __init__(
        self,
        url: str,
        access: Access | Credentials | None = None,
        *,
        deadline: float = DEADLINE,
        largest: int = LARGEST_ANSWER,
        path: str = "",
    ) -> None:
        """`path` is that of a URL without one. Raises UsageError for what is no URL, or for access that cannot be."""
        parts = _split(url)
        parts = parts._replace(netloc=parts.netloc.rpartition("@")[2].lower(), path=parts.path or path, fragment="")
        login = urlsplit(url)
        self._login = "" if login.username is None else f"{unquote(login.username)}:{unquote(login.password or '')}"
        self._url = _url(parts)
        self.shown = parts._replace(query="…" if parts.query else "").geturl()
        self.host = parts.netloc
        """With the port, where the URL has one."""
        self._credentials = access if isinstance(access, Credentials) else Credentials(access)
        if self._login and self._credentials.has_login:
            raise UsageError(f"{self.shown}: a login in the URL and one by option; keep one, better not in the URL")
        self._is_https = parts.scheme == "https"
        self.deadline = deadline
        self._largest = largest

    async def ask(
        self,
        session: aiohttp.ClientSession,
        method: str = "GET",
        path: str = "",
        form: Mapping[str, str] | None = None,
        accept: str = "*/*",
    ) -> Answer:
        """`path` goes behind the URL's own. `form` is sent as a form, with GET as a query. Raises SourceError."""
        request = _Request(
            method,
            self._url.joinpath(path.lstrip("/")).with_query(self._url.query) if path else self._url,
            self._credentials.headers(self._login) | {"Accept": accept},
            form,
            self._credentials.tls() if self._is_https else True,
        )
        try:
            async with asyncio.timeout(self.deadline):
                try:
                    return await self._send(session, request)
                except aiohttp.ServerDisconnectedError:
                    # A server may close a kept connection at the moment it is used again. Everything podgpu sends only
                    # asks, so that it may be sent twice.
                    return await self._send(session, request)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self._explain(error) from error

    async def _send(self, session: aiohttp.ClientSession, request: _Request) -> Answer:
        in_url = request.method == "GET"
        async with session.request(
            request.method,
            request.url,
            params=request.form if in_url else None,
            data=None if in_url else request.form,
            headers=request.headers,
            ssl=request.tls,
            allow_redirects=False,
        ) as response:
            packed = await self._read(response)
        headers = response.headers
        encoding = headers.get("Content-Encoding", "")
        body = self._unpack(packed, encoding.strip().lower()) if encoding else packed
        content_type = headers.get("Content-Type", "").partition(";")[0].strip().lower()
        return Answer(response.status, body, content_type, _plain(response.reason or ""), headers.get("Location", ""))

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        if (response.content_length or 0) > self._largest:
            raise self._too_large()
        pieces: list[bytes] = []
        size = 0
        while piece := await response.content.read(_PIECE):
            pieces.append(piece)
            size += len(piece)
            if size > self._largest:
                raise self._too_large()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _unpack(self, body: bytes, encoding: str) -> bytes:
        if encoding == "identity":
            return body
        if encoding not in ("gzip", "x-gzip", "deflate"):
            raise SourceError("not_prometheus", f"{self.shown} answers in {encoding!r}, which it was not asked for")
        plain, rest, members = b"", body, 0
        while rest or not members:  # gzip may come in several, and one of two is half a page
            members += 1
            if members > _MOST_MEMBERS:
                raise SourceError("malformed", f"{self.shown}: the compressed answer is in too many pieces")
            more, rest = self._unpack_member(rest, self._largest - len(plain))
            plain += more
        return plain

    def _unpack_member(self, packed: bytes, most: int) -> tuple[bytes, bytes]:
        """What it holds, and what stands behind it."""
        unpacker = zlib.decompressobj(wbits=47)  # gzip or zlib, as the header says
        try:
            plain = unpacker.decompress(packed, most + 1)
        except zlib.error as error:
            raise SourceError("malformed", f"{self.shown}: the compressed answer is broken ({error})") from error
        if len(plain) > most:
            raise self._too_large()
        if not unpacker.eof:
            raise SourceError("malformed", f"{self.shown}: the compressed answer ends too early")
        return plain, unpacker.unused_data

    # Why not

    def refused(self, answer: Answer) -> SourceError:
        """What a status that is not wanted means."""
        status, shown = answer.status, self.shown
        if status in (401, 403):
            advice = self._credentials.access.login_advice()
            return SourceError(
                "unauthorized", f"{shown} lets nobody in without the right credentials ({status}): {advice}"
            )
        if 300 <= status < 400:
            target = without_secrets(answer.location)
            return SourceError(f"http_{status}", f"{shown} sends on to {target}, which is not followed: name that URL")
        if status == 503:
            return SourceError("http_503", f"{shown} answers 503: it is not ready, or its figures are too old")
        said = f"{shown} answers {status} {answer.reason}".rstrip()
        return SourceError(f"http_{status}", f"{said}: is the path right?" if status < 500 else said)

    def _too_large(self) -> SourceError:
        return SourceError(
            "too_large", f"{self.shown} answers with more than {self._largest} bytes: see that it is the right page"
        )

    def _explain(self, error: Exception) -> SourceError:
        if isinstance(error, TimeoutError):
            return SourceError("timeout", f"{self.shown}: no whole answer within {self.deadline:g} s")
        access = self._credentials.access
        if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError):
            why = f"no trusted connection ({_first_line(error)})"
            return SourceError("tls", f"{self.shown}: {why}: {access.tls_advice()}")
        if isinstance(error, aiohttp.ClientPayloadError):
            return SourceError("truncated", f"{self.shown}: the answer ended too early")
        why = _why_unreachable(error)
        return SourceError(
            "unreachable", f"{self.shown} cannot be reached ({why}): see that {access.server} runs there"
        )


def _why_unreachable(error: Exception) -> str:
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, ConnectionRefusedError):
        return "nothing listens there"
    if isinstance(cause, socket.gaierror):
        return "there is no host of this name"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it hung up without an answer"
    if isinstance(error, aiohttp.ClientResponseError):
        return "its answer is no HTTP: is the port right?"
    return _first_line(error)


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
        if usable and url.isprintable() and " " not in url:
            return parts
    except ValueError:
        pass
    raise UsageError(f"{without_secrets(url)}: no URL that could be asked; write http://HOST:PORT")


def _url(parts: SplitResult) -> URL:
    try:
        return URL(parts.geturl())
    except ValueError as error:
        raise UsageError(f"{without_secrets(parts.geturl())}: no URL that could be asked ({error})") from error


def without_secrets(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    rest = rest if separator else scheme
    shown = rest.partition("?")[0].rpartition("@")[2]
    return ascii(f"{scheme}://{shown}" if separator else shown)[:200]


def _plain(text: str) -> str:
    """A server may write anything there: half a character, or what moves a cursor."""
    return "".join(c for c in text[:_LONGEST_REASON] if c.isprintable())


def _first_line(error: Exception) -> str:
    """An aiohttp error may quote the request: its first line is enough."""
    return (str(error) or type(error).__name__).partition("\n")[0][:200]
