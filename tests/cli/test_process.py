"""Log lines: one to each message, whatever names are in it. Memory: what is not used is not kept."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
from aiohttp.http_exceptions import BadHttpMessage

from podgpu.cli.process import configure_logging

FORGED = "n1\n2026-01-01T00:00:00.000Z ERROR   all is lost\x1b[2J"


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root, server = logging.getLogger(), logging.getLogger("aiohttp.server")
    handlers, level, filters = root.handlers[:], root.level, server.filters[:]
    yield
    root.handlers[:], server.filters[:] = handlers, filters
    root.setLevel(level)


def test_a_name_cannot_begin_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("text", debug=False)
    logging.getLogger("podgpu").warning("%s: seen", FORGED)
    (line,) = capsys.readouterr().err.splitlines()
    assert r"n1\n2026" in line
    assert r"\x1b[2J: seen" in line


def test_in_json_it_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("json", debug=False)
    logging.getLogger("podgpu").warning("%s: seen", FORGED)
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["msg"] == f"{FORGED}: seen"


def test_no_letter_of_a_json_line_tells_a_terminal_anything(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON itself wants only ASCII's control characters escaped."""
    name = "a\x9b2Jb\u202ec\u2028d\x7fe\U000e0001f"
    configure_logging("json", debug=False)
    logging.getLogger("podgpu").warning("%s: seen", name)
    text = capsys.readouterr().err
    assert text.rstrip("\n").isprintable()
    assert json.loads(text)["msg"] == f"{name}: seen"


@pytest.mark.parametrize("debug", [False, True])
def test_a_request_that_is_no_http_is_no_news(capsys: pytest.CaptureFixture[str], debug: bool) -> None:
    configure_logging("text", debug=debug)
    for error in (BadHttpMessage("what?"), ValueError("a bug")):
        logging.getLogger("aiohttp.server").error("Error handling request", exc_info=error)
    said = capsys.readouterr().err
    assert ("BadHttpMessage" in said) is debug
    assert "ValueError: a bug" in said


# Memory
