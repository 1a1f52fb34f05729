"""`--write` and what it needs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from podgpu.errors import UsageError
from podgpu.writers.write_option import parse_write
from tests.process import EXPORTER, PODGPU


def test_nothing_is_written_unless_it_is_wanted() -> None:
    assert parse_write("").arguments == {}
    assert parse_write(" events ").arguments == {"events": ""}
    wanted = parse_write("taints:NoSchedule, condition")
    assert wanted.arguments == {"taints": "NoSchedule", "condition": ""}


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("event", "--write 'event': unknown; write some of events"),
        ("events:all", "--write 'events:all': write events"),
        ("taints:NoExecute", "--write 'taints:NoExecute': write taints:None or taints:NoSchedule"),
        ("events,events", "--write 'events,events': events is listed twice"),
    ],
)
def test_invalid_values(value: str, problem: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_write(value)
    assert str(error.value).startswith(problem)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*PODGPU, *EXPORTER, "-a", "127.0.0.1:0", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--write", "events"], "--write needs -k"),
        (["-k", "--write", "nodes"], "--write 'nodes': unknown"),
        (["-k", "--write", "events"], "no Kubernetes API server is configured"),
    ],
)
def test_usage_errors(arguments: list[str], problem: str, tmp_path: Path) -> None:
    socket = ("--pod-resources-kubelet-socket", str(tmp_path / "kubelet.sock"))
    done = run(*arguments, *socket)
    assert done.returncode == 2
    assert problem in done.stderr
    assert "Traceback" not in done.stderr
