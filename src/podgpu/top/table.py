"""Lays out lines as a table of a given width, with styled cells and a line of totals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from podgpu.cluster.parts import Totals
from podgpu.cluster.view import ConditionView
from podgpu.top.feed import Sparklines
from podgpu.top.lines import Kind, Line, Order, Row, flatten
from podgpu.top.text import (
    Glyphs,
    draw_bar,
    draw_sparkline,
    fit,
    fit_holder,
    fit_start,
    format_duration,
    format_gib,
    format_idle,
    format_money,
    format_number,
    format_percent,
    format_span,
    names_of,
    printable,
    shorten_model,
    width_of,
)

Span = tuple[str, str]
"""A text and the name of its style; an empty name means unstyled."""
Spans = list[Span]
_INDENT = "  "


def as_text(spans: Spans) -> str:
    return "".join(text for text, _ in spans).rstrip()


# Columns


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    text: Callable[[Line, Glyphs], str]
    min_width: int
    right: bool = True
    order: Order | None = None
    style: Callable[[Line], str] = lambda _line: ""
    kinds: tuple[Kind, ...] = ("gpu", "instance", "holder", "process")  # kinds of lines that have this column


_MIN_MODEL = 7
_HOT, _VERY_HOT = 80.0, 90.0
_IDLE, _LONG_IDLE = 60.0, 600.0
_SLOTS: tuple[Kind, ...] = ("gpu", "instance")
_HELD: tuple[Kind, ...] = (*_SLOTS, "holder")


def _style_above(value: float | None, warn: float, bad: float) -> str:
    return "" if value is None or value < warn else "warn" if value < bad else "bad"


def _severity_style(line: Line) -> str:
    return line.severity if line.is_slot else ""


def _memory_text(line: Line, glyphs: Glyphs) -> str:
    """Lines below a device have blanks instead of the total, so that the figures are aligned."""
    total = f"/{format_gib(line.slot.memory_total_bytes, glyphs):<4}"
    return format_gib(line.memory, glyphs) + (total if line.is_slot else " " * len(total))


_NODE = Column("NODE", lambda line, _: line.node, 4, right=False, style=_severity_style, kinds=("gpu",))
_GPU = Column("GPU", lambda line, _: line.number, 3, right=False, order="gpu", style=_severity_style)
_MODEL = Column(
    "MODEL", lambda line, _: shorten_model(line.model), _MIN_MODEL, right=False, style=lambda _: "dim", kinds=_SLOTS
)
_HOLDER = Column("HOLDER", lambda line, _: line.label, 6, right=False, style=_severity_style)
_HISTORY = Column("HISTORY", lambda *_: "", 8, right=False, style=lambda _: "bar")
_UTIL = Column("UTIL", lambda line, glyphs: format_percent(line.utilization, glyphs), 4, order="utilisation")
_MEMORY = Column("MEM GiB", _memory_text, 9, order="memory")
_POWER = Column("POWER", lambda line, glyphs: format_number(line.power, "W", glyphs), 5, order="power", kinds=_HELD)
_TEMPERATURE = Column(
    "TEMP",
    lambda line, glyphs: format_number(line.temperature, "C", glyphs),
    4,
    style=lambda line: _style_above(line.temperature, _HOT, _VERY_HOT),
    kinds=("gpu",),
)
_PROCESSES = Column("PROC", lambda line, glyphs: format_number(line.processes, "", glyphs), 4, kinds=_HELD)
_IDLE_TIME = Column(
    "IDLE",
    lambda line, glyphs: format_idle(line.use, line.idle, glyphs) if line.holder else "",
    6,
    order="idle",
    style=lambda line: _style_above(line.idle, _IDLE, _LONG_IDLE),
    kinds=_HELD,
)
_COLUMNS = (
    *(_NODE, _GPU, _MODEL, _HOLDER, _HISTORY, _UTIL),
    *(_MEMORY, _POWER, _TEMPERATURE, _PROCESSES, _IDLE_TIME),
)


# Widths

_BAR, _NARROW_BAR, _MAX_BAR = 10, 4, 20
_NARROW_NODE, _NARROW_MODEL = 16, 12
_NAMESPACE, _MIN_NAMESPACE = 13, 5  # widths of a shortened namespace, including the ellipsis and the slash
_MIN_HOLDER = 24
_READABLE_POD = 40  # columns are removed until this many characters of the pod's name fit
_MAX_HISTORY = 30
_MIN_REMARK = 12


@dataclass(frozen=True, slots=True)
class _HolderWidths:
    """Widths of the longest holder name: in full, without the container, and only the pod."""

    full: int
    without_container: int
    pod: int


@dataclass(slots=True)
class _Layout:
    widths: dict[str, int]  # by column title, without hidden columns
    bar: int = _BAR

    def has(self, column: Column) -> bool:
        return column.title in self.widths

    def room(self, width: int) -> int:
        bar = self.bar + 1 if self.bar else 0
        return width - sum(self.widths.values()) - len(self.widths) + 1 - bar


def _lay_out(cells: Sequence[Sequence[str]], holder: _HolderWidths, width: int | None, hidden: set[Column]) -> _Layout:
    """`cells` has one text per line and column of `_COLUMNS`. Without `width`, nothing is truncated."""
    widths = {
        column.title: max(column.min_width, len(column.title), *(width_of(row[at]) for row in cells), 0)
        for at, column in enumerate(_COLUMNS)
        if column not in hidden
    }
    widths[_HOLDER.title] = max(_HOLDER.min_width, holder.full)
    layout = _Layout(widths)
    if width is None:
        return layout
    if layout.room(width) < 0:
        _narrow(layout, holder, width)
    if layout.has(_HISTORY):
        widths[_HISTORY.title] += max(0, min(layout.room(width), _MAX_HISTORY - widths[_HISTORY.title]))
    if layout.bar:
        layout.bar += max(0, min(layout.room(width), _MAX_BAR - layout.bar))
    return layout


def _narrow(layout: _Layout, holder: _HolderWidths, width: int) -> None:
    """Removes columns one by one, each only if the part of the holder's name listed next to it does not fit."""
    widths = layout.widths
    for column, narrow in ((_NODE, _NARROW_NODE), (_MODEL, _NARROW_MODEL)):
        if layout.has(column):
            widths[column.title] = min(widths[column.title], narrow)
    layout.bar = 0 if layout.has(_HISTORY) else _NARROW_BAR  # the sparkline ends with the same value
    widths[_HOLDER.title] = 0
    pod = min(holder.pod, _READABLE_POD)
    most = holder.full
    for column, needed in (
        (_MODEL, holder.without_container),
        (_PROCESSES, min(holder.without_container, pod + _NAMESPACE)),
        (_TEMPERATURE, min(holder.without_container, pod + _NAMESPACE)),
        (_POWER, min(holder.without_container, pod + _MIN_NAMESPACE)),
        (_MEMORY, pod),
        (_HISTORY, pod),
        (_UTIL, pod),
        (_IDLE_TIME, min(pod, _MIN_HOLDER)),
        (_NODE, min(pod, _MIN_HOLDER)),
    ):
        if layout.room(width) >= needed or not layout.has(column):
            continue
        if column is _UTIL:
            layout.bar = 0  # removes only the bar, not the figure
        else:
            del widths[column.title]
            most = holder.full if column is _MODEL else holder.without_container
    widths[_HOLDER.title] = max(1, min(layout.room(width), max(_HOLDER.min_width, most)))


def _measure_holders(lines: Iterable[tuple[int, Line]]) -> _HolderWidths:
    full, without_container, pod = [0], [0], [0]
    for depth, line in lines:
        if line.kind != "condition":
            names = (line.label,) if line.holder is None or line.kind == "process" else names_of(line.holder)
            widths = [depth * len(_INDENT) + width_of(printable(name)) for name in names]
            full.append(widths[0])
            without_container.append(widths[min(1, len(widths) - 1)])
            pod.append(widths[-1] if line.holder else min(widths[-1], _MIN_REMARK))
    return _HolderWidths(max(full), max(without_container), max(pod))


# The table


@dataclass(frozen=True)
class Table:
    lines: Sequence[tuple[int, Line]]  # each row's depth in the tree, and its line
    order: Order
    glyphs: Glyphs
    width: int | None
    sparklines: Sparklines | None
    _cells: Sequence[Sequence[str]] = field(repr=False)
    _layout: _Layout = field(repr=False)

    @property
    def rows(self) -> list[Row]:
        return [line.row for _, line in self.lines]

    @property
    def body(self) -> list[Spans]:
        return self.render(0, len(self.lines))

    def with_sparklines(self, sparklines: Sparklines) -> Table:
        return replace(self, sparklines=sparklines)

    def header(self) -> Spans:
        spans: Spans = []
        for column in filter(self._layout.has, _COLUMNS):
            has_bar = column is _UTIL and self._layout.bar
            width = self._layout.widths[column.title] + (self._layout.bar + 1 if has_bar else 0)
            title = column.title
            if column is _HISTORY and self.sparklines:
                title = f"LAST {format_span(self.sparklines.span)}"
            style = "sorted" if column.order == self.order else "header"
            spans += [(fit(title, width, self.glyphs, column.right and not has_bar), style), (" ", "header")]
        return spans[:-1]

    def render(self, start: int, end: int) -> list[Spans]:
        """Renders only these rows, because a screen shows few of possibly thousands."""
        return [self._render_row(at) for at in range(max(0, start), min(end, len(self.lines)))]

    def _render_row(self, at: int) -> Spans:
        depth, line = self.lines[at]
        if line.kind == "condition":
            text = _INDENT * depth + "! " + printable(format_condition(line.conditions[0], line.age))
            return [(text if self.width is None else fit_start(text, self.width, self.glyphs), line.severity)]
        base = "dim" if line.kind == "process" else ""
        spans: Spans = []
        for column, text in zip(_COLUMNS, self._cells[at], strict=True):
            if not self._layout.has(column):
                continue
            if column is _UTIL and self._layout.bar:
                spans += [(draw_bar(line.utilization, self._layout.bar, self.glyphs), "bar"), (" ", base)]
            style = "dim" if text == self.glyphs.absent else column.style(line) or base
            spans += [(self._fit(column, depth, line, text), style), (" ", base)]
        return spans[:-1]

    def _fit(self, column: Column, depth: int, line: Line, text: str) -> str:
        width = self._layout.widths[column.title]
        if column is _HISTORY:
            points = self.sparklines.points.get(line.row, b"") if self.sparklines else b""
            return draw_sparkline(points, width, self.glyphs)
        if column is _HOLDER:
            indent = (_INDENT * depth)[:width]
            if line.holder is None or line.kind == "process":
                return fit(indent + text, width, self.glyphs)
            return indent + fit_holder(line.holder, width - len(indent), self.glyphs)
        if column is _MODEL:
            return fit_start(text, width, self.glyphs)
        return fit(text, width, self.glyphs, column.right)


def make_table(
    lines: Iterable[Line], order: Order, glyphs: Glyphs, width: int | None = None, sparklines: Sparklines | None = None
) -> Table:
    """Without `width`, nothing is truncated. The node column is shown if there are several nodes."""
    flat = list(flatten(lines))
    cells = [[_cell(column, line, glyphs) for column in _COLUMNS] for _, line in flat]
    hidden = set() if len({line.node for _, line in flat}) > 1 else {_NODE}
    if sparklines is None:
        hidden.add(_HISTORY)
    layout = _lay_out(cells, _measure_holders(flat), width, hidden)
    return Table(flat, order, glyphs, width, sparklines, cells, layout)


def _cell(column: Column, line: Line, glyphs: Glyphs) -> str:
    return printable(column.text(line, glyphs)) if line.kind in column.kinds else ""


def format_condition(condition: ConditionView, age: float | None) -> str:
    """Returns a text such as `lost for 12m04s: GPU 3 has fallen off the bus`."""
    duration = "" if age is None else f" for {format_duration(age)}"
    return f"{condition.condition.replace('_', ' ')}{duration}: {condition.says or condition.condition}"


# Totals

_OPTIONAL_TOTALS = ("free", "used", "allocated", "unknown")  # removed in this order if the terminal is too narrow
_GAP = "  "


def render_totals(totals: Totals, currency: str, width: int, glyphs: Glyphs) -> Spans:
    parts = _make_totals(totals, currency, glyphs)
    for name in _OPTIONAL_TOTALS:
        if sum(width_of(text) + len(_GAP) for text, _ in parts.values()) - len(_GAP) > width:
            parts.pop(name, None)
    spans: Spans = []
    room = width
    for text, style in parts.values():
        shown = text + _GAP
        spans.append((shown if width_of(shown) <= room else fit(text, room, glyphs), style))
        room = max(0, room - width_of(shown))
    return spans


def _make_totals(totals: Totals, currency: str, glyphs: Glyphs) -> dict[str, Span]:
    parts = {
        "allocated": (f"{_format_gpus(totals.allocated)}/{totals.gpus} allocated", ""),
        "used": (f"{_format_gpus(totals.used)} used", ""),
        "idle": (f"{_format_gpus(totals.idle)} idle", "warn" if totals.idle else ""),
        "unknown": (f"{_format_gpus(totals.unknown)} unknown", ""),
        "free": (f"{_format_gpus(totals.free)} free", ""),
        "broken": (f"{totals.broken} broken", "bad" if totals.broken else ""),
        "watts": (_format_watts(totals.power_watts, glyphs), ""),
    }
    if not totals.unknown:
        del parts["unknown"]
    if totals.cost_per_hour is not None:
        wasted = f", {totals.wasted_per_hour:.2f} wasted" if totals.wasted_per_hour else ""
        parts["cost"] = (f"{format_money(totals.cost_per_hour, currency)}/h{wasted}", "warn" if wasted else "")
    return parts


def _format_gpus(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


def _format_watts(watts: float | None, glyphs: Glyphs) -> str:
    if watts is None:
        return f"{glyphs.absent} W"
    return f"{watts / 1000:.1f} kW" if watts >= 10_000 else f"{watts:.0f} W"
