"""This module makes a GPU's own view, `/api/v1/gpus/UUID`: as in the picture, with everything podgpu knows of it. Pure.

An exporter adds the fields it reads, the XIDs it heard and its sources; the cluster has these from the GPU's exporter,
whose answer is checked member by member: any server may have written it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from podgpu.errors import SourceError
from podgpu.figures.as_json import node_json
from podgpu.figures.picture import NodePicture, Picture
from podgpu.metrics.conditions import xid_class, xid_text
from podgpu.metrics.families import CLOCK_EVENTS_FIELD, clock_events_in_words
from podgpu.metrics.fields import detail_helps, fields
from podgpu.model import Value
from podgpu.node_state import DeviceState, NodeState, SourceStatus

JSON = dict[str, Any]
MOST_FIELDS, MOST_XIDS, MOST_SOURCES = 1024, 256, 64
_LONGEST = 512
_MEMBERS: Mapping[str, tuple[int, frozenset[str]]] = {
    "fields": (MOST_FIELDS, frozenset({"name", "help", "unit", "value", "source"})),
    "xids": (MOST_XIDS, frozenset({"xid", "says", "class", "at", "total"})),
    "sources": (MOST_SOURCES, frozenset({"source", "ok", "error", "message"})),
}


def gpu_json(picture: Picture, uuid: str) -> JSON | None:
    """The GPU as the picture has it. None: there is none."""
    found = node_with(picture, uuid)
    if found is None:
        return None
    (gpu,) = (gpu for gpu in node_json(found)["gpus"] if gpu["uuid"] == uuid)
    answer: JSON = {"api": "podgpu/v1", "node": found.name, "gpu": gpu}
    if picture.taken_at is not None:
        answer["taken_at"] = picture.taken_at
    if found.simulated:
        answer["simulated"] = True
    return answer


def node_with(picture: Picture, uuid: str) -> NodePicture | None:
    """Where it is; where several say they have it, one that answers."""
    nodes = [node for node in picture.nodes if any(device.uuid == uuid for device in node.devices)]
    return min(nodes, key=lambda node: (node.gone, node.old, node.name), default=None)


# What an exporter knows


def details_json(state: NodeState, uuid: str, details: Mapping[int, Value], links_up: int | None) -> JSON:
    """`details`: what is read for this view alone, by field id."""
    gpu = next((gpu for gpu in state.devices if gpu.uuid == uuid), DeviceState(uuid=uuid))
    numbers = {known.name: known.id for known in fields().values()}
    read = {numbers[name]: value for name, value in (gpu.fields or {}).items()}
    sources = [source for source in state.sources if source.up is not None]
    answer: JSON = {
        "fields": list(_fields({**details, **read}, sources[0].name if sources else "", links_up)),
        "xids": list(_xids(gpu)),
        "sources": [_source(source) for source in sources if _concerns(source, gpu)],
    }
    method = gpu.usage.method if gpu.usage is not None else ""
    return {**answer, "method": method} if method else answer


def _fields(values: Mapping[int, Value], source: str, links_up: int | None) -> Iterator[JSON]:
    helps = detail_helps()
    for number in sorted(values, key=lambda i: (list(helps).index(i) if i in helps else len(helps), i)):
        known, value = fields()[number], values[number]
        if number == CLOCK_EVENTS_FIELD and isinstance(value, int):
            value = clock_events_in_words(value)
        yield {"name": known.name, "help": helps.get(number, ""), "unit": known.unit, "value": value, "source": source}
    if links_up is not None:
        help_text = "NVLinks that are up."
        yield {"name": "nvlinks_up", "help": help_text, "unit": "links", "value": links_up, "source": source}


def _xids(gpu: DeviceState) -> Iterator[JSON]:
    """The newest first."""
    counts = [count for slot in (gpu, *gpu.instances) for count in slot.xids]
    for count in sorted(counts, key=lambda count: (-count.last_seen, count.xid)):
        said = {"xid": count.xid, "says": xid_text(count.xid), "class": xid_class(count.xid)}
        yield {**said, "at": round(count.last_seen, 3), "total": count.total}


def _concerns(source: SourceStatus, gpu: DeviceState) -> bool:
    """Not those of other GPUs."""
    if source.device:
        return source.device == gpu.uuid
    is_gpu = source.name.startswith("gpu") and source.name[3:].isdecimal()
    return not is_gpu or source.name == f"gpu{gpu.index}"


def _source(source: SourceStatus) -> JSON:
    if source.up:
        return {"source": source.name, "ok": True}
    return {"source": source.name, "ok": False, "error": source.error, "message": source.message}


# What the cluster takes of it


def parse_details(body: bytes) -> JSON:
    """Fields, XIDs, sources and method of an exporter's answer; what is not of their shape is left out. Raises
    SourceError for what is no such JSON."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise SourceError("malformed", "is not an answer of podgpu's /api/v1/gpus: it is not JSON") from error
    if not isinstance(document, dict) or document.get("api") != "podgpu/v1":
        raise SourceError("malformed", "is not an answer of podgpu's /api/v1/gpus")
    found: JSON = {}
    for name, (most, members) in _MEMBERS.items():
        rows = document.get(name)
        if isinstance(rows, list):
            found[name] = [_row(row, members) for row in rows[:most] if isinstance(row, dict)]
    if isinstance(document.get("method"), str):
        found["method"] = document["method"][:_LONGEST]
    return found


def _row(row: Mapping[str, Any], members: frozenset[str]) -> JSON:
    return {name: plain for name in sorted(members & row.keys()) if (plain := _plain(row[name])) is not None}


def _plain(value: object) -> str | int | float | bool | None:
    """Text or a number; None: neither."""
    if isinstance(value, str):
        return value[:_LONGEST].encode("utf-8", "replace").decode()
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**64 else None
    return value if isinstance(value, float) and math.isfinite(value) else None
