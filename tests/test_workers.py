"""Workers: deadlines, abandoned calls, late answers."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from podgpu.workers import Workers
from tests.nodes.clock import wait_until


@pytest.fixture
def isolation() -> Iterator[Workers]:
    isolation = Workers()
    yield isolation
    isolation.close()


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
