"""This module owns one exchange over HTTP: a question sent, and its answer taken in, whole and bounded or as it
arrives.

It follows no redirect, which could lead credentials elsewhere, and keeps no cookie. What goes wrong is raised as
aiohttp or the system raises it; `failure.explained` turns it into podgpu's own words.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any, NamedTuple

from podgpu import __version__
from podgpu.http.receive import Received
from podgpu.http.tls import without_authorities

with without_authorities():  # what it trusts is said with every question that goes over TLS
    import aiohttp
    from yarl import URL

KEEP_ALIVE_SECONDS = 70.0
"""Less than the 75 s after which aiohttp's servers, and podgpu's, hang up; more than most intervals."""
NO_LIMIT = aiohttp.ClientTimeout(total=None)
_PIECE = 256 * 1024


class Question(NamedTuple):
    method: str
    url: URL | str
    headers: Mapping[str, str]
    query: Mapping[str, str] | None = None
    form: Mapping[str, str] | None = None
    """Sent as the body."""
    tls: ssl.SSLContext | bool = True
    server_name: str | None = None
    """The name the certificate has to have, where it is not the URL's."""
    body: bytes | None = None
    """Sent as it is, in place of a form."""


def open_session(keep_alive: float = KEEP_ALIVE_SECONDS) -> aiohttp.ClientSession:
    """On the loop that runs now. How many requests are under way at a time is for the caller to limit.

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
        timeout=NO_LIMIT,  # those who ask have deadlines of their own
        headers={"User-Agent": f"podgpu/{__version__}", "Accept-Encoding": "gzip"},
    )


async def send(
    session: aiohttp.ClientSession, question: Question, timeout: aiohttp.ClientTimeout = NO_LIMIT
) -> aiohttp.ClientResponse:
    """The answer's status and headers, its body still to be read. `let_go` of it in the end, whatever comes."""
    options: dict[str, Any] = {} if question.server_name is None else {"server_hostname": question.server_name}
    for is_last in (False, True):
        try:
            return await session.request(
                question.method,
                question.url,
                params=question.query,
                data=question.form if question.body is None else question.body,
                headers=question.headers,
                ssl=question.tls,
                timeout=timeout,
                allow_redirects=False,
                **options,
            )
        except aiohttp.ServerDisconnectedError:
            # A server may close a kept connection at the moment it is used again. Everything podgpu sends only asks, or
            # says how something shall be, so that it may be sent twice.
            if is_last:
                raise
    raise AssertionError("the second time has returned or raised")


async def read_whole(response: aiohttp.ClientResponse, shown: str, largest: int) -> bytes:
    """The body, unpacked. Raises SourceError at the first byte too many; `shown` is who sends it, for the message."""
    received = Received(shown, largest, response.headers.get("Content-Encoding", "").strip().lower())
    received.expect(response.content_length or 0)
    while piece := await response.content.read(_PIECE):
        received.take(piece)
    return received.whole()


def let_go(response: aiohttp.ClientResponse) -> None:
    """Drop a connection whose answer was not read to its end; one that was is kept for the next question already.

    Without the abort, TLS would wait for the server's goodbye after our loop has ended.
    """
    if response.connection is not None and response.connection.transport is not None:
        response.connection.transport.abort()
    response.close()
