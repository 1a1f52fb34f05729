"""Turns a view into a tree of table lines.

Below each GPU are its conditions, MIG instances, holders and processes. A GPU or instance and its
holder share one line if there is only one holder.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import msgspec

from podgpu.errors import few_of, plural
from podgpu.fleet.parts import BLIND, Use, may_be_busy
from podgpu.fleet.view import ConditionView, GpuView, HolderView, InstanceView, NodeView, View
from podgpu.known import select_known
from podgpu.metrics.conditions import DRIVER_AWAY, NODE_GONE, breaks_gpu, conditions
from podgpu.model import RunningProcess, Workload, WorkloadKey, device_key, parts_of

Kind = Literal["gpu", "instance", "holder", "process", "condition"]
Order = Literal["gpu", "utilisation", "memory", "power", "idle"]
Severity = Literal["", "warn", "bad"]
SlotOfView = GpuView | InstanceView
Processes = Mapping[str, Sequence[RunningProcess]]  # processes by the key of their GPU or instance
_SEVERITIES: tuple[Severity, ...] = ("", "warn", "bad")
_OF_WHOLE_NODE = (DRIVER_AWAY, NODE_GONE)


class LineKey(NamedTuple):
    """Identifies a line across readings."""

    node: str
    uuid: str  # of the GPU
    instance: str  # id of the MIG instance, or empty
    part: WorkloadKey | str  # the holder, process or condition; empty in the line of a device


@dataclass(frozen=True, slots=True)
class Line:
    kind: Kind
    key: LineKey
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
        return self.key.node

    @property
    def device(self) -> tuple[str, str]:
        """UUID of the GPU and id of the MIG instance. The id is empty for the GPU itself."""
        return self.key.uuid, self.key.instance

    @property
    def number(self) -> str:
        index = "?" if self.gpu.index is None else str(self.gpu.index)
        if isinstance(self.slot, InstanceView):
            return f"{index}/{self.slot.id}"
        return index

    @property
    def model(self) -> str:
        if isinstance(self.slot, InstanceView):
            return self.slot.profile
        return self.gpu.model

    @property
    def is_slot(self) -> bool:
        return self.kind in ("gpu", "instance")

    @property
    def name(self) -> str:
        if self.holder is None:
            return ""
        return name_of(self.holder)

    @property
    def label(self) -> str:
        if self.kind == "process":
            return self.remark
        return self.name or self.remark

    @property
    def severity(self) -> Severity:
        """The highest severity of this line and all lines below it."""
        severities = [line.severity for line in self.beneath]
        if self.condition is not None:
            severities.append(severity_of(self.condition))
        if self.is_slot:
            # Lines of shared conditions are shown only once, so they may be missing below this one.
            severities += [severity_of(condition) for condition in self.slot.conditions]
            if self.slot.absent:
                severities.append("bad")
        return max(severities, key=_SEVERITIES.index, default="")


def name_of(workload: Workload) -> str:
    return workload.text or "unknown holder"


def severity_of(condition: ConditionView) -> Severity:
    spec = conditions().get(condition.condition)
    if spec is None or spec.severity == "broken":
        return "bad"
    return "warn"


def seconds_since(start: float | None, now: float) -> float | None:
    """Returns None if the start is unknown."""
    if start is None:
        return None
    return max(0.0, now - start)


def flatten(lines: Iterable[Line], depth: int = 0) -> Iterator[tuple[int, Line]]:
    for line in lines:
        yield depth, line
        yield from flatten(line.beneath, depth + 1)


def make_lines(view: View, now: float, processes: Processes | None = None) -> list[Line]:
    """Returns one tree of lines for each GPU. `now` is Unix time by the clock of the source."""
    lines = []
    for node in view.nodes:
        for gpu in node.gpus:
            lines.append(_make_gpu_line(node, gpu, now, processes or {}))
    return lines


def _make_gpu_line(node: NodeView, gpu: GpuView, now: float, processes: Processes) -> Line:
    is_blind = any(condition.condition in BLIND for condition in gpu.conditions)
    if node.old or gpu.absent or is_blind:
        gpu = _without_figures(gpu)

    line = _make_slot_line(node, gpu, gpu, now, processes)
    if not gpu.instances:
        return line

    instances = []
    for instance in sorted(gpu.instances, key=lambda instance: int(instance.id)):
        instances.append(_make_slot_line(node, gpu, instance, now, processes))

    line = replace(line, beneath=line.beneath + tuple(instances))
    # Then the line shows the holder of the whole GPU.
    if gpu.holders:
        return line

    held = sum(1 for instance in gpu.instances if instance.holders)
    remark = f"{held} of {plural(len(instances), 'instance')} held"
    return replace(line, remark=remark, processes=_sum_processes(instances))


def _without_figures(gpu: GpuView) -> GpuView:
    """Returns a copy without the figures, which are out of date.

    Keeps identity, conditions and holders.
    """
    gpu = deepcopy(gpu)
    slots: list[SlotOfView] = [gpu]
    slots += gpu.instances
    for slot in slots:
        slot.utilization_ratio = None
        slot.power_watts = None
        slot.temperature_celsius = None
        slot.memory_used_bytes = None
        slot.memory_total_bytes = None
        slot.holders = [_drop_figures(holder) for holder in slot.holders]
    return gpu


def _drop_figures(holder: HolderView) -> HolderView:
    return HolderView(
        *parts_of(holder),
        share_ratio=holder.share_ratio,
        owner=holder.owner,
        cost_per_hour=holder.cost_per_hour,
    )


def _make_slot_line(
    node: NodeView, gpu: GpuView, slot: SlotOfView, now: float, processes: Processes
) -> Line:
    instance = ""
    key = device_key(gpu.uuid, None)
    if isinstance(slot, InstanceView):
        instance = slot.id
        key = device_key(gpu.uuid, int(instance))

    running = sorted(processes.get(key, ()), key=lambda process: process.pid)
    place = (node.name, gpu.uuid, instance)
    return _SlotLines(place, gpu, slot, now, running).make_slot()


@dataclass(frozen=True, slots=True)
class _SlotLines:
    """Makes the line of a GPU or MIG instance, and the lines below it except those of instances."""

    place: tuple[str, str, str]  # node, GPU UUID, MIG instance
    gpu: GpuView
    slot: SlotOfView
    now: float
    running: Sequence[RunningProcess]

    @property
    def holder_keys(self) -> set[WorkloadKey]:
        return {holder.key for holder in self.slot.holders}

    def make_slot(self) -> Line:
        slot = self.slot
        holders = [self._make_holder(holder) for holder in slot.holders]
        holders = _round_within(holders, slot.utilization_ratio)
        holders.sort(key=lambda line: line.name)

        beneath = [self._make_condition(condition) for condition in slot.conditions]
        # An only holder shares the line of its device.
        only = holders[0] if len(holders) == 1 else None
        if only is None:
            beneath += holders
        else:
            beneath += only.beneath
        for process in self.running:
            if _owner_key(process) not in self.holder_keys:
                beneath.append(self._make_process(process))

        kind: Kind = "instance" if isinstance(slot, InstanceView) else "gpu"
        remark = plural(len(holders), "holder") if holders else describe_free(slot)
        line = self._make(
            kind,
            remark=remark,
            utilization=slot.utilization_ratio,
            memory=slot.memory_used_bytes,
            power=slot.power_watts,
            processes=_sum_processes(holders),
            beneath=tuple(beneath),
        )
        if only is None:
            return line
        return _merge_holder(line, only)

    def _make(self, kind: Kind, part: WorkloadKey | str = "", **figures: Any) -> Line:
        return Line(kind, LineKey(*self.place, part), self.gpu, self.slot, **figures)

    def _make_condition(self, condition: ConditionView) -> Line:
        age = seconds_since(condition.since, self.now)
        return self._make("condition", condition.condition, condition=condition, age=age)

    def _make_holder(self, holder: HolderView) -> Line:
        processes = [process for process in self.running if _owner_key(process) == holder.key]
        # Views of other nodes have the processes in their holders, and have no list of all.
        if not processes:
            for process in holder.running:
                processes.append(msgspec.structs.replace(process, owner=holder))

        use = holder.use
        is_shared = len(self.slot.holders) > 1
        if use == "used" and is_shared and holder.utilization_ratio is None:
            use = None  # the busy holder may be another one

        return self._make(
            "holder",
            holder.key,
            holder=holder,
            utilization=holder.utilization_ratio,
            memory=holder.memory_used_bytes,
            power=holder.power_watts,
            processes=holder.processes,
            use=use,
            idle=seconds_since(holder.idle_since, self.now),
            beneath=tuple(map(self._make_process, processes)),
        )

    def _make_process(self, process: RunningProcess) -> Line:
        owner = process.owner
        remark = f"pid {process.pid} {process.command}".rstrip()
        if owner is None:
            remark += ", in no known container"
        elif owner.key not in self.holder_keys:
            remark += f", {name_of(owner)}"
        return self._make(
            "process",
            f"pid {process.pid}",
            holder=owner,
            remark=remark,
            utilization=process.utilization_ratio,
            memory=process.memory_used_bytes,
        )


def _owner_key(process: RunningProcess) -> WorkloadKey | None:
    if process.owner is None:
        return None
    return process.owner.key


def _merge_holder(line: Line, only: Line) -> Line:
    """Adds the only holder to the line of its device. The device's own figures are preferred."""
    merged = replace(line, holder=only.holder, use=only.use, idle=only.idle)
    if line.utilization is None:
        merged = replace(merged, utilization=only.utilization)
    if line.memory is None:
        merged = replace(merged, memory=only.memory)
    if line.power is None:
        merged = replace(merged, power=only.power)
    return merged


def _round_within(holders: list[Line], whole: float | None) -> list[Line]:
    """Rounds the utilisation of several holders to whole per cents.

    Their sum never exceeds the GPU's rounded value.
    """
    if len(holders) < 2 or whole is None:
        return holders

    excess = sum(round(_percent_of(line)) for line in holders) - round(100 * whole)
    rounded = []
    # The holders that gain most by rounding come first. They give back the excess.
    for line in sorted(holders, key=lambda line: _percent_of(line) - round(_percent_of(line))):
        percent = round(_percent_of(line))
        if excess > 0 and percent > _percent_of(line):
            percent -= 1
            excess -= 1
        if line.utilization is not None:
            line = replace(line, utilization=percent / 100)
        rounded.append(line)
    return rounded


def _percent_of(holder: Line) -> float:
    return 100 * (holder.utilization or 0.0)


def describe_free(slot: SlotOfView) -> str:
    """Describes a device without a holder. Returns `-` if it is free."""
    if slot.last_holders:
        return f"last held by {few_of((name_of(holder) for holder in slot.last_holders), most=1)}"
    if slot.absent:
        return "missing"

    # While the node does not answer, somebody may have taken the GPU.
    is_gone = any(condition.condition == NODE_GONE for condition in slot.conditions)
    if is_gone or may_be_busy(slot.utilization_ratio, slot.memory_used_bytes):
        return "holder unknown"
    return "-"


def _sum_processes(lines: Iterable[Line]) -> int | None:
    """Returns None if the number is unknown for all lines."""
    known = select_known(line.processes for line in lines)
    if not known:
        return None
    return sum(known)


# Sorting and filtering


def arrange(lines: Iterable[Line], order: Order, wanted: str = "") -> list[Line]:
    """Returns the lines that match the text `wanted`.

    Sorts them by severity (broken first), then by `order` (largest first).
    """
    if wanted:
        lines = _filter(lines, wanted.casefold())

    arranged = _sort(lines, order)
    # A stable sort: lines of the same severity stay in this order.
    arranged.sort(key=lambda line: _SEVERITIES.index(line.severity), reverse=True)
    return list(_show_shared_once(arranged))


def _filter(lines: Iterable[Line], wanted: str) -> list[Line]:
    """Keeps matching lines with all lines below them, and the lines above matching lines."""
    matching = []
    for line in lines:
        if wanted in _searchable(line).casefold():
            matching.append(line)
            continue
        beneath = _filter(line.beneath, wanted)
        if beneath:
            matching.append(replace(line, beneath=tuple(beneath)))
    return matching


def _searchable(line: Line) -> str:
    """Returns the texts in which the filter searches. They include words that are not shown."""
    words = [line.name, line.node, line.model]
    own_conditions: list[ConditionView] = []
    if line.is_slot:
        own_conditions = line.slot.conditions
    elif line.condition is not None:
        own_conditions = [line.condition]

    for condition in own_conditions:
        if breaks_gpu(condition.condition):
            words.append("broken")
        words += [condition.condition.replace("_", " "), condition.says]
    return "\n".join(words)


def _sort(lines: Iterable[Line], order: Order) -> list[Line]:
    """Sorts by the largest value of each line and the lines below it. Conditions are first."""
    if order == "gpu":
        return list(lines)

    arranged = []
    for line in lines:
        if line.beneath:
            line = replace(line, beneath=tuple(_sort(line.beneath, order)))
        arranged.append(line)
    arranged.sort(key=lambda line: _find_largest(line, order), reverse=True)
    arranged.sort(key=lambda line: line.kind != "condition")
    return arranged


def _find_largest(line: Line, order: Order) -> float:
    figures = {
        "utilisation": line.utilization,
        "memory": line.memory,
        "power": line.power,
        "idle": line.idle,
    }
    values = [_find_largest(inner, order) for inner in line.beneath]

    value = figures[order]
    if value is not None:
        values.append(value)
    # Lines without a value are last.
    return max(values, default=float("-inf"))


def _show_shared_once(lines: Iterable[Line]) -> Iterator[Line]:
    """Shows a condition that affects a whole node only below the first GPU of the node."""
    shown: set[tuple[str, str]] = set()
    for line in lines:
        repeated = set()
        for condition in line.slot.conditions:
            name = condition.condition
            if name not in _OF_WHOLE_NODE:
                continue
            if (line.node, name) in shown:
                repeated.add(name)
            shown.add((line.node, name))
        if repeated:
            yield _without_conditions(line, repeated)
        else:
            yield line


def _without_conditions(line: Line, names: Container[str]) -> Line:
    beneath = []
    for inner in line.beneath:
        if inner.condition is None or inner.condition.condition not in names:
            beneath.append(_without_conditions(inner, names))
    return replace(line, beneath=tuple(beneath))
