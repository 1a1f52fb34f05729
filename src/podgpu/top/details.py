"""Renders the details of one GPU: its problems with advice, its holders, and all fields that the server reports."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Iterator

from rich.cells import cell_len

from podgpu.cluster.parts import MPS_REASON
from podgpu.cluster.view import ConditionView, FieldView, GpuDetails, HolderView, InstanceView, XidView
from podgpu.model import Workload
from podgpu.top.lines import Line, severity_of
from podgpu.top.source import FetchedDetails, Seen
from podgpu.top.table import Spans, format_condition
from podgpu.top.text import (
    NO_DATA,
    draw_sparkline,
    fit,
    format_duration,
    format_gib,
    format_idle,
    format_money,
    format_number,
    format_percent,
    format_span,
    name_of,
    printable,
    shorten_model,
)

_INDENT = "  "
_MAX_FIELD = 38
_NO_BREAK = "\N{NO-BREAK SPACE}"
_UNITS_NOT_SHOWN = frozenset(
    {"string", "enum", "count", "number", "index", "id", "code", "packed", "bitmask", "binary"}
)


def render_details(line: Line, seen: Seen, width: int) -> list[Spans]:
    """Renders the GPU or MIG instance of a line."""
    slot, fetched = line.slot, seen.fetched or FetchedDetails(line.gpu.uuid)
    is_fetched = fetched.uuid == line.gpu.uuid
    details = fetched.details if is_fetched else None
    lines = [_title(line)]
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
    for last in slot.last_holders:
        lines += _wrap(f"last held by {name_of(last)}", width)
        lines += _job(last, fetched, width)
    if not slot.holders and not slot.last_holders:
        lines += _wrap("free", width)
    if not is_fetched:
        lines += _wrap("fetching details …", width)
    elif fetched.error:
        lines += _wrap(f"details are not available: {fetched.error}", width, "warn")
    if details is not None:
        if details.method:
            is_known = details.method != "mps"
            text = f"usage measured by: {details.method}" if is_known else f"usage by container: {MPS_REASON}"
            lines += _wrap(text, width, "dim")
        lines += _fields(details.fields or (), width)
    return lines


def _title(line: Line) -> Spans:
    instance = f" {line.model}" if isinstance(line.slot, InstanceView) else ""
    node = f"  on {line.node}" if line.node else ""
    text = f"GPU {line.number}{instance}  {shorten_model(line.gpu.model)}{node}  {line.gpu.uuid}"
    return [(printable(text), "title")]


def _condition(condition: ConditionView, now: float, width: int) -> Iterator[Spans]:
    since = condition.since
    text = format_condition(condition, None if since is None else max(0.0, now - since))
    if since is not None:
        text += f" (since {_format_time(since)})"
    yield from _wrap(text, width, severity_of(condition))
    if condition.do:
        yield from _wrap(f"{_INDENT}do: {condition.do}", width)


def _figures(line: Line, seen: Seen) -> list[str]:
    slot = line.slot
    facts = [
        f"utilisation {format_percent(slot.utilization_ratio)}",
        f"memory {format_gib(slot.memory_used_bytes)} of {format_gib(slot.memory_total_bytes)} GiB",
        f"power {format_number(slot.power_watts, 'W')}",
        f"temperature {format_number(slot.temperature_celsius, 'C')}",
    ]
    if slot.price_per_hour is not None:
        facts.append(f"price {format_money(slot.price_per_hour, seen.view.currency)}/h")
    return facts


def _sparkline(line: Line, seen: Seen, width: int) -> Iterator[Spans]:
    points = seen.sparklines.points.get(line.row[1:3], b"")
    if points.strip(bytes([NO_DATA])):
        label = f"last {format_span(seen.sparklines.span)} "
        yield [(label, "dim"), (draw_sparkline(points, min(len(points), max(0, width - len(label)))), "bar")]


def _holder_figures(holder: HolderView, seen: Seen) -> list[str]:
    since = holder.idle_since
    idle = format_idle(holder.use, None if since is None else max(0.0, seen.now - since))
    facts = [
        f"utilisation {format_percent(holder.utilization_ratio)}",
        f"memory {format_gib(holder.memory_used_bytes)} GiB",
        f"processes {format_number(holder.processes)}",
        idle if idle in ("busy", "idle") else f"idle {idle}",
    ]
    if holder.wait_ratio:
        facts.append(_describe_wait(holder, holder.wait_ratio))
    if holder.share_ratio is not None:
        facts.append(f"share {format_percent(holder.share_ratio)}")
    if holder.cost_per_hour is not None:
        facts.append(f"costs {format_money(holder.cost_per_hour, seen.view.currency)}/h")
    return facts


def _job(holder: Workload, fetched: FetchedDetails, width: int) -> Iterator[Spans]:
    """Shows what the holder's pod used since it started."""
    pod = (holder.namespace, holder.pod)
    for job in fetched.jobs:
        if (job.namespace, job.pod) != pod:
            continue
        facts = [
            f"in all {format_duration(job.duration_seconds)}",
            f"{job.gpu_hours:.2f} GPU-hours",
            f"mean {format_percent(job.mean_use)}",
            f"peak {format_percent(job.peak_use)}",
            f"peak memory {format_gib(None if job.peak_memory_bytes is None else int(job.peak_memory_bytes))} GiB",
            "" if job.energy_kwh is None else f"{job.energy_kwh:.2f} kWh",
            "" if job.cost is None else format_money(job.cost, job.currency),
            f"waited {format_duration(job.wait_seconds)}" if job.wait_seconds else "",
            f"throttled {format_duration(job.throttled_seconds)}" if job.throttled_seconds else "",
            f"errors {job.errors}" if job.errors else "",
        ]
        yield from _join(filter(None, facts), width, _INDENT)
        if job.hint:
            yield from _wrap(f"{_INDENT}{job.hint}", width, "warn")


def _describe_wait(holder: HolderView, ratio: float) -> str:
    text = f"waited {format_percent(ratio)}"
    if holder.waits_for:
        runner = holder.waits_for[0]
        text += f" ({format_percent(runner.ratio)} for {runner.text or 'processes outside pods'})"
    return text


# Details from the server


def _problems(details: GpuDetails, width: int) -> Iterator[Spans]:
    for xid in details.xids or ():
        yield from _wrap(_describe_xid(xid), width, "warn")
    for source in details.sources:
        if not source.ok:
            reason = source.message or source.error or "does not respond"
            yield from _wrap(f"source {source.source}: {reason}", width, "warn")


def _describe_xid(xid: XidView) -> str:
    parts = [f"XID {xid.xid}", xid.class_ and f"({xid.class_})", "" if xid.at is None else f"at {_format_time(xid.at)}"]
    return " ".join(filter(None, parts)) + (f": {xid.says}" if xid.says else "")


def _fields(fields: Iterable[FieldView], width: int) -> Iterator[Spans]:
    """Arranges the fields in as many columns as fit."""
    texts = [printable(f"{field.name} {_format_value(field)}") for field in fields]
    cell = min(max(map(cell_len, texts), default=0), max(_MAX_FIELD, width // 2 - 2))
    count = max(1, (width + 2) // (cell + 2))
    for start in range(0, len(texts), count):
        yield [("  ".join(fit(text, min(cell, width)) for text in texts[start : start + count]), "")]


def _format_value(field: FieldView) -> str:
    value = field.value
    if field.unit == "bool":
        return "no" if value in ("", "0", "False", 0) else "yes"
    if field.unit == "packed" and "CAPABILITY" in field.name and isinstance(value, int):
        return f"{value >> 16}.{value & 0xFFFF}"
    text = f"{value:g}" if isinstance(value, float) and not value.is_integer() else str(value).removesuffix(".0")
    return text if field.unit in _UNITS_NOT_SHOWN else f"{text} {field.unit}".rstrip()


# Lines of text


def _wrap(text: str, width: int, style: str = "") -> list[Spans]:
    indent = _INDENT * (2 if text.startswith(_INDENT) else 1)
    lines = textwrap.wrap(printable(text), max(1, width), subsequent_indent=indent if width > 20 else "")
    return [[(line, style)] for line in lines]


def _join(facts: Iterable[str], width: int, indent: str = "") -> list[Spans]:
    """Puts as many facts on each line as fit. Never breaks a line within a fact."""
    text = "   ".join(printable(fact).replace(" ", _NO_BREAK) for fact in facts)
    lines = textwrap.wrap(text, max(1, width), initial_indent=indent, subsequent_indent=indent or _INDENT)
    return [[(line.replace(_NO_BREAK, " "), "")] for line in lines]


def _format_time(at: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return f"{at:.0f}"
