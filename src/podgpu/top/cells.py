"""Figures as short texts: what stands in a cell. Pure. Names come from others: nothing in them may move the cursor."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

from podgpu.top.history import Idle
from podgpu.top.lines import Line

_GIB = 1024**3
_EIGHTHS = " ▏▎▍▌▋▊▉"
_LEAST_SHOWN = 0.05  # GiB: what would read as 0.0


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The few characters beyond ASCII, or what stands for them."""

    absent: str = "–"
    cut: str = "…"
    blocks: bool = False
    """Bars of block characters; else of #."""


PLAIN = Glyphs()
RICH = Glyphs(blocks=True)
ASCII = Glyphs(absent="-", cut="~")


def bar(ratio: float | None, width: int, glyphs: Glyphs) -> str:
    if ratio is None:
        return " " * width
    ratio = min(1.0, max(0.0, ratio))
    if not glyphs.blocks:
        return ("#" * round(ratio * width)).ljust(width, ".")
    whole, eighth = divmod(round(ratio * width * 8), 8)
    return ("█" * whole + (_EIGHTHS[eighth] if eighth else "")).ljust(width)


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
