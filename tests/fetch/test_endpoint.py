"""Asking a place for anything: methods, forms, headers, statuses as answers, connections kept, messages that fit."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from podgpu.errors import SourceError, UsageError
from podgpu.fetch.access import Access, Credentials
from podgpu.fetch.endpoint import Answer, Endpoint
from podgpu.fetch.exposition import UrlExposition
from podgpu.http.exchange import open_session
from tests.fetch.test_exposition import serving

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def site(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    listening = web.TCPSite(runner, "127.0.0.1", 0)
    await listening.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def echo(request: web.Request) -> web.Response:
    seen = {
        "method": request.method,
        "path": request.path_qs,
        "form": dict(await request.post()),
        "headers": {name.lower(): value for name, value in request.headers.items()},
    }
    return web.json_response(seen)


def ask(url: str, access: Access | None = None, **request: object) -> Answer:
    async def go() -> Answer:
        async with open_session() as session:
            return await Endpoint(url, access).ask(session, **request)  # type: ignore[arg-type]

    return asyncio.run(go())


def test_a_form_goes_behind_the_path_by_get_and_inside_by_post() -> None:
    async def go() -> list[dict[str, object]]:
        async with site(echo) as url, open_session() as session:
            endpoint = Endpoint(f"{url}/prefix?key=secret", Access(headers=(("X-Scope-OrgID", "a"),)))
            form = {"query": 'up{a="b c"}'}
            answers = [
                await endpoint.ask(session, method, "/api/v1/query", form, accept="application/json")
                for method in ("GET", "POST")
            ]
            assert {a.content_type for a in answers} == {"application/json"}
            assert "secret" not in endpoint.shown
            return [json.loads(a.body) for a in answers]

    got, posted = asyncio.run(go())
    assert got["path"] == "/prefix/api/v1/query?key=secret&query=up%7Ba%3D%22b+c%22%7D"
    assert posted["path"] == "/prefix/api/v1/query?key=secret"
    assert posted["form"] == {"query": 'up{a="b c"}'}
    for seen in (got, posted):
        headers = seen["headers"]
        assert isinstance(headers, dict)
        assert headers["x-scope-orgid"] == "a"
        assert headers["accept"] == "application/json"
        assert headers["accept-encoding"] == "gzip"
        assert headers["user-agent"].startswith("podgpu/")


@pytest.mark.parametrize("status", [200, 204, 302, 400, 401, 422, 503])
def test_every_status_is_an_answer(status: int) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, headers={"Location": "http://u:p@else/x"} if status == 302 else {})

    async def go() -> tuple[Answer, SourceError]:
        async with site(answer) as url, open_session() as session:
            endpoint = Endpoint(url, Access(prefix="prometheus", server="Prometheus"))
            answer_ = await endpoint.ask(session)
            return answer_, endpoint.refused(answer_)

    found, refusal = asyncio.run(go())
    assert found.status == status
    assert "u:p" not in str(refusal)
    if status == 401:
        assert refusal.reason == "unauthorized"
        assert "--prometheus-token-file" in str(refusal)
    else:
        assert refusal.reason == f"http_{status}"


def test_a_connection_is_kept() -> None:
    peers = set()

    async def note(request: web.Request) -> web.Response:
        assert request.transport is not None
        peers.add(request.transport.get_extra_info("peername"))
        return web.Response(body=gzip.compress(b"a 1\n"), headers={"Content-Encoding": "gzip"})

    async def go() -> None:
        async with site(note) as url, open_session() as session:
            exposition = UrlExposition(url)
            for _ in range(5):
                assert await exposition.fetch_with(session) == b"a 1\n"

    asyncio.run(go())
    assert len(peers) == 1


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_kept_connection_that_was_closed_meanwhile_is_opened_again(method: str) -> None:
    """Closed while it is used again, which is when nobody can know."""
    asked = 0

    async def close_every_second(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        if asked == 2:
            assert request.transport is not None
            request.transport.close()
        return web.Response(text="a 1\n")

    async def go() -> list[int]:
        async with site(close_every_second) as url, open_session() as session:
            endpoint = Endpoint(url)
            return [(await endpoint.ask(session, method)).status for _ in range(3)]

    assert asyncio.run(go()) == [200, 200, 200]


def test_a_deadline_is_the_endpoints_own() -> None:
    async def wait(_: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async def go() -> None:
        async with site(wait) as url, open_session() as session:
            with pytest.raises(SourceError, match=r"no whole answer within 0\.05 s") as caught:
                await Endpoint(url, deadline=0.05).ask(session)
            assert caught.value.reason == "timeout"

    asyncio.run(go())


def test_messages_name_the_options_of_whoever_asks(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--prometheus-username and --prometheus-password-file"):
        Access(username="a", prefix="prometheus").check()
    with pytest.raises(SourceError, match="see that Prometheus runs there"):
        ask("http://127.0.0.1:1", Access(prefix="prometheus", server="Prometheus"))


@pytest.mark.parametrize("header", [("X Y", "a"), ("X", "a\r\nHost: b"), ("", "a"), ("X", " a")])
def test_a_header_that_would_be_more_than_one(header: tuple[str, str]) -> None:
    with pytest.raises(UsageError, match="cannot be sent"):
        Access(headers=(header,)).check()


@pytest.mark.parametrize(
    "url", ["http://a..b/", "http://\u00ad/", "http://[::1", "http://x\u2028/", "http://" + "a" * 300]
)
def test_no_url_breaks_anything(url: str) -> None:
    with pytest.raises((UsageError, SourceError)):
        ask(url)


def test_credentials_are_shared(tmp_path: Path) -> None:
    """A thousand exporters have one certificate store."""
    credentials = Credentials(Access(insecure=True))
    assert credentials.tls() is credentials.tls()


def test_the_waiting_way_works_beside_a_loop() -> None:
    """`fetch` is called from threads: the cluster's loop must not matter to it."""
    found: list[bytes] = []

    def send(request: object) -> None:
        body = b"a 1\n"
        request.send_response(200)  # type: ignore[attr-defined]
        request.send_header("Content-Length", str(len(body)))  # type: ignore[attr-defined]
        request.end_headers()  # type: ignore[attr-defined]
        request.wfile.write(body)  # type: ignore[attr-defined]

    with serving(send) as url:
        thread = threading.Thread(target=lambda: found.append(UrlExposition(url).fetch()))
        thread.start()
        thread.join(30)
    assert found == [b"a 1\n"]
