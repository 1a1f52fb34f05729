"""This module owns the server's side of TLS: a context made of the web config, and made anew when it or a file behind
it changed.

It reads the certificate, the key and the client authorities at every new connection, and not on the event loop.
"""

from __future__ import annotations

import ipaddress
import logging
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from podgpu.errors import SourceError, UsageError
from podgpu.tls import KeptContext, load_pair
from podgpu.web.web_config import ClientAuth, Complaint, TlsSettings, WebConfig

_log = logging.getLogger(__name__)

# asyncio gives every TLS connection a buffer of 256 KiB to read into; 256 of them would take what the chart allows us.
# Requests are of a few hundred bytes.
SSLProtocol.max_size = 16 * 1024


# The client's name


class _NamedPeer(ssl.SSLObject):
    """Ends the handshake of a client whose certificate has none of the allowed names."""

    def do_handshake(self) -> None:
        super().do_handshake()
        context = self.context
        allowed = context.allowed_sans if isinstance(context, _ServerContext) else frozenset()
        if allowed and not allowed & subject_names(self.getpeercert() or {}):
            raise ssl.SSLCertVerificationError("the client's certificate has none of the allowed names")


class _ServerContext(ssl.SSLContext):
    sslobject_class = _NamedPeer
    allowed_sans: frozenset[str] = frozenset()


def subject_names(certificate: dict[str, Any]) -> frozenset[str]:
    """Its DNS, e-mail, IP and URI alternative names, as Go writes them."""
    names = [(kind, value) for kind, value in certificate.get("subjectAltName", ()) if isinstance(value, str)]
    plain = {value for kind, value in names if kind in ("DNS", "email", "URI")}
    return frozenset(plain | {_as_go_writes(value) for kind, value in names if kind == "IP Address"})


def _as_go_writes(address: str) -> str:
    """OpenSSL writes ::1 as 0:0:0:0:0:0:0:1."""
    try:
        parsed = ipaddress.ip_address(address.strip())
    except ValueError:
        return address
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


# One context


@dataclass(frozen=True, slots=True)
class Material:
    """The settings and the PEM texts of one moment."""

    settings: TlsSettings
    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)
    client_ca: bytes


def read_material(settings: TlsSettings) -> Material:
    """Raises SourceError."""
    authorities = settings.client_ca.read() if settings.client_ca else b""
    return Material(settings, settings.certificate.read(), settings.key.read(), authorities)


def make_context(material: Material) -> ssl.SSLContext:
    settings = material.settings
    context = _ServerContext(ssl.PROTOCOL_TLS_SERVER)
    context.allowed_sans = settings.allowed_sans
    context.set_alpn_protocols(["http/1.1"])
    _set_versions_and_ciphers(context, settings)
    _set_curve(context, settings)
    names = f"{settings.certificate.name} and {settings.key.name}"
    load_pair(context, material.certificate, material.key, names)
    _ask_clients(context, material)
    return context


def _set_versions_and_ciphers(context: ssl.SSLContext, settings: TlsSettings) -> None:
    context.minimum_version = settings.min_version
    context.maximum_version = settings.max_version
    if not settings.ciphers:
        return
    try:
        context.set_ciphers(":".join(settings.ciphers))
    except ssl.SSLError:
        raise _bad(settings, "cipher_suites", "this machine's OpenSSL has none of them") from None


def _set_curve(context: ssl.SSLContext, settings: TlsSettings) -> None:
    """Python's ssl can name one curve. Of several, leaving it to OpenSSL shuts nobody out; `protect` says so."""
    if len(settings.curves) != 1:
        return
    try:
        context.set_ecdh_curve(settings.curves[0])
    except (ValueError, ssl.SSLError):
        raise _bad(settings, "curve_preferences", "this machine's OpenSSL does not have it") from None


def _bad(settings: TlsSettings, key: str, problem: str) -> UsageError:
    return UsageError(f"{settings.origin}: tls_server_config.{key}: {problem}")


def _ask_clients(context: ssl.SSLContext, material: Material) -> None:
    policy = material.settings.client_auth
    if policy is ClientAuth.NONE:
        return
    context.verify_mode = ssl.CERT_REQUIRED if policy is ClientAuth.REQUIRE_AND_VERIFY else ssl.CERT_OPTIONAL
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as in Go: an intermediate may be the authority
    _load_authorities(context, material)


def _load_authorities(context: ssl.SSLContext, material: Material) -> None:
    pem = material.settings.client_ca
    if pem is None:
        context.load_default_certs(ssl.Purpose.CLIENT_AUTH)  # as in Go: then it is the system's
        return
    try:
        context.load_verify_locations(cadata=material.client_ca.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as error:
        raise UsageError(f"{pem.name}: no certificates in PEM that OpenSSL takes") from error


# Every connection


class Contexts:
    """The context of the moment: the same one while nothing changed."""

    def __init__(self, current: Callable[[], WebConfig | None]) -> None:
        self._current = current
        self._kept = KeptContext(make_context)
        self._complaint = Complaint("TLS handshakes fail")
        self._refusing = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        """Has no certificate, so that every handshake ends with an alert."""

    def make(self, settings: TlsSettings) -> ssl.SSLContext:
        """Raises UsageError."""
        try:
            return self._kept.of(read_material(settings))
        except SourceError as error:
            raise UsageError(str(error)) from error

    def now(self) -> ssl.SSLContext:
        config = self._current()
        if config is None:
            return self._refusing
        if config.tls is None:
            self._complaint.say("the web config has no TLS any more, and turning it off takes a restart")
            return self._refusing
        try:
            context = self.make(config.tls)
        except UsageError as error:
            self._complaint.say(str(error))
            return self._refusing
        self._complaint.is_over()
        return context
