"""Workers: deadlines, late results, bugs in a source, counted errors, and libraries to close."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from podgpu.errors import DriverGone, SourceError, StartError
from podgpu.model import SourceStatus, Unmapped, Workload
from podgpu.workers import DriverLock, ErrorCounts, Result, Workers, run_loop
from tests.nodes.clock import wait_until

PATIENCE = 90.0
"""Deadline of calls that return, on a busy machine too."""


def make_workers(**options: Any) -> Workers:
    """The clock advances by 5 s each time it is read."""
    return Workers(itertools.count(100.0, 5.0).__next__, **options)


def reason_of(result: Result[Any]) -> str:
    return getattr(result.error, "reason", "")


def threads_of(prefix: str) -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith(f"read-{prefix}")]


class Slow:
    """A call that hangs until it is released."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        call = self.calls
        assert self.release.wait(PATIENCE)
        return call


@pytest.fixture
def slow() -> Iterator[Slow]:
    call = Slow()
    yield call
    call.release.set()


def run_late(pool: Workers, slow: Slow, on_late: Callable[[], object] | None = None) -> Result[int]:
    return pool.run({"slow": slow}, 0.0, on_late)["slow"]


def test_each_call_has_its_own_result() -> None:
    def fail(error: Exception) -> None:
        raise error

    missing = SourceError("missing", "no such file")
    stop = StartError("no GPU")
    jobs: dict[str, Callable[[], object]] = {
        "good": lambda: 7,
        "missing": partial(fail, missing),
        "stop": partial(fail, stop),
    }
    results = Workers().run(jobs, PATIENCE)
    assert list(results) == list(jobs)
    assert (results["good"].value, results["good"].error) == (7, None)
    assert (results["missing"].value, results["missing"].error) == (None, missing)
    assert results["stop"].error is stop


def test_calls_run_at_the_same_time() -> None:
    met = threading.Barrier(2, timeout=PATIENCE)
    results = Workers().run({"a": met.wait, "b": met.wait}, PATIENCE)
    assert {result.value for result in results.values()} == {0, 1}


def test_calls_of_one_name_share_a_thread() -> None:
    pool = Workers()
    idents = [pool.run({"same": threading.get_ident}, PATIENCE)["same"].value for _ in range(3)]
    assert len(set(idents)) == 1
    assert threads_of("same") == ["read-same"]
    (thread,) = (one for one in threading.enumerate() if one.name == "read-same")
    assert thread.daemon, "a call that hangs would prevent the process from exiting"
    pool.close()


def test_the_duration_of_a_call() -> None:
    assert make_workers().run({"timed": lambda: None}, PATIENCE)["timed"].seconds == 5.0


def test_a_bug_in_one_source_is_contained(caplog: pytest.LogCaptureFixture) -> None:
    def bug() -> None:
        raise ZeroDivisionError("oops")

    result = Workers().run({"buggy": bug}, PATIENCE)["buggy"]
    assert reason_of(result) == "bug"
    assert str(result.error) == "buggy: ZeroDivisionError: oops"
    assert caplog.messages == ["buggy: unexpected error, please report it"]
    assert caplog.records[0].exc_info is not None


def test_a_call_that_hangs_is_skipped_until_it_returns(slow: Slow) -> None:
    pool = make_workers()
    late = run_late(pool, slow)
    assert (late.value, reason_of(late), late.seconds) == (None, "deadline", 5.0)
    assert str(late.error) == "slow: no answer within 5.0 s"

    jobs: dict[str, Callable[[], int]] = {"slow": slow, "other": lambda: 8}
    hung = pool.run(jobs, PATIENCE)
    assert hung["other"].value == 8
    assert (reason_of(hung["slow"]), hung["slow"].seconds) == ("hung", 0.0)
    text = "slow: a call that began 25 s ago has not returned; skipped until it does"
    assert str(hung["slow"].error) == text.replace("25", str(hung["slow"].error).split()[5])
    wait_until(lambda: slow.calls == 1, "the call begins")

    # The late result is discarded.
    slow.release.set()
    results = []

    def answers() -> bool:
        results.append(pool.run({"slow": slow}, PATIENCE)["slow"])
        return results[-1].error is None

    wait_until(answers, "the call returns")
    assert results[-1].value == 2


def test_a_late_result_is_returned_once(slow: Slow) -> None:
    pool = make_workers()
    ended = threading.Event()
    assert reason_of(run_late(pool, slow, ended.set)) == "deadline"
    assert not ended.is_set()
    # Still late: neither hung nor repeated.
    again = run_late(pool, slow, ended.set)
    assert (reason_of(again), again.seconds) == ("deadline", 10.0)

    slow.release.set()
    assert ended.wait(PATIENCE), "the thread reports the end of the late call"
    assert run_late(pool, slow, ended.set).value == 1
    assert pool.run({"slow": slow}, PATIENCE, ended.set)["slow"].value == 2


def test_a_call_in_time_is_not_reported_as_late() -> None:
    reported: list[bool] = []
    pool = Workers()
    for number in range(3):
        job = partial(int, number)
        result = pool.run({"fast": job}, PATIENCE, lambda: reported.append(True))["fast"]
        assert result.value == number
    pool.close()
    wait_until(lambda: not threads_of("fast"), "the thread ends")
    assert not reported


def test_a_thread_ends_when_its_gpu_is_gone() -> None:
    pool = Workers(idle_seconds=0.01)
    pool.run({f"gone-{number}": lambda: None for number in range(20)}, PATIENCE)
    wait_until(lambda: not threads_of("gone-"), "the threads end")
    assert pool.run({"gone-0": lambda: 7}, PATIENCE)["gone-0"].value == 7


def test_close_ends_the_threads_and_rejects_later_calls() -> None:
    pool = Workers()
    pool.run({"closed-0": lambda: None, "closed-1": lambda: None}, PATIENCE)
    pool.close()
    wait_until(lambda: not threads_of("closed-"), "the threads end")

    called: list[str] = []
    jobs = {name: partial(called.append, name) for name in ("closed-0", "never-called")}
    results = pool.run(jobs, PATIENCE)
    assert results.keys() == jobs.keys()
    for result in results.values():
        assert (result.value, reason_of(result), result.seconds) == (None, "stopping", 0.0)
        assert str(result.error) == "podgpu is stopping"
    assert not called, "a call could open the driver again"


# Counted errors


def test_errors_are_counted_by_source_and_reason() -> None:
    errors = ErrorCounts()
    good = errors.record("gpu0", Result(1, None, 0.5), "GPU-0")
    assert good == SourceStatus("gpu0", True, 0.5, device="GPU-0")
    lost: Result[int] = Result(None, SourceError("lost", "fell off"), 1.5)
    assert errors.record("gpu1", lost) == SourceStatus("gpu1", False, 1.5, "lost", "fell off")
    with_device = errors.record("gpu1", lost, "GPU-1")
    assert with_device.device == "GPU-1"
    errors.add("kubelet", "timeout")
    errors.add("kubelet", "copies_differ", 3)
    errors.add("kubelet", "timeout")

    unmapped = [
        Unmapped("kubelet", "unknown_device", "a", "r", Workload()),
        Unmapped("kubelet", "unknown_device", "b", "r", Workload()),
        Unmapped("dra", "no_claim", "c", "r", Workload()),
    ]
    statuses = [good, with_device, with_device, SourceStatus("kubelet", True)]
    counted = errors.add_to(statuses, unmapped)
    assert [status.name for status in counted] == ["gpu0", "gpu1", "gpu1", "kubelet", "dra"]
    assert [status.errors for status in counted] == [
        {},
        {"lost": 2},
        {},
        {"timeout": 2, "copies_differ": 3},
        {},
    ]
    assert [status.unmapped for status in counted] == [
        *({}, {}, {}),
        {"unknown_device": 2},
        {"no_claim": 1},
    ]
    # Counters stay, and sources without a status are sorted.
    assert [status.name for status in errors.add_to([], [])] == ["gpu1", "kubelet"]
    assert errors.add_to([], [])[0].errors == {"lost": 2}


def test_an_error_that_ends_the_process_is_raised_again() -> None:
    stop: Result[int] = Result(None, StartError("no GPU"), 0.0)
    errors = ErrorCounts()
    with pytest.raises(StartError, match="no GPU"):
        errors.record("gpu0", stop)
    assert errors.add_to([], []) == ()


# Loops


def test_the_end_of_a_loop(caplog: pytest.LogCaptureFixture) -> None:
    def fail(error: Exception) -> None:
        raise error

    assert run_loop("usage", lambda: None) is None
    stop = StartError("no GPU")
    assert run_loop("usage", partial(fail, stop)) is stop
    assert not caplog.messages
    text = "the usage loop stopped because of a bug (KeyError: 'x'); exiting"
    assert str(run_loop("usage", partial(fail, KeyError("x")))) == text
    assert caplog.messages == ["unexpected error in the usage loop, please report it"]
    assert caplog.records[0].exc_info is not None


# Libraries


class Library:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.lock = DriverLock("libfake")

    def open(self) -> None:
        self.lock.open(partial(self.calls.append, "start"))

    def close(self, wait: float = PATIENCE) -> bool:
        return self.lock.close(wait, partial(self.calls.append, "stop"))

    def problem(self) -> DriverGone | None:
        try:
            with self.lock.hold():
                return None
        except DriverGone as error:
            return error

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call of another thread that is in progress."""
        began, end = threading.Event(), threading.Event()

        def hold() -> None:
            with self.lock.hold():
                began.set()
                assert end.wait(PATIENCE)

        thread = threading.Thread(target=hold)
        thread.start()
        assert began.wait(PATIENCE)
        try:
            yield
        finally:
            end.set()
            thread.join()


def test_a_library_is_opened_and_closed_once() -> None:
    library = Library()
    assert library.close()
    problem = library.problem()
    assert (str(problem), problem and problem.reason) == (
        "libfake is not loaded",
        "driver_not_loaded",
    )
    library.open()
    library.open()
    assert library.problem() is None
    assert library.lock.is_open
    assert library.close()
    assert library.close()
    problem = library.problem()
    assert (str(problem), problem and problem.reason) == ("podgpu has released libfake", "released")
    assert not library.lock.is_open
    library.open()
    assert library.problem() is None
    assert library.calls == ["start", "stop", "start"]


def test_a_library_that_cannot_be_opened_stays_closed() -> None:
    def fail() -> None:
        raise OSError("no such library")

    library = Library()
    with pytest.raises(OSError, match="no such library"):
        library.lock.open(fail)
    assert not library.lock.is_open
    assert str(library.problem()) == "libfake is not loaded"
    library.open()
    assert library.problem() is None


def test_a_library_in_use_is_not_closed() -> None:
    library = Library()
    library.open()
    with library.call(), library.call():
        assert not library.close(0.0)
        # Other calls are allowed, also those that give way: nobody waits any more.
        with library.lock.hold(gives_way=True):
            pass
    assert library.lock.is_open
    assert library.calls == ["start"]
    with pytest.raises(ValueError, match="in the call"), library.lock.hold():
        raise ValueError("in the call")
    assert library.close(0.0)
    assert library.calls == ["start", "stop"]


def test_close_waits_for_calls_in_progress() -> None:
    library = Library()
    library.open()
    closed: list[bool] = []
    late: list[DriverGone | None] = []

    def give_way() -> None:
        try:
            with library.lock.hold(gives_way=True):
                late.append(None)
        except DriverGone as error:
            late.append(error)

    closing = threading.Thread(target=lambda: closed.append(library.close()))
    giving_way = threading.Thread(target=give_way)
    with library.call():
        closing.start()
        wait_until(lambda: library.lock._closers == 1, "close waits")
        assert library.problem() is None
        giving_way.start()
        assert not closed
    closing.join()
    giving_way.join()
    assert closed == [True]
    assert [error and error.reason for error in late] == ["released"]
    assert library.calls == ["start", "stop"]


def test_close_gives_up_while_a_library_is_being_opened() -> None:
    library = Library()
    began, end = threading.Event(), threading.Event()

    def start() -> None:
        began.set()
        assert end.wait(PATIENCE)

    opening = threading.Thread(target=lambda: library.lock.open(start))
    opening.start()
    assert began.wait(PATIENCE)
    assert not library.close(0.01)
    end.set()
    opening.join()
    assert library.problem() is None
    assert library.close()
