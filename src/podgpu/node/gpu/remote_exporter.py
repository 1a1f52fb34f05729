"""Reads GPU values from the metrics of dcgm-exporter (1.x or later), at a URL or in a file.

`inventory` fetches the metrics text. Until the next call of `inventory`, all readings use this
text. Pod labels in the text are ignored.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

from podgpu.errors import DeviceLost, SourceError, UsageError
from podgpu.files import identify_file, read_settled
from podgpu.http_client import (
    DEFAULT_TIMEOUT,
    MAX_METRICS_BYTES,
    METRICS_TYPES,
    Access,
    HttpClient,
    redact_url,
    with_scheme,
)
from podgpu.metrics.adapter import node_from_samples, read_device_key
from podgpu.metrics.fields import XID_NAME, Field, field_named, fields
from podgpu.metrics.parse import (
    BadExposition,
    ParsedFamily,
    ParsedSample,
    check_is_metrics,
    parse_text,
)
from podgpu.metrics.values import Blank, scale_number, value_printed
from podgpu.model import (
    Device,
    DeviceState,
    ErrorEvent,
    FieldValues,
    GpuReading,
    Inventory,
    Value,
)
from podgpu.node.gpu.source import EXPORTER_FIELDS, CompanionDriver, ErrorEvents, Telemetry

# Labels of samples that do not belong to a GPU or MIG instance.
_OTHER_ENTITIES = ("nvlink", "nvswitch", "cpu", "cpucore")


# Text

_MAX_AGE = 300.0  # maximum age of a file in seconds
_PATH = re.compile(r"\.{0,2}/(?!/)")  # /…, ./… or ../…
# USER:PASSWORD@HOST. The @ may be escaped, or the full-width one, which HTTP clients also accept.
_LOGIN = re.compile(r":.*(?:@|%40|\uff20)", re.DOTALL)


class UrlExposition:
    def __init__(
        self, url: str, access: Access | None = None, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        """Uses the path /metrics if the URL has no path."""
        self._client = HttpClient(
            url, access, timeout=timeout, max_bytes=MAX_METRICS_BYTES, default_path="/metrics"
        )
        self.shown = self._client.shown  # name of the source in messages

    def fetch(self) -> bytes:
        body = self._client.get_blocking(accept=METRICS_TYPES)
        check_is_metrics(body, self.shown)
        return body


class FileExposition:
    def __init__(self, path: str) -> None:
        self.shown = path  # name of the source in messages
        self.path = path

    def fetch(self) -> bytes:
        age = time.time() - identify_file(self.path).modified_ns / 1e9
        if age > _MAX_AGE:
            raise SourceError(
                "stale",
                f"{self.path} was last written {age:.0f} s ago and is ignored after {_MAX_AGE:g} s:"
                " check that the program that writes it is running",
            )

        content = read_settled(self.path, MAX_METRICS_BYTES)
        if content is None or not content.endswith(b"\n"):
            raise SourceError(
                "being_written",
                f"{self.path} is empty, ends in the middle of a line or changed while it was read: "
                "the program that writes it should write to a temporary file and then rename it",
            )
        return content


ExpositionSource = UrlExposition | FileExposition


def open_exposition_source(
    place: str, access: Access | None = None, *, timeout: float = DEFAULT_TIMEOUT
) -> ExpositionSource:
    """Returns the source for a URL, HOST:PORT or a file.

    A file name that looks like HOST:PORT must start with `./`.
    """
    scheme, separator, _ = place.partition("://")
    is_url = separator and scheme.lower() in ("http", "https")
    is_host_port = with_scheme(place) != place
    if is_url or is_host_port:
        return UrlExposition(place, access, timeout)

    # A path is shown in messages, so a password must not be taken for a part of it.
    may_have_login = not _PATH.match(place) and _LOGIN.search(place)
    if not place or separator or may_have_login:
        advice = "write HOST:9400, http(s)://HOST:9400/metrics or the path of a file"
        raise UsageError(f"{redact_url(place)} cannot be read: {advice}")
    return FileExposition(place)


def parse_exposition(content: bytes, shown: str) -> list[ParsedFamily]:
    """Parses metrics text. Raises SourceError if the text is malformed."""
    check_is_metrics(content, shown)
    try:
        return parse_text(content.decode())
    except UnicodeDecodeError as error:
        raise SourceError("malformed", f"{shown}: byte {error.start} is not UTF-8") from error
    except BadExposition as error:
        raise SourceError("malformed", f"{shown}: {error}") from error


# Devices

DeviceValues = tuple[Device, Mapping[str, Value]]  # a device and its values by field name
_ValueKey = tuple[str, int]  # device key, and field id of DCGM 4.8


def find_devices(samples: Iterable[ParsedSample], shown: str, by_name: bool) -> list[DeviceValues]:
    """Returns the devices and their values by DCGM 4.8 field name.

    A GPU comes before its MIG instances. `by_name`: True if the kubelet's GPU ids are nvidia<N>, as
    in the label `device`. Raises SourceError if a value is too large.
    """
    try:
        nodes = node_from_samples(samples)
    except msgspec.ValidationError as error:
        raise SourceError("malformed", f"{shown}: {error}") from error

    devices = []
    for node in nodes:
        for gpu in node.devices:
            if gpu.uuid and gpu.index is not None:
                devices += _list_devices(gpu, by_name)
    return devices


def _list_devices(gpu: DeviceState, by_name: bool) -> list[DeviceValues]:
    device = Device(
        gpu.index,
        gpu.uuid,
        gpu.pci_bus_id,
        gpu.model,
        minor=gpu.index if by_name else None,
        mig_enabled=gpu.mig_enabled,
    )
    devices: list[DeviceValues] = [(device, gpu.fields or {})]

    for instance in gpu.instances:
        # dcgm-exporter reports the UUID only for instances that DRA has allocated.
        uuids = [holder.labels.get("dra_mig_device_uuid", "") for holder in instance.holders]
        mig_uuids = tuple(uuid for uuid in uuids if uuid)
        mig = replace(device, gi_id=instance.id, profile=instance.profile, mig_uuids=mig_uuids)
        devices.append((mig, instance.fields or {}))
    return devices


class ExporterTelemetry:
    name = "exporter"

    def __init__(
        self,
        source: ExpositionSource,
        driver: Telemetry | None = None,
        *,
        device_name_ids: bool = False,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`device_name_ids`: True if the kubelet's GPU ids are nvidia<N>."""
        self.expected: int | None = None
        self.shown = source.shown
        self._source = source
        self._companion = CompanionDriver(driver)
        self.processes = self._companion.processes
        self.usage = self._companion.usage
        self._device_name_ids = device_name_ids
        self._wall = wall

        # By device key: the device and its values. None before the first fetch, if the last fetch
        # failed, and after `release`.
        self._devices: Mapping[str, DeviceValues] | None = None
        # Values that are special codes, NaN or impossible.
        self._blank: set[_ValueKey] = set()
        # Number of samples of each value. It is above 1 if the exporter repeats values for each
        # pod.
        self._copies: Counter[_ValueKey] = Counter()

        self._last_xid: dict[str, int] = {}  # by device key; 0 if there is none
        self._events = ErrorEvents()
        self.error_events = self._events.drain

    def inventory(self) -> Inventory:
        self._devices = None  # if the next fetch fails, old values must not be reported

        families = parse_exposition(self._source.fetch(), self.shown)
        samples = self._select_samples(families)
        devices = find_devices(samples, self.shown, self._device_name_ids)
        if not devices:
            raise SourceError(
                "no_gpu", f"{self.shown} has no GPU: check that it is a dcgm-exporter"
            )

        self._companion.update()
        self._devices = {}
        for device, values in devices:
            self._devices[device.key] = self._companion.complete(device), values
            self._detect_xid(device.key, values)

        gpus = [device for device, _ in self._devices.values() if not device.is_instance]
        return Inventory(tuple(gpus))

    def _detect_xid(self, key: str, values: Mapping[str, Value]) -> None:
        """Reports an error if the last XID has changed, which is the only sign of a new error."""
        xid = int(values.get(XID_NAME, 0))
        if xid and xid != self._last_xid.get(key):
            self._events.add(ErrorEvent(key, xid, self._wall()))
        self._last_xid[key] = xid

    def _select_samples(self, families: Iterable[ParsedFamily]) -> list[ParsedSample]:
        """Returns the samples of GPUs, with NaN for invalid values. Sets `_blank` and `_copies`."""
        samples = []
        self._blank = set()
        self._copies = Counter()

        for family in families:
            for sample in family.samples:
                field = field_named(sample.name)
                if field is None or any(label in sample.labels for label in _OTHER_ENTITIES):
                    continue

                key = read_device_key(sample.labels), field.legacy or field.id
                self._copies[key] += 1
                try:
                    value_printed(field, sample.value)
                except Blank:
                    self._blank.add(key)
                    # The sample is kept, because it shows that the device exists.
                    sample = sample._replace(value=math.nan)
                samples.append(sample)
        return samples

    def read(self, gpu: Device, fields: Sequence[Field]) -> GpuReading:
        devices = self._devices  # `inventory` may replace it during this call
        if devices is None:
            raise SourceError("unreachable", f"{self.shown} could not be read")
        if gpu.uuid not in devices:
            raise DeviceLost(f"{gpu.text} is no longer in the metrics of {self.shown}")

        readings: dict[Device, FieldValues] = {}
        unsupported: list[tuple[str, int]] = []
        dropped = []
        errors = []
        for device, printed in devices.values():
            if device.uuid != gpu.uuid:
                continue
            values: dict[int, Value] = {}
            for field in _select_readable(fields, device):
                key = device.key, field.legacy or field.id
                value = _convert(field, printed)
                if value is not None:
                    values[field.id] = value
                elif key in self._blank:
                    dropped.append(field.id)
                elif self._copies[key] > 1:
                    # `find_devices` omits a value if its samples differ.
                    errors.append("copies_differ")
                else:
                    unsupported.append((device.key, field.id))
            readings[device] = values

        _, values_of_gpu = devices[gpu.uuid]
        return GpuReading(
            readings,
            unsupported=tuple(unsupported),
            dropped=tuple(dropped),
            errors=tuple(errors),
            reports_errors=XID_NAME in values_of_gpu,
        )

    def release(self, wait: float) -> bool:
        self._devices = None
        return self._companion.release(wait)


def _select_readable(fields: Iterable[Field], device: Device) -> list[Field]:
    readable = []
    for field in fields:
        if field.id < EXPORTER_FIELDS and (field.per_instance or not device.is_instance):
            readable.append(field)
    return readable


def _convert(field: Field, values: Mapping[str, Value]) -> Value | None:
    """Returns the value of `field` in its unit, or None if it is missing.

    `values` are by the names of DCGM 4.8, and in its units.
    """
    if field.legacy is None:
        value = values.get(field.name)
    else:
        value = values.get(fields()[field.legacy].name)

    if value is None or isinstance(value, str):
        return value
    if field.factor != 1.0:
        return scale_number(field, value, field.factor)
    if field.type == "int":
        return math.floor(value)
    return float(value)
