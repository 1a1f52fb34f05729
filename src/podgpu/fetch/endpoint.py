"""One place that is asked over HTTP. Any status is an answer; what keeps an answer away is a SourceError.

No redirect is followed: it could lead credentials elsewhere. No secret is logged, nor printed in a URL.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import unicodedata
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

import aiohttp
from yarl import URL

from podgpu import __version__
from podgpu.errors import SourceError, UsageError
from podgpu.fetch.access import Access, Credentials, without_secrets
from podgpu.http.receive import Received

LARGEST_ANSWER = 64 * 1024 * 1024
DEADLINE = 4.0
KEEP_ALIVE_SECONDS = 70.0
"""Less than the 75 s after which aiohttp's servers, and podgpu's, hang up; more than most intervals."""
_PIECE = 256 * 1024
_LONGEST_REASON = 100
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
        url = self._url.joinpath(path.lstrip("/")).with_query(self._url.query) if path else self._url
        try:
            async with asyncio.timeout(self.deadline):
                headers, tls = await self._let_in()
                request = _Request(method, url, headers | {"Accept": accept}, form, tls)
                try:
                    return await self._send(session, request)
                except aiohttp.ServerDisconnectedError:
                    # A server may close a kept connection at the moment it is used again. Everything podgpu sends only
                    # asks, so that it may be sent twice.
                    return await self._send(session, request)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self._explain(error) from error

    async def _let_in(self) -> tuple[dict[str, str], ssl.SSLContext | bool]:
        """Where files are to be read for it, in a thread: a disk that hangs costs this request its deadline, and no
        other on the loop."""
        if self._credentials.reads_files(self._is_https):
            return await asyncio.to_thread(self._credentials_now)
        return self._credentials_now()

    def _credentials_now(self) -> tuple[dict[str, str], ssl.SSLContext | bool]:
        return self._credentials.headers(self._login), self._credentials.tls() if self._is_https else True

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
            body = await self._read(response)
        headers = response.headers
        content_type = headers.get("Content-Type", "").partition(";")[0].strip().lower()
        return Answer(response.status, body, content_type, _plain(response.reason or ""), headers.get("Location", ""))

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        received = Received(self.shown, self._largest, response.headers.get("Content-Encoding", "").strip().lower())
        received.expect(response.content_length or 0)
        while piece := await response.content.read(_PIECE):
            received.take(piece)
        return received.whole()

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
    if isinstance(error, aiohttp.InvalidURL):
        return "it is no address"  # its own text is the whole URL
    return _first_line(error)


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
        if usable and url.isprintable() and " " not in url:
            return _without_another_login(parts, url)
    except ValueError:
        pass
    raise UsageError(f"{without_secrets(url)}: no URL that could be asked; write http://HOST:PORT")


def _without_another_login(parts: SplitResult, url: str) -> SplitResult:
    """http://u:12/34@host is the host `u` by the letter, and half a password in every message if it was meant so."""
    if "@" in unicodedata.normalize("NFKC", parts.path + parts.query + parts.fragment):
        raise UsageError(
            f"{without_secrets(url)}: there is an @ behind the host: write it as %40, and in a password / as %2F, ? as"
            " %3F, # as %23"
        )
    return parts


def _url(parts: SplitResult) -> URL:
    try:
        return URL(parts.geturl())
    except ValueError as error:  # its message may quote what is not to be shown
        raise UsageError(f"{without_secrets(parts.geturl())}: no URL that could be asked; see its host") from error


def _plain(text: str) -> str:
    """A server may write anything there: half a character, or what moves a cursor."""
    return "".join(c for c in text[:_LONGEST_REASON] if c.isprintable())


def _first_line(error: Exception) -> str:
    """An aiohttp error may quote the request: its first line is enough."""
    return (str(error) or type(error).__name__).partition("\n")[0][:200]
