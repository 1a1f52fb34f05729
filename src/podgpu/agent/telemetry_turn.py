"""TelemetryTurn asks for the inventory, then every GPU in its own worker, each of the two under a deadline.

Of fields that are not due this time the last values stand, for as long as the device answers. When it has not, all it
said is forgotten, and all is read of it as soon as it answers again.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from podgpu.device_selection import Selection
from podgpu.errors import StartError
from podgpu.gpu.source import FollowsSchedule, GpuAnswer, Inventory, Lane, ReadsOthers, Telemetry
from podgpu.metrics.fields import Field
from podgpu.model import Device, DeviceCount, OtherReading, Outcome, Reading, Value
from podgpu.workers import Result, Workers

_OTHERS = "others"
_Read = Callable[[Sequence[Field]], GpuAnswer]
MOST_ABSENT = 64
"""GPUs that are gone are remembered, the last so many of them."""


@dataclass(frozen=True, slots=True)
class TelemetryPart:
    """What a turn brought: the telemetry half of a snapshot."""

    devices: tuple[Device, ...] = ()
    """Every device of the node: what ids are looked up in."""
    selected: tuple[Device, ...] = ()
    """Those `-d` chose to show."""
    readings: tuple[Reading, ...] = ()
    others: tuple[OtherReading, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    unsupported: tuple[tuple[str, int], ...] = ()
    device_count: DeviceCount = field(default_factory=DeviceCount)
    errors: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """(source, reason) -> how often since the start, as of this turn."""
    dropped: Mapping[int, int] = field(default_factory=dict)
    """The same of values refused, by field id."""
    lanes: tuple[Lane, ...] = ()
    """What was due in this turn; other values may be of an earlier one."""
    absent: frozenset[str] = frozenset()
    """UUIDs of GPUs that were here, or are said to be, and that the driver does not list; among the devices."""
    links_up: Mapping[str, int] = field(default_factory=dict)
    """UUID -> how many of its NVLinks are."""
    details: Mapping[str, Mapping[int, Value]] = field(default_factory=dict)
    """UUID -> what only the GPU's own view shows."""
    mute: frozenset[str] = frozenset()
    """UUIDs of GPUs that were read, and whose XIDs nobody hears."""

    @property
    def listed(self) -> tuple[Device, ...]:
        """The devices that the driver knows of."""
        return tuple(d for d in self.devices if d.uuid not in self.absent) if self.absent else self.devices

    def without(self, uuids: Collection[str]) -> TelemetryPart:
        """Less GPUs of which nothing was read."""
        devices, selected = (tuple(d for d in some if d.uuid not in uuids) for some in (self.devices, self.selected))
        outcomes = tuple(o for o in self.outcomes if o.device not in uuids)
        absent = self.absent.difference(uuids)
        return replace(self, devices=devices, selected=selected, outcomes=outcomes, absent=absent)


class TelemetryTurn:
    """Keeps what must outlive a turn: the last inventory, the devices last seen on each GPU, those that are gone,
    counters."""

    def __init__(
        self,
        telemetry: Telemetry,
        lanes: Sequence[Lane],
        selection: Selection,
        isolation: Workers,
        deadline: float,
    ) -> None:
        self._telemetry = telemetry
        self._others = telemetry if isinstance(telemetry, ReadsOthers) else None
        self._selection = selection
        self._isolation = isolation
        self._deadline = deadline
        self._inventory = Inventory(())
        self._known: dict[str, tuple[Device, ...]] = {}
        self._absent: dict[str, tuple[Device, ...]] = {}
        """By UUID, those that were here and are not, or are said to be here."""
        self._remembering = threading.Lock()
        self._forgotten: tuple[str, ...] = ()
        self._left_out: frozenset[str] = frozenset()
        """UUIDs of forgotten ones that the driver still lists, until they answer or leave the list."""
        self._most_seen = 0
        self._errors: Counter[tuple[str, str]] = Counter()
        self._dropped: Counter[int] = Counter()
        self._lanes: tuple[Lane, ...] = ()
        self._answers: dict[str, dict[Lane, GpuAnswer]] = {}
        """By worker, what each lane last brought."""
        self.follow(lanes)

    def follow(self, lanes: Sequence[Lane]) -> None:
        """Read these from now on."""
        self._lanes = tuple(lanes)
        self.drop_values()
        if isinstance(self._telemetry, FollowsSchedule):
            self._telemetry.schedule(self._lanes)

    def drop_values(self) -> None:
        """What was read before counts no more."""
        self._answers = {}

    def collect(self, due: Sequence[Lane] | None = None) -> TelemetryPart:
        """Reads the lanes that are due, all of them unless said, or unless it follows others by now.

        Raises StartError only where the process cannot go on (library and driver apart).
        """
        lanes = tuple(lane for lane in self._lanes if due is None or lane in due) or self._lanes
        inventory = self._read_inventory()
        if not inventory.ok:
            self.drop_values()
            devices, shown = self._devices(), self._shown()
            part = TelemetryPart(
                devices,
                tuple(d for d in devices if d.key in shown),
                outcomes=(inventory,),
                device_count=self._count(visible=0),
                errors=dict(self._errors),
                dropped=dict(self._dropped),
                lanes=lanes,
                absent=frozenset(self._absent),
            )
            return part.without(self._left_out)
        gpus = self._chosen_gpus()
        reads: dict[str, _Read] = {_worker(g): partial(self._telemetry.read, g) for g in gpus}
        if self._others is not None:
            reads[_OTHERS] = self._others.read_others
        jobs = {worker: partial(_read_lanes, read, self._missing(worker, lanes)) for worker, read in reads.items()}
        results = self._isolation.run(jobs, self._deadline)
        merged = {worker: self._with_earlier(worker, result) for worker, result in results.items()}
        part = self._gather(inventory, {g: merged[_worker(g)] for g in gpus}, merged.get(_OTHERS))
        return replace(part, lanes=lanes).without(self._left_out)

    def _missing(self, worker: str, due: Sequence[Lane]) -> tuple[Lane, ...]:
        """What is due, and what there is no answer to: it is new, or has failed."""
        answers = self._answers.get(worker, {})
        return tuple(lane for lane in self._lanes if lane in due or lane not in answers)

    def _with_earlier(self, worker: str, result: Result[dict[Lane, GpuAnswer]]) -> Result[GpuAnswer]:
        """One answer of those of all lanes."""
        if result.value is None:
            self._answers.pop(worker, None)
            return Result(None, result.error, result.seconds)
        answers = self._answers.setdefault(worker, {})
        answers.update(result.value)
        return Result(merged_answer(list(result.value.values()), answers.values()), None, result.seconds)

    def _read_inventory(self) -> Outcome:
        name = self._telemetry.name
        result = self._isolation.run({name: self._telemetry.inventory}, self._deadline)[name]
        if result.value is not None:
            self._take_inventory(result.value)
        return self._outcome(name, result)

    def _take_inventory(self, inventory: Inventory) -> None:
        gone = {g.uuid for g in self._inventory.gpus} - {g.uuid for g in inventory.gpus}
        workers = [_worker(g) for g in self._inventory.gpus if g.uuid in gone]
        self._isolation.forget(workers)
        for worker in workers:
            self._answers.pop(worker, None)
        self._forgotten = (*self._forgotten, *sorted(self._left_out & gone))[-MOST_ABSENT:]
        left = {uuid: self._known.pop(uuid) for uuid in gone if uuid in self._known}
        for gpu in inventory.gpus:
            self._known.setdefault(gpu.uuid, (gpu,))
        here = {g.uuid for g in inventory.gpus}
        self._forgotten = tuple(uuid for uuid in self._forgotten if uuid not in here)
        self._remember(left, here | self._left_out)
        self._left_out &= here
        self._inventory = inventory
        self._most_seen = max(self._most_seen, len(inventory.gpus) + len(inventory.unreachable))

    # -- those that are gone -------------------------------------------------------------------------------------

    def hear_of(self, uuids: Iterable[str]) -> bool:
        """Somebody gives away, or holds, GPUs of these UUIDs: whether any is new, and so is taken for lost. Says
        nothing before the driver has once said what it lists, nor while it has not named one that may be of these."""
        if self._inventory.hung or not (self._inventory.gpus or self._inventory.unreachable):
            return False
        known = {uuid.lower() for uuid in (*self._known, *self._absent, *self._forgotten)}
        new = {uuid: (Device(-1, uuid, "", ""),) for uuid in sorted(uuids) if uuid.lower() not in known}
        if new:
            self._remember(new)
        return bool(new)

    def forget(self, part: TelemetryPart, uuid: str, lost: bool) -> TelemetryPart | None:
        """The last turn's part without a GPU that is gone, for good: who goes on naming it is not heard. One that is
        `lost` and still listed is left out until it answers. None: it is neither."""
        if uuid in self._absent:
            self._forgotten = (*self._forgotten, uuid)[-MOST_ABSENT:]
            self._remember({}, {uuid})
        elif lost and uuid in self._known:
            self._left_out |= {uuid}
        else:
            return None
        return replace(part.without({uuid}), device_count=self._count(part.device_count.visible))

    def _remember(self, more: Mapping[str, tuple[Device, ...]], back: Collection[str] = ()) -> None:
        """Others read it meanwhile: it is replaced, never changed."""
        with self._remembering:
            absent = {uuid: devices for uuid, devices in {**self._absent, **more}.items() if uuid not in back}
            self._absent = dict(list(absent.items())[-MOST_ABSENT:])

    def _chosen_gpus(self) -> list[Device]:
        """GPUs with at least one device to show. For `i` that is known only after a GPU was read once."""
        shown = self._selection.of(self._listed())
        every = self._selection.names_instances
        return [g for g in self._inventory.gpus if every or g.uuid in shown]

    def _gather(
        self, inventory: Outcome, results: dict[Device, Result[GpuAnswer]], others: Result[GpuAnswer] | None
    ) -> TelemetryPart:
        answers = []
        links: dict[str, int] = {}
        outcomes = [inventory, *self._outcome_of_others(others), *self._unreachable()]
        found = others.value.others if others is not None and others.value is not None else ()
        for gpu, result in results.items():
            outcomes.append(self._outcome(f"gpu{gpu.index}", result, gpu.uuid))
            if result.value is not None:
                answers.append(result.value)
                self._known[gpu.uuid] = tuple(r.device for r in result.value.readings)
                self._left_out -= {gpu.uuid}
                self._dropped.update(result.value.dropped)
                self._errors.update((f"gpu{gpu.index}", reason) for reason in result.value.errors)
                if result.value.links_up is not None:
                    links[gpu.uuid] = result.value.links_up
        devices, shown = self._devices(), self._shown()
        return TelemetryPart(
            devices=devices,
            selected=tuple(d for d in devices if d.key in shown),
            readings=tuple(r for a in answers for r in a.readings if r.device.key in shown),
            others=(*(o for a in answers for o in a.others), *found),
            outcomes=tuple(outcomes),
            unsupported=tuple(u for a in answers for u in a.unsupported if u[0] in shown),
            device_count=self._count(len(self._inventory.gpus) - len(results) + len(answers)),
            errors=dict(self._errors),
            dropped=dict(self._dropped),
            absent=frozenset(self._absent),
            links_up=links,
            details={a.readings[0].device.uuid: a.details for a in answers if a.readings and a.details},
            mute=frozenset(a.readings[0].device.uuid for a in answers if a.readings and not a.tells_errors),
        )

    def _unreachable(self) -> Iterator[Outcome]:
        """GPUs that the driver counts and that cannot even say who they are."""
        chosen = self._selection.gpu_ids
        for index, why in self._inventory.unreachable.items():
            if not chosen or index in chosen:
                source, reason = f"gpu{index}", "hung" if index in self._inventory.hung else "unreachable"
                self._errors[source, reason] += 1
                yield Outcome(source, 0.0, reason, f"GPU {index} does not answer: {why}")

    def _outcome_of_others(self, result: Result[GpuAnswer] | None) -> list[Outcome]:
        """Told where there is something that is no GPU, or it could not be found out."""
        if result is None:
            return []
        outcome = self._outcome(_OTHERS, result)
        if result.value is not None:
            self._dropped.update(result.value.dropped)
            self._errors.update((_OTHERS, reason) for reason in result.value.errors)
        return [outcome] if result.value is None or result.value.others else []

    def _shown(self) -> frozenset[str]:
        """What `-d` chose, by key. Of instances it goes by their number among those that are here."""
        absent = [d for devices in self._absent.values() for d in devices]
        parts = (part for part in self._selection.parts if absent and not (part.kind == "i" and part.ids))
        return self._selection.of(self._listed()).union(*(part.of(absent) for part in parts))

    def _listed(self) -> tuple[Device, ...]:
        return tuple(d for gpu in self._inventory.gpus for d in self._known.get(gpu.uuid, (gpu,)))

    def _devices(self) -> tuple[Device, ...]:
        """Those that are gone last: what goes by a number that another has now is the other's."""
        return (*self._listed(), *(d for devices in self._absent.values() for d in devices))

    def _count(self, visible: int) -> DeviceCount:
        expected = self._telemetry.expected
        baseline = expected if expected is not None else self._most_seen
        lost = max(0, baseline - visible)
        # The bus may go on showing what an operator has had forgotten; what is known not to answer is not that.
        # What is gone, or forgotten, and what cannot say which it is are often the same.
        unlisted = max(len(self._absent), len(self._inventory.unreachable) - len(self._forgotten))
        silent = len(self._inventory.gpus) - len(self._left_out) - visible + unlisted
        forgotten = len(self._forgotten) + len(self._left_out)
        return DeviceCount(expected, visible, max(lost - forgotten, min(lost, silent)))

    def _outcome(self, source: str, result: Result[Any], device: str = "") -> Outcome:
        if isinstance(result.error, StartError):
            raise result.error
        if result.error is None:
            return Outcome(source, result.seconds, device=device)
        self._errors[source, result.error.reason] += 1
        return Outcome(source, result.seconds, result.error.reason, str(result.error), device)


def _read_lanes(read: _Read, lanes: Sequence[Lane]) -> dict[Lane, GpuAnswer]:
    return {lane: read(lane.fields) for lane in lanes}


def merged_answer(newest: Sequence[GpuAnswer], every: Iterable[GpuAnswer]) -> GpuAnswer:
    """The devices of the newest answer, with what all answers say of them. Errors and refusals are the newest's."""
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
        others=tuple(OtherReading(kind, labels, found) for (kind, labels), found in others.items()),
    )


def _worker(gpu: Device) -> str:
    return f"gpu{gpu.index}-{gpu.uuid}"
