"""Sends requests to the API server, with timeouts and size limits, and explains errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Self

import aiohttp
import msgspec
from aiohttp.http import HttpProcessingError

from podgpu.decode import find_decoder
from podgpu.errors import SourceError, one_line
from podgpu.http_client import explain_errors, open_session, read_body, send_request
from podgpu.kube.config import ApiConfig
from podgpu.kube.credentials import Credentials
from podgpu.kube.objects import KubeObject

_MAX_BYTES = 32 * 1024 * 1024  # a page of 500 large pods
_MAX_OBJECT_BYTES = 4 * 1024 * 1024
"""Maximum size of one line of a watch. etcd stores objects of at most 1.5 MiB; as JSON they are larger."""
_CONNECT_SECONDS = 10.0
_MAX_RETRY_AFTER = 300.0
_FAILURES = {
    "tls": ("tls", "check server, certificate-authority, tls-server-name and the client certificate of the kubeconfig"),
    "timeout": ("timeout", "the API server hangs, or a firewall drops packets"),
    "bad_url": ("bad_kubeconfig", "check clusters[].cluster.server"),
    "not_http": ("bad_answer", "check the address of the API server"),
}
"""Reason of a failure -> reason of the error, and advice. All others are `unreachable`."""
_STATUSES = {401: "unauthorized", 403: "forbidden", 404: "not_found", 410: "gone", 429: "throttled"}


class ApiError(SourceError):
    """An error response of the API server, or an error event of a watch."""

    def __init__(self, reason: str, message: str, status: int = 0, retry_after: float = 0.0) -> None:
        super().__init__(reason, message)
        self.status = status
        self.retry_after = retry_after


class ApiClient:
    """Client of one API server. Must be used and closed in one event loop."""

    def __init__(
        self,
        config: ApiConfig,
        *,
        deadline: float = 30.0,
        metadata_only: bool = False,
    ) -> None:
        """`metadata_only` requests objects without spec and status, which makes a pod ten times smaller."""
        self.config = config
        self._deadline = deadline
        self._credentials = Credentials(config)
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
        """Returns the object or list at a path."""
        return _parse_object(await self.read(path, params), path)

    async def read(self, path: str, params: Mapping[str, str] | None = None) -> bytes:
        headers = self._accept("PartialObjectMetadataList")
        async with self._open("GET", path, self._deadline, params=params, headers=headers) as response:
            return await self._read(response, path)

    async def patch(self, path: str, changes: KubeObject) -> None:
        """Sends a merge patch."""
        headers = {"Content-Type": "application/merge-patch+json"}
        data = msgspec.json.encode(changes)
        async with self._open("PATCH", path, self._deadline, data=data, headers=headers) as response:
            await self._read(response, path)

    @asynccontextmanager
    async def watch(self, path: str, params: Mapping[str, str], silence: float) -> AsyncIterator[AsyncIterator[bytes]]:
        """Opens a watch and yields its lines. Raises SourceError `timeout` after `silence` seconds without data."""
        headers = self._accept("PartialObjectMetadata")
        async with self._open("GET", path, silence, params=params, headers=headers) as response:
            yield self._lines(response, path)

    async def _lines(self, response: aiohttp.ClientResponse, path: str) -> AsyncIterator[bytes]:
        while True:
            with explain_errors(lambda reason, why: self._explain(reason, why, path)):
                try:
                    line = await response.content.readline()
                except (ValueError, HttpProcessingError) as error:  # the type depends on the version of aiohttp
                    problem = f"an event of {path} is larger than the {_MAX_OBJECT_BYTES} bytes that podgpu accepts"
                    raise SourceError("bad_answer", problem) from error
            if not line:
                return
            if line := line.strip():
                yield line

    async def _read(self, response: aiohttp.ClientResponse, path: str) -> bytes:
        with explain_errors(lambda reason, why: self._explain(reason, why, path)):
            async with asyncio.timeout(self._deadline):
                return await read_body(response, _MAX_BYTES, self.config.server + path, "bad_answer")

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, silence: float, headers: Mapping[str, str], **content: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Sends a request and yields a successful response. Raises SourceError."""
        token, tls = await self._credentials.current()
        # A server may buffer a compressed event until the next one.
        headers = {"Accept": "application/json", "Accept-Encoding": "identity", **headers}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        if self._session is None:
            self._session = open_session()
        request = send_request(
            self._session,
            method,
            self.config.server + path,
            headers=headers,
            ssl=tls if tls is not None else True,
            server_hostname=self.config.tls_server_name or None if tls is not None else None,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=silence),
            read_bufsize=_MAX_OBJECT_BYTES // 2,  # aiohttp limits a line to twice this size
            **content,
        )
        async with AsyncExitStack() as stack:
            with explain_errors(lambda reason, why: self._explain(reason, why, path)):
                async with asyncio.timeout(self._deadline):
                    response = await stack.enter_async_context(request)
            if response.status != 200:
                raise await self._read_error(response, path)
            yield response

    def _accept(self, kind: str) -> dict[str, str]:
        if not self._metadata_only:
            return {}
        return {"Accept": f"application/json;as={kind};g=meta.k8s.io;v=v1,application/json"}

    async def _read_error(self, response: aiohttp.ClientResponse, path: str) -> ApiError:
        body = b""
        with suppress(SourceError):
            body = await self._read(response, path)
        if response.status == 401:
            self._credentials.invalidate()
        seconds = response.headers.get("Retry-After", "").strip()  # HTTP also allows a date; API servers send seconds
        retry_after = min(float(seconds), _MAX_RETRY_AFTER) if seconds.isascii() and seconds.isdigit() else 0.0
        return explain_status(response.status, body, path, self.config.origin, retry_after)

    def _explain(self, failure: str, why: str, path: str) -> SourceError:
        if failure == "tls":
            self._credentials.invalidate()
        other = "unreachable", "the API server is down, or a network policy blocks it"
        reason, advice = _FAILURES.get(failure, other)
        return SourceError(reason, f"no answer from {self.config.server} to {path} ({why}): {advice}")


def _parse_object(body: bytes, path: str) -> KubeObject:
    try:
        return find_decoder(KubeObject).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SourceError(
            "bad_answer", f"the answer to {path} is not a JSON object: check that this is an API server"
        ) from error


def explain_status(status: int, body: bytes, path: str, origin: str, retry_after: float = 0.0) -> ApiError:
    """Returns an error that explains a response other than 200. The message of a 403 names the missing permission."""
    reason = _STATUSES.get(status, "server_error" if status >= 500 else "bad_answer")
    text = f"the API server answered {path} with status {status} ({status_message(body)}), credentials from {origin}"
    if status == 403:
        text += ": add this permission to podgpu's ClusterRole or Role"
    return ApiError(reason, text, status, retry_after)


def status_message(body: bytes) -> str:
    """Returns the `message` of a Status object, or the beginning of the body if it is something else."""
    try:
        answer = _parse_object(body, "")
        text = str(answer.get("message") or answer.get("reason") or "")
    except SourceError:
        text = body[:2000].decode("utf-8", "replace")
    return one_line(" ".join(text.split()))[:600] or "no message"
