"""Sends requests to the API server, with timeouts and size limits, and explains errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec
from aiohttp.http import HttpProcessingError

from podgpu.errors import SourceError, one_line
from podgpu.http_client import Failure, explain_errors, open_session, read_body
from podgpu.kube.config import ApiConfig
from podgpu.kube.credentials import Credentials

Object = dict[str, Any]
"""A JSON object of the API."""
MAX_BYTES = 64 * 1024 * 1024
MAX_OBJECT_BYTES = 4 * 1024 * 1024
"""Limit of one line of a watch. etcd stores at most 1.5 MiB; JSON is larger."""
_MAX_ERROR_BYTES = 64 * 1024
_CONNECT_SECONDS = 10.0
_MAX_RETRY_AFTER = 300.0
_TLS_ADVICE = "check server, certificate-authority, tls-server-name and the client certificate of the kubeconfig"


class ApiError(SourceError):
    """An error response of the API server, or an error event of a watch."""

    def __init__(self, reason: str, message: str, status: int = 0, retry_after: float = 0.0) -> None:
        super().__init__(reason, message)
        self.status = status
        self.retry_after = retry_after


class ApiClient:
    """Client of one API server. For one event loop; close it there."""

    def __init__(
        self,
        config: ApiConfig,
        *,
        deadline: float = 30.0,
        max_bytes: int = MAX_BYTES,
        credentials: Credentials | None = None,
        verbs: Sequence[str] = ("list",),
        metadata_only: bool = False,
    ) -> None:
        """`verbs`: named in the error if a collection is forbidden, so that one message lists all permissions.

        `metadata_only`: objects without spec and status; a pod is then a tenth as large.
        """
        self.config = config
        self.deadline = deadline
        self._max_bytes = max_bytes
        self._credentials = credentials or Credentials(config)
        self._verbs = verbs
        self._metadata_only = metadata_only
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> Object:
        """Returns the object or list at a path."""
        return parse_object(await self.read(path, params), path)

    async def read(self, path: str, params: Mapping[str, str] | None = None) -> bytes:
        """Returns the body of the answer."""
        return await self._exchange("GET", path, params, self._accept("PartialObjectMetadataList"))

    async def submit(self, method: str, path: str, body: Object, content_type: str = "application/json") -> Object:
        """Sends a review (POST), a change (PATCH) or a DELETE, and returns the answer."""
        headers = {"Content-Type": content_type}
        return parse_object(await self._exchange(method, path, None, headers, json.dumps(body).encode()), path)

    @asynccontextmanager
    async def watch(self, path: str, params: Mapping[str, str], silence: float) -> AsyncIterator[AsyncIterator[bytes]]:
        """Opens a watch and yields its lines. `silence` seconds without a byte raise SourceError `timeout`."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=silence)
        async with self._open("GET", path, params, timeout, self._accept("PartialObjectMetadata")) as response:
            yield self._lines(response, path)

    async def _lines(self, response: aiohttp.ClientResponse, path: str) -> AsyncIterator[bytes]:
        while True:
            with explain_errors(lambda failure: self._explain(failure, path)):
                try:
                    line = await response.content.readline()
                except (ValueError, HttpProcessingError) as error:  # depends on the version of aiohttp
                    problem = f"an event of {path} is larger than the {MAX_OBJECT_BYTES} bytes that podgpu accepts"
                    raise SourceError("bad_answer", problem) from error
            if not line:
                return
            if line := line.strip():
                yield line

    async def _exchange(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None,
        headers: Mapping[str, str],
        body: bytes | None = None,
    ) -> bytes:
        timeout = aiohttp.ClientTimeout(total=self.deadline, sock_connect=_CONNECT_SECONDS)
        async with self._open(method, path, params or {}, timeout, headers, body) as response:
            with explain_errors(lambda failure: self._explain(failure, path)):
                return await self._read_body(response, path, self._max_bytes)

    @asynccontextmanager
    async def _open(
        self,
        method: str,
        path: str,
        params: Mapping[str, str],
        timeout: aiohttp.ClientTimeout,
        headers: Mapping[str, str],
        body: bytes | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Sends a request and yields a successful response. Raises SourceError."""
        token, tls = await self._credentials.current()
        # A compressed event could stay in the server's buffer until the next one.
        headers = {"Accept": "application/json", "Accept-Encoding": "identity", **headers}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        if self._session is None:
            self._session = open_session()
        with explain_errors(lambda failure: self._explain(failure, path)):
            async with asyncio.timeout(self.deadline):
                response = await self._session.request(
                    method,
                    self.config.server + path,
                    params=params,
                    data=body,
                    headers=headers,
                    ssl=tls if tls is not None else True,
                    server_hostname=self.config.tls_server_name or None if tls is not None else None,
                    timeout=timeout,
                    allow_redirects=False,
                    read_bufsize=MAX_OBJECT_BYTES // 2,  # aiohttp's limit of a line is twice this
                )
        try:
            if response.status not in (200, 201):
                raise await self._explain_status(response, path)
            yield response
        finally:
            response.close()

    def _accept(self, kind: str) -> dict[str, str]:
        if not self._metadata_only:
            return {}
        return {"Accept": f"application/json;as={kind};g=meta.k8s.io;v=v1,application/json"}

    async def _read_body(self, response: aiohttp.ClientResponse, path: str, limit: int) -> bytes:
        try:
            return await read_body(response, limit, self.config.server + path)
        except SourceError as error:
            raise SourceError("bad_answer", str(error)) from error

    async def _explain_status(self, response: aiohttp.ClientResponse, path: str) -> ApiError:
        body = b""
        with suppress(SourceError), explain_errors(lambda failure: self._explain(failure, path)):
            async with asyncio.timeout(self.deadline):
                body = await self._read_body(response, path, _MAX_ERROR_BYTES)
        if response.status == 401:
            self._credentials.invalidate()
        retry_after = parse_retry_after(response.headers.get("Retry-After", ""))
        return explain_status(response.status, body, path, self.config.origin, self._verbs, retry_after)

    def _explain(self, failure: Failure, path: str) -> SourceError:
        server = self.config.server
        if failure.reason == "tls":
            self._credentials.invalidate()
            return SourceError("tls", f"no TLS connection to {server} ({failure.why}): {_TLS_ADVICE}")
        if failure.reason == "timeout":
            return SourceError(
                "timeout", f"{server} did not answer {path} in time: it hangs, or a firewall drops packets"
            )
        if failure.reason == "bad_url":
            return SourceError("bad_kubeconfig", f"{server} is not a valid URL: check clusters[].cluster.server")
        if failure.reason == "not_http":
            return SourceError("bad_answer", f"the answer of {server} is not HTTP: check the address of the API server")
        if failure.reason in ("truncated", "malformed"):
            return SourceError("unreachable", f"the connection to {server} broke while reading {path} ({failure.why})")
        return SourceError(
            "unreachable", f"cannot connect to {server} ({failure.why}): it is down, or a network policy blocks it"
        )


def parse_object(body: bytes, path: str) -> Object:
    try:
        return msgspec.json.decode(body, type=Object)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SourceError("bad_answer", f"the answer to {path} is not a JSON object: is this an API server?") from error


def parse_retry_after(text: str) -> float:
    """API servers send seconds. A date, which HTTP also allows, is ignored."""
    seconds = text.strip()
    return min(float(seconds[:9]), _MAX_RETRY_AFTER) if seconds.isascii() and seconds.isdigit() else 0.0


def explain_status(
    status: int, body: bytes, path: str, origin: str, verbs: Sequence[str], retry_after: float = 0.0
) -> ApiError:
    """Explains a response other than 200 and 201. A 403 names the missing RBAC rule."""
    message = status_message(body)
    quoted = f" ({message})" if message else ""
    if status == 401:
        reason, text = "unauthorized", f"the API server rejects the credentials of {origin}{quoted}: renew them"
    elif status == 403:
        reason, text = "forbidden", f"{message or f'not allowed to read {path}'}: {missing_rule(path, verbs)}"
    elif status == 404:
        reason, text = "not_found", f"the API server has no {path}{quoted}"
    elif status == 410:
        reason, text = "gone", f"the API server no longer has this version of {path}{quoted}: podgpu lists it again"
    elif status == 429:
        reason, text = "throttled", f"the API server is too busy for {path}{quoted}: podgpu retries"
    elif status >= 500:
        reason, text = "server_error", f"the API server failed on {path} with status {status}{quoted}"
    elif 300 <= status < 400:
        reason, text = "bad_answer", f"{path} is redirected, which podgpu does not follow: configure the API server"
    else:
        reason, text = "bad_answer", f"the API server answered {path} with status {status}{quoted}"
    return ApiError(reason, text, status, retry_after)


def status_message(body: bytes) -> str:
    """Returns the `message` of a Status object, or the beginning of another text."""
    text = body[:2000].decode("utf-8", "replace")
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        answer = msgspec.json.decode(body)
        if isinstance(answer, dict):
            text = str(answer.get("message") or answer.get("reason") or "")
    return one_line(" ".join(text.split()))[:600]


def missing_rule(path: str, verbs: Sequence[str]) -> str:
    """Names the RBAC rule that allows `path`."""
    parts = path.strip("/").split("/")
    group, rest = ("", parts[2:]) if parts[0] == "api" else ("/".join(parts[1:2]), parts[3:])
    role = "ClusterRole"
    if len(rest) > 2 and rest[0] == "namespaces":
        role, rest = f"Role in namespace {rest[1]}", rest[2:]
    if not rest:
        return f'add to podgpu\'s ClusterRole the rule {{nonResourceURLs: ["{path}"], verbs: ["get"]}}'
    allowed = ("get",) if len(rest) > 1 else verbs
    listed = ", ".join(f'"{verb}"' for verb in allowed)
    resource = "/".join([rest[0], *rest[2:]])
    return f'add to podgpu\'s {role} the rule {{apiGroups: ["{group}"], resources: ["{resource}"], verbs: [{listed}]}}'
