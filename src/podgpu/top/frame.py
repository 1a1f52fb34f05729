"""This module puts a screenful together: title, totals, table, details, what is wrong, the keys. Pure, but for whom it
has asked for more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from podgpu.top.arrange import arrange
from podgpu.top.cells import Glyphs, duration, fit, fit_start, printable
from podgpu.top.controls import HELP, Controls, Seat
from podgpu.top.details import More, Subject, details_of
from podgpu.top.feed import Seen
from podgpu.top.history import Idle
from podgpu.top.lines import Line, flatten
from podgpu.top.summary import totals_line
from podgpu.top.table import Printed, Span, Table, table_of

_KEYS = "q quit  Enter details  / filter  sort: u utilisation  m memory  p power  i idle  g GPU  h help"
_BY = {"gpu": "GPU", "utilisation": "utilisation", "memory": "memory", "power": "power", "idle": "idle time"}
_AROUND = 4
"""Lines of a screen that are not the table's body: title, totals, header, keys."""
_LOW = 8
"""Terminals of fewer lines have no totals: they show GPUs."""
_LEAST_PANE = 4
_MOST_NOTES = 3
AskMore = Callable[[str], More | None]
"""What the server knows of the GPU with this UUID, as far as it has answered; None: nobody can be asked."""


@dataclass(frozen=True, slots=True)
class Frame:
    printed: list[Printed]
    controls: Controls
    """As they are on this screen."""
    seat: Seat


@dataclass(frozen=True, slots=True)
class Screenful:
    """What a frame is made of beside the controls."""

    seen: Seen
    table: Table
    name: str
    """Of the source."""
    now: float
    """Monotonic."""
    size: tuple[int, int]
    """Columns and rows."""
    glyphs: Glyphs


def live_table(seen: Seen, controls: Controls, width: int, glyphs: Glyphs) -> Table:
    lines = arrange(seen.lines, controls.order, controls.wanted)
    marked = width if glyphs.blocks else max(1, width - 1)
    return table_of(lines, controls.order, glyphs, marked, seen.watched)


def frame_of(of: Screenful, controls: Controls, ask: AskMore = lambda _uuid: None) -> Frame:
    width, height = of.size
    trouble = _trouble(of.seen, of.now, width, of.glyphs)
    totals = [totals_line(of.seen.view.totals, of.seen.view.currency, width, of.glyphs)] if height >= _LOW else []
    room = max(1, height - _AROUND + 1 - len(totals) - len(trouble))
    rows = of.table.about
    controls = controls.within(Seat(rows, room))
    details = _details(of, controls, ask)
    pane = _pane(details, controls, room, width, of.glyphs)
    seat = Seat(rows, max(1, room - len(pane)), len(details))
    controls = controls.within(seat)
    footer = _footer(controls, width, of.glyphs, len(rows), seat.room)
    body = _body(of, controls, details, seat.room)
    blank: list[Printed] = [[]] * (seat.room - len(body))
    title: Printed = [(fit(_title(of.seen, controls, of.name), width, of.glyphs), "title")]
    header = _margin(of.glyphs, " ", "header") + of.table.header
    return Frame([title, *totals, header, *body, *blank, *pane, *trouble, footer], controls, seat)


# The table


def _body(of: Screenful, controls: Controls, details: list[Printed], room: int) -> list[Printed]:
    width = of.size[0]
    if controls.helping:
        return [[(fit(of.glyphs.spelled(line), width, of.glyphs), "")] for line in HELP[:room]]
    if controls.pane == "whole":
        return details[controls.pane_scroll : controls.pane_scroll + room]
    rows = of.table.rows(controls.scroll, controls.scroll + room)
    if not rows:
        return [[(fit("nothing has this text", width, of.glyphs), "dim")]]
    return [_with_cursor(row, at == controls.cursor, of.glyphs) for at, row in enumerate(rows, start=controls.scroll)]


def _with_cursor(row: Printed, here: bool, glyphs: Glyphs) -> Printed:
    """In reverse; where that may not be seen, with a mark."""
    styled = [(text, f"cursor {style}".strip()) for text, style in row] if here else row
    return _margin(glyphs, ">" if here else " ", "") + styled


def _margin(glyphs: Glyphs, text: str, style: str) -> Printed:
    return [] if glyphs.blocks else [(text, style)]


# The details


def _details(of: Screenful, controls: Controls, ask: AskMore) -> list[Printed]:
    if controls.pane == "closed" or not of.table.lines:
        return []
    line = of.table.lines[controls.cursor][1]
    if line.device is None:
        return []
    device_line = next((own for own in _device_lines(of.seen) if own.row[:3] == line.row[:3]), line)
    subject = Subject(
        line.device,
        device_line.row,
        of.seen.wall,
        currency=of.seen.view.currency,
        idle=_idle_times(device_line),
        more=ask(line.device.uuid),
        watched=of.seen.watched,
    )
    return details_of(subject, of.size[0], of.glyphs)


def _device_lines(seen: Seen) -> list[Line]:
    return [line for _, line in flatten(seen.lines) if line.kind in ("gpu", "instance")]


def _idle_times(line: Line) -> tuple[Idle | None, ...]:
    holders = line.device.holders if line.device else ()
    if len(holders) == 1:
        return (line.idle,)
    beneath = {inner.row[3]: inner.idle for inner in line.beneath if inner.kind == "holder"}
    return tuple(beneath.get(holder.who) for holder in holders)


def _pane(details: list[Printed], controls: Controls, room: int, width: int, glyphs: Glyphs) -> list[Printed]:
    """At most half of the room, and no more than it takes; what does not fit is for the whole screen."""
    if controls.pane != "half" or controls.helping or room < 2 * _LEAST_PANE:
        return []
    height = min(len(details) + 1, max(_LEAST_PANE, room // 2))
    shown = details[: height - 1]
    if len(details) > len(shown):
        shown[-1] = [(f"and {len(details) - len(shown) + 1} lines more: Enter shows all"[:width], "dim")]
    return [[(glyphs.spelled("─") * width, "dim")], *shown]


# Around it


def _title(seen: Seen, controls: Controls, name: str) -> str:
    devices = _device_lines(seen)
    holders = {line.holder for _, line in flatten(seen.lines) if line.holder and line.kind != "process"}
    parts = [_plural(len(seen.lines), "GPU"), _plural(len(holders), "holder")]
    instances = len(devices) - len(seen.lines)
    if instances:
        parts.insert(1, _plural(instances, "MIG instance"))
    nodes = sorted({line.node for line in seen.lines if line.node})
    where = nodes[0] if len(nodes) == 1 else f"{len(nodes)} nodes" if nodes else name
    simulated = "SIMULATED  " if seen.view.simulated else ""
    return printable(f"podgpu top  {simulated}{where}  {', '.join(parts)}, by {_BY[controls.order]}")


def _trouble(seen: Seen, now: float, width: int, glyphs: Glyphs) -> list[Printed]:
    if seen.error is not None:
        age = f"; the figures are {duration(max(0.0, now - seen.read_at))} old"
        why = fit_start(printable(str(seen.error)), width - len(age), glyphs).rstrip()
        return [[(fit(why + age, width, glyphs), "bad")]]
    shown = _notes(seen)
    more: list[Span] = []
    if len(shown) > _MOST_NOTES:
        hidden = len(shown) - _MOST_NOTES + 1
        shown, more = shown[: _MOST_NOTES - 1], [(f"and {hidden} notes more: podgpu top --once prints them", "dim")]
    return [[(fit_start(printable(text), width, glyphs), style)] for text, style in (*shown, *more)]


def _notes(seen: Seen) -> list[Span]:
    """The worst first. What is wrong with a single GPU stands beneath its line already."""
    of_gpus = {alert.text for alert in seen.view.alerts if alert.uuid}
    styles = {alert.text: "bad" if alert.severity == "broken" else "warn" for alert in seen.view.alerts}
    shown = [(note, styles.get(note, "warn")) for note in seen.notes if note not in of_gpus]
    return sorted(shown, key=lambda note: note[1] != "bad")


def _footer(controls: Controls, width: int, glyphs: Glyphs, lines: int, room: int) -> Printed:
    if controls.typing:
        return [(fit(f"filter: {controls.wanted}_", width, glyphs), "title")]
    place = f"{min(controls.scroll + room, lines)}/{lines}" if lines > room else ""
    wanted = f"filter: {controls.wanted} (Esc clears)  " if controls.wanted else ""
    left = max(0, width - len(place) - 1)
    return [(fit(printable(wanted + _KEYS)[:left], left, glyphs) + " " + place, "dim")]


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
