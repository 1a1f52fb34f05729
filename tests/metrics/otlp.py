"""Decodes OTLP requests with OpenTelemetry's own messages, for tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest

_WHY = "opentelemetry-proto is not installed (make .venv/dev)"
metrics_service = pytest.importorskip(
    "opentelemetry.proto.collector.metrics.v1.metrics_service_pb2", reason=_WHY
)
logs_service = pytest.importorskip(
    "opentelemetry.proto.collector.logs.v1.logs_service_pb2", reason=_WHY
)


class Point(NamedTuple):
    metric: str
    attributes: dict[str, Any]
    value: int | float
    at: float
    since: float | None
    kind: str  # gauge, counter or updowncounter
    unit: str
    resource: dict[str, Any]


class Record(NamedTuple):
    event: str
    attributes: dict[str, Any]
    body: str
    severity: str
    at: float
    resource: dict[str, Any]


def decode_metrics(body: bytes) -> list[Point]:
    request = metrics_service.ExportMetricsServiceRequest.FromString(body)
    assert not _has_unknown(request)
    points = []
    for resource in request.resource_metrics:
        of_resource = read_attributes(resource.resource.attributes)
        for scope in resource.scope_metrics:
            assert scope.scope.name == "podgpu"
            for metric in scope.metrics:
                points += _list_points(metric, of_resource)
    return points


def _list_points(metric: Any, resource: dict[str, Any]) -> list[Point]:
    kind = metric.WhichOneof("data")
    series = getattr(metric, kind)
    if kind == "sum":
        assert series.aggregation_temporality == 2  # cumulative
        kind = "counter" if series.is_monotonic else "updowncounter"
    points = []
    for point in series.data_points:
        points.append(
            Point(
                metric.name,
                read_attributes(point.attributes),
                getattr(point, point.WhichOneof("value")),
                point.time_unix_nano / 1e9,
                point.start_time_unix_nano / 1e9 or None,
                kind,
                metric.unit,
                resource,
            )
        )
    return points


def decode_logs(body: bytes) -> list[Record]:
    request = logs_service.ExportLogsServiceRequest.FromString(body)
    assert not _has_unknown(request)
    records = []
    for resource in request.resource_logs:
        of_resource = read_attributes(resource.resource.attributes)
        for scope in resource.scope_logs:
            for record in scope.log_records:
                records.append(
                    Record(
                        record.event_name,
                        read_attributes(record.attributes),
                        record.body.string_value,
                        record.severity_text,
                        record.time_unix_nano / 1e9,
                        of_resource,
                    )
                )
    return records


def read_attributes(pairs: Iterable[Any]) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for pair in pairs:
        assert pair.key not in attributes
        attributes[pair.key] = getattr(pair.value, pair.value.WhichOneof("value"))
    return attributes


def _has_unknown(message: Any) -> bool:
    """Returns whether our message has a field that OpenTelemetry's does not have."""
    copy = type(message).FromString(message.SerializeToString())
    copy.DiscardUnknownFields()
    return bool(copy.ByteSize() != message.ByteSize())
