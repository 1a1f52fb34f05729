"""Formats values, and lays out lines as a table with styled cells and a line of totals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from podgpu.charge import Waste
from podgpu.fleet.parts import Totals, Use
from podgpu.fleet.settings import duration_text
from podgpu.fleet.view import ConditionView
from podgpu.model import Workload
from podgpu.money import write_decimal, write_money
from podgpu.past.gpu_history import FULL, NO_DATA
from podgpu.top.feed import Sparklines
from podgpu.top.lines import Kind, Line, Order, flatten, name_of

Span = tuple[str, str]  # a text and the name of its style; an empty name means unstyled
Spans = list[Span]
_INDENT = "  "
ABSENT = "–"
_CUT = "…"
_LEVELS = "▁▂▃▄▅▆▇█"  # characters of a sparkline, lowest first
_GIB = 1024**3
_MIN_GIB = 0.05  # smaller values would be shown as 0.0
_MIN_NAMESPACE = 3


def as_text(spans: Spans) -> str:
    return "".join(text for text, _ in spans).rstrip()


# Figures


def draw_sparkline(points: bytes, width: int) -> str:
    """Draws points, newest last. Columns without data are blank."""
    if not points or width <= 0:
        return " " * width

    size = math.ceil(len(points) / width)  # points per column
    columns = ""
    # From the end, so that only the oldest column may have fewer points.
    for end in range(len(points), 0, -size):
        start = max(0, end - size)
        columns = _draw_level(points[start:end]) + columns
    return columns.rjust(width)


def _draw_level(points: bytes) -> str:
    known = [point for point in points if point != NO_DATA]
    if not known:
        return " "
    if not any(known):
        return _LEVELS[0]

    # The lowest character is only for points that are all 0.
    highest = len(_LEVELS) - 1
    mean = sum(known) / len(known)
    level = round(mean / FULL * highest)
    return _LEVELS[max(1, min(highest, level))]


def format_percent(ratio: float | None) -> str:
    if ratio is None:
        return ABSENT
    return f"{ratio * 100:.0f}%"


def format_gib(size: float | None) -> str:
    if size is None:
        return ABSENT
    gib = size / _GIB
    if 0 < gib < _MIN_GIB:
        return "<0.1"
    # At most five characters, so that columns stay narrow.
    if gib < 999:
        return f"{gib:.1f}"
    return f"{gib:.0f}"


def format_number(value: float | None, unit: str = "") -> str:
    if value is None:
        return ABSENT
    return f"{value:.0f}{unit}"


def format_gpus(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


def format_idle(use: Use | None, seconds: float | None) -> str:
    if use == "used":
        return "busy"
    if seconds is not None:
        return format_duration(seconds)
    if use == "idle":
        return "idle"
    return ABSENT


def format_duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)

    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    if minutes:
        return f"{minutes}m{rest:02d}s"
    return f"{rest}s"


def shorten_model(model: str) -> str:
    return model.removeprefix("NVIDIA ").removeprefix("NVIDIA-")


# Terminal columns


def printable(text: str) -> str:
    """Replaces control characters: names from other systems could contain escape sequences."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "?" for c in text)


def fit(text: str, width: int, right: bool = False) -> str:
    """Pads or truncates to exactly `width` columns.

    Truncates in the middle, because pod names differ at their ends.
    """
    if width <= 0:
        return ""
    if cell_len(text) > width:
        head = width // 2
        tail = set_cell_size(text[::-1], width - head - 1)[::-1]
        text = set_cell_size(text, head) + _CUT + tail

    blanks = " " * (width - cell_len(text))
    if right:
        return blanks + text
    return text + blanks


def fit_start(text: str, width: int) -> str:
    """Like `fit`, but truncates at the end."""
    if cell_len(text) > width > 0:
        text = set_cell_size(text, width - 1).rstrip() + _CUT
    return set_cell_size(text, width)


def fit_holder(workload: Workload, width: int) -> str:
    """Shortens a long name.

    Removes the container first, then truncates the namespace, then the pod.
    """
    name = printable(name_of(workload))
    if cell_len(name) <= width or workload.job or not workload.pod:
        return fit(name, width)

    pod = printable(workload.pod)
    namespace = printable(workload.namespace)
    room = width - cell_len(f"/{pod}")
    # A namespace of three characters would say nothing.
    if not namespace or room <= _MIN_NAMESPACE:
        return fit(pod, width)
    if cell_len(namespace) > room:
        namespace = fit_start(namespace, room)
    return fit(f"{namespace}/{pod}", width)


# Columns


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    text: Callable[[Line], str]
    min_width: int
    right: bool = True
    order: Order | None = None
    style: Callable[[Line], str] = lambda _line: ""
    # Kinds of lines that have this column.
    kinds: tuple[Kind, ...] = ("gpu", "instance", "holder", "process")


_HOT = 80.0
_VERY_HOT = 90.0
_IDLE = 60.0
_LONG_IDLE = 600.0
_SLOTS: tuple[Kind, ...] = ("gpu", "instance")
_HELD: tuple[Kind, ...] = (*_SLOTS, "holder")


def _style_above(value: float | None, warn: float, bad: float) -> str:
    if value is None or value < warn:
        return ""
    if value < bad:
        return "warn"
    return "bad"


def _severity_style(line: Line) -> str:
    return line.severity


def _memory_text(line: Line) -> str:
    """Returns memory in use and the total.

    Lines below a device have blanks for the total, so that figures align.
    """
    total = f"/{format_gib(line.slot.memory_total_bytes):<4}"
    if not line.is_slot:
        total = " " * len(total)
    return format_gib(line.memory) + total


def _idle_text(line: Line) -> str:
    if line.holder is None:
        return ""
    if line.use == "used":
        return "0s"
    return format_idle(line.use, line.idle)


_NODE = Column(
    "NODE", lambda line: line.node, 4, right=False, style=_severity_style, kinds=("gpu",)
)
_GPU = Column(
    "GPU",
    lambda line: line.number,
    3,
    right=False,
    order="gpu",
    style=_severity_style,
    kinds=_SLOTS,
)
_MODEL = Column(
    "MODEL",
    lambda line: shorten_model(line.model),
    5,
    right=False,
    style=lambda _: "dim",
    kinds=_SLOTS,
)
_HOLDER = Column("HOLDER", lambda line: line.label, 6, right=False, style=_severity_style)
_HISTORY = Column("HISTORY", lambda _: "", 8, right=False, style=lambda _: "bar", kinds=_SLOTS)
_UTIL = Column("UTIL", lambda line: format_percent(line.utilization), 4, order="utilisation")
_MEMORY = Column("MEM GiB", _memory_text, 9, order="memory")
_POWER = Column("POWER", lambda line: format_number(line.power, "W"), 5, order="power", kinds=_HELD)
_TEMPERATURE = Column(
    "TEMP",
    lambda line: format_number(line.slot.temperature_celsius, "C"),
    4,
    style=lambda line: _style_above(line.slot.temperature_celsius, _HOT, _VERY_HOT),
    kinds=("gpu",),
)
_PROCESSES = Column("PROC", lambda line: format_number(line.processes), 4, kinds=_HELD)
_IDLE_TIME = Column(
    "IDLE",
    _idle_text,
    6,
    order="idle",
    style=lambda line: _style_above(line.idle, _IDLE, _LONG_IDLE),
    kinds=_HELD,
)
_COLUMNS = (
    _NODE,
    _GPU,
    _MODEL,
    _HOLDER,
    _HISTORY,
    _UTIL,
    _MEMORY,
    _POWER,
    _TEMPERATURE,
    _PROCESSES,
    _IDLE_TIME,
)
# Hidden in this order in a narrow terminal.
_OPTIONAL = (_PROCESSES, _TEMPERATURE, _POWER, _MEMORY, _HISTORY, _IDLE_TIME, _NODE)
_READABLE_HOLDER = 34
_NARROW_NODE = 16
_MAX_HISTORY = 30


def _lay_out(natural: dict[Column, int], width: int) -> dict[Column, int]:
    """Returns the width of each visible column.

    `natural`: the widths without any cut. Hides columns until the holder column is readable.
    """
    widths = dict(natural)
    wanted = natural[_HOLDER]

    def room() -> int:
        """Returns how wide the holder column could be."""
        gaps = len(widths) - 1
        others = sum(widths.values()) - widths[_HOLDER]
        return width - others - gaps

    if room() < wanted and _NODE in widths:
        widths[_NODE] = min(widths[_NODE], _NARROW_NODE)
    if room() < wanted:
        del widths[_MODEL]

    # More important columns are hidden only for a readable part of the holder.
    readable = min(wanted, _READABLE_HOLDER)
    for column in _OPTIONAL:
        if column in widths and room() < readable:
            del widths[column]

    widths[_HOLDER] = max(1, min(wanted, room()))
    if _HISTORY in widths:
        unused = room() - widths[_HOLDER]
        widths[_HISTORY] = min(widths[_HISTORY] + unused, _MAX_HISTORY)
    return widths


# The table


class Table:
    def __init__(
        self,
        lines: Iterable[Line],
        order: Order,
        width: int | None = None,
        sparklines: Sparklines | None = None,
    ) -> None:
        """Without `width`, nothing is truncated."""
        self.lines = list(flatten(lines))  # each row's depth in the tree, and its line
        self.sparklines = sparklines
        self._order = order
        self._width = width
        self._widths = {column: self._measure(column) for column in _COLUMNS}

        # The title has the name of a single node.
        nodes = {line.node for _, line in self.lines}
        if len(nodes) <= 1:
            del self._widths[_NODE]

        if sparklines is None:
            del self._widths[_HISTORY]

        if width is not None:
            self._widths = _lay_out(self._widths, width)

    def _measure(self, column: Column) -> int:
        widest = max(column.min_width, len(column.title))
        for depth, line in self.lines:
            width = cell_len(_cell(column, line))
            if column is _HOLDER:
                width += depth * len(_INDENT)
            widest = max(widest, width)
        return widest

    def header(self) -> Spans:
        spans: Spans = []
        for column, width in self._widths.items():
            title = column.title
            if column is _HISTORY and self.sparklines:
                title = f"LAST {duration_text(self.sparklines.span)}"

            style = "sorted" if column.order == self._order else "header"
            text = fit(title, width, column.right)
            spans += [(text, style), (" ", "header")]

        # Nothing separates the last column.
        return spans[:-1]

    def render(self, start: int = 0, end: int | None = None) -> list[Spans]:
        """Renders the rows from `start` to `end`. The screen needs only the visible rows."""
        return [self._render_row(depth, line) for depth, line in self.lines[start:end]]

    def _render_row(self, depth: int, line: Line) -> Spans:
        if line.condition is not None:
            problem = printable(format_condition(line.condition, line.age))
            text = f"{_INDENT * depth}! {problem}"
            if self._width is not None:
                text = fit_start(text, self._width)
            return [(text, line.severity)]

        line_style = "dim" if line.kind == "process" else ""
        spans: Spans = []
        for column, width in self._widths.items():
            text = _cell(column, line)
            style = column.style(line) or line_style
            if text == ABSENT:
                style = "dim"
            fitted = self._fit(column, depth, line, text, width)
            spans += [(fitted, style), (" ", line_style)]

        # Nothing separates the last column.
        return spans[:-1]

    def _fit(self, column: Column, depth: int, line: Line, text: str, width: int) -> str:
        if column is _HISTORY and self.sparklines and line.is_slot:
            return draw_sparkline(self.sparklines.find(line), width)
        if column is not _HOLDER:
            return fit(text, width, column.right)

        indent = (_INDENT * depth)[:width]
        if line.holder is None or line.kind == "process":
            return fit(indent + text, width)
        return indent + fit_holder(line.holder, width - len(indent))


def _cell(column: Column, line: Line) -> str:
    if line.kind not in column.kinds:
        return ""
    return printable(column.text(line))


def format_condition(condition: ConditionView, age: float | None) -> str:
    """Returns a text such as `lost for 12m04s: GPU 3 has fallen off the bus`."""
    text = condition.condition.replace("_", " ")
    if age is not None:
        text += f" for {format_duration(age)}"
    return f"{text}: {condition.says or condition.condition}"


# Totals

# Left out in this order in a narrow terminal.
_OPTIONAL_TOTALS = ("free", "used", "allocated", "unheld", "unknown")
_GAP = "  "


def _format_cost(totals: Totals, allocated_cost: float, currency: str) -> Span:
    waste = Waste()
    if totals.waste is not None:
        waste = totals.waste.cost_per_hour or waste

    hourly = allocated_cost + (waste.unallocated or 0.0) + (totals.unheld_cost_per_hour or 0.0)
    cost = f"{write_money(hourly, currency)}/h"
    if waste.total:
        return f"{cost}, {write_decimal(waste.total)} wasted", "warn"
    return cost, ""


def render_totals(totals: Totals, currency: str, width: int) -> Spans:
    parts = dict(_list_totals(totals, currency))

    for name in _OPTIONAL_TOTALS:
        line = _GAP.join(text for text, _ in parts.values())
        if len(line) > width:
            parts.pop(name, None)

    return [(text + _GAP, style) for text, style in parts.values()]


def _list_totals(totals: Totals, currency: str) -> Iterator[tuple[str, Span]]:
    """Yields the name of each total, and what is shown."""
    yield "allocated", (f"{format_gpus(totals.allocated)}/{totals.gpus} allocated", "")
    yield "used", (f"{format_gpus(totals.used)} used", "")

    idle_style = "warn" if totals.idle else ""
    yield "idle", (f"{format_gpus(totals.idle)} idle", idle_style)
    if totals.unknown:
        yield "unknown", (f"{format_gpus(totals.unknown)} use unknown", "")

    yield "free", (f"{format_gpus(totals.free)} free", "")
    if totals.unheld_unknown:
        yield "unheld", (f"{format_gpus(totals.unheld_unknown)} holder unknown", "")

    broken_style = "bad" if totals.broken else ""
    yield "broken", (f"{totals.broken} broken", broken_style)
    if totals.kubernetes_unhealthy:
        yield "refused", (f"{totals.kubernetes_unhealthy} unhealthy in Kubernetes", "warn")

    yield "watts", (_format_watts(totals.power_watts), "")
    if totals.cost_per_hour is not None:
        yield "cost", _format_cost(totals, totals.cost_per_hour, currency)


def _format_watts(watts: float | None) -> str:
    if watts is None:
        return f"{ABSENT} W"
    if watts >= 10_000:
        return f"{watts / 1000:.1f} kW"
    return f"{watts:.0f} W"
