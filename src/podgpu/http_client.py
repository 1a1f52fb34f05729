"""Sends HTTP requests with deadlines, size limits and credentials from files.

Redirects are not followed, because they could send credentials to another server. Error messages
contain no secrets.
"""

from __future__ import annotations

import asyncio
import base64
import re
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any, NamedTuple

import aiohttp
import msgspec
from yarl import URL

from podgpu import __version__
from podgpu.decode import BAD_JSON, find_decoder
from podgpu.errors import SourceError, UsageError, one_line
from podgpu.files import FileIdentity, identify_file, read_bounded
from podgpu.tls import Pem, make_client_context

DEFAULT_TIMEOUT = 4.0
MAX_METRICS_BYTES = 16 * 1024 * 1024
"""Three times the size of the largest expected response.

That is 16 GPUs with seven MIG instances each, and all fields.
"""
METRICS_TYPES = "text/plain;version=0.0.4,text/plain;q=0.5"
_MAX_RETRY_AFTER = 3600.0  # a receiver that wants more gets the next request after an hour
_KEEP_ALIVE_SECONDS = 70.0
"""Longer than most scrape intervals.

Shorter than 75 s, because aiohttp servers close idle connections then.
"""
_MAX_BODY_BYTES = 64 * 1024 * 1024
_MAX_SECRET_BYTES = 64 * 1024
_CHUNK_BYTES = 256 * 1024
_MAX_ERROR = 600  # characters of a server's message
# Also with a path, but not with @ or % in it: that may be the end of a login.
_HOST_PORT = re.compile(
    r"((?:[a-z0-9_][a-z0-9_.-]*|\[[0-9a-f:.]+\])?)(:[0-9]{1,5}(?:/[!-$&-?A-~]*)?)", re.IGNORECASE
)


@dataclass(frozen=True)
class Access:
    """TLS options and credentials for a server.

    Files are read for each request, so that new secrets take effect.
    """

    ca_file: str = ""
    insecure: bool = False  # accept any certificate
    username: str = ""
    password_file: str = ""
    token_file: str = ""
    # additional headers, such as the tenant of a Mimir server
    headers: tuple[tuple[str, str], ...] = ()
    # shown if the server rejects the credentials, or if its certificate is not trusted
    advice: str = (
        "write the login into the URL, http://USER:PASSWORD@HOST:PORT, "
        "and set SSL_CERT_FILE to its CA's file"
    )

    @classmethod
    def from_options(cls, options: Mapping[str, Any], prefix: str, **headers: str) -> Access:
        """Reads --PREFIX-ca-file, --PREFIX-username and so on.

        Raises UsageError if they contradict each other.
        """
        flag = f"--{prefix}"

        def read(name: str) -> str:
            return options.get(f"{prefix}_{name}") or ""

        access = cls(
            ca_file=read("ca_file"),
            insecure=bool(read("insecure_skip_verify")),
            username=read("username"),
            password_file=read("password_file"),
            token_file=read("token_file"),
            headers=tuple(headers.items()),
            advice=(
                f"see {flag}-username, {flag}-password-file, {flag}-token-file, {flag}-ca-file"
            ),
        )
        if access.token_file and access.username:
            raise UsageError(f"{flag}-token-file and {flag}-username: only one of them can be set")
        if bool(access.username) != bool(access.password_file):
            raise UsageError(f"{flag}-username and {flag}-password-file must be set together")
        if access.ca_file and access.insecure:
            raise UsageError(
                f"{flag}-ca-file: has no effect with {flag}-insecure-skip-verify: remove one"
            )
        for value in headers.values():
            if not value.isprintable():
                raise UsageError(f"the headers {headers} must not contain line breaks")
        return access

    def make_headers(self) -> dict[str, str]:
        """Returns the headers of a request. Raises SourceError if a secret cannot be read."""
        headers = dict(self.headers)
        if self.token_file:
            headers["Authorization"] = f"Bearer {_read_secret(self.token_file)}"
        elif self.username:
            password = _read_secret(self.password_file)
            headers["Authorization"] = _encode_basic(self.username, password)
        return headers

    def tls_context(self) -> ssl.SSLContext:
        identity = identify_file(self.ca_file) if self.ca_file else None
        return _cached_context(self.ca_file, identity, self.insecure)


@lru_cache(maxsize=8)
def _cached_context(ca_file: str, _identity: FileIdentity | None, insecure: bool) -> ssl.SSLContext:
    """Creates a TLS context. Cached, because loading CAs is slow.

    `_identity` changes with the file's content.
    """
    authorities = Pem(ca_file).read() if ca_file else None
    return make_client_context(authorities, ca_file, verify=not insecure)


def _encode_basic(username: str, password: str) -> str:
    login = f"{username}:{password}".encode()
    return f"Basic {base64.b64encode(login).decode()}"


def _read_secret(path: str) -> str:
    secret = read_bounded(path, _MAX_SECRET_BYTES).decode("utf-8", "replace").strip()
    # A line break would begin another header.
    if not secret or not secret.isprintable():
        raise SourceError(
            "unauthorized", f"{path} has no usable secret: write one line of text into it"
        )
    return secret


def with_scheme(place: str, scheme: str = "http") -> str:
    """Completes `gpu-1:9400` and `:9400` (this machine) to URLs.

    Returns anything else unchanged.
    """
    match = _HOST_PORT.fullmatch(place)
    if match is None:
        return place
    host = match[1] or "localhost"
    return f"{scheme}://{host}{match[2]}"


def url_host(host: str) -> str:
    """Returns the host as in a URL: an IPv6 address in brackets."""
    if ":" in host:
        return f"[{host}]"
    return host


def redact_url(url: str) -> str:
    """Returns a URL for messages: quoted, and without secrets even if it is malformed.

    Removes everything before the last @, which may be a login, and everything after a ?, which may
    be a key.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        rest = scheme
    # %40 and the full-width @ may stand for @, too.
    without_login = re.sub(r"(?is).*(?:@|%40|\uff20)", "", rest)
    shown = re.split(r"[?#]", without_login)[0]
    if separator and scheme.isalnum():
        shown = f"{scheme}://{shown}"
    return ascii(shown)[:200]


def _parse_url(text: str, access: Access) -> URL:
    try:
        scheme = "https" if access.ca_file or access.insecure else "http"
        url = URL(with_scheme(text, scheme))
        is_complete = url.scheme in ("http", "https") and url.host and url.port
        is_usable = is_complete and text.isprintable() and " " not in text
    except (ValueError, IndexError):
        # yarl raises IndexError for `http://user:[]@`
        is_usable = False
    # In http://user:12/34@host the / of the password was not escaped, so yarl takes `user` for the
    # host.
    if not is_usable or "@" in url.path + url.query_string + url.fragment:
        raise UsageError(
            f"{redact_url(text)}: not the URL of an HTTP server; "
            "write HOST:PORT or http(s)://HOST:PORT, "
            "and escape @, /, ? and # in a password (@ is %40)"
        )
    return url.with_fragment(None)


class HttpResponse(NamedTuple):
    status: int
    body: bytes
    content_type: str  # without parameters, in lower case
    retry_after: str = ""  # the header Retry-After


def parse_retry_after(text: str, now: float) -> float:
    """Returns the seconds of a header Retry-After: a number or a date. 0 if there are none."""
    seconds = 0.0
    try:
        if text.isdecimal():
            seconds = float(text)
        elif text:
            seconds = parsedate_to_datetime(text).timestamp() - now
    except (ValueError, OverflowError):
        return 0.0
    return min(max(seconds, 0.0), _MAX_RETRY_AFTER)


def open_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),  # callers set deadlines
        headers={"User-Agent": f"podgpu/{__version__}", "Accept-Encoding": "gzip"},
    )


async def read_body(
    response: aiohttp.ClientResponse, max_bytes: int, shown: str, reason: str = "too_large"
) -> bytes:
    """Reads and decompresses the body.

    Raises SourceError if it is too large. The message contains the URL `shown`.
    """
    text = f"{shown} answers with more than {max_bytes} bytes: is it the right URL?"
    too_large = SourceError(reason, text)
    if (response.content_length or 0) > max_bytes:
        raise too_large

    chunks = []
    size = 0
    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
        size += len(chunk)
        if size > max_bytes:
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)


class HttpClient:
    """Sends requests to one server.

    Callers pass the aiohttp session, so that many clients can share it.
    """

    def __init__(
        self,
        url: str,
        access: Access | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        max_bytes: int = _MAX_BODY_BYTES,
        default_path: str = "",
    ) -> None:
        """Raises UsageError if the URL is invalid.

        `url` may be HOST:PORT. A URL without a path gets `default_path`.
        """
        self._access = access or Access()
        parsed = _parse_url(url, self._access)
        if parsed.path in ("", "/") and default_path:
            parsed = parsed.with_path(default_path).with_query(parsed.query)
        self._url = parsed.with_user(None)
        # The URL without secrets, for messages.
        self.shown = str(self._url.with_query(None)).rstrip("/")
        if self._url.query_string:
            self.shown += "?…"
        self.host = self._url.authority
        self.timeout = timeout
        self._max_bytes = max_bytes
        self._login: str | None = None
        if parsed.user is not None:
            if self._access.username or self._access.token_file:
                raise UsageError(
                    f"{self.shown}: both the URL and the options have a login: "
                    "remove it from the URL"
                )
            self._login = _encode_basic(parsed.user, parsed.password or "")

    async def send(
        self,
        session: aiohttp.ClientSession,
        method: str = "GET",
        path: str = "",
        *,
        query: Mapping[str, str] | None = None,
        form: Mapping[str, str] | None = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        accept: str = "*/*",
    ) -> HttpResponse:
        """Sends a request and returns the response, whatever its status.

        `path` is appended to the URL's path. The body is a `form`, or `content` of another type,
        which `headers` describe. Raises SourceError if there is no response.
        """
        url = self._url
        if path:
            url = url.joinpath(path.lstrip("/")).with_query(url.query)

        all_headers = self._access.make_headers() | {"Accept": accept} | dict(headers or {})
        if self._login is not None:
            all_headers["Authorization"] = self._login
        tls: ssl.SSLContext | bool = True
        if url.scheme == "https":
            tls = self._access.tls_context()

        async def attempt() -> HttpResponse:
            async with session.request(
                method,
                url,
                params=query,
                data=content or form,
                headers=all_headers,
                ssl=tls,
                allow_redirects=False,
            ) as response:
                body = await read_body(response, self._max_bytes, self.shown)
                retry_after = response.headers.get("Retry-After", "")
                return HttpResponse(response.status, body, response.content_type, retry_after)

        with explain_errors(self._explain):
            async with asyncio.timeout(self.timeout):
                try:
                    return await attempt()
                except aiohttp.ServerDisconnectedError:
                    # A server may close an idle connection just when it is reused. aiohttp itself
                    # repeats only GETs.
                    return await attempt()

    async def get(
        self,
        session: aiohttp.ClientSession,
        path: str = "",
        query: Mapping[str, str] | None = None,
        accept: str = "application/json",
    ) -> bytes:
        """Returns the body. Raises SourceError if the request fails or the status is not 200."""
        response = await self.send(session, "GET", path, query=query, accept=accept)
        if response.status != 200:
            raise self.status_error(response)
        return response.body

    def get_blocking(
        self,
        path: str = "",
        query: Mapping[str, str] | None = None,
        accept: str = "application/json",
    ) -> bytes:
        """Like `get`, but blocks and opens a new connection. For threads without an event loop."""

        async def get() -> bytes:
            async with open_session() as session:
                return await self.get(session, path, query, accept)

        return asyncio.run(get())

    def status_error(self, response: HttpResponse) -> SourceError:
        """Returns an error with advice, for a response whose status is not 200."""
        status = response.status
        if status in (401, 403):
            text = f"{self.shown} rejected the credentials ({status}): {self._access.advice}"
            return SourceError("unauthorized", text)
        text = read_error(response.body)
        if text:
            advice = f": {text}"
        elif status >= 500:
            advice = ""
        elif status == 429:
            advice = ": too many requests"
        else:
            advice = ": is the path right? Redirects are not followed"
        return SourceError(f"http_{status}", f"{self.shown} answers {status}{advice}")

    def _explain(self, reason: str, why: str) -> SourceError:
        advice = {
            "timeout": f", within {self.timeout:g} s",
            "tls": "" if why == NO_TLS else f": {self._access.advice}",
            "unreachable": ": check that the server runs there",
        }
        return SourceError(reason, f"{self.shown}: {why}{advice.get(reason, '')}")


class _ErrorAnswer(msgspec.Struct):
    error: str


def read_error(body: bytes) -> str:
    """Returns the message of an error response of podgpu's API. Empty if there is none."""
    try:
        text = find_decoder(_ErrorAnswer).decode(body).error
    except BAD_JSON:
        return ""
    return one_line(text)[:_MAX_ERROR]


@contextmanager
def explain_errors(make_error: Callable[[str, str], SourceError]) -> Iterator[None]:
    """Converts errors of aiohttp, ssl and the operating system to errors of podgpu.

    Calls `make_error` with the reason (timeout, tls, truncated, not_http, bad_url or unreachable)
    and an explanation without secrets.
    """
    try:
        yield
    except (aiohttp.ClientError, OSError, ValueError) as error:
        reason, text = _classify(error)
        raise make_error(reason, text) from error


NO_TLS = "its answer is not TLS: if the server has no certificate, write http://"
_NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")
"""OpenSSL's reasons for an answer in plain text."""
# The first that matches. Some of aiohttp's errors belong to several of these types.
_EXPLANATIONS: Sequence[tuple[type[Exception], str, str]] = (
    (TimeoutError, "timeout", "no complete response in time"),
    (aiohttp.ClientPayloadError, "truncated", "the response is incomplete or damaged"),
    (aiohttp.ClientResponseError, "not_http", "its response is not HTTP: is the port right?"),
    (ValueError, "bad_url", "the address is invalid"),
)


def _classify(error: Exception) -> tuple[str, str]:
    """Returns the reason and the explanation of an error."""
    # aiohttp wraps errors of ssl and of the operating system.
    cause: BaseException = error
    if isinstance(error, aiohttp.ClientError):
        cause = error.__cause__ or error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return "tls", f"its certificate is not trusted: {cause.verify_message}"
    if isinstance(cause, ssl.SSLError) and cause.reason in _NOT_TLS:
        return "tls", NO_TLS
    if isinstance(cause, ssl.SSLError):
        return "tls", _first_line(str(cause.reason or cause).lower().replace("_", " "))
    for kind, reason, text in _EXPLANATIONS:
        if isinstance(error, kind):
            return reason, text
    if isinstance(cause, ConnectionRefusedError):
        return "unreachable", "nothing listens there"
    why = getattr(cause, "strerror", None) or str(error) or type(error).__name__
    return "unreachable", _first_line(why)


def _first_line(text: str) -> str:
    """Returns the first line of an error message.

    The other lines quote the request, which may contain secrets.
    """
    line, _, _ = text.partition("\n")
    return "".join(letter if letter.isprintable() else " " for letter in line)[:200]
