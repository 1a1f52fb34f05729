"""Formats values as short texts and fits them into terminal columns."""

from __future__ import annotations

from rich.cells import cell_len, set_cell_size

from podgpu.cluster.parts import Use
from podgpu.model import Workload

FULL, NO_DATA = 200, 255  # a utilisation point is one byte: 200 means 100 %, 255 means no data
ABSENT = "–"
_CUT = "…"
_LEVELS = "▁▂▃▄▅▆▇█"  # characters of a sparkline, lowest first
_GIB = 1024**3
_MIN_GIB = 0.05  # smaller values would be shown as 0.0
_MIN_NAMESPACE = 3


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
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // part:02d}{smaller}"
    return f"{whole}s"


def format_span(seconds: float) -> str:
    """Formats the length of a time axis: `1h`, `15m`, `90s`."""
    for unit, size in (("h", 3600), ("m", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def shorten_model(model: str) -> str:
    return model.removeprefix("NVIDIA ").removeprefix("NVIDIA-")


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# Columns of a terminal


def printable(text: str) -> str:
    """Replaces control characters, because names from other systems could contain escape sequences."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def fit(text: str, width: int, right: bool = False) -> str:
    """Pads or truncates to exactly `width` columns. Truncates in the middle, because pod names differ at their ends."""
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


def name_of(workload: Workload) -> str:
    return workload.text or "unknown holder"


def fit_holder(workload: Workload, width: int) -> str:
    """Shortens a long name: removes the container first, then truncates the namespace, then the pod."""
    name, pod, namespace = (printable(text) for text in (name_of(workload), workload.pod, workload.namespace))
    if cell_len(name) <= width or workload.job or not pod:
        return fit(name, width)
    room = width - cell_len(pod) - 1
    if namespace and room > _MIN_NAMESPACE:
        return fit(f"{namespace if cell_len(namespace) <= room else fit_start(namespace, room)}/{pod}", width)
    return fit(pod, width)
