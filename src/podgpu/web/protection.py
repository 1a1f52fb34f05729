"""Parses the web config file and applies it: TLS, rate limit, headers and basic auth.

The file has the format of Prometheus' exporter-toolkit, and is reloaded when it changes. Settings
that podgpu does not support are errors. The exception is http2, which is accepted and ignored.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import os
import re
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import bcrypt
import msgspec
from aiohttp import BasicAuth, web
from aiohttp.typedefs import Handler

from podgpu.clock import parse_duration
from podgpu.decode import decode_yaml
from podgpu.errors import UsageError
from podgpu.files import ReadOnChange
from podgpu.tls import LastValid, MakeTlsContext, Pem, load_authorities, load_pair

_MAX_CONFIG_BYTES = 256 * 1024
# Longer passwords are truncated, as in Go, because Python's bcrypt rejects them.
_MAX_BCRYPT_BYTES = 72
_BCRYPT_HASH = re.compile(r"\$2[aby]\$(0[4-9]|[12][0-9]|3[01])\$[./A-Za-z0-9]{53}")
_HEADERS: Mapping[str, tuple[str, ...]] = {
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
    "Content-Security-Policy": (),
}
"""Headers that may be set, with their allowed values. An empty tuple allows any value."""
CLIENT_AUTH = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
"""Policies for client certificates.

Two of Go's policies are missing, because they accept unverified certificates.
"""
VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
TLS13_CIPHERS = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
"""Accepted but ignored, because TLS 1.3 ciphers cannot be selected."""
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
CURVES = {
    "CurveP256": "prime256v1",
    "CurveP384": "secp384r1",
    "CurveP521": "secp521r1",
    "X25519": "X25519",
}


class Pems(NamedTuple):
    certificate: bytes
    key: bytes
    client_authorities: bytes


class TlsConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    cert_file: str | None = None
    key_file: str | None = None
    client_ca_file: str | None = None
    cert: str | None = None  # PEM text; used if there is no file
    key: str | None = None
    client_ca: str | None = None
    client_auth_type: str | None = None
    client_allowed_sans: tuple[str, ...] | None = None
    min_version: str | None = None
    max_version: str | None = None
    cipher_suites: tuple[str, ...] | None = None
    prefer_server_cipher_suites: bool | None = None
    # Python can set only one curve, so a longer list is ignored.
    curve_preferences: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        self._check_names()
        lowest, highest = self.versions
        if lowest > highest:
            raise ValueError(
                "max_version is below min_version, or cipher_suites has no cipher for max_version"
            )

        has_certificate = bool(self.cert_file or self.cert)
        has_key = bool(self.key_file or self.key)
        if self.is_enabled and not (has_certificate and has_key):
            raise ValueError("needs a certificate (cert_file or cert) and a key (key_file or key)")

        checks_clients = self.client_ca_file or self.client_ca or self.client_allowed_sans
        if checks_clients and self.verify_mode is ssl.CERT_NONE:
            raise ValueError(
                "client_ca and client_allowed_sans have no effect without client_auth_type"
            )

    def _check_names(self) -> None:
        _check_name("client_auth_type", self.client_auth_type, CLIENT_AUTH)
        _check_name("min_version", self.min_version, VERSIONS)
        _check_name("max_version", self.max_version, VERSIONS)
        for name in self.cipher_suites or ():
            _check_name("cipher_suites", name, (*CIPHERS, *TLS13_CIPHERS))
        for name in self.curve_preferences or ():
            _check_name("curve_preferences", name, CURVES)

    @property
    def is_enabled(self) -> bool:
        settings = (
            self.cert_file,
            self.key_file,
            self.client_ca_file,
            self.cert,
            self.key,
            self.client_ca,
            self.client_auth_type,
        )
        return any(settings)

    def read_pems(self, path: str) -> Pems:
        """Reads the files. Their paths are relative to the web config file `path`."""
        folder = os.path.dirname(os.path.abspath(path))

        def read(file: str | None, text: str | None) -> bytes:
            path = os.path.join(folder, file) if file else ""
            return Pem(path, text or "").read()

        return Pems(
            read(self.cert_file, self.cert),
            read(self.key_file, self.key),
            read(self.client_ca_file, self.client_ca),
        )

    @property
    def verify_mode(self) -> ssl.VerifyMode:
        return CLIENT_AUTH[self.client_auth_type or "NoClientCert"]

    @property
    def ciphers(self) -> list[str]:
        """OpenSSL's names of the TLS 1.2 ciphers. Empty for OpenSSL's default."""
        return [CIPHERS[name] for name in self.cipher_suites or () if name in CIPHERS]

    @property
    def versions(self) -> tuple[ssl.TLSVersion, ssl.TLSVersion]:
        """Minimum and maximum version.

        As in Go, TLS 1.2 is disabled if `cipher_suites` has no cipher for it.
        """
        lowest = self.min_version or "TLS12"
        if self.cipher_suites and not self.ciphers:
            lowest = "TLS13"
        return VERSIONS[lowest], VERSIONS[self.max_version or "TLS13"]


class HttpConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    http2: bool | None = None
    headers: dict[str, str] | None = None

    def __post_init__(self) -> None:
        for name, value in (self.headers or {}).items():
            _check_name("headers", name, _HEADERS)
            allowed = _HEADERS[name]
            if allowed and value not in allowed:
                raise ValueError(f"headers: {name} must be {' or '.join(allowed)}")

            if not value.isprintable():
                raise ValueError(
                    f"headers: {name} has a character that is not allowed, such as a line break"
                )


class RateLimitConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    interval: str | None = None
    burst: Annotated[int, msgspec.Meta(ge=0)] | None = None

    def __post_init__(self) -> None:
        if self.seconds is None:
            raise ValueError("interval must be a duration, such as 1s, 100ms or 1m30s")

    @property
    def seconds(self) -> float | None:
        """The interval. 0 switches the limit off."""
        return parse_duration(self.interval or "0")


class WebConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    tls_server_config: TlsConfig | None = None
    http_server_config: HttpConfig | None = None
    basic_auth_users: dict[str, str] | None = None
    rate_limit: RateLimitConfig | None = None

    def __post_init__(self) -> None:
        for name, value in self.users.items():
            if not _BCRYPT_HASH.fullmatch(value):
                raise ValueError(
                    f"basic_auth_users: the password of {name[:60]!r} is not a bcrypt hash "
                    "(create one with htpasswd -nBC 10 USER)"
                )

    @property
    def tls(self) -> TlsConfig | None:
        """The TLS section, or None for plain HTTP."""
        section = self.tls_server_config
        if section is None or not section.is_enabled:
            return None
        return section

    @property
    def headers(self) -> Mapping[str, str]:
        section = self.http_server_config or HttpConfig()
        return section.headers or {}

    @property
    def users(self) -> Mapping[str, str]:
        return self.basic_auth_users or {}


def _check_name(key: str, name: str | None, supported: Iterable[str]) -> None:
    if name and name not in supported:
        raise ValueError(
            f"{key}: {name[:60]!r} is not supported; supported are {', '.join(supported)}"
        )


def parse_web_config(content: bytes, file: str) -> WebConfig:
    """Parses the file. Raises UsageError with the file name and the invalid key."""
    return decode_yaml(content, file, WebConfig)


# Checks of requests


class Protection:
    """Checks requests against the web config file, which is read again when it changes.

    While the file or a certificate is invalid, the last valid settings stay in effect.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises UsageError if the file cannot be used."""
        self._path = path
        self._make_context = lru_cache(maxsize=1)(make_server_context)
        self._logins = LoginChecker()
        file = ReadOnChange(parse_web_config, _MAX_CONFIG_BYTES)
        self._config = LastValid(lambda: file.read(path), "the previous settings stay in effect")
        config = self._config.get()
        self._bucket: TokenBucket | None = None
        rate = config.rate_limit
        if rate is not None and rate.seconds:
            self._bucket = TokenBucket(rate.seconds, rate.burst or 0, clock)

        self.make_tls: MakeTlsContext | None = None
        """Builds the TLS context. None if TLS is off. Turning TLS on or off requires a restart."""
        if config.tls is not None:
            context = LastValid(self._load_context, "the previous certificate stays in effect")
            self.make_tls = context.get

    @property
    def has_users(self) -> bool:
        return bool(self._config.get().users)

    @property
    def requires_client_certificate(self) -> bool:
        tls = self._config.get().tls
        return tls is not None and tls.verify_mode is ssl.CERT_REQUIRED

    def _load_context(self) -> ssl.SSLContext:
        config = self._config.get().tls
        if config is None:
            raise UsageError(
                f"{self._path} no longer enables TLS, but turning TLS off requires a restart"
            )
        return self._make_context(config, self._path, config.read_pems(self._path))

    async def add_headers(self, _request: web.Request, response: web.StreamResponse) -> None:
        # As in Go, a header that a handler has set is kept.
        for name, value in self._config.get().headers.items():
            response.headers.setdefault(name, value)

    @web.middleware
    async def check_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        config = self._config.get()
        if self._bucket is not None and not self._bucket.take():
            return web.Response(status=429, text="Too Many Requests\n")
        if config.tls is not None and not _has_allowed_name(request, config.tls):
            text = "the client certificate has none of the allowed names\n"
            return web.Response(status=403, text=text)
        if config.users and not await self._has_valid_login(request, config.users):
            headers = {"WWW-Authenticate": "Basic"}
            return web.Response(status=401, text="Unauthorized\n", headers=headers)

        return await handler(request)

    async def _has_valid_login(self, request: web.Request, users: Mapping[str, str]) -> bool:
        try:
            login = BasicAuth.decode(request.headers.get("Authorization", ""), "utf-8")
        except ValueError:
            return False
        return await self._logins.is_valid(users, login.login, login.password.encode())


class TokenBucket:
    """A rate limiter that starts with `burst` tokens and regains one token per interval."""

    def __init__(self, interval: float, burst: int, clock: Callable[[], float]) -> None:
        self._interval = interval
        self._burst = float(burst)
        self._clock = clock
        self._tokens = self._burst
        self._updated_at = clock()

    def take(self) -> bool:
        now = self._clock()
        regained = (now - self._updated_at) / self._interval
        self._tokens = min(self._tokens + regained, self._burst)
        self._updated_at = now
        if self._tokens < 1:
            return False

        self._tokens -= 1
        return True


class LoginChecker:
    """Checks one password at a time, in a thread. Caches valid logins, but not failed ones."""

    def __init__(self, compare: Callable[[bytes, bytes], bool] = bcrypt.checkpw) -> None:
        self._compare = compare
        self._valid: set[bytes] = set()
        self._salt = os.urandom(32)
        self._lock = asyncio.Lock()

    async def is_valid(self, users: Mapping[str, str], user: str, password: bytes) -> bool:
        hashed = users.get(user) or _make_dummy_hash(users.values())
        # The cache key contains the hash, so that a changed password takes effect immediately.
        key = repr((user, hashed, password)).encode()
        login = hashlib.blake2b(key, key=self._salt).digest()
        if login in self._valid:
            return True

        async with self._lock:
            is_equal = await asyncio.to_thread(self._is_equal, password, hashed.encode())

        if not is_equal or user not in users:
            return False

        self._valid.add(login)
        return True

    def _is_equal(self, password: bytes, hashed: bytes) -> bool:
        try:
            return self._compare(password[:_MAX_BCRYPT_BYTES], hashed)
        except ValueError:
            # For example, the password contains NUL.
            return False


def _make_dummy_hash(hashes: Iterable[str]) -> str:
    """Returns a hash for unknown users, so that the timing does not reveal which users exist."""
    # The two digits of `$2b$10$`. A higher cost takes longer.
    cost = max(hashed[4:6] for hashed in hashes)
    return f"$2b${cost}${'.' * 53}"


# TLS


def make_server_context(config: TlsConfig, path: str, pems: Pems) -> ssl.SSLContext:
    """Builds the TLS context of a server. Raises UsageError or SourceError if this fails.

    `path`: the web config file.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    context.minimum_version, context.maximum_version = config.versions
    try:
        if config.ciphers:
            context.set_ciphers(":".join(config.ciphers))
        if config.curve_preferences and len(config.curve_preferences) == 1:
            context.set_ecdh_curve(CURVES[config.curve_preferences[0]])
    except (ssl.SSLError, ValueError) as error:
        raise UsageError(
            "tls_server_config: this OpenSSL supports none of cipher_suites, "
            "or not the curve in curve_preferences"
        ) from error

    names = f"{path}: {config.cert_file or 'cert'} and {config.key_file or 'key'}"
    load_pair(context, pems.certificate, pems.key, names)

    context.verify_mode = config.verify_mode
    # As in Go, an intermediate CA is sufficient, and the system's CAs are the default.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    if pems.client_authorities:
        name = f"{path}: {config.client_ca_file or 'client_ca'}"
        load_authorities(context, pems.client_authorities, name)
    elif config.verify_mode is not ssl.CERT_NONE:
        context.load_default_certs(ssl.Purpose.CLIENT_AUTH)

    return context


def _has_allowed_name(request: web.Request, config: TlsConfig) -> bool:
    if not config.client_allowed_sans:
        return True
    if request.transport is None:
        return False
    certificate = request.transport.get_extra_info("peercert") or {}
    return not subject_names(certificate).isdisjoint(config.client_allowed_sans)


def subject_names(certificate: dict[str, Any]) -> set[str]:
    """Returns the subject alternative names.

    Shortens IPv6 addresses, because OpenSSL writes ::1 as 0:0:0:0:0:0:0:1.
    """
    names = set()
    for kind, name in certificate.get("subjectAltName", ()):
        if kind == "IP Address":
            name = str(ipaddress.ip_address(name.strip()))
        names.add(name)
    return names
