"""Bytes of a terminal as names of keys: letters stand for themselves, the others are words. Pure."""

from __future__ import annotations

import codecs
import re

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
