"""Documents made from readings, and questions to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from podgpu.agent.publish import build_node_state
from podgpu.agent.telemetry_turn import TelemetryResult
from podgpu.agent.usage_turn import UsageResult
from podgpu.gpu.source import GpuAnswer
from podgpu.holders.reader import AllocationResult
from podgpu.model import Assignment, HolderUsage, NodeState, Reading, Workload


def make_state(
    readings: Iterable[Reading],
    assignments: Iterable[Assignment] = (),
    usage: Mapping[str, Iterable[tuple[Workload, HolderUsage]]] | None = None,
    **more: Any,
) -> NodeState:
    """A document of the node `h`, in which the devices of the readings are present and shown."""
    answers = {reading.device.uuid: GpuAnswer((reading,)) for reading in readings}
    devices = tuple(reading.device for answer in answers.values() for reading in answer.readings)
    holders = {key: {entry[0].key: entry for entry in those} for key, those in (usage or {}).items()}
    return build_node_state(
        TelemetryResult(devices, devices, answers, at=1.0),
        AllocationResult(tuple(assignments)),
        UsageResult(holders),
        {},
        node="h",
        **more,
    )


def errors_of(state: NodeState) -> dict[tuple[str, str], int]:
    """Failures since the start, by source and reason."""
    return {(source.name, reason): count for source in state.sources for reason, count in source.errors.items()}
