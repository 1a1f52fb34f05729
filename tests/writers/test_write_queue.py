"""Writes that fail are repeated, and do not delay others."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest

from podgpu.errors import SourceError
from podgpu.writers.write_queue import Write, WriteQueue
from tests.nodes.clock import FakeClock


class Target:
    """Objects that can be written, or not."""

    def __init__(self) -> None:
        self.error: SourceError | None = None
        self.attempts: list[str] = []

    def write(self, text: str, key: str = "one", writer: str = "events") -> Write:
        async def send() -> None:
            self.attempts.append(text)
            if self.error is not None:
                raise self.error

        return Write(writer, key, send)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def queue(clock: FakeClock) -> WriteQueue:
    return WriteQueue(clock.monotonic, lambda limit: limit)


@pytest.mark.parametrize("reason", ["forbidden", "conflict", "gone", "server_error", "unreachable"])
async def test_backs_off_and_logs_once(
    reason: str, queue: WriteQueue, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    target = Target()
    target.error = SourceError(reason, "the API server does not want it")
    queue.put(target.write("text"))
    times = []
    for _ in range(3600):
        attempts = len(target.attempts)
        await queue.flush()
        if len(target.attempts) > attempts:
            times.append(clock.monotonic() - 1000.0)
        clock.advance(1.0)
    assert times[:9] == [0, 1, 3, 7, 15, 31, 63, 127, 255]
    assert {later - earlier for earlier, later in pairwise(times[9:])} == {300}
    warnings = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert [each.getMessage() for each in warnings] == [
        "--write events: the API server does not want it; podgpu retries"
    ]
    assert queue.problems == {"events": "the API server does not want it"}

    target.error = None
    clock.advance(300.0)
    with caplog.at_level(logging.INFO):
        await queue.flush()
    assert caplog.messages[-1] == "--write events: works again"
    assert queue.problems == {}
    assert len(queue) == 0


async def test_a_newer_write_replaces_one_that_waits(queue: WriteQueue, clock: FakeClock) -> None:
    target = Target()
    target.error = SourceError("conflict", "changed")
    queue.put(target.write("old"))
    await queue.flush()
    queue.put(target.write("new"))
    await queue.flush()
    assert target.attempts == ["old"]
    target.error = None
    clock.advance(1.0)
    await queue.flush()
    assert target.attempts == ["old", "new"]


async def test_a_failure_delays_only_the_same_object(queue: WriteQueue) -> None:
    refused = Target()
    refused.error = SourceError("forbidden", "no")
    others = Target()
    queue.put(refused.write("a", "a"))
    queue.put(others.write("b", "b"))
    queue.put(others.write("c", "c", "condition"))
    await queue.flush()
    assert others.attempts == ["b", "c"]
    assert list(queue.problems) == ["events"]


async def test_without_an_answer_the_other_objects_wait(queue: WriteQueue) -> None:
    target = Target()
    target.error = SourceError("unreachable", "no API server")
    for number in range(5):
        queue.put(target.write(f"{number}", f"{number}"))
    await queue.flush()
    await queue.flush()
    assert target.attempts == ["0"]
    assert len(queue) == 5


async def test_without_an_answer_other_writers_do_not_wait(queue: WriteQueue) -> None:
    down = Target()
    down.error = SourceError("unreachable", "no NVSentinel")
    up = Target()
    queue.put(down.write("a", "a", "nvsentinel"))
    queue.put(up.write("b", "b", "events"))
    await queue.flush()
    assert up.attempts == ["b"]


async def test_a_problem_is_solved_when_no_object_of_the_writer_fails(
    queue: WriteQueue, clock: FakeClock
) -> None:
    first, second = Target(), Target()
    first.error = second.error = SourceError("forbidden", "no")
    queue.put(first.write("a", "a"))
    queue.put(second.write("b", "b"))
    await queue.flush()
    first.error = None
    clock.advance(10.0)
    await queue.flush()
    assert queue.problems == {"events": "no"}
    second.error = None
    clock.advance(10.0)
    await queue.flush()
    assert queue.problems == {}


async def test_a_problem_is_solved_while_another_writer_still_fails(
    queue: WriteQueue, clock: FakeClock
) -> None:
    events, taints = Target(), Target()
    events.error = SourceError("forbidden", "no events")
    taints.error = SourceError("forbidden", "no taints")
    queue.put(events.write("event"))
    queue.put(taints.write("taint", writer="taints"))
    await queue.flush()
    assert queue.problems == {"events": "no events", "taints": "no taints"}
    taints.error = None
    queue.put(taints.write("other", key="two", writer="taints"))
    await queue.flush()
    assert "taints" in queue.problems, "its first object waits"
    clock.advance(1.0)
    await queue.flush()
    assert queue.problems == {"events": "no events"}


async def test_is_bounded(queue: WriteQueue, caplog: pytest.LogCaptureFixture) -> None:
    target = Target()
    for number in range(2000):
        queue.put(target.write("x", f"{number}"))
    assert len(queue) == 1000
    assert len(caplog.records) == 1
    assert "more than 1000 writes wait" in caplog.text


async def test_waits_as_long_as_the_server_requests(queue: WriteQueue, clock: FakeClock) -> None:
    target = Target()
    target.error = SourceError("server_error", "too many requests", retry_after=30.0)
    queue.put(target.write("text"))
    await queue.flush()
    clock.advance(29.0)
    await queue.flush()
    assert len(target.attempts) == 1
    clock.advance(1.0)
    await queue.flush()
    assert len(target.attempts) == 2
