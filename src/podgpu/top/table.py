"""This module lays lines out as a table of a given width: cells with names of styles, so that plain and coloured output
are one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from podgpu.top import cells
from podgpu.top.arrange import Order
from podgpu.top.cells import Glyphs, fit, fit_holder, fit_start, holder_texts, printable, width_of
from podgpu.top.columns import COLUMNS, HISTORY, HOLDER, MODEL, NODE, USE, Column
from podgpu.top.layout import HolderWidths, Layout, lay_out
from podgpu.top.lines import Line, Row, flatten

Span = tuple[str, str]
"""Text, and the name of its style ("" is plain)."""
Printed = list[Span]

_CUT_AT_THE_START = (MODEL,)
_INDENT = "  "
_LEAST_REMARK = 12
"""Of what stands in a pod's place."""


@dataclass(frozen=True, slots=True)
class Watched:
    """What a live table shows beside what a single reading has."""

    points: Mapping[Row, bytes]
    """Utilisation of late, by row."""
    span: float = 60.0
    """Seconds that they stand for."""


@dataclass(frozen=True, slots=True)
class Table:
    header: Printed
    lines: Sequence[tuple[int, Line]]
    """Depth and line of each row."""
    print_row: Callable[[int], Printed]
    about: Sequence[Row]
    """What each row is about."""
    watching: Callable[[Watched | None], Table]
    """The same lines with other sparklines, for little."""

    @property
    def body(self) -> list[Printed]:
        return self.rows(0, len(self.lines))

    def rows(self, start: int, end: int) -> list[Printed]:
        """Only these are printed: of thousands a screen shows fifty."""
        return [self.print_row(at) for at in range(max(0, start), min(end, len(self.lines)))]


def table_of(
    lines: Iterable[Line], order: Order, glyphs: Glyphs, width: int | None = None, watched: Watched | None = None
) -> Table:
    """`width` None: as wide as it takes."""
    flat = list(flatten(lines))
    texts = [[_cell(column, line, glyphs) for column in COLUMNS] for _, line in flat]
    left_out = [] if len({line.node for _, line in flat}) > 1 else [NODE]
    layout = lay_out(texts, _holder_widths(flat), width, left_out if watched else [*left_out, HISTORY])
    about = [line.row for _, line in flat]

    def watching(watched: Watched | None) -> Table:
        print_row = _Row(flat, texts, layout, glyphs, width, watched).printed
        return Table(_header(layout, order, glyphs, watched), flat, print_row, about, watching)

    return watching(watched)


def as_text(printed: Printed) -> str:
    return "".join(text for text, _ in printed).rstrip()


def _cell(column: Column, line: Line, glyphs: Glyphs) -> str:
    return "" if line.kind == "condition" else printable(column.text(line, glyphs))


def _holder_widths(flat: Iterable[tuple[int, Line]]) -> HolderWidths:
    widths = [_widths_of(depth, line) for depth, line in flat if line.kind != "condition"]
    return HolderWidths(*(max(column) for column in zip((0, 0, 0), *widths, strict=True)))


def _widths_of(depth: int, line: Line) -> tuple[int, int, int]:
    texts = (line.remark,) if line.kind == "process" else _holder_texts(line)
    whole, *shorter = (depth * len(_INDENT) + width_of(printable(text)) for text in texts)
    is_pod = line.who is not None and line.kind != "process"
    return whole, shorter[0] if shorter else whole, (shorter or [whole])[-1] if is_pod else min(whole, _LEAST_REMARK)


def _holder_texts(line: Line) -> tuple[str, ...]:
    return (line.holder or line.remark,) if line.who is None else holder_texts(line.who)


def _header(layout: Layout, order: Order, glyphs: Glyphs, watched: Watched | None) -> Printed:
    printed: Printed = []
    for column in COLUMNS:
        if layout.has(column):
            width = layout.widths[column.title] + (layout.bar + 1 if column is USE and layout.bar else 0)
            right = column.right and not (column is USE and layout.bar)
            title = f"LAST {cells.span(watched.span)}" if column is HISTORY and watched else column.title
            printed.append((fit(title, width, glyphs, right), "sorted" if column.order == order else "header"))
            printed.append((" ", "header"))
    return printed[:-1]


class _Row:
    def __init__(
        self,
        flat: Sequence[tuple[int, Line]],
        texts: Sequence[Sequence[str]],
        layout: Layout,
        glyphs: Glyphs,
        width: int | None,
        watched: Watched | None,
    ) -> None:
        self._flat = flat
        self._texts = texts
        self._layout = layout
        self._glyphs = glyphs
        self._width = width
        self._watched = watched

    def printed(self, at: int) -> Printed:
        depth, line = self._flat[at]
        if line.kind == "condition":
            return [self._condition(depth, line)]
        base = "dim" if line.kind == "process" else ""
        spans: Printed = []
        for column, text in zip(COLUMNS, self._texts[at], strict=True):
            if not self._layout.has(column):
                continue
            if column is USE and self._layout.bar:
                spans += [(cells.bar(line.utilization, self._layout.bar, self._glyphs), "bar"), (" ", base)]
            style = "dim" if text == self._glyphs.absent else column.style(line) or base
            spans += [(self._fitted(column, depth, line, text), style), (" ", base)]
        return spans[:-1]

    def _fitted(self, column: Column, depth: int, line: Line, text: str) -> str:
        width = self._layout.widths[column.title]
        if column is HISTORY:
            points = self._watched.points.get(line.row, b"") if self._watched else b""
            return cells.spark(points, width, self._glyphs)
        if column is HOLDER:
            indent = (_INDENT * depth)[:width]
            if line.who is None or line.kind == "process":
                return fit(indent + text, width, self._glyphs)
            return indent + fit_holder(line.who, width - len(indent), self._glyphs)
        if column in _CUT_AT_THE_START:
            return fit_start(text, width, self._glyphs)
        return fit(text, width, self._glyphs, column.right)

    def _condition(self, depth: int, line: Line) -> Span:
        """In words, across all columns."""
        text = _INDENT * depth + "! " + printable(cells.condition(line.conditions[0], line.age))
        return text if self._width is None else fit_start(text, self._width, self._glyphs), line.severity
