"""The screen as text: handles keys, and computes the lines to draw (title, totals, table or details, notes, keys)."""

from __future__ import annotations

from collections.abc import Mapping

from podgpu.top.details import render_details
from podgpu.top.lines import Order, Row, arrange, flatten
from podgpu.top.source import Seen
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


class Screen:
    """The state that keys change: sort order, filter, cursor, and what is open. Draws the lines of the terminal."""

    def __init__(self, source: str, order: Order = "gpu", wanted: str = "") -> None:
        self.ended = False
        self.detailed_uuid = ""  # the GPU whose details are shown
        self._source = source
        self._order: Order = order
        self._wanted = wanted  # the filter text
        self._cursor = 0
        self._selected: Row | None = None  # set when the cursor was moved: the cursor follows this row if lines change
        self._scroll = 0
        self._details_scroll = 0
        self._is_detailed = False
        self._is_typing = False
        self._is_helping = False
        self._rows: list[Row] = []  # rows of all lines, visible or not
        self._details: list[Spans] = []
        self._height = 1  # number of lines for the table or the details
        self._table: Table | None = None  # cached, because moving the cursor does not change it
        self._made_for: tuple[object, ...] = ()

    # Keys

    def press(self, key: str) -> None:
        """Handles a key. The lines that were drawn last determine where the cursor can move."""
        if self._is_typing:
            self._type(key)
        elif self._is_helping:
            self._is_helping, self.ended = False, key == "q"
        elif key == "enter" or (key == "escape" and self._is_detailed):
            self._is_detailed, self._details_scroll = not self._is_detailed, 0
        elif key == "escape":
            self._filter("")
        elif key in _SORT_KEYS:
            self._order = _SORT_KEYS[key]
            self._move_to_top()
        elif key in _STEPS or key in _PAGES or key in ("home", "end"):
            self._move(key)
        else:
            self.ended, self._is_typing, self._is_helping = key in ("q", "Q"), key == "/", key in ("h", "?")

    def _type(self, key: str) -> None:
        self._is_typing = key not in ("escape", "enter")
        if key == "escape":
            self._filter("")
        elif key == "backspace":
            self._filter(self._wanted[:-1])
        elif len(key) == 1 and key.isprintable() and len(self._wanted) < _MAX_FILTER:
            self._filter(self._wanted + key)

    def _filter(self, wanted: str) -> None:
        self._wanted = wanted
        self._move_to_top()

    def _move_to_top(self) -> None:
        self._cursor, self._selected, self._scroll = 0, None, 0

    def _move(self, key: str) -> None:
        now, count = (
            (self._details_scroll, len(self._details)) if self._is_detailed else (self._cursor, len(self._rows))
        )
        if key in _STEPS:
            target = now + _STEPS[key]
        elif key in _PAGES:
            target = now + _PAGES[key] * self._height
        else:
            target = 0 if key == "home" else count
        target = max(0, min(target, count - 1))
        if self._is_detailed:
            self._details_scroll = target
        else:
            self._cursor, self._selected = target, self._rows[target] if self._rows else None

    def _clamp(self) -> None:
        """Keeps the cursor on its row and on a visible line."""
        rows, height = self._rows, self._height
        self._cursor = max(0, min(self._cursor, len(rows) - 1))
        if self._selected is not None and rows and rows[self._cursor] != self._selected and self._selected in rows:
            self._cursor = rows.index(self._selected)
        lowest, highest = max(0, self._cursor - height + 1), max(0, min(self._cursor, len(rows) - height))
        self._scroll = min(max(self._scroll, lowest), max(lowest, highest))
        self._details_scroll = max(0, min(self._details_scroll, len(self._details) - height))

    # Drawing

    def draw(self, seen: Seen, size: tuple[int, int], now: float) -> list[Spans]:
        """Returns all lines of the terminal, which may be longer than it is wide. `now` is monotonic time."""
        (width, height), view = size, seen.view
        table = self._make_table(seen, width)
        notes = _notes(seen, width, now)
        totals = [render_totals(view.totals, view.currency, width)] if height >= _MIN_HEIGHT_OF_TOTALS else []
        self._height = max(1, height - _FIXED_LINES - len(totals) - len(notes))
        self._rows = [line.row for _, line in table.lines]
        self._clamp()
        line = table.lines[self._cursor][1] if self._is_detailed and table.lines else None
        self.detailed_uuid = line.gpu.uuid if line else ""
        self._details = render_details(line, seen, width) if line else []
        self._clamp()
        body = self._body(table)
        blank: list[Spans] = [[]] * (self._height - len(body))
        title: Spans = [(_title(seen, self._source, self._order), "title")]
        return [title, *totals, table.header(), *body, *blank, *notes, self._footer(width)]

    def _make_table(self, seen: Seen, width: int) -> Table:
        made_for = (seen.lines, self._order, self._wanted, width)
        if self._table is None or self._made_for != made_for:
            self._made_for = made_for
            self._table = Table(arrange(seen.lines, self._order, self._wanted), self._order, width, seen.sparklines)
        self._table.sparklines = seen.sparklines
        return self._table

    def _body(self, table: Table) -> list[Spans]:
        if self._is_helping:
            return [[(line, "")] for line in _HELP[: self._height]]
        if self._details:
            return self._details[self._details_scroll : self._details_scroll + self._height]
        rows = table.render(self._scroll, self._scroll + self._height)
        if not rows:
            return [[("no line matches the filter", "dim")]]
        at = self._cursor - self._scroll
        rows[at] = [(text, "cursor" if style == "bar" else f"cursor {style}".strip()) for text, style in rows[at]]
        return rows

    def _footer(self, width: int) -> Spans:
        if self._is_typing:
            return [(f"filter: {self._wanted}_", "title")]
        count = len(self._rows)
        place = f"{min(self._scroll + self._height, count)}/{count}" if count > self._height else ""
        wanted = f"filter: {self._wanted} (Esc clears)  " if self._wanted else ""
        return [(fit(printable(wanted + _KEYS), max(0, width - len(place) - 1)) + " " + place, "dim")]


def _title(seen: Seen, source: str, order: Order) -> str:
    lines = [line for _, line in flatten(seen.lines)]
    holders = {line.name for line in lines if line.holder and line.kind != "process"}
    instances = sum(line.kind == "instance" for line in lines)
    parts = [count_of(len(seen.lines), "GPU"), count_of(len(holders), "holder")]
    if instances:
        parts.insert(1, count_of(instances, "MIG instance"))
    nodes = sorted({line.node for line in seen.lines if line.node})
    where = nodes[0] if len(nodes) == 1 else f"{len(nodes)} nodes" if nodes else source
    simulated = "SIMULATED  " if seen.view.simulated else ""
    return printable(f"podgpu top  {simulated}{where}  {', '.join(parts)}, by {_ORDER_NAMES[order]}")


def _notes(seen: Seen, width: int, now: float) -> list[Spans]:
    """Returns the source's error with the age of the figures, or the notes of the view, most serious first."""
    if seen.error is not None:
        age = f"; the figures are {format_duration(max(0.0, now - seen.read_at))} old"
        return [[(fit_start(printable(str(seen.error)), width - len(age)).rstrip() + age, "bad")]]
    shown_at_gpu = {alert.text for alert in seen.view.alerts if alert.uuid}
    styles = {alert.text: "bad" if alert.severity == "broken" else "warn" for alert in seen.view.alerts}
    notes: list[Span] = [(note, styles.get(note, "warn")) for note in seen.notes if note not in shown_at_gpu]
    notes.sort(key=lambda note: note[1] != "bad")
    if len(notes) > _MAX_NOTES:
        hidden = len(notes) - _MAX_NOTES + 1
        notes[_MAX_NOTES - 1 :] = [(f"{hidden} more notes: run podgpu top --once to see them", "dim")]
    return [[(fit_start(printable(text), width), style)] for text, style in notes]
