"""This module owns what the web config file of Prometheus' exporter-toolkit may say, and checks it strictly. Opens no
other file.

What podgpu does not do is refused here, or accepted because it changes nothing for a client (http2).
"""

from __future__ import annotations

import logging
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from podgpu.errors import SourceError, UsageError
from podgpu.files import ReadOnChange
from podgpu.strict_yaml import StrictMapping, parse_strict
from podgpu.tls import Pem

_LARGEST_FILE = 256 * 1024
_HASH = re.compile(r"\$2[aby]\$(0[4-9]|[12][0-9]|3[01])\$[./A-Za-z0-9]{21}[.Oeu][./A-Za-z0-9]{31}")
"""Prefix, cost, 16 bytes of salt in 22 letters (so the last is one of four), 23 bytes of hash in 31."""
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_UNIT_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}

_TLS_IS_MEANT = ("cert_file", "key_file", "cert", "key", "client_ca_file", "client_ca", "client_auth_type")
_TLS_KEYS = (
    *_TLS_IS_MEANT,
    *("client_allowed_sans", "min_version", "max_version"),
    *("cipher_suites", "prefer_server_cipher_suites", "curve_preferences"),
)
_HEADERS: Mapping[str, tuple[str, ...]] = {
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
    "Content-Security-Policy": (),
}
"""The only ones that may be set, and their values where not every one will do."""

_log = logging.getLogger(__name__)
T = TypeVar("T")


# What Go calls a TLS version, cipher suite or curve, and what OpenSSL calls it

VERSIONS: Mapping[str, ssl.TLSVersion] = {
    "TLS13": ssl.TLSVersion.TLSv1_3,
    "TLS12": ssl.TLSVersion.TLSv1_2,
}

TLS13_CIPHERS = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
"""All are always on: neither Go nor Python lets one choose."""

CIPHERS: dict[str, str] = {
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
    # Go counts these four among the weak ones since 1.22; files written before that may name them.
    "TLS_RSA_WITH_AES_128_GCM_SHA256": "AES128-GCM-SHA256",
    "TLS_RSA_WITH_AES_256_GCM_SHA384": "AES256-GCM-SHA384",
    "TLS_RSA_WITH_AES_128_CBC_SHA": "AES128-SHA",
    "TLS_RSA_WITH_AES_256_CBC_SHA": "AES256-SHA",
}

CURVES: Mapping[str, str] = {
    "CurveP256": "prime256v1",
    "CurveP384": "secp384r1",
    "CurveP521": "secp521r1",
    "X25519": "X25519",
}


# What it says


class ClientAuth(Enum):
    """Those of Go's five policies that podgpu carries out."""

    NONE = "NoClientCert"
    VERIFY_IF_GIVEN = "VerifyClientCertIfGiven"
    REQUIRE_AND_VERIFY = "RequireAndVerifyClientCert"


_CLIENT_AUTH = {policy.value: policy for policy in ClientAuth}
_UNVERIFIED = "takes certificates that nobody verified, which podgpu does not: write"
_NOT_CARRIED_OUT = {
    "client_auth_type": {
        "RequestClientCert": f"{_UNVERIFIED} VerifyClientCertIfGiven and client_ca_file, or NoClientCert",
        "RequireAnyClientCert": f"{_UNVERIFIED} RequireAndVerifyClientCert and client_ca_file",
        "RequireClientCert": f"{_UNVERIFIED} RequireAndVerifyClientCert and client_ca_file",
    },
    "min_version": dict.fromkeys(("TLS10", "TLS11"), "is not safe, and podgpu does not speak it: write TLS12 or TLS13"),
}
_NOT_CARRIED_OUT["max_version"] = _NOT_CARRIED_OUT["min_version"]
"""What exporter-toolkit takes and podgpu refuses, by key and word, and what to write instead."""


@dataclass(frozen=True, slots=True)
class TlsSettings:
    origin: str
    """The file that says all this, for complaints."""
    certificate: Pem
    key: Pem
    client_ca: Pem | None
    client_auth: ClientAuth
    allowed_sans: frozenset[str]
    """Empty: every name will do."""
    min_version: ssl.TLSVersion
    max_version: ssl.TLSVersion
    ciphers: tuple[str, ...]
    """OpenSSL's names, for TLS 1.2. Empty: its own choice."""
    curves: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RateLimit:
    interval: float
    """Seconds for one token."""
    burst: int


@dataclass(frozen=True, slots=True)
class WebConfig:
    tls: TlsSettings | None
    """None: plain HTTP."""
    headers: Mapping[str, str]
    users: Mapping[str, str] = field(repr=False)
    """Name to bcrypt hash. Empty: everybody may."""
    rate_limit: RateLimit | None
    tls_keys_without_effect: bool = False
    """Versions or ciphers are set, but nothing that would turn TLS on."""


# Parsing


def parse_web_config(content: bytes, file: str) -> WebConfig:
    """Raises UsageError, naming file and key, for all that is not exactly right."""
    whole = parse_strict(content, file)
    whole.allow(("tls_server_config", "http_server_config", "basic_auth_users", "rate_limit"))
    tls = whole.mapping("tls_server_config")
    settings = _parse_tls(tls, file)
    return WebConfig(
        tls=settings,
        headers=_parse_headers(whole.mapping("http_server_config")),
        users=_parse_users(whole.mapping("basic_auth_users")),
        rate_limit=_parse_rate_limit(whole.mapping("rate_limit")),
        tls_keys_without_effect=settings is None and bool(tls.names()),
    )


def _parse_tls(section: StrictMapping, file: str) -> TlsSettings | None:
    section.allow(_TLS_KEYS)
    section.flag("prefer_server_cipher_suites")
    client_auth = _parse_client_auth(section)
    min_version, max_version, ciphers = _parse_versions_and_ciphers(section)
    curves = tuple(_named(section, "curve_preferences", name, CURVES) for name in section.texts("curve_preferences"))
    allowed_sans = frozenset(section.texts("client_allowed_sans"))
    if not any(section.text(name) for name in _TLS_IS_MEANT):
        return None
    client_ca = _parse_pem(section, file, "client_ca")
    if client_auth is ClientAuth.NONE and (client_ca or allowed_sans):
        name = "client_ca" if client_ca else "client_allowed_sans"
        raise section.complaint(name, "is set, but client_auth_type lets clients in without a certificate")
    return TlsSettings(
        origin=file,
        certificate=_required(section, file, "cert"),
        key=_required(section, file, "key"),
        client_ca=client_ca,
        client_auth=client_auth,
        allowed_sans=allowed_sans,
        min_version=min_version,
        max_version=max_version,
        ciphers=ciphers,
        curves=curves,
    )


def _parse_client_auth(section: StrictMapping) -> ClientAuth:
    word = section.text("client_auth_type")
    return _named(section, "client_auth_type", word, _CLIENT_AUTH) if word else ClientAuth.NONE


def _parse_versions_and_ciphers(
    section: StrictMapping,
) -> tuple[ssl.TLSVersion, ssl.TLSVersion, tuple[str, ...]]:
    lowest = _named(section, "min_version", section.text("min_version") or "TLS12", VERSIONS)
    highest = _named(section, "max_version", section.text("max_version") or "TLS13", VERSIONS)
    names = section.texts("cipher_suites")
    known = CIPHERS | dict.fromkeys(TLS13_CIPHERS, "")
    ciphers = tuple(filter(None, (_named(section, "cipher_suites", name, known) for name in names)))
    if names and not ciphers:  # as in Go: nothing is left for TLS 1.2 to agree on
        lowest = ssl.TLSVersion.TLSv1_3
    if lowest > highest:
        why = "none for max_version or older" if names and not ciphers else "is below min_version"
        raise section.complaint("cipher_suites" if names and not ciphers else "max_version", why)
    return lowest, highest, ciphers


def _named(section: StrictMapping, key: str, word: str, known: Mapping[str, T]) -> T:
    if word in _NOT_CARRIED_OUT.get(key, ()):
        raise section.complaint(key, f"{word} {_NOT_CARRIED_OUT[key][word]}")
    if word not in known:
        raise section.complaint(key, f"{word[:60]!r} is not one of {', '.join(known)}")
    return known[word]


def _parse_pem(section: StrictMapping, file: str, name: str) -> Pem | None:
    path, text = section.text(f"{name}_file"), section.text(name)
    if path:
        path = os.path.join(os.path.dirname(os.path.abspath(file)), path)
        return Pem(file=path)
    return Pem(text=text, origin=f"{file}: tls_server_config.{name}") if text else None


def _required(section: StrictMapping, file: str, name: str) -> Pem:
    pem = _parse_pem(section, file, name)
    if pem is None:
        raise section.complaint(f"{name}_file", f"is missing, and so is {name}: TLS needs one of them")
    return pem


def _parse_headers(section: StrictMapping) -> Mapping[str, str]:
    section.allow(("http2", "headers"))
    section.flag("http2")
    headers = section.mapping("headers")
    headers.allow(_HEADERS)
    values = {name: headers.text(name) for name in headers.names()}
    for name, value in values.items():
        if _HEADERS[name] and value not in _HEADERS[name]:
            raise headers.complaint(name, f"is not {' or '.join(_HEADERS[name])}")
        if not value.isprintable():
            raise headers.complaint(name, "holds a character that no header may have, such as the end of a line")
    return values


def _parse_users(section: StrictMapping) -> Mapping[str, str]:
    users = {name: section.text(name) for name in section.names()}
    for name, value in users.items():
        if not _HASH.fullmatch(value):
            raise section.complaint(
                name if name.isprintable() else "a user", "is not a bcrypt hash (make one with htpasswd -nBC 10 USER)"
            )
    return users


def _parse_rate_limit(section: StrictMapping) -> RateLimit | None:
    section.allow(("interval", "burst"))
    seconds, burst = _parse_duration(section, "interval"), section.whole_number("burst")
    return RateLimit(seconds, burst) if seconds else None


def _parse_duration(section: StrictMapping, name: str) -> float:
    """Go's: 1s, 100ms, 1m30s. A number without a unit would be nanoseconds there, which nobody means."""
    text = section.text(name)
    if text in ("", "0"):
        return 0.0
    parts = _DURATION_PART.findall(text)
    if len(text) > 40 or not parts or "".join(number + unit for number, unit in parts) != text:
        raise section.complaint(name, "is not a duration (write 1s, 100ms or 1m30s)")
    return sum(float(number) * _UNIT_SECONDS[unit] for number, unit in parts)


# Following it


class Complaint:
    """Logs what is wrong once, and once that it is over."""

    def __init__(self, consequence: str) -> None:
        self._consequence = consequence
        self._said = ""

    def say(self, problem: str) -> None:
        if problem != self._said:
            _log.error("%s; %s until that is fixed", problem, self._consequence)
        self._said = problem

    def is_over(self) -> None:
        if self._said:
            _log.info("mended: %s", self._said)
        self._said = ""


class WebConfigFile:
    """What the file says now. It is parsed again only after a change."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._content = ReadOnChange(parse_web_config, _LARGEST_FILE)
        self._complaint = Complaint("podgpu answers requests with 500 and refuses TLS handshakes")

    def read(self) -> WebConfig:
        try:
            return self._content.read(self._path)
        except SourceError as error:
            raise UsageError(str(error)) from error

    def current(self) -> WebConfig | None:
        """None while it cannot be used; the log then says why, once."""
        try:
            config = self.read()
        except UsageError as error:
            self._complaint.say(str(error))
            return None
        self._complaint.is_over()
        return config
