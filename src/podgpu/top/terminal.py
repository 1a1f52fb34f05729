"""Terminal input: decodes keys, turns signals into events, and sets and restores terminal modes."""

from __future__ import annotations

import codecs
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

_SEQUENCE = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|O[A-Za-z])")
_INCOMPLETE = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*|O)?")
_MAX_SEQUENCE = 32
_SEQUENCES = {
    **dict.fromkeys(("\x1b[A", "\x1bOA"), "up"),
    **dict.fromkeys(("\x1b[B", "\x1bOB"), "down"),
    **dict.fromkeys(("\x1b[H", "\x1bOH", "\x1b[1~", "\x1b[7~"), "home"),
    **dict.fromkeys(("\x1b[F", "\x1bOF", "\x1b[4~", "\x1b[8~"), "end"),
    "\x1b[5~": "page_up",
    "\x1b[6~": "page_down",
}
_CHARACTERS = {"\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace"}


class KeyReader:
    """Decodes bytes into key names. Buffers incomplete characters and escape sequences."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    @property
    def is_incomplete(self) -> bool:
        """True after an Escape, which may start a sequence. Call `finish` if no more bytes arrive soon."""
        return bool(self._rest)

    def decode(self, data: bytes) -> list[str]:
        return self._keys(self._rest + self._decoder.decode(data))

    def finish(self) -> list[str]:
        """Reports buffered bytes as the Escape key."""
        rest, self._rest = self._rest, ""
        return ["escape"] if rest else []

    def _keys(self, text: str) -> list[str]:
        keys: list[str] = []
        at = 0
        self._rest = ""
        while at < len(text):
            if text[at] != "\x1b":
                keys.append(_CHARACTERS.get(text[at], text[at]))
                at += 1
            elif (sequence := _SEQUENCE.match(text, at)) is not None:
                keys.append(_SEQUENCES.get(sequence[0], "unknown"))
                at = sequence.end()
            elif _INCOMPLETE.fullmatch(text, at) and len(text) - at <= _MAX_SEQUENCE:
                self._rest = text[at:]
                break
            else:
                keys.append("escape")
                at += 1
        return keys


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HANDLED = (*_ENDING, signal.SIGTSTP, signal.SIGWINCH)
_ESCAPE_SECONDS = 0.05  # sufficient, because the bytes of a sequence arrive together


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
        self._keys = KeyReader()

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
        if self._keyboard in ready:
            return self._read_keys()
        return Events()

    def _ready(self, seconds: float) -> list[int]:
        return select.select([self._keyboard, self._receiver], [], [], seconds)[0]

    def _read_keys(self) -> Events:
        data = self._read_keyboard()
        if not data:
            return Events(closed=True)
        keys = self._keys.decode(data)
        while self._keys.is_incomplete:
            more = self._read_keyboard() if self._keyboard in self._ready(_ESCAPE_SECONDS) else b""
            keys += self._keys.decode(more) if more else self._keys.finish()
        return Events(keys)

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
