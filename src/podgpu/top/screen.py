"""Handles keys, and renders the screen: title, totals, table or details, notes, keys."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.cells import cell_len

from podgpu.errors import plural
from podgpu.fleet.parts import MPS_REASON
from podgpu.fleet.settings import duration_text
from podgpu.fleet.view import ConditionView, FieldView, GpuDetails, HolderView, InstanceView
from podgpu.model import Workload
from podgpu.money import write_money
from podgpu.past.gpu_history import NO_DATA
from podgpu.past.job import JobSummary
from podgpu.top.feed import FetchedDetails, Seen
from podgpu.top.lines import (
    Line,
    LineKey,
    Order,
    SlotOfView,
    arrange,
    describe_free,
    flatten,
    name_of,
    seconds_since,
    severity_of,
)
from podgpu.top.table import (
    Spans,
    Table,
    draw_sparkline,
    fit,
    fit_start,
    format_condition,
    format_duration,
    format_gib,
    format_idle,
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
        "/          show only lines whose holder, node or model contains a text; "
        "'broken' finds broken GPUs"
    ),
    "Esc        close the details, then clear the filter",
    "h or ?     this help",
    "",
    "Broken GPUs are always first.",
    "IDLE       0s: the holder uses the GPU; 5m02s: it has not used the GPU for this time",
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
_MIN_HEIGHT_OF_TOTALS = 8
_MAX_NOTES = 3
# Of the table of waits, in characters.
_MIN_WIDTH_OF_NAMES = 20
_WAIT_WIDTH = 6


class _Layout(NamedTuple):
    table: Table
    head: list[Spans]  # the lines above the rows
    notes: list[Spans]  # the lines below


@dataclass
class _Cursor:
    position: int = 0  # of the line
    # The line that the cursor follows when readings move it. None until the user moves the cursor.
    selected: LineKey | None = None
    scroll: int = 0  # position of the first visible line

    def follow(self, keys: Sequence[LineKey], height: int) -> None:
        """Moves to the selected line, and scrolls so that the cursor is visible."""
        last = len(keys) - 1
        self.position = _clamp(self.position, last)

        # Usually the line is where it was, so a search is not needed.
        is_there = bool(keys) and keys[self.position] == self.selected
        if not is_there and self.selected in keys:
            self.position = keys.index(self.selected)

        # With these, the cursor is in the last, or in the first visible line.
        lowest_scroll = max(0, self.position - height + 1)
        highest_scroll = _clamp(self.position, last - height + 1)
        self.scroll = max(lowest_scroll, min(self.scroll, highest_scroll))


@dataclass
class Screen:
    """Draws the lines of the terminal.

    Holds the state that keys change: sort order, filter, cursor, open details.
    """

    source: str
    order: Order = "gpu"
    wanted: str = ""  # the filter text
    ended: bool = False
    detailed_uuid: str = ""  # the GPU whose details are shown
    _cursor: _Cursor = field(default_factory=_Cursor)
    _details_scroll: int = 0
    _is_detailed: bool = False
    _is_typing: bool = False
    _is_helping: bool = False
    _keys: list[LineKey] = field(default_factory=list)  # of all lines, visible or not
    _details: list[Spans] = field(default_factory=list)
    _height: int = 1  # number of lines for the table or the details
    _table: Table | None = None  # cached, because moving the cursor does not change it
    _made_for: tuple[object, ...] = ()  # what the cached table depends on

    # Keys

    def press(self, key: str) -> None:
        """Handles a key. The cursor moves within the lines that were laid out last."""
        if self._is_typing:
            self._type(key)
        elif self._is_helping:
            self._is_helping = False
            self.ended = key == "q"
        elif key == "enter" or (key == "escape" and self._is_detailed):
            self._is_detailed = not self._is_detailed
            self._details_scroll = 0
        elif key == "escape":
            self._filter("")
        elif key in _SORT_KEYS:
            self.order = _SORT_KEYS[key]
            self._cursor = _Cursor()
        elif key in _STEPS or key in _PAGES or key in ("home", "end"):
            self._move(key)
        elif key in ("q", "Q"):
            self.ended = True
        elif key == "/":
            self._is_typing = True
        elif key in ("h", "?"):
            self._is_helping = True

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
        self._cursor = _Cursor()

    def _move(self, key: str) -> None:
        if self._is_detailed:
            count = len(self._details)
            self._details_scroll = self._find_target(key, self._details_scroll, count)
        elif self._keys:
            cursor = self._cursor
            cursor.position = self._find_target(key, cursor.position, len(self._keys))
            cursor.selected = self._keys[cursor.position]

    def _find_target(self, key: str, position: int, count: int) -> int:
        """Returns the position to which the key moves. `count`: number of positions."""
        if key in _STEPS:
            target = position + _STEPS[key]
        elif key in _PAGES:
            target = position + _PAGES[key] * self._height
        else:
            target = 0 if key == "home" else count
        return _clamp(target, count - 1)

    # Drawing

    def draw(self, seen: Seen, size: tuple[int, int], now: float) -> list[Spans]:
        """Returns all lines of the terminal.

        A line may be longer than the terminal is wide. `now` is monotonic time.
        """
        layout = self.lay_out(seen, size, now)
        body = self._render_body(layout.table)
        while len(body) < self._height:
            body.append([])

        lines = layout.head + body + layout.notes
        lines.append(self._render_footer(size[0]))
        return lines

    def lay_out(self, seen: Seen, size: tuple[int, int], now: float) -> _Layout:
        """Updates the rows, the cursor and the details, after a key or a reading."""
        width, height = size
        title = _make_title(seen, self.source, self.order)
        head: list[Spans] = [[(title, "title")]]
        if height >= _MIN_HEIGHT_OF_TOTALS:
            head.append(render_totals(seen.view.totals, seen.view.currency, width))

        table = self._make_table(seen, width)
        head.append(table.header())
        notes = _render_notes(seen, width, now)

        footer = 1
        self._height = max(1, height - len(head) - len(notes) - footer)
        self._keys = [line.key for _, line in table.lines]
        self._cursor.follow(self._keys, self._height)
        self._update_details(table, seen, width)
        return _Layout(table, head, notes)

    def _make_table(self, seen: Seen, width: int) -> Table:
        made_for = (seen.lines, self.order, self.wanted, width)
        if self._table is None or self._made_for != made_for:
            self._made_for = made_for
            lines = arrange(seen.lines, self.order, self.wanted)
            self._table = Table(lines, self.order, width, seen.sparklines)

        self._table.sparklines = seen.sparklines
        return self._table

    def _update_details(self, table: Table, seen: Seen, width: int) -> None:
        self.detailed_uuid = ""
        self._details = []
        if self._is_detailed and table.lines:
            _, line = table.lines[self._cursor.position]
            self.detailed_uuid = line.gpu.uuid
            self._details = render_details(line, seen, width)

        self._details_scroll = _clamp(self._details_scroll, len(self._details) - self._height)

    def _render_body(self, table: Table) -> list[Spans]:
        if self._is_helping:
            return [[(line, "")] for line in _HELP[: self._height]]
        if self._details:
            end = self._details_scroll + self._height
            return self._details[self._details_scroll : end]

        scroll = self._cursor.scroll
        rows = table.render(scroll, scroll + self._height)
        if not rows:
            return [[("no line matches the filter", "dim")]]

        cursor_row = self._cursor.position - scroll
        marked: Spans = []
        for text, style in rows[cursor_row]:
            # The cursor reverses colours. A bar of another colour would hide it.
            style = style.replace("bar", "")
            marked.append((text, f"cursor {style}".rstrip()))
        rows[cursor_row] = marked
        return rows

    def _render_footer(self, width: int) -> Spans:
        if self._is_typing:
            return [(f"filter: {self.wanted}_", "title")]

        keys = _KEYS
        if self.wanted:
            keys = printable(f"filter: {self.wanted} (Esc clears)  {_KEYS}")

        progress = ""
        count = len(self._keys)
        if count > self._height:
            last_visible = min(self._cursor.scroll + self._height, count)
            progress = f"{last_visible}/{count}"

        room = width - len(progress) - 1
        return [(f"{fit(keys, room)} {progress}", "dim")]


def _clamp(number: int, highest: int) -> int:
    return max(0, min(number, highest))


def _name_nodes(lines: Iterable[Line]) -> str:
    """Returns the name of the node, or how many there are. Empty if they have no names."""
    nodes = {line.node for line in lines if line.node}
    if not nodes:
        return ""
    if len(nodes) > 1:
        return f"{len(nodes)} nodes"
    return nodes.pop()


def _make_title(seen: Seen, source: str, order: Order) -> str:
    holders = set()
    instances = 0
    for _, line in flatten(seen.lines):
        if line.kind == "instance":
            instances += 1
        if line.holder is not None and line.kind != "process":
            holders.add(line.name)

    counts = plural(len(seen.lines), "GPU")
    if instances:
        counts += f", {plural(instances, 'MIG instance')}"
    counts += f", {plural(len(holders), 'holder')}"

    simulated = "SIMULATED  " if seen.view.simulated else ""
    where = _name_nodes(seen.lines) or source
    title = f"podgpu top  {simulated}{where}  {counts}, by {_ORDER_NAMES[order]}"
    return printable(title)


def _render_notes(seen: Seen, width: int, now: float) -> list[Spans]:
    """Returns the error of the last reading.

    If it succeeded, returns the notes of the view, most serious first.
    """
    if seen.error is not None:
        seconds = max(0.0, now - seen.read_at)
        age = f"; the figures are {format_duration(seconds)} old"
        error = fit_start(printable(str(seen.error)), width - len(age))
        return [[(error.rstrip() + age, "bad")]]

    notes = _list_notes(seen)
    shown = notes
    if len(notes) > _MAX_NOTES:
        shown = notes[: _MAX_NOTES - 1]
        hidden = len(notes) - len(shown)
        shown.append((f"{hidden} more notes: run podgpu top --once to see them", "dim"))

    return [[(fit_start(printable(text), width), style)] for text, style in shown]


def _list_notes(seen: Seen) -> Spans:
    """Returns the notes that are not shown at a GPU, those of broken GPUs first."""
    shown_at_gpu = {alert.text for alert in seen.view.alerts if alert.uuid}
    broken = {alert.text for alert in seen.view.alerts if alert.severity == "broken"}

    serious: Spans = []
    others: Spans = []
    for note in seen.notes:
        if note in shown_at_gpu:
            continue
        if note in broken:
            serious.append((note, "bad"))
        else:
            others.append((note, "warn"))

    return serious + others


# Details of one GPU: its problems with advice, its holders, and all fields that the server reports

_INDENT = "  "
_MIN_WIDTH_TO_INDENT = 20
_MAX_FIELD = 38
_GAP = "  "  # between columns
_OUTSIDE_PODS = "processes outside pods"
_NO_BREAK = "\N{NO-BREAK SPACE}"
# Units of numbers that have no unit for people.
_UNITS_NOT_SHOWN = frozenset(
    {"string", "enum", "count", "number", "index", "id", "code", "packed", "bitmask", "binary"}
)


class _Paragraphs:
    """Collects lines of text that are at most `width` columns wide."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.lines: list[Spans] = []

    def add(self, text: str, style: str = "") -> None:
        # A narrow terminal has no room for it.
        indent = ""
        if self.width > _MIN_WIDTH_TO_INDENT:
            indent = _INDENT
            if text.startswith(_INDENT):
                indent = _INDENT * 2

        wrapped = textwrap.wrap(printable(text), max(1, self.width), subsequent_indent=indent)
        self.lines += [[(line, style)] for line in wrapped]

    def add_facts(self, facts: Iterable[str], indent: str = "") -> None:
        """Puts as many facts on each line as fit. Never breaks a line within a fact."""
        unbroken = [printable(fact).replace(" ", _NO_BREAK) for fact in facts]
        wrapped = textwrap.wrap(
            "   ".join(unbroken),
            max(1, self.width),
            initial_indent=indent,
            subsequent_indent=indent or _INDENT,
        )
        for line in wrapped:
            text = line.replace(_NO_BREAK, " ")
            self.lines.append([(text, "")])


def render_details(line: Line, seen: Seen, width: int) -> list[Spans]:
    """Renders the details of the GPU or MIG instance to which a line belongs."""
    slot = line.slot
    fetched = seen.fetched or FetchedDetails(line.gpu.uuid)
    is_fetched = fetched.uuid == line.gpu.uuid
    details = fetched.details if is_fetched else None

    text = _Paragraphs(width)
    text.lines.append([(_make_details_title(line), "title")])
    for condition in slot.conditions:
        _add_condition(text, condition, seen.taken_at)
    if slot.absent and not slot.conditions:
        text.add("no longer present", "bad")
    if details is not None:
        _add_problems(text, details)
    _add_figures(text, line, seen)

    _add_holders(text, slot, seen, fetched)
    if not is_fetched:
        text.add("fetching details …")
    elif fetched.error:
        text.add(f"details are not available: {fetched.error}", "warn")
    if details is not None:
        _add_method(text, details)
        _add_fields(text, details.fields or ())
    return text.lines


def _make_details_title(line: Line) -> str:
    title = f"GPU {line.number}"
    if isinstance(line.slot, InstanceView):
        title += f" {line.model}"
    title += f"  {shorten_model(line.gpu.model)}"
    if line.node:
        title += f"  on {line.node}"
    return printable(f"{title}  {line.gpu.uuid}")


def _add_condition(text: _Paragraphs, condition: ConditionView, now: float) -> None:
    age = seconds_since(condition.since, now)
    problem = format_condition(condition, age)
    if condition.since is not None:
        problem += f" (since {_format_time(condition.since)})"
    text.add(problem, severity_of(condition))
    if condition.do:
        text.add(f"{_INDENT}do: {condition.do}")


def _add_figures(text: _Paragraphs, line: Line, seen: Seen) -> None:
    slot = line.slot
    used = format_gib(slot.memory_used_bytes)
    total = format_gib(slot.memory_total_bytes)
    facts = [
        f"utilisation {format_percent(slot.utilization_ratio)}",
        f"memory {used} of {total} GiB",
        f"power {format_number(slot.power_watts, 'W')}",
        f"temperature {format_number(slot.temperature_celsius, 'C')}",
    ]

    if slot.price_per_hour is not None:
        price = write_money(slot.price_per_hour, seen.view.currency)
        facts.append(f"price {price}/h")
    text.add_facts(facts)

    sparklines = seen.sparklines
    points = sparklines.find(line)
    if any(point != NO_DATA for point in points):
        label = f"last {duration_text(sparklines.span)} "
        room = text.width - len(label)
        width = min(len(points), room)
        sparkline = draw_sparkline(points, width)
        text.lines.append([(label, "dim"), (sparkline, "bar")])


def _add_holders(text: _Paragraphs, slot: SlotOfView, seen: Seen, fetched: FetchedDetails) -> None:
    for holder in slot.holders:
        _add_holder(text, holder, seen)
        _add_job(text, holder, fetched)

    _add_waits(text, slot.holders)
    for last in slot.last_holders:
        text.add(f"last held by {name_of(last)}")
        _add_job(text, last, fetched)

    if not slot.holders and not slot.last_holders:
        free = describe_free(slot)
        if free == "-":
            free = "free"
        text.add(free)


def _add_holder(text: _Paragraphs, holder: HolderView, seen: Seen) -> None:
    owner = f", part of {holder.owner.kind} {holder.owner.name}" if holder.owner else ""
    text.add(f"held by {name_of(holder)}{owner}", "title")

    text.add_facts(_list_holder_facts(holder, seen), _INDENT)


def _list_holder_facts(holder: HolderView, seen: Seen) -> Iterator[str]:
    yield f"utilisation {format_percent(holder.utilization_ratio)}"
    yield f"memory {format_gib(holder.memory_used_bytes)} GiB"
    yield f"processes {format_number(holder.processes)}"

    seconds = seconds_since(holder.idle_since, seen.taken_at)
    idle = format_idle(holder.use, seconds)
    yield idle if idle in ("busy", "idle") else f"idle {idle}"

    if holder.wait_ratio:
        waited = f"waited {format_percent(holder.wait_ratio)}"
        for runner in holder.waits_for[:1]:
            name = runner.text or _OUTSIDE_PODS
            waited += f" ({format_percent(runner.ratio)} for {name})"
        yield waited

    if holder.share_ratio is not None:
        yield f"share {format_percent(holder.share_ratio)}"
    if holder.cost_per_hour is not None:
        yield f"costs {write_money(holder.cost_per_hour, seen.view.currency)}/h"


def _add_waits(text: _Paragraphs, holders: Iterable[HolderView]) -> None:
    """Adds a table of the seconds that holders of a shared GPU waited for each other."""
    waits = {}  # holder that waited -> holder that ran -> seconds
    for holder in holders:
        if holder.wait_ratio is not None:
            waits[holder.text] = {runner.text: runner.seconds for runner in holder.waits_for}
    if len(waits) < 2:
        return

    # Those that waited come first. The others may be outside the GPU's known holders.
    names = list(waits)
    for seconds in waits.values():
        names += [runner for runner in seconds if runner not in names]

    text.add("seconds that each holder waited in the last reading; columns: the holder that ran")
    numbers = range(1, len(names) + 1)
    header = "".join(f"{number:>{_WAIT_WIDTH}}" for number in numbers)
    rows = [("", header)]  # title and cells
    for number, name in zip(numbers, names, strict=True):
        title = f"{number:>3} {printable(name or _OUTSIDE_PODS)}"
        # Empty for a name that ran, but did not wait itself.
        cells = ""
        if name in waits:
            cells = _format_waits(name, waits[name], names)
        rows.append((title, cells))

    longest = max(cell_len(title) for title, _ in rows)
    room = max(_MIN_WIDTH_OF_NAMES, text.width - len(header))
    width = min(longest, room)

    for title, cells in rows:
        row = fit_start(fit(title, width) + cells, text.width)
        text.lines.append([(row.rstrip(), "")])


def _format_waits(name: str, seconds: Mapping[str, float], names: Sequence[str]) -> str:
    cells = ""
    for runner in names:
        cell = "0.00"
        if runner in seconds:
            cell = f"{seconds[runner]:.2f}"
        elif runner == name:
            cell = "–"
        cells += f"{cell:>{_WAIT_WIDTH}}"
    return cells


def _add_job(text: _Paragraphs, holder: Workload, fetched: FetchedDetails) -> None:
    """Adds the total usage of the holder's pod since the pod started."""
    for job in fetched.jobs:
        if (job.namespace, job.pod) != (holder.namespace, holder.pod):
            continue

        text.add_facts(_list_job_facts(job), _INDENT)
        if job.why_slow:
            is_found = any(check.state == "found" for check in job.checks)
            style = "warn" if is_found else "dim"
            text.add(f"{_INDENT}why slow: {job.why_slow}", style)
        if job.hint:
            text.add(f"{_INDENT}{job.hint}", "warn")


def _list_job_facts(job: JobSummary) -> Iterator[str]:
    yield f"ran for {format_duration(job.duration_seconds)}"
    yield f"{job.gpu_hours:.2f} GPU-hours"
    yield f"mean {format_percent(job.mean_use)}"
    yield f"peak {format_percent(job.peak_use)}"

    of_one = " of one GPU" if job.gpus > 1 else ""
    yield f"peak memory{of_one} {format_gib(job.peak_memory_bytes)} GiB"

    if job.tensor_active_ratio is not None:
        yield f"tensor cores {format_percent(job.tensor_active_ratio)} now"
    if job.energy_kwh is not None:
        yield f"{job.energy_kwh:.2f} kWh"
    if job.cost is not None:
        yield write_money(job.cost, job.currency)
    if job.wait_seconds:
        yield f"waited {format_duration(job.wait_seconds)}"
    if job.throttled_seconds:
        yield f"throttled {format_duration(job.throttled_seconds)}"
    if job.errors:
        yield f"errors {job.errors}"


# Details from the server


def _add_problems(text: _Paragraphs, details: GpuDetails) -> None:
    for xid in details.xids or ():
        problem = f"XID {xid.xid}"
        if xid.class_:
            problem += f" ({xid.class_})"
        if xid.at is not None:
            problem += f" at {_format_time(xid.at)}"
        if xid.says:
            problem += f": {xid.says}"
        text.add(problem, "warn")

    for source in details.sources:
        if not source.ok:
            reason = source.message or source.error or "does not respond"
            text.add(f"source {source.source}: {reason}", "warn")


def _add_method(text: _Paragraphs, details: GpuDetails) -> None:
    """Says how the usage of containers is measured, and what would improve it."""
    if details.method == "mps":
        text.add(f"usage by container: {MPS_REASON}", "dim")
    elif details.method:
        text.add(f"usage measured by: {details.method}", "dim")
        if details.improvement:
            text.add(f"better: {details.improvement}", "dim")


def _add_fields(text: _Paragraphs, fields: Iterable[FieldView]) -> None:
    """Adds the fields in as many columns as fit."""
    cells = [printable(f"{field.name} {_format_value(field)}") for field in fields]
    longest = max(map(cell_len, cells), default=0)

    # Longer fields are cut, so that a wide terminal has at least two columns.
    gap = len(_GAP)
    half = text.width // 2 - gap
    widest = max(_MAX_FIELD, half)
    width = min(longest, widest, text.width)

    # There is a gap after each column but the last one.
    columns = (text.width + gap) // (width + gap)
    columns = max(1, columns)
    for start in range(0, len(cells), columns):
        row = [fit(cell, width) for cell in cells[start : start + columns]]
        text.lines.append([(_GAP.join(row), "")])


def _format_value(field: FieldView) -> str:
    value = field.value
    if field.unit == "bool":
        return "yes" if value else "no"
    # Version 9.0 is 0x90000.
    if field.unit == "packed" and "CAPABILITY" in field.name and isinstance(value, int):
        return f"{value >> 16}.{value & 0xFFFF}"

    text = str(value)
    if isinstance(value, float):
        text = text.removesuffix(".0") if value.is_integer() else f"{value:g}"
    if field.unit in _UNITS_NOT_SHOWN:
        return text
    return f"{text} {field.unit}".rstrip()


def _format_time(at: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return f"{at:.0f}"
