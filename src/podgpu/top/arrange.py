"""This module sorts and filters lines: what is broken first, what belongs together together. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from typing import Literal

from podgpu.metrics.conditions import DRIVER_AWAY, NODE_GONE
from podgpu.top.lines import Line

Order = Literal["gpu", "utilisation", "memory", "power", "idle"]
_FIRST = {"bad": 0, "warn": 1, "": 2}


def arrange(lines: Iterable[Line], order: Order, wanted: str = "") -> list[Line]:
    """Those that match `wanted`: the broken ones first, then the largest; `gpu` is the order of GPUs."""
    kept = [kept for line in lines if (kept := _matching(line, wanted.casefold())) is not None]
    return list(_said_once(sorted(_sorted(kept, order), key=lambda line: _FIRST[line.severity])))


def _said_once(lines: Iterable[Line]) -> Iterator[Line]:
    """What all of a node's GPUs share stands beneath the first of them; the others are red all the same."""
    said: set[tuple[str, str]] = set()
    for line in lines:
        shared = {(line.node, c.name) for c in line.conditions if c.name in (DRIVER_AWAY, NODE_GONE)}
        repeated = {name for node, name in shared & said}
        said |= shared
        yield replace(line, beneath=tuple(_without(line.beneath, repeated))) if repeated else line


def _without(beneath: Iterable[Line], repeated: Container[str]) -> Iterator[Line]:
    for line in beneath:
        if line.kind != "condition" or line.conditions[0].name not in repeated:
            yield replace(line, beneath=tuple(_without(line.beneath, repeated))) if line.beneath else line


def _matching(line: Line, wanted: str) -> Line | None:
    """A line that matches keeps all that is beneath it; one that does not is kept for those beneath that do."""
    if not wanted or wanted in _searched(line).casefold():
        return line
    beneath = tuple(kept for inner in line.beneath if (kept := _matching(inner, wanted)) is not None)
    return replace(line, beneath=beneath) if beneath else None


def _searched(line: Line) -> str:
    """Who looks for `broken` finds every GPU with a condition, by its own line and what it says."""
    of_conditions = ("broken", *(c.name.replace("_", " ") for c in line.conditions)) if line.conditions else ()
    of_its_own = (condition.says for condition in line.conditions) if line.kind == "condition" else ()
    return "\n".join((line.holder, line.node, line.model, *of_conditions, *of_its_own))


def _sorted(lines: Iterable[Line], order: Order) -> list[Line]:
    if order == "gpu":
        return list(lines)
    inner = [replace(line, beneath=tuple(_sorted(line.beneath, order))) for line in lines]
    return sorted(inner, key=lambda line: (line.kind != "condition", -_largest(line, order)))


def _largest(line: Line, order: Order) -> float:
    own = _value(line, order)
    return max([float("-inf") if own is None else own, *(_largest(inner, order) for inner in line.beneath)])


def _value(line: Line, order: Order) -> float | None:
    if order == "idle":
        return None if line.idle is None else line.idle.seconds
    return {"utilisation": line.utilization, "memory": line.memory, "power": line.power}.get(order)
