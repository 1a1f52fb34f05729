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
from podgpu.top.feed import Feed
from podgpu.top.screen import Screen
from podgpu.top.table import Spans
from podgpu.top.terminal import EventLoop, read_single_keys, stop_process

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


def show_live(feed: Feed, screen: Screen, colour: bool, keyboard: int, output: TextIO) -> int:
    """Shows the table until the user quits. Raises StartError if retrying cannot help.

    Returns the exit code: 0, or 128 plus the number of the signal that ended the process.
    """
    painter = Painter(output, colour)
    with EventLoop(keyboard) as events:
        feed.start(events.notify)
        while True:
            with read_single_keys(keyboard), painter.use_alternate_screen():
                end = _run(feed, screen, painter, output.fileno(), events)
            if end != "stopped":
                return end
            stop_process()


def _run(feed: Feed, screen: Screen, painter: Painter, output: int, events: EventLoop) -> End:
    while True:
        seen = feed.seen or feed.read()
        if isinstance(seen.error, StartError):
            raise seen.error
        size = os.get_terminal_size(output)
        painter.show(screen.draw(seen, size, time.monotonic()), size)
        feed.select(screen.detailed_uuid)
        happened = events.wait(_REDRAW_SECONDS)
        for key in happened.keys:
            screen.press(key)
            screen.draw(seen, size, time.monotonic())  # determines where the next key can move the cursor
        if happened.ended_by:
            return _EXIT_BY_SIGNAL + happened.ended_by
        if happened.stopped:
            return "stopped"
        if screen.ended or happened.closed:
            return 0
