"""This module owns what TLS is made of, for both sides: certificates, keys and authorities, and the contexts made of
them.

A private key never touches a disk: OpenSSL takes keys from files only, and is given memory that has a name.
"""

from __future__ import annotations

import os
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from podgpu.errors import SourceError
from podgpu.files import read_bounded

_LARGEST_PEM = 4 * 1024 * 1024
"""Of authorities, too: the whole world's are a quarter of a megabyte."""
_WHERE_AUTHORITIES_ARE = ("SSL_CERT_FILE", "SSL_CERT_DIR")
"""OpenSSL's variables, which come before the places it was built with."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pem:
    """Certificates or a key: in a file, which may be replaced at any time, or given outright, or none."""

    file: str = ""
    """Where it is empty the text counts."""
    text: str = field(default="", repr=False)
    origin: str = ""
    """What holds the text, for complaints."""

    def __bool__(self) -> bool:
        return bool(self.file or self.text)

    @property
    def name(self) -> str:
        return self.file or self.origin

    def read(self) -> bytes:
        """Raises SourceError."""
        return read_bounded(self.file, _LARGEST_PEM) if self.file else self.text.encode()


NO_PEM = Pem()


class KeptContext(Generic[T]):
    """The context made of some material: the same one until the material is another. From any thread."""

    def __init__(self, make: Callable[[T], ssl.SSLContext]) -> None:
        self._make = make
        self._kept: tuple[T, ssl.SSLContext] | None = None
        self._making = threading.Lock()

    def of(self, material: T) -> ssl.SSLContext:
        """Loading authorities takes milliseconds, and a megabyte: a thousand that ask at once make one."""
        with self._making:
            if self._kept is None or self._kept[0] != material:
                self._kept = material, self._make(material)
            return self._kept[1]

    @property
    def is_made(self) -> bool:
        return self._kept is not None


@contextmanager
def without_authorities() -> Iterator[None]:
    """Around an import that makes a context with all of the system's authorities, and keeps it: 2 MiB and 20 ms."""
    before = {name: os.environ.get(name) for name in _WHERE_AUTHORITIES_ARE}
    os.environ.update(dict.fromkeys(_WHERE_AUTHORITIES_ARE, os.devnull))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def client_context(authorities: bytes | None, name: str, verify: bool = True) -> ssl.SSLContext:
    """For whoever asks. `authorities`: None for the system's; `name`: where they were read. Raises SourceError."""
    text = None if authorities is None else authorities.decode("ascii", "ignore")
    if text is not None and not text.strip():  # to ssl that means: the system's
        raise SourceError("tls", f"{name} has no certificates in it: it is empty")
    try:
        context = ssl.create_default_context(cadata=text)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise SourceError("tls", f"{name} has no certificates in it ({error})") from error
    # Python 3.13 began to refuse authorities without a key identifier; older kubeadm and k3s made such ones.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def load_pair(context: ssl.SSLContext, certificate: bytes, key: bytes, names: str) -> None:
    """What to show to the other side. `names`: of the two, for the message. Raises SourceError."""
    try:
        with _as_file(certificate) as certificate_file, _as_file(key) as key_file:
            # With a password of our own, OpenSSL does not ask for one at the terminal.
            context.load_cert_chain(certificate_file, key_file, password=lambda: "-")
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or ""
        if reason == "KEY_VALUES_MISMATCH":
            problem = f"{names} do not belong together: the key is another certificate's"
            raise SourceError("tls", problem) from error
        why = f" ({reason.lower().replace('_', ' ')})" if reason else ""
        problem = f"{names} are not a certificate and key in PEM, without a password, that OpenSSL reads{why}"
        raise SourceError("tls", problem) from error


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """On Linux this file is memory, elsewhere it is gone at once."""
    if hasattr(os, "memfd_create"):
        with open(os.memfd_create("podgpu-tls"), "wb") as memory:
            memory.write(content)
            memory.flush()
            yield f"/proc/self/fd/{memory.fileno()}"
    else:
        with tempfile.NamedTemporaryFile("wb") as file:
            file.write(content)
            file.flush()
            yield file.name
