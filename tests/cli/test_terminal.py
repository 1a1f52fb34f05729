"""What commands print by, on a real terminal (a pty): colours only where they are understood and wanted."""

from __future__ import annotations

import logging
import os
import pty
import threading
from collections.abc import Mapping
from contextlib import closing, redirect_stdout

import pytest

from podgpu.cli.main import run
from podgpu.cli.terminal import quiet_logs
from tests.cli.test_doctor import Tree, _no_variables, socket, tree

__all__ = ["_no_variables", "socket", "tree"]
CAPABLE = {"TERM": "xterm-256color"}


class Terminal:
    """Standard output is this; what came is read meanwhile, or whoever prints much would wait."""

    def __init__(self, encoding: str = "utf-8") -> None:
        self._screen, printed_on = pty.openpty()
        self.stdout = os.fdopen(printed_on, "w", encoding=encoding)
        self.output = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._screen, 65536)
            except OSError:  # as Linux says that nobody has it open any more
                return
            self.output += data

    def close(self) -> None:
        """`output` has all then."""
        self.stdout.close()
        self._reader.join()
        os.close(self._screen)


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [(CAPABLE, True), ({}, False), ({"TERM": "dumb"}, False), ({**CAPABLE, "NO_COLOR": "1"}, False)],
    ids=["capable", "unsaid", "dumb", "unwanted"],
)
def test_the_doctor_has_colours_for_a_terminal_that_understands_them(
    variables: Mapping[str, str], coloured: bool, tree: Tree, socket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TERM", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    where = ["--telemetry", "simulated:1xT4", "--pod-resources-kubelet-socket", socket, *tree.options]
    with closing(Terminal()) as terminal, redirect_stdout(terminal.stdout):
        assert run(["doctor", *where]) == 0
    assert b"no problems" in terminal.output
    assert (b"\x1b[" in terminal.output) is coloured


def test_no_line_of_log_comes_between_and_afterwards_all_do(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("podgpu")
    with quiet_logs():
        log.error("in between")
    with pytest.raises(RuntimeError), quiet_logs():
        raise RuntimeError
    log.error("afterwards")
    assert [record.getMessage() for record in caplog.records] == ["afterwards"]
