"""ExporterTelemetry takes figures from an existing dcgm-exporter, any since 1.x: its exposition by URL, or its file.

It is fetched by `inventory` and stands until the next one: all values of a turn are of one fetch. Who holds what
according to it is dropped: podgpu's own sources say that.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from podgpu.errors import DeviceLost, SourceError
from podgpu.gpu.companion import CompanionDriver, UsageFromCompanion
from podgpu.gpu.exposition import ParsedExposition, is_of_device, parse_exposition, settled
from podgpu.gpu.exposition_source import ExpositionSource
from podgpu.gpu.source import ErrorEvent, GpuAnswer, Inventory, Telemetry
from podgpu.metrics.conversions import Blank, value_printed
from podgpu.metrics.fields import XID_FIELD, Field, field_named, fields
from podgpu.metrics.names import converted, counterpart, names_meant_as_in_4_6
from podgpu.metrics.parse import ParsedSample
from podgpu.model import Device, Reading, Value

_EXPORTER_FIELDS = 9000
"""From here on the exporter's own: counts by XID, by clock event. podgpu keeps its own."""
_COPIES_DIFFER = "copies_differ"
_MOST_DEVICES = 1024
"""GPUs and MIG instances of one node. Each GPU is read in a thread of its own."""


class ExporterTelemetry(UsageFromCompanion):
    def __init__(
        self,
        source: ExpositionSource,
        driver: Telemetry | None = None,
        *,
        device_name_ids: bool = False,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`device_name_ids`: the user says that the kubelet's nvidia<N> is the exposition's label `device`."""
        self.name = "exporter"
        self.expected: int | None = None
        self.shown = source.shown
        """The exposition, in messages."""
        self._source = source
        self._companion = CompanionDriver(driver)
        self._device_name_ids = device_name_ids
        self._wall = wall
        self._turn: _Turn | None = None
        self._last_xid: dict[str, int] = {}
        self._events: list[ErrorEvent] = []

    def inventory(self) -> Inventory:
        self._turn = None  # if this fails, nothing of the last exposition is told again
        exposition = parse_exposition(self._source.fetch(), self.shown)
        if not exposition.devices:
            raise SourceError("no_gpu", f"{self.shown} names no GPU: see that it is dcgm-exporter that answers there")
        if len(exposition.devices) > _MOST_DEVICES:
            why = f"names {len(exposition.devices)} GPUs and MIG instances, and no node has more than {_MOST_DEVICES}"
            raise SourceError("too_many_devices", f"{self.shown} {why}: name one node's exporter")
        turn = _Turn(
            exposition, {d.key: d for d in self._companion.complete(map(self._with_minor, exposition.devices))}
        )
        self._note_xids(turn)
        self._turn = turn
        return Inventory(tuple(d for d in turn.devices.values() if not d.is_instance))

    def _with_minor(self, device: Device) -> Device:
        return replace(device, minor=device.index) if self._device_name_ids else device

    def read(self, gpu: Device, fields: Sequence[Field]) -> GpuAnswer:
        turn = self._turn
        if turn is None:
            raise SourceError("unreachable", f"{self.shown} was not read this time")
        if gpu.uuid not in turn.devices:
            raise DeviceLost(f"GPU {gpu.index} ({gpu.uuid}) is no longer in the metrics of {self.shown}")
        return turn.answer(gpu.uuid, [f for f in fields if f.id < _EXPORTER_FIELDS])

    # XIDs: the exposition has the number of the last one

    def _note_xids(self, turn: _Turn) -> None:
        for device in turn.devices.values():
            sample = turn.last_xid(device)
            xid = int(sample.value) if sample is not None and 0 <= sample.value < 2**31 - 16 else 0
            if xid and xid != self._last_xid.get(device.key):
                self._events.append(ErrorEvent(device.key, xid, self._wall()))
            self._last_xid[device.key] = xid

    def error_events(self) -> Sequence[ErrorEvent]:
        events, self._events = self._events, []
        return events

    def release(self, wait: float) -> bool:
        self._turn = None
        return self._companion.release(wait)


@dataclass
class _Gathered:
    """An answer as far as it is made."""

    readings: list[Reading] = field(default_factory=list)
    unsupported: list[tuple[str, int]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class _CopiesDiffer(Exception):
    """Series that should tell one figure tell several."""


class _Turn:
    """One exposition, its series by device and name."""

    def __init__(self, exposition: ParsedExposition, devices: Mapping[str, Device]) -> None:
        self.devices = devices
        self._series: dict[str, dict[str, list[ParsedSample]]] = defaultdict(lambda: defaultdict(list))
        for family in exposition.families:
            for sample in family.samples:
                device = exposition.device_of(sample)
                if device is not None and is_of_device(sample.labels):
                    self._series[device.key][sample.name].append(sample)
        self._as_in_4_6 = names_meant_as_in_4_6(
            (s.name, s.value) for family in exposition.families for s in family.samples
        )
        self._instances: dict[str, list[str]] = defaultdict(list)
        for device in devices.values():
            if device.is_instance:
                self._instances[device.uuid].append(device.key)

    def answer(self, uuid: str, fields: Sequence[Field]) -> GpuAnswer:
        """The GPU, then its instances."""
        gathered = _Gathered()
        for key in (uuid, *self._instances.get(uuid, ())):
            device = self.devices[key]
            asked = [f for f in fields if f.per_instance] if device.is_instance else fields
            gathered.readings.append(Reading(device, dict(self._values(device, asked, gathered))))
        return GpuAnswer(
            tuple(gathered.readings),
            tuple(gathered.unsupported),
            tuple(gathered.dropped),
            tuple(gathered.errors),
            tells_errors=self.last_xid(self.devices[uuid]) is not None,
        )

    def _values(self, device: Device, asked: Sequence[Field], gathered: _Gathered) -> list[tuple[int, Value]]:
        values: list[tuple[int, Value]] = []
        for wanted in asked:
            try:
                value = self._text(device, wanted) if wanted.type == "text" else self._number(device, wanted)
            except Blank:
                gathered.dropped.append(wanted.id)
            except _CopiesDiffer:
                gathered.errors.append(_COPIES_DIFFER)
            else:
                if value is None:
                    gathered.unsupported.append((device.key, wanted.id))
                else:
                    values.append((wanted.id, value))
        return values

    def _number(self, device: Device, wanted: Field) -> Value | None:
        """Under a name of its own, else from the field that has the same figure in another unit."""
        value = self._printed(device, wanted)
        other = counterpart(wanted) if value is None else None
        if other is None:
            return value
        field, factor = other
        value = self._printed(device, field)
        return None if value is None else converted(wanted, value, factor)

    def _printed(self, device: Device, wanted: Field) -> int | float | None:
        copies = self._copies(device, wanted)
        if not copies:
            return None
        sample = settled(copies)
        if sample is None:
            raise _CopiesDiffer
        return value_printed(wanted, sample.value)

    def _text(self, device: Device, wanted: Field) -> str | None:
        """A label-type row of the exporter's own counter file: the field's name is a label of every series."""
        for series in self._series.get(device.key, {}).values():
            for sample in series:
                text = next((sample.labels[name] for name in wanted.names if sample.labels.get(name)), None)
                if text is not None:
                    return text
        return None

    def last_xid(self, device: Device) -> ParsedSample | None:
        copies = self._copies(device, fields()[XID_FIELD])
        return settled(copies) if copies else None

    def _copies(self, device: Device, wanted: Field) -> list[ParsedSample]:
        """What the device's series say; a GPU of which only instances are shown has its own figures on theirs."""
        own = self._named(device.key, wanted)
        if own or device.is_instance or wanted.per_instance:
            return own
        return [sample for key in self._instances.get(device.uuid, ()) for sample in self._named(key, wanted)]

    def _named(self, key: str, wanted: Field) -> list[ParsedSample]:
        series = self._series.get(key, {})
        names = (name for name in (*wanted.names, wanted.name_in_4_6) if name in series)
        return next((series[name] for name in names if self._field_of(name) == wanted), [])

    def _field_of(self, name: str) -> Field | None:
        return field_named(name, in_4_6=name in self._as_in_4_6)
