"""This module writes the line of totals: GPUs broken, idle, used and free, what they draw and what that costs. Pure.

The server computes the sums. What a narrow terminal has no room for is left out
from the end of `_LEFT_OUT`; what is wrong, idle or paid for stays longest.
"""

from __future__ import annotations

from podgpu.cluster.parts import Totals
from podgpu.top.cells import Glyphs, fit, width_of
from podgpu.top.details import money
from podgpu.top.table import Printed, Span

_LEFT_OUT = ("free", "used", "allocated", "unknown")
"""In this order."""
_GAP = "  "


def totals_line(totals: Totals, currency: str, width: int, glyphs: Glyphs) -> Printed:
    parts = _parts(totals, currency, glyphs)
    for name in _LEFT_OUT:
        if _width(parts) > width:
            parts.pop(name, None)
    spans: Printed = []
    for text, style in parts.values():
        spans += [(text, style), (_GAP, "")]
    return _cut(spans[:-1], width, glyphs)


def _parts(totals: Totals, currency: str, glyphs: Glyphs) -> dict[str, Span]:
    """By name, in the order in which they are shown."""
    parts = {
        "allocated": (f"{_gpus(totals.allocated)}/{totals.gpus} allocated", ""),
        "used": (f"{_gpus(totals.used)} used", ""),
        "idle": (f"{_gpus(totals.idle)} idle", "warn" if totals.idle else ""),
        "unknown": (f"{_gpus(totals.unknown)} not known", ""),
        "free": (f"{_gpus(totals.free)} free", ""),
        "broken": (f"{totals.broken} broken", "bad" if totals.broken else ""),
        "watts": (_watts(totals.power_watts, glyphs), ""),
    }
    if not totals.unknown:
        del parts["unknown"]
    if totals.cost_per_hour is not None:
        wasted = f", {totals.wasted_per_hour:.2f} wasted" if totals.wasted_per_hour else ""
        parts["cost"] = (f"{money(totals.cost_per_hour, currency)}/h{wasted}", "warn" if wasted else "")
    return parts


def _gpus(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


def _watts(watts: float | None, glyphs: Glyphs) -> str:
    if watts is None:
        return f"{glyphs.absent} W"
    return f"{watts / 1000:.1f} kW" if watts >= 10_000 else f"{watts:.0f} W"


def _width(parts: dict[str, Span]) -> int:
    return sum(width_of(text) for text, _ in parts.values()) + len(_GAP) * (len(parts) - 1)


def _cut(spans: Printed, width: int, glyphs: Glyphs) -> Printed:
    kept: Printed = []
    for text, style in spans:
        room = width - sum(width_of(part) for part, _ in kept)
        kept.append((text if width_of(text) <= room else fit(text, max(0, room), glyphs), style))
    return kept
