"""Workers: deadlines, abandoned calls, late answers."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from podgpu.errors import SourceError
from podgpu.workers import Workers
from tests.nodes.clock import wait_until


@pytest.fixture
def isolation() -> Iterator[Workers]:
    isolation = Workers()
    yield isolation
    isolation.close()


def test_values_and_errors_come_back(isolation: Workers) -> None:
    def fail() -> int:
        raise SourceError("broken", "it broke")

    results = isolation.run({"good": lambda: 1, "bad": fail}, 5.0)
    assert results["good"].value == 1
    assert results["good"].error is None
    assert isinstance(results["bad"].error, SourceError)
    assert results["bad"].error.reason == "broken"


def test_a_hung_call_is_abandoned_and_not_started_again_until_it_returns(isolation: Workers) -> None:
    release, started = threading.Event(), []

    def hang() -> str:
        started.append(1)
        release.wait(30)
        return "late"

    first = isolation.run({"well": lambda: "fine", "sick": hang}, 0.5)
    assert first["sick"].error is not None
    assert first["sick"].error.reason == "deadline"  # type: ignore[union-attr]
    assert first["well"].value == "fine"
    second = isolation.run({"sick": hang, "well": lambda: "fine"}, 5.0)
    assert second["sick"].error.reason == "hung"  # type: ignore[union-attr]
    assert second["well"].value == "fine"
    assert started == [1]
    release.set()
    while isolation.run({"sick": lambda: "new"}, 5.0)["sick"].value != "new":
        pass  # the worker is free a moment after the late return; its answer was thrown away


ONE_QUESTION = """
import sys
from podgpu.workers import Workers

def slow():
    print("asked", flush=True)
    return sys.stdin.readline()

found = Workers().run({"slow": slow}, 1.0)["slow"]
print(found.value if found.error is None else found.error.reason)
"""


@pytest.mark.fault(
    "the node, or podgpu's container, is frozen for longer than a source may take",
    "no source is blamed for it: the deadline is of time in which podgpu ran",
)
@pytest.mark.reads_host("whether a process stands still only /proc tells")
@pytest.mark.parametrize(("answers", "expected"), [(True, "answer"), (False, "deadline")])
def test_what_podgpu_stood_still_is_not_the_sources(answers: bool, expected: str) -> None:
    command = [sys.executable, "-c", ONE_QUESTION]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdin is not None
        assert asking.stdout is not None
        asking.stdout.readline()
        time.sleep(0.1)  # it waits for the answer by now; if not, the test shows less, and is not wrong
        asking.send_signal(signal.SIGSTOP)
        wait_until(lambda: " T " in Path(f"/proc/{asking.pid}/stat").read_text(), "it stands still")
        time.sleep(1.2)  # not for luck: for longer than its deadline
        if answers:
            asking.stdin.write("answer\n")
            asking.stdin.flush()
        asking.send_signal(signal.SIGCONT)
        assert asking.stdout.readline().strip() == expected


def test_a_bug_in_one_source_is_contained(isolation: Workers, caplog: pytest.LogCaptureFixture) -> None:
    def bug() -> None:
        raise ZeroDivisionError("oops")

    result = isolation.run({"buggy": bug}, 5.0)["buggy"]
    assert result.error is not None
    assert result.error.reason == "bug"  # type: ignore[union-attr]
    assert "please report" in caplog.text


def test_who_asks_after_the_end_is_told_so(isolation: Workers) -> None:
    isolation.close()
    error = isolation.run({"late": lambda: 1}, 5.0)["late"].error
    assert isinstance(error, SourceError)
    assert error.reason == "stopping"
