"""Workers: a frozen process, and bugs in a source."""

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


ONE_CALL = """
import sys
from podgpu.workers import Workers

def slow():
    print("called", flush=True)
    return sys.stdin.readline()

result = Workers().run({"slow": slow}, 1.0)["slow"]
print(result.value if result.error is None else result.error.reason)
"""


@pytest.mark.fault(
    "the node, or podgpu's container, is frozen for longer than a source may take",
    "no source fails because of it: the time of the freeze does not count towards the deadline",
)
@pytest.mark.reads_host("only /proc has the state of a process")
@pytest.mark.parametrize(("answers", "expected"), [(True, "answer"), (False, "deadline")])
def test_a_frozen_process_does_not_exceed_deadlines(answers: bool, expected: str) -> None:
    command = [sys.executable, "-c", ONE_CALL]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.1)  # then it waits for the answer
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: " T " in Path(f"/proc/{process.pid}/stat").read_text(), "the process is stopped")
        time.sleep(1.2)  # longer than the deadline
        if answers:
            process.stdin.write("answer\n")
            process.stdin.flush()
        process.send_signal(signal.SIGCONT)
        assert process.stdout.readline().strip() == expected


def test_a_bug_in_one_source_is_contained(isolation: Workers, caplog: pytest.LogCaptureFixture) -> None:
    def bug() -> None:
        raise ZeroDivisionError("oops")

    result = isolation.run({"buggy": bug}, 5.0)["buggy"]
    assert result.error is not None
    assert result.error.reason == "bug"  # type: ignore[union-attr]
    assert "please report" in caplog.text
