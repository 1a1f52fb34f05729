"""Reads an exporter's metrics text from a URL or a file, and finds the GPUs in its labels.

Used by `--telemetry exporter:` and by `podgpu enrich`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from podgpu.errors import SourceError, UsageError
from podgpu.files import look_at, read_bounded
from podgpu.http_client import (
    DEFAULT_TIMEOUT,
    MAX_METRICS_BYTES,
    METRICS_TYPES,
    Access,
    HttpClient,
    check_is_metrics,
    redact_url,
    with_scheme,
)
from podgpu.metrics.parse import BadExposition, ParsedFamily, ParsedSample, parse_text
from podgpu.model import Device

_MAX_AGE = 300.0  # maximum age of a file in seconds
_MAX_LINES = 200_000
"""Limits memory. The largest node has many times fewer lines."""
_UUIDS = ("UUID", "uuid", "gpu_uuid")
_MODELS = ("modelName", "model_name")
_NVIDIA = re.compile(r"nvidia([0-9]{1,9})")
_NUMBER = re.compile(r"[0-9]{1,9}")
LabelSet = Mapping[str, str]


# Text


class ExpositionSource(Protocol):
    shown: str
    """Name of the source in messages, without secrets."""

    def fetch(self) -> bytes:
        """Returns the complete text. Raises SourceError."""


def open_exposition_source(
    place: str, access: Access | None = None, *, timeout: float = DEFAULT_TIMEOUT
) -> ExpositionSource:
    """Opens a URL, HOST:PORT or a file. If a file name looks like HOST:PORT, `./` must precede it.

    Raises UsageError.
    """
    scheme, separator, _ = place.partition("://")
    if with_scheme(place) != place or (separator and scheme.lower() in ("http", "https")):
        return UrlExposition(place, access, timeout)
    may_have_login = not re.match(r"\.{0,2}/(?!/)", place) and re.search(r"(?s):.*(?:@|%40|\uff20)", place)
    if not place or separator or may_have_login:
        advice = "write HOST:9400, http(s)://HOST:9400/metrics or the path of a file"
        raise UsageError(f"{redact_url(place)} cannot be read: {advice}")
    return FileExposition(place)


class UrlExposition:
    def __init__(self, url: str, access: Access | None = None, timeout: float = DEFAULT_TIMEOUT) -> None:
        """A URL without a path means /metrics. Raises UsageError."""
        self._client = HttpClient(url, access, timeout=timeout, max_bytes=MAX_METRICS_BYTES, default_path="/metrics")
        self.shown = self._client.shown

    def fetch(self) -> bytes:
        body = self._client.get_blocking(accept=METRICS_TYPES)
        check_is_metrics(body, self.shown)
        return body


class FileExposition:
    def __init__(self, path: str) -> None:
        self.shown = self.path = path

    def fetch(self) -> bytes:
        age = time.time() - look_at(self.path).modified_ns / 1e9
        if age > _MAX_AGE:
            raise SourceError(
                "stale",
                f"{self.path} was last written {age:.0f} s ago and is ignored after {_MAX_AGE:g} s:"
                " check that the program that writes it is running",
            )
        content = read_bounded(self.path, MAX_METRICS_BYTES)
        if not content.endswith(b"\n"):
            what = "ends in the middle of a line" if content else "is empty"
            raise SourceError(
                "being_written",
                f"{self.path} {what}. It is read again soon. If this does not end, the program that writes it must "
                "write another file and rename it",
            )
        return content


# Devices


@dataclass(frozen=True)
class ParsedExposition:
    families: tuple[ParsedFamily, ...]
    devices: Mapping[str, Device]
    """Device key -> device. Each GPU comes before its MIG instances."""

    def find_device(self, sample: ParsedSample) -> Device | None:
        device = _parse_device(sample.labels)
        return None if device is None else self.devices[device.key]


def parse_exposition(content: bytes, shown: str) -> ParsedExposition:
    """Parses metrics text. Raises SourceError: not_prometheus or malformed (with line and reason)."""
    check_is_metrics(content, shown)
    try:
        families = tuple(parse_text(content.decode(), _MAX_LINES))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise SourceError("malformed", f"{shown}: line {line}: byte {error.start} is not UTF-8") from error
    except BadExposition as error:
        raise SourceError("malformed", f"{shown}: {error}") from error
    label_sets = {id(sample.labels): sample.labels for family in families for sample in family.samples}
    return ParsedExposition(families, _find_devices(label_sets.values()))


def _find_devices(label_sets: Iterable[LabelSet]) -> dict[str, Device]:
    devices: dict[str, Device] = {}
    for device in filter(None, map(_parse_device, label_sets)):
        known = devices.setdefault(device.key, device)
        if known != device:  # NVLink series lack some labels of other series
            devices[device.key] = replace(
                known,
                pci_bus_id=known.pci_bus_id or device.pci_bus_id,
                model=known.model or device.model,
                profile=known.profile or device.profile,
                mig_uuids=known.mig_uuids or device.mig_uuids,
            )
    for instance in [device for device in devices.values() if device.is_instance]:
        # In MIG mode dcgm-exporter shows only the instances, so the GPU is derived from them.
        gpu = devices.get(instance.uuid) or replace(instance, gi_id=None, profile="", mig_uuids=())
        devices[instance.uuid] = replace(gpu, mig_enabled=True)
    ordered = sorted(devices.values(), key=lambda d: (d.index, d.uuid, -1 if d.gi_id is None else d.gi_id))
    return {device.key: device for device in ordered}


def _parse_device(labels: LabelSet) -> Device | None:
    """Returns the GPU or MIG instance of a label set. Returns None if the labels have no UUID or no index."""
    uuid = _first(labels, _UUIDS)
    index = _NUMBER.fullmatch(labels.get("gpu", "")) or _NVIDIA.fullmatch(labels.get("device", ""))
    if not uuid or index is None:
        return None
    gi_id = labels.get("GPU_I_ID", "")
    mig_uuid = labels.get("dra_mig_device_uuid", "")
    return Device(
        index=int(index[index.lastindex or 0]),
        uuid=uuid,
        pci_bus_id=labels.get("pci_bus_id", ""),
        model=_first(labels, _MODELS),
        gi_id=int(gi_id) if _NUMBER.fullmatch(gi_id) else None,
        profile=labels.get("GPU_I_PROFILE", ""),
        mig_uuids=(mig_uuid,) if mig_uuid else (),
    )


def _first(labels: LabelSet, names: Iterable[str]) -> str:
    return next((labels[name] for name in names if labels.get(name)), "")
