"""Sends requests to the API server, with credentials, timeouts and size limits.

Tokens and certificates are renewed before they expire, and after the server rejects them.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import signal
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from datetime import datetime
from functools import lru_cache
from subprocess import DEVNULL, PIPE
from typing import Annotated, Any, NamedTuple, Self

import aiohttp
import msgspec
from aiohttp.http import HttpProcessingError
from msgspec import field

from podgpu.decode import BAD_JSON, find_decoder
from podgpu.errors import SourceError, one_line
from podgpu.files import read_bounded
from podgpu.http_client import explain_errors, open_session, parse_retry_after, read_body
from podgpu.kube.config import ApiConfig, ExecPlugin
from podgpu.kube.objects import KubeObject
from podgpu.tls import load_pair, make_client_context

_log = logging.getLogger(__name__)
_MAX_BYTES = 32 * 1024 * 1024  # enough for a page of 500 large pods
_MAX_PROXIED_BYTES = 64 * 1024 * 1024  # as of a view that is read by its URL
_MAX_OBJECT_BYTES = 4 * 1024 * 1024
"""Maximum size of one line of a watch. An object has at most 1.5 MiB in etcd, and more as JSON."""
_CONNECT_SECONDS = 10.0
_FAILURES = {"tls": "tls", "timeout": "timeout", "not_http": "bad_answer"}
"""Reason from `explain_errors` -> reason of the SourceError. Other reasons become `unreachable`."""
_STATUSES = {401: "unauthorized", 403: "forbidden", 404: "not_found", 409: "conflict", 410: "gone"}


class ApiResponse(NamedTuple):
    status: int
    body: bytes


class ApiClient:
    """Client of one API server. Must be used and closed in one event loop."""

    def __init__(
        self,
        config: ApiConfig,
        deadline: float = 30.0,
        metadata_only: bool = False,
        credentials: Credentials | None = None,
    ) -> None:
        """If `metadata_only`, objects have no spec and status. A pod is then ten times smaller.

        `credentials`: those of an earlier client with the same `config`.
        """
        self.config = config
        self._deadline = deadline
        self._credentials = credentials or Credentials(config)
        self._metadata_only = metadata_only
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> KubeObject:
        """Returns the decoded response: one object, or a list of objects."""
        body = await self.read(path, params)
        try:
            return find_decoder(KubeObject).decode(body)
        except BAD_JSON as error:
            problem = f"the answer to {path} is not a JSON object: check that this is an API server"
            raise SourceError("bad_answer", problem) from error

    async def read(self, path: str, params: Mapping[str, str] | None = None) -> bytes:
        headers = self._accept("PartialObjectMetadataList")
        opened = self._open("GET", path, self._deadline, headers, params=params)
        async with opened as response:
            return await self._read(response, path)

    async def fetch(self, path: str, params: Mapping[str, str] | None = None) -> ApiResponse:
        """Returns the response whatever its status, for paths that another server answers."""
        headers = {"Accept-Encoding": "gzip"}
        async with self._request("GET", path, self._deadline, headers, params=params) as response:
            body = await self._read(response, path, _MAX_PROXIED_BYTES)
            if response.status == 401:
                self._credentials.invalidate()
            return ApiResponse(response.status, body)

    async def create(self, path: str, document: KubeObject) -> bytes:
        """Creates an object and returns the answer."""
        headers = {"Content-Type": "application/json"}
        data = msgspec.json.encode(document)
        async with self._open("POST", path, self._deadline, headers, data=data) as response:
            return await self._read(response, path)

    async def patch(
        self, path: str, changes: KubeObject, kind: str = "application/merge-patch+json"
    ) -> None:
        """Sends a merge patch, or a patch of another content type."""
        headers = {"Content-Type": kind}
        data = msgspec.json.encode(changes)
        async with self._open("PATCH", path, self._deadline, headers, data=data) as response:
            await self._read(response, path)

    async def delete(self, path: str, params: Mapping[str, str] | None = None) -> None:
        """Deletes an object, or all objects that `params` select."""
        async with self._open("DELETE", path, self._deadline, {}, params=params) as response:
            await self._read(response, path)

    @asynccontextmanager
    async def watch(
        self, path: str, params: Mapping[str, str], silence: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Opens a watch and yields its lines.

        Raises SourceError `timeout` after `silence` seconds without data.
        """
        headers = self._accept("PartialObjectMetadata")
        async with self._open("GET", path, silence, headers, params=params) as response:
            yield self._lines(response, path)

    async def _lines(self, response: aiohttp.ClientResponse, path: str) -> AsyncIterator[bytes]:
        while True:
            with self._explaining(path):
                try:
                    line = await response.content.readline()
                # The type depends on the version of aiohttp.
                except (ValueError, HttpProcessingError) as error:
                    raise SourceError(
                        "bad_answer",
                        f"an event of {path} is larger than the {_MAX_OBJECT_BYTES} bytes that "
                        "podgpu accepts",
                    ) from error

            if not line:
                # The server ended the watch.
                return
            if line.strip():
                yield line

    async def _read(
        self, response: aiohttp.ClientResponse, path: str, max_bytes: int = _MAX_BYTES
    ) -> bytes:
        url = self.config.server + path
        with self._explaining(path):
            async with asyncio.timeout(self._deadline):
                return await read_body(response, max_bytes, url, "bad_answer")

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, silence: float, headers: Mapping[str, str], **content: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Raises SourceError for an error status."""
        async with self._request(method, path, silence, headers, **content) as response:
            if response.status not in (200, 201):
                raise await self._read_error(response, path)
            yield response

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, silence: float, headers: Mapping[str, str], **content: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        token, tls = await self._credentials.current()
        # Compression is off, because a server may hold back a compressed event until the next
        # event.
        sent = {"Accept": "application/json", "Accept-Encoding": "identity", **headers}
        if token:
            sent["Authorization"] = f"Bearer {token}"
        if tls is not None:
            content["ssl"] = tls
            content["server_hostname"] = self.config.tls_server_name
        if self._session is None:
            self._session = open_session()

        request = self._session.request(
            method,
            self.config.server + path,
            headers=sent,
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=_CONNECT_SECONDS, sock_read=silence
            ),
            # aiohttp limits a line to twice this size.
            read_bufsize=_MAX_OBJECT_BYTES // 2,
            allow_redirects=False,
            **content,
        )
        # The deadline is for the begin of the response. A watch then lasts longer.
        async with AsyncExitStack() as stack:
            with self._explaining(path):
                async with asyncio.timeout(self._deadline):
                    response = await stack.enter_async_context(request)
            yield response

    def _accept(self, kind: str) -> dict[str, str]:
        if not self._metadata_only:
            return {}
        return {"Accept": f"application/json;as={kind};g=meta.k8s.io;v=v1,application/json"}

    async def _read_error(self, response: aiohttp.ClientResponse, path: str) -> SourceError:
        body = b""
        with suppress(SourceError):
            body = await self._read(response, path)
        if response.status == 401:
            self._credentials.invalidate()
        error = explain_status(response.status, body, path, self.config.origin)
        error.retry_after = parse_retry_after(response.headers.get("Retry-After", ""), time.time())
        return error

    def _explaining(self, path: str) -> AbstractContextManager[None]:
        """Converts the errors of a request to SourceErrors."""

        def explain(failure: str, why: str) -> SourceError:
            # The CA or the client certificate may have been replaced.
            if failure == "tls":
                self._credentials.invalidate()
            return SourceError(
                _FAILURES.get(failure, "unreachable"),
                f"no answer from {self.config.server} to {path} ({why}): check that the API server "
                "runs, that the kubeconfig is right, and that network policies allow access",
            )

        return explain_errors(explain)


def explain_status(status: int, body: bytes, path: str, origin: str) -> SourceError:
    """Returns the SourceError for an error status, or for an error event of a watch.

    Quotes the server's message.
    """
    # 429 and 5xx are problems of the server.
    other_reason = "server_error" if status >= 429 else "bad_answer"
    reason = _STATUSES.get(status, other_reason)
    message = ""
    with suppress(*BAD_JSON):
        message = str(find_decoder(KubeObject).decode(body).get("message") or "")

    # Not every answer is a Status, for example that of a proxy.
    message = message or body[:2000].decode("utf-8", "replace")
    message = one_line(" ".join(message.split()))[:600]
    text = (
        f"the API server answered {path} with status {status} ({message}); the credentials are "
        f"from {origin}"
    )
    if status == 403:
        text += ": add this permission to podgpu's ClusterRole or Role"

    return SourceError(reason, text)


# Seconds after which token and certificate files are read again, because the kubelet replaces
# expiring tokens.
_FILE_MAX_AGE = 60.0
_RENEW_BEFORE_SECONDS = 60.0
_MAX_TOKEN = 64 * 1024


class Credential(msgspec.Struct):
    """The credential that an exec plugin prints (`status` of an ExecCredential)."""

    token: str | None = None
    certificate: str | None = field(name="clientCertificateData", default=None)
    key: str | None = field(name="clientKeyData", default=None)
    expires: Annotated[datetime, msgspec.Meta(tz=True)] | None = field(
        name="expirationTimestamp", default=None
    )

    def __repr__(self) -> str:
        return "Credential(…)"  # the fields are secrets


class Credentials:
    """Provides the current token and TLS context. Must be used in one event loop."""

    def __init__(
        self,
        config: ApiConfig,
        clock: Callable[[], float] = time.time,
        is_attended: bool = False,
    ) -> None:
        """`is_attended`: a person waits, so the first login may ask him in the terminal."""
        self._config = config
        self._clock = clock
        self._is_attended = is_attended
        self._current: tuple[str, ssl.SSLContext | None] | None = None
        self._renewed_at = 0.0
        self._renew_at = 0.0
        # aiohttp reuses a connection only for the same context.
        self._cached_context = lru_cache(maxsize=1)(self._make_context)
        self._lock = asyncio.Lock()

    async def current(self) -> tuple[str, ssl.SSLContext | None]:
        """Returns the bearer token (may be empty) and the TLS context (None for plain HTTP)."""
        async with self._lock:
            # The lower bound matters if the system clock is set back.
            is_current = self._renewed_at <= self._clock() < self._renew_at
            if self._current is None or not is_current:
                await self._renew()
            assert self._current is not None
            return self._current

    def invalidate(self) -> None:
        """Makes the next request renew the credentials. Called after the server rejected them."""
        self._renew_at = 0.0

    async def _renew(self) -> None:
        self._renewed_at = self._clock()
        config = self._config
        if config.plugin is None or config.token or config.token_file:
            credential = Credential()
            renew_at = self._renewed_at + _FILE_MAX_AGE
        else:
            credential = await self._run_plugin(config.plugin)
            renew_at = self._find_renewal_time(credential)

        try:
            # Files are read in a thread, because the disk may be slow.
            token = await asyncio.to_thread(self._read_token, credential)
            tls = await asyncio.to_thread(self._load_tls, credential)
            self._current = token, tls
        except SourceError as error:
            if self._current is None:
                raise
            # The old credentials are kept, because another program may be replacing the files right
            # now.
            _log.warning("%s; the previous credentials are still used", error)

        self._renew_at = renew_at

    async def _run_plugin(self, plugin: ExecPlugin) -> Credential:
        cluster = None
        if plugin.provide_cluster_info:
            cluster = await asyncio.to_thread(describe_cluster, self._config)

        credential = await run_plugin(plugin, is_attended=self._is_attended, cluster=cluster)
        # Later, the terminal may belong to the screen of `podgpu top`.
        self._is_attended = False
        return credential

    def _find_renewal_time(self, credential: Credential) -> float:
        """Returns a time shortly before the credential expires.

        A credential that expires soon is kept for half of its time, so that it is not renewed at
        once.
        """
        if credential.expires is None:
            return float("inf")
        expires = credential.expires.timestamp()
        remaining = expires - self._clock()
        return expires - min(_RENEW_BEFORE_SECONDS, remaining / 2)

    def _read_token(self, credential: Credential) -> str:
        config = self._config
        if credential.token:
            return credential.token

        if not config.token_file:
            if not config.token:
                return ""
            return _check_token(config.token, config.origin)

        try:
            text = read_bounded(config.token_file, _MAX_TOKEN).decode("ascii", "replace").strip()
        except SourceError as error:
            raise SourceError("no_token", f"cannot read the token: {error}") from error

        return _check_token(text, config.token_file)

    def _load_tls(self, credential: Credential) -> ssl.SSLContext | None:
        """Returns None if the API server is read without TLS."""
        config = self._config
        if not config.server.startswith("https:"):
            return None

        try:
            ca = config.ca.read() if config.ca else None
            if credential.certificate and credential.key:
                certificate = credential.certificate.encode()
                key = credential.key.encode()
            else:
                certificate = config.certificate.read()
                key = config.key.read()
        except SourceError as error:
            raise SourceError("tls", f"{config.origin}: {error}") from error

        return self._cached_context(ca, certificate, key)

    def _make_context(self, ca: bytes | None, certificate: bytes, key: bytes) -> ssl.SSLContext:
        config = self._config
        context = make_client_context(ca, config.ca.name or config.origin, config.verify)
        if certificate:
            name = f"{config.origin}: the client certificate and its key"
            load_pair(context, certificate, key, name)
        return context


def _check_token(token: str, where: str, reason: str = "no_token") -> str:
    """Returns the token. Raises SourceError if it cannot be sent in a header."""
    is_plain = token.isascii() and token.isprintable() and " " not in token
    if token and is_plain:
        return token
    raise SourceError(
        reason, f"there is no usable token in {where}: it is empty or contains spaces"
    )


# Exec plugins (client.authentication.k8s.io). Their output is secret: messages quote only the last
# line of stderr.


def describe_cluster(config: ApiConfig) -> KubeObject:
    """Returns the cluster as plugins with provideClusterInfo expect it. Raises SourceError."""
    cluster: KubeObject = {"server": config.server}
    if config.tls_server_name:
        cluster["tls-server-name"] = config.tls_server_name
    if not config.verify:
        cluster["insecure-skip-tls-verify"] = True
    if config.ca:
        cluster["certificate-authority-data"] = base64.b64encode(config.ca.read()).decode()

    # kubectl sends the key also without a value.
    cluster["config"] = config.plugin_config
    return cluster


async def run_plugin(
    plugin: ExecPlugin,
    seconds: float = 30.0,
    is_attended: bool = False,
    cluster: KubeObject | None = None,
) -> Credential:
    """`is_attended`: the plugin may use the terminal, and as much time as the person needs."""
    is_interactive = _uses_terminal(plugin, is_attended)
    spec: KubeObject = {"interactive": is_interactive}
    if cluster is not None:
        spec["cluster"] = cluster

    process = await _start_plugin(plugin, spec, is_attended)
    try:
        timeout = None if is_attended else seconds
        output, errors = await asyncio.wait_for(process.communicate(), timeout)
    except TimeoutError:
        raise _plugin_error(plugin, f"did not end within {seconds:g} s and was killed") from None
    finally:
        if process.returncode is None:
            await _kill_plugin(process, is_interactive)

    if process.returncode != 0:
        # If the plugin wrote to the terminal, its message is there.
        text = f"failed with exit code {process.returncode}"
        output_text = (errors or b"").decode("utf-8", "replace").strip()
        _, _, last_line = output_text.rpartition("\n")
        if last_line:
            text += f": {one_line(last_line[:300])}"
        raise _plugin_error(plugin, text)

    return parse_credential(output, plugin)


def _plugin_error(plugin: ExecPlugin, problem: str) -> SourceError:
    return SourceError("exec_plugin", f"the credential plugin {plugin.command} {problem}")


def _uses_terminal(plugin: ExecPlugin, is_attended: bool) -> bool:
    has_terminal = is_attended and sys.stdin is not None and sys.stdin.isatty()
    is_interactive = has_terminal and plugin.interactive_mode != "Never"
    if plugin.interactive_mode == "Always" and not is_interactive:
        raise _plugin_error(plugin, "needs a terminal (interactiveMode: Always)")
    return is_interactive


async def _start_plugin(
    plugin: ExecPlugin, spec: KubeObject, is_attended: bool
) -> asyncio.subprocess.Process:
    request = {"apiVersion": plugin.api_version, "kind": "ExecCredential", "spec": spec}
    info = msgspec.json.encode(request).decode()
    environment = {**os.environ, "KUBERNETES_EXEC_INFO": info}
    for variable in plugin.env or ():
        environment[variable.name] = variable.value or ""

    is_interactive = spec["interactive"]
    try:
        return await asyncio.create_subprocess_exec(
            plugin.command,
            *(plugin.args or ()),
            stdin=None if is_interactive else DEVNULL,
            stdout=PIPE,
            # A login often prints an address to open, or a code to enter.
            stderr=None if is_attended else PIPE,
            env=environment,
            # So that killpg also kills the plugin's children. Only programs of our own session can
            # read from the terminal.
            start_new_session=not is_interactive,
        )
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        hint = plugin.install_hint or "install it, or put its full path into the kubeconfig"
        text = f"cannot be run ({reason}): {' '.join(hint.split())}"
        raise _plugin_error(plugin, text) from problem


async def _kill_plugin(process: asyncio.subprocess.Process, is_interactive: bool) -> None:
    with suppress(ProcessLookupError, PermissionError, TimeoutError):
        if is_interactive:
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.wait_for(process.communicate(), 1.0)


class _ExecCredential(msgspec.Struct, rename="camel"):
    api_version: str
    status: Credential


def parse_credential(output: bytes, plugin: ExecPlugin) -> Credential:
    name = f"the output of the credential plugin {plugin.command}"
    try:
        answer = find_decoder(_ExecCredential).decode(output)
    # Without the original error, which may quote a secret.
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise SourceError(
            "exec_plugin", f"{name} is not an ExecCredential in JSON: update the plugin"
        ) from None

    credential = answer.status
    is_pair = bool(credential.certificate) == bool(credential.key)
    has_any = bool(credential.token or credential.certificate)
    if answer.api_version != plugin.api_version or not is_pair or not has_any:
        raise SourceError(
            "exec_plugin",
            f"{name} must have the API version {plugin.api_version} of the kubeconfig, and a token "
            "or a certificate with its key: update the plugin",
        )

    if credential.token:
        _check_token(credential.token, name, "exec_plugin")

    return credential
