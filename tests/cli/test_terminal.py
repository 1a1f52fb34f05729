"""Output on a real terminal (a pty), and log lines."""

from __future__ import annotations

import json
import logging
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import closing, redirect_stdout

import pytest
from aiohttp.http_exceptions import BadHttpMessage

from podgpu.cli.main import run
from podgpu.cli.terminal import configure_logging
from tests.cli.test_doctor import Tree, _no_variables, socket, tree

__all__ = ["_no_variables", "socket", "tree"]
CAPABLE = {"TERM": "xterm-256color"}


class Terminal:
    """A pseudo-terminal for standard output. A thread reads from it, because its buffer is
    small.
    """

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
            except OSError:  # closed
                return
            self.output += data

    def close(self) -> None:
        self.stdout.close()
        self._reader.join()
        os.close(self._screen)


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [
        (CAPABLE, True),
        ({}, False),
        ({"TERM": "dumb"}, False),
        ({**CAPABLE, "NO_COLOR": "1"}, False),
    ],
    ids=["capable", "unset", "dumb", "no colour"],
)
def test_colours_depend_on_the_terminal(
    variables: Mapping[str, str],
    coloured: bool,
    tree: Tree,
    socket: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TERM", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    where = [
        "--telemetry",
        "simulated:1xT4",
        "--pod-resources-kubelet-socket",
        socket,
        *tree.options,
    ]
    with closing(Terminal()) as terminal, redirect_stdout(terminal.stdout):
        assert run(["doctor", *where]) == 0
    assert b"no problems" in terminal.output
    assert (b"\x1b[" in terminal.output) is coloured


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_name_cannot_forge_a_line_or_control_the_terminal(
    log_format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = (
        "n1\n2026-01-01T00:00:00.000Z ERROR   all is "
        "lost\x1b[2J\x9b2Jb\u202ec\u2028d\x7fe\U000e0001f"
    )
    configure_logging(log_format, debug=False)
    logging.getLogger("podgpu").warning("%s: seen", name)
    text = capsys.readouterr().err
    assert text.rstrip("\n").isprintable()
    if log_format == "json":
        assert json.loads(text)["msg"] == f"{name}: seen"
    else:
        assert r"n1\n2026" in text


@pytest.mark.parametrize("debug", [False, True])
def test_malformed_requests_are_logged_only_with_debug(
    capsys: pytest.CaptureFixture[str], debug: bool
) -> None:
    configure_logging("text", debug=debug)
    for error in (BadHttpMessage("what?"), ValueError("a bug")):
        logging.getLogger("aiohttp.server").error("Error handling request", exc_info=error)
    logged = capsys.readouterr().err
    assert ("BadHttpMessage" in logged) is debug
    assert "ValueError: a bug" in logged


@pytest.mark.parametrize(
    ("arguments", "message"), [(["fields", "nope"], "'nope'"), (["forget"], "GPU-UUID")]
)
def test_an_argument_that_is_missing_or_matches_nothing(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "closed", "code", "complaint"),
    [
        (["fields", "GPU_UTIL"], ">&-", 0, ""),
        (["fields", "GPU_UTIL"], "<&- >&- 2>&-", 0, ""),
        (["nothing"], "2>&-", 2, ""),
        (["migrate", "-"], "<&-", 2, "podgpu: standard input is empty"),
    ],
)
def test_standard_streams_that_are_closed(
    arguments: list[str], closed: str, code: int, complaint: str
) -> None:
    """As by a cron job or an init script."""
    script = f'exec "$0" -m podgpu "$@" {closed}'
    command = ["sh", "-c", script, sys.executable, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr.strip()) == (code, complaint)
