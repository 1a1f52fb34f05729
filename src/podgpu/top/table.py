"""Formats values, and lays out lines as a table of a given width, with styled cells and a line of
totals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from podgpu.fleet.parts import Totals, Use
from podgpu.fleet.readings import duration_text
from podgpu.fleet.view import ConditionView
from podgpu.model import Workload
from podgpu.past.sqlite import FULL, NO_DATA
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
    size = -(-len(points) // width) if width > 0 else 0  # points per column
    ends = range(len(points), max(0, len(points) - size * width), -size) if size else ()
    columns = [_draw_level(points[max(0, end - size) : end]) for end in reversed(ends)]
    return "".join(columns).rjust(width)


def _draw_level(points: bytes) -> str:
    known = [point for point in points if point != NO_DATA]
    if not known:
        return " "
    highest = len(_LEVELS) - 1
    ratio = sum(known) / len(known) / FULL
    return _LEVELS[0 if ratio == 0 else max(1, min(highest, round(ratio * highest)))]


def format_percent(ratio: float | None) -> str:
    return ABSENT if ratio is None else f"{ratio * 100:.0f}%"


def format_gib(size: int | None) -> str:
    if size is None:
        return ABSENT
    gib = size / _GIB
    return "<0.1" if 0 < gib < _MIN_GIB else f"{gib:.1f}" if gib < 999 else f"{gib:.0f}"


def format_number(value: float | None, unit: str = "") -> str:
    return ABSENT if value is None else f"{value:.0f}{unit}"


def format_idle(use: Use | None, seconds: float | None) -> str:
    if use == "used":
        return "busy"
    return format_duration(seconds) if seconds is not None else "idle" if use == "idle" else ABSENT


def format_money(amount: float, currency: str) -> str:
    return f"{amount:.2f} {currency}".rstrip()


def format_duration(seconds: float) -> str:
    whole = int(seconds)
    for unit, size, smaller, part in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "m", 60),
        ("m", 60, "s", 1),
    ):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // part:02d}{smaller}"
    return f"{whole}s"


def shorten_model(model: str) -> str:
    return model.removeprefix("NVIDIA ").removeprefix("NVIDIA-")


# Terminal columns


def printable(text: str) -> str:
    """Replaces control characters, because names from other systems could contain escape
    sequences.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def fit(text: str, width: int, right: bool = False) -> str:
    """Pads or truncates to exactly `width` columns. Truncates in the middle, because pod names
    differ at their ends.
    """
    if cell_len(text) > width:
        head = width // 2
        tail = set_cell_size(text[::-1], max(0, width - head - 1))[::-1]
        text = set_cell_size(text, head) + _CUT + tail if width > 0 else ""
    blanks = " " * (width - cell_len(text))
    return blanks + text if right else text + blanks


def fit_start(text: str, width: int) -> str:
    """Like `fit`, but truncates at the end."""
    if cell_len(text) > width > 0:
        text = set_cell_size(text, width - 1).rstrip() + _CUT
    return set_cell_size(text, width)


def fit_holder(workload: Workload, width: int) -> str:
    """Shortens a long name: removes the container first, then truncates the namespace, then the
    pod.
    """
    name, pod, namespace = (
        printable(text) for text in (name_of(workload), workload.pod, workload.namespace)
    )
    if cell_len(name) <= width or workload.job or not pod:
        return fit(name, width)
    room = width - cell_len(pod) - 1
    if namespace and room > _MIN_NAMESPACE:
        return fit(
            f"{namespace if cell_len(namespace) <= room else fit_start(namespace, room)}/{pod}",
            width,
        )
    return fit(pod, width)


# Columns


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    text: Callable[[Line], str]
    min_width: int
    right: bool = True
    order: Order | None = None
    style: Callable[[Line], str] = lambda _line: ""
    kinds: tuple[Kind, ...] = (
        "gpu",
        "instance",
        "holder",
        "process",
    )  # kinds of lines that have this column


_HOT, _VERY_HOT = 80.0, 90.0
_IDLE, _LONG_IDLE = 60.0, 600.0
_SLOTS: tuple[Kind, ...] = ("gpu", "instance")
_HELD: tuple[Kind, ...] = (*_SLOTS, "holder")


def _style_above(value: float | None, warn: float, bad: float) -> str:
    return "" if value is None or value < warn else "warn" if value < bad else "bad"


def _severity_style(line: Line) -> str:
    return line.severity if line.is_slot else ""


def _memory_text(line: Line) -> str:
    """Returns memory in use and the total. Lines below a device have blanks for the total, so that
    figures align.
    """
    total = f"/{format_gib(line.slot.memory_total_bytes):<4}"
    return format_gib(line.memory) + (total if line.is_slot else " " * len(total))


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
    lambda line: (
        "" if not line.holder else "0s" if line.use == "used" else format_idle(line.use, line.idle)
    ),
    6,
    order="idle",
    style=lambda line: _style_above(line.idle, _IDLE, _LONG_IDLE),
    kinds=_HELD,
)
_COLUMNS = (
    *(_NODE, _GPU, _MODEL, _HOLDER, _HISTORY, _UTIL),
    *(_MEMORY, _POWER, _TEMPERATURE, _PROCESSES, _IDLE_TIME),
)
_OPTIONAL = (
    _PROCESSES,
    _TEMPERATURE,
    _POWER,
    _MEMORY,
    _HISTORY,
    _IDLE_TIME,
    _NODE,
)  # hidden in this order
_READABLE_HOLDER = 34
_NARROW_NODE = 16
_MAX_HISTORY = 30


def _lay_out(natural: dict[Column, int], width: int) -> dict[Column, int]:
    """Returns the width of each visible column. Hides columns until the holder column is
    readable.
    """
    widths, holder = dict(natural), natural[_HOLDER]

    def room() -> int:
        return width - sum(widths.values()) + widths[_HOLDER] - len(widths) + 1

    if room() < holder and _NODE in widths:
        widths[_NODE] = min(widths[_NODE], _NARROW_NODE)
    if room() < holder:
        del widths[_MODEL]
    for column in _OPTIONAL:
        if column in widths and room() < min(holder, _READABLE_HOLDER):
            del widths[column]
    widths[_HOLDER] = max(1, min(holder, room()))
    if _HISTORY in widths:
        widths[_HISTORY] += min(room() - widths[_HOLDER], _MAX_HISTORY - widths[_HISTORY])
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
        """Without `width`, nothing is truncated. The node column is shown if there are several
        nodes.
        """
        self.lines = list(flatten(lines))  # each row's depth in the tree, and its line
        self.sparklines = sparklines
        self._order = order
        self._width = width
        hidden = {_NODE} if len({line.node for _, line in self.lines}) <= 1 else set()
        if sparklines is None:
            hidden.add(_HISTORY)
        natural = {column: self._measure(column) for column in _COLUMNS if column not in hidden}
        self._widths = natural if width is None else _lay_out(natural, width)

    def _measure(self, column: Column) -> int:
        indent = len(_INDENT) if column is _HOLDER else 0
        cells = (cell_len(_cell(column, line)) + depth * indent for depth, line in self.lines)
        return max([column.min_width, len(column.title), *cells])

    def header(self) -> Spans:
        spans: Spans = []
        for column, width in self._widths.items():
            title = column.title
            if column is _HISTORY and self.sparklines:
                title = f"LAST {duration_text(self.sparklines.span)}"
            style = "sorted" if column.order == self._order else "header"
            spans += [(fit(title, width, column.right), style), (" ", "header")]
        return spans[:-1]

    def render(self, start: int = 0, end: int | None = None) -> list[Spans]:
        """Renders the rows from `start` to `end`. The screen needs only the visible rows."""
        return [self._render_row(depth, line) for depth, line in self.lines[start:end]]

    def _render_row(self, depth: int, line: Line) -> Spans:
        if line.condition is not None:
            text = _INDENT * depth + "! " + printable(format_condition(line.condition, line.age))
            return [(text if self._width is None else fit_start(text, self._width), line.severity)]
        base = "dim" if line.kind == "process" else ""
        spans: Spans = []
        for column, width in self._widths.items():
            text = _cell(column, line)
            style = "dim" if text == ABSENT else column.style(line) or base
            spans += [(self._fit(column, depth, line, text, width), style), (" ", base)]
        return spans[:-1]

    def _fit(self, column: Column, depth: int, line: Line, text: str, width: int) -> str:
        if column is _HISTORY and self.sparklines and line.is_slot:
            return draw_sparkline(self.sparklines.points.get(line.row[1:3], b""), width)
        if column is _HOLDER:
            indent = (_INDENT * depth)[:width]
            if line.holder is None or line.kind == "process":
                return fit(indent + text, width)
            return indent + fit_holder(line.holder, width - len(indent))
        return fit(text, width, column.right)


def _cell(column: Column, line: Line) -> str:
    return printable(column.text(line)) if line.kind in column.kinds else ""


def format_condition(condition: ConditionView, age: float | None) -> str:
    """Returns a text such as `lost for 12m04s: GPU 3 has fallen off the bus`."""
    duration = "" if age is None else f" for {format_duration(age)}"
    return (
        f"{condition.condition.replace('_', ' ')}{duration}: "
        f"{condition.says or condition.condition}"
    )


# Totals

_OPTIONAL_TOTALS = (
    "free",
    "used",
    "allocated",
    "unheld",
    "unknown",
)  # left out in this order in a narrow terminal
_GAP = "  "


def render_totals(totals: Totals, currency: str, width: int) -> Spans:
    parts = {
        "allocated": (f"{_format_gpus(totals.allocated)}/{totals.gpus} allocated", ""),
        "used": (f"{_format_gpus(totals.used)} used", ""),
        "idle": (f"{_format_gpus(totals.idle)} idle", "warn" if totals.idle else ""),
        "unknown": (f"{_format_gpus(totals.unknown)} use unknown", ""),
        "free": (f"{_format_gpus(totals.free)} free", ""),
        "unheld": (f"{_format_gpus(totals.unheld_unknown)} holder unknown", ""),
        "broken": (f"{totals.broken} broken", "bad" if totals.broken else ""),
        "watts": (_format_watts(totals.power_watts), ""),
    }
    for name, gpus in (("unknown", totals.unknown), ("unheld", totals.unheld_unknown)):
        if not gpus:
            del parts[name]
    if totals.cost_per_hour is not None:
        wasted = f", {totals.wasted_per_hour:.2f} wasted" if totals.wasted_per_hour else ""
        parts["cost"] = (
            f"{format_money(totals.cost_per_hour, currency)}/h{wasted}",
            "warn" if wasted else "",
        )
    for name in _OPTIONAL_TOTALS:
        if len(_GAP.join(text for text, _ in parts.values())) > width:
            parts.pop(name, None)
    return [(text + _GAP, style) for text, style in parts.values()]


def _format_gpus(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


def _format_watts(watts: float | None) -> str:
    if watts is None:
        return f"{ABSENT} W"
    return f"{watts / 1000:.1f} kW" if watts >= 10_000 else f"{watts:.0f} W"
