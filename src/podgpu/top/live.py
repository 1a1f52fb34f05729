"""The live table: waits for keys, signals and news, and draws. Runs in the main thread until it is told to end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Literal, TextIO

from podgpu.errors import StartError
from podgpu.top.cells import Glyphs
from podgpu.top.controls import Controls
from podgpu.top.feed import Feed
from podgpu.top.frame import Frame, frame_of
from podgpu.top.screen import Screen
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

    def run(self, events: Events) -> End:
        while True:
            frame = self._draw()
            happened = events.wait(_REDRAW_SECONDS)
            for key in happened.keys:
                self._controls = self._controls.press(key, frame.lines, frame.room)
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

    def _draw(self) -> Frame:
        size = os.get_terminal_size(self._output)
        frame = self._frame(size)
        within = self._controls.within(frame.lines, frame.room)
        if within != self._controls:  # lines went away, or the terminal grew
            self._controls = within
            frame = self._frame(size)
        self.screen.show(frame.printed, size)
        return frame

    def _frame(self, size: os.terminal_size) -> Frame:
        return frame_of(self._feed.seen, self._controls, self._name, self._clock(), size, self._glyphs)
