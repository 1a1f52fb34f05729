"""This module says what the keys have set: order, filter, the row the cursor is on, details. A key in, new controls
out. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from podgpu.top.arrange import Order
from podgpu.top.lines import Row

ORDERS: tuple[Order, ...] = get_args(Order)
Pane = Literal["closed", "half", "whole"]
_SORT_KEYS: Mapping[str, Order] = {"g": "gpu", "u": "utilisation", "m": "memory", "p": "power", "i": "idle"}
_STEPS = {"up": -1, "k": -1, "down": 1, "j": 1}
_PAGES = {"page_up": -1, "page_down": 1, " ": 1}
_NEXT_PANE: Mapping[Pane, Pane] = {"closed": "half", "half": "whole", "whole": "closed"}
_LONGEST_FILTER = 200

HELP = (
    "q          quit",
    "↑ ↓  j k   move to another line; PgUp, PgDn by a page; Home, End",
    "Enter      details of the line's GPU; again: all of them; Esc closes them",
    "u          sort by utilisation",
    "m          sort by memory in use",
    "p          sort by power",
    "i          sort by idle time: held, and nothing run",
    "g          sort by GPU",
    "/          only lines with a text in holder, node or model; broken finds those",
    "Esc        close the details, then clear the filter",
    "h          this help",
    "",
    "Broken GPUs come first, whatever the order.",
    "IDLE       busy: it runs something; 5m02s: it has run nothing for so long",
    "           >5m02s: at least so long, it had stopped before top began to look",
    "–          not known, which is not zero",
)


@dataclass(frozen=True, slots=True)
class Seat:
    """What is on the screen when a key is pressed."""

    rows: Sequence[Row]
    """Of all lines, seen or not."""
    room: int
    """For so many of them."""
    details: int = 0
    """Lines of the details, where they have the whole screen."""


@dataclass(frozen=True, slots=True)
class Controls:
    order: Order = "gpu"
    wanted: str = ""
    """The filter."""
    cursor: int = 0
    """Number of the line it is on."""
    chosen: Row | None = None
    """What that line is about, once somebody moved there: it is followed when lines come and go."""
    scroll: int = 0
    pane: Pane = "closed"
    pane_scroll: int = 0
    typing: bool = False
    """Keys go to the filter."""
    helping: bool = False
    ended: bool = False

    def within(self, seat: Seat) -> Controls:
        """On a line that is there and in sight, scrolled no further than there is something to see."""
        cursor = self._followed(seat.rows)
        lowest, highest = max(0, cursor - seat.room + 1), max(0, min(cursor, len(seat.rows) - seat.room))
        scroll = min(max(self.scroll, lowest), max(lowest, highest))
        pane_scroll = max(0, min(self.pane_scroll, seat.details - seat.room))
        return replace(self, cursor=cursor, scroll=scroll, pane_scroll=pane_scroll)

    def _followed(self, rows: Sequence[Row]) -> int:
        last = len(rows) - 1
        if self.chosen is not None and not (0 <= self.cursor <= last and rows[self.cursor] == self.chosen):
            place = next((at for at, row in enumerate(rows) if row == self.chosen), None)
            if place is not None:
                return place
        return max(0, min(self.cursor, last))

    def press(self, key: str, seat: Seat) -> Controls:
        after = self._type(key) if self.typing else self._command(key, seat)
        return after.within(seat)

    def _type(self, key: str) -> Controls:
        if key == "escape":
            return replace(self._at_the_top(), wanted="", typing=False)
        if key == "enter":
            return replace(self, typing=False)
        if key == "backspace":
            return replace(self._at_the_top(), wanted=self.wanted[:-1])
        if len(key) == 1 and key.isprintable() and len(self.wanted) < _LONGEST_FILTER:
            return replace(self._at_the_top(), wanted=self.wanted + key)
        return self

    def _command(self, key: str, seat: Seat) -> Controls:
        if self.helping:
            return replace(self, helping=False, ended=key == "q")
        if key == "escape" and self.pane != "closed":
            return replace(self, pane="closed", pane_scroll=0)
        if key == "escape":
            return replace(self._at_the_top(), wanted="")
        if key == "enter":
            return replace(self, pane=_NEXT_PANE[self.pane], pane_scroll=0)
        if key in _SORT_KEYS:
            return replace(self._at_the_top(), order=_SORT_KEYS[key])
        if key in _STEPS or key in _PAGES or key in ("home", "end"):
            return self._moved(key, seat)
        return replace(self, ended=key in ("q", "Q"), typing=key == "/", helping=key in ("h", "?"))

    def _at_the_top(self) -> Controls:
        return replace(self, cursor=0, chosen=None, scroll=0)

    def _moved(self, key: str, seat: Seat) -> Controls:
        if self.pane == "whole":
            return replace(self, pane_scroll=_target(key, self.pane_scroll, seat.room, seat.details))
        target = _target(key, self.cursor, seat.room, len(seat.rows))
        cursor = max(0, min(target, len(seat.rows) - 1))
        return replace(self, cursor=cursor, chosen=seat.rows[cursor] if seat.rows else None)


def _target(key: str, now: int, room: int, count: int) -> int:
    if key in _STEPS:
        return now + _STEPS[key]
    if key in _PAGES:
        return now + _PAGES[key] * room
    return 0 if key == "home" else count
