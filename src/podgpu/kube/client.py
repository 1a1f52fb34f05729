"""This module asks the API server, each time with a deadline and a bound on the answer. Only `submit` may change
anything there."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from types import TracebackType
from typing import Self

import aiohttp

from podgpu.errors import SourceError
from podgpu.http_client import explain_errors, open_session, read_body
from podgpu.kube.access import ApiConfig
from podgpu.kube.answers import Object, Refused, explain_failure, explain_status
from podgpu.kube.credentials import Credentials, Identity

LARGEST_ANSWER = 64 * 1024 * 1024
DEADLINE = 30.0

_LARGEST_OBJECT = 4 * 1024 * 1024
"""Of what is parsed in one piece: no other thread runs meanwhile."""
_LARGEST_REFUSAL = 64 * 1024
_CONNECT_SECONDS = 10.0


class ApiClient:
    """Asks one API server. For one event loop; close it there."""

    def __init__(
        self,
        config: ApiConfig,
        *,
        deadline: float = DEADLINE,
        largest_answer: int = LARGEST_ANSWER,
        credentials: Credentials | None = None,
        verbs: Sequence[str] = ("list",),
        metadata_only: bool = False,
    ) -> None:
        """`verbs`: what the caller does with collections; a refusal names the permission for all of it at once.

        `metadata_only`: spec and status are not asked for, which makes a pod's answer a tenth as large.
        """
        self.config = config
        self.deadline = deadline
        self.largest_answer = largest_answer
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
        """The JSON object at a path. A server that asks to come back later is obeyed within the deadline."""
        clock = asyncio.get_running_loop().time
        give_up_at = clock() + self.deadline
        while True:
            try:
                return await self.ask(path, params)
            except Refused as error:
                # Up to half as long again, so that many askers do not come back as one.
                wait = error.retry_after * (1 + random.random() / 2)
                if error.reason != "throttled" or not wait or clock() + wait >= give_up_at:
                    raise
                await asyncio.sleep(wait)

    async def ask(self, path: str, params: Mapping[str, str] | None = None) -> Object:
        """The same, but only once."""
        return _parse(await self.read(path, params, min(self.largest_answer, _LARGEST_OBJECT)), path)

    async def read(self, path: str, params: Mapping[str, str] | None = None, most: int | None = None) -> bytes:
        """The answer as it came, whole and not too large."""
        timeout = aiohttp.ClientTimeout(total=self.deadline, sock_connect=_CONNECT_SECONDS)
        response = await self._open(path, params or {}, timeout, self._accept("PartialObjectMetadataList"))
        try:
            with self._explained(path):
                return await self._read(response, most or self.largest_answer, path)
        finally:
            response.close()

    async def submit(self, method: str, path: str, body: Object, kind: str = "application/json") -> Object:
        """A review (POST) or a change (PATCH, whose `kind` says what sort of patch it is), and what came of it."""
        timeout = aiohttp.ClientTimeout(total=self.deadline, sock_connect=_CONNECT_SECONDS)
        content = json.dumps(body).encode()
        response = await self._open(path, {}, timeout, {"Content-Type": kind}, method, content)
        try:
            with self._explained(path):
                return _parse(await self._read(response, _LARGEST_OBJECT, path), path)
        finally:
            response.close()

    async def stream(self, path: str, params: Mapping[str, str], idle: float) -> AsyncGenerator[bytes, None]:
        """The body of an answer that does not end soon, in pieces; the first is empty and says: accepted.

        Ends when the server ends it; `idle` seconds without a byte are a `timeout`. Close it when done (aclosing).
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=idle)
        response = await self._open(path, params, timeout, self._accept("PartialObjectMetadata"))
        try:
            _probe_when_silent(response)
            yield b""
            while True:
                with self._explained(path):
                    piece = await response.content.readany()
                if not piece:
                    return
                yield piece
        finally:
            response.close()

    async def _open(
        self,
        path: str,
        params: Mapping[str, str],
        timeout: aiohttp.ClientTimeout,
        headers: Mapping[str, str],
        method: str = "GET",
        body: bytes | None = None,
    ) -> aiohttp.ClientResponse:
        """A good answer, its body still to be read. Credentials that were refused are renewed once."""
        identity = await self._credentials.current()
        response = await self._send(path, params, timeout, headers, identity, method, body)
        if response.status == 401:
            self._credentials.doubt(identity)
            with ExitStack() as unless_kept:
                unless_kept.callback(response.close)
                fresh = await self._credentials.current()
                if fresh == identity:
                    unless_kept.pop_all()
            if fresh != identity:
                response = await self._send(path, params, timeout, headers, fresh, method, body)
        if response.status in (200, 201):
            return response
        try:
            body = b""
            with suppress(SourceError), self._explained(path):
                async with asyncio.timeout(self.deadline):
                    body = await self._read(response, _LARGEST_REFUSAL, path)
            raise explain_status(response.status, body, response.headers, path, self.config.origin, self._verbs)
        finally:
            response.close()

    async def _send(
        self,
        path: str,
        params: Mapping[str, str],
        timeout: aiohttp.ClientTimeout,
        headers: Mapping[str, str],
        identity: Identity,
        method: str,
        body: bytes | None,
    ) -> aiohttp.ClientResponse:
        is_https = self.config.server.startswith("https:")
        tls = await self._credentials.tls(identity) if is_https else True
        name = self.config.tls_server_name or None if is_https else None
        # Compressed, an event could wait in the server's buffer for the next.
        carried = {"Accept": "application/json", "Accept-Encoding": "identity", **headers}
        if identity.token:
            carried["Authorization"] = f"Bearer {identity.token}"
        if self._session is None:
            self._session = open_session()
        with self._explained(path):
            async with asyncio.timeout(self.deadline):
                return await self._session.request(
                    method,
                    self.config.server + path,
                    params=dict(params),
                    data=body,
                    headers=carried,
                    ssl=tls,
                    server_hostname=name,
                    timeout=timeout,
                    allow_redirects=False,
                )

    def _accept(self, part: str) -> dict[str, str]:
        """A server that cannot leave the rest out sends all of it: what is kept is the same."""
        if not self._metadata_only:
            return {}
        return {"Accept": f"application/json;as={part};g=meta.k8s.io;v=v1,application/json"}

    async def _read(self, response: aiohttp.ClientResponse, most: int, path: str) -> bytes:
        try:
            return await read_body(response, most, f"{self.config.server}{path}")
        except SourceError as error:
            raise SourceError("bad_answer", str(error)) from error

    def _explained(self, path: str) -> AbstractContextManager[None]:
        return explain_errors(lambda failure: explain_failure(failure, self.config.server, path))


def _parse(body: bytes, path: str) -> Object:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise SourceError("bad_answer", f"the answer to {path} is not JSON: is this an API server?") from error
    if not isinstance(answer, dict):
        raise SourceError("bad_answer", f"the answer to {path} is not a JSON object: is this an API server?")
    return answer


def _probe_when_silent(response: aiohttp.ClientResponse) -> None:
    """Let the kernel find out within about a minute and a half that the other machine is gone: a watch may be silent
    for minutes, and a machine that lost its power says no goodbye."""
    transport = response.connection.transport if response.connection is not None else None
    peer = transport.get_extra_info("socket") if transport is not None else None
    if peer is None:
        return
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 45), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
