"""Loads certificates and keys, also renewed ones, and builds TLS contexts."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from tempfile import NamedTemporaryFile
from typing import Generic, TypeVar

from podgpu.errors import SourceError, UsageError
from podgpu.files import read_bounded

_log = logging.getLogger(__name__)
T = TypeVar("T")
MakeTlsContext = Callable[[], ssl.SSLContext]
"""Returns the TLS context of a new connection.

Called for each connection, so that renewed certificates are used.
"""
_MAX_PEM_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Pem:
    """Certificates or a key, either in a file that may be replaced at any time, or as text."""

    file: str = ""
    text: str = field(default="", repr=False)  # used if `file` is empty
    origin: str = ""  # source of the text, for messages

    def __bool__(self) -> bool:
        return bool(self.file or self.text)

    @property
    def name(self) -> str:
        return self.file or self.origin

    def read(self) -> bytes:
        if self.file:
            return read_bounded(self.file, _MAX_PEM_BYTES)
        return self.text.encode()


NO_PEM = Pem()


class LastValid(Generic[T]):
    """Reads a value at every access.

    If reading fails, logs the error once and returns the last valid value.
    """

    def __init__(self, read: Callable[[], T], consequence: str) -> None:
        """`read` may raise SourceError or UsageError. Raises UsageError if the first read fails."""
        self._read = read
        self._consequence = consequence
        self._problem = ""
        try:
            self._last = read()
        except SourceError as error:
            raise UsageError(str(error)) from error

    def get(self) -> T:
        problem = ""
        try:
            self._last = self._read()
        except (SourceError, UsageError) as error:
            problem = str(error)
            if problem != self._problem:
                _log.error("%s; %s until this is fixed", problem, self._consequence)
        self._problem = problem
        return self._last


def make_client_context(authorities: bytes | None, name: str, verify: bool) -> ssl.SSLContext:
    """Returns a context that trusts the CAs in the PEM text `authorities`.

    If it is None, the context trusts the system's CAs. Raises SourceError if the PEM is invalid.
    The message contains `name`.
    """
    text = None
    if authorities is not None:
        text = authorities.decode("ascii", "ignore")
        # Without this check, ssl would load the system's CAs.
        if not text.strip():
            raise SourceError("tls", f"{name} contains no certificates: it is empty")
    try:
        context = ssl.create_default_context(cadata=text)
    except (OSError, ValueError) as error:
        # ssl.SSLError is an OSError.
        raise SourceError("tls", f"{name} contains no usable certificates ({error})") from error
    # Since Python 3.13 the default rejects CAs without a key identifier. Older kubeadm and k3s
    # created such CAs.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def load_pair(context: ssl.SSLContext, certificate: bytes, key: bytes, names: str) -> None:
    """Loads a certificate and its key.

    Raises SourceError if they are invalid. The message begins with `names`.
    """
    try:
        with _as_file(certificate) as certificate_file, _as_file(key) as key_file:
            # Without this callback, OpenSSL would prompt for a password on the terminal.
            context.load_cert_chain(certificate_file, key_file, password=lambda: "-")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or ""
        if reason == "KEY_VALUES_MISMATCH":
            problem = f"{names} do not match: the key belongs to another certificate"
        else:
            problem = f"{names} must be a certificate and a key in PEM without a password"
            if reason:
                problem += f" ({reason.lower().replace('_', ' ')})"
        raise SourceError("tls", problem) from error


def load_authorities(context: ssl.SSLContext, authorities: bytes, name: str) -> None:
    """Loads the CAs that verify clients' certificates. Raises SourceError if they are invalid."""
    try:
        context.load_verify_locations(cadata=authorities.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as error:
        raise SourceError("tls", f"{name} contains no valid PEM certificate") from error


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """Yields the path of a file in memory, because OpenSSL reads keys only from files.

    macOS has no files in memory. There, it is a temporary file that only this user can read.
    """
    if not hasattr(os, "memfd_create"):
        with NamedTemporaryFile(prefix="podgpu-tls-") as file:
            file.write(content)
            file.flush()
            yield file.name
        return
    with open(os.memfd_create("podgpu-tls"), "wb") as memory:
        memory.write(content)
        memory.flush()
        yield f"/proc/self/fd/{memory.fileno()}"
