"""TLS, rate limit, headers and basic auth from the web config file, which is reloaded when it changes."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import ipaddress
import logging
import os
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import bcrypt
from aiohttp import web
from aiohttp.typedefs import Handler

from podgpu.errors import UsageError
from podgpu.files import ReadOnChange
from podgpu.tls import NO_PEM, ContextCache, load_pair
from podgpu.web.connections import MakeTlsContext
from podgpu.web.web_config import LastValid, TlsConfig, WebConfig, parse_web_config

_MAX_CONFIG_BYTES = 256 * 1024
_MAX_CACHED_LOGINS = 100
_MAX_BCRYPT_BYTES = 72
"""Longer passwords are truncated, as in Go. Python's bcrypt rejects them."""
_log = logging.getLogger(__name__)


class Protection:
    """Checks requests against the web config file, which is read again when it changes.

    While the file or a certificate is invalid, the last valid settings stay in effect.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises UsageError if the file cannot be used."""
        self._path = path
        self._contexts = ContextCache(make_server_context)
        self._logins = LoginChecker()
        file = ReadOnChange(parse_web_config, _MAX_CONFIG_BYTES)
        self._config = LastValid(lambda: file.read(path), "the previous settings stay in effect")
        config = self._config.get()
        rate = config.rate_limit
        self._bucket = TokenBucket(rate.seconds, rate.burst or 0, clock) if rate and rate.seconds else None
        self.make_tls: MakeTlsContext | None = None
        """None for plain HTTP. Turning TLS on or off requires a restart."""
        if config.tls is not None:
            self.make_tls = LastValid(self._load_context, "the previous certificate stays in effect").get
        self._warn(config)

    def _load_context(self) -> ssl.SSLContext:
        config = self._config.get().tls
        if config is None:
            raise UsageError(f"{self._path} no longer enables TLS, but turning TLS off requires a restart")
        certificate, key, authorities = (
            config.find_pem(name, self._path) or NO_PEM for name in ("cert", "key", "client_ca")
        )
        material = TlsMaterial(
            config,
            certificate.read(),
            key.read(),
            authorities.read() if authorities else None,
            f"{certificate.name} and {key.name}",
            authorities.name,
        )
        return self._contexts.get(material)

    def _warn(self, config: WebConfig) -> None:
        tls = config.tls
        if tls is None and config.tls_server_config not in (None, TlsConfig()):
            _log.warning("%s: tls_server_config has no certificate: podgpu serves plain HTTP", self._path)
        if config.users and tls is None:
            _log.warning("%s: basic auth without TLS: passwords are sent in clear text", self._path)
        if tls is not None and tls.verify_mode and not (tls.client_ca_file or tls.client_ca):
            _log.warning(
                "%s: no client_ca_file: client certificates from every CA that this system trusts are accepted",
                self._path,
            )

    async def add_headers(self, _request: web.Request, response: web.StreamResponse) -> None:
        for name, value in self._config.get().headers.items():
            response.headers.setdefault(name, value)  # as in Go, a header that a handler has set is kept

    @web.middleware
    async def check_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        config = self._config.get()
        if self._bucket is not None and not self._bucket.take():
            return web.Response(status=429, text="Too Many Requests\n")
        allowed = config.tls.client_allowed_sans if config.tls is not None else None
        if allowed and _client_names(request).isdisjoint(allowed):
            return web.Response(status=403, text="the client certificate has none of the allowed names\n")
        if config.users and not await self._has_valid_login(request, config.users):
            return web.Response(status=401, text="Unauthorized\n", headers={"WWW-Authenticate": "Basic"})
        return await handler(request)

    async def _has_valid_login(self, request: web.Request, users: Mapping[str, str]) -> bool:
        login = parse_basic(request.headers.get("Authorization", ""))
        return login is not None and await self._logins.is_valid(users, *login)


class TokenBucket:
    """A rate limiter that starts with `burst` tokens and regains one token per interval."""

    def __init__(self, interval: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = interval
        self._burst = float(burst)
        self._clock = clock
        self._tokens = self._burst
        self._updated_at = clock()

    def take(self) -> bool:
        now = self._clock()
        self._tokens = min(self._tokens + (now - self._updated_at) / self._interval, self._burst)
        self._updated_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class LoginChecker:
    """Checks one password at a time, in a thread, and caches valid logins. Failed logins are not cached."""

    def __init__(self, compare: Callable[[bytes, bytes], bool] = bcrypt.checkpw) -> None:
        self._compare = compare
        self._right: dict[bytes, None] = {}
        self._salt = os.urandom(32)
        self._lock = asyncio.Lock()

    async def is_valid(self, users: Mapping[str, str], user: bytes, password: bytes) -> bool:
        hashed = users.get(user.decode("utf-8", "surrogateescape"))
        # For unknown users, compare with a dummy hash: equal timing does not reveal which users exist.
        against = (hashed or f"$2b${max(value[4:6] for value in users.values())}${'.' * 53}").encode()
        # The cache key contains the hash, so that a changed password takes effect immediately.
        login = hashlib.blake2b(repr((user, against, password)).encode(), key=self._salt).digest()
        if login in self._right:
            return True
        async with self._lock:
            is_right = await asyncio.to_thread(self._is_equal, password, against) and hashed is not None
        if is_right:
            if len(self._right) >= _MAX_CACHED_LOGINS:
                del self._right[next(iter(self._right))]
            self._right[login] = None
        return is_right

    def _is_equal(self, password: bytes, hashed: bytes) -> bool:
        try:
            return self._compare(password[:_MAX_BCRYPT_BYTES], hashed)
        except ValueError:  # for example, the password contains NUL
            return False


def parse_basic(header: str) -> tuple[bytes, bytes] | None:
    """Returns user and password from an Authorization header, or None."""
    scheme, _, credentials = header.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        user, colon, password = base64.b64decode(credentials.encode("ascii"), validate=True).partition(b":")
    except (binascii.Error, UnicodeEncodeError):
        return None
    return (user, password) if colon else None


# TLS


class TlsMaterial(NamedTuple):
    config: TlsConfig
    certificate: bytes
    key: bytes
    authorities: bytes | None
    """None for the CAs of the system."""
    pair_name: str
    authorities_name: str


def make_server_context(material: TlsMaterial) -> ssl.SSLContext:
    """Raises UsageError if OpenSSL lacks a setting, SourceError if a certificate is invalid."""
    config = material.config
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    context.minimum_version, context.maximum_version = config.versions
    try:
        if config.ciphers:
            context.set_ciphers(":".join(config.ciphers))
        if len(config.curves) == 1:
            context.set_ecdh_curve(config.curves[0])
    except (ssl.SSLError, ValueError):
        raise UsageError(
            "tls_server_config: this OpenSSL supports none of cipher_suites, or not the curve in curve_preferences"
        ) from None
    load_pair(context, material.certificate, material.key, material.pair_name)
    context.verify_mode = config.verify_mode
    if config.verify_mode is ssl.CERT_NONE:
        return context
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as in Go, an intermediate CA is sufficient
    if material.authorities is None:
        context.load_default_certs(ssl.Purpose.CLIENT_AUTH)  # as in Go
        return context
    try:
        context.load_verify_locations(cadata=material.authorities.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as error:
        raise UsageError(f"{material.authorities_name} contains no valid PEM certificate") from error
    return context


def _client_names(request: web.Request) -> frozenset[str]:
    transport = request.transport
    return subject_names(transport.get_extra_info("peercert") or {}) if transport is not None else frozenset()


def subject_names(certificate: dict[str, Any]) -> frozenset[str]:
    """Returns the DNS, e-mail, IP and URI alternative names, formatted as in Go."""
    names = set()
    for kind, value in certificate.get("subjectAltName", ()):
        if kind in ("DNS", "email", "URI"):
            names.add(value)
        elif kind == "IP Address":  # OpenSSL writes ::1 as 0:0:0:0:0:0:0:1
            with suppress(ValueError):
                address = ipaddress.ip_address(value.strip())
                names.add(str(getattr(address, "ipv4_mapped", None) or address))
    return frozenset(names)
