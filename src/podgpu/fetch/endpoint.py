"""This module asks one place over HTTP. Any status is an answer; what keeps an answer away is a SourceError.

No redirect is followed: it could lead credentials elsewhere. No secret is logged, nor printed in a URL.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import unicodedata
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from yarl import URL

from podgpu.errors import SourceError, UsageError
from podgpu.fetch.access import Access, Credentials, without_secrets
from podgpu.http.exchange import Question, let_go, read_whole, send
from podgpu.http.failure import Failure, Kind, explained

if TYPE_CHECKING:
    import aiohttp

LARGEST_ANSWER = 64 * 1024 * 1024
DEADLINE = 4.0
_LONGEST_REASON = 100
_HOST_PORT = re.compile(r"((?:[a-z0-9_][a-z0-9_.-]*|\[[0-9a-f:.]+\])?)(:[0-9]{1,5}(?:/[!-$&-?A-~]*)?)", re.IGNORECASE)
"""Without any @ or %: half of a login would be taken for a host, and the other half shown."""


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
        """`url` may be HOST:PORT alone; `path` is that of a URL without one. Raises UsageError for what can be neither,
        or for access that cannot be."""
        credentials = access if isinstance(access, Credentials) else Credentials(access)
        url = with_scheme(url, "https" if credentials.access.wants_tls else "http")
        parts = _split(url)
        parts = parts._replace(netloc=parts.netloc.rpartition("@")[2].lower(), path=parts.path or path, fragment="")
        login = urlsplit(url)
        self._login = "" if login.username is None else f"{unquote(login.username)}:{unquote(login.password or '')}"
        self._url = _url(parts)
        self.shown = parts._replace(query="…" if parts.query else "").geturl()
        self.host = parts.netloc
        """With the port, where the URL has one."""
        self._credentials = credentials
        if self._login and self._credentials.has_login:
            raise UsageError(
                f"{self.shown}: a login in the URL and another by option: keep one, better not that in the URL"
            )
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
        query, sent = (form, None) if method == "GET" else (None, form)
        with explained(self._say):
            async with asyncio.timeout(self.deadline):
                headers, tls = await self._let_in()
                response = await send(session, Question(method, url, headers | {"Accept": accept}, query, sent, tls))
                try:
                    body = await read_whole(response, self.shown, self._largest)
                finally:
                    let_go(response)
        found = response.headers
        content_type = found.get("Content-Type", "").partition(";")[0].strip().lower()
        return Answer(response.status, body, content_type, _plain(response.reason or ""), found.get("Location", ""))

    async def _let_in(self) -> tuple[dict[str, str], ssl.SSLContext | bool]:
        """Where files are to be read for it, in a thread: a disk that hangs costs this request its deadline, and no
        other on the loop."""
        if self._credentials.reads_files(self._is_https):
            return await asyncio.to_thread(self._credentials_now)
        return self._credentials_now()

    def _credentials_now(self) -> tuple[dict[str, str], ssl.SSLContext | bool]:
        return self._credentials.headers(self._login), self._credentials.tls() if self._is_https else True

    # Why not

    def refused(self, answer: Answer) -> SourceError:
        """What a status that is not wanted means."""
        status, shown = answer.status, self.shown
        if status in (401, 403):
            advice = self._credentials.access.login_advice()
            return SourceError("unauthorized", f"{shown} needs other credentials ({status}): {advice}")
        if 300 <= status < 400:
            target = without_secrets(answer.location)
            return SourceError(
                f"http_{status}", f"{shown} redirects to {target}, which podgpu does not follow: name that URL"
            )
        if status == 503:
            return SourceError("http_503", f"{shown} answers 503: it is not ready, or its figures are too old")
        words = f"{shown} answers {status} {answer.reason}".rstrip()
        return SourceError(f"http_{status}", f"{words}: is the path right?" if status < 500 else words)

    def _say(self, failure: Failure) -> SourceError:
        access = self._credentials.access
        if failure.kind is Kind.TIMEOUT:
            return SourceError("timeout", f"{self.shown}: no whole answer within {self.deadline:g} s")
        if failure.is_tls:
            return SourceError("tls", f"{self.shown}: no trusted connection ({failure.why}): {access.tls_advice()}")
        if failure.kind is Kind.CUT_SHORT:
            return SourceError("truncated", f"{self.shown}: {failure.why}")
        return SourceError(
            "unreachable", f"{self.shown} cannot be reached ({failure.why}): see that {access.server} runs there"
        )


def with_scheme(place: str, scheme: str = "http") -> str:
    """`gpu-1:9400` and `:9400` (this machine) as the URLs that are meant; anything else as it is."""
    match = _HOST_PORT.fullmatch(place)
    return place if match is None else f"{scheme}://{match[1] or 'localhost'}{match[2]}"


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
        if usable and url.isprintable() and " " not in url:
            return _without_another_login(parts, url)
    except ValueError:
        pass
    raise UsageError(
        f"{without_secrets(url)}: cannot be asked over HTTP; write HOST:PORT, http://HOST:PORT or https://HOST:PORT"
    )


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
        raise UsageError(f"{without_secrets(parts.geturl())}: cannot be asked over HTTP: look at its host") from error


def _plain(text: str) -> str:
    """A server may write anything there: half a character, or what moves a cursor."""
    return "".join(c for c in text[:_LONGEST_REASON] if c.isprintable())
