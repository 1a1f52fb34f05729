"""The embedded backend against real HTTP servers: some answer, some hang, some die, some come back."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path

import pytest
from aiohttp import web

from podgpu.clock import Clock
from podgpu.cluster.reading import ClusterReading
from podgpu.cluster.scraping.backend import FixedTargets, ScrapeBackend, ScrapeSettings
from podgpu.errors import UsageError
from podgpu.figures.device import Owner
from podgpu.http_client import Access
from tests.nodes.clock import again_if_held_up

NODES = Path(__file__).parents[1] / "nodes"
SHARED = (NODES / "shared" / "expected.prom").read_bytes()


def exposition_of(number: int, util: int = 50) -> bytes:
    labels = f'gpu="0",UUID="GPU-{number}",modelName="H100",Hostname="node-{number}"'
    return f"DCGM_FI_DEV_GPU_UTIL{{{labels}}} {util}\n".encode()


@lru_cache(maxsize=16)
def _packed(body: bytes) -> bytes:
    """Some are of ten megabytes and asked for again and again."""
    return gzip.compress(body, 1)


class Exporters:
    """Real servers; how each answers may be changed at any time."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        self.bodies: list[bytes] = []
        self.status: dict[int, int] = {}
        self.hanging: set[int] = set()
        self.asked: list[int] = []
        self.peers: set[object] = set()
        self.under_way = 0
        self.most_under_way = 0
        self.release = asyncio.Event()

    def answer(self, number: int) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handler(request: web.Request) -> web.Response:
            self.asked.append(number)
            assert request.transport is not None
            self.peers.add(request.transport.get_extra_info("peername"))
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            try:
                if number in self.hanging:
                    await self.release.wait()
                await asyncio.sleep(0)
                return web.Response(
                    body=_packed(self.bodies[number]),
                    status=self.status.get(number, 200),
                    headers={"Content-Encoding": "gzip"},
                )
            finally:
                self.under_way -= 1

        return handler


@asynccontextmanager
async def exporters(*bodies: bytes) -> AsyncIterator[Exporters]:
    fleet = Exporters()
    runners = []
    for number, body in enumerate(bodies):
        fleet.bodies.append(body)
        app = web.Application()
        app.router.add_get("/metrics", fleet.answer(number))
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        runners.append(runner)
        fleet.urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}/metrics")
    try:
        yield fleet
    finally:
        fleet.release.set()
        for runner in runners:
            await runner.cleanup()


class Ticking:
    now = 100.0

    def clock(self) -> Clock:
        return Clock(lambda: self.now, lambda: self.now + 1000.0)


class Listed:
    """Targets that change."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.now = list(urls)
        self.said: list[str] = []
        self.closed = False

    def urls(self) -> Sequence[str]:
        return self.now

    def notes(self) -> Sequence[str]:
        return self.said

    def close(self) -> None:
        self.closed = True


def nodes(reading: ClusterReading) -> dict[str, float]:
    return {node.node: node.read_at for node in reading.nodes}


def test_every_exporter_is_read() -> None:
    async def go() -> ClusterReading:
        async with exporters(*(exposition_of(n) for n in range(5))) as fleet:
            backend = ScrapeBackend(FixedTargets(fleet.urls), clock=Ticking().clock())
            await backend.turn()
            await backend.close()
            return backend.reading()

    reading = asyncio.run(go())
    assert nodes(reading) == {f"node-{n}": 100.0 for n in range(5)}
    assert [d.utilization for n in reading.nodes for d in n.devices] == [0.5] * 5
    assert [o.error for o in reading.outcomes] == [""] * 5
    assert reading.errors == {}
    assert reading.notes == ()


def test_one_that_fails_is_there_as_it_last_was_and_says_why() -> None:
    async def go() -> None:
        time = Ticking()
        async with exporters(exposition_of(0), exposition_of(1)) as fleet:
            backend = ScrapeBackend(FixedTargets(fleet.urls), clock=time.clock())
            await backend.turn()
            time.now, fleet.status[1] = 115.0, 503
            await backend.turn()
            await backend.turn()
            reading = backend.reading()
            assert nodes(reading) == {"node-0": 115.0, "node-1": 100.0}
            assert [o.error for o in reading.outcomes] == ["", "http_503"]
            assert fleet.urls[1] in reading.outcomes[1].message
            assert reading.errors == {(fleet.urls[1], "http_503"): 2}
            time.now, fleet.status[1], fleet.bodies[1] = 130.0, 200, exposition_of(1, 7)
            await backend.turn()
            assert nodes(backend.reading()) == {"node-0": 130.0, "node-1": 130.0}
            assert backend.reading().nodes[1].devices[0].utilization == 0.07
            assert [o.error for o in backend.reading().outcomes] == ["", ""]
            await backend.close()

    asyncio.run(go())


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"<html>", "not_prometheus"),
        (b"a b c\n", "malformed"),
        (b"up 1\n", "no_gpu"),
        (b"", "no_gpu"),
        (b"a \xff\n", "malformed"),
    ],
)
def test_what_is_no_exposition_of_an_exporter(body: bytes, reason: str) -> None:
    async def go() -> ClusterReading:
        async with exporters(body) as fleet:
            backend = ScrapeBackend(FixedTargets(fleet.urls))
            await backend.turn()
            await backend.close()
            return backend.reading()

    reading = asyncio.run(go())
    assert reading.nodes == ()
    assert reading.outcomes[0].error == reason


def test_results_are_there_while_others_are_waited_for() -> None:
    async def go() -> None:
        async with exporters(*(exposition_of(n) for n in range(4))) as fleet:
            fleet.hanging = {1}
            backend = ScrapeBackend(FixedTargets(fleet.urls), settings=ScrapeSettings(deadline=30.0))
            turn = asyncio.create_task(backend.turn())
            while len(backend.reading().nodes) < 3:
                await asyncio.sleep(0.001)
            assert not turn.done()
            fleet.release.set()
            await turn
            assert len(backend.reading().nodes) == 4
            await backend.close()

    asyncio.run(go())


def test_dead_ones_hold_up_nobody_even_where_they_are_more_than_the_slots() -> None:
    """All slots are taken by exporters that hang: those behind them are read all the same, before any deadline."""

    async def go() -> None:
        async with exporters(*(exposition_of(n) for n in range(12))) as fleet:
            fleet.hanging = set(range(6))
            settings = ScrapeSettings(deadline=30.0, concurrency=2)
            assert settings.patience == 1.0
            backend = ScrapeBackend(FixedTargets(fleet.urls), settings=_Hurried(deadline=30.0, concurrency=2))
            turn = asyncio.create_task(backend.turn())
            while len(backend.reading().nodes) < 6:
                await asyncio.sleep(0.001)
            assert not turn.done()
            turn.cancel()
            with pytest.raises(asyncio.CancelledError):
                await turn
            await backend.close()

    asyncio.run(go())


class _Hurried(ScrapeSettings):
    patience = 0.01


def test_no_more_are_asked_at_a_time_than_was_said() -> None:
    async def go() -> None:
        async with exporters(*(exposition_of(n) for n in range(20))) as fleet:
            backend = ScrapeBackend(FixedTargets(fleet.urls), settings=ScrapeSettings(concurrency=3))
            await backend.turn()
            await backend.close()
            assert fleet.most_under_way <= 3
            assert len(backend.reading().nodes) == 20

    asyncio.run(go())


def test_those_that_failed_wait_in_a_lane_of_their_own() -> None:
    """There is one slot for them, and nobody begins after a deadline: one has its turn in each turn."""

    async def go() -> None:
        time = Ticking()
        async with exporters(*(exposition_of(n) for n in range(4))) as fleet:
            dead = {2, 3}
            fleet.hanging = set(dead)
            settings = _Hurried(deadline=1.0, concurrency=4)
            backend = ScrapeBackend(FixedTargets(fleet.urls), settings=settings, clock=time.clock())
            try:
                await backend.turn()
                assert {o.error for o in backend.reading().outcomes} == {"", "timeout"}
                asked: list[int] = []
                for turn in (1, 2):
                    fleet.asked.clear()
                    time.now += 15.0
                    await backend.turn()
                    assert {0, 1} <= set(fleet.asked)
                    asked += dead & set(fleet.asked)
                    assert nodes(backend.reading()) == {"node-0": 100.0 + 15 * turn, "node-1": 100.0 + 15 * turn}
                assert sorted(asked) == [2, 3]
            finally:
                await backend.close()

    again_if_held_up(lambda: asyncio.run(go()))


def test_connections_are_kept_between_turns() -> None:
    async def go() -> None:
        async with exporters(*(exposition_of(n) for n in range(3))) as fleet:
            backend = ScrapeBackend(FixedTargets(fleet.urls))
            for _ in range(4):
                await backend.turn()
            await backend.close()
            assert len(fleet.asked) == 12
            assert len(fleet.peers) == 3

    asyncio.run(go())


def test_one_that_leaves_the_list_leaves_the_reading() -> None:
    async def go() -> None:
        async with exporters(exposition_of(0), exposition_of(1)) as fleet:
            targets = Listed(fleet.urls)
            backend = ScrapeBackend(targets)
            fleet.status[0] = 500
            await backend.turn()
            assert len(backend.reading().outcomes) == 2
            targets.now = fleet.urls[1:]
            targets.said = ["the API server cannot be reached"]
            await backend.turn()
            reading = backend.reading()
            assert list(nodes(reading)) == ["node-1"]
            assert [o.target for o in reading.outcomes] == fleet.urls[1:]
            assert reading.errors == {}
            assert reading.notes == ("the API server cannot be reached",)
            targets.now = ["http://", *fleet.urls]
            fleet.status.clear()
            await backend.turn()
            assert list(nodes(backend.reading())) == ["node-1", "node-0"]
            assert "is not a URL" in backend.reading().notes[1]
            await backend.close()
            assert targets.closed

    asyncio.run(go())


def test_one_node_under_two_addresses_is_left_to_the_view() -> None:
    async def go() -> ClusterReading:
        async with exporters(exposition_of(0), exposition_of(0)) as fleet:
            backend = ScrapeBackend(FixedTargets(fleet.urls))
            await backend.turn()
            await backend.close()
            return backend.reading()

    reading = asyncio.run(go())
    assert [n.node for n in reading.nodes] == ["node-0", "node-0"]
    assert len({n.target for n in reading.nodes}) == 2


def test_a_token_goes_to_every_exporter_and_is_not_told(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret")
    seen: list[str | None] = []

    async def go() -> ClusterReading:
        async def handler(request: web.Request) -> web.Response:
            seen.append(request.headers.get("Authorization"))
            return web.Response(status=401)

        app = web.Application()
        app.router.add_get("/metrics", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        credentials = Access(token_file=str(tmp_path / "token"))
        targets = FixedTargets([f"http://127.0.0.1:{runner.addresses[0][1]}"], credentials)
        backend = ScrapeBackend(targets, credentials)
        await backend.turn()
        await backend.close()
        await runner.cleanup()
        return backend.reading()

    reading = asyncio.run(go())
    assert seen == ["Bearer s3cret"]
    assert reading.outcomes[0].error == "unauthorized"
    assert "s3cret" not in str(reading)


def test_owners_come_along() -> None:
    owners = {("team", "pod"): Owner("Deployment", "chat")}

    async def go() -> ClusterReading:
        async with exporters(exposition_of(0)) as fleet:
            backend = ScrapeBackend(FixedTargets(fleet.urls), owners=lambda: owners)
            await backend.turn()
            await backend.close()
            return backend.reading()

    assert asyncio.run(go()).owners == owners


# The list


def test_the_same_url_twice_is_meant_once() -> None:
    assert len(FixedTargets(["http://a:9400", " http://A:9400/metrics", "", "http://b:9400"]).urls()) == 2


@pytest.mark.parametrize(
    "urls",
    [
        [],
        [""],
        ["ftp://a"],
        ["http://a/metrics?x=1", "http://a/metrics?x=2"],
        ["http://u:p@a/metrics", "http://a/metrics"],
    ],
)
def test_a_list_that_cannot_be(urls: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        FixedTargets(urls)
    assert "u:p" not in str(caught.value)
