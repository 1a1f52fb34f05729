"""Lays lines out as a table of a given width: columns, cells with names of styles, and the line of totals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from podgpu.cluster.parts import Totals
from podgpu.cluster.view import ConditionView
from podgpu.top.feed import Sparklines
from podgpu.top.lines import Line, Order, Row, flatten
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
"""Text and the name of its style ("" is plain)."""
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


_MIN_MODEL = 7
_HOT, _VERY_HOT = 80.0, 90.0
_IDLE, _LONG_IDLE = 60.0, 600.0


def _temperature_style(line: Line) -> str:
    degrees = line.temperature or 0.0
    return "bad" if degrees >= _VERY_HOT else "warn" if degrees >= _HOT else ""


def _idle_style(line: Line) -> str:
    seconds = line.idle or 0.0
    return "bad" if seconds >= _LONG_IDLE else "warn" if seconds >= _IDLE else ""


def _severity_style(line: Line) -> str:
    return line.severity if line.is_slot else ""


def _node_text(line: Line, _glyphs: Glyphs) -> str:
    return line.node if line.kind == "gpu" else ""


def _model_text(line: Line, _glyphs: Glyphs) -> str:
    return shorten_model(line.model) if line.is_slot else ""


def _holder_text(line: Line, _glyphs: Glyphs) -> str:
    return line.remark if line.kind == "process" else line.name or line.remark


def _memory_text(line: Line, glyphs: Glyphs) -> str:
    """Beneath a device the total is left blank, so that the figures stay in line."""
    total = f"/{format_gib(line.slot.memory_total_bytes, glyphs):<4}"
    return format_gib(line.memory, glyphs) + (total if line.is_slot else " " * len(total))


def _power_text(line: Line, glyphs: Glyphs) -> str:
    return "" if line.kind == "process" else format_number(line.power, "W", glyphs)


def _temperature_text(line: Line, glyphs: Glyphs) -> str:
    return format_number(line.temperature, "C", glyphs) if line.kind == "gpu" else ""


def _processes_text(line: Line, glyphs: Glyphs) -> str:
    return "" if line.kind == "process" else format_number(line.processes, "", glyphs)


def _idle_text(line: Line, glyphs: Glyphs) -> str:
    return format_idle(line.use, line.idle, glyphs) if line.holder and line.kind != "process" else ""


_NODE = Column("NODE", _node_text, 4, right=False, style=_severity_style)
_GPU = Column("GPU", lambda line, _glyphs: line.number, 3, right=False, order="gpu", style=_severity_style)
_MODEL = Column("MODEL", _model_text, _MIN_MODEL, right=False, style=lambda _line: "dim")
_HOLDER = Column("HOLDER", _holder_text, 6, right=False, style=_severity_style)
_HISTORY = Column("HISTORY", lambda _line, _glyphs: "", 8, right=False, style=lambda _line: "bar")
_UTIL = Column("UTIL", lambda line, glyphs: format_percent(line.utilization, glyphs), 4, order="utilisation")
_MEMORY = Column("MEM GiB", _memory_text, 9, order="memory")
_POWER = Column("POWER", _power_text, 5, order="power")
_TEMPERATURE = Column("TEMP", _temperature_text, 4, style=_temperature_style)
_PROCESSES = Column("PROC", _processes_text, 4)
_IDLE_TIME = Column("IDLE", _idle_text, 6, order="idle", style=_idle_style)
_COLUMNS = (
    *(_NODE, _GPU, _MODEL, _HOLDER, _HISTORY, _UTIL),
    *(_MEMORY, _POWER, _TEMPERATURE, _PROCESSES, _IDLE_TIME),
)


# Widths

_BAR, _MIN_BAR, _MAX_BAR = 10, 4, 20
_MIN_NODE, _MIN_HOLDER = 9, 24
_NAMESPACE, _MIN_NAMESPACE = 13, 5  # a shortened namespace with the cut and the slash
_READABLE_POD = 40  # columns are left out to show that much of a pod's name
_HISTORY_WIDTH, _MAX_HISTORY = 12, 30
_MIN_REMARK = 12


@dataclass(frozen=True, slots=True)
class _HolderWidths:
    """Widths of the longest holder: with everything, without the container, the pod alone."""

    full: int
    without_container: int
    pod: int


@dataclass(slots=True)
class _Layout:
    widths: dict[str, int]  # by title; a column that is left out is absent
    holder: _HolderWidths
    width: int  # of the terminal
    bar: int = _BAR

    @property
    def total(self) -> int:
        return sum(self.widths.values()) + len(self.widths) - 1 + (self.bar + 1 if self.bar else 0)

    @property
    def room(self) -> int:
        return max(0, self.width - self.total)

    def has(self, column: Column) -> bool:
        return column.title in self.widths

    def shrink(self, column: Column, width: int) -> None:
        """To `width` at most, and only as far as needed."""
        if self.has(column):
            now = self.widths[column.title]
            self.widths[column.title] = max(min(now, width), now - max(0, self.total - self.width))

    def leave_out(self, *columns: Column) -> None:
        for column in columns:
            if self.total > self.width:
                self.widths.pop(column.title, None)

    def grow(self, column: Column, width: int) -> None:
        if self.has(column):
            self.widths[column.title] += max(0, min(self.room, width - self.widths[column.title]))


def _lay_out(cells: Sequence[Sequence[str]], holder: _HolderWidths, width: int | None, hidden: set[Column]) -> _Layout:
    """`cells`: a row of texts for each line, one for each of `_COLUMNS`. Without `width` nothing is cut."""
    widths = {
        column.title: max(column.min_width, len(column.title), *(width_of(row[at]) for row in cells), 0)
        for at, column in enumerate(_COLUMNS)
        if column not in hidden
    }
    widths[_HOLDER.title] = max(_HOLDER.min_width, holder.full)
    if _HISTORY not in hidden:
        widths[_HISTORY.title] = _HISTORY_WIDTH
    layout = _Layout(widths, holder, width or 0)
    if width is not None:
        count = len(widths)
        _narrow(layout)
        longest = holder.full if len(widths) == count else holder.without_container
        layout.grow(_HOLDER, max(_HOLDER.min_width, longest))
        layout.grow(_HISTORY, _MAX_HISTORY)
        if layout.bar:
            layout.bar += max(0, min(layout.room, _MAX_BAR - layout.bar))
    return layout


def _narrow(layout: _Layout) -> None:
    """Bars, model and container are reduced first, then the namespace, then columns. The pod's name stays readable."""
    pod = min(layout.holder.pod, _READABLE_POD)
    layout.bar -= max(0, min(layout.total - layout.width, _BAR - _MIN_BAR))
    if layout.has(_HISTORY) and layout.total > layout.width:
        layout.bar = 0  # the end of the sparkline shows the same
    layout.shrink(_MODEL, 12)
    layout.shrink(_NODE, 16)
    layout.shrink(_MODEL, _MIN_MODEL)
    layout.shrink(_HOLDER, layout.holder.without_container)
    layout.leave_out(_MODEL)
    layout.shrink(_HISTORY, _HISTORY.min_width)
    layout.shrink(_HOLDER, pod + _NAMESPACE)
    layout.leave_out(_PROCESSES, _TEMPERATURE)
    layout.shrink(_HOLDER, pod + _MIN_NAMESPACE)
    layout.shrink(_NODE, _MIN_NODE)
    layout.leave_out(_POWER)
    layout.shrink(_HOLDER, pod)
    layout.leave_out(_MEMORY, _HISTORY)
    if layout.total > layout.width:
        layout.bar = 0
    layout.shrink(_HOLDER, _MIN_HOLDER)
    layout.leave_out(_IDLE_TIME)
    layout.shrink(_HOLDER, 1)


def _measure_holders(lines: Iterable[tuple[int, Line]]) -> _HolderWidths:
    widths = [_measure_holder(depth, line) for depth, line in lines if line.kind != "condition"]
    return _HolderWidths(*(max(column) for column in zip((0, 0, 0), *widths, strict=True)))


def _measure_holder(depth: int, line: Line) -> tuple[int, int, int]:
    indent = depth * len(_INDENT)
    if line.holder is None or line.kind == "process":
        width = indent + width_of(printable(line.remark))
        return width, width, min(width, _MIN_REMARK)
    full, *shorter = (indent + width_of(printable(name)) for name in names_of(line.holder))
    return full, shorter[0] if shorter else full, shorter[-1] if shorter else full


# The table


@dataclass(frozen=True)
class Table:
    lines: Sequence[tuple[int, Line]]  # depth and line of each row
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
        for column in self._shown():
            has_bar = column is _UTIL and self._layout.bar
            width = self._layout.widths[column.title] + (self._layout.bar + 1 if has_bar else 0)
            title = column.title
            if column is _HISTORY and self.sparklines:
                title = f"LAST {format_span(self.sparklines.span)}"
            spans.append(
                (
                    fit(title, width, self.glyphs, column.right and not has_bar),
                    "sorted" if column.order == self.order else "header",
                )
            )
            spans.append((" ", "header"))
        return spans[:-1]

    def render(self, start: int, end: int) -> list[Spans]:
        """Only these rows: a screen shows fifty of thousands."""
        return [self._render_row(at) for at in range(max(0, start), min(end, len(self.lines)))]

    def _shown(self) -> list[Column]:
        return [column for column in _COLUMNS if self._layout.has(column)]

    def _render_row(self, at: int) -> Spans:
        depth, line = self.lines[at]
        if line.kind == "condition":
            text = _INDENT * depth + "! " + printable(describe_condition(line.conditions[0], line.age))
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
    """Without `width` nothing is cut. The node is shown if there are several."""
    flat = list(flatten(lines))
    cells = [[_cell(column, line, glyphs) for column in _COLUMNS] for _, line in flat]
    hidden = set() if len({line.node for _, line in flat}) > 1 else {_NODE}
    if sparklines is None:
        hidden.add(_HISTORY)
    layout = _lay_out(cells, _measure_holders(flat), width, hidden)
    return Table(flat, order, glyphs, width, sparklines, cells, layout)


def _cell(column: Column, line: Line, glyphs: Glyphs) -> str:
    return "" if line.kind == "condition" else printable(column.text(line, glyphs))


def describe_condition(condition: ConditionView, age: float | None) -> str:
    """`lost for 12m04s: GPU 3 has fallen off the bus`."""
    duration = "" if age is None else f" for {format_duration(age)}"
    return f"{condition.condition.replace('_', ' ')}{duration}: {condition.says or condition.condition}"


# Totals

_LEAVE_OUT = ("free", "used", "allocated", "unknown")  # in this order, if the terminal is narrow
_GAP = "  "


def render_totals(totals: Totals, currency: str, width: int, glyphs: Glyphs) -> Spans:
    parts = _make_totals(totals, currency, glyphs)
    for name in _LEAVE_OUT:
        if sum(width_of(text) + len(_GAP) for text, _ in parts.values()) - len(_GAP) > width:
            parts.pop(name, None)
    spans: Spans = []
    room = width
    for text, style in parts.values():
        gap = _GAP[: room if spans else 0]
        text = text if width_of(text) <= room - len(gap) else fit(text, max(0, room - len(gap)), glyphs)
        spans += [(gap, ""), (text, style)]
        room -= len(gap) + width_of(text)
    return spans


def _make_totals(totals: Totals, currency: str, glyphs: Glyphs) -> dict[str, Span]:
    watts = totals.power_watts
    parts = {
        "allocated": (f"{_format_gpus(totals.allocated)}/{totals.gpus} allocated", ""),
        "used": (f"{_format_gpus(totals.used)} used", ""),
        "idle": (f"{_format_gpus(totals.idle)} idle", "warn" if totals.idle else ""),
        "unknown": (f"{_format_gpus(totals.unknown)} not known", ""),
        "free": (f"{_format_gpus(totals.free)} free", ""),
        "broken": (f"{totals.broken} broken", "bad" if totals.broken else ""),
        "watts": (f"{watts / 1000:.1f} kW" if watts and watts >= 10_000 else format_number(watts, " W", glyphs), ""),
    }
    if not totals.unknown:
        del parts["unknown"]
    if watts is None:
        parts["watts"] = (f"{glyphs.absent} W", "")
    if totals.cost_per_hour is not None:
        wasted = f", {totals.wasted_per_hour:.2f} wasted" if totals.wasted_per_hour else ""
        parts["cost"] = (f"{format_money(totals.cost_per_hour, currency)}/h{wasted}", "warn" if wasted else "")
    return parts


def _format_gpus(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")
