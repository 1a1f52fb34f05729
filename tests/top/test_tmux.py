"""`podgpu top` in tmux, a terminal whose screen can be read."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from podgpu.cluster.view import GpuDetails, XidView
from podgpu.model import Workload
from tests.top.scene import LOST, gpu, holder, node, view
from tests.top.servers import RawServer, history, podgpu_server

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
PATIENCE = 90.0
POD = "vllm-llama-3-70b-6d4f9c7b5d-x2x9z"
ANSWERS = {
    "/api/v1/view": view(
        node(
            *(gpu(n, holder(Workload("research", f"{POD}-{n}", "main")), utilization_ratio=0.5) for n in (0, 2, 3)),
            gpu(1, holder(Workload("research", POD, "main")), conditions=[LOST], absent=True),
            *(gpu(n, utilization_ratio=0.0) for n in range(4, 30)),
            name="gpu-node-1",
        ),
        notes=["kubelet: its socket is not there"],
    ),
    "/api/v1/history": history(GPU_0=[200] * 60),
    "/api/v1/gpus/GPU-1": GpuDetails(xids=[XidView(xid=79, says="GPU has fallen off the bus", class_="hardware")]),
}


class Tmux:
    """A tmux server with one window and a shell."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self._command = ["tmux", "-S", str(folder / "tmux"), "-f", "/dev/null"]
        environment = {k: v for k, v in os.environ.items() if k not in ("TMUX", "NO_COLOR", "COLUMNS", "LINES")}
        self._environment = environment | {"TERM": "xterm-256color", "PS1": "$ ", "LC_ALL": "C.UTF-8"} | variables
        self._tmux("new-session", "-d", "-x", "80", "-y", "24", "sh")

    def _tmux(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._command, *arguments], env=self._environment, capture_output=True, text=True, timeout=20, check=True
        )
        return done.stdout

    def type(self, text: str) -> None:
        self._tmux("send-keys", "-l", text)

    def press(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def resize(self, columns: int, rows: int) -> None:
        self._tmux("resize-window", "-x", str(columns), "-y", str(rows))

    def screen(self, *more: str) -> list[str]:
        return self._tmux("capture-pane", "-p", *more).splitlines()

    def until(self, seen: Callable[[list[str]], object]) -> list[str]:
        give_up_at = time.monotonic() + PATIENCE
        while not seen(lines := self.screen()):
            assert time.monotonic() < give_up_at, "\n".join(lines)
            time.sleep(0.05)
        return lines

    def close(self) -> None:
        self._tmux("kill-server")


@pytest.fixture
def server() -> Iterator[RawServer]:
    with podgpu_server(ANSWERS) as running:
        yield running


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Tmux]:
    running = Tmux(tmp_path)
    try:
        yield running
    finally:
        running.close()


def start(terminal: Tmux, server: RawServer) -> list[str]:
    terminal.type(f"{sys.executable} -m podgpu top --interval 200ms --cluster {server.address}")
    terminal.press("Enter")
    return terminal.until(lambda lines: any("q quit" in line for line in lines) and any(POD in line for line in lines))


def has(text: str) -> Callable[[list[str]], bool]:
    return lambda lines: any(text in line for line in lines)


def test_80_columns(terminal: Tmux, server: RawServer) -> None:
    lines = start(terminal, server)
    assert lines[0].startswith("podgpu top  gpu-node-1  30 GPUs")
    first = next(at for at, line in enumerate(lines) if POD in line)
    assert lines[first].startswith("1 ")
    assert re.search(r" –", lines[first])
    assert lines[first + 1] == "  ! lost for 1m40s: GPU 1 has fallen off the bus"
    for number in (0, 2, 3):
        assert any(f"{POD}-{number}" in line and "50%" in line for line in lines)
    assert all(len(line) <= 80 for line in lines)
    assert "kubelet: its socket is not there" in lines


def test_sparklines_begin_with_the_servers_history(terminal: Tmux, server: RawServer) -> None:
    start(terminal, server)
    terminal.until(lambda lines: any(f"{POD}-0" in line and "███████" in line for line in lines))
    assert has("LAST 15m")(terminal.screen())


def test_the_cursor_the_details_and_back(terminal: Tmux, server: RawServer) -> None:
    start(terminal, server)
    terminal.press("Enter")
    lines = terminal.until(has("XID 79 (hardware)"))
    assert has("GPU 1  H100 80GB HBM3  on gpu-node-1  GPU-1")(lines)
    assert has("  do: Drain the node and reset the GPU.")(lines)
    terminal.press("Down", "Down")
    terminal.until(has("GPU 0  H100 80GB HBM3"))
    terminal.type("j")
    terminal.until(has("GPU 2  H100 80GB HBM3"))
    terminal.press("Up")
    terminal.until(has("GPU 0  H100 80GB HBM3"))
    terminal.press("Enter")
    terminal.until(lambda lines: lines[2 if "LAST" in lines[1] else 3].startswith("GPU 0  H100"))
    terminal.press("Escape")
    terminal.until(lambda lines: not has("held by")(lines))
    terminal.press("End")
    terminal.until(has("29 "))


@pytest.mark.parametrize("columns", [60, 132])
def test_other_sizes(terminal: Tmux, server: RawServer, columns: int) -> None:
    start(terminal, server)
    terminal.resize(columns, 15)
    lines = terminal.until(
        lambda lines: len(lines) <= 15 and has("q quit")(lines[-1:]) and sum(POD in line for line in lines) >= 4
    )
    assert all(len(line) <= columns for line in lines)
    assert has("! lost for 1m40s: GPU 1 has fallen off the bus")(lines)


def test_ctrl_c_restores_the_screen(terminal: Tmux, server: RawServer) -> None:
    terminal.type("echo before-top")
    terminal.press("Enter")
    terminal.until(has("before-top"))
    start(terminal, server)
    assert not has("before-top")(terminal.screen())
    terminal.press("C-c")
    terminal.until(has("before-top"))
    terminal.type("echo after-top-$?")
    terminal.press("Enter")
    lines = terminal.until(has("after-top-130"))
    assert has("echo after-top-")(lines)  # keys are shown again
    assert not has("LAST 15m")(lines)


def test_without_colours_the_cursor_has_a_mark(tmp_path: Path, server: RawServer) -> None:
    terminal = Tmux(tmp_path, NO_COLOR="1")
    try:
        lines = start(terminal, server)
        assert any(line.startswith(">1 ") and POD in line for line in lines)
        assert not any("\x1b[" in line for line in terminal.screen("-e"))
    finally:
        terminal.close()
