"""Runs the live table: draws with rich, and waits for keys, signals and new readings."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, TextIO

from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live
from rich.text import Text

from podgpu.errors import StartError
from podgpu.top.feed import Feed, Seen
from podgpu.top.lines import Line, arrange
from podgpu.top.screen import Controls, Frame, Scene, draw
from podgpu.top.table import Spans, Table
from podgpu.top.terminal import EventLoop, Events, read_single_keys, stop_process

_REDRAW_SECONDS = 1.0  # updates the displayed ages even if there are no events
_EXIT_BY_SIGNAL = 128
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
End = int | Literal["stopped"]


class Painter:
    """Writes styled lines to a terminal."""

    def __init__(self, file: TextIO, colour: bool) -> None:
        self._console = Console(file=file, force_terminal=True, no_color=not colour, highlight=False, markup=False)
        self._live: Live | None = None

    @contextmanager
    def use_alternate_screen(self) -> Iterator[None]:
        live = Live(
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        with live:
            self._live = live
            yield
        self._live = None

    def show(self, lines: Iterable[Spans], size: tuple[int, int]) -> None:
        self._console.size = ConsoleDimensions(*size)
        if self._live is not None:
            self._live.update(Group(*(self._to_text(line) for line in lines)), refresh=True)

    def print(self, lines: Iterable[Spans], size: tuple[int, int]) -> None:
        self._console.size = ConsoleDimensions(*size)
        for line in lines:
            self._console.print(self._to_text(line))

    def _to_text(self, line: Spans) -> Text:
        text = Text(no_wrap=True, overflow="crop")
        for part, names in line:
            text.append(part, " ".join(_STYLES.get(name, "") for name in names.split()))
        return text


def show_live(feed: Feed, controls: Controls, colour: bool, keyboard: int, output: TextIO) -> int:
    """Shows the table until the user quits. Raises StartError.

    Returns the exit code: 0, or 128 plus the number of the signal that ended the process.
    """
    painter = Painter(output, colour)
    with EventLoop(keyboard) as events:
        session = _Session(feed, controls, painter, output.fileno(), events)
        feed.start(events.notify)
        while True:
            with read_single_keys(keyboard), painter.use_alternate_screen():
                end = session.run()
            if end != "stopped":
                return end
            stop_process()


class _Session:
    def __init__(self, feed: Feed, controls: Controls, painter: Painter, output: int, events: EventLoop) -> None:
        self._feed = feed
        self._controls = controls
        self._painter = painter
        self._output = output
        self._events = events
        self._lines: tuple[Line, ...] = ()
        self._made_for: tuple[object, ...] = ()
        self._table: Table | None = None  # cached, because moving the cursor does not change it

    def run(self) -> End:
        while True:
            size = os.get_terminal_size(self._output)
            frame = self._draw(size)
            self._painter.show(frame.lines, size)
            happened = self._events.wait(_REDRAW_SECONDS)
            for key in happened.keys:
                self._controls = self._controls.press(key, frame.viewport)
                frame = self._draw(size)
            if (end := self._end(happened)) is not None:
                return end

    def _end(self, events: Events) -> End | None:
        seen = self._feed.seen
        if seen is not None and isinstance(seen.error, StartError):
            raise seen.error
        if events.ended_by:
            return _EXIT_BY_SIGNAL + events.ended_by
        if events.stopped:
            return "stopped"
        return 0 if self._controls.ended or events.closed else None

    def _draw(self, size: os.terminal_size) -> Frame:
        seen = self._feed.seen or self._feed.read()
        table = self._make_table(seen, size.columns)
        frame = draw(Scene(seen, table, self._feed.name, time.monotonic(), size), self._controls)
        self._feed.select(frame.selected)
        self._controls = frame.controls
        return frame

    def _make_table(self, seen: Seen, width: int) -> Table:
        order, wanted = self._controls.order, self._controls.wanted
        made_for = (order, wanted, width)
        if self._table is None or self._lines is not seen.lines or self._made_for != made_for:
            self._lines, self._made_for = seen.lines, made_for
            self._table = Table(arrange(seen.lines, order, wanted), order, width, seen.sparklines)
        self._table.sparklines = seen.sparklines
        return self._table
