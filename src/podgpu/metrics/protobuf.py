"""Encodes families in Prometheus' protobuf format, for scrapers that ask for it.

Unlike text format 0.0.4, it has the time at which each counter was 0. With
`--enable-feature=created-timestamp-zero-ingestion`, Prometheus 3 adds a 0 at this time, so that
`increase()` also counts what happened before the first scrape.
"""

from __future__ import annotations

from collections.abc import Iterable
from io import BytesIO

from google.protobuf.proto import serialize_length_prefixed

from podgpu.metrics import exposition_pb2 as pb
from podgpu.metrics.encode import Family, Sample
from podgpu.model import NS

_MEDIA_TYPE = "application/vnd.google.protobuf"
_MESSAGE = "io.prometheus.client.MetricFamily"
PROTOBUF_TYPE = f"{_MEDIA_TYPE}; proto={_MESSAGE}; encoding=delimited"
_TYPES = {"counter": pb.COUNTER, "gauge": pb.GAUGE}
_DCGM_DECIMALS = 6  # as in the text


def encode_protobuf(families: Iterable[Family]) -> bytes:
    """Encodes the families as delimited messages. Families without samples are omitted."""
    encoded = BytesIO()
    for family in families:
        if family.samples:
            serialize_length_prefixed(_make_message(family), encoded)
    return encoded.getvalue()


def _make_message(family: Family) -> pb.MetricFamily:
    kind = _TYPES.get(family.type, pb.UNTYPED)
    message = pb.MetricFamily(name=family.name, help=family.help, type=kind)
    for sample in family.samples:
        metric = message.metric.add()
        for name, value in sample.labels.pairs:
            metric.label.add(name=name, value=value)

        number = float(sample.value)
        if family.dcgm_numbers:
            number = round(number, _DCGM_DECIMALS)
        _set_value(metric, kind, number, sample)

    return message


def _set_value(metric: pb.Metric, kind: int, number: float, sample: Sample) -> None:
    if kind == pb.GAUGE:
        metric.gauge.value = number
    elif kind == pb.UNTYPED:
        metric.untyped.value = number
    else:
        metric.counter.value = number
        if sample.counted_since is not None:
            seconds, nanos = divmod(round(sample.counted_since * NS), NS)
            metric.counter.created_timestamp.seconds = seconds
            metric.counter.created_timestamp.nanos = nanos


def prefers_protobuf(accept: str) -> bool:
    """Returns True if the Accept header prefers this format to text."""
    protobuf_quality = 0.0
    text_quality = 0.0
    for item in accept.split(","):
        media_type, *parameters = map(str.strip, item.split(";"))
        values = {}
        for parameter in parameters:
            name, _, value = parameter.partition("=")
            values[name] = value

        quality = _parse_quality(values.get("q", "1"))
        if media_type == "text/plain":
            text_quality = max(text_quality, quality)

        is_message = values.get("proto") == _MESSAGE and values.get("encoding") == "delimited"
        if media_type == _MEDIA_TYPE and is_message:
            protobuf_quality = max(protobuf_quality, quality)

    return protobuf_quality > text_quality


def _parse_quality(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
