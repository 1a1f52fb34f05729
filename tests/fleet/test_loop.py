"""The cluster's rounds with a simulated backend: publication, log lines, and the end of the
loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

import pytest

from podgpu.clock import Clock
from podgpu.errors import Note
from podgpu.fleet.readings import ClusterReading, Collector, NodeReading, TargetOutcome
from podgpu.fleet.round import Cluster
from podgpu.fleet.settings import ViewSettings
from tests.fleet.states import gpu
from tests.fleet.states import node as reading_of

SETTINGS = ViewSettings(interval=10.0, stale_after=30.0, drop_after=60.0)


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    @property
    def clock(self) -> Clock:
        return Clock(monotonic=lambda: self.now, wall=lambda: 1_000_000.0 + self.now)


def node(name: str, read_at: float, used: float = 50.0) -> NodeReading:
    return reading_of(name, gpu(0, uuid=f"GPU-{name}", used=used), read_at=read_at)


class Script:
    """A backend that runs one given action in each round."""

    def __init__(self, *turns: Callable[[Script], object]) -> None:
        self._turns = list(turns)
        self.now = ClusterReading()
        self.closed = False
        self.go_on: asyncio.Event | None = None

    async def run_round(self) -> ClusterReading:
        if self._turns:
            self._turns.pop(0)(self)
        if self.go_on is not None:
            await self.go_on.wait()
        return self.now

    async def fetch(self, target: str, path: str) -> bytes:
        return f"{target} {path}".encode()

    async def close(self) -> None:
        self.closed = True


def tell(reading: ClusterReading) -> Callable[[Script], None]:
    def turn(script: Script) -> None:
        script.now = reading

    return turn


def exposition_of(cluster: Cluster) -> str:
    return cluster.published.metrics.plain.decode()


def test_before_the_first_round_there_is_an_exposition_about_itself() -> None:
    cluster = Cluster(Script, SETTINGS, clock=Time().clock)
    assert "podgpu_cluster_build_info" in exposition_of(cluster)
    assert "avg_GPU_utilization" not in exposition_of(cluster)
    assert not cluster.has_results
    assert cluster.published.view.nodes == []


def test_a_round_is_published_at_its_end() -> None:
    time = Time()
    cluster = Cluster(Script, SETTINGS, clock=time.clock)
    asyncio.run(
        cluster.round(Script(tell(ClusterReading((node("a", 100.0), node("b", 100.0, 0.0))))))
    )
    assert "\navg_GPU_utilization 50" in exposition_of(cluster)
    assert [n.name for n in cluster.published.view.nodes] == ["a", "b"]
    time.now += cluster.late_after
    assert cluster.is_on_time
    time.now += 1.0
    assert not cluster.is_on_time
    assert b"avg_GPU_utilization" not in cluster.render_metrics().plain, "no values of a hung loop"


def test_changes_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    time = Time()
    cluster = Cluster(Script, SETTINGS, clock=time.clock)
    failed = TargetOutcome(
        "http://a/metrics", 1.0, "timeout", "http://a/metrics: no whole answer within 5 s"
    )
    for reading in (
        ClusterReading((node("a", 100.0),), (TargetOutcome("http://a/metrics", 0.1),)),
        ClusterReading((node("a", 100.0),), (failed,)),
        ClusterReading((node("a", 100.0),), (failed,)),
        ClusterReading((node("a", 101.0),), (TargetOutcome("http://a/metrics", 0.1),)),
    ):
        asyncio.run(cluster.round(Script(tell(reading))))
    assert [record.getMessage() for record in caplog.records] == [
        "http://a/metrics: no whole answer within 5 s; podgpu will retry",
        "http://a/metrics: answers again",
    ]


def test_a_new_number_in_a_note_is_no_new_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = Cluster(Script, SETTINGS, clock=Time().clock)
    for seconds in (90, 91, 92):
        note = Note("clock", f"the clock jumped by {seconds} s")
        asyncio.run(cluster.round(Script(tell(ClusterReading(notes=(note,))))))
    other = Note("prices", "there is no price")
    asyncio.run(cluster.round(Script(tell(ClusterReading(notes=(note, other))))))
    assert [record.getMessage() for record in caplog.records] == [
        "the clock jumped by 90 s",
        "there is no price",
    ]


@pytest.mark.fault(
    (
        "an exporter fails in one way after another, again and again, or fails and answers in turn "
        "for hours"
    ),
    (
        "the cluster's log has each of its faults once, and one that comes and goes once in ten "
        "minutes"
    ),
)
def test_a_target_that_flaps_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    time = Time()
    cluster = Cluster(Script, SETTINGS, clock=time.clock)

    def rounds(*errors: str) -> list[str]:
        caplog.clear()
        for error in errors:
            time.now += 15.0
            told = TargetOutcome(
                "http://a/metrics", 1.0, error, f"http://a/metrics: {error}" if error else ""
            )
            asyncio.run(cluster.round(Script(tell(ClusterReading(outcomes=(told,))))))
        return [
            record.getMessage().removeprefix("http://a/metrics: ").split(";")[0]
            for record in caplog.records
        ]

    def seen(*old: bool) -> list[str]:
        caplog.clear()
        for is_old in old:
            time.now += 15.0
            at = time.now - (45.0 if is_old else 0.0)
            asyncio.run(cluster.round(Script(tell(ClusterReading((node("a", at),))))))
        return [record.getMessage().split(",")[0] for record in caplog.records]

    assert rounds(*(["timeout", "too_much"] * 200)) == ["timeout", "too_much"]
    assert rounds("") == ["answers again"]
    assert rounds(*(["timeout", ""] * 120)) == ["timeout", "answers again"] * 6, (
        "six reports in an hour"
    )
    assert rounds(*(["timeout"] * 41)) == ["timeout"], "a lasting fault is logged"
    assert seen(*([False, True] * 20)) == ["a: stale", "a: answers again"]


def test_the_loop_turns_in_its_thread_and_stops_in_the_middle_of_a_round() -> None:
    made: list[Script] = []
    started = threading.Event()

    def make() -> Collector:
        script = Script(lambda _: started.set())
        script.go_on = asyncio.Event()
        made.append(script)
        return script

    cluster = Cluster(make, SETTINGS)
    cluster.start(on_fatal=lambda: None)
    assert started.wait(30)
    cluster.stop()
    assert made[0].closed
    assert cluster.fatal is None


def test_a_bug_in_a_round_ends_the_process_instead_of_leaving_old_figures() -> None:
    ended = threading.Event()

    def burst(_script: Script) -> None:
        raise ZeroDivisionError("oops")

    cluster = Cluster(lambda: Script(burst), SETTINGS)
    cluster.start(on_fatal=ended.set)
    assert ended.wait(30)
    assert "because of a bug (ZeroDivisionError: oops)" in str(cluster.fatal)
    cluster.stop()
