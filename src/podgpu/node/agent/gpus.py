"""Reads the list of GPUs, then each GPU in its own worker with a deadline.

A field that is not due keeps its last value. If the reading of a GPU fails, all its fields are read
next time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from msgspec import structs

from podgpu.clock import Clock
from podgpu.metrics.fields import Field
from podgpu.model import (
    Detail,
    Device,
    EntityState,
    FieldValues,
    GpuReading,
    Inventory,
    SourceStatus,
    Value,
    group_by,
)
from podgpu.node.agent.device_selection import Selection
from podgpu.node.gpu.source import FieldGroup, HostEngine, Telemetry
from podgpu.workers import ErrorCounts, Result, Workers

OTHERS = "others"  # worker that reads switches and CPUs
_Read = Callable[[Sequence[Field]], GpuReading]
_Result = Result[dict[FieldGroup, GpuReading]]


@dataclass(frozen=True, slots=True)
class TelemetryResult:
    devices: tuple[Device, ...] = ()  # all devices of the node, including GPUs that disappeared
    selected: tuple[Device, ...] = ()  # devices selected by -d
    readings: Mapping[str, GpuReading] = field(default_factory=dict)
    """By UUID or OTHERS. Omits failed readings."""
    sources: tuple[SourceStatus, ...] = ()  # the first source is the list of GPUs
    gpus_expected: int | None = None  # number of GPUs on the PCI bus
    gpus_visible: int = 0
    gpus_lost: int = 0
    dropped: Mapping[int, int] = field(default_factory=dict)
    """Number of invalid values since the start, by field id."""
    groups: tuple[FieldGroup, ...] = ()  # groups that were just read; other values are older
    absent: frozenset[str] = frozenset()
    """UUIDs of GPUs in `devices` that the driver no longer lists."""
    at: float | None = None  # Unix time of the last successful reading

    @property
    def inventory_source(self) -> SourceStatus:
        """The status of the list of GPUs, or of the whole source while it is released."""
        return self.sources[0]

    @property
    def values(self) -> dict[str, FieldValues]:
        """Returns the values of the selected devices, by device key and field id."""
        shown = {device.key for device in self.selected}

        values_of = {}
        for reading in self.readings.values():
            for device, values in reading.values.items():
                if device.key in shown:
                    values_of[device.key] = values
        return values_of


class _Job(NamedTuple):
    name: str
    uuid: str  # empty for OTHERS
    read: _Read

    @property
    def key(self) -> str:
        return self.uuid or OTHERS

    @property
    def worker(self) -> str:
        return f"{self.name}-{self.uuid}"


@dataclass(eq=False)
class TelemetryCollector:
    """Reads all GPUs. Not thread-safe."""

    _telemetry: Telemetry
    _groups: tuple[FieldGroup, ...]
    _selection: Selection
    _workers: Workers
    _errors: ErrorCounts
    _deadline: float
    _clock: Clock
    _inventory: Inventory = field(default_factory=lambda: Inventory(()))
    _known: dict[str, tuple[Device, ...]] = field(default_factory=dict)
    """Each listed GPU and its instances, by UUID."""
    _absent: dict[str, tuple[Device, ...]] = field(default_factory=dict)
    """GPUs that the driver does not list, by UUID."""
    _forgotten: frozenset[str] = frozenset()  # GPUs that `podgpu forget` removed, until they answer
    _most_seen: int = 0  # highest number of GPUs that the driver has listed
    _dropped: Counter[int] = field(default_factory=Counter)
    _taken_at: float | None = None
    _readings: dict[str, dict[FieldGroup, GpuReading]] = field(default_factory=dict)
    """The last readings, by UUID or OTHERS. Omits GPUs that did not answer."""

    def __post_init__(self) -> None:
        # isinstance is called only once, because it is slow for protocols
        self._host_engine = self._telemetry if isinstance(self._telemetry, HostEngine) else None
        self.set_groups(self._groups)

    def set_groups(self, groups: tuple[FieldGroup, ...]) -> None:
        self._groups = groups
        self.drop_values()
        if self._host_engine is not None:
            self._host_engine.schedule(self._groups)

    def drop_values(self) -> None:
        self._readings = {}

    def collect(
        self, due: tuple[FieldGroup, ...] | None = None, existing: Iterable[str] = ()
    ) -> TelemetryResult:
        """Reads the field groups in `due`. None stands for all groups.

        `existing`: UUIDs of GPUs that must exist, because an allocation source lists them. Those
        that the driver does not list are lost. Raises StartError if the process cannot continue.
        """
        groups = self._groups if due is None else due
        inventory = self._read_inventory()
        self._add_lost(existing)
        if not inventory.up:
            self.drop_values()
            return self._make_result(groups, [inventory], {})

        sources = [inventory, *self._report_unreachable()]
        readings: dict[str, GpuReading] = {}
        jobs = self._list_jobs()
        results = self._read(jobs, groups)
        for job in jobs:
            result = results[job.worker]
            reading = self._merge_with_earlier(job.key, result.value)
            # no status for OTHERS without entities
            if job.uuid or reading is None or reading.entities:
                sources.append(self._errors.record(job.name, result, job.uuid))
            if reading is not None:
                readings[job.key] = reading
                self._dropped.update(reading.dropped)
                for reason in reading.errors:
                    self._errors.add(job.name, reason)

        self._update_known(readings, {job.key for job in jobs} - readings.keys())
        return self._make_result(groups, sources, readings)

    def _update_known(
        self, readings: Mapping[str, GpuReading], not_answering: Collection[str]
    ) -> None:
        if any(reading.values for reading in readings.values()):
            self._taken_at = self._clock.wall()

        # MIG instances may have changed.
        for uuid in self._known.keys() & readings:
            self._known[uuid] = tuple(readings[uuid].values)

        listed = {gpu.uuid for gpu in self._inventory.gpus}
        self._forgotten -= listed.difference(not_answering)

    def _read_inventory(self) -> SourceStatus:
        name = self._telemetry.name
        results = self._workers.run({name: self._telemetry.inventory}, self._deadline)
        inventory = results[name].value
        if inventory is not None:
            self._update_inventory(inventory)
        return self._errors.record(name, results[name])

    def _read(self, jobs: Iterable[_Job], groups: Sequence[FieldGroup]) -> Mapping[str, _Result]:
        """Reads the groups, and those that were not read since the last failure.

        Returns the results by worker.
        """
        calls = {}
        for job in jobs:
            earlier = self._readings.get(job.key, {})
            unread = []
            for group in self._groups:
                if group in groups or group not in earlier:
                    unread.append(group)
            calls[job.worker] = partial(_read_groups, job.read, unread)

        return self._workers.run(calls, self._deadline)

    def _list_jobs(self) -> list[_Job]:
        jobs = []
        if self._host_engine is not None:
            jobs.append(_Job(OTHERS, "", self._host_engine.read_others))

        shown = self._selection.select(self._listed())
        for gpu in self._inventory.gpus:
            if self._selection.needs_all_gpus or gpu.uuid in shown:
                read = partial(self._telemetry.read, gpu)
                jobs.append(_Job(f"gpu{gpu.index}", gpu.uuid, read))
        return jobs

    def _merge_with_earlier(
        self, key: str, new: Mapping[FieldGroup, GpuReading] | None
    ) -> GpuReading | None:
        """`new`: None if the reading failed. All fields are then read next time."""
        if new is None:
            self._readings.pop(key, None)
            return None

        readings = self._readings.setdefault(key, {})
        readings.update(new)
        return merge_readings(list(new.values()), readings.values())

    def _update_inventory(self, inventory: Inventory) -> None:
        listed = {gpu.uuid: gpu for gpu in inventory.gpus}
        for gpu in self._inventory.gpus:
            same = listed.get(gpu.uuid)
            # After the driver has enumerated the GPUs again, all fields are read.
            if same is None or same.index != gpu.index:
                self._readings.pop(gpu.uuid, None)
            if same is None and gpu.uuid not in self._forgotten:
                self._absent[gpu.uuid] = self._known[gpu.uuid]

        # `_find_devices` needs the absent GPUs, so they are removed after it.
        self._known = {uuid: self._find_devices(gpu) for uuid, gpu in listed.items()}
        for uuid in listed:
            self._absent.pop(uuid, None)

        self._inventory = inventory
        seen = len(inventory.gpus) + len(inventory.unreachable)
        self._most_seen = max(self._most_seen, seen)

    def _find_devices(self, gpu: Device) -> tuple[Device, ...]:
        """Returns the GPU and its last known instances.

        A GPU that reappears has its old instances until it is read.
        """
        devices = self._known.get(gpu.uuid)
        if devices is None:
            devices = self._absent.get(gpu.uuid, ())

        # The driver never listed a GPU without a model. An allocation source named its UUID.
        is_read = any(device.model for device in devices)
        if not is_read:
            return (gpu,)
        return tuple(replace(device, index=gpu.index) for device in devices)

    # GPUs that disappeared

    def _add_lost(self, existing: Iterable[str]) -> None:
        """Adds GPUs that exist, but that the driver never listed, to the absent GPUs.

        Does nothing before the first inventory, or while a GPU hangs, because that GPU may be one
        of them.
        """
        if self._inventory.hung or not (self._inventory.gpus or self._inventory.unreachable):
            return

        known = [*self._known, *self._absent, *self._forgotten]
        known_names = {uuid.lower() for uuid in known}
        for uuid in sorted(existing):
            if uuid.lower() not in known_names:
                self._absent[uuid] = (Device(None, uuid),)

    def forget(self, result: TelemetryResult, uuid: str, lost: bool) -> TelemetryResult | None:
        """Returns `result` without the GPU, if the GPU disappeared or is `lost`.

        Returns None for any other GPU. The GPU stays removed until it answers, even if an
        allocation source lists it.
        """
        is_lost_but_listed = lost and uuid in self._known
        if uuid not in self._absent and not is_lost_but_listed:
            return None

        self._forgotten |= {uuid}
        self._absent.pop(uuid, None)
        return self._make_result(result.groups, result.sources, result.readings)

    def _count_lost(self, visible: int) -> int:
        """Returns the number of GPUs that do not answer.

        GPUs that `podgpu forget` removed are not counted. The PCI bus may or may not list a removed
        GPU. So every removed GPU is subtracted, but the result is at least the number of other GPUs
        that do not answer.
        """
        expected = self._telemetry.expected
        if expected is None:
            expected = self._most_seen
        missing = max(0, expected - visible)
        # If the PCI bus lists the removed GPUs, they are among the missing ones.
        lost = missing - len(self._forgotten)

        listed = {gpu.uuid for gpu in self._inventory.gpus}
        silent = len(listed - self._forgotten) - visible
        # A removed GPU that is not listed may be one of the unreachable GPUs.
        unidentified = len(self._inventory.unreachable) - len(self._forgotten - listed)
        # An unidentified GPU may be one of the absent GPUs.
        unlisted = max(len(self._absent), unidentified)
        # An absent GPU may have been replaced by a listed one, so not more than are missing.
        others = min(missing, silent + unlisted)

        # If the bus does not list the removed GPUs, `lost` is too small.
        return max(lost, others)

    # Result

    def _make_result(
        self,
        groups: tuple[FieldGroup, ...],
        sources: Sequence[SourceStatus],
        readings: Mapping[str, GpuReading],
    ) -> TelemetryResult:
        listed = self._listed()
        absent = list(chain.from_iterable(self._absent.values()))
        shown = self._selection.select(listed)
        shown |= self._selection.without_numbered_instances().select(absent)

        # Listed devices come first, because an absent GPU can have the index of a listed GPU.
        devices = [device for device in listed + absent if device.uuid not in self._forgotten]
        selected = [device for device in devices if device.key in shown]
        shown_sources = [source for source in sources if source.device not in self._forgotten]
        visible = self._count_visible(sources)

        return TelemetryResult(
            devices=tuple(devices),
            selected=tuple(selected),
            readings=readings,
            sources=tuple(shown_sources),
            gpus_expected=self._telemetry.expected,
            gpus_visible=visible,
            gpus_lost=self._count_lost(visible),
            dropped=dict(self._dropped),
            groups=groups,
            absent=frozenset(self._absent),
            at=self._taken_at,
        )

    def _count_visible(self, sources: Sequence[SourceStatus]) -> int:
        """Returns the number of GPUs that answer. `sources`: the inventory comes first."""
        if not sources[0].up:
            return 0

        silent = set(self._forgotten & self._known.keys())
        for source in sources:
            if source.device and not source.up:
                silent.add(source.device)
        return len(self._inventory.gpus) - len(silent)

    def _report_unreachable(self) -> list[SourceStatus]:
        sources = []
        selection = self._selection
        for index, why in self._inventory.unreachable.items():
            if not selection.needs_all_gpus and not selection.shows_gpu(index):
                continue

            name = f"gpu{index}"
            reason = "hung" if index in self._inventory.hung else "unreachable"
            message = f"GPU {index} does not answer: {why}"
            self._errors.add(name, reason)
            sources.append(SourceStatus(name, False, 0.0, reason, message))
        return sources

    def _listed(self) -> list[Device]:
        return list(chain.from_iterable(self._known.values()))


def _read_groups(read: _Read, groups: Sequence[FieldGroup]) -> dict[FieldGroup, GpuReading]:
    return {group: read(group.fields) for group in groups}


def merge_readings(newest: Sequence[GpuReading], every: Iterable[GpuReading]) -> GpuReading:
    """Merges the values of all readings (`every`).

    Errors come from `newest`, and devices from its last reading.
    """
    readings = list(every)
    if len(readings) == 1:
        return readings[0]

    last = newest[-1]
    devices = {device.key: device for device in last.values}
    values: dict[Device, dict[int, Value]] = {device: {} for device in last.values}
    unsupported: dict[tuple[str, int], None] = {}  # keys only, in order
    for reading in readings:
        for device, own_values in reading.values.items():
            # An earlier reading can have an instance that no longer exists.
            if device.key in devices:
                values[devices[device.key]].update(own_values)
        for entry in reading.unsupported:
            device_key, _ = entry
            if device_key in devices:
                unsupported[entry] = None

    # By field. Those of the newest readings replace earlier ones.
    details: dict[str, list[Detail]] = {}
    for reading in [*readings, *newest]:
        details |= group_by(reading.details, itemgetter(0))

    dropped: list[int] = []
    errors: list[str] = []
    for reading in newest:
        dropped += reading.dropped
        errors += reading.errors

    return replace(
        last,
        values=values,
        details=tuple(chain.from_iterable(details.values())),
        unsupported=tuple(unsupported),
        dropped=tuple(dropped),
        errors=tuple(errors),
        entities=_merge_entities(readings),
    )


def _merge_entities(readings: Iterable[GpuReading]) -> tuple[EntityState, ...]:
    merged: dict[tuple[str, ...], EntityState] = {}
    for reading in readings:
        for entity in reading.entities:
            key = entity.kind, *entity.labels.values()
            earlier = merged.get(key)
            if earlier is not None:
                fields = earlier.fields | entity.fields
                entity = structs.replace(entity, fields=fields)
            merged[key] = entity
    return tuple(merged.values())
