"""The table's lines as a tree: a GPU, beneath it its MIG instances or holders, beneath them processes. Pure.

A device with one holder is one line. Sorting and filtering keep what belongs together together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from podgpu.figures.device import DeviceFigures, HolderFigures, ProcessFigures, View, holder_text
from podgpu.model import Who
from podgpu.top.history import History, Idle

Kind = Literal["gpu", "instance", "holder", "process"]
Order = Literal["gpu", "utilisation", "memory", "power", "idle"]
NOBODY = "-"


@dataclass(frozen=True, slots=True)
class Line:
    kind: Kind
    holder: str = ""
    remark: str = ""
    """What is to be said where no holder is named."""
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
    beneath: tuple[Line, ...] = ()


# Building


def lines_of(view: View, history: History) -> list[Line]:
    """One for each physical GPU, in the order of GPUs."""
    gpus: dict[tuple[str, str], list[DeviceFigures]] = {}
    for device in sorted(view.devices, key=lambda d: d.place):
        gpus.setdefault((device.node, device.uuid), []).append(device)
    return [_gpu_line(devices, history) for devices in gpus.values()]


def _gpu_line(devices: Sequence[DeviceFigures], history: History) -> Line:
    gpu, instances = devices[0], devices[1:]
    if gpu.instance:  # the page has the instances only
        gpu, instances = _bare_gpu(gpu), devices
    parts = tuple(_device_line(instance, gpu, history) for instance in instances)
    line = _device_line(gpu, gpu, history)
    if not parts:
        return line
    if not line.held:
        held = sum(part.held for part in parts)
        processes = _sum(part.processes for part in parts)
        line = replace(line, remark=f"{held} of {_plural(len(parts), 'instance')} held", processes=processes)
    return replace(line, beneath=(*line.beneath, *parts))


def _bare_gpu(instance: DeviceFigures) -> DeviceFigures:
    return DeviceFigures(instance.uuid, instance.index, instance.model, instance.node)


def _device_line(device: DeviceFigures, gpu: DeviceFigures, history: History) -> Line:
    line = Line(
        kind="instance" if device.instance else "gpu",
        remark=NOBODY,
        gpu=_number(device),
        model=device.profile if device.instance else device.model,
        node=device.node,
        utilization=device.utilization,
        memory=device.memory_used,
        memory_total=device.memory_total,
        power=device.power_watts,
        temperature=device.temperature,
        held=bool(device.holders),
        beneath=_process_lines(_strangers(device), device),
    )
    if len(device.holders) == 1:
        return _with_sole_holder(line, device, gpu, history)
    if not device.holders:
        return line
    people = [_holder_line(device, holder, gpu, history) for holder in device.holders]
    return replace(
        line,
        remark=_plural(len(people), "holder"),
        processes=_sum(person.processes for person in people),
        beneath=(*sorted(people, key=lambda person: person.holder), *line.beneath),
    )


def _with_sole_holder(line: Line, device: DeviceFigures, gpu: DeviceFigures, history: History) -> Line:
    own = _holder_line(device, device.holders[0], gpu, history)
    return replace(
        line,
        holder=own.holder,
        utilization=own.utilization if line.utilization is None else line.utilization,
        memory=own.memory if line.memory is None else line.memory,
        power=own.power if line.power is None else line.power,
        processes=own.processes,
        idle=own.idle,
        beneath=(*own.beneath, *line.beneath),
    )


def _holder_line(device: DeviceFigures, holder: HolderFigures, gpu: DeviceFigures, history: History) -> Line:
    part = history.power_part(device, holder)
    return Line(
        kind="holder",
        holder=holder_text(holder.holder),
        model=device.model,
        node=device.node,
        utilization=holder.utilization,
        memory=holder.memory,
        memory_total=device.memory_total,
        power=None if part is None or gpu.power_watts is None else part * gpu.power_watts,
        processes=holder.processes,
        idle=history.idle(device, holder),
        held=True,
        beneath=_process_lines((p for p in device.processes if _owner(p) == holder.who), device),
    )


def _strangers(device: DeviceFigures) -> Iterator[ProcessFigures]:
    holders = {holder.who for holder in device.holders}
    return (process for process in device.processes if _owner(process) not in holders)


def _owner(process: ProcessFigures) -> Who:
    return process.owner.who if process.owner else ()


def _process_lines(processes: Iterable[ProcessFigures], device: DeviceFigures) -> tuple[Line, ...]:
    return tuple(
        Line(
            kind="process",
            holder=holder_text(p.owner) if p.owner else "",
            remark=f"pid {p.pid}" if p.owner else f"pid {p.pid}, in no known container",
            model=device.model,
            node=device.node,
            utilization=p.utilization,
            memory=p.memory,
            memory_total=device.memory_total,
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


# Sorting, filtering


def arrange(lines: Iterable[Line], order: Order, wanted: str = "") -> list[Line]:
    """Those that match `wanted`, the largest first; `gpu` leaves them in the order of GPUs."""
    kept = [kept for line in lines if (kept := _matching(line, wanted.casefold())) is not None]
    return kept if order == "gpu" else _sorted(kept, order)


def flatten(lines: Iterable[Line], depth: int = 0) -> Iterator[tuple[int, Line]]:
    for line in lines:
        yield depth, line
        yield from flatten(line.beneath, depth + 1)


def _matching(line: Line, wanted: str) -> Line | None:
    """A line that matches keeps all that is beneath it; one that does not is kept for those beneath that do."""
    if not wanted or wanted in "\n".join((line.holder, line.node, line.model)).casefold():
        return line
    beneath = tuple(kept for one in line.beneath if (kept := _matching(one, wanted)) is not None)
    return replace(line, beneath=beneath) if beneath else None


def _sorted(lines: Iterable[Line], order: Order) -> list[Line]:
    inner = [replace(line, beneath=tuple(_sorted(line.beneath, order))) for line in lines]
    return sorted(inner, key=lambda line: -_largest(line, order))


def _largest(line: Line, order: Order) -> float:
    own = _value(line, order)
    return max([float("-inf") if own is None else own, *(_largest(one, order) for one in line.beneath)])


def _value(line: Line, order: Order) -> float | None:
    if order == "idle":
        return None if line.idle is None else line.idle.seconds
    return {"utilisation": line.utilization, "memory": line.memory, "power": line.power}.get(order)
