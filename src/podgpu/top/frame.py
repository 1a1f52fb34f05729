"""A screenful: title, table, what is wrong, the keys. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from podgpu.top.cells import Glyphs, duration, fit, fit_start, printable
from podgpu.top.controls import HELP, Controls
from podgpu.top.feed import Seen
from podgpu.top.lines import arrange, flatten
from podgpu.top.table import Printed, table_of

_KEYS = "q quit  / filter  sort: u utilisation  m memory  p power  i idle  g GPU  h help"
_BY = {"gpu": "GPU", "utilisation": "utilisation", "memory": "memory", "power": "power", "idle": "idle time"}
_AROUND = 3
"""Lines of a screen that are not the table's body: title, header, keys."""


@dataclass(frozen=True, slots=True)
class Frame:
    printed: list[Printed]
    lines: int
    """Of the table, seen or not."""
    room: int
    """For so many of them."""


def frame_of(seen: Seen, controls: Controls, name: str, now: float, size: tuple[int, int], glyphs: Glyphs) -> Frame:
    """`size` is columns and rows."""
    width, height = size
    trouble = _trouble(seen, now, width, glyphs)
    room = max(1, height - _AROUND - len(trouble))
    table = table_of(arrange(seen.lines, controls.order, controls.wanted), controls.order, glyphs, width)
    body = _help(width, glyphs) if controls.helping else table.body[controls.scroll :] or _nothing(width, glyphs)
    title: Printed = [(fit(_title(seen, controls, name), width, glyphs), "title")]
    footer = _footer(controls, width, glyphs, len(table.body), room)
    blank: list[Printed] = [[]] * (room - len(body))
    return Frame([title, table.header, *body[:room], *blank, *trouble, footer], len(table.body), room)


def _title(seen: Seen, controls: Controls, name: str) -> str:
    devices = [line for _, line in flatten(seen.lines) if line.kind in ("gpu", "instance")]
    holders = {line.holder for _, line in flatten(seen.lines) if line.holder and line.kind != "process"}
    parts = [_plural(len(seen.lines), "GPU"), _plural(len(holders), "holder")]
    instances = len(devices) - len(seen.lines)
    if instances:
        parts.insert(1, _plural(instances, "MIG instance"))
    nodes = sorted({line.node for line in seen.lines if line.node})
    where = nodes[0] if len(nodes) == 1 else f"{len(nodes)} nodes" if nodes else name
    return printable(f"podgpu top  {where}  {', '.join(parts)}, by {_BY[controls.order]}")


def _trouble(seen: Seen, now: float, width: int, glyphs: Glyphs) -> list[Printed]:
    if seen.error is not None:
        age = f"; the figures are {duration(max(0.0, now - seen.read_at))} old"
        why = fit_start(printable(str(seen.error)), width - len(age), glyphs).rstrip()
        return [[(fit(why + age, width, glyphs), "bad")]]
    return [[(fit_start(printable(note), width, glyphs), "warn")] for note in seen.notes[:2]]


def _footer(controls: Controls, width: int, glyphs: Glyphs, lines: int, room: int) -> Printed:
    if controls.typing:
        return [(fit(f"filter: {controls.wanted}_", width, glyphs), "title")]
    place = f"{min(controls.scroll + room, lines)}/{lines}" if lines > room else ""
    wanted = f"filter: {controls.wanted} (Esc clears)  " if controls.wanted else ""
    left = max(0, width - len(place) - 1)
    return [(fit(printable(wanted + _KEYS)[:left], left, glyphs) + " " + place, "dim")]


def _help(width: int, glyphs: Glyphs) -> list[Printed]:
    return [[(fit(line, width, glyphs), "")] for line in HELP]


def _nothing(width: int, glyphs: Glyphs) -> list[Printed]:
    return [[(fit("nothing has this text", width, glyphs), "dim")]]


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
