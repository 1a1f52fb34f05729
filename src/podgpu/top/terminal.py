"""This module owns the terminal: keys by their names, without echo, signals as events, and everything put back however
it ends."""

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
_BEGUN = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*|O)?")
_LONGEST_SEQUENCE = 32
_WORDS = {
    **dict.fromkeys(("\x1b[A", "\x1bOA"), "up"),
    **dict.fromkeys(("\x1b[B", "\x1bOB"), "down"),
    **dict.fromkeys(("\x1b[H", "\x1bOH", "\x1b[1~", "\x1b[7~"), "home"),
    **dict.fromkeys(("\x1b[F", "\x1bOF", "\x1b[4~", "\x1b[8~"), "end"),
    "\x1b[5~": "page_up",
    "\x1b[6~": "page_down",
}
_CHARACTERS = {"\r": "enter", "\n": "enter", "\x7f": "backspace", "\x08": "backspace"}


class KeyReader:
    """Keeps what came only in part: of a letter, or of a key's sequence."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    @property
    def undecided(self) -> bool:
        """An Escape has come that may begin a sequence: `settle` if nothing follows soon."""
        return bool(self._rest)

    def take(self, data: bytes) -> list[str]:
        return self._keys(self._rest + self._decoder.decode(data))

    def settle(self) -> list[str]:
        """Nothing followed: it was the key Escape."""
        begun, self._rest = self._rest, ""
        return ["escape"] if begun else []

    def _keys(self, text: str) -> list[str]:
        found: list[str] = []
        at = 0
        self._rest = ""
        while at < len(text):
            if text[at] != "\x1b":
                found.append(_CHARACTERS.get(text[at], text[at]))
                at += 1
            elif (sequence := _SEQUENCE.match(text, at)) is not None:
                found.append(_WORDS.get(sequence[0], "unknown"))
                at = sequence.end()
            elif _BEGUN.fullmatch(text, at) and len(text) - at <= _LONGEST_SEQUENCE:
                self._rest = text[at:]
                break
            else:
                found.append("escape")
                at += 1
        return found


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HEARD = (*_ENDING, signal.SIGTSTP, signal.SIGWINCH)
_ESCAPE_SECONDS = 0.05  # a key's sequence comes at once; a lone Escape is followed by nothing
_NEWS = b"\0"


@dataclass(frozen=True, slots=True)
class Happened:
    """What came of one wait."""

    keys: list[str] = field(default_factory=list)
    ended_by: int = 0
    """Number of the signal, or 0."""
    stopped: bool = False
    """Ctrl-Z."""
    closed: bool = False
    """The terminal is gone."""


class Events:
    """Keys, signals and news from the feed, in one wait. For the main thread; signals are what they were afterwards."""

    def __init__(self, keyboard: int) -> None:
        self._keyboard = keyboard
        self._keys = KeyReader()

    def __enter__(self) -> Events:
        self._receiver, self._sender = os.pipe()
        for end in (self._receiver, self._sender):
            os.set_blocking(end, False)
        self._handlers = {number: signal.signal(number, _do_nothing) for number in _HEARD}
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
        """There is news; any thread may say so, at any time."""
        with contextlib.suppress(OSError):
            os.write(self._sender, _NEWS)

    def wait(self, seconds: float) -> Happened:
        ready = self._ready(seconds)
        if self._receiver in ready:
            signals = os.read(self._receiver, 4096)
            ending = next((number for number in signals if number in _ENDING), 0)
            if ending or signal.SIGTSTP in signals:
                return Happened(ended_by=ending, stopped=not ending)
        if self._keyboard in ready:
            return self._read_keys()
        return Happened()

    def _ready(self, seconds: float) -> list[int]:
        return select.select([self._keyboard, self._receiver], [], [], seconds)[0]

    def _read_keys(self) -> Happened:
        data = self._read_keyboard()
        if not data:
            return Happened(closed=True)
        keys = self._keys.take(data)
        while self._keys.undecided:
            more = self._read_keyboard() if self._keyboard in self._ready(_ESCAPE_SECONDS) else b""
            keys += self._keys.take(more) if more else self._keys.settle()
        return Happened(keys)

    def _read_keyboard(self) -> bytes:
        try:
            return os.read(self._keyboard, 1024)
        except OSError:
            return b""


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    """The number comes through the pipe; a handler must only be there."""


@contextlib.contextmanager
def single_keys(keyboard: int) -> Iterator[None]:
    """Keys come one by one and are not shown. Ctrl-C and Ctrl-Z stay signals."""
    before = termios.tcgetattr(keyboard)
    try:
        tty.setcbreak(keyboard, termios.TCSADRAIN)
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal is gone: nothing to put back
            termios.tcsetattr(keyboard, termios.TCSAFLUSH, before)


def stop_here() -> None:
    """As Ctrl-Z does; returns when the shell continues the job."""
    os.kill(os.getpid(), signal.SIGSTOP)
