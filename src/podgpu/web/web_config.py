"""Parses and validates the web config file, in the format of Prometheus' exporter-toolkit.

Settings that podgpu does not support are errors. The exception is http2, which is accepted and ignored.
"""

from __future__ import annotations

import logging
import os
import re
import ssl
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Generic, TypeVar

import msgspec

from podgpu.clock import parse_duration
from podgpu.decode import decode_yaml
from podgpu.errors import SourceError, UsageError
from podgpu.tls import Pem

T = TypeVar("T")
_BCRYPT_HASH = re.compile(r"\$2[aby]\$(0[4-9]|[12][0-9]|3[01])\$[./A-Za-z0-9]{53}")
_HEADERS: Mapping[str, tuple[str, ...]] = {
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
    "Content-Security-Policy": (),
}
"""Headers that may be set, with their allowed values. An empty tuple allows any value."""
_log = logging.getLogger(__name__)
CLIENT_AUTH = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
"""Policies for client certificates. Two of Go's policies are missing, because they accept unverified certificates."""
VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
TLS13_CIPHERS = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
"""Names of TLS 1.3 ciphers. They are accepted but ignored, because TLS 1.3 ciphers cannot be selected."""
CIPHERS = {
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
    "TLS_RSA_WITH_AES_128_GCM_SHA256": "AES128-GCM-SHA256",
    "TLS_RSA_WITH_AES_256_GCM_SHA384": "AES256-GCM-SHA384",
    "TLS_RSA_WITH_AES_128_CBC_SHA": "AES128-SHA",
    "TLS_RSA_WITH_AES_256_CBC_SHA": "AES256-SHA",
}
"""Maps Go's cipher names to OpenSSL's."""
CURVES = {"CurveP256": "prime256v1", "CurveP384": "secp384r1", "CurveP521": "secp521r1", "X25519": "X25519"}


class TlsConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    cert_file: str | None = None
    key_file: str | None = None
    client_ca_file: str | None = None
    cert: str | None = None  # PEM text; used if there is no file
    key: str | None = None
    client_ca: str | None = None
    client_auth_type: str | None = None
    client_allowed_sans: list[str] | None = None
    min_version: str | None = None
    max_version: str | None = None
    cipher_suites: list[str] | None = None
    prefer_server_cipher_suites: bool | None = None
    curve_preferences: list[str] | None = None  # Python can set only one curve, so a longer list is ignored

    def __post_init__(self) -> None:
        _check_name("client_auth_type", self.client_auth_type, CLIENT_AUTH)
        _check_name("min_version", self.min_version, VERSIONS)
        _check_name("max_version", self.max_version, VERSIONS)
        for name in self.cipher_suites or ():
            _check_name("cipher_suites", name, (*CIPHERS, *TLS13_CIPHERS))
        for name in self.curve_preferences or ():
            _check_name("curve_preferences", name, CURVES)
        lowest, highest = self.versions
        if lowest > highest:
            raise ValueError("max_version is below min_version, or cipher_suites has no cipher for max_version")
        if self.is_enabled and not ((self.cert_file or self.cert) and (self.key_file or self.key)):
            raise ValueError("needs a certificate (cert_file or cert) and a key (key_file or key)")
        if self.verify_mode is ssl.CERT_NONE and (self.client_ca_file or self.client_ca or self.client_allowed_sans):
            raise ValueError("client_ca and client_allowed_sans have no effect without client_auth_type")

    @property
    def is_enabled(self) -> bool:
        pems = (self.cert_file, self.key_file, self.client_ca_file, self.cert, self.key, self.client_ca)
        return any(pems) or bool(self.client_auth_type)

    def read_pems(self, path: str) -> tuple[bytes, bytes, bytes]:
        """Reads certificate, key and client CAs. Paths are relative to the web config file `path`."""
        folder = os.path.dirname(os.path.abspath(path))
        pairs = ((self.cert_file, self.cert), (self.key_file, self.key), (self.client_ca_file, self.client_ca))
        pems = (Pem(os.path.join(folder, file) if file else "", text or "") for file, text in pairs)
        certificate, key, authorities = (pem.read() for pem in pems)
        return certificate, key, authorities

    @property
    def verify_mode(self) -> ssl.VerifyMode:
        return CLIENT_AUTH[self.client_auth_type or "NoClientCert"]

    @property
    def ciphers(self) -> list[str]:
        """OpenSSL's names of the TLS 1.2 ciphers. Empty for OpenSSL's default."""
        return [CIPHERS[name] for name in self.cipher_suites or () if name in CIPHERS]

    @property
    def versions(self) -> tuple[ssl.TLSVersion, ssl.TLSVersion]:
        """Minimum and maximum version. As in Go, TLS 1.2 is disabled if `cipher_suites` has no cipher for it."""
        has_no_tls12 = bool(self.cipher_suites) and not self.ciphers
        lowest = "TLS13" if has_no_tls12 else self.min_version or "TLS12"
        return VERSIONS[lowest], VERSIONS[self.max_version or "TLS13"]


class HttpConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    http2: bool | None = None
    headers: dict[str, str] | None = None

    def __post_init__(self) -> None:
        for name, value in (self.headers or {}).items():
            _check_name("headers", name, _HEADERS)
            if _HEADERS[name] and value not in _HEADERS[name]:
                raise ValueError(f"headers: {name} must be {' or '.join(_HEADERS[name])}")
            if not value.isprintable():
                raise ValueError(f"headers: {name} has a character that is not allowed, such as a line break")


class RateLimitConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    interval: str | None = None
    burst: Annotated[int, msgspec.Meta(ge=0)] | None = None

    def __post_init__(self) -> None:
        if parse_duration(self.interval or "0") is None:
            raise ValueError("interval must be a duration, such as 1s, 100ms or 1m30s")

    @property
    def seconds(self) -> float:
        return parse_duration(self.interval or "0") or 0.0


class WebConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    tls_server_config: TlsConfig | None = None
    http_server_config: HttpConfig | None = None
    basic_auth_users: dict[str, str] | None = None
    rate_limit: RateLimitConfig | None = None

    def __post_init__(self) -> None:
        for name, value in self.users.items():
            if not _BCRYPT_HASH.fullmatch(value):
                advice = "create one with htpasswd -nBC 10 USER"
                raise ValueError(f"basic_auth_users: the password of {name[:60]!r} is not a bcrypt hash ({advice})")

    @property
    def tls(self) -> TlsConfig | None:
        """The TLS section, or None for plain HTTP."""
        section = self.tls_server_config
        return section if section is not None and section.is_enabled else None

    @property
    def headers(self) -> Mapping[str, str]:
        return (self.http_server_config and self.http_server_config.headers) or {}

    @property
    def users(self) -> Mapping[str, str]:
        return self.basic_auth_users or {}


def _check_name(key: str, name: str | None, supported: Iterable[str]) -> None:
    if name and name not in supported:
        raise ValueError(f"{key}: {name[:60]!r} is not supported; supported are {', '.join(supported)}")


def parse_web_config(content: bytes, file: str) -> WebConfig:
    """Parses the file. Raises UsageError with the file name and the invalid key."""
    return decode_yaml(content, file, WebConfig)


class LastValid(Generic[T]):
    """Reads a value at every access. If reading fails, logs the error once and returns the last valid value."""

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
