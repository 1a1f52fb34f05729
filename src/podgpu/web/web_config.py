"""The web config file of Prometheus' exporter-toolkit: parsing and checks.

Settings that podgpu does not support are refused, unless clients would not notice (http2).
"""

from __future__ import annotations

import logging
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

import msgspec
import yaml

from podgpu.errors import UsageError, one_line
from podgpu.tls import Pem

T = TypeVar("T")
_BCRYPT_HASH = re.compile(r"\$2[aby]\$(0[4-9]|[12][0-9]|3[01])\$[./A-Za-z0-9]{53}")
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_UNIT_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_HEADERS: Mapping[str, tuple[str, ...]] = {
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
    "Content-Security-Policy": (),
}
"""Headers that may be set, with their allowed values; empty: any value."""
_log = logging.getLogger(__name__)


class ClientAuth(Enum):
    """Go's policies, without those that accept unverified certificates."""

    NONE = "NoClientCert"
    VERIFY_IF_GIVEN = "VerifyClientCertIfGiven"
    REQUIRE_AND_VERIFY = "RequireAndVerifyClientCert"


CLIENT_AUTH = {policy.value: policy for policy in ClientAuth}
VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
TLS13_CIPHERS = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
"""Always enabled: neither Go nor Python can select them."""
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
    # Go disables these four by default since 1.22. Older files may name them.
    "TLS_RSA_WITH_AES_128_GCM_SHA256": "AES128-GCM-SHA256",
    "TLS_RSA_WITH_AES_256_GCM_SHA384": "AES256-GCM-SHA384",
    "TLS_RSA_WITH_AES_128_CBC_SHA": "AES128-SHA",
    "TLS_RSA_WITH_AES_256_CBC_SHA": "AES256-SHA",
}
"""OpenSSL's names by Go's names."""
CURVES = {"CurveP256": "prime256v1", "CurveP384": "secp384r1", "CurveP521": "secp521r1", "X25519": "X25519"}


# The file


class TlsSection(msgspec.Struct, forbid_unknown_fields=True):
    cert_file: str | None = None
    key_file: str | None = None
    cert: str | None = None
    key: str | None = None
    client_ca_file: str | None = None
    client_ca: str | None = None
    client_auth_type: str | None = None
    client_allowed_sans: list[str] | None = None
    min_version: str | None = None
    max_version: str | None = None
    cipher_suites: list[str] | None = None
    prefer_server_cipher_suites: bool | None = None
    curve_preferences: list[str] | None = None

    @property
    def is_enabled(self) -> bool:
        files = self.cert_file or self.key_file or self.client_ca_file
        return bool(files or self.cert or self.key or self.client_ca or self.client_auth_type)


class HttpSection(msgspec.Struct, forbid_unknown_fields=True):
    http2: bool | None = None
    headers: dict[str, str | None] | None = None


class RateLimitSection(msgspec.Struct, forbid_unknown_fields=True):
    interval: str | int | None = None
    burst: int | None = None


class WebConfigDocument(msgspec.Struct, forbid_unknown_fields=True):
    tls_server_config: TlsSection | None = None
    http_server_config: HttpSection | None = None
    basic_auth_users: dict[str, str] | None = None
    rate_limit: RateLimitSection | None = None


class _UniqueKeyLoader(yaml.CSafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} is there twice", node.start_mark)
        return super().construct_mapping(node, deep)


# The settings


@dataclass(frozen=True, slots=True)
class TlsSettings:
    certificate: Pem
    key: Pem
    client_ca: Pem | None = None
    client_auth: ClientAuth = ClientAuth.NONE
    allowed_sans: frozenset[str] = frozenset()
    """Empty: any name is allowed."""
    min_version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2
    max_version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
    ciphers: tuple[str, ...] = ()
    """OpenSSL's names, for TLS 1.2. Empty: OpenSSL's default."""
    curves: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WebConfig:
    tls: TlsSettings | None
    """None: plain HTTP."""
    headers: Mapping[str, str]
    users: Mapping[str, str] = field(repr=False)
    """bcrypt hashes by name. Empty: no authentication."""
    rate_interval: float = 0.0
    """Seconds per request; 0: no rate limit."""
    rate_burst: int = 0
    has_unused_tls_keys: bool = False
    """TLS versions or ciphers are set, but no key that enables TLS."""


def parse_web_config(content: bytes, file: str) -> WebConfig:
    """Raises UsageError that names the file and the key. Messages contain no values, which may be secrets."""
    document = _decode(content, file)
    tls = document.tls_server_config or TlsSection()
    http = document.http_server_config or HttpSection()
    rate = document.rate_limit or RateLimitSection()
    try:
        settings = _parse_tls(tls, file)
        return WebConfig(
            tls=settings if tls.is_enabled else None,
            headers=_check_headers(http.headers or {}),
            users=_check_users(document.basic_auth_users or {}),
            rate_interval=_parse_duration(str(rate.interval or "")),
            rate_burst=_check_burst(rate.burst or 0),
            has_unused_tls_keys=not tls.is_enabled and tls != TlsSection(),
        )
    except ValueError as error:
        raise UsageError(f"{file}: {error}") from None


def _decode(content: bytes, file: str) -> WebConfigDocument:
    try:
        tree = yaml.load(content.decode("utf-8-sig"), _UniqueKeyLoader)
        return msgspec.convert({} if tree is None else tree, WebConfigDocument)
    except msgspec.ValidationError as error:
        raise UsageError(f"{file}: {one_line(str(error)).replace('$.', '')}") from None
    except yaml.MarkedYAMLError as error:  # str(error) would quote the line
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise UsageError(f"{file}: {line}not valid YAML: {one_line(error.problem or '')}") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise UsageError(f"{file}: not valid YAML in UTF-8") from None


def _parse_tls(section: TlsSection, file: str) -> TlsSettings | None:
    client_auth = _choose("client_auth_type", section.client_auth_type or "NoClientCert", CLIENT_AUTH)
    min_version = _choose("min_version", section.min_version or "TLS12", VERSIONS)
    max_version = _choose("max_version", section.max_version or "TLS13", VERSIONS)
    known = CIPHERS | dict.fromkeys(TLS13_CIPHERS, "")
    ciphers = tuple(filter(None, (_choose("cipher_suites", name, known) for name in section.cipher_suites or ())))
    if section.cipher_suites and not ciphers:  # as in Go: no cipher is left for TLS 1.2
        min_version = VERSIONS["TLS13"]
    if min_version > max_version:
        raise ValueError("tls_server_config.max_version: is below min_version, or no cipher of cipher_suites fits it")
    curves = tuple(_choose("curve_preferences", name, CURVES) for name in section.curve_preferences or ())
    if not section.is_enabled:
        return None
    client_ca = _find_pem(section.client_ca_file, section.client_ca, "client_ca", file)
    allowed_sans = frozenset(section.client_allowed_sans or ())
    if client_auth is ClientAuth.NONE and (client_ca or allowed_sans):
        name = "client_ca" if client_ca else "client_allowed_sans"
        raise ValueError(f"tls_server_config.{name}: has no effect without client_auth_type")
    certificate = _find_pem(section.cert_file, section.cert, "cert", file)
    key = _find_pem(section.key_file, section.key, "key", file)
    if certificate is None or key is None:
        missing = "cert_file and cert are" if certificate is None else "key_file and key are"
        raise ValueError(f"tls_server_config: {missing} missing, and TLS needs one of them")
    return TlsSettings(
        certificate, key, client_ca, client_auth, allowed_sans, min_version, max_version, ciphers, curves
    )


def _choose(key: str, name: str, known: Mapping[str, T]) -> T:
    if name not in known:
        raise ValueError(f"tls_server_config.{key}: {name[:60]!r} is not supported; write {', '.join(known)}")
    return known[name]


def _find_pem(path: str | None, text: str | None, name: str, file: str) -> Pem | None:
    if path:
        return Pem(file=os.path.join(os.path.dirname(os.path.abspath(file)), path))
    return Pem(text=text, origin=f"{file}: tls_server_config.{name}") if text else None


def _check_headers(headers: Mapping[str, str | None]) -> Mapping[str, str]:
    for name, value in headers.items():
        place = f"http_server_config.headers.{one_line(name[:60])}"
        if name not in _HEADERS:
            raise ValueError(f"{place}: cannot be set; the headers are {', '.join(_HEADERS)}")
        if _HEADERS[name] and value not in _HEADERS[name]:
            raise ValueError(f"{place}: is not {' or '.join(_HEADERS[name])}")
        if not (value or "").isprintable():
            raise ValueError(f"{place}: has a character that is not allowed in a header, such as a line break")
    return {name: value or "" for name, value in headers.items()}


def _check_users(users: Mapping[str, str]) -> Mapping[str, str]:
    for name, value in users.items():
        if not _BCRYPT_HASH.fullmatch(value):
            raise ValueError(
                f"basic_auth_users.{name[:60]!a}: is not a bcrypt hash (make one with htpasswd -nBC 10 USER)"
            )
    return users


def _check_burst(burst: int) -> int:
    if not 0 <= burst < 10**9:
        raise ValueError("rate_limit.burst: is not a number from 0 to 999999999")
    return burst


def _parse_duration(text: str) -> float:
    """Parses Go's durations: 1s, 100ms, 1m30s."""
    parts = _DURATION_PART.findall(text[:40])
    if text not in ("", "0") and "".join(number + unit for number, unit in parts) != text:
        raise ValueError("rate_limit.interval: is not a duration (write 1s, 100ms or 1m30s)")
    return sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts)


class ProblemLog:
    """Logs a problem once, and once that it is solved."""

    def __init__(self, consequence: str) -> None:
        self._consequence = consequence
        self._logged = ""

    def report(self, problem: str) -> None:
        if problem != self._logged:
            _log.error("%s; %s until that is fixed", problem, self._consequence)
        self._logged = problem

    def clear(self) -> None:
        if self._logged:
            _log.info("fixed: %s", self._logged)
        self._logged = ""
