"""This module says what podgpu's own servers answer beside the view: everybody's utilisation of late, and all that is
known of one GPU.

Whatever is not as docs/api.md has it is left out; an answer that is not podgpu's at all raises SourceError. Pure.
"""

from __future__ import annotations

import binascii
import json
import math
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from podgpu.cluster.view import decode_details
from podgpu.errors import SourceError

FULL = 200
"""One byte a point: so much is a utilisation of 1."""
NO_DATA = 255
_MOST_POINTS = 10_000
_LONGEST_STEP = 86_400.0


@dataclass(frozen=True, slots=True)
class ServerHistory:
    step: float
    """Seconds from a point to the next."""
    devices: Mapping[tuple[str, str], bytes] = field(default_factory=dict)
    """UUID and MIG instance -> a byte a point, the oldest first; the last is of now."""


@dataclass(frozen=True, slots=True)
class FieldFact:
    name: str
    value: str
    unit: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class XidFact:
    number: int
    says: str = ""
    kind: str = ""
    """By NVIDIA's classes: application, driver, hardware."""
    at: float | None = None


@dataclass(frozen=True, slots=True)
class SourceFact:
    name: str
    works: bool
    message: str = ""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """Everything the server knows of one GPU, beyond its figures."""

    fields: tuple[FieldFact, ...] = ()
    xids: tuple[XidFact, ...] = ()
    sources: tuple[SourceFact, ...] = ()
    method: str = ""
    """How busy time is told apart there."""


def parse_history(body: bytes) -> ServerHistory:
    """Of `/api/v1/history`. Raises SourceError."""
    document = _document(body)
    step, devices = _read_number(document.get("step_seconds")), document.get("devices")
    if step is None or not 0 < step <= _LONGEST_STEP or not isinstance(devices, dict):
        raise SourceError("malformed", "answers without a history")
    found = ((_device_key(name), _points(text)) for name, text in devices.items())
    return ServerHistory(step, {key: points for key, points in found if points})


def parse_gpu_facts(body: bytes) -> GpuFacts:
    """Of `/api/v1/gpus/UUID`. Raises SourceError."""
    details = decode_details(body)
    return GpuFacts(
        fields=tuple(FieldFact(of.name, _value(of.value), of.unit, of.source) for of in details.fields or ()),
        xids=tuple(XidFact(of.xid, of.says, of.class_, of.at) for of in details.xids or ()),
        sources=tuple(SourceFact(of.source, of.ok, of.message or of.error) for of in details.sources),
        method=details.method,
    )


def _device_key(name: str) -> tuple[str, str]:
    uuid, _, instance = name.partition("/")
    return uuid, instance


def _points(text: object) -> bytes:
    if not isinstance(text, str) or len(text) > 2 * _MOST_POINTS:
        return b""
    try:
        points = b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""
    return bytes(point if point <= FULL else NO_DATA for point in points)


def _value(value: object) -> str:
    """As it is read: a whole number without a point."""
    if isinstance(value, str):
        return value
    number = _read_number(value)
    return "" if number is None else f"{number:.0f}" if number.is_integer() else f"{number:g}"


def _document(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or document.get("api") != "podgpu/v1":
        raise SourceError("malformed", "does not answer as podgpu does")
    return document


def _read_number(value: object) -> float | None:
    """Returns None for anything else, also for infinite numbers and `true`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None
