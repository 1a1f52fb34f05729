"""This module puts spans on a real terminal, coloured where that is wanted. It is the one place that knows rich, which
is slow to import."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console, ConsoleDimensions, Group
from rich.live import Live
from rich.text import Text

from podgpu.top.table import Printed

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


class Screen:
    def __init__(self, file: TextIO, colour: bool) -> None:
        self._colour = colour
        self._console = Console(file=file, force_terminal=True, no_color=not colour, highlight=False, markup=False)
        self._live: Live | None = None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """The alternate screen without a cursor; the other one is back, as it was, however this ends."""
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

    def show(self, printed: Iterable[Printed], size: tuple[int, int]) -> None:
        self._console.size = ConsoleDimensions(*size)
        if self._live is not None:
            self._live.update(Group(*(self._text(line) for line in printed)), refresh=True)

    def write(self, printed: Iterable[Printed], size: tuple[int, int]) -> None:
        """Onto the screen as it is."""
        self._console.size = ConsoleDimensions(*size)
        for line in printed:
            self._console.print(self._text(line))

    def _text(self, line: Printed) -> Text:
        text = Text(no_wrap=True, overflow="crop")
        for part, style in line:
            text.append(part, _style(style) if self._colour else "")
        return text


def _style(names: str) -> str:
    """Of several names all count: `cursor bad` is red in reverse."""
    return " ".join(filter(None, (_STYLES.get(name, "") for name in names.split())))
