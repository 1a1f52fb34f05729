"""An exporter's page over HTTP: bounded in size, and in time by whoever calls. Foreign errors become ours here."""

from __future__ import annotations

import base64
import http.client
import socket
import ssl
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from podgpu import __version__
from podgpu.errors import SourceError, UsageError
from podgpu.exposition.parse import BadExposition, parse_text
from podgpu.figures.device import View
from podgpu.figures.from_page import view_of_page

LARGEST_PAGE = 64 * 1024 * 1024
DEADLINE = 5.0
"""Seconds for one page: of each wait for the network here, of the whole page in `feed.py`."""
_PIECE = 256 * 1024
_ADVICE = {
    401: "it wants a login: write http://USER:PASSWORD@HOST:PORT/metrics",
    403: "the login may not read it",
    404: "exporters have it at /metrics",
    503: "it is not ready, or its figures are too old",
}


class PageSource:
    deadline = DEADLINE

    def __init__(self, url: str, largest: int = LARGEST_PAGE) -> None:
        """Raises UsageError for what is no URL of a page. A URL without a path means /metrics."""
        parts = _split(url)
        host = parts.netloc.rpartition("@")[2]
        self.name = parts._replace(netloc=host, path=parts.path or "/metrics", fragment="").geturl()
        self._request = urllib.request.Request(self.name, headers={"User-Agent": f"podgpu/{__version__}"})
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            # Not to be sent on to wherever a redirection points.
            self._request.add_unredirected_header("Authorization", f"Basic {base64.b64encode(login).decode()}")
        self._largest = largest

    def read(self) -> View:
        """Raises SourceError."""
        text = self._fetch_text()
        try:
            families = parse_text(text)
        except BadExposition as e:
            raise SourceError(e.reason, f"{self.name} is no page of metrics: {e}") from e
        view = view_of_page(families)
        if not view.devices:
            why = "; ".join(view.notes) or "is it a GPU exporter?"
            raise SourceError("no_gpu", f"{self.name} has no GPU on its page: {why}")
        return view

    def close(self) -> None:
        """Nothing stays open between readings."""

    def _fetch_text(self) -> str:
        try:
            with urllib.request.urlopen(self._request, timeout=DEADLINE) as response:
                body = self._read_whole(response)
                kind = response.headers.get_content_type()
        except urllib.error.HTTPError as e:
            with e:
                raise self._refused(e.code, e.reason) from e
        except (OSError, http.client.HTTPException, ValueError) as e:
            raise SourceError("unreachable", f"{self.name}: {_explain(e)}") from e
        if kind == "text/html" or body[:256].lstrip().startswith(b"<"):
            raise SourceError("malformed", f"{self.name} answers with a web page, not with metrics: try /metrics")
        try:
            return body.decode()
        except UnicodeDecodeError as e:
            raise SourceError("malformed", f"{self.name} is no page of metrics: byte {e.start} is no UTF-8") from e

    def _read_whole(self, response: Any) -> bytes:
        body = bytearray()
        while piece := response.read1(_PIECE):
            body += piece
            if len(body) > self._largest:
                raise SourceError("too_large", f"{self.name} is larger than the {self._largest} bytes podgpu reads")
        announced = response.headers.get("Content-Length", "")
        if announced.isdecimal() and len(body) < int(announced):
            raise SourceError("truncated", f"{self.name} broke off after {len(body)} of {announced} bytes")
        return bytes(body)

    def _refused(self, status: int, reason: str) -> SourceError:
        advice = _ADVICE.get(status)
        said = f"{self.name} answers {status} {reason}".rstrip()
        return SourceError(f"http_{status}", f"{said}: {advice}" if advice else said)


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or not url.isprintable() or " " in url:
        raise UsageError(f"--url {url!r}: write http://HOST:PORT/metrics")
    return parts


def _explain(error: Exception) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        return f"no answer within {DEADLINE:.0f} s"
    if isinstance(cause, ConnectionRefusedError):
        return "nothing listens there"
    if isinstance(cause, socket.gaierror):
        return "there is no host of this name"
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({cause.verify_message}): name its CA in the variable SSL_CERT_FILE"
    if isinstance(cause, http.client.IncompleteRead):
        return "the page broke off"
    if isinstance(cause, http.client.HTTPException):
        return f"no HTTP answer ({type(cause).__name__}): is the port right?"
    return str(getattr(cause, "strerror", None) or cause)
