"""Turns a view into a tree of table lines: below each GPU its conditions, MIG instances, holders and processes.

A GPU or instance and its holder share one line if there is only one holder.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from msgspec.structs import replace as replace_in

from podgpu.agent.usage_turn import RunningProcess
from podgpu.cluster.parts import BLIND, Use
from podgpu.cluster.view import ConditionView, GpuView, HolderView, InstanceView, NodeView, View
from podgpu.errors import few_of
from podgpu.metrics.conditions import DRIVER_AWAY, NODE_GONE, conditions
from podgpu.model import Workload, WorkloadKey, device_key, parts_of
from podgpu.top.text import count_of, name_of

Kind = Literal["gpu", "instance", "holder", "process", "condition"]
Order = Literal["gpu", "utilisation", "memory", "power", "idle"]
Severity = Literal["", "warn", "bad"]
Row = tuple[str, str, str, WorkloadKey | str]
"""Identifies a line across readings: node, UUID, MIG instance, and holder, process or condition."""
SlotOfView = GpuView | InstanceView
Processes = Mapping[str, Sequence[RunningProcess]]  # processes by the key of their GPU or instance
_SEVERITIES: tuple[Severity, ...] = ("bad", "warn", "")


@dataclass(frozen=True, slots=True)
class Line:
    kind: Kind
    row: Row
    node: str
    gpu: GpuView
    slot: SlotOfView  # the line's GPU or MIG instance (or its parent); has no figures if it could not be read
    number: str = ""
    model: str = ""
    holder: Workload | None = None
    remark: str = ""  # shown if the line has no holder
    utilization: float | None = None
    memory: int | None = None
    power: float | None = None
    temperature: float | None = None
    processes: int | None = None
    use: Use | None = None
    idle: float | None = None  # idle time in seconds
    conditions: Sequence[ConditionView] = ()
    age: float | None = None  # age of the condition, in seconds
    beneath: tuple[Line, ...] = ()

    @property
    def severity(self) -> Severity:
        """The highest severity of this line and all lines below it."""
        severities = {line.severity for line in self.beneath} | {severity_of(c) for c in self.conditions}
        if self.is_slot and self.slot.absent:
            severities.add("bad")
        return next((severity for severity in _SEVERITIES if severity in severities), "")

    @property
    def is_slot(self) -> bool:
        return self.kind in ("gpu", "instance")

    @property
    def is_held(self) -> bool:
        return bool(self.slot.holders)

    @property
    def name(self) -> str:
        return "" if self.holder is None else name_of(self.holder)

    @property
    def label(self) -> str:
        return self.remark if self.kind == "process" else self.name or self.remark


def severity_of(condition: ConditionView) -> Severity:
    spec = conditions().get(condition.condition)
    return "bad" if spec is None or spec.severity == "broken" else "warn"


def flatten(lines: Iterable[Line], depth: int = 0) -> Iterator[tuple[int, Line]]:
    for line in lines:
        yield depth, line
        yield from flatten(line.beneath, depth + 1)


def make_lines(view: View, now: float, processes: Processes | None = None) -> list[Line]:
    """Returns one tree of lines for each GPU. `now` is Unix time by the clock of the source."""
    return [_LineBuilder(node, gpu, now, processes or {}).build() for node in view.nodes for gpu in node.gpus]


class _LineBuilder:
    """Builds the lines of one GPU."""

    def __init__(self, node: NodeView, gpu: GpuView, now: float, processes: Processes) -> None:
        self._node = node.name
        self._is_blind = node.old or gpu.absent or any(c.condition in BLIND for c in gpu.conditions)
        self._gpu = gpu
        self._now = now
        self._processes = processes

    def build(self) -> Line:
        line = self._slot_line(self._gpu)
        instances = sorted(self._gpu.instances, key=lambda instance: (len(instance.id), instance.id))
        parts = tuple(self._slot_line(instance) for instance in instances)
        if not parts:
            return line
        if not line.is_held:
            held = sum(part.is_held for part in parts)
            remark = f"{held} of {count_of(len(parts), 'instance')} held"
            line = replace(line, remark=remark, processes=_sum(part.processes for part in parts))
        return replace(line, beneath=(*line.beneath, *parts))

    def _slot_line(self, slot: SlotOfView) -> Line:
        if self._is_blind:
            slot = _without_figures(slot)
        number = "?" if self._gpu.index is None else str(self._gpu.index)
        line = self._line(
            "gpu",
            slot,
            number=number,
            remark=_describe_free(slot),
            utilization=slot.utilization_ratio,
            memory=slot.memory_used_bytes,
            power=slot.power_watts,
            temperature=slot.temperature_celsius,
            conditions=slot.conditions,
        )
        if isinstance(slot, InstanceView):
            line = replace(line, kind="instance", number=f"{number}/{slot.id}", model=slot.profile)
        wrong = [self._condition_line(slot, condition) for condition in slot.conditions]
        processes = self._processes_on(slot)
        keys = {holder.key for holder in slot.holders}
        others = self._process_lines(slot, (p for p in processes if _key_of(p) not in keys))
        holders = [self._holder_line(slot, holder, processes) for holder in slot.holders]
        if len(holders) == 1:
            return _merge_holder(line, holders[0], (*wrong, *holders[0].beneath, *others))
        if holders:
            remark = count_of(len(holders), "holder")
            line = replace(line, remark=remark, processes=_sum(holder.processes for holder in holders))
        return replace(line, beneath=(*wrong, *sorted(holders, key=lambda holder: holder.name), *others))

    def _holder_line(self, slot: SlotOfView, holder: HolderView, processes: Iterable[RunningProcess]) -> Line:
        return self._line(
            "holder",
            slot,
            holder.key,
            holder=holder,
            utilization=holder.utilization_ratio,
            memory=holder.memory_used_bytes,
            power=holder.power_watts,
            processes=holder.processes,
            use=holder.use,
            idle=None if holder.idle_since is None else max(0.0, self._now - holder.idle_since),
            beneath=self._process_lines(slot, (p for p in processes if _key_of(p) == holder.key)),
        )

    def _condition_line(self, slot: SlotOfView, condition: ConditionView) -> Line:
        age = None if condition.since is None else max(0.0, self._now - condition.since)
        return self._line("condition", slot, condition.condition, conditions=(condition,), age=age)

    def _process_lines(self, slot: SlotOfView, processes: Iterable[RunningProcess]) -> tuple[Line, ...]:
        return tuple(
            self._line(
                "process",
                slot,
                f"pid {process.pid}",
                holder=process.owner,
                remark=_describe_process(process, slot),
                utilization=process.utilization,
                memory=process.memory,
            )
            for process in sorted(processes, key=lambda process: process.pid)
        )

    def _processes_on(self, slot: SlotOfView) -> Sequence[RunningProcess]:
        if not self._processes:
            return ()
        instance = int(slot.id) if isinstance(slot, InstanceView) else None
        return self._processes.get(device_key(self._gpu.uuid, instance), ())

    def _line(self, kind: Kind, slot: SlotOfView, key: WorkloadKey | str = "", **figures: Any) -> Line:
        instance = slot.id if isinstance(slot, InstanceView) else ""
        row = self._node, self._gpu.uuid, instance, key
        return Line(kind, row, self._node, self._gpu, slot, model=self._gpu.model, **figures)


def _merge_holder(line: Line, holder: Line, beneath: tuple[Line, ...]) -> Line:
    return replace(
        line,
        holder=holder.holder,
        utilization=holder.utilization if line.utilization is None else line.utilization,
        memory=holder.memory if line.memory is None else line.memory,
        power=holder.power if line.power is None else line.power,
        processes=holder.processes,
        use=holder.use,
        idle=holder.idle,
        beneath=beneath,
    )


def _without_figures(slot: SlotOfView) -> SlotOfView:
    """Removes the figures, which are out of date. Keeps identity, conditions and holders."""
    holders = [
        HolderView(
            *parts_of(holder),
            share_ratio=holder.share_ratio,
            owner=holder.owner,
            cost_per_hour=holder.cost_per_hour,
        )
        for holder in slot.holders
    ]
    return replace_in(
        slot,
        utilization_ratio=None,
        memory_used_bytes=None,
        memory_total_bytes=None,
        power_watts=None,
        temperature_celsius=None,
        holders=holders,
    )


def _describe_free(slot: SlotOfView) -> str:
    if slot.last_holders:
        return f"last held by {few_of((name_of(holder) for holder in slot.last_holders), most=1)}"
    return "missing" if slot.absent else "-"


def _describe_process(process: RunningProcess, slot: SlotOfView) -> str:
    if process.owner is None:
        return f"pid {process.pid}, in no known container"
    is_beneath_owner = any(holder.key == process.owner.key for holder in slot.holders)
    return f"pid {process.pid}" if is_beneath_owner else f"pid {process.pid}, {name_of(process.owner)}"


def _key_of(process: RunningProcess) -> WorkloadKey:
    return process.owner.key if process.owner else ()


def _sum(numbers: Iterable[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None


# Sorting and filtering


def arrange(lines: Iterable[Line], order: Order, wanted: str = "") -> list[Line]:
    """Returns the lines that match `wanted`: broken GPUs first, then sorted by `order`, largest first."""
    kept = [match for line in lines if (match := _match(line, wanted.casefold())) is not None]
    return list(_show_shared_once(sorted(_sort(kept, order), key=lambda line: _SEVERITIES.index(line.severity))))


def _show_shared_once(lines: Iterable[Line]) -> Iterator[Line]:
    """Shows a condition that affects a whole node only below the first GPU of the node."""
    shown: set[tuple[str, str]] = set()
    for line in lines:
        shared = {(line.node, c.condition) for c in line.conditions if c.condition in (DRIVER_AWAY, NODE_GONE)}
        repeated = {name for _, name in shared & shown}
        shown |= shared
        yield _without_conditions(line, repeated) if repeated else line


def _without_conditions(line: Line, names: Container[str]) -> Line:
    kept = (_without_conditions(inner, names) for inner in line.beneath if not _is_condition(inner, names))
    return replace(line, beneath=tuple(kept)) if line.beneath else line


def _is_condition(line: Line, names: Container[str]) -> bool:
    return line.kind == "condition" and line.conditions[0].condition in names


def _match(line: Line, wanted: str) -> Line | None:
    """A matching line keeps all lines below it. Any other line keeps only the lines below it that match."""
    if not wanted or wanted in _searchable(line).casefold():
        return line
    beneath = tuple(match for inner in line.beneath if (match := _match(inner, wanted)) is not None)
    return replace(line, beneath=beneath) if beneath else None


def _searchable(line: Line) -> str:
    words = [line.name, line.node, line.model]
    if line.conditions:
        words += ["broken", *(condition.condition.replace("_", " ") for condition in line.conditions)]
    if line.kind == "condition":
        words += [condition.says for condition in line.conditions]
    return "\n".join(words)


def _sort(lines: Iterable[Line], order: Order) -> list[Line]:
    if order == "gpu":
        return list(lines)
    inner = [replace(line, beneath=tuple(_sort(line.beneath, order))) if line.beneath else line for line in lines]
    return sorted(inner, key=lambda line: (line.kind != "condition", -_largest(line, order)))


def _largest(line: Line, order: Order) -> float:
    """Returns the largest value in the tree of this line, by which the line is sorted."""
    own = {"utilisation": line.utilization, "memory": line.memory, "power": line.power, "idle": line.idle}.get(order)
    return max([float("-inf") if own is None else own, *(_largest(inner, order) for inner in line.beneath)])
