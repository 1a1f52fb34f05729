"""A webhook receiver over real HTTP, whose answers the test sets."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from aiohttp import web

from podgpu.node.agent.agent import Agent
from tests.web.server import running

SECRET = "T0SECRET/B0SECRET/x1y2z3SECRET"


@dataclass
class Reply:
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class Receiver:
    url: str = ""
    replies: deque[Reply] = field(default_factory=deque)  # the next ones; then 200
    bodies: list[dict[str, Any]] = field(default_factory=list)  # of all requests
    accepted: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    is_hanging: threading.Event = field(default_factory=threading.Event)

    @property
    def events(self) -> list[tuple[str, list[str]]]:
        """Event and keys of each accepted message."""
        return [(each["event"], [item["key"] for item in each["items"]]) for each in self.accepted]

    async def _receive(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        reply = self.replies.popleft() if self.replies else Reply()
        while self.is_hanging.is_set():
            await asyncio.sleep(0.01)
        await asyncio.sleep(reply.seconds)
        if 200 <= reply.status < 300:
            self.accepted.append(body)
        # Some receivers quote the URL.
        text = f"{reply.status} for {request.url}"
        return web.Response(status=reply.status, headers=reply.headers, text=text)

    @contextmanager
    def served(self) -> Iterator[Receiver]:
        app = web.Application()
        app.add_routes([web.post("/services/{secret:.*}", self._receive)])
        with running(cast(Agent, None), app=lambda _: app) as client:
            address = client.address
            self.url = f"http://{address.host}:{address.port}/services/{SECRET}"
            yield self
            self.is_hanging.clear()
