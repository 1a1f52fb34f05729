"""Formats values as short texts and fits them into terminal columns."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

from podgpu.cluster.parts import Use
from podgpu.model import Workload

FULL, NO_DATA = 200, 255  # a utilisation point is one byte: 200 means 100 %, 255 means no data
GIB = 1024**3
_EIGHTHS = " ▏▎▍▌▋▊▉"
_MIN_NAMESPACE = 3
_TO_ASCII = str.maketrans({"↑": "^", "↓": "v", "–": "-", "…": "~", "─": "-"})
_MIN_GIB = 0.05  # smaller values would be shown as 0.0


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The non-ASCII characters to use, or their ASCII replacements."""

    absent: str = "–"
    cut: str = "…"
    levels: str = "▁▂▃▄▅▆▇█"  # characters of a sparkline, lowest first
    blocks: bool = False  # draw bars with block characters instead of #

    def replace_in(self, text: str) -> str:
        return text if self.absent != "-" else text.translate(_TO_ASCII)


PLAIN = Glyphs()
RICH = Glyphs(blocks=True)
ASCII = Glyphs(absent="-", cut="~", levels="_.-:=+*#")


# Figures


def draw_bar(ratio: float | None, width: int, glyphs: Glyphs) -> str:
    if ratio is None:
        return " " * width
    ratio = min(1.0, max(0.0, ratio))
    if not glyphs.blocks:
        return ("#" * round(ratio * width)).ljust(width, ".")
    whole, eighth = divmod(round(ratio * width * 8), 8)
    return ("█" * whole + (_EIGHTHS[eighth] if eighth else "")).ljust(width)


def draw_sparkline(points: bytes, width: int, glyphs: Glyphs) -> str:
    """Draws points, newest last. Columns without data are blank."""
    size = -(-len(points) // width) if width > 0 else 0  # points per column
    ends = range(len(points), max(0, len(points) - size * width), -size) if size else ()
    columns = [_level(points[max(0, end - size) : end], glyphs) for end in reversed(ends)]
    return "".join(columns).rjust(width)


def _level(points: bytes, glyphs: Glyphs) -> str:
    known = [point for point in points if point != NO_DATA]
    if not known:
        return " "
    highest = len(glyphs.levels) - 1
    ratio = sum(known) / len(known) / FULL
    return glyphs.levels[0 if ratio == 0 else max(1, min(highest, round(ratio * highest)))]


def format_percent(ratio: float | None, glyphs: Glyphs) -> str:
    return glyphs.absent if ratio is None else f"{ratio * 100:.0f}%"


def format_gib(size: int | None, glyphs: Glyphs) -> str:
    if size is None:
        return glyphs.absent
    gib = size / GIB
    return "<0.1" if 0 < gib < _MIN_GIB else f"{gib:.1f}" if gib < 999 else f"{gib:.0f}"


def format_number(value: float | None, unit: str, glyphs: Glyphs) -> str:
    return glyphs.absent if value is None else f"{value:.0f}{unit}"


def format_idle(use: Use | None, seconds: float | None, glyphs: Glyphs) -> str:
    if use == "used":
        return "busy"
    return format_duration(seconds) if seconds is not None else "idle" if use == "idle" else glyphs.absent


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
    return f"{seconds:.0f}s" if seconds < 600 else f"{seconds / 60:.0f}m"


def shorten_model(model: str) -> str:
    return model.removeprefix("NVIDIA ").removeprefix("NVIDIA-")


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# Columns of a terminal


def printable(text: str) -> str:
    """Replaces control characters, because names from other systems could contain escape sequences."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def width_of(text: str) -> int:
    """Returns the number of terminal columns. Wide characters use two, combining characters none."""
    return len(text) if text.isascii() else sum(_columns(c) for c in text)


def _columns(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def fit(text: str, width: int, glyphs: Glyphs, right: bool = False) -> str:
    """Pads or truncates to exactly `width` columns. Truncates in the middle, because pod names differ at their ends."""
    if width_of(text) > width:
        head = _take(text, width // 2)
        tail = _take(text[::-1], width - 1 - width_of(head))[::-1]
        text = head + glyphs.cut + tail if width > 0 else ""
    return _pad(text, width, right)


def fit_start(text: str, width: int, glyphs: Glyphs) -> str:
    """Like `fit`, but truncates at the end."""
    if width_of(text) > width:
        text = _take(text, width - 1).rstrip() + glyphs.cut if width > 0 else ""
    return _pad(text, width)


def name_of(workload: Workload) -> str:
    return workload.text or "-"


def names_of(workload: Workload) -> tuple[str, ...]:
    """Returns the full name, the name without the container, and only the pod's name."""
    if workload.job or not workload.pod:
        return (name_of(workload),)
    without_container = "/".join(filter(None, (workload.namespace, workload.pod)))
    return tuple(dict.fromkeys((name_of(workload), without_container, workload.pod)))


def fit_holder(workload: Workload, width: int, glyphs: Glyphs) -> str:
    """Shortens a long name: removes the container first, then truncates the namespace, then the pod."""
    names = [printable(name) for name in names_of(workload)]
    fitting = [name for name in names[:-1] if width_of(name) <= width]
    if fitting or len(names) == 1:
        return fit(fitting[0] if fitting else names[0], width, glyphs)
    pod, room = names[-1], width - width_of(names[-1]) - 2
    if workload.namespace and room >= _MIN_NAMESPACE:
        return _pad(f"{_take(printable(workload.namespace), room)}{glyphs.cut}/{pod}", width)
    return fit(pod, width, glyphs)


def _pad(text: str, width: int, right: bool = False) -> str:
    blanks = " " * (width - width_of(text))
    return blanks + text if right else text + blanks


def _take(text: str, width: int) -> str:
    used = 0
    for at, character in enumerate(text):
        used += _columns(character)
        if used > width:
            return text[:at]
    return text
