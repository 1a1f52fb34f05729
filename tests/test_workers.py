"""Workers: bugs in a source, threads of removed GPUs, and calls after `close`."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from podgpu.workers import Workers
from tests.nodes.clock import wait_until


def test_a_bug_in_one_source_is_contained(caplog: pytest.LogCaptureFixture) -> None:
    def bug() -> None:
        raise ZeroDivisionError("oops")

    result = Workers().run({"buggy": bug}, 5.0)["buggy"]
    assert getattr(result.error, "reason", "") == "bug"
    assert "please report" in caplog.text


def test_a_thread_ends_when_its_gpu_is_gone() -> None:
    pool = Workers(idle_seconds=0.01)
    pool.run({f"gone-{number}": lambda: None for number in range(20)}, 5.0)
    wait_until(
        lambda: not any("gone-" in one.name for one in threading.enumerate()), "the threads end"
    )
    assert pool.run({"gone-0": lambda: 7}, 5.0)["gone-0"].value == 7


def test_close_ends_the_threads_and_rejects_later_calls() -> None:
    pool = Workers()
    pool.run({"closed-0": lambda: None, "closed-1": lambda: None}, 5.0)
    pool.close()
    wait_until(
        lambda: not any("closed-" in one.name for one in threading.enumerate()), "the threads end"
    )

    called: list[str] = []
    jobs = {name: partial(called.append, name) for name in ("closed-0", "never-called")}
    results = pool.run(jobs, 5.0)
    assert results.keys() == jobs.keys()
    for result in results.values():
        assert getattr(result.error, "reason", "") == "stopping"
    assert not called, "a call could open the driver again"
