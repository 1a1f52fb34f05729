"""Builds node documents from readings, and reads values from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec.structs import asdict

from podgpu.model import (
    Allocation,
    Assignment,
    Device,
    GpuOrInstance,
    GpuReading,
    Holder,
    HolderUsage,
    NodeState,
    Value,
    Workload,
)
from podgpu.node.agent.gpus import TelemetryResult
from podgpu.node.agent.health import HealthReport
from podgpu.node.agent.publish import build_node_state
from podgpu.node.agent.usage_collector import UsageResult


def make_state(
    device: Device,
    values: Mapping[int, Value],
    assignments: Iterable[Assignment] = (),
    usage: Mapping[str, Iterable[tuple[Workload, HolderUsage]]] | None = None,
    **more: Any,
) -> NodeState:
    """Returns the document of node `h`, which has one device."""
    readings = {device.uuid: GpuReading({device: values})}
    uses = {
        key: GpuOrInstance(holders=tuple(Holder(**asdict(w), usage=u) for w, u in those))
        for key, those in (usage or {}).items()
    }
    more = {"unsupported": (), "pod_labels": {}} | more
    return build_node_state(
        TelemetryResult((device,), (device,), readings, at=1.0),
        Allocation(tuple(assignments)),
        UsageResult(uses),
        HealthReport(),
        node="h",
        **more,
    )


def errors_of(state: NodeState) -> dict[tuple[str, str], int]:
    """Returns the number of failures since the start, by source and reason."""
    return {
        (source.name, reason): count
        for source in state.sources
        for reason, count in source.errors.items()
    }
