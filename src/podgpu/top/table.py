"""Lines as a table of a given width: cells with names of styles, so that plain and coloured output are one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from podgpu.top import cells
from podgpu.top.cells import Glyphs, fit, fit_start, printable, width_of
from podgpu.top.lines import Line, Order, flatten

Span = tuple[str, str]
"""Text, and the name of its style ("" is plain)."""
Printed = list[Span]

_BAR, _LEAST_BAR, _MOST_BAR = 10, 4, 20
_LEAST_NODE, _LEAST_MODEL, _LEAST_HOLDER = 8, 7, 16
_HOT, _VERY_HOT = 80.0, 90.0
_IDLE, _LONG_IDLE = 60.0, 600.0


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    text: Callable[[Line, Glyphs], str]
    least: int
    right: bool = True
    order: Order | None = None
    style: Callable[[Line], str] = lambda _line: ""


def _temperature_style(line: Line) -> str:
    degrees = line.temperature or 0.0
    return "bad" if degrees >= _VERY_HOT else "warn" if degrees >= _HOT else ""


def _idle_style(line: Line) -> str:
    seconds = line.idle.seconds if line.idle else 0.0
    return "bad" if seconds >= _LONG_IDLE else "warn" if seconds >= _IDLE else ""


def _model(line: Line, _glyphs: Glyphs) -> str:
    return cells.short_model(line.model) if line.kind in ("gpu", "instance") else ""


def _holder(line: Line, _glyphs: Glyphs) -> str:
    return line.remark if line.kind == "process" else line.holder or line.remark


def _watts(line: Line, glyphs: Glyphs) -> str:
    return "" if line.kind == "process" else cells.watts(line.power, glyphs)


def _degrees(line: Line, glyphs: Glyphs) -> str:
    """Only a whole GPU has a temperature."""
    return cells.degrees(line.temperature, glyphs) if line.kind == "gpu" else ""


def _processes(line: Line, glyphs: Glyphs) -> str:
    return "" if line.kind == "process" else cells.number(line.processes, glyphs)


def _idle(line: Line, glyphs: Glyphs) -> str:
    return cells.idle(line.idle, glyphs) if line.holder and line.kind != "process" else ""


NODE = Column("NODE", lambda line, _glyphs: line.node if line.kind == "gpu" else "", 4, right=False)
GPU = Column("GPU", lambda line, _glyphs: line.gpu, 3, right=False, order="gpu")
MODEL = Column("MODEL", _model, _LEAST_MODEL, right=False, style=lambda _line: "dim")
HOLDER = Column("HOLDER", _holder, 6, right=False)
USE = Column("UTIL", lambda line, glyphs: cells.percent(line.utilization, glyphs), 4, order="utilisation")
MEMORY = Column("MEM GiB", cells.memory, 9, order="memory")
POWER = Column("POWER", _watts, 5, order="power")
TEMPERATURE = Column("TEMP", _degrees, 4, style=_temperature_style)
PROCESSES = Column("PROC", _processes, 4)
IDLE = Column("IDLE", _idle, 6, order="idle", style=_idle_style)
COLUMNS = (NODE, GPU, MODEL, HOLDER, USE, MEMORY, POWER, TEMPERATURE, PROCESSES, IDLE)
"""That of the node is there where lines are of several."""
_CUT_AT_THE_START = (NODE, MODEL)
_LEFT_OUT_FIRST = (MODEL, TEMPERATURE, PROCESSES, POWER, MEMORY, IDLE)


@dataclass(frozen=True, slots=True)
class Table:
    header: Printed
    body: list[Printed]


def table_of(lines: Iterable[Line], order: Order, glyphs: Glyphs, width: int | None = None) -> Table:
    """`width` None: as wide as it takes."""
    flat = list(flatten(lines))
    texts = [[_cell(column, depth, line, glyphs) for column in COLUMNS] for depth, line in flat]
    layout = _lay_out(texts, width, left_out=() if len({line.node for _, line in flat}) > 1 else (NODE,))
    header = _header(layout, order, glyphs)
    return Table(header, [_body(line, row, layout, glyphs) for (_, line), row in zip(flat, texts, strict=True)])


def as_text(printed: Printed) -> str:
    return "".join(text for text, _ in printed).rstrip()


def _cell(column: Column, depth: int, line: Line, glyphs: Glyphs) -> str:
    text = printable(column.text(line, glyphs))
    return "  " * depth + text if column is HOLDER else text


# Widths


@dataclass(slots=True)
class _Layout:
    widths: dict[str, int]
    """Column's title -> its width; a column that is left out is not here."""
    bar: int = _BAR

    @property
    def total(self) -> int:
        return sum(self.widths.values()) + len(self.widths) - 1 + (self.bar + 1 if self.bar else 0)


def _lay_out(texts: Sequence[Sequence[str]], width: int | None, left_out: Sequence[Column]) -> _Layout:
    columns = ((i, column) for i, column in enumerate(COLUMNS) if column not in left_out)
    natural = {c.title: max([c.least, len(c.title), *(width_of(row[i]) for row in texts)]) for i, c in columns}
    layout = _Layout(dict(natural))
    if width is None:
        return layout
    _narrow(layout, width)
    # A column that was left out may have left more room than was missing.
    layout.widths[HOLDER.title] += max(
        0, min(width - layout.total, natural[HOLDER.title] - layout.widths[HOLDER.title])
    )
    layout.bar += max(0, min(width - layout.total, _MOST_BAR - layout.bar)) if layout.bar else 0
    return layout


def _narrow(layout: _Layout, width: int) -> None:
    """Bars give way first, then the model's and the holder's name, then whole columns."""
    layout.bar -= max(0, min(layout.total - width, _BAR - _LEAST_BAR))
    _shrink(layout, MODEL, 12, width)
    _shrink(layout, NODE, 16, width)
    _shrink(layout, HOLDER, 26, width)
    _shrink(layout, MODEL, _LEAST_MODEL, width)
    _shrink(layout, NODE, _LEAST_NODE, width)
    _shrink(layout, HOLDER, _LEAST_HOLDER, width)
    for column in _LEFT_OUT_FIRST:
        if layout.total > width:
            del layout.widths[column.title]
    if layout.total > width:
        layout.bar = 0
    _shrink(layout, HOLDER, 1, width)


def _shrink(layout: _Layout, column: Column, least: int, width: int) -> None:
    if column.title not in layout.widths:
        return
    now = layout.widths[column.title]
    layout.widths[column.title] = max(min(now, least), now - max(0, layout.total - width))


# Printing


def _header(layout: _Layout, order: Order, glyphs: Glyphs) -> Printed:
    printed: Printed = []
    for column in COLUMNS:
        if column.title in layout.widths:
            width = layout.widths[column.title] + (layout.bar + 1 if column is USE and layout.bar else 0)
            right = column.right and column is not USE
            printed.append((fit(column.title, width, glyphs, right), "sorted" if column.order == order else "header"))
            printed.append((" ", "header"))
    return printed[:-1]


def _body(line: Line, row: Sequence[str], layout: _Layout, glyphs: Glyphs) -> Printed:
    base = "dim" if line.kind == "process" else ""
    printed: Printed = []
    for column, text in zip(COLUMNS, row, strict=True):
        if column.title not in layout.widths:
            continue
        if column is USE and layout.bar:
            printed += [(cells.bar(line.utilization, layout.bar, glyphs), "bar"), (" ", base)]
        style = "dim" if text == glyphs.absent else column.style(line) or base
        width = layout.widths[column.title]
        fitted = (
            fit_start(text, width, glyphs) if column in _CUT_AT_THE_START else fit(text, width, glyphs, column.right)
        )
        printed += [(fitted, style), (" ", base)]
    return printed[:-1]
