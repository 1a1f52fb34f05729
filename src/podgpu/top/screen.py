"""The screen as text: handles keys, and computes the lines to draw (title, totals, table or details, notes, keys)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from podgpu.top.details import render_details
from podgpu.top.feed import Seen
from podgpu.top.lines import Line, Order, Row, flatten
from podgpu.top.table import Span, Spans, Table, render_totals
from podgpu.top.text import count_of, fit, fit_start, format_duration, printable

_SORT_KEYS: Mapping[str, Order] = {"g": "gpu", "u": "utilisation", "m": "memory", "p": "power", "i": "idle"}
_STEPS = {"up": -1, "k": -1, "down": 1, "j": 1}
_PAGES = {"page_up": -1, "page_down": 1, " ": 1}
_MAX_FILTER = 200

_HELP = (
    "q          quit",
    "↑ ↓  j k   move the cursor; PgUp, PgDn by a page; Home, End",
    "Enter      details of the GPU; Enter or Esc closes them",
    "u          sort by utilisation",
    "m          sort by memory in use",
    "p          sort by power",
    "i          sort by idle time",
    "g          sort by GPU",
    "/          show only lines whose holder, node or model contains a text; 'broken' finds broken GPUs",
    "Esc        close the details, then clear the filter",
    "h or ?     this help",
    "",
    "Broken GPUs are always first.",
    "IDLE       busy: the holder uses the GPU; 5m02s: it has not used the GPU for this time",
    "–          unknown (not zero)",
)
_KEYS = "q quit  Enter details  / filter  sort: u utilisation  m memory  p power  i idle  g GPU  h help"
_ORDER_NAMES = {"gpu": "GPU", "utilisation": "utilisation", "memory": "memory", "power": "power", "idle": "idle time"}
_FIXED_LINES = 3  # title, header and keys
_MIN_HEIGHT_OF_TOTALS = 8
_MAX_NOTES = 3


# Keys


@dataclass(frozen=True, slots=True)
class Viewport:
    rows: Sequence[Row]  # rows of all lines, visible or not
    height: int  # number of visible lines
    details: int = 0  # number of lines of the details


@dataclass(frozen=True, slots=True)
class Controls:
    """The state that keys change: sort order, filter, cursor, and what is open."""

    order: Order = "gpu"
    wanted: str = ""  # the filter text
    cursor: int = 0
    selected: Row | None = None  # set when the cursor was moved: the cursor follows this row when lines change
    scroll: int = 0
    detailed: bool = False  # True while the details of the selected GPU are shown
    details_scroll: int = 0
    typing: bool = False  # True while the filter is being typed
    helping: bool = False
    ended: bool = False

    def press(self, key: str, viewport: Viewport) -> Controls:
        after = self._type(key) if self.typing else self._command(key, viewport)
        return after.clamp(viewport)

    def clamp(self, viewport: Viewport) -> Controls:
        """Keeps the cursor on a visible line."""
        rows, height = viewport.rows, viewport.height
        cursor = max(0, min(self.cursor, len(rows) - 1))
        if self.selected is not None and rows and rows[cursor] != self.selected and self.selected in rows:
            cursor = rows.index(self.selected)
        lowest, highest = max(0, cursor - height + 1), max(0, min(cursor, len(rows) - height))
        scroll = min(max(self.scroll, lowest), max(lowest, highest))
        details_scroll = max(0, min(self.details_scroll, viewport.details - height))
        return replace(self, cursor=cursor, scroll=scroll, details_scroll=details_scroll)

    def _type(self, key: str) -> Controls:
        if key == "escape":
            return replace(self._to_top(), wanted="", typing=False)
        if key == "enter":
            return replace(self, typing=False)
        if key == "backspace":
            return replace(self._to_top(), wanted=self.wanted[:-1])
        if len(key) == 1 and key.isprintable() and len(self.wanted) < _MAX_FILTER:
            return replace(self._to_top(), wanted=self.wanted + key)
        return self

    def _command(self, key: str, viewport: Viewport) -> Controls:
        if self.helping:
            return replace(self, helping=False, ended=key == "q")
        if key == "enter" or (key == "escape" and self.detailed):
            return replace(self, detailed=not self.detailed, details_scroll=0)
        if key == "escape":
            return replace(self._to_top(), wanted="")
        if key in _SORT_KEYS:
            return replace(self._to_top(), order=_SORT_KEYS[key])
        if key in _STEPS or key in _PAGES or key in ("home", "end"):
            return self._move(key, viewport)
        return replace(self, ended=key in ("q", "Q"), typing=key == "/", helping=key in ("h", "?"))

    def _to_top(self) -> Controls:
        return replace(self, cursor=0, selected=None, scroll=0)

    def _move(self, key: str, viewport: Viewport) -> Controls:
        if self.detailed:
            return replace(self, details_scroll=_target(key, self.details_scroll, viewport.height, viewport.details))
        rows = viewport.rows
        cursor = max(0, min(_target(key, self.cursor, viewport.height, len(rows)), len(rows) - 1))
        return replace(self, cursor=cursor, selected=rows[cursor] if rows else None)


def _target(key: str, now: int, height: int, count: int) -> int:
    if key in _STEPS:
        return now + _STEPS[key]
    if key in _PAGES:
        return now + _PAGES[key] * height
    return 0 if key == "home" else count


# Drawing


@dataclass(frozen=True, slots=True)
class Frame:
    lines: list[Spans]
    controls: Controls
    viewport: Viewport
    selected: str = ""  # UUID of the GPU whose details are shown


@dataclass(frozen=True, slots=True)
class Scene:
    """The input for drawing a frame, except the controls."""

    seen: Seen
    table: Table
    name: str  # name of the source
    now: float  # monotonic time
    size: tuple[int, int]  # columns and lines of the terminal


def draw(scene: Scene, controls: Controls) -> Frame:
    """Computes all lines of the screen. Lines may be longer than the terminal is wide."""
    (width, height), view = scene.size, scene.seen.view
    notes = _notes(scene)
    totals = [render_totals(view.totals, view.currency, width)] if height >= _MIN_HEIGHT_OF_TOTALS else []
    room = max(1, height - _FIXED_LINES - len(totals) - len(notes))
    rows = [line.row for _, line in scene.table.lines]
    controls = controls.clamp(Viewport(rows, room))
    line = _find_slot_line(scene, controls) if controls.detailed else None
    details = render_details(line, scene.seen, width) if line else []
    viewport = Viewport(rows, room, len(details))
    controls = controls.clamp(viewport)
    body = _body(scene, controls, details, room)
    blank: list[Spans] = [[]] * (room - len(body))
    title: Spans = [(_title(scene, controls), "title")]
    footer = _footer(scene, controls, viewport)
    lines = [title, *totals, scene.table.header(), *body, *blank, *notes, footer]
    return Frame(lines, controls, viewport, line.gpu.uuid if line else "")


def _find_slot_line(scene: Scene, controls: Controls) -> Line | None:
    """Returns the line of the GPU or MIG instance at the cursor, without the filter."""
    if not scene.table.lines:
        return None
    line = scene.table.lines[controls.cursor][1]
    slots = (own for _, own in flatten(scene.seen.lines) if own.is_slot)
    return next((own for own in slots if own.row[:3] == line.row[:3]), line)


def _body(scene: Scene, controls: Controls, details: list[Spans], height: int) -> list[Spans]:
    if controls.helping:
        return [[(line, "")] for line in _HELP[:height]]
    if details:
        return details[controls.details_scroll : controls.details_scroll + height]
    rows = scene.table.render(controls.scroll, controls.scroll + height)
    if not rows:
        return [[("no line matches the filter", "dim")]]
    at = controls.cursor - controls.scroll
    rows[at] = [(text, f"cursor {style}".strip()) for text, style in rows[at]]
    return rows


def _title(scene: Scene, controls: Controls) -> str:
    seen = scene.seen
    lines = [line for _, line in flatten(seen.lines)]
    holders = {line.name for line in lines if line.holder and line.kind != "process"}
    instances = sum(line.kind == "instance" for line in lines)
    parts = [count_of(len(seen.lines), "GPU"), count_of(len(holders), "holder")]
    if instances:
        parts.insert(1, count_of(instances, "MIG instance"))
    nodes = sorted({line.node for line in seen.lines if line.node})
    where = nodes[0] if len(nodes) == 1 else f"{len(nodes)} nodes" if nodes else scene.name
    simulated = "SIMULATED  " if seen.view.simulated else ""
    return printable(f"podgpu top  {simulated}{where}  {', '.join(parts)}, by {_ORDER_NAMES[controls.order]}")


def _notes(scene: Scene) -> list[Spans]:
    """Returns the source's error with the age of the figures, or the notes of the view, most serious first."""
    seen, width = scene.seen, scene.size[0]
    if seen.error is not None:
        age = f"; the figures are {format_duration(max(0.0, scene.now - seen.read_at))} old"
        return [[(fit_start(printable(str(seen.error)), width - len(age)).rstrip() + age, "bad")]]
    shown_at_gpu = {alert.text for alert in seen.view.alerts if alert.uuid}
    styles = {alert.text: "bad" if alert.severity == "broken" else "warn" for alert in seen.view.alerts}
    notes: list[Span] = [(note, styles.get(note, "warn")) for note in seen.notes if note not in shown_at_gpu]
    notes.sort(key=lambda note: note[1] != "bad")
    if len(notes) > _MAX_NOTES:
        hidden = len(notes) - _MAX_NOTES + 1
        notes[_MAX_NOTES - 1 :] = [(f"{hidden} more notes: run podgpu top --once to see them", "dim")]
    return [[(fit_start(printable(text), width), style)] for text, style in notes]


def _footer(scene: Scene, controls: Controls, viewport: Viewport) -> Spans:
    if controls.typing:
        return [(f"filter: {controls.wanted}_", "title")]
    count = len(viewport.rows)
    place = f"{min(controls.scroll + viewport.height, count)}/{count}" if count > viewport.height else ""
    wanted = f"filter: {controls.wanted} (Esc clears)  " if controls.wanted else ""
    return [(fit(printable(wanted + _KEYS), max(0, scene.size[0] - len(place) - 1)) + " " + place, "dim")]
