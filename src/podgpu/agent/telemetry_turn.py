"""TelemetryTurn asks for the inventory, then every GPU in its own worker, all under one deadline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from podgpu.catalog.fields import Field
from podgpu.device_selection import Selection
from podgpu.errors import StartError
from podgpu.isolate import Isolation, Result
from podgpu.model import Device, DeviceCount, OtherReading, Outcome, Reading
from podgpu.telemetry.source import GpuAnswer, Inventory, ReadsOthers, Telemetry

_OTHERS = "others"


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


class TelemetryTurn:
    """Keeps what must outlive a turn: the last inventory, the devices last seen on each GPU, counters."""

    def __init__(
        self,
        telemetry: Telemetry,
        fields: Sequence[Field],
        selection: Selection,
        isolation: Isolation,
        deadline: float,
    ) -> None:
        self._telemetry = telemetry
        self._others = telemetry if isinstance(telemetry, ReadsOthers) else None
        self.fields = fields
        self._selection = selection
        self._isolation = isolation
        self._deadline = deadline
        self._inventory = Inventory(())
        self._known: dict[str, tuple[Device, ...]] = {}
        self._most_seen = 0
        self._errors: Counter[tuple[str, str]] = Counter()
        self._dropped: Counter[int] = Counter()

    def collect(self) -> TelemetryPart:
        """Raises StartError only where the process cannot go on (library and driver apart)."""
        inventory = self._read_inventory()
        if not inventory.ok:
            devices = self._devices()
            return TelemetryPart(
                devices,
                self._select(devices),
                outcomes=(inventory,),
                device_count=self._count(visible=0),
                errors=dict(self._errors),
                dropped=dict(self._dropped),
            )
        gpus = self._chosen_gpus()
        jobs = {_worker(g): partial(self._telemetry.read, g, self.fields) for g in gpus}
        if self._others is not None:
            jobs[_OTHERS] = partial(self._others.read_others, self.fields)
        results = self._isolation.run(jobs, self._deadline)
        return self._gather(inventory, {g: results[_worker(g)] for g in gpus}, results.get(_OTHERS))

    def _read_inventory(self) -> Outcome:
        name = self._telemetry.name
        result = self._isolation.run({name: self._telemetry.inventory}, self._deadline)[name]
        if result.value is not None:
            self._take_inventory(result.value)
        return self._outcome(name, result)

    def _take_inventory(self, inventory: Inventory) -> None:
        gone = {g.uuid for g in self._inventory.gpus} - {g.uuid for g in inventory.gpus}
        self._isolation.forget(_worker(g) for g in self._inventory.gpus if g.uuid in gone)
        for uuid in gone:
            self._known.pop(uuid, None)
        for gpu in inventory.gpus:
            self._known.setdefault(gpu.uuid, (gpu,))
        self._inventory = inventory
        self._most_seen = max(self._most_seen, len(inventory.gpus) + len(inventory.unreachable))

    def _chosen_gpus(self) -> list[Device]:
        """GPUs with at least one device to show. For `i` that is known only after a GPU was read once."""
        shown = self._selection.of(self._devices())
        every = self._selection.names_instances
        return [g for g in self._inventory.gpus if every or g.uuid in shown]

    def _gather(
        self, inventory: Outcome, results: dict[Device, Result[GpuAnswer]], others: Result[GpuAnswer] | None
    ) -> TelemetryPart:
        answers = []
        outcomes = [inventory, *self._outcome_of_others(others), *self._unreachable()]
        found = others.value.others if others is not None and others.value is not None else ()
        for gpu, result in results.items():
            outcomes.append(self._outcome(f"gpu{gpu.index}", result, gpu.uuid))
            if result.value is not None:
                answers.append(result.value)
                self._known[gpu.uuid] = tuple(r.device for r in result.value.readings)
                self._dropped.update(result.value.dropped)
                self._errors.update((f"gpu{gpu.index}", reason) for reason in result.value.errors)
        devices = self._devices()
        shown = self._selection.of(devices)
        return TelemetryPart(
            devices=devices,
            selected=self._select(devices),
            readings=tuple(r for a in answers for r in a.readings if r.device.key in shown),
            others=(*(o for a in answers for o in a.others), *found),
            outcomes=tuple(outcomes),
            unsupported=tuple(u for a in answers for u in a.unsupported if u[0] in shown),
            device_count=self._count(len(self._inventory.gpus) - len(results) + len(answers)),
            errors=dict(self._errors),
            dropped=dict(self._dropped),
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

    def _select(self, devices: tuple[Device, ...]) -> tuple[Device, ...]:
        shown = self._selection.of(devices)
        return tuple(d for d in devices if d.key in shown)

    def _devices(self) -> tuple[Device, ...]:
        return tuple(d for gpu in self._inventory.gpus for d in self._known.get(gpu.uuid, (gpu,)))

    def _count(self, visible: int) -> DeviceCount:
        expected = self._telemetry.expected
        baseline = expected if expected is not None else self._most_seen
        return DeviceCount(expected, visible, max(0, baseline - visible))

    def _outcome(self, source: str, result: Result[Any], device: str = "") -> Outcome:
        if isinstance(result.error, StartError):
            raise result.error
        if result.error is None:
            return Outcome(source, result.seconds, device=device)
        self._errors[source, result.error.reason] += 1
        return Outcome(source, result.seconds, result.error.reason, str(result.error), device)


def _worker(gpu: Device) -> str:
    return f"gpu{gpu.index}-{gpu.uuid}"
