"""Signals to a real `podgpu cluster` process."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.nodes.clock import PATIENCE
from tests.process import CLUSTER, PODGPU, podgpu

COMMAND = (*CLUSTER, "--scrape", "127.0.0.1:1")


def test_sigusr1_does_not_end_the_cluster_view(tmp_path: Path) -> None:
    """Only the exporter handles SIGUSR1: it releases the driver."""
    with podgpu(COMMAND, tmp_path) as process:
        process.popen.send_signal(signal.SIGUSR1)
        process.stop()


def test_two_signals_to_stop_end_cleanly(tmp_path: Path) -> None:
    with podgpu(COMMAND, tmp_path) as process:
        process.popen.send_signal(signal.SIGINT)
        for _ in range(100):  # some signals arrive after the event loop is closed
            process.popen.send_signal(signal.SIGTERM)
            process.popen.send_signal(signal.SIGINT)
            time.sleep(0.01)
        process.stop()


FINDER = """
import os, sys, time

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == MODULE:
            os.kill(os.getpid(), 2)
            time.sleep(60)

sys.meta_path.insert(0, Finder)
"""


@pytest.mark.parametrize("module", ["enum", "click", "aiohttp", "podgpu.fleet.round"])
def test_sigint_during_the_imports_prints_no_traceback(module: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        FINDER.replace("MODULE", repr(module)), encoding="utf-8"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [*PODGPU, *COMMAND], capture_output=True, text=True, env=environment, timeout=PATIENCE
    )
    assert done.returncode in (-signal.SIGINT, 130)
    assert done.stderr.strip() == ""
