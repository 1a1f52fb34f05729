"""Takes figures from the metrics of an existing dcgm-exporter (1.x or later), read from a URL or a file.

`inventory` fetches the text, and all readings until the next call use it. Holders in the text are ignored.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from podgpu.errors import DeviceLost, SourceError
from podgpu.gpu.companion import CompanionDriver, UsageFromCompanion
from podgpu.gpu.exposition import ParsedExposition, is_of_device, parse_exposition, select_copy
from podgpu.gpu.exposition_source import ExpositionSource
from podgpu.gpu.source import ErrorEvent, GpuAnswer, Inventory, Telemetry
from podgpu.metrics.fields import XID_FIELD, Blank, Field, fields, value_printed
from podgpu.metrics.names import converted, counterpart
from podgpu.metrics.parse import ParsedSample
from podgpu.model import Device, Reading, Value

_EXPORTER_FIELDS = 9000
"""Fields from here on are counted by the exporter itself. podgpu counts its own."""
_MAX_DEVICES = 1024
"""GPUs and MIG instances of one node. Each GPU is read in its own thread."""
_MAX_XID = 2**31 - 16


class ExporterTelemetry(UsageFromCompanion):
    name = "exporter"

    def __init__(
        self,
        source: ExpositionSource,
        driver: Telemetry | None = None,
        *,
        device_name_ids: bool = False,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`device_name_ids`: the kubelet's nvidia<N> is the label `device` of the metrics."""
        self.expected: int | None = None
        self.shown = source.shown
        """Name of the source in messages."""
        self._source = source
        self._companion = CompanionDriver(driver)
        self._device_name_ids = device_name_ids
        self._wall = wall
        self._scrape: _Scrape | None = None
        self._last_xid: dict[str, int] = {}
        self._events: list[ErrorEvent] = []

    def inventory(self) -> Inventory:
        self._scrape = None  # after a failure, old values must not be reported again
        exposition = parse_exposition(self._source.fetch(), self.shown)
        devices = exposition.devices
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
        scrape = _Scrape(exposition, {d.key: d for d in self._companion.complete(devices)})
        self._record_xids(scrape)
        self._scrape = scrape
        return Inventory(tuple(d for d in scrape.devices.values() if not d.is_instance))

    def read(self, gpu: Device, fields: Sequence[Field]) -> GpuAnswer:
        scrape = self._scrape
        if scrape is None:
            raise SourceError("unreachable", f"{self.shown} was not read this time")
        if gpu.uuid not in scrape.devices:
            raise DeviceLost(f"GPU {gpu.index} ({gpu.uuid}) is no longer in the metrics of {self.shown}")
        return scrape.read_gpu(gpu.uuid, [f for f in fields if f.id < _EXPORTER_FIELDS])

    def _record_xids(self, scrape: _Scrape) -> None:
        """The metrics contain the last XID only, so a changed number is a new event."""
        for device in scrape.devices.values():
            sample = scrape.find_xid(device)
            xid = int(sample.value) if sample is not None and 0 <= sample.value < _MAX_XID else 0
            if xid and xid != self._last_xid.get(device.key):
                self._events.append(ErrorEvent(device.key, xid, self._wall()))
            self._last_xid[device.key] = xid

    def error_events(self) -> Sequence[ErrorEvent]:
        events, self._events = self._events, []
        return events

    def release(self, wait: float) -> bool:
        self._scrape = None
        return self._companion.release(wait)


class _CopiesDiffer(Exception):
    """Several series of the same figure have different values."""


class _Scrape:
    """The samples of one text, by device and name."""

    def __init__(self, exposition: ParsedExposition, devices: Mapping[str, Device]) -> None:
        self.devices = devices
        self._samples: dict[str, dict[str, list[ParsedSample]]] = defaultdict(lambda: defaultdict(list))
        for family in exposition.families:
            for sample in family.samples:
                device = exposition.find_device(sample)
                if device is not None and is_of_device(sample.labels):
                    self._samples[device.key][sample.name].append(sample)
        self._instances: dict[str, list[str]] = defaultdict(list)
        for device in devices.values():
            if device.is_instance:
                self._instances[device.uuid].append(device.key)

    def read_gpu(self, uuid: str, fields: Sequence[Field]) -> GpuAnswer:
        readings: list[Reading] = []
        unsupported: list[tuple[str, int]] = []
        dropped: list[int] = []
        errors: list[str] = []
        for key in (uuid, *self._instances.get(uuid, ())):
            device = self.devices[key]
            values: dict[int, Value] = {}
            for wanted in fields:
                if device.is_instance and not wanted.per_instance:
                    continue
                try:
                    value = self._read_value(device, wanted)
                except Blank:
                    dropped.append(wanted.id)
                except _CopiesDiffer:
                    errors.append("copies_differ")
                else:
                    if value is None:
                        unsupported.append((key, wanted.id))
                    else:
                        values[wanted.id] = value
            readings.append(Reading(device, values))
        has_xids = self.find_xid(self.devices[uuid]) is not None
        return GpuAnswer(tuple(readings), tuple(unsupported), tuple(dropped), tuple(errors), reports_errors=has_xids)

    def _read_value(self, device: Device, wanted: Field) -> Value | None:
        """Returns the field's own value, or that of the same figure in another unit."""
        if wanted.type == "text":
            return self._read_label(device, wanted)
        value = self._read_number(device, wanted)
        other = counterpart(wanted) if value is None else None
        if other is None:
            return value
        value = self._read_number(device, other[0])
        return None if value is None else converted(wanted, value, other[1])

    def _read_number(self, device: Device, wanted: Field) -> int | float | None:
        copies = self._find_samples(device, wanted)
        if not copies:
            return None
        sample = select_copy(copies)
        if sample is None:
            raise _CopiesDiffer
        return value_printed(wanted, sample.value)

    def _read_label(self, device: Device, wanted: Field) -> str | None:
        """Fields of type label in the exporter's counter file are labels of every series."""
        for samples in self._samples.get(device.key, {}).values():
            for sample in samples:
                text = next((sample.labels[name] for name in wanted.names if sample.labels.get(name)), None)
                if text is not None:
                    return text
        return None

    def find_xid(self, device: Device) -> ParsedSample | None:
        copies = self._find_samples(device, fields()[XID_FIELD])
        return select_copy(copies) if copies else None

    def _find_samples(self, device: Device, wanted: Field) -> list[ParsedSample]:
        """If only instances are shown, figures of the GPU are on their series."""
        own = self._find_by_name(device.key, wanted)
        if own or device.is_instance or wanted.per_instance:
            return own
        return [sample for key in self._instances.get(device.uuid, ()) for sample in self._find_by_name(key, wanted)]

    def _find_by_name(self, key: str, wanted: Field) -> list[ParsedSample]:
        samples = self._samples.get(key, {})
        return next((samples[name] for name in wanted.names if name in samples), [])
