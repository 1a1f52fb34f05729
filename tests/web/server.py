"""Serves an application on a real socket in a thread, and has a client for it."""

from __future__ import annotations

import asyncio
import http.client
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from typing import Any

from aiohttp import web

from podgpu.node.agent.agent import Agent
from podgpu.tls import MakeTlsContext
from podgpu.web.app import Address, Listener, listening
from podgpu.web.connections import ConnectionLimits
from podgpu.web.exporter_app import application

LOOPBACK = Address("127.0.0.1", 0)
_PATIENCE = 90.0
RELEASE = {"X_Podgpu_Request": "release"}
"""Headers that POST /-/release requires, as arguments of `ask`."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Message
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


@dataclass(frozen=True)
class Client:
    """An HTTP client that sends only the given headers and does not decompress answers."""

    address: Address
    tls: ssl.SSLContext | None = None

    def connect(self) -> http.client.HTTPConnection:
        host, port = self.address.host, self.address.port
        if self.tls is not None:
            return http.client.HTTPSConnection(host, port, timeout=_PATIENCE, context=self.tls)
        return http.client.HTTPConnection(host, port, timeout=_PATIENCE)

    def ask(self, path: str, method: str = "GET", **headers: str) -> Answer:
        connection = self.connect()
        try:
            connection.putrequest(
                method, path, skip_host="Host" in headers, skip_accept_encoding=True
            )
            for name, value in headers.items():
                connection.putheader(name.replace("_", "-"), value)
            connection.endheaders()
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        finally:
            connection.close()


@contextmanager
def running(
    agent: Agent,
    address: Address = LOOPBACK,
    app: Callable[[Agent], web.Application] = application,
    tls: MakeTlsContext | None = None,
    limits: ConnectionLimits | None = None,
) -> Iterator[Client]:
    """Serves the published state of the agent. Tests trigger the agent's readings."""
    with _event_loop() as loop:
        server = listening(Listener(app(agent), address, tls=tls), limits or ConnectionLimits())
        try:
            yield Client(_in(loop, server.__aenter__()))
        finally:
            _in(loop, server.__aexit__(None, None, None))


@contextmanager
def _event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="server")
    thread.start()
    try:
        yield loop
    finally:
        _in(loop, loop.shutdown_default_executor())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _in(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(work, loop).result(_PATIENCE)
