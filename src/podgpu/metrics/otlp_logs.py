"""Finds XIDs and lost GPUs in the documents of nodes, and encodes them as OTLP log records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from podgpu.metrics import otlp_pb2 as pb
from podgpu.metrics.conditions import LOST, XID, words_for, xid_spec
from podgpu.metrics.otlp import (
    GPU,
    PushedNode,
    device_attributes,
    holder_attributes,
    make_attributes,
    make_resource,
    make_scope,
    unix_ns,
)
from podgpu.model import DeviceState, GpuOrInstance, Workload, XidCount

XID_EVENT = "podgpu.gpu.xid"
LOST_EVENT = "podgpu.gpu.lost"
_WARN = (13, "WARN")  # numbers of OpenTelemetry
_ERROR = (17, "ERROR")
_Key = tuple[str, str]  # UUID, and the XID or `lost`


class EventFinder:
    """Remembers which events were found, so that each is found once."""

    def __init__(self, since: float, attributes: Mapping[str, str], *, kubernetes: bool) -> None:
        """Events before the Unix time `since` are left out. `attributes`: of the resource."""
        self._since = since
        self._attributes = attributes
        self._kubernetes = kubernetes
        self._last: dict[_Key, float] = {}

    def find(self, nodes: Sequence[PushedNode], now: float) -> list[bytes]:
        """Returns the new events, each encoded as a part of a request.

        Parts can be joined to a request by concatenation.
        """
        parts = []
        for node in nodes:
            for record in self._list_new(node):
                record.observed_time_unix_nano = unix_ns(now)
                parts.append(self._encode(node, record))
        return parts

    def _encode(self, node: PushedNode, record: pb.LogRecord) -> bytes:
        resource = make_resource(node, self._attributes, kubernetes=self._kubernetes)
        request = pb.LogsRequest()
        message = request.resource_logs.add(resource=resource)
        message.scope_logs.add(scope=make_scope(), log_records=[record])
        return bytes(request.SerializeToString())

    def _list_new(self, node: PushedNode) -> Iterator[pb.LogRecord]:
        name = node.state.node
        for gpu in node.state.devices:
            for condition in gpu.conditions:
                if condition.name == LOST and self._is_new(gpu, LOST, condition.since):
                    yield _make_lost(name, gpu, condition.since)

            for device in (gpu, *gpu.instances):
                for xid in device.xids:
                    if self._is_new(gpu, str(xid.xid), xid.last_seen):
                        yield _make_xid(name, gpu, device, xid)

    def _is_new(self, gpu: DeviceState, event: str, at: float | None) -> bool:
        """Remembers the event, so that it is new only once."""
        key = gpu.uuid, event
        if at is None or at < self._since or at <= self._last.get(key, 0.0):
            return False
        self._last[key] = at
        return True


def _make_lost(node: str, gpu: DeviceState, since: float | None) -> pb.LogRecord:
    pairs = device_attributes(gpu, gpu)
    pairs += GPU
    pairs += _attributes_of_one(gpu.last_holders)
    says, do = words_for(LOST)
    text = f"{_name(node, gpu)}: {says}: {do}"
    return _make_record(LOST_EVENT, _ERROR, text, pairs, since)


def _make_xid(node: str, gpu: DeviceState, device: GpuOrInstance, xid: XidCount) -> pb.LogRecord:
    pairs = device_attributes(gpu, device)
    pairs += GPU
    pairs.append(("error.type", f"xid_{xid.xid}"))
    culprits = xid.culprits
    # Only if all occurrences have the same cause.
    if len(culprits) == 1 and culprits[0].total == xid.total:
        pairs += _attributes_of_one(culprits)

    says, do = words_for(XID, str(xid.xid))
    text = f"{_name(node, gpu)}: {says}"
    severity = _WARN
    if xid_spec(xid.xid).needs_action:
        severity = _ERROR
        text += f": {do}"

    record = _make_record(XID_EVENT, severity, text, pairs, xid.last_seen)
    record.attributes.add(key="podgpu.xid", value=pb.AnyValue(int_value=xid.xid))
    record.attributes.add(key="podgpu.xid.total", value=pb.AnyValue(int_value=xid.total))
    return record


def _attributes_of_one(workloads: Sequence[Workload]) -> list[tuple[str, str]]:
    return holder_attributes(workloads[0], None) if len(workloads) == 1 else []


def _make_record(
    event: str,
    severity: tuple[int, str],
    text: str,
    pairs: Sequence[tuple[str, str]],
    at: float | None,
) -> pb.LogRecord:
    number, name = severity
    return pb.LogRecord(
        time_unix_nano=unix_ns(at or 0.0),
        severity_number=number,
        severity_text=name,
        body=pb.AnyValue(string_value=text),
        attributes=make_attributes(pairs),
        event_name=event,
    )


def _name(node: str, gpu: DeviceState) -> str:
    index = gpu.uuid if gpu.index is None else str(gpu.index)
    return f"GPU {index} of {node}"
