"""Provides bearer tokens and TLS contexts, and renews them before they expire or after the server rejects them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from podgpu.errors import SourceError
from podgpu.files import read_bounded
from podgpu.kube.config import ApiConfig, ExecPlugin
from podgpu.tls import load_pair, make_client_context

_FILE_MAX_AGE = 60.0
"""Token and certificate files are read again after this. The kubelet replaces a token at 80 % of its lifetime."""
_RENEW_BEFORE_SECONDS = 60.0
_FILE_SECONDS = 5.0
_MAX_TOKEN = 64 * 1024
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Credential:
    token: str = field(default="", repr=False)
    certificate: str = field(default="", repr=False)
    key: str = field(default="", repr=False)
    expires: float | None = None
    """Unix time, if a plugin reported one."""


class Credentials:
    """The token and TLS context to use now. For one event loop."""

    def __init__(
        self,
        config: ApiConfig,
        clock: Callable[[], float] = time.time,
        plugin_seconds: float = 30.0,
    ) -> None:
        self._config = config
        self._clock = clock
        self._plugin_seconds = plugin_seconds
        self._credential: Credential | None = None
        self._renewed_at = 0.0
        self._max_age: float | None = None
        self._tls: tuple[tuple[bytes | None, bytes, bytes], ssl.SSLContext] | None = None
        self._lock = asyncio.Lock()

    async def current(self) -> tuple[str, ssl.SSLContext | None]:
        """Returns the bearer token (may be empty) and the TLS context (None for plain HTTP)."""
        async with self._lock:
            age = self._clock() - self._renewed_at  # negative if the clock was set back
            if self._credential is None or (self._max_age is not None and not 0 <= age < self._max_age):
                await self._renew()
            assert self._credential is not None
            return self._credential.token, self._tls[1] if self._tls is not None else None

    def invalidate(self) -> None:
        """Renews before the next request. Call it when the server rejected the credentials."""
        self._max_age = 0.0

    async def _renew(self) -> None:
        plugin = self._config.plugin
        if plugin is not None and not self._config.token and not self._config.token_file:
            credential = await run_plugin(plugin, self._plugin_seconds)
            max_age = None
            if credential.expires is not None:
                lifetime = credential.expires - self._clock()
                max_age = lifetime - min(_RENEW_BEFORE_SECONDS, lifetime / 2)
            await self._in_thread(lambda: self._load_tls(credential))
        else:
            credential = await self._in_thread(self._load_files)
            max_age = _FILE_MAX_AGE
        self._credential, self._max_age, self._renewed_at = credential, max_age, self._clock()

    async def _in_thread(self, read: Callable[[], Credential]) -> Credential:
        """Keeps the previous credential if files cannot be read: they may be about to be replaced."""
        try:
            async with asyncio.timeout(_FILE_SECONDS):
                return await asyncio.to_thread(read)
        except (SourceError, TimeoutError) as error:
            problem = error
            if isinstance(error, TimeoutError):
                problem = SourceError("no_token", f"{self._config.origin}: reading its files timed out: check the disk")
            if self._credential is None:
                raise problem from error
            _log.warning("%s; the previous credentials are kept", problem)
            return self._credential

    def _load_files(self) -> Credential:
        config = self._config
        credential = Credential(_check_token(config.token, config.origin) if config.token else "")
        if config.token_file:
            try:
                text = read_bounded(config.token_file, _MAX_TOKEN).decode("ascii", "replace").strip()
                credential = Credential(_check_token(text, config.token_file))
            except SourceError as error:
                if not config.token:
                    raise SourceError("no_token", f"cannot read the token: {error}") from error
        return self._load_tls(credential)

    def _load_tls(self, credential: Credential) -> Credential:
        config = self._config
        if not config.server.startswith("https:"):
            return credential
        try:
            ca = config.ca.read() if config.ca else None
            certificate, key = credential.certificate.encode(), credential.key.encode()
            if not certificate:
                certificate, key = config.certificate.read(), config.key.read()
        except SourceError as error:
            raise SourceError("tls", f"{config.origin}: {error}") from error
        material = ca, certificate, key
        if self._tls is None or self._tls[0] != material:
            context = make_client_context(ca, config.ca.name or config.origin, config.verify)
            if certificate:
                load_pair(context, certificate, key, f"{config.origin}: the client certificate and its key")
            self._tls = material, context
        return credential


def _check_token(token: str, where: str, reason: str = "no_token") -> str:
    """A token becomes a header line, so it must not contain a line break."""
    if token and len(token) <= _MAX_TOKEN and token.isascii() and token.isprintable() and " " not in token:
        return token
    raise SourceError(reason, f"there is no usable token in {where}: it is empty, too long or contains spaces")


# Exec plugins (client.authentication.k8s.io). Their output is secret: messages quote only the last line of stderr.


async def run_plugin(plugin: ExecPlugin, seconds: float) -> Credential:
    spec: dict[str, Any] = {"interactive": False}
    if plugin.cluster is not None:
        spec["cluster"] = plugin.cluster
    info = {"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": spec}
    environment = {**os.environ, "KUBERNETES_EXEC_INFO": json.dumps(info), **dict(plugin.env)}
    with tempfile.TemporaryFile() as errors:  # not a pipe: a background process of the plugin may keep it open
        try:
            process = subprocess.Popen(
                [plugin.command, *plugin.args],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,  # killpg then reaches its children
            )
        except (OSError, ValueError) as error:
            hint = plugin.install_hint or "install it, or put its full path into the kubeconfig"
            reason = getattr(error, "strerror", None) or error
            raise _plugin_error(f"cannot run the credential plugin {plugin.command}: {reason}: {hint}") from error
        try:
            output = await asyncio.to_thread(_read_output, process, seconds)
        except subprocess.TimeoutExpired:
            problem = f"the credential plugin {plugin.command} timed out and was killed"
            raise _plugin_error(problem + _last_line(errors)) from None
        finally:
            _kill(process)  # if this task is cancelled; the thread then ends by itself
        if process.returncode != 0:
            problem = f"the credential plugin {plugin.command} failed with exit code {process.returncode}"
            raise _plugin_error(problem + _last_line(errors))
    return parse_credential(output, plugin)


def _read_output(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    with process:
        try:
            return process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            _kill(process)
            raise


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _last_line(errors: Any) -> str:
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - 4096))
    lines = errors.read().decode("utf-8", "replace").strip().splitlines()
    text = "".join(letter for letter in lines[-1] if letter.isprintable())[:300] if lines else ""
    return f": {text}" if text else ""


def _plugin_error(message: str) -> SourceError:
    return SourceError("exec_plugin", message)


class _ExecStatus(msgspec.Struct, rename="camel"):
    token: str | None = None
    client_certificate_data: str | None = None
    client_key_data: str | None = None
    expiration_timestamp: datetime | None = None


class _ExecCredential(msgspec.Struct, rename="camel"):
    kind: str = ""
    api_version: str = ""
    status: _ExecStatus | None = None


def parse_credential(output: bytes, plugin: ExecPlugin) -> Credential:
    def error(problem: str) -> SourceError:
        return _plugin_error(
            f"the output of the credential plugin {plugin.command} {problem}: run it by hand, or update it"
        )

    try:
        answer = msgspec.json.decode(output, type=_ExecCredential)
    except msgspec.ValidationError as invalid:
        raise error(f"is not an ExecCredential ({invalid})") from None
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise error("is not JSON") from None
    if answer.kind != "ExecCredential":
        raise error("is not an ExecCredential")
    if answer.api_version != plugin.api_version:
        raise error(f"is not of the version in the kubeconfig, {plugin.api_version}")
    status = answer.status or _ExecStatus()
    if bool(status.client_certificate_data) != bool(status.client_key_data) or not (
        status.token or status.client_certificate_data
    ):
        raise error("has neither a token nor a certificate with its key")
    if status.token:
        _check_token(status.token, f"the output of {plugin.command}", "exec_plugin")
    expires = status.expiration_timestamp
    if expires is not None and expires.tzinfo is None:
        expires = expires.replace(tzinfo=UTC)
    return Credential(
        status.token or "",
        status.client_certificate_data or "",
        status.client_key_data or "",
        expires.timestamp() if expires is not None else None,
    )
