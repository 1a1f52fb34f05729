"""This module makes gRPC's credentials for a listener that asks its callers for certificates, read anew when the files
change.

A certificate and a key that do not belong together (one of them is replaced before the other) change nothing: the last
good ones stay in use, and the log says why.
"""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc

from podgpu.errors import SourceError, UsageError
from podgpu.tls import Pem, load_pair
from podgpu.web.web_config import ProblemLog

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScalerFiles:
    certificate: Pem
    key: Pem
    client_ca: Pem


class _Material(NamedTuple):
    certificate: bytes
    key: bytes
    client_ca: bytes


class ScalerTls:
    """The files as they last were good."""

    def __init__(self, files: ScalerFiles) -> None:
        """Raises UsageError where they cannot be used."""
        self._files = files
        self._complaint = ProblemLog("KEDA's listener goes on with the certificates it had")
        try:
            self._last = self._read()
        except SourceError as error:
            raise UsageError(str(error)) from error

    def credentials(self) -> Any:
        """Those without a certificate of the given authority are not let in."""
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._last), self._changed, require_client_authentication=True
        )

    def _changed(self) -> Any:
        """Called by gRPC at every handshake, in a thread of its own; None: as before."""
        try:
            found = self._read()
        except SourceError as error:
            self._complaint.report(str(error))
            return None
        self._complaint.clear()
        if found == self._last:
            return None
        self._last = found
        _log.info("%s was replaced: new connections get it", self._files.certificate.name)
        return _configuration(found)

    def _read(self) -> _Material:
        """Raises SourceError."""
        files = self._files
        found = _Material(files.certificate.read(), files.key.read(), files.client_ca.read())
        names = f"{files.certificate.name} and {files.key.name}"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        load_pair(context, found.certificate, found.key, names)
        try:
            context.load_verify_locations(cadata=found.client_ca.decode("ascii", "ignore"))
        except (ssl.SSLError, ValueError) as error:
            raise SourceError("tls", f"{files.client_ca.name}: no certificates in PEM that OpenSSL takes") from error
        return found


def _configuration(material: _Material) -> Any:
    return grpc.ssl_server_certificate_configuration([(material.key, material.certificate)], material.client_ca)
