"""One turn (pass) of the telemetry loop: reads the list of GPUs, then each GPU in its own worker, with a deadline.

Fields that are not due keep their last value while the device answers. After a failure, all fields are due.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from podgpu.clock import Clock
from podgpu.device_selection import Selection
from podgpu.gpu.source import GpuAnswer, HostEngine, Inventory, Lane, Telemetry
from podgpu.metrics.fields import Field
from podgpu.model import Device, OtherReading, Reading, SourceStatus, Value
from podgpu.workers import ErrorCounts, Workers

OTHERS = "others"  # name of the worker that reads switches and CPUs
_Read = Callable[[Sequence[Field]], GpuAnswer]


@dataclass(frozen=True, slots=True)
class TelemetryResult:
    devices: tuple[Device, ...] = ()  # all devices of the node, including GPUs that disappeared
    selected: tuple[Device, ...] = ()  # devices selected by -d
    answers: Mapping[str, GpuAnswer] = field(default_factory=dict)  # by UUID, or OTHERS; failed readings are missing
    sources: tuple[SourceStatus, ...] = ()  # the first one is the inventory (list of GPUs)
    gpus_expected: int | None = None  # number of GPUs on the PCI bus
    gpus_visible: int = 0
    gpus_lost: int = 0
    dropped: Mapping[int, int] = field(default_factory=dict)  # number of rejected values since start, by field id
    lanes: tuple[Lane, ...] = ()  # lanes (fields with the same interval) read in this turn; other values are older
    absent: frozenset[str] = frozenset()  # UUIDs of `devices` that the driver does not list
    at: float | None = None  # Unix time of the last turn with readings

    @property
    def readings(self) -> tuple[Reading, ...]:
        """Returns the readings of the selected devices."""
        shown = {device.key for device in self.selected}
        return tuple(r for answer in self.answers.values() for r in answer.readings if r.device.key in shown)


class TelemetryTurn:
    """Reads all GPUs. Keeps the last inventory, MIG instances and absent GPUs between turns. Not thread-safe."""

    def __init__(
        self,
        telemetry: Telemetry,
        lanes: Sequence[Lane],
        selection: Selection,
        workers: Workers,
        errors: ErrorCounts,
        deadline: float,
        clock: Clock,
    ) -> None:
        self._telemetry = telemetry
        self._host_engine = telemetry if isinstance(telemetry, HostEngine) else None  # checked once: it is slow
        self._selection = selection
        self._workers = workers
        self._errors = errors
        self._deadline = deadline
        self._clock = clock
        self._inventory = Inventory(())
        self._known: dict[str, tuple[Device, ...]] = {}  # devices of each listed GPU, by UUID
        self._absent: dict[str, tuple[Device, ...]] = {}  # GPUs not listed by the driver, by UUID
        self._forgotten: frozenset[str] = frozenset()  # UUIDs removed by an operator, until the GPU answers
        self._most_seen = 0  # highest number of GPUs in an inventory
        self._dropped: Counter[int] = Counter()
        self._taken_at: float | None = None
        self._lanes: tuple[Lane, ...] = ()
        self._answers: dict[str, dict[Lane, GpuAnswer]] = {}  # the last answer by UUID and lane
        self.set_lanes(lanes)

    def set_lanes(self, lanes: Sequence[Lane]) -> None:
        self._lanes = tuple(lanes)
        self.drop_values()
        if self._host_engine is not None:
            self._host_engine.schedule(self._lanes)

    def drop_values(self) -> None:
        self._answers = {}

    def collect(self, due: Sequence[Lane] | None = None, lost: Iterable[str] = ()) -> TelemetryResult:
        """Reads the lanes that are due, or all of them. Raises StartError if the process cannot continue.

        `lost`: UUIDs of GPUs that an allocation source lists and the driver does not.
        """
        lanes = tuple(lane for lane in self._lanes if due is None or lane in due) or self._lanes
        name = self._telemetry.name
        listing = self._workers.run({name: self._telemetry.inventory}, self._deadline)[name]
        if listing.value is not None:
            self._update_inventory(listing.value)
        inventory = self._errors.make_status(name, listing)
        self._add_lost(lost)
        if not inventory.up:
            self.drop_values()
            return self._make_result(lanes, (inventory,), {})
        # -d may name MIG instances, which are known only after a reading of all GPUs.
        shown, every = self._selection.select(self._listed()), self._selection.instances is not None
        gpus = [gpu for gpu in self._inventory.gpus if every or gpu.uuid in shown]
        reads: dict[tuple[str, str], _Read] = {
            (f"gpu{g.index}", g.uuid): partial(self._telemetry.read, g) for g in gpus
        }
        if self._host_engine is not None:
            reads = {(OTHERS, ""): self._host_engine.read_others, **reads}
        jobs = {}
        for (name, uuid), read in reads.items():
            known = self._answers.get(uuid, {})
            unread = [lane for lane in self._lanes if lane in lanes or lane not in known]
            jobs[f"{name}-{uuid}"] = partial(_read_lanes, read, unread)
        sources = [inventory, *self._report_unreachable()]
        answers: dict[str, GpuAnswer] = {}
        results = self._workers.run(jobs, self._deadline).values()
        for (name, uuid), result in zip(reads, results, strict=True):
            answer = self._merge_with_earlier(uuid, result.value)
            if uuid or answer is None or answer.others:  # no status for switches and CPUs if the node has none
                sources.append(self._errors.make_status(name, result, uuid))
            if answer is not None:
                answers[uuid or OTHERS] = answer
                self._dropped.update(answer.dropped)
                for reason in answer.errors:
                    self._errors.add(name, reason)
        if any(answer.readings for answer in answers.values()):
            self._taken_at = self._clock.wall()
        self._known |= {uuid: tuple(r.device for r in answers[uuid].readings) for uuid in self._known.keys() & answers}
        self._forgotten -= {g.uuid for g in self._inventory.gpus} - ({g.uuid for g in gpus} - answers.keys())
        return self._make_result(lanes, tuple(sources), answers)

    def _merge_with_earlier(self, uuid: str, new: Mapping[Lane, GpuAnswer] | None) -> GpuAnswer | None:
        if new is None:
            self._answers.pop(uuid, None)
            return None
        answers = self._answers.setdefault(uuid, {})
        answers.update(new)
        return merge_answers(list(new.values()), answers.values())

    def _update_inventory(self, inventory: Inventory) -> None:
        here = {g.uuid for g in inventory.gpus}
        moved = {(g.uuid, g.index) for g in self._inventory.gpus} - {(g.uuid, g.index) for g in inventory.gpus}
        for uuid, _ in moved:
            self._answers.pop(uuid, None)
        for uuid in {g.uuid for g in self._inventory.gpus} - here - self._forgotten:
            self._absent[uuid] = self._known[uuid]
        self._known = {g.uuid: self._find_devices(g) for g in inventory.gpus}
        self._absent = {uuid: devices for uuid, devices in self._absent.items() if uuid not in here}
        self._inventory = inventory
        self._most_seen = max(self._most_seen, len(inventory.gpus) + len(inventory.unreachable))

    def _find_devices(self, gpu: Device) -> tuple[Device, ...]:
        """Returns the GPU and its instances as last read. If a GPU reappears, these are its old instances."""
        last = self._known.get(gpu.uuid) or self._absent.get(gpu.uuid) or (gpu,)
        return tuple(replace(device, index=gpu.index) for device in last) if last[0].model else (gpu,)

    # -- GPUs that disappeared -----------------------------------------------------------------------------------

    def _add_lost(self, uuids: Iterable[str]) -> None:
        """Adds GPUs that were never in an inventory to the absent GPUs.

        Does nothing before the first inventory, or while a GPU is hung, because the hung GPU may be one of `lost`.
        """
        if self._inventory.hung or not (self._inventory.gpus or self._inventory.unreachable):
            return
        known = {uuid.lower() for uuid in (*self._known, *self._absent, *self._forgotten)}
        self._absent |= {uuid: (Device(None, uuid, "", ""),) for uuid in sorted(uuids) if uuid.lower() not in known}

    def forget(self, result: TelemetryResult, uuid: str, lost: bool) -> TelemetryResult | None:
        """Returns `result` without this GPU if the GPU disappeared or is `lost`, otherwise None.

        The GPU stays removed until it answers, even if an allocation source lists it.
        """
        if uuid not in self._absent and not (lost and uuid in self._known):
            return None
        self._forgotten |= {uuid}
        self._absent.pop(uuid, None)
        return self._make_result(result.lanes, result.sources, result.answers)

    def _count_lost(self, visible: int) -> int:
        expected = self._telemetry.expected
        baseline = expected if expected is not None else self._most_seen
        lost = max(0, baseline - visible)
        # The PCI bus may still list a forgotten GPU, which must not be counted as lost.
        # Absent, forgotten and unidentified GPUs overlap, so each is counted once.
        listed = {g.uuid for g in self._inventory.gpus}
        unlisted = max(len(self._absent), len(self._inventory.unreachable) - len(self._forgotten - listed))
        silent = len(listed - self._forgotten) - visible + unlisted
        return max(lost - len(self._forgotten), min(lost, silent))

    # -- result ----------------------------------------------------------------------------------------------------

    def _make_result(
        self, lanes: tuple[Lane, ...], sources: tuple[SourceStatus, ...], answers: Mapping[str, GpuAnswer]
    ) -> TelemetryResult:
        # Listed devices come first. If an absent GPU has the same index, the index refers to the listed one.
        listed, absent = self._listed(), tuple(d for devices in self._absent.values() for d in devices)
        devices = tuple(d for d in (*listed, *absent) if d.uuid not in self._forgotten)
        shown = self._selection.select(listed) | self._selection.without_numbered_instances().select(absent)
        silent = {source.device for source in sources if source.device and not source.up}
        silent |= self._forgotten & self._known.keys()
        visible = len(self._inventory.gpus) - len(silent) if sources[0].up else 0
        return TelemetryResult(
            devices=devices,
            selected=tuple(d for d in devices if d.key in shown),
            answers=answers,
            sources=tuple(source for source in sources if source.device not in self._forgotten),
            gpus_expected=self._telemetry.expected,
            gpus_visible=visible,
            gpus_lost=self._count_lost(visible),
            dropped=dict(self._dropped),
            lanes=lanes,
            absent=frozenset(self._absent),
            at=self._taken_at,
        )

    def _report_unreachable(self) -> Iterator[SourceStatus]:
        """Yields a failed status for each GPU that the driver counts but cannot identify."""
        for index, why in self._inventory.unreachable.items():
            if self._selection.instances is not None or self._selection.shows_gpu(index):
                source, reason = f"gpu{index}", "hung" if index in self._inventory.hung else "unreachable"
                self._errors.add(source, reason)
                yield SourceStatus(source, False, 0.0, reason, f"GPU {index} does not answer: {why}")

    def _listed(self) -> tuple[Device, ...]:
        return tuple(d for gpu in self._inventory.gpus for d in self._known[gpu.uuid])


def _read_lanes(read: _Read, lanes: Sequence[Lane]) -> dict[Lane, GpuAnswer]:
    return {lane: read(lane.fields) for lane in lanes}


def merge_answers(newest: Sequence[GpuAnswer], every: Iterable[GpuAnswer]) -> GpuAnswer:
    """Merges the values of `every` answer. The last answer in `newest` has the devices, and `newest` has the errors."""
    answers = list(every)
    if len(answers) == 1:
        return answers[0]
    values: dict[str, dict[int, Value]] = {}
    others: dict[tuple[str, tuple[tuple[str, str], ...]], dict[int, Value]] = {}
    for answer in answers:
        for reading in answer.readings:
            values.setdefault(reading.device.key, {}).update(reading.values)
        for other in answer.others:
            others.setdefault((other.kind, other.labels), {}).update(other.values)
    last = newest[-1]
    keys = {reading.device.key for reading in last.readings}
    return replace(
        last,
        readings=tuple(Reading(r.device, values[r.device.key], r.details) for r in last.readings),
        unsupported=tuple(dict.fromkeys(u for a in answers for u in a.unsupported if u[0] in keys)),
        dropped=tuple(i for a in newest for i in a.dropped),
        errors=tuple(e for a in newest for e in a.errors),
        others=tuple(OtherReading(kind, labels, merged) for (kind, labels), merged in others.items()),
    )
