"""This module describes the table's columns: title, what stands in a cell, how wide it must be, how it is coloured.
Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from podgpu.top import cells
from podgpu.top.arrange import Order
from podgpu.top.cells import Glyphs
from podgpu.top.lines import Line

LEAST_MODEL = 7
_HOT, _VERY_HOT = 80.0, 90.0
_IDLE, _LONG_IDLE = 60.0, 600.0


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    text: Callable[[Line, Glyphs], str]
    least: int
    right: bool = True
    order: Order | None = None
    style: Callable[[Line], str] = lambda _line: ""


def _temperature_style(line: Line) -> str:
    degrees = line.temperature or 0.0
    return "bad" if degrees >= _VERY_HOT else "warn" if degrees >= _HOT else ""


def _idle_style(line: Line) -> str:
    seconds = line.idle.seconds if line.idle else 0.0
    return "bad" if seconds >= _LONG_IDLE else "warn" if seconds >= _IDLE else ""


def _severity(line: Line) -> str:
    return line.severity if line.kind in ("gpu", "instance") else ""


def _model(line: Line, _glyphs: Glyphs) -> str:
    return cells.short_model(line.model) if line.kind in ("gpu", "instance") else ""


def _holder(line: Line, _glyphs: Glyphs) -> str:
    return line.remark if line.kind == "process" else line.holder or line.remark


def _watts(line: Line, glyphs: Glyphs) -> str:
    return "" if line.kind == "process" else cells.watts(line.power, glyphs)


def _degrees(line: Line, glyphs: Glyphs) -> str:
    """Only a whole GPU has a temperature."""
    return cells.degrees(line.temperature, glyphs) if line.kind == "gpu" else ""


def _processes(line: Line, glyphs: Glyphs) -> str:
    return "" if line.kind == "process" else cells.number(line.processes, glyphs)


def _idle(line: Line, glyphs: Glyphs) -> str:
    return cells.idle(line.idle, glyphs) if line.holder and line.kind != "process" else ""


NODE = Column("NODE", lambda line, _glyphs: line.node if line.kind == "gpu" else "", 4, right=False, style=_severity)
GPU = Column("GPU", lambda line, _glyphs: line.gpu, 3, right=False, order="gpu", style=_severity)
MODEL = Column("MODEL", _model, LEAST_MODEL, right=False, style=lambda _line: "dim")
HOLDER = Column("HOLDER", _holder, 6, right=False, style=_severity)
HISTORY = Column("HISTORY", lambda _line, _glyphs: "", 8, right=False, style=lambda _line: "bar")
USE = Column("UTIL", lambda line, glyphs: cells.percent(line.utilization, glyphs), 4, order="utilisation")
MEMORY = Column("MEM GiB", cells.memory, 9, order="memory")
POWER = Column("POWER", _watts, 5, order="power")
TEMPERATURE = Column("TEMP", _degrees, 4, style=_temperature_style)
PROCESSES = Column("PROC", _processes, 4)
IDLE = Column("IDLE", _idle, 6, order="idle", style=_idle_style)
COLUMNS = (NODE, GPU, MODEL, HOLDER, HISTORY, USE, MEMORY, POWER, TEMPERATURE, PROCESSES, IDLE)
"""That of the node is there where lines are of several, that of the history where it is watched."""
