"""This module says how wide each column is on a terminal of a given width: which give way, in which order, and which
may grow. Pure.

The pod's name is what people look for: bars, model and container give way before it, then its namespace, then columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from podgpu.top.cells import width_of
from podgpu.top.columns import (
    COLUMNS,
    HISTORY,
    HOLDER,
    IDLE,
    LEAST_MODEL,
    MEMORY,
    MODEL,
    NODE,
    POWER,
    PROCESSES,
    TEMPERATURE,
    Column,
)

_BAR, _LEAST_BAR, _MOST_BAR = 10, 4, 20
_LEAST_NODE, _LEAST_HOLDER = 9, 24
_NAMESPACE, _LEAST_NAMESPACE = 13, 5
"""What is left of a namespace, with the cut and the slash behind it."""
_READABLE_POD = 40
"""So much of a pod's name stays, at the cost of columns; what is longer loses its middle."""
_HISTORY, _MOST_HISTORY = 12, 30


@dataclass(frozen=True, slots=True)
class HolderWidths:
    """What the longest of all lines takes: with everything, without the container, the pod alone."""

    whole: int
    without_container: int
    pod: int


@dataclass(slots=True)
class Layout:
    widths: dict[str, int]
    """Column's title -> its width; a column that is left out is not here."""
    bar: int = _BAR
    holder: HolderWidths = field(default_factory=lambda: HolderWidths(0, 0, 0))

    @property
    def total(self) -> int:
        return sum(self.widths.values()) + len(self.widths) - 1 + (self.bar + 1 if self.bar else 0)

    def has(self, column: Column) -> bool:
        return column.title in self.widths


def lay_out(
    texts: Sequence[Sequence[str]], holder: HolderWidths, width: int | None, left_out: Iterable[Column]
) -> Layout:
    """`texts`: rows of cells, a cell for each of `COLUMNS`. `width` None: as wide as it takes."""
    away = {column.title for column in left_out}
    longest: Mapping[str, int] = {
        column.title: max((width_of(row[at]) for row in texts), default=0)
        for at, column in enumerate(COLUMNS)
        if column.title not in away
    }
    least = {column.title: max(column.least, len(column.title)) for column in COLUMNS}
    layout = Layout({title: max(least[title], found) for title, found in longest.items()}, holder=holder)
    layout.widths[HOLDER.title] = max(least[HOLDER.title], holder.whole)
    if layout.has(HISTORY):
        layout.widths[HISTORY.title] = _HISTORY
    if width is not None:
        columns = len(layout.widths)
        _narrow(layout, width)
        is_whole = len(layout.widths) == columns  # room that a figure left is not for containers
        _widen(layout, width, max(least[HOLDER.title], holder.whole if is_whole else holder.without_container))
    return layout


def _narrow(layout: Layout, width: int) -> None:
    pod = min(layout.holder.pod, _READABLE_POD)
    layout.bar -= max(0, min(layout.total - width, _BAR - _LEAST_BAR))
    if layout.has(HISTORY) and layout.total > width:
        layout.bar = 0  # the end of the sparkline is the same
    _shrink(layout, MODEL, 12, width)
    _shrink(layout, NODE, 16, width)
    _shrink(layout, MODEL, LEAST_MODEL, width)
    _shrink(layout, HOLDER, layout.holder.without_container, width)
    _leave_out(layout, width, MODEL)
    _shrink(layout, HISTORY, HISTORY.least, width)
    _shrink(layout, HOLDER, pod + _NAMESPACE, width)
    _leave_out(layout, width, PROCESSES, TEMPERATURE)
    _shrink(layout, HOLDER, pod + _LEAST_NAMESPACE, width)
    _shrink(layout, NODE, _LEAST_NODE, width)
    _leave_out(layout, width, POWER)
    _shrink(layout, HOLDER, pod, width)
    _leave_out(layout, width, MEMORY, HISTORY)
    if layout.total > width:
        layout.bar = 0
    _shrink(layout, HOLDER, _LEAST_HOLDER, width)
    _leave_out(layout, width, IDLE)
    _shrink(layout, HOLDER, 1, width)


def _widen(layout: Layout, width: int, most_holder: int) -> None:
    """A column that was left out may have left more room than was missing."""
    holder = layout.widths[HOLDER.title]
    layout.widths[HOLDER.title] += max(0, min(width - layout.total, most_holder - holder))
    if layout.has(HISTORY):
        history = layout.widths[HISTORY.title]
        layout.widths[HISTORY.title] += max(0, min(width - layout.total, _MOST_HISTORY - history))
    if layout.bar:
        layout.bar += max(0, min(width - layout.total, _MOST_BAR - layout.bar))


def _leave_out(layout: Layout, width: int, *columns: Column) -> None:
    for column in columns:
        if layout.total > width:
            layout.widths.pop(column.title, None)


def _shrink(layout: Layout, column: Column, least: int, width: int) -> None:
    if layout.has(column):
        now = layout.widths[column.title]
        layout.widths[column.title] = max(min(now, least), now - max(0, layout.total - width))
