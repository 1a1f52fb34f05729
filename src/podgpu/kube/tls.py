"""The TLS side of a connection: whom to believe and which certificate to show. Reads files; keys never touch a disk."""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from podgpu.errors import SourceError
from podgpu.kube.access import ApiConfig, Pem
from podgpu.kube.credentials import Identity

_LARGEST_PEM = 4 * 1024 * 1024


class TlsContexts:
    """The context for an identity: made anew when the identity or a file behind it changed, else the same one."""

    def __init__(self, config: ApiConfig) -> None:
        self._config = config
        self._made_from: tuple[str, str, str] | None = None
        self._context: ssl.SSLContext | None = None

    def context(self, identity: Identity) -> ssl.SSLContext:
        authority = _read(self._config.ca, self._config)
        certificate, key = identity.certificate, identity.key
        if not certificate:
            certificate, key = _read(self._config.certificate, self._config), _read(self._config.key, self._config)
        material = authority, certificate, key
        if self._context is None or material != self._made_from:
            self._context = _make(self._config, authority, certificate, key)
            self._made_from = material
        return self._context


def _make(config: ApiConfig, authority: str, certificate: str, key: str) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cadata=authority or None)
    except (ssl.SSLError, ValueError, TypeError) as error:
        raise _bad(config.ca.file or config.origin, "the certificate authority is not a PEM certificate") from error
    # Python 3.13 began to refuse authorities without a key identifier; older kubeadm and k3s made such ones.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not config.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if certificate:
        try:
            with _as_file(f"{certificate}\n{key}\n") as path:
                # With a password of our own, OpenSSL does not ask for one at the terminal.
                context.load_cert_chain(path, password=lambda: "-")
        except (ssl.SSLError, OSError, ValueError) as error:
            where = config.certificate.file or config.origin
            raise _bad(where, "the client certificate and its key cannot be used together, or are no PEM") from error
    return context


def _read(pem: Pem, config: ApiConfig) -> str:
    if not pem.file:
        return pem.text
    try:
        with open(pem.file, encoding="ascii") as file:
            return file.read(_LARGEST_PEM)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is no PEM text"
        raise SourceError("tls", f"cannot read {pem.file}, which {config.origin} names: {why}") from error


@contextmanager
def _as_file(text: str) -> Iterator[str]:
    """OpenSSL takes keys from files only. On Linux this one is memory with a name, elsewhere it is gone at once."""
    if hasattr(os, "memfd_create"):
        with open(os.memfd_create("podgpu-key"), "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            yield f"/proc/self/fd/{file.fileno()}"
    else:
        with tempfile.NamedTemporaryFile("w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            yield file.name


def _bad(where: str, problem: str) -> SourceError:
    return SourceError("tls", f"{where}: {problem}: see what podgpu was told to read there")
