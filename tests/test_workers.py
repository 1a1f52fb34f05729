"""Workers: bugs in a source, and threads of removed GPUs."""

from __future__ import annotations

import threading

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
