"""Terminal input: decodes keys, turns signals into events, and sets and restores terminal modes."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import termios
import tty
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType

_KEY = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1bO[A-Za-z]|.", re.DOTALL)
_INCOMPLETE = re.compile(rb"\x1b(\[[0-9;?]*|O)?\Z")
_ESCAPE_SECONDS = 0.05  # sufficient, because the bytes of a sequence arrive together
_NAMES = {
    **dict.fromkeys(("\x1b[A", "\x1bOA"), "up"),
    **dict.fromkeys(("\x1b[B", "\x1bOB"), "down"),
    **dict.fromkeys(("\x1b[H", "\x1bOH", "\x1b[1~", "\x1b[7~"), "home"),
    **dict.fromkeys(("\x1b[F", "\x1bOF", "\x1b[4~", "\x1b[8~"), "end"),
    **dict.fromkeys(("\r", "\n"), "enter"),
    **dict.fromkeys(("\x7f", "\x08"), "backspace"),
    "\x1b": "escape",
    "\x1b[5~": "page_up",
    "\x1b[6~": "page_down",
}
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HANDLED = (*_ENDING, signal.SIGTSTP, signal.SIGWINCH)


def decode_keys(data: bytes) -> list[str]:
    """Returns characters and the names of special keys. An unknown escape sequence remains as it is."""
    return [_NAMES.get(key, key) for key in _KEY.findall(data.decode(errors="replace"))]


@dataclass(frozen=True, slots=True)
class Events:
    keys: list[str] = field(default_factory=list)
    ended_by: int = 0  # number of the signal that ends the process, or 0
    stopped: bool = False  # Ctrl-Z was pressed
    closed: bool = False  # the terminal was closed


class EventLoop:
    """Waits for keys, signals and notifications. Use it in the main thread. Restores the signal handlers on exit."""

    def __init__(self, keyboard: int) -> None:
        self._keyboard = keyboard

    def __enter__(self) -> EventLoop:
        self._receiver, self._sender = os.pipe()
        for end in (self._receiver, self._sender):
            os.set_blocking(end, False)
        self._handlers = {number: signal.signal(number, _do_nothing) for number in _HANDLED}
        self._wakeup = signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        sender, self._sender = self._sender, -1
        os.close(sender)
        os.close(self._receiver)

    def notify(self) -> None:
        """Ends the current wait. May be called from any thread at any time."""
        with contextlib.suppress(OSError):
            os.write(self._sender, b"\0")

    def wait(self, seconds: float) -> Events:
        ready = self._ready(seconds)
        if self._receiver in ready:
            signals = os.read(self._receiver, 4096)
            ending = next((number for number in signals if number in _ENDING), 0)
            if ending or signal.SIGTSTP in signals:
                return Events(ended_by=ending, stopped=not ending)
        if self._keyboard not in ready:
            return Events()
        data = self._read_keyboard()
        while _INCOMPLETE.search(data) and self._keyboard in self._ready(_ESCAPE_SECONDS):
            more = self._read_keyboard()
            data = data + more if more else b""
        return Events(decode_keys(data)) if data else Events(closed=True)

    def _ready(self, seconds: float) -> list[int]:
        return select.select([self._keyboard, self._receiver], [], [], seconds)[0]

    def _read_keyboard(self) -> bytes:
        try:
            return os.read(self._keyboard, 1024)
        except OSError:
            return b""


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    """A signal is written to the wake-up pipe only if it has a Python handler."""


@contextlib.contextmanager
def read_single_keys(keyboard: int) -> Iterator[None]:
    """Switches off line buffering and echo. Ctrl-C and Ctrl-Z remain signals."""
    before = termios.tcgetattr(keyboard)
    try:
        tty.setcbreak(keyboard, termios.TCSADRAIN)
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal was closed
            termios.tcsetattr(keyboard, termios.TCSAFLUSH, before)


def stop_process() -> None:
    """Stops this process, as Ctrl-Z does. Returns when the shell resumes it."""
    os.kill(os.getpid(), signal.SIGSTOP)
