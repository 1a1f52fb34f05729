"""This module makes the table's lines as a tree: a GPU, beneath it what is wrong with it, its MIG instances or holders,
and processes.

A device with one holder is one line. `arrange.py` sorts and filters them. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from podgpu.errors import few_of
from podgpu.model import Workload, WorkloadKey
from podgpu.top.figures import (
    Condition,
    DeviceFigures,
    FlatView,
    HolderFigures,
    PhysicalGpu,
    ProcessFigures,
    holder_text,
    is_blind,
    physical_gpus,
)
from podgpu.top.history import History, Idle

Kind = Literal["gpu", "instance", "holder", "process", "condition"]
Row = tuple[str, str, str, WorkloadKey | str]
"""What a line is about, whatever is read next: node, UUID, instance, and who or what beneath it."""
NOBODY = "-"


@dataclass(frozen=True, slots=True)
class Line:
    kind: Kind
    row: Row = ("", "", "", "")
    holder: str = ""
    remark: str = ""
    """What is to be shown where no holder is named."""
    who: Workload | None = None
    gpu: str = ""
    model: str = ""
    node: str = ""
    utilization: float | None = None
    memory: int | None = None
    memory_total: int | None = None
    power: float | None = None
    temperature: float | None = None
    processes: int | None = None
    idle: Idle | None = None
    held: bool = False
    conditions: tuple[Condition, ...] = ()
    age: float | None = None
    """Seconds since which a condition is there."""
    device: DeviceFigures | None = None
    """What it is about or stands beneath."""
    beneath: tuple[Line, ...] = ()

    @property
    def severity(self) -> Literal["", "warn", "bad"]:
        """How bad it is, with all that is beneath it."""
        is_gone = self.kind in ("gpu", "instance") and self.device is not None and not self.device.present
        is_bad = is_gone or any(condition.severity == "broken" for condition in self.conditions)
        own = "bad" if is_bad else "warn" if self.conditions else ""
        worst = [own, *(line.severity for line in self.beneath)]
        return "bad" if "bad" in worst else "warn" if "warn" in worst else ""


def lines_of(view: FlatView, history: History, wall: float | None = None) -> list[Line]:
    """One for each physical GPU, in the order of GPUs. `wall` is now in Unix time, for ages."""
    nodes: dict[str, list[DeviceFigures]] = {}
    for device in sorted(view.devices, key=lambda d: d.place):
        is_known = not is_blind(device) and device.node not in view.old_nodes
        nodes.setdefault(device.node, []).append(device if is_known else without_figures(device))
    build = _Builder(history, view.taken_at if view.taken_at is not None else wall)
    return [build.gpu_line(gpu) for devices in nodes.values() for gpu in physical_gpus(devices)]


def flatten(lines: Iterable[Line], depth: int = 0) -> Iterator[tuple[int, Line]]:
    for line in lines:
        yield depth, line
        yield from flatten(line.beneath, depth + 1)


class _Builder:
    def __init__(self, history: History, now: float | None) -> None:
        self._history = history
        self._now = now

    def gpu_line(self, of: PhysicalGpu) -> Line:
        first = of.devices[0]
        gpu = of.own or DeviceFigures(first.uuid, first.index, first.model, first.node)
        parts = tuple(self._device_line(instance, gpu) for instance in of.instances)
        line = self._device_line(gpu, gpu)
        if not parts:
            return line
        if not line.held:
            held = sum(part.held for part in parts)
            processes = _sum(part.processes for part in parts)
            line = replace(line, remark=f"{held} of {_plural(len(parts), 'instance')} held", processes=processes)
        return replace(line, beneath=(*line.beneath, *parts))

    def _device_line(self, device: DeviceFigures, gpu: DeviceFigures) -> Line:
        line = Line(
            kind="instance" if device.instance else "gpu",
            row=_row(device),
            remark=_not_held(device),
            gpu=_number(device),
            model=device.profile if device.instance else device.model,
            node=device.node,
            utilization=device.utilization,
            memory=device.memory_used,
            memory_total=device.memory_total,
            power=device.power_watts,
            temperature=device.temperature,
            held=bool(device.holders),
            conditions=device.conditions,
            device=device,
        )
        wrong, strangers = self._condition_lines(device), _process_lines(_strangers(device), device)
        people = [self._holder_line(device, holder, gpu) for holder in device.holders]
        if len(people) == 1:
            return _with_sole_holder(line, people[0], (*wrong, *people[0].beneath, *strangers))
        if people:
            processes = _sum(person.processes for person in people)
            line = replace(line, remark=_plural(len(people), "holder"), processes=processes)
        return replace(line, beneath=(*wrong, *sorted(people, key=lambda person: person.holder), *strangers))

    def _holder_line(self, device: DeviceFigures, holder: HolderFigures, gpu: DeviceFigures) -> Line:
        part = self._history.power_part(device, holder)
        return Line(
            kind="holder",
            row=_row(device, holder.who),
            holder=holder_text(holder.holder),
            who=holder.holder,
            model=device.model,
            node=device.node,
            utilization=holder.utilization,
            memory=holder.memory,
            memory_total=device.memory_total,
            power=None if part is None or gpu.power_watts is None else part * gpu.power_watts,
            processes=holder.processes,
            idle=self._history.idle(device, holder),
            held=True,
            device=device,
            beneath=_process_lines((p for p in device.processes if _owner(p) == holder.who), device),
        )

    def _condition_lines(self, device: DeviceFigures) -> Iterator[Line]:
        for condition in device.conditions:
            yield Line(
                kind="condition",
                row=_row(device, condition.name),
                model=device.model,
                node=device.node,
                conditions=(condition,),
                age=self._age(condition),
                device=device,
            )

    def _age(self, condition: Condition) -> float | None:
        return None if condition.since is None or self._now is None else max(0.0, self._now - condition.since)


def _with_sole_holder(line: Line, own: Line, beneath: tuple[Line, ...]) -> Line:
    return replace(
        line,
        holder=own.holder,
        who=own.who,
        utilization=own.utilization if line.utilization is None else line.utilization,
        memory=own.memory if line.memory is None else line.memory,
        power=own.power if line.power is None else line.power,
        processes=own.processes,
        idle=own.idle,
        beneath=beneath,
    )


def without_figures(device: DeviceFigures) -> DeviceFigures:
    """What is left of a device that cannot be seen: its name, what is wrong, and who holds it."""
    nameless = DeviceFigures(device.uuid, device.index, device.model, device.node, device.instance, device.profile)
    return replace(
        nameless,
        holders=tuple(
            HolderFigures(of.holder, share=of.share, owner=of.owner, cost_per_hour=of.cost_per_hour)
            for of in device.holders
        ),
        conditions=device.conditions,
        present=device.present,
        last_holders=device.last_holders,
        price_per_hour=device.price_per_hour,
    )


def _not_held(device: DeviceFigures) -> str:
    if device.last_holders:
        return f"last held by {few_of((holder_text(holder) for holder in device.last_holders), most=1)}"
    return NOBODY if device.present else "not there"


def _row(device: DeviceFigures, beneath: WorkloadKey | str = "") -> Row:
    return device.node, device.uuid, device.instance, beneath


def _strangers(device: DeviceFigures) -> Iterator[ProcessFigures]:
    holders = {holder.who for holder in device.holders}
    return (process for process in device.processes if _owner(process) not in holders)


def _owner(process: ProcessFigures) -> WorkloadKey:
    return process.owner.key if process.owner else ()


def _process_lines(processes: Iterable[ProcessFigures], device: DeviceFigures) -> tuple[Line, ...]:
    return tuple(
        Line(
            kind="process",
            row=_row(device, f"pid {p.pid}"),
            holder=holder_text(p.owner) if p.owner else "",
            remark=f"pid {p.pid}" if p.owner else f"pid {p.pid}, in no known container",
            model=device.model,
            node=device.node,
            utilization=p.utilization,
            memory=p.memory,
            memory_total=device.memory_total,
            device=device,
        )
        for p in sorted(processes, key=lambda p: p.pid)
    )


def _number(device: DeviceFigures) -> str:
    index = "?" if device.index < 0 else str(device.index)
    return f"{index}/{device.instance}" if device.instance else index


def _sum(numbers: Iterable[int | None]) -> int | None:
    known = [n for n in numbers if n is not None]
    return sum(known) if known else None


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
