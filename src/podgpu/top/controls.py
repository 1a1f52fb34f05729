"""What the keys have set: order, filter, place in the list. A key in, new controls out. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import get_args

from podgpu.top.lines import Order

ORDERS: tuple[Order, ...] = get_args(Order)
_SORT_KEYS: Mapping[str, Order] = {"g": "gpu", "u": "utilisation", "m": "memory", "p": "power", "i": "idle"}
_STEPS = {"up": -1, "k": -1, "down": 1, "j": 1}
_PAGES = {"page_up": -1, "page_down": 1, " ": 1}
_LONGEST_FILTER = 200

HELP = (
    "q          quit",
    "↑ ↓  j k   scroll by a line; PgUp, PgDn by a page; Home, End",
    "u          sort by utilisation",
    "m          sort by memory in use",
    "p          sort by power",
    "i          sort by idle time: held, and nothing run",
    "g          sort by GPU",
    "/          show only lines with a text in holder, node or model; Enter keeps it",
    "Esc        clear the filter",
    "h          this help",
    "",
    "IDLE       busy: it runs something; 5m02s: it has run nothing for so long",
    "           >5m02s: at least so long, it had stopped before top began to look",
    "–          cannot be told, which is not zero",
)


@dataclass(frozen=True, slots=True)
class Controls:
    order: Order = "gpu"
    wanted: str = ""
    """The filter."""
    scroll: int = 0
    typing: bool = False
    """Keys go to the filter."""
    helping: bool = False
    ended: bool = False

    def within(self, lines: int, room: int) -> Controls:
        """Scrolled no further than there is something to see."""
        return replace(self, scroll=max(0, min(self.scroll, lines - room)))

    def press(self, key: str, lines: int, room: int) -> Controls:
        """`lines` there are, `room` for so many."""
        after = self._type(key) if self.typing else self._command(key, lines, room)
        return after.within(lines, room)

    def _type(self, key: str) -> Controls:
        if key == "escape":
            return replace(self, wanted="", typing=False)
        if key == "enter":
            return replace(self, typing=False)
        if key == "backspace":
            return replace(self, wanted=self.wanted[:-1], scroll=0)
        if len(key) == 1 and key.isprintable() and len(self.wanted) < _LONGEST_FILTER:
            return replace(self, wanted=self.wanted + key, scroll=0)
        return self

    def _command(self, key: str, lines: int, room: int) -> Controls:
        if self.helping:
            return replace(self, helping=False, ended=key == "q")
        if key == "escape":
            return replace(self, wanted="", scroll=0)
        if key in _SORT_KEYS:
            return replace(self, order=_SORT_KEYS[key], scroll=0)
        moved = self._moved(key, lines, room)
        if moved is not None:
            return replace(self, scroll=moved)
        return replace(self, ended=key in ("q", "Q"), typing=key == "/", helping=key in ("h", "?"))

    def _moved(self, key: str, lines: int, room: int) -> int | None:
        if key in _STEPS:
            return self.scroll + _STEPS[key]
        if key in _PAGES:
            return self.scroll + _PAGES[key] * room
        return {"home": 0, "end": lines}.get(key)
