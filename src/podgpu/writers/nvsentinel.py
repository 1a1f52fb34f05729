"""Reports the health of GPUs to NVSentinel, on the socket of its platform connector.

Each GPU has one check. An event is sent when the problems of a GPU change, and for each GPU after a
start. By default, NVSentinel only stores the events.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from podgpu.clock import Clock
from podgpu.errors import SourceError
from podgpu.metrics.conditions import RECOVERY, XID, parse_xids, xid_spec
from podgpu.model import DeviceState
from podgpu.node.holders.kubelet import GrpcError, call_unary
from podgpu.writers.gpu_changes import GpuRecord
from podgpu.writers.health_events_pb2 import HealthEvents
from podgpu.writers.health_writer import NodeUpdate
from podgpu.writers.write_option import NVSENTINEL
from podgpu.writers.write_queue import Write

AGENT = "podgpu"
CHECK = "PodgpuGpuHealth"
_METHOD = "/datamodels.PlatformConnector/HealthEventOccurredV1"
_TIMEOUT = 5.0
_MAX_MESSAGE = 1024
_STORE_ONLY = "STORE_ONLY"
# NVSentinel's recommended actions.
_RESTART = "RESTART_BM"
_SUPPORT = "CONTACT_SUPPORT"
_RESET = "COMPONENT_RESET"
_DIAGNOSE = "RUN_DCGMEUD"
_ORDER = (_RESTART, _SUPPORT, _RESET, _DIAGNOSE)
"""The most drastic action comes first."""
_ACTIONS: Mapping[str, str] = {
    "lost": _RESTART,
    "unreadable": _RESET,
    "row_remap_failure": _SUPPORT,
    "ecc": _RESET,
    "nvlink": _RESET,
    "recurring": _DIAGNOSE,
}
"""Condition -> action. Other conditions need an operator: CONTACT_SUPPORT."""
_XID_ACTIONS = {"reboot": _RESTART, "reset": _RESET}
_DRIVER_ACTIONS: Mapping[str, str] = {
    "reset": _RESET,
    "drain_and_reset": _RESET,
    "reboot": _RESTART,
    "bus_reset": _RESTART,
    "system_reboot": _RESTART,
}
"""Recovery action of the driver -> NVSentinel's action."""


class _Reported(NamedTuple):
    """What NVSentinel knows of a GPU. Another XID is reported, too, while the problem lasts."""

    problems: tuple[str, ...]
    xids: str


def _select_reported(record: GpuRecord) -> _Reported:
    return _Reported(tuple(record.problems), record.details.get(XID, ""))


class SentinelWriter:
    def __init__(self, path: str, node: str, strategy: str, clock: Clock) -> None:
        self._path = path
        self._node = node
        self._strategy = strategy or _STORE_ONLY
        self._clock = clock
        self._reported: dict[str, _Reported] = {}
        self._entities: dict[str, list[tuple[str, str]]] = {}

    def update(self, update: NodeUpdate) -> list[Write]:
        if update.is_stale:
            return []

        for gpu in update.state.devices:
            self._entities[gpu.uuid] = _list_entities(gpu)

        records = dict(update.records)
        # A GPU that was forgotten (`podgpu forget`) has no problem any more.
        for uuid, reported in self._reported.items():
            if uuid not in records and reported.problems:
                records[uuid] = GpuRecord("a removed GPU")

        changed = {}
        for uuid, record in records.items():
            if self._reported.get(uuid) != _select_reported(record):
                changed[uuid] = record

        if not changed:
            return []

        async def send() -> None:
            await self._send(changed)

        return [Write(NVSENTINEL, "events", send)]

    async def _send(self, changed: Mapping[str, GpuRecord]) -> None:
        # The error of gRPC would not say what to check. The queue tries again until NVSentinel has
        # made the socket.
        if not os.path.exists(self._path):
            raise SourceError(
                "socket_missing",
                f"NVSentinel's socket {self._path} does not exist: check that its platform "
                "connector runs on this node, and that the directory of the socket is mounted",
            )

        events = [self._make_event(uuid, record) for uuid, record in changed.items()]
        message = HealthEvents(version=1, events=events).SerializeToString()
        try:
            await asyncio.to_thread(call_unary, self._path, _METHOD, _TIMEOUT, message)
        except GrpcError as error:
            raise SourceError(
                "unreachable", f"NVSentinel did not accept events on {self._path}: {error}"
            ) from error

        for uuid, record in changed.items():
            self._reported[uuid] = _select_reported(record)

    def _make_event(self, uuid: str, record: GpuRecord) -> dict[str, Any]:
        is_healthy = not record.problems
        gpu = f"{record.name} ({uuid})"
        problems = list(record.problems.values()) or ["podgpu knows no problem"]
        text = "; ".join(f"{gpu}: {problem}" for problem in problems)
        entities = []
        for kind, value in self._entities.get(uuid) or [("GPU_UUID", uuid)]:
            entities.append({"entity_type": kind, "entity_value": value})

        return {
            "version": 1,
            "agent": AGENT,
            "component_class": "GPU",
            "check_name": CHECK,
            "is_fatal": not is_healthy,
            "is_healthy": is_healthy,
            "message": text[:_MAX_MESSAGE],
            "recommended_action": "NONE" if is_healthy else recommend(record),
            "error_code": list_error_codes(record),
            "entities_impacted": entities,
            "generated_timestamp": {"seconds": int(self._clock.wall())},
            "node_name": self._node,
            "processing_strategy": self._strategy,
        }


def _list_entities(gpu: DeviceState) -> list[tuple[str, str]]:
    """Returns types and values, with the names of NVSentinel's own monitors."""
    entities = []
    if gpu.index is not None:
        entities.append(("GPU", str(gpu.index)))
    if gpu.pci_bus_id:
        entities.append(("PCI", gpu.pci_bus_id))
    if gpu.uuid:
        entities.append(("GPU_UUID", gpu.uuid))

    return entities


def recommend(record: GpuRecord) -> str:
    """Returns the action for a broken GPU. The driver's own advice comes first."""
    advised = _DRIVER_ACTIONS.get(record.details.get(RECOVERY, ""))
    if advised is not None:
        return advised
    actions = set(_find_actions(record))
    return next(action for action in _ORDER if action in actions)


def _find_actions(record: GpuRecord) -> Iterable[str]:
    for name in record.problems:
        if name != XID:
            yield _ACTIONS.get(name, _SUPPORT)
            continue
        # The least action, if no XID is known.
        yield _DIAGNOSE
        for xid in _list_xids(record):
            yield _XID_ACTIONS.get(xid_spec(xid).action, _SUPPORT)


def list_error_codes(record: GpuRecord) -> Sequence[str]:
    """Returns the problems, and XIDs as numbers, as in NVSentinel's own events."""
    codes = [str(xid) for xid in _list_xids(record)]
    codes += [name for name in record.problems if name != XID]
    return codes


def _list_xids(record: GpuRecord) -> list[int]:
    if XID not in record.problems:
        return []
    return parse_xids(record.details.get(XID, ""))
