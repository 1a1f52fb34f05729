"""This module owns what the commands print by: standard output, whether it is a screen, whether it has colours, and
that no line of log comes between."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from podgpu.compose.process import configure_logging
from podgpu.errors import StartError


def print_out(text: str | bytes) -> None:
    """On standard output. What a terminal has no letter for becomes a question mark. Raises StartError."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        click.echo(text.encode(encoding, "replace").decode(encoding) if isinstance(text, str) else text, nl=False)
    except BrokenPipeError:
        raise  # whoever read it has read enough: click ends quietly
    except OSError as error:
        raise StartError(f"standard output cannot be written: {error.strerror}") from error


def has_letters(text: str) -> bool:
    """Whether standard output can show every one of them."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def is_screen() -> bool:
    """Whether it understands more than letters: `dumb` is how a terminal, or whoever keeps what it prints, says that it
    does not; one that says nothing is taken to be that."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def is_interactive() -> bool:
    """A screen, and somebody at its keys."""
    return sys.stdin.isatty() and is_screen()


def wants_colour() -> bool:
    return is_screen() and not os.environ.get("NO_COLOR")


@contextmanager
def quiet_logs(debug: bool = False) -> Iterator[None]:
    """What would be logged, the command says in its own words; a line of log would break a screen. `debug` has both."""
    before = logging.root.manager.disable
    if debug:
        configure_logging("text", debug)
    else:
        logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
