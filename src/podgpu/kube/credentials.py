"""Provides bearer tokens and TLS contexts, and renews them before they expire or after the server rejects them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from subprocess import DEVNULL, PIPE

import msgspec

from podgpu.decode import find_decoder
from podgpu.errors import SourceError, one_line
from podgpu.files import read_bounded
from podgpu.kube.config import ApiConfig, ExecPlugin
from podgpu.tls import ContextCache, load_pair, make_client_context

_FILE_MAX_AGE = 60.0
"""Seconds after which token and certificate files are read again. The kubelet renews tokens before they expire."""
_RENEW_BEFORE_SECONDS = 60.0
_MAX_TOKEN = 64 * 1024
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Credential:
    token: str = field(default="", repr=False)
    certificate: str = field(default="", repr=False)
    key: str = field(default="", repr=False)
    expires: float | None = None  # Unix time, if a plugin reported one


class Credentials:
    """Provides the current token and TLS context. Must be used in one event loop."""

    def __init__(self, config: ApiConfig, clock: Callable[[], float] = time.time, plugin_seconds: float = 30.0) -> None:
        self._config = config
        self._clock = clock
        self._plugin_seconds = plugin_seconds
        self._current: tuple[str, ssl.SSLContext | None] | None = None
        self._renewed_at = 0.0
        self._max_age = 0.0
        self._contexts = ContextCache(self._make_context)
        self._lock = asyncio.Lock()

    async def current(self) -> tuple[str, ssl.SSLContext | None]:
        """Returns the bearer token (may be empty) and the TLS context (None for plain HTTP)."""
        async with self._lock:
            age = self._clock() - self._renewed_at  # negative if the clock was set back
            if self._current is None or not 0 <= age < self._max_age:
                await self._renew()
            assert self._current is not None
            return self._current

    def invalidate(self) -> None:
        """Makes the next request renew the credentials. Call it after the server rejected them."""
        self._max_age = 0.0

    async def _renew(self) -> None:
        config, max_age = self._config, _FILE_MAX_AGE
        credential = Credential()
        if config.plugin is not None and not config.token and not config.token_file:
            credential = await run_plugin(config.plugin, self._plugin_seconds)
            lifetime = float("inf") if credential.expires is None else credential.expires - self._clock()
            max_age = lifetime - min(_RENEW_BEFORE_SECONDS, lifetime / 2)
        try:
            self._current = await asyncio.to_thread(self._load, credential)  # the disk may be slow
        except SourceError as error:
            if self._current is None:
                raise
            # Not fatal: the files may be in the middle of a rotation.
            _log.warning("%s; the previous credentials are still used", error)
        self._max_age, self._renewed_at = max_age, self._clock()

    def _load(self, credential: Credential) -> tuple[str, ssl.SSLContext | None]:
        return credential.token or self._read_token(), self._load_tls(credential)

    def _read_token(self) -> str:
        config = self._config
        if config.token_file:
            try:
                text = read_bounded(config.token_file, _MAX_TOKEN).decode("ascii", "replace").strip()
                return _check_token(text, config.token_file)
            except SourceError as error:
                if not config.token:
                    raise SourceError("no_token", f"cannot read the token: {error}") from error
        return _check_token(config.token, config.origin) if config.token else ""

    def _load_tls(self, credential: Credential) -> ssl.SSLContext | None:
        config = self._config
        if not config.server.startswith("https:"):
            return None
        try:
            ca = config.ca.read() if config.ca else None
            certificate, key = credential.certificate.encode(), credential.key.encode()
            if not certificate:
                certificate, key = config.certificate.read(), config.key.read()
        except SourceError as error:
            raise SourceError("tls", f"{config.origin}: {error}") from error
        return self._contexts.get((ca, certificate, key))

    def _make_context(self, material: tuple[bytes | None, bytes, bytes]) -> ssl.SSLContext:
        (ca, certificate, key), config = material, self._config
        context = make_client_context(ca, config.ca.name or config.origin, config.verify)
        if certificate:
            load_pair(context, certificate, key, f"{config.origin}: the client certificate and its key")
        return context


def _check_token(token: str, where: str, reason: str = "no_token") -> str:
    """Returns the token if it can be sent as a header line. Raises SourceError otherwise."""
    if token and token.isascii() and token.isprintable() and " " not in token:
        return token
    raise SourceError(reason, f"there is no usable token in {where}: it is empty or contains spaces")


# Exec plugins (client.authentication.k8s.io). Their output is secret: messages quote only the last line of stderr.


async def run_plugin(plugin: ExecPlugin, seconds: float) -> Credential:
    def error(problem: str) -> SourceError:
        return SourceError("exec_plugin", f"the credential plugin {plugin.command} {problem}")

    request = {"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": {"interactive": False}}
    info = msgspec.json.encode(request).decode()
    variables = {variable.name: variable.value or "" for variable in plugin.env or ()}
    try:
        process = await asyncio.create_subprocess_exec(
            plugin.command,
            *(plugin.args or ()),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            env={**os.environ, "KUBERNETES_EXEC_INFO": info, **variables},
            start_new_session=True,  # so that killpg also kills its children
        )
    except (OSError, ValueError) as problem:
        hint = " ".join((plugin.install_hint or "install it, or put its full path into the kubeconfig").split())
        raise error(f"cannot be run ({getattr(problem, 'strerror', None) or problem}): {hint}") from problem
    try:
        output, errors = await asyncio.wait_for(process.communicate(), seconds)
    except TimeoutError:
        raise error(f"did not end within {seconds:g} s and was killed") from None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError, PermissionError, TimeoutError):
                os.killpg(process.pid, signal.SIGKILL)
                await asyncio.wait_for(process.communicate(), 1.0)
    if process.returncode != 0:
        last_line = errors.decode("utf-8", "replace").strip().rpartition("\n")[2][:300]
        raise error(f"failed with exit code {process.returncode}: {one_line(last_line)}")
    return parse_credential(output, plugin)


class _ExecStatus(msgspec.Struct, rename="camel"):
    token: str | None = None
    client_certificate_data: str | None = None
    client_key_data: str | None = None
    expiration_timestamp: datetime | None = None


class _ExecCredential(msgspec.Struct, rename="camel"):
    api_version: str
    status: _ExecStatus


def parse_credential(output: bytes, plugin: ExecPlugin) -> Credential:
    name = f"the output of the credential plugin {plugin.command}"
    try:
        answer = find_decoder(_ExecCredential).decode(output)
    except (msgspec.DecodeError, ValueError, RecursionError):  # the original error may quote a secret
        raise SourceError("exec_plugin", f"{name} is not an ExecCredential in JSON: update the plugin") from None
    status = answer.status
    token, certificate, key = status.token or "", status.client_certificate_data or "", status.client_key_data or ""
    if answer.api_version != plugin.api_version or bool(certificate) != bool(key) or not (token or certificate):
        problem = f"must have the API version {plugin.api_version} of the kubeconfig, and a token or a certificate"
        raise SourceError("exec_plugin", f"{name} {problem} with its key: update the plugin")
    if token:
        _check_token(token, name, "exec_plugin")
    expires = status.expiration_timestamp
    if expires is not None and expires.tzinfo is None:
        expires = expires.replace(tzinfo=UTC)
    return Credential(token, certificate, key, expires.timestamp() if expires is not None else None)
