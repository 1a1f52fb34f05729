"""Handles keys and computes the lines of the screen: title, totals, table or details, notes,
keys.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from rich.cells import cell_len

from podgpu.errors import plural
from podgpu.fleet.parts import MPS_REASON
from podgpu.fleet.readings import duration_text
from podgpu.fleet.view import ConditionView, FieldView, GpuDetails, HolderView, InstanceView
from podgpu.model import Workload
from podgpu.past.sqlite import NO_DATA
from podgpu.top.feed import FetchedDetails, Seen
from podgpu.top.lines import Line, Order, Row, arrange, describe_free, flatten, name_of, severity_of
from podgpu.top.table import (
    Span,
    Spans,
    Table,
    draw_sparkline,
    fit,
    fit_start,
    format_condition,
    format_duration,
    format_gib,
    format_idle,
    format_money,
    format_number,
    format_percent,
    printable,
    render_totals,
    shorten_model,
)

_SORT_KEYS: Mapping[str, Order] = {
    "g": "gpu",
    "u": "utilisation",
    "m": "memory",
    "p": "power",
    "i": "idle",
}
_STEPS = {"up": -1, "k": -1, "down": 1, "j": 1}
_PAGES = {"page_up": -1, "page_down": 1, " ": 1}

_HELP = (
    "q          quit",
    "↑ ↓  j k   move the cursor; PgUp, PgDn by a page; Home, End",
    "Enter      details of the GPU; Enter or Esc closes them",
    "u m p i g  sort by utilisation, memory in use, power, idle time, GPU",
    (
        "/          show only lines whose holder, node or model contains a text; 'broken' finds "
        "broken GPUs"
    ),
    "Esc        close the details, then clear the filter",
    "h or ?     this help",
    "",
    "Broken GPUs are always first.",
    "IDLE       busy: the holder uses the GPU; 5m02s: it has not used the GPU for this time",
    "–          unknown (not zero)",
)
_KEYS = (
    "q quit  Enter details  / filter  sort: u utilisation  m memory  p power  i idle  g GPU  h help"
)
_ORDER_NAMES = {
    "gpu": "GPU",
    "utilisation": "utilisation",
    "memory": "memory",
    "power": "power",
    "idle": "idle time",
}
_FIXED_LINES = 3  # title, header and keys
_MIN_HEIGHT_OF_TOTALS = 8
_MAX_NOTES = 3


@dataclass
class Screen:
    """Draws the lines of the terminal. Holds the state that keys change: sort order, filter,
    cursor, open details.
    """

    source: str
    order: Order = "gpu"
    wanted: str = ""  # the filter text
    ended: bool = False
    detailed_uuid: str = ""  # the GPU whose details are shown
    _cursor: int = 0
    _selected: Row | None = (
        None  # the row that the cursor follows; None until the user moves the cursor
    )
    _scroll: int = 0
    _details_scroll: int = 0
    _is_detailed: bool = False
    _is_typing: bool = False
    _is_helping: bool = False
    _rows: list[Row] = field(default_factory=list)  # rows of all lines, visible or not
    _details: list[Spans] = field(default_factory=list)
    _height: int = 1  # number of lines for the table or the details
    _table: Table | None = None  # cached, because moving the cursor does not change it
    _made_for: tuple[object, ...] = ()

    # Keys

    def press(self, key: str) -> None:
        """Handles a key. The cursor moves within the lines that were drawn last."""
        if self._is_typing:
            self._type(key)
        elif self._is_helping:
            self._is_helping, self.ended = False, key == "q"
        elif key == "enter" or (key == "escape" and self._is_detailed):
            self._is_detailed, self._details_scroll = not self._is_detailed, 0
        elif key == "escape":
            self._filter("")
        elif key in _SORT_KEYS:
            self.order = _SORT_KEYS[key]
            self._move_to_top()
        elif key in _STEPS or key in _PAGES or key in ("home", "end"):
            self._move(key)
        else:
            self.ended, self._is_typing, self._is_helping = (
                key in ("q", "Q"),
                key == "/",
                key in ("h", "?"),
            )

    def _type(self, key: str) -> None:
        self._is_typing = key not in ("escape", "enter")
        if key == "escape":
            self._filter("")
        elif key == "backspace":
            self._filter(self.wanted[:-1])
        elif len(key) == 1 and key.isprintable():
            self._filter(self.wanted + key)

    def _filter(self, wanted: str) -> None:
        self.wanted = wanted
        self._move_to_top()

    def _move_to_top(self) -> None:
        self._cursor, self._selected, self._scroll = 0, None, 0

    def _move(self, key: str) -> None:
        now, count = (
            (self._details_scroll, len(self._details))
            if self._is_detailed
            else (self._cursor, len(self._rows))
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
        """Moves the cursor to the selected row, and scrolls so that the cursor is visible."""
        rows, height = self._rows, self._height
        self._cursor = max(0, min(self._cursor, len(rows) - 1))
        if (
            self._selected is not None
            and rows
            and rows[self._cursor] != self._selected
            and self._selected in rows
        ):
            self._cursor = rows.index(self._selected)
        lowest, highest = (
            max(0, self._cursor - height + 1),
            max(0, min(self._cursor, len(rows) - height)),
        )
        self._scroll = min(max(self._scroll, lowest), max(lowest, highest))
        self._details_scroll = max(0, min(self._details_scroll, len(self._details) - height))

    # Drawing

    def draw(self, seen: Seen, size: tuple[int, int], now: float) -> list[Spans]:
        """Returns all lines of the terminal. A line may be longer than the terminal is wide. `now`:
        monotonic time.
        """
        (width, height), view = size, seen.view
        table = self._make_table(seen, width)
        notes = _notes(seen, width, now)
        totals = (
            [render_totals(view.totals, view.currency, width)]
            if height >= _MIN_HEIGHT_OF_TOTALS
            else []
        )
        self._height = max(1, height - _FIXED_LINES - len(totals) - len(notes))
        self._rows = [line.row for _, line in table.lines]
        self._clamp()
        line = table.lines[self._cursor][1] if self._is_detailed and table.lines else None
        self.detailed_uuid = line.gpu.uuid if line else ""
        self._details = render_details(line, seen, width) if line else []
        self._clamp()
        body = self._body(table)
        blank: list[Spans] = [[]] * (self._height - len(body))
        title: Spans = [(_title(seen, self.source, self.order), "title")]
        return [title, *totals, table.header(), *body, *blank, *notes, self._footer(width)]

    def _make_table(self, seen: Seen, width: int) -> Table:
        made_for = (seen.lines, self.order, self.wanted, width)
        if self._table is None or self._made_for != made_for:
            self._made_for = made_for
            self._table = Table(
                arrange(seen.lines, self.order, self.wanted), self.order, width, seen.sparklines
            )
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
        rows[at] = [
            (text, "cursor" if style == "bar" else f"cursor {style}".strip())
            for text, style in rows[at]
        ]
        return rows

    def _footer(self, width: int) -> Spans:
        if self._is_typing:
            return [(f"filter: {self.wanted}_", "title")]
        count = len(self._rows)
        place = f"{min(self._scroll + self._height, count)}/{count}" if count > self._height else ""
        wanted = f"filter: {self.wanted} (Esc clears)  " if self.wanted else ""
        return [
            (fit(printable(wanted + _KEYS), max(0, width - len(place) - 1)) + " " + place, "dim")
        ]


def _title(seen: Seen, source: str, order: Order) -> str:
    lines = [line for _, line in flatten(seen.lines)]
    holders = {line.name for line in lines if line.holder and line.kind != "process"}
    instances = sum(line.kind == "instance" for line in lines)
    parts = [plural(len(seen.lines), "GPU"), plural(len(holders), "holder")]
    if instances:
        parts.insert(1, plural(instances, "MIG instance"))
    nodes = sorted({line.node for line in seen.lines if line.node})
    where = nodes[0] if len(nodes) == 1 else f"{len(nodes)} nodes" if nodes else source
    simulated = "SIMULATED  " if seen.view.simulated else ""
    return printable(
        f"podgpu top  {simulated}{where}  {', '.join(parts)}, by {_ORDER_NAMES[order]}"
    )


def _notes(seen: Seen, width: int, now: float) -> list[Spans]:
    """Returns the error of the last reading. If it succeeded, returns the notes of the view, most
    serious first.
    """
    if seen.error is not None:
        age = f"; the figures are {format_duration(max(0.0, now - seen.read_at))} old"
        return [[(fit_start(printable(str(seen.error)), width - len(age)).rstrip() + age, "bad")]]
    shown_at_gpu = {alert.text for alert in seen.view.alerts if alert.uuid}
    styles = {
        alert.text: "bad" if alert.severity == "broken" else "warn" for alert in seen.view.alerts
    }
    notes: list[Span] = [
        (note, styles.get(note, "warn")) for note in seen.notes if note not in shown_at_gpu
    ]
    notes.sort(key=lambda note: note[1] != "bad")
    if len(notes) > _MAX_NOTES:
        hidden = len(notes) - _MAX_NOTES + 1
        notes[_MAX_NOTES - 1 :] = [
            (f"{hidden} more notes: run podgpu top --once to see them", "dim")
        ]
    return [[(fit_start(printable(text), width), style)] for text, style in notes]


# Details of one GPU: its problems with advice, its holders, and all fields that the server reports

_INDENT = "  "
_MAX_FIELD = 38
_NO_BREAK = "\N{NO-BREAK SPACE}"
_UNITS_NOT_SHOWN = frozenset(
    {"string", "enum", "count", "number", "index", "id", "code", "packed", "bitmask", "binary"}
)


def render_details(line: Line, seen: Seen, width: int) -> list[Spans]:
    """Renders the details of the GPU or MIG instance to which a line belongs."""
    slot, fetched = line.slot, seen.fetched or FetchedDetails(line.gpu.uuid)
    is_fetched = fetched.uuid == line.gpu.uuid
    details = fetched.details if is_fetched else None
    instance = f" {line.model}" if isinstance(slot, InstanceView) else ""
    node = f"  on {line.node}" if line.node else ""
    title = f"GPU {line.number}{instance}  {shorten_model(line.gpu.model)}{node}  {line.gpu.uuid}"
    lines: list[Spans] = [[(printable(title), "title")]]
    for condition in slot.conditions:
        lines += _condition(condition, seen.now, width)
    if slot.absent and not slot.conditions:
        lines += _wrap("no longer present", width, "bad")
    if details is not None:
        lines += _problems(details, width)
    lines += _join(_figures(line, seen), width)
    lines += _sparkline(line, seen, width)
    for holder in slot.holders:
        owner = f", part of {holder.owner.kind} {holder.owner.name}" if holder.owner else ""
        lines += _wrap(f"held by {name_of(holder)}{owner}", width, "title")
        lines += _join(_holder_figures(holder, seen), width, _INDENT)
        lines += _job(holder, fetched, width)
    lines += _waits(slot.holders, width)
    for last in slot.last_holders:
        lines += _wrap(f"last held by {name_of(last)}", width)
        lines += _job(last, fetched, width)
    if not slot.holders and not slot.last_holders:
        lines += _wrap("free" if describe_free(slot) == "-" else describe_free(slot), width)
    if not is_fetched:
        lines += _wrap("fetching details …", width)
    elif fetched.error:
        lines += _wrap(f"details are not available: {fetched.error}", width, "warn")
    if details is not None:
        if details.method:
            is_known = details.method != "mps"
            text = (
                f"usage measured by: {details.method}"
                if is_known
                else f"usage by container: {MPS_REASON}"
            )
            lines += _wrap(text, width, "dim")
        lines += _fields(details.fields or (), width)
    return lines


def _condition(condition: ConditionView, now: float, width: int) -> Iterator[Spans]:
    since = condition.since
    text = format_condition(condition, None if since is None else max(0.0, now - since))
    if since is not None:
        text += f" (since {_format_time(since)})"
    yield from _wrap(text, width, severity_of(condition))
    if condition.do:
        yield from _wrap(f"{_INDENT}do: {condition.do}", width)


def _figures(line: Line, seen: Seen) -> list[str]:
    slot, price = line.slot, line.slot.price_per_hour
    return [
        f"utilisation {format_percent(slot.utilization_ratio)}",
        f"memory {format_gib(slot.memory_used_bytes)} of {format_gib(slot.memory_total_bytes)} GiB",
        f"power {format_number(slot.power_watts, 'W')}",
        f"temperature {format_number(slot.temperature_celsius, 'C')}",
        "" if price is None else f"price {format_money(price, seen.view.currency)}/h",
    ]


def _sparkline(line: Line, seen: Seen, width: int) -> Iterator[Spans]:
    points = seen.sparklines.points.get(line.row[1:3], b"")
    if points.strip(bytes([NO_DATA])):
        label = f"last {duration_text(seen.sparklines.span)} "
        yield [
            (label, "dim"),
            (draw_sparkline(points, min(len(points), max(0, width - len(label)))), "bar"),
        ]


def _holder_figures(holder: HolderView, seen: Seen) -> list[str]:
    since, share, cost = holder.idle_since, holder.share_ratio, holder.cost_per_hour
    idle = format_idle(holder.use, None if since is None else max(0.0, seen.now - since))
    runner = [
        f" ({format_percent(r.ratio)} for {r.text or 'processes outside pods'})"
        for r in holder.waits_for[:1]
    ]
    return [
        f"utilisation {format_percent(holder.utilization_ratio)}",
        f"memory {format_gib(holder.memory_used_bytes)} GiB",
        f"processes {format_number(holder.processes)}",
        idle if idle in ("busy", "idle") else f"idle {idle}",
        f"waited {format_percent(holder.wait_ratio)}{''.join(runner)}" if holder.wait_ratio else "",
        "" if share is None else f"share {format_percent(share)}",
        "" if cost is None else f"costs {format_money(cost, seen.view.currency)}/h",
    ]


def _waits(holders: Iterable[HolderView], width: int) -> Iterator[Spans]:
    """Yields a table of waiting times on a shared GPU: rows are holders that waited, columns are
    holders that ran.
    """
    waiters = [holder for holder in holders if holder.wait_ratio is not None]
    if len(waiters) < 2:
        return
    rows = {
        waiter.text: {run.text: f"{run.seconds:.2f}" for run in waiter.waits_for}
        for waiter in waiters
    }
    names = list(dict.fromkeys([*rows, *(name for runners in rows.values() for name in runners)]))
    yield from _wrap(
        "seconds that each holder waited in the last reading; columns: the holder that ran", width
    )
    lines = [("", [str(number) for number, _ in enumerate(names, 1)])]
    for number, name in enumerate(names, 1):
        cells = (
            [rows[name].get(other, "–" if other == name else "0.00") for other in names]
            if name in rows
            else []
        )
        lines.append((f"{number:>3} {printable(name or 'processes outside pods')}", cells))
    start = min(max(cell_len(text) for text, _ in lines), max(20, width - 6 * len(names)))
    for text, cells in lines:
        yield [
            (
                fit_start(
                    fit(text, start) + "".join(f"{cell:>6}" for cell in cells), width
                ).rstrip(),
                "",
            )
        ]


def _job(holder: Workload, fetched: FetchedDetails, width: int) -> Iterator[Spans]:
    """Yields the total usage of the holder's pod since the pod started."""
    pod = (holder.namespace, holder.pod)
    for job in fetched.jobs:
        if (job.namespace, job.pod) != pod:
            continue
        of_one = " of one GPU" if job.gpus > 1 else ""
        memory = format_gib(None if job.peak_memory_bytes is None else int(job.peak_memory_bytes))
        facts = [
            f"ran for {format_duration(job.duration_seconds)}",
            f"{job.gpu_hours:.2f} GPU-hours",
            f"mean {format_percent(job.mean_use)}",
            f"peak {format_percent(job.peak_use)}",
            f"peak memory{of_one} {memory} GiB",
            ""
            if job.tensor_active_ratio is None
            else f"tensor cores {format_percent(job.tensor_active_ratio)} now",
            "" if job.energy_kwh is None else f"{job.energy_kwh:.2f} kWh",
            "" if job.cost is None else format_money(job.cost, job.currency),
            f"waited {format_duration(job.wait_seconds)}" if job.wait_seconds else "",
            f"throttled {format_duration(job.throttled_seconds)}" if job.throttled_seconds else "",
            f"errors {job.errors}" if job.errors else "",
        ]
        yield from _join(facts, width, _INDENT)
        if job.hint:
            yield from _wrap(f"{_INDENT}{job.hint}", width, "warn")


# Details from the server


def _problems(details: GpuDetails, width: int) -> Iterator[Spans]:
    for xid in details.xids or ():
        when = "" if xid.at is None else f"at {_format_time(xid.at)}"
        parts = filter(None, [f"XID {xid.xid}", xid.class_ and f"({xid.class_})", when])
        yield from _wrap(" ".join(parts) + (f": {xid.says}" if xid.says else ""), width, "warn")
    for source in details.sources:
        if not source.ok:
            reason = source.message or source.error or "does not respond"
            yield from _wrap(f"source {source.source}: {reason}", width, "warn")


def _fields(fields: Iterable[FieldView], width: int) -> Iterator[Spans]:
    texts = [printable(f"{field.name} {_format_value(field)}") for field in fields]
    cell = min(max(map(cell_len, texts), default=0), max(_MAX_FIELD, width // 2 - 2))
    count = max(1, (width + 2) // (cell + 2))
    for start in range(0, len(texts), count):
        yield [
            ("  ".join(fit(text, min(cell, width)) for text in texts[start : start + count]), "")
        ]


def _format_value(field: FieldView) -> str:
    value = field.value
    if field.unit == "bool":
        return "no" if value in ("", "0", "False", 0) else "yes"
    if field.unit == "packed" and "CAPABILITY" in field.name and isinstance(value, int):
        return f"{value >> 16}.{value & 0xFFFF}"
    text = (
        f"{value:g}"
        if isinstance(value, float) and not value.is_integer()
        else str(value).removesuffix(".0")
    )
    return text if field.unit in _UNITS_NOT_SHOWN else f"{text} {field.unit}".rstrip()


# Lines of text


def _wrap(text: str, width: int, style: str = "") -> list[Spans]:
    indent = _INDENT * (2 if text.startswith(_INDENT) else 1)
    lines = textwrap.wrap(
        printable(text), max(1, width), subsequent_indent=indent if width > 20 else ""
    )
    return [[(line, style)] for line in lines]


def _join(facts: Iterable[str], width: int, indent: str = "") -> list[Spans]:
    """Puts as many facts on each line as fit. Never breaks a line within a fact. Skips empty
    facts.
    """
    text = "   ".join(printable(fact).replace(" ", _NO_BREAK) for fact in facts if fact)
    lines = textwrap.wrap(
        text, max(1, width), initial_indent=indent, subsequent_indent=indent or _INDENT
    )
    return [[(line.replace(_NO_BREAK, " "), "")] for line in lines]


def _format_time(at: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return f"{at:.0f}"
