"""Turns a view into a tree of table lines. Below each GPU are its conditions, MIG instances,
holders and processes.

A GPU or instance and its holder share one line if there is only one holder.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from podgpu.errors import few_of, plural
from podgpu.fleet.parts import BLIND, Use, may_be_busy
from podgpu.fleet.view import ConditionView, GpuView, HolderView, InstanceView, NodeView, View
from podgpu.metrics.conditions import DRIVER_AWAY, NODE_GONE, conditions
from podgpu.model import RunningProcess, Workload, WorkloadKey, device_key, parts_of

Kind = Literal["gpu", "instance", "holder", "process", "condition"]
Order = Literal["gpu", "utilisation", "memory", "power", "idle"]
Severity = Literal["", "warn", "bad"]
Row = tuple[str, str, str, WorkloadKey | str]
"""Identifies a line across readings. Contains node, GPU UUID, MIG instance, and the holder, process
or condition.
"""
SlotOfView = GpuView | InstanceView
Processes = Mapping[str, Sequence[RunningProcess]]  # processes by the key of their GPU or instance
_SEVERITIES: tuple[Severity, ...] = ("bad", "warn", "")


@dataclass(frozen=True, slots=True)
class Line:
    kind: Kind
    row: Row
    gpu: GpuView
    # GPU or MIG instance to which this line belongs; without figures if it could not be read
    slot: SlotOfView
    holder: Workload | None = None
    remark: str = ""  # shown if the line has no holder
    utilization: float | None = None
    memory: int | None = None
    power: float | None = None
    processes: int | None = None
    use: Use | None = None
    idle: float | None = None  # idle time in seconds
    condition: ConditionView | None = None
    age: float | None = None  # age of the condition, in seconds
    beneath: tuple[Line, ...] = ()

    @property
    def node(self) -> str:
        return self.row[0]

    @property
    def number(self) -> str:
        index = "?" if self.gpu.index is None else str(self.gpu.index)
        return f"{index}/{self.slot.id}" if isinstance(self.slot, InstanceView) else index

    @property
    def model(self) -> str:
        return self.slot.profile if isinstance(self.slot, InstanceView) else self.gpu.model

    @property
    def is_slot(self) -> bool:
        return self.kind in ("gpu", "instance")

    @property
    def name(self) -> str:
        return "" if self.holder is None else name_of(self.holder)

    @property
    def label(self) -> str:
        return self.remark if self.kind == "process" else self.name or self.remark

    @property
    def severity(self) -> Severity:
        """The highest severity of this line and all lines below it."""
        severities = {line.severity for line in self.beneath}
        if self.condition is not None:
            severities.add(severity_of(self.condition))
        if self.is_slot:
            severities |= {severity_of(condition) for condition in self.slot.conditions}
            severities.add("bad" if self.slot.absent else "")
        return next((severity for severity in _SEVERITIES if severity in severities), "")


def name_of(workload: Workload) -> str:
    return workload.text or "unknown holder"


def severity_of(condition: ConditionView) -> Severity:
    spec = conditions().get(condition.condition)
    return "bad" if spec is None or spec.severity == "broken" else "warn"


def flatten(lines: Iterable[Line], depth: int = 0) -> Iterator[tuple[int, Line]]:
    for line in lines:
        yield depth, line
        yield from flatten(line.beneath, depth + 1)


def make_lines(view: View, now: float, processes: Processes | None = None) -> list[Line]:
    """Returns one tree of lines for each GPU. `now` is Unix time by the clock of the source."""
    return [
        _make_gpu_line(node, gpu, now, processes or {}) for node in view.nodes for gpu in node.gpus
    ]


def _make_gpu_line(node: NodeView, gpu: GpuView, now: float, processes: Processes) -> Line:
    if node.old or gpu.absent or any(c.condition in BLIND for c in gpu.conditions):
        gpu = _without_figures(gpu)
    line = _make_slot_line(node, gpu, gpu, now, processes)
    instances = sorted(gpu.instances, key=lambda instance: (len(instance.id), instance.id))
    inner = tuple(_make_slot_line(node, gpu, instance, now, processes) for instance in instances)
    if inner and not gpu.holders:
        held = sum(bool(instance.holders) for instance in instances)
        remark = f"{held} of {plural(len(inner), 'instance')} held"
        line = replace(line, remark=remark, processes=_sum(part.processes for part in inner))
    return replace(line, beneath=(*line.beneath, *inner)) if inner else line


def _without_figures(gpu: GpuView) -> GpuView:
    """Returns a copy without the figures, which are out of date. Keeps identity, conditions and
    holders.
    """
    gpu = deepcopy(gpu)
    for slot in (gpu, *gpu.instances):
        slot.utilization_ratio = slot.power_watts = slot.temperature_celsius = None
        slot.memory_used_bytes = slot.memory_total_bytes = None
        slot.holders = [
            HolderView(
                *parts_of(h),
                share_ratio=h.share_ratio,
                owner=h.owner,
                cost_per_hour=h.cost_per_hour,
            )
            for h in slot.holders
        ]
    return gpu


def _make_slot_line(
    node: NodeView, gpu: GpuView, slot: SlotOfView, now: float, processes: Processes
) -> Line:
    instance = slot.id if isinstance(slot, InstanceView) else ""

    def make(kind: Kind, key: WorkloadKey | str = "", **figures: Any) -> Line:
        return Line(kind, (node.name, gpu.uuid, instance, key), gpu, slot, **figures)

    def make_condition(condition: ConditionView) -> Line:
        age = None if condition.since is None else max(0.0, now - condition.since)
        return make("condition", condition.condition, condition=condition, age=age)

    def make_process(process: RunningProcess) -> Line:
        owner = process.owner
        place = (
            ", in no known container"
            if owner is None
            else ""
            if owner.key in keys
            else f", {name_of(owner)}"
        )
        return make(
            "process",
            f"pid {process.pid}",
            holder=owner,
            remark=f"pid {process.pid} {process.command}".rstrip() + place,
            utilization=process.utilization_ratio,
            memory=process.memory_used_bytes,
        )

    def make_holder(holder: HolderView) -> Line:
        own = [p for p in running if p.owner is not None and p.owner.key == holder.key]
        named = (msgspec.structs.replace(process, owner=holder) for process in holder.running)
        is_guess = (
            holder.utilization_ratio is None and len(slot.holders) > 1
        )  # the busy holder may be another one
        return make(
            "holder",
            holder.key,
            holder=holder,
            utilization=holder.utilization_ratio,
            memory=holder.memory_used_bytes,
            power=holder.power_watts,
            processes=holder.processes,
            use=None if is_guess and holder.use == "used" else holder.use,
            idle=None if holder.idle_since is None else max(0.0, now - holder.idle_since),
            beneath=tuple(map(make_process, own or named)),
        )

    key = device_key(gpu.uuid, int(instance) if instance else None) if processes else ""
    running = sorted(processes.get(key, ()), key=lambda process: process.pid)
    keys = {holder.key for holder in slot.holders}
    others = [make_process(p) for p in running if p.owner is None or p.owner.key not in keys]
    problems = [make_condition(condition) for condition in slot.conditions]
    holders = _round_within(
        [make_holder(holder) for holder in slot.holders], slot.utilization_ratio
    )
    holders.sort(key=lambda line: line.name)
    only = holders[0] if len(holders) == 1 else None

    def own(figure: float | None, name: str) -> float | None:
        return getattr(only, name, None) if figure is None else figure

    return make(
        "instance" if instance else "gpu",
        holder=only.holder if only else None,
        remark=plural(len(holders), "holder") if holders else describe_free(slot),
        utilization=own(slot.utilization_ratio, "utilization"),
        memory=own(slot.memory_used_bytes, "memory"),
        power=own(slot.power_watts, "power"),
        processes=_sum(holder.processes for holder in holders),
        use=only.use if only else None,
        idle=only.idle if only else None,
        beneath=(*problems, *(only.beneath if only else holders), *others),
    )


def _round_within(holders: list[Line], whole: float | None) -> list[Line]:
    """Rounds the utilisation of several holders to whole per cents. Their sum never exceeds the
    GPU's rounded value.
    """
    if len(holders) < 2 or whole is None:
        return holders
    exact = [(line, 100 * (line.utilization or 0.0)) for line in holders]
    excess = sum(round(ratio) for _, ratio in exact) - round(100 * whole)
    rounded = []
    for line, ratio in sorted(
        exact, key=lambda pair: pair[1] - round(pair[1])
    ):  # largest rounding error first
        lower = excess > 0 and round(ratio) > ratio
        excess -= lower
        rounded.append(
            line
            if line.utilization is None
            else replace(line, utilization=(round(ratio) - lower) / 100)
        )
    return rounded


def describe_free(slot: SlotOfView) -> str:
    """Describes a device without a holder. Returns `-` if it is free."""
    if slot.last_holders:
        return f"last held by {few_of((name_of(holder) for holder in slot.last_holders), most=1)}"
    if slot.absent:
        return "missing"
    is_gone = any(condition.condition == NODE_GONE for condition in slot.conditions)
    return (
        "holder unknown"
        if is_gone or may_be_busy(slot.utilization_ratio, slot.memory_used_bytes)
        else "-"
    )


def _sum(numbers: Iterable[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None


# Sorting and filtering


def arrange(lines: Iterable[Line], order: Order, wanted: str = "") -> list[Line]:
    """Returns the lines that match `wanted`, sorted by severity (broken first), then by `order`
    (largest first).
    """
    kept = [match for line in lines if (match := _match(line, wanted.casefold())) is not None]
    return list(
        _show_shared_once(
            sorted(_sort(kept, order), key=lambda line: _SEVERITIES.index(line.severity))
        )
    )


def _show_shared_once(lines: Iterable[Line]) -> Iterator[Line]:
    """Shows a condition that affects a whole node only below the first GPU of the node."""
    shown: set[tuple[str, str]] = set()
    for line in lines:
        names = {c.condition for c in line.slot.conditions} & {DRIVER_AWAY, NODE_GONE}
        repeated = {name for name in names if (line.node, name) in shown}
        shown |= {(line.node, name) for name in names}
        yield _without_conditions(line, repeated) if repeated else line


def _without_conditions(line: Line, names: Container[str]) -> Line:
    kept = (
        inner
        for inner in line.beneath
        if inner.condition is None or inner.condition.condition not in names
    )
    return replace(line, beneath=tuple(_without_conditions(inner, names) for inner in kept))


def _match(line: Line, wanted: str) -> Line | None:
    """Returns a matching line unchanged. Removes non-matching lines below others. Returns None if
    nothing matches.
    """
    if not wanted or wanted in _searchable(line).casefold():
        return line
    beneath = tuple(match for inner in line.beneath if (match := _match(inner, wanted)) is not None)
    return replace(line, beneath=beneath) if beneath else None


def _searchable(line: Line) -> str:
    words = [line.name, line.node, line.model]
    found = line.slot.conditions if line.is_slot else filter(None, [line.condition])
    for condition in found:
        words += ["broken", condition.condition.replace("_", " "), condition.says]
    return "\n".join(words)


def _sort(lines: Iterable[Line], order: Order) -> list[Line]:
    if order == "gpu":
        return list(lines)
    inner = [
        replace(line, beneath=tuple(_sort(line.beneath, order))) if line.beneath else line
        for line in lines
    ]
    return sorted(inner, key=lambda line: (line.kind != "condition", -_largest(line, order)))


def _largest(line: Line, order: Order) -> float:
    """Returns the sort key of a line: the largest value of the line and of all lines below it."""
    own = {
        "utilisation": line.utilization,
        "memory": line.memory,
        "power": line.power,
        "idle": line.idle,
    }.get(order)
    return max(
        [float("-inf") if own is None else own, *(_largest(inner, order) for inner in line.beneath)]
    )
