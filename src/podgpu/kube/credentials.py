"""This module owns what proves who asks, and who answers: tokens and certificates, kept, renewed in time or once they
are refused.

Files are read beside the event loop: one on a disk that hangs costs the request that needs it, within a bound, and
nothing else. Nothing that is held is ever logged.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from podgpu.errors import SourceError
from podgpu.files import read_bounded
from podgpu.kube.access import ApiConfig, ExecPlugin
from podgpu.kube.exec_plugin import REASON, run_plugin
from podgpu.tls import load_pair, make_client_context

TOKEN_FILE_SECONDS = 60.0
"""The kubelet replaces a service-account token at 80 % of its life: a minute is soon enough."""
RENEW_BEFORE_SECONDS = 60.0
FILE_SECONDS = 5.0
"""A disk that has not answered by then hangs."""

_LONGEST_TOKEN = 64 * 1024
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Identity:
    """A bearer token, or a certificate that a plugin made, or both, or nothing at all."""

    token: str = field(default="", repr=False)
    certificate: str = field(default="", repr=False)
    key: str = field(default="", repr=False)


class _Material(NamedTuple):
    """What a TLS context is made of."""

    authorities: bytes | None
    certificate: bytes
    key: bytes


class Credentials:
    """The identity to use now. For one event loop."""

    def __init__(
        self,
        config: ApiConfig,
        clock: Callable[[], float] = time.time,
        plugin_seconds: float = 30.0,
        file_seconds: float = FILE_SECONDS,
        read: Callable[[str, int], bytes] = read_bounded,
    ) -> None:
        self._config = config
        self._clock = clock
        self._plugin_seconds = plugin_seconds
        self._file_seconds = file_seconds
        self._read = read
        self._context: tuple[_Material, ssl.SSLContext] | None = None
        self._held: Identity | None = None
        self._taken_at = 0.0
        self._good_for: float | None = None
        """Seconds after which to look again; None: until refused."""
        self._turn = asyncio.Lock()

    async def current(self) -> Identity:
        async with self._turn:
            if self._held is None or self._is_stale():
                await self._renew()
            assert self._held is not None
            return self._held

    async def tls(self, identity: Identity) -> ssl.SSLContext:
        """Made anew when the identity, or a file behind it, is another."""
        try:
            async with asyncio.timeout(self._file_seconds):
                material = await asyncio.to_thread(self._material, identity)
        except TimeoutError as error:
            why = f"{self._config.origin}: the disk with its certificates does not answer"
            raise SourceError("tls", f"{why}: see that it is well") from error
        if self._context is None or self._context[0] != material:
            self._context = material, self._make_context(material)
        return self._context[1]

    def doubt(self, refused: Identity) -> None:
        """The server did not know this one: look again before the next request."""
        if refused == self._held:
            self._good_for = 0.0

    def _is_stale(self) -> bool:
        # An age below zero: the clock was set back, and says nothing.
        return self._good_for is not None and not 0 <= self._clock() - self._taken_at < self._good_for

    async def _renew(self) -> None:
        config = self._config
        if config.token_file:
            self._hold(await self._token_from_file(config.token_file), TOKEN_FILE_SECONDS)
        elif config.token or config.plugin is None:
            token = _checked(config.token, config.origin) if config.token else ""
            self._hold(Identity(token), None)
        else:
            await self._run_plugin(config.plugin)

    def _hold(self, identity: Identity, good_for: float | None) -> None:
        self._held, self._taken_at, self._good_for = identity, self._clock(), good_for

    async def _token_from_file(self, path: str) -> Identity:
        try:
            async with asyncio.timeout(self._file_seconds):
                return Identity(await asyncio.to_thread(self._read_token, path))
        except TimeoutError:
            problem = SourceError("no_token", f"cannot read the token in {path}: the disk does not answer")
        except SourceError as error:
            problem = error
        # Being replaced, perhaps: what was good a minute ago is better than nothing.
        if self._held is not None:
            _log.warning("%s; the last one is kept", problem)
            return self._held
        if self._config.token:
            return Identity(_checked(self._config.token, self._config.origin))
        raise problem

    def _read_token(self, path: str) -> str:
        try:
            text = self._read(path, _LONGEST_TOKEN).decode("ascii", "replace").strip()
        except SourceError as error:
            raise SourceError("no_token", f"cannot read the token: {error}") from error
        return _checked(text, path)

    def _material(self, identity: Identity) -> _Material:
        config = self._config
        certificate, key = identity.certificate.encode(), identity.key.encode()
        try:
            authorities = config.ca.read() if config.ca else None
            if not certificate:
                certificate, key = config.certificate.read(), config.key.read()
        except SourceError as error:
            raise SourceError("tls", f"{config.origin}: {error}") from error
        return _Material(authorities, certificate, key)

    def _make_context(self, material: _Material) -> ssl.SSLContext:
        config = self._config
        context = make_client_context(material.authorities, config.ca.name or config.origin, config.verify)
        if material.certificate:
            names = f"{config.origin}: the client certificate and its key"
            load_pair(context, material.certificate, material.key, names)
        return context

    async def _run_plugin(self, plugin: ExecPlugin) -> None:
        unwanted = threading.Event()
        try:
            made = await asyncio.to_thread(run_plugin, plugin, self._plugin_seconds, unwanted)
        except asyncio.CancelledError:
            unwanted.set()
            raise
        if made.token:
            _checked(made.token, f"what {plugin.command} printed", REASON)
        good_for = None
        if made.expires is not None:
            life = made.expires - self._clock()
            # One that lives two minutes or less is not made anew for every request.
            good_for = life - min(RENEW_BEFORE_SECONDS, life / 2)
        self._hold(Identity(made.token, made.certificate, made.key), good_for)


def _checked(token: str, where: str, reason: str = "no_token") -> str:
    """A token goes into a header line: one that could end the line is none."""
    if token and len(token) <= _LONGEST_TOKEN and token.isascii() and token.isprintable() and " " not in token:
        return token
    raise SourceError(reason, f"there is no usable token in {where}: it is empty, too long or holds spaces")
