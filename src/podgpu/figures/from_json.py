"""This module goes the way back from `/api/v1/view` to figures, for `top --cluster`: any server may have written it.
Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from podgpu.errors import SourceError
from podgpu.figures.device import Alert, Condition, DeviceFigures, HolderFigures, Owner, View
from podgpu.json_shape import list_in, number_in, objects_in, text_in, whole_in
from podgpu.model import WORKLOAD_PARTS, Workload

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
    notes = [text for text in list_in(document.get("notes")) if isinstance(text, str)]
    for node in objects_in(document.get("nodes")):
        name = text_in(node.get("name"))
        devices += _devices(node, name)
        if node.get("old"):
            old.append(name)
            age = number_in(node.get("age_seconds"))
            notes.append(f"{name} is old" if age is None else f"{name} is old: {age:.0f} s")
        notes += [f"{name}: {text}" for text in list_in(node.get("notes")) if isinstance(text, str)]
    return View(
        tuple(devices),
        tuple(notes),
        number_in(document.get("taken_at")),
        simulated=document.get("simulated") is True,
        currency=text_in(document.get("currency")),
        alerts=tuple(_alerts(document.get("alerts"))),
        watched=number_in(document.get("idle_after_seconds")) is not None,
        old_nodes=frozenset(old),
    )


def _devices(node: dict[str, Any], name: str) -> Iterator[DeviceFigures]:
    for gpu in objects_in(node.get("gpus")):
        instances = list(objects_in(gpu.get("instances")))
        if not instances or gpu.keys() - _NAMES:
            yield _device(gpu, gpu, name)
        for instance in instances:
            yield _device(gpu, instance, name)


def _device(gpu: dict[str, Any], part: dict[str, Any], node: str) -> DeviceFigures:
    """`part` is the GPU itself or one of its instances."""
    index = whole_in(gpu.get("index"))
    return DeviceFigures(
        uuid=text_in(gpu.get("uuid")),
        index=-1 if index is None else index,
        model=text_in(gpu.get("model")),
        node=node,
        instance=text_in(part.get("id")),
        profile=text_in(part.get("profile")),
        utilization=number_in(part.get("utilization_ratio")),
        memory_used=whole_in(part.get("memory_used_bytes")),
        memory_total=whole_in(part.get("memory_total_bytes")),
        power_watts=number_in(part.get("power_watts")),
        temperature=number_in(part.get("temperature_celsius")),
        energy_joules=number_in(part.get("energy_joules")),
        holders=tuple(_holder(h) for h in objects_in(part.get("holders"))),
        conditions=tuple(_condition(c) for c in objects_in(part.get("conditions"))),
        present=part.get("absent") is not True,
        last_holders=tuple(_workload(w) for w in objects_in(part.get("last_holders"))),
        price_per_hour=number_in(part.get("price_per_hour")),
    )


def _alerts(value: object) -> Iterator[Alert]:
    for of in objects_in(value):
        if text := text_in(of.get("text")):
            severity = "warning" if of.get("severity") == "warning" else "broken"
            yield Alert(severity, text, text_in(of.get("node")), text_in(of.get("uuid")))


def _condition(of: dict[str, Any]) -> Condition:
    name = text_in(of.get("condition"))
    return Condition(name, number_in(of.get("since")), text_in(of.get("says")) or name, text_in(of.get("do")))


def _holder(of: dict[str, Any]) -> HolderFigures:
    return HolderFigures(
        _workload(of),
        utilization=number_in(of.get("utilization_ratio")),
        memory=whole_in(of.get("memory_used_bytes")),
        processes=whole_in(of.get("processes")),
        busy_seconds=number_in(of.get("busy_seconds")),
        idle_seconds=number_in(of.get("idle_seconds")),
        energy_joules=number_in(of.get("energy_joules")),
        share=number_in(of.get("share_ratio")),
        idle_since=number_in(of.get("idle_since")),
        owner=_owner(of.get("owner")),
        cost_per_hour=number_in(of.get("cost_per_hour")),
    )


def _workload(of: dict[str, Any]) -> Workload:
    return Workload(**{name: text_in(of.get(name)) for name in WORKLOAD_PARTS})


def _owner(value: object) -> Owner | None:
    if not isinstance(value, dict) or not text_in(value.get("name")):
        return None
    return Owner(text_in(value.get("kind")), text_in(value.get("name")))
