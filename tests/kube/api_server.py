"""An API server as far as get, list and watch go: real HTTP on 127.0.0.1, and ill on request.

Nobody can write to it over HTTP; whoever holds it changes its objects from any thread. Where it matters it does as
kube-apiserver 1.35 was seen to do: once started anew it has forgotten every version from before, a watch from one is
accepted with status 200 and ended by an ERROR event, and while its RBAC rules are not read it forbids everything
(`forbids_first`). It sends bookmarks only when told to: a real one does every minute, and before a watch ends, but none
while nothing of that kind changes in the whole cluster.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from aiohttp import web

from tests.kube.api_objects import (
    KINDS,
    Asked,
    Collections,
    Object,
    event_line,
    event_lines,
    group,
    key_of,
    parse_asked,
    shown,
    status_object,
)


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked. `port` is the client's: two requests with the same one shared a connection."""

    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str] = field(repr=False)
    port: int
    at: float
    """By the monotonic clock, when it arrived."""

    @property
    def watches(self) -> bool:
        return self.query.get("watch") == "true"

    @property
    def token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")


@dataclass(eq=False, slots=True)
class _Watch:
    asked: Asked
    queue: asyncio.Queue[bytes | None]
    """What to send; None ends the answer as it should end."""
    request: web.Request

    def cut(self) -> None:
        if self.request.transport is not None:
            self.request.transport.abort()


class SimulatedApiServer:
    """Serves what its attributes and stored objects say at the moment of the request; all may change while it runs."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.tokens: frozenset[str] | None = None
        """Those it knows; None: anybody may ask."""
        self.resource_api_versions: tuple[str, ...] = ("v1", "v1beta1")
        """Versions of resource.k8s.io served; none: the group is not there."""
        self.refusal: tuple[int, str] | None = None
        """Status and message for every request."""
        self.refuse_watches_only = False
        self.forbidden_paths: frozenset[str] = frozenset()
        self.forbids_first = 0
        """So many requests after a start are forbidden: its RBAC rules are not read yet."""
        self.retry_after: int | None = None
        self.raw_answer: bytes | None = None
        """Sent, with status 200, instead of any list."""
        self.raw_headers: Mapping[str, str] = {"Content-Type": "application/json"}
        self.raw_endless = False
        """It is sent again and again, until the client has enough."""
        self.forget_pages = 0
        """So many times whoever asks for the next page of a list is told 410."""
        self.gone_as_event = True
        """A version too old is refused inside the stream, as kube-apiserver does, or else by status."""
        self.holds_back = False
        """Watches are told of no change: as behind a proxy that waits for more to send."""
        self.cut_after: int | None = None
        """Every watch breaks off after so many bytes."""
        self.requests: list[Request] = []
        self._tls = tls
        self._port = 0
        self._answered_since_start = 0
        self._held = Collections()
        self._watches: set[_Watch] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping = asyncio.Event()
        self._answering = asyncio.Event()
        self._answering.set()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._port}"

    @property
    def version(self) -> int:
        return self._held.version

    @property
    def open_watches(self) -> int:
        return len(self._watches)

    def start(self) -> None:
        """On the port it had before, if it ran before; what was changed before is no longer told to watches."""
        self._answered_since_start = 0
        if self._port:
            self._held.start_anew()
        ready = threading.Event()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), name="simulated-api-server")
        self._thread.start()
        ready.wait()

    def stop(self) -> None:
        """At once: open connections break."""
        if self._loop is None or self._thread is None:
            return
        self._do(self._stopping.set)
        self._thread.join()
        self._loop = self._thread = None

    def put(self, resource: str, *objects: Object) -> None:
        """Add objects or replace those of the same name; uid and resourceVersion are given to them."""

        def change_all() -> None:
            for one in objects:
                self._change(key_of(resource, one), one)

        self._do(change_all)

    def remove(self, resource: str, name: str, namespace: str = "") -> None:
        self._do(lambda: self._change((resource, namespace, name), None))

    def bookmark(self) -> None:
        """Tell every watch how far the world has got."""
        self._each(lambda watch: watch.queue.put_nowait(self._bookmark(watch.asked)))

    def send(self, raw: bytes) -> None:
        """Put these bytes into every open watch."""
        self._each(lambda watch: watch.queue.put_nowait(raw))

    def end_watches(self) -> None:
        """End every watch as a server does when its time is over."""
        self._each(lambda watch: watch.queue.put_nowait(None))

    def cut_watches(self) -> None:
        """Break the connection of every watch."""
        self._each(_Watch.cut)

    def compact(self) -> None:
        """Forget the history: whoever watches from before now is told 410."""
        self._do(self._held.compact)

    def freeze_cache(self) -> None:
        """From now on a list of version 0 shows the world as it is now."""
        self._do(self._held.freeze_cache)

    def rewind(self, version: int) -> None:
        """Count from an older version again, as after etcd was restored from a backup."""
        self._do(lambda: self._held.rewind(version))

    def hang(self) -> None:
        """Accept requests and answer none until `resume`."""
        self._do(self._answering.clear)

    def resume(self) -> None:
        self._do(self._answering.set)

    def _do(self, act: Callable[[], None]) -> None:
        """Everything is changed in the server's own thread; before it runs there is no other."""
        if self._loop is None:
            return act()

        async def there() -> None:
            act()

        asyncio.run_coroutine_threadsafe(there(), self._loop).result()

    def _each(self, act: Callable[[_Watch], None]) -> None:
        def act_on_all() -> None:
            for watch in self._watches:
                act(watch)

        self._do(act_on_all)

    async def _serve(self, ready: threading.Event) -> None:
        application = web.Application()
        application.router.add_get("/{path:.*}", self._handle)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.05, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self._port, ssl_context=self._tls)
        await site.start()
        self._port = runner.addresses[0][1]
        self._loop = asyncio.get_running_loop()
        ready.set()
        await self._stopping.wait()
        for watch in self._watches:
            watch.cut()
        await runner.cleanup()

    def _change(self, key: tuple[str, str, str], after: Object | None) -> None:
        change = self._held.change(key, after)
        if self.holds_back:
            return
        for watch in self._watches:
            for line in event_lines(change, watch.asked):
                watch.queue.put_nowait(line)

    def _bookmark(self, asked: Asked) -> bytes:
        metadata = {"resourceVersion": str(self._held.version), "creationTimestamp": None}
        return event_line("BOOKMARK", {"kind": KINDS.get(asked.resource, ""), "metadata": metadata})

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        port = request.transport.get_extra_info("peername")[1] if request.transport is not None else 0
        asked_now = Request(request.path, dict(request.query), dict(request.headers), port, time.monotonic())
        self.requests.append(asked_now)
        await self._answering.wait()
        if self.tokens is not None and asked_now.token not in self.tokens:
            return _status(401, "Unauthorized")
        if self.refusal is not None and (asked_now.watches or not self.refuse_watches_only):
            return _status(*self.refusal, self.retry_after)
        if self._answered_since_start < self.forbids_first:
            self._answered_since_start += 1
            return _status(403, "forbidden")
        if request.path in self.forbidden_paths:
            return _status(403, f'forbidden: cannot get path "{request.path}"')
        if request.path == "/apis/resource.k8s.io" and self.resource_api_versions:
            return web.json_response(group(self.resource_api_versions))
        try:
            asked = parse_asked(request.path, request.query, self.resource_api_versions)
        except ValueError as error:
            return _status(400, str(error))
        if asked is None:
            return _status(404, "the server could not find the requested resource")
        if asked.name:
            return self._get(asked)
        return await self._watch(request, asked) if asked_now.watches else await self._list(request, asked)

    def _get(self, asked: Asked) -> web.Response:
        one = self._held.get((asked.resource, asked.namespace, asked.name))
        if one is None:
            return _status(404, f'{asked.resource} "{asked.name}" not found')
        return web.json_response(shown(one, asked.version))

    async def _list(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        if self.raw_answer is not None:
            return await self._write_raw(request, self.raw_answer)
        wanted = request.query.get("resourceVersion", "")
        version, items = self._held.select(asked, wanted)
        if wanted.isdigit() and int(wanted) > version:
            return _status(504, f"Timeout: Too large resource version: {wanted}, current: {version}")
        metadata = {"resourceVersion": str(version)}
        if limit := int(request.query.get("limit", "0")):
            began, _, first = request.query.get("continue", f"{version}/0").partition("/")
            if "continue" in request.query and self.forget_pages:
                self.forget_pages -= 1
                return _status(410, "The provided continue parameter is too old")
            items, left = items[int(first) : int(first) + limit], items[int(first) + limit :]
            metadata |= {"resourceVersion": began} | ({"continue": f"{began}/{int(first) + limit}"} if left else {})
        body = {"kind": f"{KINDS[asked.resource]}List", "metadata": metadata, "items": items}
        return web.json_response(body)

    async def _write_raw(self, request: web.Request, body: bytes) -> web.StreamResponse:
        if not self.raw_endless:
            return web.Response(body=body, headers=self.raw_headers)
        response = web.StreamResponse(headers=self.raw_headers)
        response.enable_chunked_encoding()
        await response.prepare(request)
        while True:  # ends when the client goes away: writing then raises
            await response.write(body)
            await asyncio.sleep(0)

    async def _watch(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        since = int(request.query.get("resourceVersion") or 0)
        gone = since < self._held.oldest
        if gone and not self.gone_as_event:
            return _status(410, f"too old resource version: {since} ({self._held.oldest})")
        watch = _Watch(asked, asyncio.Queue(), request)
        for line in self._held.since(since, asked):
            watch.queue.put_nowait(line)
        if gone:
            watch.queue.put_nowait(event_line("ERROR", status_object(410, f"too old resource version: {since}")))
            watch.queue.put_nowait(None)
        self._watches.add(watch)
        try:
            return await self._write(watch, float(request.query.get("timeoutSeconds", "1800")))
        finally:
            self._watches.discard(watch)

    async def _write(self, watch: _Watch, seconds: float) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(watch.request)
        left, until = self.cut_after, asyncio.get_running_loop().time() + seconds
        try:
            async with asyncio.timeout_at(until):
                while (line := await watch.queue.get()) is not None:
                    await response.write(line if left is None else line[:left])
                    left = None if left is None else left - len(line)
                    if left is not None and left <= 0:
                        watch.cut()
                        break
        except TimeoutError:
            pass
        return response


def _status(code: int, message: str, retry_after: int | None = None) -> web.Response:
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    return web.json_response(status_object(code, message), status=code, headers=headers)
