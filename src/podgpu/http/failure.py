"""This module says once, in plain words, why a question over HTTP got no answer, or half of one. Pure.

Those who ask put their advice behind it: which option, which field of a kubeconfig. What is said holds no header and no
URL, so no secret either.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import NamedTuple

import aiohttp

from podgpu.errors import SourceError


class Kind(Enum):
    TIMEOUT = auto()
    UNTRUSTED = auto()
    """The certificate comes from nobody we were told to believe."""
    MISNAMED = auto()
    """The certificate is another host's."""
    OUT_OF_DATE = auto()
    """The certificate has expired, or is not valid yet."""
    TLS = auto()
    """TLS failed over something else."""
    UNREACHABLE = auto()
    NO_HTTP = auto()
    NO_URL = auto()
    CUT_SHORT = auto()


class Failure(NamedTuple):
    kind: Kind
    why: str
    """What happened, for a person: part of a sentence, on one line."""

    @property
    def is_tls(self) -> bool:
        return self.kind in (Kind.UNTRUSTED, Kind.MISNAMED, Kind.OUT_OF_DATE, Kind.TLS)


_STRANGER = Failure(Kind.UNTRUSTED, "its certificate is signed by a CA that podgpu does not trust")
_CERTIFICATES = {
    9: Failure(Kind.OUT_OF_DATE, "its certificate is not valid yet: compare the clocks of both machines"),
    10: Failure(Kind.OUT_OF_DATE, "its certificate has expired: renew it, or compare the clocks of both machines"),
    18: Failure(Kind.UNTRUSTED, "its certificate is self-signed, and podgpu does not trust it"),
    19: _STRANGER,
    20: _STRANGER,
    62: Failure(Kind.MISNAMED, "its certificate is for another name"),
    64: Failure(Kind.MISNAMED, "its certificate is for another address"),
}
"""By OpenSSL's verify codes."""
_LONGEST_CHAIN = 10
"""Of errors that led to one another."""


@contextmanager
def explained(say: Callable[[Failure], SourceError]) -> Iterator[None]:
    """What aiohttp, ssl and the system raise becomes what `say` makes of it. Errors of podgpu's own pass."""
    try:
        yield
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise say(explain(_alone(error))) from error


def _alone(error: Exception) -> Exception:
    """Without the functions it came through and what they had in hand. With them, each connection that fails would
    leave eighty objects in a circle, a socket among them; of thousands of exporters that are away, those are seconds of
    looking for garbage, in which nothing else runs."""
    found: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if found is None:
            break
        found.__traceback__ = None
        found = found.__cause__ or found.__context__
    return error


def explain(error: Exception) -> Failure:
    tls = _tls_error(error)
    if isinstance(tls, ssl.SSLCertVerificationError):
        unknown = Failure(Kind.UNTRUSTED, f"its certificate cannot be verified: {tls.verify_message}")
        return _CERTIFICATES.get(tls.verify_code, unknown)
    if tls is not None:
        return Failure(Kind.TLS, _one_line(str(tls.reason or tls).lower().replace("_", " ")))
    if isinstance(error, TimeoutError):
        return Failure(Kind.TIMEOUT, "no whole answer in time")
    if isinstance(error, aiohttp.ClientPayloadError):
        return Failure(Kind.CUT_SHORT, "the answer ended too early")
    if isinstance(error, aiohttp.ClientResponseError):
        return Failure(Kind.NO_HTTP, "its answer is not HTTP: is the port right?")
    return _unreachable(error)


def _unreachable(error: Exception) -> Failure:
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(cause, ConnectionRefusedError):
        return Failure(Kind.UNREACHABLE, "nothing listens there")
    if isinstance(cause, socket.gaierror):
        return Failure(Kind.UNREACHABLE, "there is no host of this name")
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return Failure(Kind.UNREACHABLE, "it closed the connection without an answer")
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
        return Failure(Kind.UNREACHABLE, os.strerror(cause.errno))  # asyncio's text tells the address instead
    if isinstance(error, ValueError):
        return Failure(Kind.NO_URL, "it is not an address")  # its own text may be the whole URL
    return Failure(Kind.UNREACHABLE, _one_line(str(error)) or type(error).__name__)


def _tls_error(error: BaseException) -> ssl.SSLError | None:
    """The TLS error in an exception of aiohttp, which keeps it in one of several places.

    aiohttp's own exceptions are named ssl errors too, but lack what an ssl error knows.
    """
    kept = (error, getattr(error, "certificate_error", None), getattr(error, "os_error", None), error.__cause__)
    for found in kept:
        if isinstance(found, ssl.SSLError) and not isinstance(found, aiohttp.ClientError):
            return found
    return None


def _one_line(text: str) -> str:
    """An error may quote the request behind its first line."""
    return " ".join("".join(c if c.isprintable() else " " for c in text.partition("\n")[0]).split())[:200]
