"""This module runs the live table: it waits for keys, signals and news, and draws, in the main thread until it is told
to end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Literal, TextIO

from podgpu.errors import StartError
from podgpu.top.cells import Glyphs
from podgpu.top.controls import Controls
from podgpu.top.feed import DetailsFeed, Feed, Seen
from podgpu.top.frame import Frame, Screenful, frame_of, live_table
from podgpu.top.lines import Line
from podgpu.top.screen import Screen
from podgpu.top.table import Table
from podgpu.top.terminal import Events, Happened, single_keys, stop_here

_REDRAW_SECONDS = 1.0  # ages grow also when nothing happens
_SIGNALLED = 128
End = int | Literal["stopped"]


def show_live(
    feed: Feed, controls: Controls, name: str, colour: bool, glyphs: Glyphs, keyboard: int, output: TextIO
) -> int:
    """The exit code: 0, or 128 and the number of the signal that ended it. Raises StartError."""
    view = _LiveView(feed, controls, name, glyphs, Screen(output, colour), output.fileno())
    with Events(keyboard) as events:
        feed.start(events.notify)
        while True:
            with single_keys(keyboard), view.screen.whole():
                end = view.run(events)
            if end != "stopped":
                return end
            stop_here()


class _LiveView:
    def __init__(
        self,
        feed: Feed,
        controls: Controls,
        name: str,
        glyphs: Glyphs,
        screen: Screen,
        output: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._feed = feed
        self._controls = controls
        self._name = name
        self._glyphs = glyphs
        self.screen = screen
        self._output = output
        self._clock = clock
        self._lines: tuple[Line, ...] = ()
        self._made_of: tuple[object, ...] = ()
        self._table: Table | None = None
        """Kept: keys that move the cursor make no new one."""

    def run(self, events: Events) -> End:
        details = DetailsFeed(events.notify)
        while True:
            frame = self._draw(details)
            self._controls = frame.controls
            happened = events.wait(_REDRAW_SECONDS)
            for key in happened.keys:
                self._controls = self._controls.press(key, frame.seat)
                frame = self._frame(details, os.get_terminal_size(self._output))
                self._controls = frame.controls
            if (end := self._end(happened)) is not None:
                return end

    def _end(self, happened: Happened) -> End | None:
        error = self._feed.seen.error
        if isinstance(error, StartError):
            raise error
        if happened.ended_by:
            return _SIGNALLED + happened.ended_by
        if happened.stopped:
            return "stopped"
        return 0 if self._controls.ended or happened.closed else None

    def _draw(self, details: DetailsFeed) -> Frame:
        size = os.get_terminal_size(self._output)
        frame = self._frame(details, size)
        self.screen.show(frame.printed, size)
        return frame

    def _frame(self, details: DetailsFeed, size: os.terminal_size) -> Frame:
        seen = self._feed.seen
        screenful = Screenful(seen, self._made(seen, size.columns), self._name, self._clock(), size, self._glyphs)
        return frame_of(screenful, self._controls, lambda uuid: details.look_at(uuid, self._feed.api))

    def _made(self, seen: Seen, width: int) -> Table:
        controls = self._controls
        made_of = (controls.order, controls.wanted, width)
        if self._table is None or self._lines is not seen.lines or self._made_of != made_of:
            self._lines, self._made_of = seen.lines, made_of
            self._table = live_table(seen, controls, width, self._glyphs)
        return self._table.watching(seen.watched)
