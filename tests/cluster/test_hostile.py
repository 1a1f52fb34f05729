"""Exporters that are broken, or mean it: over real HTTP, one exposition never costs the others anything."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from podgpu.clock import Clock
from podgpu.cluster.bills import MOST_ACCOUNTS
from podgpu.cluster.publish import Publisher
from podgpu.cluster.reading import ClusterReading, NamespaceCounters, NodeReading
from podgpu.cluster.scraping.backend import FixedTargets, ScrapeBackend, ScrapeSettings
from podgpu.cluster.scraping.exposition import MOST_NAMESPACES
from podgpu.cluster.settings import ViewSettings
from tests.cluster.test_scrape import Listed, Ticking, exporters, exposition_of, nodes

CHARTS_LIMIT_MIB = 512
MIB = 1024 * 1024


@pytest.mark.fault(
    "an exporter's metrics have an indented comment line, or any other line the format allows",
    "they are read; podgpu cluster goes on",
)
def test_an_indented_comment_line_ends_nothing() -> None:
    async def go() -> ClusterReading:
        async with exporters(b" # hello 5\n" + exposition_of(0), exposition_of(1)) as fleet:
            backend = ScrapeBackend(FixedTargets(fleet.urls))
            await backend.turn()
            fleet.bodies[0] = exposition_of(0) + b" # hello 6\n"
            await backend.turn()
            await backend.close()
            return backend.reading()

    reading = asyncio.run(go())
    assert sorted(nodes(reading)) == ["node-0", "node-1"]
    assert [outcome.error for outcome in reading.outcomes] == ["", ""]


@pytest.mark.fault(
    "reading one exporter's metrics brings out a bug in podgpu",
    "that exporter fails with the reason bug, said once with its address; the other nodes are read",
)
def test_a_bug_met_on_one_exposition_costs_that_exposition(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> tuple[ClusterReading, str]:
        time, met = Ticking(), [0]

        def wall() -> float:
            met[0] += 1
            if met[0] % 2:
                raise ZeroDivisionError("what nobody thought of")
            return time.now

        async with exporters(exposition_of(0), exposition_of(1)) as fleet:
            fleet.hanging = {1}  # so that the expositions are read in this order
            backend = ScrapeBackend(FixedTargets(fleet.urls), clock=Clock(lambda: time.now, wall))
            for _ in range(3):
                turn = asyncio.create_task(backend.turn())
                while met[0] % 2 == 0:
                    await asyncio.sleep(0.001)
                fleet.release.set()
                await turn
                fleet.release.clear()
            await backend.close()
            return backend.reading(), fleet.urls[0]

    with caplog.at_level(logging.ERROR):
        reading, bad = asyncio.run(go())
    assert list(nodes(reading)) == ["node-1"]
    assert reading.errors == {(bad, "bug"): 3}
    assert "ZeroDivisionError" in reading.outcomes[0].message
    assert [record.getMessage().startswith(bad) for record in caplog.records] == [True]


# Expositions that are too much


def series(count: int, labels: bytes) -> bytes:
    return b"".join(b"DCGM_FI_DEV_GPU_UTIL{%s} 1\n" % labels.replace(b"#", b"%d" % n) for n in range(count))


OF_HOLDERS = b'gpu="0",UUID="GPU-1",Hostname="bad",modelName="H100",namespace="n",pod="pod-#"'
_HUGE = {
    "devices": lambda: series(200_000, b'gpu="0",UUID="GPU-#",Hostname="bad"'),
    "holders": lambda: series(120_000, OF_HOLDERS),
    "labels": lambda: b"".join(b'x{a="%d"} 1\n' % n for n in range(240_000)) + exposition_of(7),
    "lines": lambda: exposition_of(7) + 3_000_000 * b"x 1\n",
    "families": lambda: exposition_of(7) + b"".join(b"# HELP x%d y\n" % n for n in range(700_000)),
}


@cache
def huge(what: str) -> bytes:
    """Made for the first test that serves it: every worker imports this file."""
    return _HUGE[what]()


@pytest.mark.fault(
    "an exporter tells of 200,000 devices, or 120,000 holders",
    "all it tells is refused with a note that names the node; the others are read, memory stays within the limit",
)
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("devices", "bad has 250,001 lines and labels"),
        ("holders", "bad has 250,001 lines and labels"),
        ("labels", "node-7 has 250,001 lines and labels"),
        ("lines", "node-7 has 3,000,001 lines"),
        ("families", "node-7 has 700,001 lines"),
    ],
)
def test_an_exposition_of_more_than_a_node_has_is_refused(what: str, said: str) -> None:
    async def go() -> None:
        async with exporters(huge(what), exposition_of(1)) as fleet:
            backend = ScrapeBackend(FixedTargets(fleet.urls), settings=ScrapeSettings(deadline=120.0))
            await backend.turn()
            await backend.close()
            view = Publisher(ViewSettings()).publish(backend.reading(), 0.0, 0.0, whole_round=True).view
            assert [node.name for node in view.nodes] == ["node-1"]
            assert [outcome.error for outcome in view.outcomes].count("too_much") == 1
            (note,) = view.notes
            assert f"the exposition of node {said}" in note
            assert fleet.urls[0] in note

    asyncio.run(go())


class Process:
    """`podgpu cluster` for real."""

    def __init__(self, urls: list[str]) -> None:
        command = [sys.executable, "-m", "podgpu", "cluster", "--address", "127.0.0.1:0", "--interval", "1s"]
        command += ["--scrape-timeout", "30s", "--scrape", ",".join(urls)]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def peak_mib(self) -> float:
        text = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii")
        return float(next(line.split()[1] for line in text.splitlines() if line.startswith("VmHWM:"))) / 1024

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def test_the_real_process_stays_within_the_charts_limit() -> None:
    """Two huge expositions of each kind beside a good one, round after round."""

    async def go() -> float:
        expositions = [exposition for what in _HUGE for exposition in [huge(what)] * 2]
        assert all(3 * MIB < len(exposition) < 16 * MIB for exposition in expositions)
        async with exporters(exposition_of(0), *expositions) as fleet:
            process = Process(fleet.urls)
            try:
                async with asyncio.timeout(300):
                    while any(fleet.asked.count(number) < 3 for number in range(len(fleet.urls))):
                        await asyncio.sleep(0.1)
                return process.peak_mib()
            finally:
                process.end()

    assert asyncio.run(go()) < CHARTS_LIMIT_MIB


@pytest.mark.fault(
    "an exporter tells of other namespaces at every scrape",
    "those it no longer tells of are forgotten, oldest first; memory does not grow with them",
)
def test_other_namespaces_on_every_exposition_do_not_fill_the_memory() -> None:
    publisher = Publisher(ViewSettings())

    def rounds(first: int, last: int) -> int:
        for number in range(first, last):
            told = tuple(NamespaceCounters(f"n-{number}-{n}", "H100", 1.0, 1.0, 1.0) for n in range(MOST_NAMESPACES))
            reading = NodeReading("t", "node", namespaces=told, read_at=15.0 * number, listed=True)
            published = publisher.publish(ClusterReading((reading,)), 15.0 * number, 15.0 * number, whole_round=True)
            assert len(published.view.bills) <= MOST_ACCOUNTS
        gc.collect()
        return sys.getallocatedblocks()

    full = rounds(0, MOST_ACCOUNTS // MOST_NAMESPACES + 2)
    assert rounds(11, 14) < full + MOST_NAMESPACES, "not one block for each namespace of three rounds"


# Names and times


@pytest.fixture
def settings() -> ViewSettings:
    return ViewSettings(interval=15.0, stale_after=45.0, drop_after=300.0)


@pytest.mark.fault(
    "an exporter claims the name of another node",
    "the name stays with the address that has it, which is marked old when it fails, until that is dropped or gone",
)
def test_a_name_belongs_to_the_address_that_has_it(settings: ViewSettings) -> None:
    async def go() -> None:
        time, publisher = Ticking(), Publisher(settings)
        async with exporters(exposition_of(1, 10), exposition_of(2)) as fleet:
            real, impostor = fleet.urls
            targets = Listed(fleet.urls)
            backend = ScrapeBackend(targets, clock=time.clock())
            claimed = exposition_of(1, 99).replace(b"GPU-1", b"GPU-66")

            async def turn() -> tuple[str, bool]:
                await backend.turn()
                time.now += 15.0
                view = publisher.publish(backend.reading(), time.now, time.now, whole_round=True).view
                (node,) = [node for node in view.nodes if node.name == "node-1"]
                return node.target, node.old

            assert await turn() == (real, False)
            fleet.bodies[1] = claimed
            assert await turn() == (real, False)
            fleet.status[0] = 500
            seen = [await turn() for _ in range(10)]
            assert {target for target, _ in seen} == {real}
            assert seen[-1] == (real, True)
            fleet.status[0] = 200
            assert await turn() == (real, False)
            targets.now = [impostor]
            assert await turn() == (impostor, False)
            await backend.close()

    asyncio.run(go())


@pytest.mark.fault(
    "a node's snapshot is of 1970, or of a time to come",
    "the node is marked old and says so; it counts in no average",
)
@pytest.mark.parametrize("told", ["0", "1", "4102444800"])
def test_a_snapshot_of_1970_is_not_fresh(settings: ViewSettings, told: str) -> None:
    async def go() -> None:
        wall = 1_790_000_000.0
        snapshot = f"podgpu_exporter_snapshot_timestamp_seconds {told}\n".encode()
        async with exporters(exposition_of(0) + snapshot, exposition_of(1)) as fleet:
            backend = ScrapeBackend(FixedTargets(fleet.urls), clock=Clock(lambda: 0.0, lambda: wall))
            await backend.turn()
            await backend.close()
            published = Publisher(settings).publish(backend.reading(), 0.0, wall, whole_round=True)
            assert {node.name: node.old for node in published.view.nodes} == {"node-0": True, "node-1": False}
            assert "set the node's clock" in published.view.nodes[0].notes[0]
            assert b'podgpu_cluster_node_up{node="node-0"} 0' in published.metrics.plain

    asyncio.run(go())


@pytest.mark.fault(
    "an exporter tells of thousands of sources that fail, with names of thousands of letters",
    "the first of them are named, cut short; the web page's JSON stays small",
)
def test_sources_without_end_do_not_fill_the_page(settings: ViewSettings) -> None:
    sources = b"".join(b'podgpu_exporter_source_up{source="%s%d"} 0\n' % (b"s" * 3000, n) for n in range(4000))

    async def go() -> ClusterReading:
        async with exporters(exposition_of(0) + sources) as fleet:
            backend = ScrapeBackend(FixedTargets(fleet.urls))
            await backend.turn()
            await backend.close()
            return backend.reading()

    reading = asyncio.run(go())
    assert list(nodes(reading)) == ["node-0"]
    published = Publisher(settings).publish(reading, reading.nodes[0].read_at, 1000.0, whole_round=True)
    assert b"podgpu cannot read ssss" in published.page().view.plain
    assert len(published.page().view.plain) < 50_000


@pytest.mark.fault(
    "somebody makes Services with a hundred thousand endpoints that the selector chooses",
    "10,000 exporters are asked, those that are known among them and first; one that is left out is named",
)
def test_endpoints_without_end_push_nobody_out() -> None:
    async def go() -> tuple[list[ClusterReading], list[str]]:
        async with exporters(exposition_of(0), exposition_of(1)) as fleet:
            targets = Listed(fleet.urls)
            backend = ScrapeBackend(targets, settings=ScrapeSettings(most_targets=30, concurrency=1))
            await backend.turn()
            found = [backend.reading()]
            targets.now = [*(f"http://127.0.0.1:1/{n}/metrics" for n in range(500)), *fleet.urls]
            for _ in range(2):
                await backend.turn()
                found.append(backend.reading())
            await backend.close()
            return found, fleet.urls

    (before, *after), urls = asyncio.run(go())
    assert before.notes == ()
    for reading in after:
        assert {outcome.target for outcome in reading.outcomes if not outcome.error} == set(urls)
        assert len(reading.outcomes) == 30
        assert all(node.listed for node in reading.nodes)
        (note,) = reading.notes
        assert note.startswith("502 exporters are named and 30 are asked: 'http://127.0.0.1:1/28/metrics' is one of")
