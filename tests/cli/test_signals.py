"""Signals to `podgpu cluster`, a real process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.nodes.clock import PATIENCE

COMMAND = [sys.executable, "-m", "podgpu", "cluster", "--scrape", "127.0.0.1:1", "-a", "127.0.0.1:0"]


@contextmanager
def started(path: str = "") -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": path} if path else None
    with subprocess.Popen(COMMAND, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_line(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr is not None
    assert any(words in line for line in process.stderr), "the process ended"


def test_sigusr1_does_not_end_the_cluster_view() -> None:
    """The exporter releases the driver on SIGUSR1; the cluster view has none."""
    with started() as process:
        wait_for_line(process, "listening")
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


def test_two_signals_to_stop_end_cleanly() -> None:
    with started() as process:
        wait_for_line(process, "listening")
        process.send_signal(signal.SIGINT)
        for _ in range(100):  # some arrive after the event loop was closed
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGINT)
            time.sleep(0.01)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert "Traceback" not in errors


FINDER = """
import os, signal, sys, time

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)

sys.meta_path.insert(0, Finder)
"""


@pytest.mark.parametrize("module", ["click", "aiohttp", "podgpu.cluster.loop"])
def test_sigint_during_the_imports_prints_no_traceback(module: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(FINDER.replace("MODULE", repr(module)), encoding="utf-8")
    with started(str(tmp_path)) as process:
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode in (-signal.SIGINT, 130)
    assert errors.strip() == ""
