"""This module makes the TLS context of the metrics API's listener: a certificate to show, and the authorities of
clients.

Both may change while it runs: files are replaced, podgpu's own certificate is renewed, the API server changes its CAs.
A client that shows no certificate is let in and has to show a token; one whose certificate is of none of the
authorities gets a failed handshake, as Python's TLS cannot put that off: it can do without a certificate instead.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import NamedTuple

from podgpu.autoscale.front_proxy import Trust
from podgpu.autoscale.x509 import Issued
from podgpu.errors import SourceError, UsageError
from podgpu.tls import ContextCache, Pem, load_pair
from podgpu.web.web_config import ProblemLog


class Material(NamedTuple):
    certificate: bytes
    key: bytes
    names: str
    """Of the two, for messages."""
    authorities: str = ""


ReadPair = Callable[[], Material]
"""What to show, without authorities. Raises SourceError."""


def pair_of_files(certificate: Pem, key: Pem) -> ReadPair:
    """Read at every new connection: whoever replaces them need tell nobody."""
    return lambda: Material(certificate.read(), key.read(), f"{certificate.name} and {key.name}")


def pair_of_own(issued: Callable[[], Issued]) -> ReadPair:
    def read() -> Material:
        now = issued()
        return Material(now.certificate.encode(), now.key.encode(), "podgpu's own certificate and key")

    return read


def make_context(material: Material) -> ssl.SSLContext:
    """Raises SourceError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    # A resumed session has no verified chain to tell a front proxy by: every connection shakes hands in full.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    load_pair(context, material.certificate, material.key, material.names)
    if material.authorities:
        context.verify_mode = ssl.CERT_OPTIONAL
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as in Go: an intermediate may be the authority
        try:
            context.load_verify_locations(cadata=material.authorities)
        except (ssl.SSLError, ValueError) as error:
            raise SourceError("tls", "the API server's authorities cannot be read by OpenSSL") from error
    return context


class ApiContexts:
    """The context of the moment: the same one while nothing changed, the last good one while nothing good comes."""

    def __init__(self, read_pair: ReadPair, trust: Callable[[], Trust]) -> None:
        """Raises UsageError where there is nothing to begin with."""
        self._read_pair = read_pair
        self._trust = trust
        self._kept = ContextCache(make_context)
        self._complaint = ProblemLog("the metrics API goes on with the certificate and the authorities it had")
        try:
            self._last = self._make()
        except SourceError as error:
            raise UsageError(str(error)) from error

    def _make(self) -> ssl.SSLContext:
        return self._kept.get(self._read_pair()._replace(authorities=self._trust().authorities))

    def now(self) -> ssl.SSLContext:
        try:
            self._last = self._make()
        except SourceError as error:
            self._complaint.report(str(error))
        else:
            self._complaint.clear()
        return self._last
