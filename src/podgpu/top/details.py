"""This module writes the details of one GPU, as lines of a given width: what is wrong and what to do, who holds it,
every figure.

Pure, but for the time zone that clock times are shown in.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from podgpu.errors import few_of
from podgpu.top import cells
from podgpu.top.api_answers import NO_DATA, FieldFact, GpuFacts, XidFact
from podgpu.top.cells import Glyphs, fit, printable, width_of
from podgpu.top.figures import Condition, DeviceFigures, HolderFigures, holder_text
from podgpu.top.history import Idle
from podgpu.top.lines import Row
from podgpu.top.table import Printed, Watched

_INDENT = "  "
_WIDEST_FIELD = 38
_KEPT = "\N{NO-BREAK SPACE}"
_GIB = 1024**3


@dataclass(frozen=True, slots=True)
class More:
    """What the server's own view of the GPU has, as far as it is known."""

    facts: GpuFacts | None = None
    error: str = ""
    """Why there is none, or nothing newer."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What the details are about."""

    device: DeviceFigures
    row: Row
    now: float | None
    """Unix time by the source's clock, for ages."""
    currency: str = ""
    idle: tuple[Idle | None, ...] = ()
    """Of each holder."""
    more: More | None = None
    """None: nobody can be asked for more."""
    watched: Watched | None = None


def details_of(subject: Subject, width: int, glyphs: Glyphs) -> list[Printed]:
    device = subject.device
    lines = [_title(device, width, glyphs)]
    for condition in device.conditions:
        lines += _condition(condition, subject.now, width)
    if not device.present and not device.conditions:
        lines += _wrapped("it was here and is not", width, "bad")
    facts = subject.more.facts if subject.more else None
    if facts is not None:
        lines += _wrong(facts, width)
    lines += _facts(_figures(subject, glyphs), width)
    lines += _history(subject, width, glyphs)
    lines += _holders(subject, width, glyphs)
    if subject.more is not None:
        lines += _more(subject.more, width, glyphs)
    return lines


def _title(device: DeviceFigures, width: int, glyphs: Glyphs) -> Printed:
    number = "?" if device.index < 0 else str(device.index)
    of_instance = f"/{device.instance} {device.profile}" if device.instance else ""
    where = f"  on {device.node}" if device.node else ""
    text = f"GPU {number}{of_instance}  {cells.short_model(device.model)}{where}  {device.uuid}"
    return [(fit(printable(text), width, glyphs), "title")]


def _condition(of: Condition, now: float | None, width: int) -> Iterator[Printed]:
    style = "bad" if of.severity == "broken" else "warn"
    age = None if of.since is None or now is None else max(0.0, now - of.since)
    since = f" (since {_clock(of.since)})" if of.since is not None else ""
    yield from _wrapped(cells.condition(of, age) + since, width, style)
    if of.do:
        yield from _wrapped(f"{_INDENT}do: {of.do}", width)


def _figures(subject: Subject, glyphs: Glyphs) -> list[str]:
    device = subject.device
    facts = [
        f"utilisation {cells.percent(device.utilization, glyphs)}",
        f"memory {_gib(device.memory_used, glyphs)} of {_gib(device.memory_total, glyphs)} GiB",
        f"power {cells.watts(device.power_watts, glyphs)}",
        f"temperature {cells.degrees(device.temperature, glyphs)}",
    ]
    if device.price_per_hour is not None:
        facts.append(f"price {money(device.price_per_hour, subject.currency)}/h")
    return facts


def _history(subject: Subject, width: int, glyphs: Glyphs) -> Iterator[Printed]:
    points = subject.watched.points.get(subject.row, b"") if subject.watched else b""
    if subject.watched is not None and points.strip(bytes([NO_DATA])):
        label = f"last {cells.span(subject.watched.span)} "
        room = max(0, width - len(label))
        yield [(label[:width], "dim"), (cells.spark(points, min(len(points), room), glyphs), "bar")]


# Who holds it


def _holders(subject: Subject, width: int, glyphs: Glyphs) -> Iterator[Printed]:
    device = subject.device
    for holder, idle in zip(device.holders, subject.idle or (None,) * len(device.holders), strict=True):
        owner = f", of {holder.owner.kind} {holder.owner.name}" if holder.owner else ""
        yield from _wrapped(f"held by {holder_text(holder.holder)}{owner}", width, "title")
        yield from _facts(_use(holder, idle, subject, glyphs), width, _INDENT)
    if device.last_holders:
        names = few_of(holder_text(workload) for workload in device.last_holders)
        yield from _wrapped(f"last held by {names}", width)
    elif not device.holders:
        yield from _wrapped("held by nobody", width)


def _use(holder: HolderFigures, idle: Idle | None, subject: Subject, glyphs: Glyphs) -> list[str]:
    facts = [
        f"utilisation {cells.percent(holder.utilization, glyphs)}",
        f"memory {_gib(holder.memory, glyphs)} GiB",
        f"processes {cells.number(holder.processes, glyphs)}",
        "busy" if idle == Idle(0) else f"idle {cells.idle(idle, glyphs)}",
    ]
    if holder.share is not None:
        facts.append(f"share {cells.percent(holder.share, glyphs)}")
    if holder.cost_per_hour is not None:
        facts.append(f"costs {money(holder.cost_per_hour, subject.currency)}/h")
    return facts


def money(amount: float, currency: str) -> str:
    return f"{amount:.2f} {currency}".rstrip()


# What the server knows beside


def _more(more: More, width: int, glyphs: Glyphs) -> Iterator[Printed]:
    if more.facts is None:
        yield from _wrapped(f"no more is known: {more.error}" if more.error else f"asking for more {glyphs.cut}", width)
        return
    if more.error:
        yield from _wrapped(f"what follows could not be renewed: {more.error}", width, "warn")
    if more.facts.method:
        yield from _wrapped(f"busy time is divided by {more.facts.method}", width, "dim")
    yield from _fields(more.facts.fields, width, glyphs)


def _wrong(facts: GpuFacts, width: int) -> Iterator[Printed]:
    for xid in facts.xids:
        yield from _wrapped(_xid(xid), width, "warn")
    for source in facts.sources:
        if not source.works:
            yield from _wrapped(f"source {source.name}: {source.message or 'does not answer'}", width, "warn")


def _xid(of: XidFact) -> str:
    facts = [f"XID {of.number}", of.kind and f"({of.kind})", "" if of.at is None else f"at {_clock(of.at)}"]
    return " ".join(filter(None, facts)) + (f": {of.says}" if of.says else "")


_BARE = frozenset({"string", "enum", "count", "number", "index", "id", "code", "packed", "bitmask", "binary"})
"""Units that say nothing beside the value."""


def _in_words(of: FieldFact) -> str:
    if of.unit == "bool":
        return "no" if of.value in ("", "0", "False") else "yes"
    if of.unit == "packed" and "CAPABILITY" in of.name and of.value.isdecimal():
        packed = int(of.value[:10])
        return f"{packed >> 16}.{packed & 0xFFFF}"
    return of.value if of.unit in _BARE else f"{of.value} {of.unit}".rstrip()


def _fields(fields: Iterable[FieldFact], width: int, glyphs: Glyphs) -> Iterator[Printed]:
    """As many beside each other as there is room for."""
    texts = [printable(f"{of.name} {_in_words(of)}") for of in fields]
    if not texts:
        return
    cell = min(max(map(width_of, texts)), max(_WIDEST_FIELD, width // 2 - 2))
    count = max(1, (width + 2) // (cell + 2))
    for start in range(0, len(texts), count):
        row = "  ".join(fit(text, min(cell, width), glyphs) for text in texts[start : start + count])
        yield [(row, "")]


def _wrapped(text: str, width: int, style: str = "") -> list[Printed]:
    indent = _INDENT * (2 if text.startswith(_INDENT) else 1)
    clean = printable(text)
    lines = textwrap.wrap(clean, max(1, width), subsequent_indent=indent if width > 20 else "", drop_whitespace=True)
    return [[(line, style)] for line in lines]


def _facts(facts: Iterable[str], width: int, indent: str = "") -> list[Printed]:
    """As many on a line as there is room for, none of them broken."""
    text = "   ".join(printable(fact).replace(" ", _KEPT) for fact in facts)
    lines = textwrap.wrap(text, max(1, width), initial_indent=indent, subsequent_indent=indent or _INDENT)
    return [[(line.replace(_KEPT, " "), "")] for line in lines]


def _gib(size: int | None, glyphs: Glyphs) -> str:
    return glyphs.absent if size is None else f"{size / _GIB:.1f}"


def _clock(at: float) -> str:
    """Local time; with the day where that is not today's."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return f"{at:.0f}"
