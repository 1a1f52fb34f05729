"""Tests the live table in a pseudo-terminal: keys, signals, sizes, and restored terminal modes."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator

import pytest

from podgpu.fleet.view import GpuDetails, XidView
from tests.top.scene import LOST, gpu, holder, node, view
from tests.top.servers import (
    EXPOSITION,
    RawServer,
    answer,
    history,
    podgpu_server,
    serving,
    unused_url,
)

PATIENCE = 90.0
ALTERNATE, BACK = b"\x1b[?1049h", b"\x1b[?1049l"
HIDDEN, SHOWN = b"\x1b[?25l", b"\x1b[?25h"


class Session:
    """`podgpu top` in its own terminal."""

    columns = 100

    def __init__(self, *arguments: str, **variables: str) -> None:
        self.keyboard, terminal = pty.openpty()
        self.resize(self.columns, 20)
        self.before = termios.tcgetattr(terminal)
        self._terminal = (
            terminal  # stays open, so that its modes can be read after the command has ended
        )
        environment = {
            k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "podgpu", "top", *arguments],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=environment | {"TERM": "xterm-256color"} | variables,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self.output = b""

    def resize(self, columns: int, rows: int) -> None:
        """Resizes the terminal. The kernel then sends SIGWINCH."""
        fcntl.ioctl(self.keyboard, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        self.output = b""
        os.write(self.keyboard, keys.encode())

    def until(self, wanted: bytes | Callable[[bytes], object]) -> bytes:
        found = (lambda output: wanted in output) if isinstance(wanted, bytes) else wanted
        give_up_at = time.monotonic() + PATIENCE
        while not found(self.output):
            assert time.monotonic() < give_up_at, self.output
            assert self._read(), self.output
        return self.output

    def _read(self) -> bool:
        if not select.select([self.keyboard], [], [], PATIENCE)[0]:
            return False
        try:
            data = os.read(self.keyboard, 65536)
        except OSError:
            return False
        self.output += data
        return bool(data)

    def wait(self) -> int:
        """Waits for the exit code. Reads the output, because a full terminal would block the
        command.
        """
        give_up_at = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < give_up_at, self.output
            self.drain(0.01)
        self.drain(0.0)
        return self.process.returncode

    def drain(self, seconds: float) -> None:
        while select.select([self.keyboard], [], [], seconds)[0]:
            self.output += os.read(self.keyboard, 65536)

    def assert_restored(self) -> None:
        assert termios.tcgetattr(self._terminal) == self.before
        assert self.output.rindex(BACK) > self.output.rfind(ALTERNATE)
        assert self.output.rindex(SHOWN) > self.output.rfind(HIDDEN)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.keyboard)
        os.close(self._terminal)


@pytest.fixture
def server() -> Iterator[RawServer]:
    with serving(answer(EXPOSITION)) as running:
        yield running


@pytest.fixture
def session(server: RawServer) -> Iterator[Session]:
    with Session("--url", server.url, "--interval", "100ms") as live:
        live.until(b"two-slices")
        live.until(b"q quit")
        yield live


def echoes(session: Session) -> bool:
    return bool(termios.tcgetattr(session.keyboard)[3] & termios.ECHO)


def test_q_restores_the_terminal(session: Session) -> None:
    assert ALTERNATE in session.output
    assert HIDDEN in session.output
    assert not echoes(session)
    session.press("q")
    assert session.wait() == 0
    session.assert_restored()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_restore_the_terminal(session: Session, number: signal.Signals) -> None:
    session.output = b""
    os.kill(session.process.pid, number)
    assert session.wait() == 128 + number
    session.assert_restored()
    assert b"Traceback" not in session.output


def test_another_size(session: Session) -> None:
    assert b"MODEL" in session.output
    session.output = b""
    session.resize(40, 10)
    session.until(
        lambda output: b"HOLDER" in output and b"MODEL" not in output.rpartition(b"podgpu top")[2]
    )
    session.press("q")
    assert session.wait() == 0
    session.assert_restored()


def test_ctrl_z(session: Session) -> None:
    session.press("\x1a")
    pid, status = os.waitpid(session.process.pid, os.WUNTRACED)
    assert (pid, os.WIFSTOPPED(status)) == (session.process.pid, True)
    session.until(BACK)
    assert echoes(session)
    session.output = b""
    os.kill(session.process.pid, signal.SIGCONT)
    session.until(ALTERNATE)
    session.until(b"two-slices")
    session.press("q")
    assert session.wait() == 0
    session.assert_restored()


def test_an_error_at_the_start_is_one_line() -> None:
    with Session("--url", unused_url()) as live:
        assert live.wait() == 1
        assert live.output.endswith(b"nothing listens there: check that the server runs there\r\n")
        assert ALTERNATE not in live.output


def test_once_in_a_terminal_has_colours_and_totals(server: RawServer) -> None:
    with Session("--url", server.url, "--once", "--interval", "100ms") as live:
        assert live.wait() == 0
        assert b"\x1b[" in live.output
        assert ALTERNATE not in live.output
        last = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", live.output).split(b"\r\n")[-2]
        assert re.search(rb"/\d+ allocated .* free  0 broken", last), (
            "the line of totals is missing"
        )
    with Session("--url", server.url, "--once", "--interval", "100ms", NO_COLOR="1") as live:
        assert live.wait() == 0
        assert b"\x1b" not in live.output


class SessionWithoutSize(Session):
    columns = 0


def test_once_in_a_terminal_without_size_prints_all(server: RawServer) -> None:
    with SessionWithoutSize("--url", server.url, "--once", "--interval", "100ms") as live:
        assert live.wait() == 0
        assert b"HOLDER" in live.output


def test_history_and_details_of_a_podgpu_server() -> None:
    xid = XidView(xid=79, says="GPU has fallen off the bus", class_="hardware")
    answers = {
        "/api/v1/view": view(
            node(gpu(0, holder()), gpu(1, holder(), conditions=[LOST], absent=True))
        ),
        "/api/v1/history": history(GPU_0=[200] * 60),
        "/api/v1/gpus/GPU-1": GpuDetails(xids=[xid]),
    }
    with (
        podgpu_server(answers) as server,
        Session("--cluster", server.address, "--interval", "100ms") as live,
    ):
        live.until(b"LAST 15m")
        live.until(b"! lost for 1m40s: GPU 1 has fallen off the bus")
        live.press("\r")
        live.until(b"XID 79 (hardware): GPU has fallen off the bus")
        live.press("q")
        assert live.wait() == 0
