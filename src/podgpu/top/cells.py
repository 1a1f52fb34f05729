"""This module writes figures as short texts, for a cell. Pure. Names come from others: nothing in them may move the
cursor."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

from podgpu.model import Workload
from podgpu.top.api_answers import FULL, NO_DATA
from podgpu.top.figures import Condition, holder_text
from podgpu.top.history import Idle
from podgpu.top.lines import Line

_GIB = 1024**3
_EIGHTHS = " ▏▎▍▌▋▊▉"
_LEAST_NAMESPACE = 3
_IN_ASCII = str.maketrans({"↑": "^", "↓": "v", "–": "-", "…": "~", "─": "-"})
_LEAST_SHOWN = 0.05  # GiB: what would read as 0.0


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The few characters beyond ASCII, or what stands for them."""

    absent: str = "–"
    cut: str = "…"
    levels: str = "▁▂▃▄▅▆▇█"
    """Of a sparkline, the lowest first."""
    blocks: bool = False
    """Bars of block characters; else of #."""

    def spelled(self, text: str) -> str:
        """A text of ours, with what the terminal can show."""
        return text if self.absent != "-" else text.translate(_IN_ASCII)


PLAIN = Glyphs()
RICH = Glyphs(blocks=True)
ASCII = Glyphs(absent="-", cut="~", levels="_.-:=+*#")


def bar(ratio: float | None, width: int, glyphs: Glyphs) -> str:
    if ratio is None:
        return " " * width
    ratio = min(1.0, max(0.0, ratio))
    if not glyphs.blocks:
        return ("#" * round(ratio * width)).ljust(width, ".")
    whole, eighth = divmod(round(ratio * width * 8), 8)
    return ("█" * whole + (_EIGHTHS[eighth] if eighth else "")).ljust(width)


def spark(points: bytes, width: int, glyphs: Glyphs) -> str:
    """Points of `api_answers.py`, the oldest first, on `width` columns; blank where there is no data."""
    return "".join(_level(group, glyphs) for group in _groups(points, width)).rjust(width)


def _groups(points: bytes, width: int) -> list[bytes]:
    """As many as there are columns, each of as many points, but for the first."""
    size = -(-len(points) // width) if width > 0 else 0
    ends = range(len(points), max(0, len(points) - size * width), -size) if size else ()
    return [points[max(0, end - size) : end] for end in reversed(ends)]


def _level(group: bytes, glyphs: Glyphs) -> str:
    known = [point for point in group if point != NO_DATA]
    if not known:
        return " "
    most = len(glyphs.levels) - 1
    ratio = sum(known) / len(known) / FULL
    return glyphs.levels[0 if ratio == 0 else max(1, min(most, round(ratio * most)))]


def condition(of: Condition, age: float | None) -> str:
    """`lost for 12m04s: GPU 3 has fallen off the bus`."""
    return f"{of.name.replace('_', ' ')}{'' if age is None else f' for {duration(age)}'}: {of.says}"


def percent(ratio: float | None, glyphs: Glyphs) -> str:
    return glyphs.absent if ratio is None else f"{ratio * 100:.0f}%"


def memory(line: Line, glyphs: Glyphs) -> str:
    """Used and total in GiB. Beneath a device the total is left out, its place kept, so that figures stay in line."""
    used = glyphs.absent if line.memory is None else _gib(line.memory)
    total = f"/{glyphs.absent if line.memory_total is None else _gib(line.memory_total):<4}"
    return used + (" " * len(total) if line.kind in ("holder", "process") else total)


def _gib(size: int) -> str:
    gib = size / _GIB
    return "<0.1" if 0 < gib < _LEAST_SHOWN else f"{gib:.1f}" if gib < 999 else f"{gib:.0f}"


def watts(value: float | None, glyphs: Glyphs) -> str:
    return glyphs.absent if value is None else f"{value:.0f}W"


def degrees(value: float | None, glyphs: Glyphs) -> str:
    return glyphs.absent if value is None else f"{value:.0f}C"


def number(value: int | None, glyphs: Glyphs) -> str:
    return glyphs.absent if value is None else str(value)


def idle(value: Idle | None, glyphs: Glyphs) -> str:
    if value is None:
        return glyphs.absent
    if value.seconds == 0 and not value.at_least:
        return "busy"
    return (">" if value.at_least else "") + duration(value.seconds)


def duration(seconds: float) -> str:
    whole = int(seconds)
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // part:02d}{smaller}"
    return f"{whole}s"


def span(seconds: float) -> str:
    """Of a time axis: `1h`, `15m`, `90s`."""
    for unit, size in (("h", 3600), ("m", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s" if seconds < 600 else f"{seconds / 60:.0f}m"


def short_model(model: str) -> str:
    return model.removeprefix("NVIDIA ").removeprefix("NVIDIA-")


# Text in a terminal


def printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def width_of(text: str) -> int:
    """Columns of a terminal: some letters take two, accents none."""
    return len(text) if text.isascii() else sum(_columns(c) for c in text)


def _columns(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def fit(text: str, width: int, glyphs: Glyphs, right: bool = False) -> str:
    """Exactly `width` columns. What is too long loses its middle: names of pods differ at their ends."""
    if width_of(text) > width:
        head = _taken(text, width // 2)
        tail = _taken(text[::-1], width - 1 - width_of(head))[::-1]
        text = head + glyphs.cut + tail if width > 0 else ""
    return _padded(text, width, right)


def fit_start(text: str, width: int, glyphs: Glyphs) -> str:
    """The same, but it loses its end: models differ at their beginnings."""
    if width_of(text) > width:
        text = _taken(text, width - 1).rstrip() + glyphs.cut if width > 0 else ""
    return _padded(text, width)


def holder_texts(who: Workload) -> tuple[str, ...]:
    """The whole of it, then without the container, then without the namespace."""
    if who.job or not who.pod:
        return (holder_text(who),)
    whole, without_container = holder_text(who), "/".join(filter(None, (who.namespace, who.pod)))
    return tuple(dict.fromkeys((whole, without_container, who.pod)))


def fit_holder(who: Workload, width: int, glyphs: Glyphs) -> str:
    """The pod's name stays whole for as long as it can: its container gives way first, then its namespace."""
    texts = [printable(text) for text in holder_texts(who)]
    fitting = [text for text in texts[:-1] if width_of(text) <= width]
    if fitting or len(texts) == 1:
        return fit(fitting[0] if fitting else texts[0], width, glyphs)
    pod, room = texts[-1], width - width_of(texts[-1]) - 2
    if who.namespace and room >= _LEAST_NAMESPACE:
        return _padded(f"{_taken(printable(who.namespace), room)}{glyphs.cut}/{pod}", width)
    return fit(pod, width, glyphs)


def _padded(text: str, width: int, right: bool = False) -> str:
    blanks = " " * (width - width_of(text))
    return blanks + text if right else text + blanks


def _taken(text: str, width: int) -> str:
    """As much of its beginning as fits."""
    used = 0
    for at, character in enumerate(text):
        used += _columns(character)
        if used > width:
            return text[:at]
    return text
