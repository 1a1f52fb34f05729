"""The way back from `/api/v1/view` to figures, for `top --cluster`: any server may have written it. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from podgpu.errors import SourceError
from podgpu.figures.device import Alert, Condition, DeviceFigures, HolderFigures, Owner, View
from podgpu.model import Workload

_NOT_OURS = "is not an answer of podgpu's /api/v1/view"
_NAMES = {"uuid", "index", "model", "instances"}
"""All that a GPU has of which only its MIG instances are known."""


def parse_view(body: bytes) -> View:
    """Every node's devices, with notes on what is old. Raises SourceError for what is no such JSON."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise SourceError("malformed", f"{_NOT_OURS}: it is not JSON") from error
    if not isinstance(document, dict) or document.get("api") != "podgpu/v1":
        raise SourceError("malformed", _NOT_OURS)
    devices: list[DeviceFigures] = []
    old: list[str] = []
    notes = [text for text in _list(document.get("notes")) if isinstance(text, str)]
    for node in _objects(document.get("nodes")):
        name = _text(node.get("name"))
        devices += _devices(node, name)
        if node.get("old"):
            old.append(name)
            age = _number(node.get("age_seconds"))
            notes.append(f"{name} is old" if age is None else f"{name} is old: {age:.0f} s")
        notes += [f"{name}: {text}" for text in _list(node.get("notes")) if isinstance(text, str)]
    return View(
        tuple(devices),
        tuple(notes),
        _number(document.get("taken_at")),
        simulated=document.get("simulated") is True,
        currency=_text(document.get("currency")),
        alerts=tuple(_alerts(document.get("alerts"))),
        watched=_number(document.get("idle_after_seconds")) is not None,
        old_nodes=frozenset(old),
    )


def _devices(node: dict[str, Any], name: str) -> Iterator[DeviceFigures]:
    for gpu in _objects(node.get("gpus")):
        instances = list(_objects(gpu.get("instances")))
        if not instances or gpu.keys() - _NAMES:
            yield _device(gpu, gpu, name)
        for instance in instances:
            yield _device(gpu, instance, name)


def _device(gpu: dict[str, Any], part: dict[str, Any], node: str) -> DeviceFigures:
    """`part` is the GPU itself or one of its instances."""
    index = _whole(gpu.get("index"))
    return DeviceFigures(
        uuid=_text(gpu.get("uuid")),
        index=-1 if index is None else index,
        model=_text(gpu.get("model")),
        node=node,
        instance=_text(part.get("id")),
        profile=_text(part.get("profile")),
        utilization=_number(part.get("utilization_ratio")),
        memory_used=_whole(part.get("memory_used_bytes")),
        memory_total=_whole(part.get("memory_total_bytes")),
        power_watts=_number(part.get("power_watts")),
        temperature=_number(part.get("temperature_celsius")),
        energy_joules=_number(part.get("energy_joules")),
        holders=tuple(_holder(h) for h in _objects(part.get("holders"))),
        conditions=tuple(_condition(c) for c in _objects(part.get("conditions"))),
        present=part.get("absent") is not True,
        last_holders=tuple(_workload(w) for w in _objects(part.get("last_holders"))),
        price_per_hour=_number(part.get("price_per_hour")),
    )


def _alerts(value: object) -> Iterator[Alert]:
    for of in _objects(value):
        if text := _text(of.get("text")):
            severity = "warning" if of.get("severity") == "warning" else "broken"
            yield Alert(severity, text, _text(of.get("node")), _text(of.get("uuid")))


def _condition(of: dict[str, Any]) -> Condition:
    name = _text(of.get("condition"))
    return Condition(name, _number(of.get("since")), _text(of.get("says")) or name, _text(of.get("do")))


def _holder(of: dict[str, Any]) -> HolderFigures:
    return HolderFigures(
        _workload(of),
        utilization=_number(of.get("utilization_ratio")),
        memory=_whole(of.get("memory_used_bytes")),
        processes=_whole(of.get("processes")),
        busy_seconds=_number(of.get("busy_seconds")),
        idle_seconds=_number(of.get("idle_seconds")),
        energy_joules=_number(of.get("energy_joules")),
        share=_number(of.get("share_ratio")),
        idle_since=_number(of.get("idle_since")),
        owner=_owner(of.get("owner")),
        cost_per_hour=_number(of.get("cost_per_hour")),
    )


def _workload(of: dict[str, Any]) -> Workload:
    names = ("namespace", "pod", "container", "uid", "container_id", "job")
    return Workload(**{name: _text(of.get(name)) for name in names})


def _owner(value: object) -> Owner | None:
    if not isinstance(value, dict) or not _text(value.get("name")):
        return None
    return Owner(_text(value.get("kind")), _text(value.get("name")))


def _objects(value: object) -> Iterator[dict[str, Any]]:
    return (item for item in _list(value) if isinstance(item, dict))


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _whole(value: object) -> int | None:
    number = _number(value)
    return None if number is None else round(number)
