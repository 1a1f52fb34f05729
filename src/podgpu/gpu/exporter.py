"""Reads figures from the metrics of an existing dcgm-exporter (1.x or later), from a URL or a file.

`inventory` fetches the text, and all readings until its next call use that text. Pod labels in the text are ignored.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import msgspec

from podgpu.errors import DeviceLost, SourceError
from podgpu.gpu.companion import CompanionDriver
from podgpu.gpu.exposition import ExpositionSource, ParsedExposition, parse_exposition
from podgpu.gpu.source import ErrorEvent, GpuAnswer, Inventory, Telemetry
from podgpu.metrics.adapter import node_from_samples
from podgpu.metrics.fields import XID_FIELD, Blank, Field, field_named, fields, value_printed
from podgpu.metrics.names import converted, meaning
from podgpu.metrics.parse import ParsedSample
from podgpu.model import Device, DeviceState, Reading, Value, device_key

_EXPORTER_FIELDS = 9000
"""Fields with this id or a larger one are computed by dcgm-exporter itself. podgpu computes its own."""
_OTHER_ENTITIES = ("nvlink", "nvswitch", "cpu", "cpucore")
_MAX_DEVICES = 1024
"""Maximum number of GPUs and MIG instances. Limited, because each GPU is read in its own thread."""


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
        """`device_name_ids`: the kubelet identifies GPUs as nvidia<N>, as in the label `device` of the metrics."""
        self.expected: int | None = None
        self.shown = source.shown
        """Name of the source in messages."""
        self._source = source
        self._companion = CompanionDriver(driver)
        self.processes = self._companion.processes
        self.usage = self._companion.usage
        self._device_name_ids = device_name_ids
        self._wall = wall
        self._devices: Mapping[str, Device] | None = None
        """Device key -> device. None if the last fetch failed."""
        self._values: Mapping[str, Mapping[str, Value]] = {}
        """Device key -> name of a field in DCGM 4.8 -> value."""
        self._blank: set[tuple[str, int]] = set()
        """(device key, field id in DCGM 4.8) of values that are a sentinel, NaN or impossible."""
        self._last_xid: dict[str, int] = {}
        self._events: list[ErrorEvent] = []

    def inventory(self) -> Inventory:
        self._devices = None  # after a failure, old values must not be reported again
        exposition = parse_exposition(self._source.fetch(), self.shown)
        devices = tuple(exposition.devices.values())
        if not devices:
            raise SourceError("no_gpu", f"{self.shown} has no GPU: check that it is a dcgm-exporter")
        if len(devices) > _MAX_DEVICES:
            raise SourceError(
                "too_many_devices",
                f"{self.shown} has {len(devices)} GPUs and MIG instances, more than a node can have ({_MAX_DEVICES}): "
                "use the exporter of one node",
            )
        if self._device_name_ids:
            devices = tuple(replace(device, minor=device.index) for device in devices)
        self._read_values(exposition)
        self._companion.update()
        self._devices = {device.key: self._companion.complete(device) for device in devices}
        self._record_xids()
        return Inventory(tuple(device for device in self._devices.values() if not device.is_instance))

    def _read_values(self, exposition: ParsedExposition) -> None:
        samples: list[ParsedSample] = []
        self._blank = set()
        for sample in (sample for family in exposition.families for sample in family.samples):
            field = field_named(sample.name)
            if field is None or any(label in sample.labels for label in _OTHER_ENTITIES):
                continue
            try:
                value_printed(field, sample.value)
            except Blank:
                device = exposition.find_device(sample)
                self._blank |= {(device.key, field.legacy or field.id)} if device is not None else set()
            else:
                samples.append(sample)
        try:
            states = node_from_samples(samples)
        except msgspec.ValidationError as error:
            raise SourceError("malformed", f"{self.shown}: {error}") from error
        slots = [slot for state in states for gpu in state.devices for slot in _list_slots(gpu)]
        self._values = {key: values or {} for key, values in slots}

    def read(self, gpu: Device, fields: Sequence[Field]) -> GpuAnswer:
        if self._devices is None:
            raise SourceError("unreachable", f"{self.shown} could not be read")
        if gpu.uuid not in self._devices:
            raise DeviceLost(f"GPU {gpu.index} ({gpu.uuid}) is no longer in the metrics of {self.shown}")
        readings: list[Reading] = []
        unsupported: list[tuple[str, int]] = []
        dropped: list[int] = []
        for device in [device for device in self._devices.values() if device.uuid == gpu.uuid]:
            values: dict[int, Value] = {}
            for field in fields:
                if field.id >= _EXPORTER_FIELDS or (device.is_instance and not field.per_instance):
                    continue
                value = _convert(field, self._values.get(device.key, {}))
                if value is not None:
                    values[field.id] = value
                elif (device.key, field.legacy or field.id) in self._blank:
                    dropped.append(field.id)
                else:
                    unsupported.append((device.key, field.id))
            readings.append(Reading(device, values))
        has_xids = self._read_xid(gpu.uuid) is not None
        return GpuAnswer(tuple(readings), tuple(unsupported), tuple(dropped), reports_errors=has_xids)

    def _read_xid(self, key: str) -> Value | None:
        return self._values.get(key, {}).get(fields()[XID_FIELD].name)

    def _record_xids(self) -> None:
        """Records an event if the XID changed. The metrics contain only the last XID."""
        for key in self._values:
            xid = int(self._read_xid(key) or 0)
            if xid and xid != self._last_xid.get(key):
                self._events.append(ErrorEvent(key, xid, self._wall()))
            self._last_xid[key] = xid

    def error_events(self) -> Sequence[ErrorEvent]:
        events, self._events = self._events, []
        return events

    def release(self, wait: float) -> bool:
        self._devices = None
        return self._companion.release(wait)


def _list_slots(gpu: DeviceState) -> Iterator[tuple[str, Mapping[str, Value] | None]]:
    yield gpu.uuid, gpu.fields
    for instance in gpu.instances:
        yield device_key(gpu.uuid, instance.id), instance.fields


def _convert(field: Field, values: Mapping[str, Value]) -> Value | None:
    """Converts the value of the field in DCGM 4.8 to the unit of this field. Returns None without a value."""
    known = meaning(field.name)
    value = values.get(known.field.name) if known is not None else None
    if known is None or value is None or isinstance(value, str):
        return value
    if known.factor != 1.0:
        return converted(field, value, known.factor)
    return math.floor(value) if field.type == "int" else float(value)
