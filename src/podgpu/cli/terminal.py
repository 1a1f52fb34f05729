"""Prints to standard output, configures logging to standard error, and handles signals."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import click

from podgpu.errors import StartError, one_line


def print_out(text: str | bytes) -> None:
    """Prints to standard output. Replaces characters that cannot be encoded.

    Raises StartError if printing fails.
    """
    if isinstance(text, str):
        encoding = sys.stdout.encoding or "utf-8"
        text = text.encode(encoding, "replace").decode(encoding)
    try:
        click.echo(text, nl=False)
    except BrokenPipeError:
        # click then exits without a message.
        raise
    except OSError as error:
        raise StartError(f"standard output cannot be written: {error.strerror}") from error


def print_lines(lines: Iterable[str]) -> None:
    print_out("".join(f"{line}\n" for line in lines))


def is_screen() -> bool:
    """Returns True if standard output is a terminal that supports control sequences."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def wants_colour() -> bool:
    return is_screen() and not os.environ.get("NO_COLOR")


@contextmanager
def quiet_logs(debug: bool = False) -> Iterator[None]:
    """Suppresses log lines, because they would disturb the screen.

    With `debug`, log lines are printed.
    """
    before = logging.root.manager.disable
    if debug:
        configure_logging("text", debug)
    else:
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


class _Formatter(logging.Formatter):
    def __init__(self, is_json: bool) -> None:
        super().__init__()
        self._is_json = is_json

    def format(self, record: logging.LogRecord) -> str:
        created = datetime.fromtimestamp(record.created, UTC)
        time = created.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        trace = self.formatException(record.exc_info) if record.exc_info else ""

        if not self._is_json:
            text = f"{time} {record.levelname:<7} {one_line(record.getMessage())}"
            if trace:
                return f"{text}\n{trace}"
            return text

        entry = {
            "time": time,
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        if trace:
            entry["exception"] = trace
        # The only control character that JSON does not escape.
        return json.dumps(entry).replace("\x7f", "\\u007f")


def _is_no_bad_request(record: logging.LogRecord) -> bool:
    """Returns False for malformed requests, so that a port scanner does not fill the log."""
    error = record.exc_info[1] if record.exc_info else None
    # Compares the name, because most commands do not import aiohttp.
    return type(error).__module__ != "aiohttp.http_exceptions"


def configure_logging(log_format: str, debug: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(log_format == "json"))
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.INFO, handlers=[handler], force=True
    )

    for noisy in ("asyncio", "aiohttp.access", "grpc"):
        logging.getLogger(noisy).setLevel(logging.INFO if debug else logging.WARNING)

    server = logging.getLogger("aiohttp.server")
    if debug:
        server.removeFilter(_is_no_bad_request)
    else:
        server.addFilter(_is_no_bad_request)


def stop_on_signal() -> threading.Event:
    """Returns an event that SIGTERM and SIGINT set. For commands without a web server."""
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    return stopping
