"""Runs the live table: draws it with rich, and reads keys and signals."""

from __future__ import annotations

import io
import os
import re
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from podgpu.errors import StartError
from podgpu.top.feed import Feed
from podgpu.top.screen import Screen
from podgpu.top.table import Spans

_POLL_SECONDS = 0.1  # how often new readings, signals and the size of the terminal are checked
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_EXIT_BY_SIGNAL = 128
_CTRL_Z = "\x1a"
_STYLES = {
    "title": "bold",
    "header": "reverse",
    "sorted": "reverse bold cyan",
    "bar": "green",
    "dim": "dim",
    "warn": "yellow",
    "bad": "bold red",
    "cursor": "reverse",
}
_PARTIAL_KEY = re.compile(rb"\x1b(\[[0-9;?]*[ -/]*|O)?\Z")
_KEY = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1bO[A-Za-z]|.", re.DOTALL)
_NAMES = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "\x1b[H": "home",
    "\x1bOH": "home",
    "\x1b[1~": "home",
    "\x1b[7~": "home",
    "\x1b[F": "end",
    "\x1bOF": "end",
    "\x1b[4~": "end",
    "\x1b[8~": "end",
    "\x1b[5~": "page_up",
    "\x1b[6~": "page_down",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\x1b": "escape",
}


def open_console() -> Console:
    return Console(file=sys.stdout, highlight=False, markup=False)


def make_text(line: Spans) -> Text:
    text = Text(no_wrap=True, overflow="crop")
    for part, names in line:
        text.append(part, " ".join(_STYLES.get(name, "") for name in names.split()))
    return text


def decode_keys(data: bytes) -> list[str]:
    """Returns characters and names of special keys, such as `page_up`.

    Returns unknown escape sequences unchanged.
    """
    return [_NAMES.get(key, key) for key in _KEY.findall(data.decode(errors="replace"))]


def show_live(feed: Feed, screen: Screen) -> int:
    """Shows the table until the user quits.

    Returns the exit code: 0, or 128 plus the number of the signal. Raises SourceError if the first
    reading fails. Raises StartError if retrying cannot help.
    """
    feed.read()

    # Replaces characters that the terminal's encoding lacks.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")

    signals = []
    for number in _ENDING_SIGNALS:
        signal.signal(number, lambda received, _frame: signals.append(received))

    console = open_console()
    keyboard = sys.stdin.fileno()
    feed.start()
    while True:
        with (
            _read_single_keys(keyboard),
            Live(console=console, screen=True, auto_refresh=False) as live,
        ):
            is_suspended = _show_until_end(feed, screen, live, keyboard, signals)
        if not is_suspended:
            if not signals:
                return 0
            return _EXIT_BY_SIGNAL + signals[0]
        os.kill(os.getpid(), signal.SIGSTOP)  # returns when the shell resumes the process


def _show_until_end(
    feed: Feed, screen: Screen, live: Live, keyboard: int, signals: list[int]
) -> bool:
    """Draws, and handles keys until the user quits or a signal comes.

    Returns True if the user pressed Ctrl-Z.
    """
    drawn: tuple[object, ...] = ()
    keys: list[str] = []
    while not screen.ended and not signals:
        seen = feed.seen or feed.read()
        if isinstance(seen.error, StartError):
            raise seen.error

        size = live.console.size
        now = time.monotonic()
        # What the picture depends on, besides keys. The displayed ages change every second.
        frame = (seen.read_at, seen.error, size, int(now))
        if keys or frame != drawn:
            live.update(Group(*map(make_text, screen.draw(seen, size, now))), refresh=True)
            feed.select(screen.detailed_uuid)
            drawn = frame

        keys = []
        if _has_input(keyboard):
            with suppress(OSError):
                keys = decode_keys(_read_keyboard(keyboard))
            # Empty if the terminal was closed.
            if not keys:
                return False
        for key in keys:
            if key == _CTRL_Z:
                return True
            screen.press(key)
            # A key may change the rows in which the next key moves the cursor.
            screen.lay_out(seen, size, now)
    return False


def _has_input(keyboard: int) -> bool:
    """Waits briefly for a key."""
    readable, _, _ = select.select([keyboard], [], [], _POLL_SECONDS)
    return bool(readable)


def _read_keyboard(keyboard: int) -> bytes:
    """Reads keys, with the remainder of an escape sequence that a slow connection has split."""
    data = os.read(keyboard, 1024)
    while _PARTIAL_KEY.search(data) and _has_input(keyboard):
        more = os.read(keyboard, 1024)
        # Empty if the terminal was closed.
        if not more:
            break
        data += more
    return data


@contextmanager
def _read_single_keys(keyboard: int) -> Iterator[None]:
    """Switches off line buffering and echo.

    Reads Ctrl-Z as a key, to restore the terminal before suspending.
    """
    before = termios.tcgetattr(keyboard)
    mode = termios.tcgetattr(keyboard)  # another copy, whose lists are changed
    mode[tty.LFLAG] &= ~(termios.ECHO | termios.ICANON)
    mode[tty.CC][termios.VSUSP] = b"\0"
    try:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, mode)
        yield
    finally:
        # Discards keys that were not read. Fails if the terminal was closed.
        with suppress(termios.error):
            termios.tcsetattr(keyboard, termios.TCSAFLUSH, before)
