"""Explains unmapped assignments for the exporter's log and `podgpu doctor`, with the texts of unmapped.csv."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

from podgpu.errors import one_line
from podgpu.holders.device_ids import parse_device_id
from podgpu.metrics.fields import table_rows
from podgpu.model import Unmapped


class Explanation(NamedTuple):
    reason: str
    advice: str
    harmless: bool = False


@cache
def explanations() -> Mapping[tuple[str, str], Explanation]:
    """Returns the explanations by source and reason. The source is empty if the explanation is for all sources."""
    return {
        (row["source"], row["reason"]): Explanation(row["says"], row["do"], bool(row["harmless"]))
        for row in table_rows("unmapped.csv")
    }


def explain(unmapped: Unmapped) -> Explanation:
    return (
        explanations().get((unmapped.source, unmapped.reason))
        or explanations().get(("", unmapped.reason))
        or Explanation(f"it cannot be used ({unmapped.reason})", "check the exporter's log")
    )


def describe(unmapped: Unmapped) -> str:
    """Describes the assignment on one line, such as `ns/pod/main holds nvidia.com/gpu GPU-…`."""
    holder, device_id = unmapped.holder.text, unmapped.device_id
    if unmapped.source == "hpc":
        return one_line(f"{holder} is in the job file {device_id}" if holder else f"job file {device_id}")
    if unmapped.reason == "bad_annotation":
        return one_line(f"{holder} has the annotation {device_id}")
    verb = "uses" if unmapped.source == "processes" else "holds"
    resource = "" if unmapped.resource in (unmapped.source, "pid") else unmapped.resource
    return one_line(" ".join(filter(None, (holder or "a process", verb, resource, device_id))))


def find_lost_gpus(offered: Iterable[str], unmapped: Iterable[Unmapped], some_lost: bool) -> set[str]:
    """Returns UUIDs of GPUs that must exist: those offered by the kubelet and, if the driver misses GPUs on the bus,
    those that are held. Otherwise a held id may belong to a GPU that was replaced."""
    uuids = set(offered)
    if some_lost:
        ids = (
            parse_device_id(entry.device_id)
            for entry in unmapped
            if entry.reason == "unknown_device" and entry.source == "kubelet"
        )
        uuids |= {device_id.gpu_uuid for device_id in ids if device_id is not None and device_id.gpu_uuid}
    return uuids
