"""Node documents made from parts, and questions to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from podgpu.agent.allocation_turn import AllocationPart
from podgpu.agent.publish import NodeParts
from podgpu.agent.telemetry_turn import TelemetryPart
from podgpu.agent.usage_turn import UsagePart
from podgpu.model import Assignment, HolderUsage, NodeState, Reading, Workload
from podgpu.usage.ledger import UsageSnapshot


def make_parts(
    readings: Iterable[Reading],
    assignments: Iterable[Assignment] = (),
    usage: Mapping[str, Iterable[tuple[Workload, HolderUsage]]] | None = None,
    **more: Any,
) -> NodeParts:
    """Parts in which the devices of the readings are present and shown."""
    readings = tuple(readings)
    devices = tuple(reading.device for reading in readings)
    holders = {key: tuple(those) for key, those in (usage or {}).items()}
    return NodeParts(
        TelemetryPart(devices, devices, readings),
        AllocationPart(tuple(assignments)),
        UsagePart(UsageSnapshot(holders)),
        taken_at=1.0,
        **more,
    )


def errors_of(state: NodeState) -> dict[tuple[str, str], int]:
    """Failures since the start, by source and reason."""
    return {(source.name, reason): count for source in state.sources for reason, count in source.errors.items()}
