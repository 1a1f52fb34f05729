"""Writes to standard output, and detects its terminal features."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from podgpu.cli.process import configure_logging
from podgpu.errors import StartError


def print_out(text: str | bytes) -> None:
    """Prints to standard output. Characters that cannot be encoded become question marks. Raises StartError."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        click.echo(text.encode(encoding, "replace").decode(encoding) if isinstance(text, str) else text, nl=False)
    except BrokenPipeError:
        raise  # click exits without a message
    except OSError as error:
        raise StartError(f"standard output cannot be written: {error.strerror}") from error


def is_screen() -> bool:
    """Returns True for a terminal that supports control sequences. If TERM is not set, `dumb` is assumed."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def is_interactive() -> bool:
    """Returns True if standard input and standard output are terminals."""
    return sys.stdin.isatty() and is_screen()


def wants_colour() -> bool:
    return is_screen() and not os.environ.get("NO_COLOR")


@contextmanager
def quiet_logs(debug: bool = False) -> Iterator[None]:
    """Suppresses log lines, which would disturb the screen, unless `debug` is set."""
    before = logging.root.manager.disable
    if debug:
        configure_logging("text", debug)
    else:
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
