"""This module writes a snapshot as JSON, and reads it: a dump from a user's node is a test fixture. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from msgspec import structs

from podgpu.model import (
    Assignment,
    ContainerUsage,
    Detail,
    Device,
    DeviceCount,
    DeviceHealth,
    DeviceTotals,
    Finding,
    NamespaceTotals,
    OtherReading,
    Outcome,
    Reading,
    Snapshot,
    Unmapped,
    Usage,
    Value,
    VcudaRequest,
    Workload,
    XidTally,
)

VERSION = 1


def dump_snapshot(snapshot: Snapshot) -> str:
    plain = asdict(snapshot)
    plain["errors"] = [[*key, count] for key, count in snapshot.errors.items()]
    plain["pod_labels"] = [[*key, pairs] for key, pairs in snapshot.pod_labels.items()]
    plain["clock_events"] = [[*key, count] for key, count in snapshot.clock_events.items()]
    plain["clock_event_totals"] = [[*key, count] for key, count in snapshot.clock_event_totals.items()]
    return json.dumps({"version": VERSION, **plain}, indent=1, ensure_ascii=False, default=structs.asdict) + "\n"


def load_snapshot(text: str) -> Snapshot:
    """Raises ValueError, KeyError or TypeError on anything that `dump_snapshot` did not write."""
    try:
        return _snapshot(json.loads(text))
    except (AttributeError, RecursionError) as error:  # a list where names belong; a thousand lists in each other
        raise ValueError("not a snapshot of podgpu") from error


def _snapshot(plain: dict[str, Any]) -> Snapshot:
    if plain.pop("version") != VERSION:
        raise ValueError("a snapshot of another version of podgpu")
    return Snapshot(
        taken_at=plain["taken_at"],
        devices=tuple(_device(d) for d in plain["devices"]),
        readings=tuple(_reading(r) for r in plain["readings"]),
        others=tuple(OtherReading(o["kind"], _pairs(o["labels"]), _by_field(o["values"])) for o in plain["others"]),
        assignments=tuple(_assignment(a) for a in plain["assignments"]),
        unmapped=tuple(Unmapped(**{**u, "holder": Workload(**u["holder"])}) for u in plain["unmapped"]),
        vcuda=tuple(VcudaRequest(**{**r, "holder": Workload(**r["holder"])}) for r in plain["vcuda"]),
        pod_labels={(ns, pod): tuple((n, v) for n, v in pairs) for ns, pod, pairs in plain["pod_labels"]},
        outcomes=tuple(Outcome(**o) for o in plain["outcomes"]),
        errors={(source, reason): n for source, reason, n in plain["errors"]},
        unsupported=tuple((key, field) for key, field in plain["unsupported"]),
        dropped=_by_field(plain["dropped"]),
        xids=tuple(XidTally(**t) for t in plain["xids"]),
        last_xid=plain["last_xid"],
        clock_events={(device, event): n for device, event, n in plain["clock_events"]},
        clock_event_totals={(device, event): n for device, event, n in plain.get("clock_event_totals", ())},
        device_count=DeviceCount(**plain["device_count"]),
        usage=_usage(plain["usage"]),
        health=tuple(_health(h) for h in plain.get("health", ())),
    )


def _device(plain: Mapping[str, Any]) -> Device:
    return Device(**{**plain, "mig_uuids": tuple(plain["mig_uuids"])})


def _reading(plain: Mapping[str, Any]) -> Reading:
    details = tuple(Detail(d["field"], _pairs(d["labels"]), d["value"]) for d in plain["details"])
    return Reading(_device(plain["device"]), _by_field(plain["values"]), details)


def _pairs(plain: Iterable[Iterable[str]]) -> tuple[tuple[str, str], ...]:
    return tuple((name, value) for name, value in plain)


def _assignment(plain: Mapping[str, Any]) -> Assignment:
    attributes = _pairs(plain["attributes"])
    return Assignment(**{**plain, "holder": Workload(**plain["holder"]), "attributes": attributes})


def _health(plain: Mapping[str, Any]) -> DeviceHealth:
    return DeviceHealth(
        _device(plain["device"]),
        tuple(Finding(*finding) for finding in plain["findings"]),
        tuple(plain["fine"]),
        tuple(Workload(**holder) for holder in plain["last_holders"]),
    )


def _usage(plain: Mapping[str, Any]) -> Usage:
    return Usage(
        tuple(ContainerUsage(**{**c, "holder": Workload(**c["holder"])}) for c in plain["containers"]),
        tuple(DeviceTotals(**t) for t in plain["devices"]),
        tuple(NamespaceTotals(**t) for t in plain["namespaces"]),
        plain.get("at", 0.0),
    )


def _by_field(plain: Mapping[str, Value]) -> dict[int, Any]:
    """JSON has no number keys."""
    return {int(field): value for field, value in plain.items()}
