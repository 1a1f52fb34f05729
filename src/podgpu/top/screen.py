"""The screen as text: handles keys, and computes the lines to draw (title, totals, table, details, notes, key help)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from podgpu.top.details import Subject, render_details
from podgpu.top.feed import FetchedDetails, Seen
from podgpu.top.lines import Order, Row, arrange, flatten
from podgpu.top.table import Span, Spans, Table, make_table, render_totals
from podgpu.top.text import Glyphs, count_of, fit, fit_start, format_duration, printable

ORDERS: tuple[Order, ...] = get_args(Order)
Pane = Literal["closed", "half", "full"]
_SORT_KEYS: Mapping[str, Order] = {"g": "gpu", "u": "utilisation", "m": "memory", "p": "power", "i": "idle"}
_STEPS = {"up": -1, "k": -1, "down": 1, "j": 1}
_PAGES = {"page_up": -1, "page_down": 1, " ": 1}
_NEXT_PANE: Mapping[Pane, Pane] = {"closed": "half", "half": "full", "full": "closed"}
_MAX_FILTER = 200

_HELP = (
    "q          quit",
    "↑ ↓  j k   move the cursor; PgUp, PgDn by a page; Home, End",
    "Enter      details of the GPU; press again for full screen; Esc closes them",
    "u          sort by utilisation",
    "m          sort by memory in use",
    "p          sort by power",
    "i          sort by idle time",
    "g          sort by GPU",
    "/          show only lines whose holder, node or model contains a text; 'broken' finds broken GPUs",
    "Esc        close the details, then clear the filter",
    "h          this help",
    "",
    "Broken GPUs are always first.",
    "IDLE       busy: the holder uses the GPU; 5m02s: it has not used the GPU for this time",
    "–          unknown (not zero)",
)
_KEYS = "q quit  Enter details  / filter  sort: u utilisation  m memory  p power  i idle  g GPU  h help"
_ORDER_NAMES = {"gpu": "GPU", "utilisation": "utilisation", "memory": "memory", "power": "power", "idle": "idle time"}
_FIXED_LINES = 3  # title, header and key help
_MIN_HEIGHT_OF_TOTALS = 8
_MIN_PANE = 4
_MAX_NOTES = 3


# Keys


@dataclass(frozen=True, slots=True)
class Viewport:
    rows: Sequence[Row]  # rows of all lines, visible or not
    height: int  # number of visible lines
    details: int = 0  # number of lines of the full-screen details


@dataclass(frozen=True, slots=True)
class Controls:
    """The state that keys change: sort order, filter, cursor, and open panes."""

    order: Order = "gpu"
    wanted: str = ""  # the filter text
    cursor: int = 0
    selected: Row | None = None  # set when the cursor was moved: the cursor follows this row when lines change
    scroll: int = 0
    pane: Pane = "closed"
    pane_scroll: int = 0
    typing: bool = False  # True while the filter is being typed
    helping: bool = False
    ended: bool = False

    def press(self, key: str, viewport: Viewport) -> Controls:
        after = self._type(key) if self.typing else self._command(key, viewport)
        return after.clamp(viewport)

    def clamp(self, viewport: Viewport) -> Controls:
        """Keeps the cursor on a visible line."""
        count, height = len(viewport.rows), viewport.height
        cursor = self._find_cursor(viewport.rows)
        lowest, highest = max(0, cursor - height + 1), max(0, min(cursor, count - height))
        scroll = min(max(self.scroll, lowest), max(lowest, highest))
        pane_scroll = max(0, min(self.pane_scroll, viewport.details - height))
        return replace(self, cursor=cursor, scroll=scroll, pane_scroll=pane_scroll)

    def _find_cursor(self, rows: Sequence[Row]) -> int:
        last = len(rows) - 1
        if self.selected is not None and not (0 <= self.cursor <= last and rows[self.cursor] == self.selected):
            place = next((at for at, row in enumerate(rows) if row == self.selected), None)
            if place is not None:
                return place
        return max(0, min(self.cursor, last))

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
        if key == "escape" and self.pane != "closed":
            return replace(self, pane="closed", pane_scroll=0)
        if key == "escape":
            return replace(self._to_top(), wanted="")
        if key == "enter":
            return replace(self, pane=_NEXT_PANE[self.pane], pane_scroll=0)
        if key in _SORT_KEYS:
            return replace(self._to_top(), order=_SORT_KEYS[key])
        if key in _STEPS or key in _PAGES or key in ("home", "end"):
            return self._move(key, viewport)
        return replace(self, ended=key in ("q", "Q"), typing=key == "/", helping=key in ("h", "?"))

    def _to_top(self) -> Controls:
        return replace(self, cursor=0, selected=None, scroll=0)

    def _move(self, key: str, viewport: Viewport) -> Controls:
        if self.pane == "full":
            return replace(self, pane_scroll=_target(key, self.pane_scroll, viewport.height, viewport.details))
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


FetchDetails = Callable[[str], FetchedDetails | None]
"""Returns the cached details of the GPU with this UUID, or None if the source has no API."""


@dataclass(frozen=True, slots=True)
class Frame:
    lines: list[Spans]
    controls: Controls
    viewport: Viewport


@dataclass(frozen=True, slots=True)
class Scene:
    """The input for drawing a frame, except the controls."""

    seen: Seen
    table: Table
    name: str  # name of the source
    now: float  # monotonic time
    size: tuple[int, int]  # columns and lines of the terminal
    glyphs: Glyphs
    fetch: FetchDetails = lambda _uuid: None


def make_live_table(seen: Seen, controls: Controls, width: int, glyphs: Glyphs) -> Table:
    lines = arrange(seen.lines, controls.order, controls.wanted)
    with_margin = width if glyphs.blocks else max(1, width - 1)
    return make_table(lines, controls.order, glyphs, with_margin, seen.sparklines)


def draw(scene: Scene, controls: Controls) -> Frame:
    width, height = scene.size
    glyphs, view = scene.glyphs, scene.seen.view
    notes = _notes(scene)
    totals = [render_totals(view.totals, view.currency, width, glyphs)] if height >= _MIN_HEIGHT_OF_TOTALS else []
    room = max(1, height - _FIXED_LINES - len(totals) - len(notes))
    rows = scene.table.rows
    controls = controls.clamp(Viewport(rows, room))
    details = _details(scene, controls)
    pane = _pane(details, controls, room, scene)
    viewport = Viewport(rows, max(1, room - len(pane)), len(details))
    controls = controls.clamp(viewport)
    body = _body(scene, controls, details, viewport.height)
    blank: list[Spans] = [[]] * (viewport.height - len(body))
    title: Spans = [(fit(_title(scene, controls), width, glyphs), "title")]
    header = _margin(glyphs, " ", "header") + scene.table.header()
    footer = _footer(scene, controls, viewport)
    return Frame([title, *totals, header, *body, *blank, *pane, *notes, footer], controls, viewport)


def _body(scene: Scene, controls: Controls, details: list[Spans], height: int) -> list[Spans]:
    width, glyphs = scene.size[0], scene.glyphs
    if controls.helping:
        return [[(fit(glyphs.replace_in(line), width, glyphs), "")] for line in _HELP[:height]]
    if controls.pane == "full":
        return details[controls.pane_scroll : controls.pane_scroll + height]
    rows = scene.table.render(controls.scroll, controls.scroll + height)
    if not rows:
        return [[(fit("no line matches the filter", width, glyphs), "dim")]]
    return [_mark(row, at == controls.cursor, glyphs) for at, row in enumerate(rows, start=controls.scroll)]


def _mark(row: Spans, has_cursor: bool, glyphs: Glyphs) -> Spans:
    """Shows the cursor in reverse video, or as `>` without colours."""
    styled = [(text, f"cursor {style}".strip()) for text, style in row] if has_cursor else row
    return _margin(glyphs, ">" if has_cursor else " ", "") + styled


def _margin(glyphs: Glyphs, text: str, style: str) -> Spans:
    return [] if glyphs.blocks else [(text, style)]


def _details(scene: Scene, controls: Controls) -> list[Spans]:
    if controls.pane == "closed" or not scene.table.lines:
        return []
    line = scene.table.lines[controls.cursor][1]
    seen = scene.seen
    slots = (own for _, own in flatten(seen.lines) if own.is_slot)
    slot_line = next((own for own in slots if own.row[:3] == line.row[:3]), line)
    fetched = scene.fetch(line.gpu.uuid)
    subject = Subject(slot_line, seen.now, seen.view.currency, seen.sparklines, fetched)
    return render_details(subject, scene.size[0], scene.glyphs)


def _pane(details: list[Spans], controls: Controls, room: int, scene: Scene) -> list[Spans]:
    """Returns the details pane, which uses at most half of the screen."""
    if controls.pane != "half" or controls.helping or room < 2 * _MIN_PANE:
        return []
    width = scene.size[0]
    height = min(len(details) + 1, max(_MIN_PANE, room // 2))
    shown = details[: height - 1]
    if len(details) > len(shown):
        shown[-1] = [(f"{len(details) - len(shown) + 1} more lines: press Enter"[:width], "dim")]
    return [[(scene.glyphs.replace_in("─") * width, "dim")], *shown]


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
    seen, width, glyphs = scene.seen, scene.size[0], scene.glyphs
    if seen.error is not None:
        age = f"; the figures are {format_duration(max(0.0, scene.now - seen.read_at))} old"
        reason = fit_start(printable(str(seen.error)), width - len(age), glyphs).rstrip()
        return [[(fit(reason + age, width, glyphs), "bad")]]
    shown_at_gpu = {alert.text for alert in seen.view.alerts if alert.uuid}
    styles = {alert.text: "bad" if alert.severity == "broken" else "warn" for alert in seen.view.alerts}
    notes: list[Span] = [(note, styles.get(note, "warn")) for note in seen.notes if note not in shown_at_gpu]
    notes.sort(key=lambda note: note[1] != "bad")
    if len(notes) > _MAX_NOTES:
        hidden = len(notes) - _MAX_NOTES + 1
        notes[_MAX_NOTES - 1 :] = [(f"{hidden} more notes: run podgpu top --once to see them", "dim")]
    return [[(fit_start(printable(text), width, glyphs), style)] for text, style in notes]


def _footer(scene: Scene, controls: Controls, viewport: Viewport) -> Spans:
    width, glyphs = scene.size[0], scene.glyphs
    if controls.typing:
        return [(fit(f"filter: {controls.wanted}_", width, glyphs), "title")]
    count = len(viewport.rows)
    place = f"{min(controls.scroll + viewport.height, count)}/{count}" if count > viewport.height else ""
    wanted = f"filter: {controls.wanted} (Esc clears)  " if controls.wanted else ""
    left = max(0, width - len(place) - 1)
    return [(fit(printable(wanted + _KEYS)[:left], left, glyphs) + " " + place, "dim")]
