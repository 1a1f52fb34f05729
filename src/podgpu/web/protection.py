"""Applies the web config file: TLS, rate limit, headers and basic auth. The file is reloaded when it changes."""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import os
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any

import bcrypt
from aiohttp import BasicAuth, web
from aiohttp.typedefs import Handler

from podgpu.errors import UsageError
from podgpu.files import ReadOnChange
from podgpu.tls import ContextCache, MakeTlsContext, load_authorities, load_pair
from podgpu.web.web_config import CURVES, LastValid, TlsConfig, parse_web_config

_MAX_CONFIG_BYTES = 256 * 1024
_MAX_BCRYPT_BYTES = 72  # longer passwords are truncated, as in Go, because Python's bcrypt rejects them


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
        """Builds the TLS context. None if TLS is off. Turning TLS on or off requires a restart."""
        if config.tls is not None:
            self.make_tls = LastValid(self._load_context, "the previous certificate stays in effect").get

    def _load_context(self) -> ssl.SSLContext:
        config = self._config.get().tls
        if config is None:
            raise UsageError(f"{self._path} no longer enables TLS, but turning TLS off requires a restart")
        return self._contexts.get((config, self._path, *config.read_pems(self._path)))

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
        try:
            login = BasicAuth.decode(request.headers.get("Authorization", ""), "utf-8")
        except ValueError:
            return False
        return await self._logins.is_valid(users, login.login, login.password.encode())


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
        self._right: set[bytes] = set()
        self._salt = os.urandom(32)
        self._lock = asyncio.Lock()

    async def is_valid(self, users: Mapping[str, str], user: str, password: bytes) -> bool:
        hashed = users.get(user)
        # Unknown users are compared with a dummy hash, so that the timing does not reveal which users exist.
        against = (hashed or f"$2b${max(value[4:6] for value in users.values())}${'.' * 53}").encode()
        # The cache key contains the hash, so that a changed password takes effect immediately.
        login = hashlib.blake2b(repr((user, against, password)).encode(), key=self._salt).digest()
        if login in self._right:
            return True
        async with self._lock:
            is_right = await asyncio.to_thread(self._is_equal, password, against) and hashed is not None
        if is_right:
            self._right.add(login)
        return is_right

    def _is_equal(self, password: bytes, hashed: bytes) -> bool:
        try:
            return self._compare(password[:_MAX_BCRYPT_BYTES], hashed)
        except ValueError:  # for example, the password contains NUL
            return False


# TLS


def make_server_context(material: tuple[TlsConfig, str, bytes, bytes, bytes]) -> ssl.SSLContext:
    """Builds the TLS context of a server. Raises UsageError or SourceError if this fails.

    `material`: TLS settings, path of the web config file, certificate, key, client CAs.
    """
    config, path, certificate, key, authorities = material
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    context.minimum_version, context.maximum_version = config.versions
    try:
        if config.ciphers:
            context.set_ciphers(":".join(config.ciphers))
        if config.curve_preferences and len(config.curve_preferences) == 1:
            context.set_ecdh_curve(CURVES[config.curve_preferences[0]])
    except (ssl.SSLError, ValueError) as error:
        text = "tls_server_config: this OpenSSL supports none of cipher_suites, or not the curve in curve_preferences"
        raise UsageError(text) from error
    load_pair(context, certificate, key, f"{path}: {config.cert_file or 'cert'} and {config.key_file or 'key'}")
    context.verify_mode = config.verify_mode
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as in Go, an intermediate CA is sufficient
    if config.verify_mode is not ssl.CERT_NONE and not authorities:
        context.load_default_certs(ssl.Purpose.CLIENT_AUTH)  # as in Go, uses the system's CAs
    elif authorities:
        load_authorities(context, authorities, f"{path}: {config.client_ca_file or 'client_ca'}")
    return context


def _client_names(request: web.Request) -> frozenset[str]:
    transport = request.transport
    return subject_names(transport.get_extra_info("peercert") or {}) if transport is not None else frozenset()


def subject_names(certificate: dict[str, Any]) -> frozenset[str]:
    """Returns the subject alternative names. Shortens IPv6 addresses, because OpenSSL writes ::1 as 0:0:0:0:0:0:0:1."""
    return frozenset(
        str(ipaddress.ip_address(value.strip())) if kind == "IP Address" else value
        for kind, value in certificate.get("subjectAltName", ())
    )
