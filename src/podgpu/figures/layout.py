"""This module says what each sample of an exposition is a figure of, by its name and labels, and fills in the values.
Pure.

Where nobody came or went, the next reading has the same names and labels: a layout may be kept, and filled anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from sys import intern
from typing import NamedTuple, TypeGuard

from podgpu.errors import few_of
from podgpu.figures.device import (
    FIELDS,
    POWER,
    TEMPERATURE,
    Condition,
    DeviceFigures,
    HolderFigures,
    Trouble,
    View,
    in_order,
    is_there,
    memory_of,
    utilization_of,
)
from podgpu.figures.figure_names import first_label
from podgpu.figures.sorting import ABSENT, DCGM_BLANK, MOST, FoundDevice, SortedSamples, condition_of_field
from podgpu.metrics.parse import ParsedSample
from podgpu.model import Who, Workload

_MOST_DIGITS = 9
_MOST_LOST = 1e6
_MOST_SOURCES, _LONGEST_SOURCE = 64, 64
"""Of what an exporter cannot read: each of its GPUs is one, and every name is told."""
NO_TOTALS: Mapping[tuple[str, str], int] = {}
Cells = list[float | None]
"""A value for each sample, None where it cannot be meant; behind them those that are made of several."""


class _Joined(NamedTuple):
    """A field that several samples tell."""

    parts: tuple[tuple[int, ...], ...]
    """Cells of each holder: the last that has a value counts, as the same figure may stand there under two names."""
    add_up: Callable[[list[float]], float]

    def value(self, cells: Cells) -> float | None:
        last = (next((cells[at] for at in reversed(part) if cells[at] is not None), None) for part in self.parts)
        known = [value for value in last if value is not None]
        return self.add_up(known) if known else None


class _Device(NamedTuple):
    """What labels say of one, and in which cells its figures are."""

    uuid: str
    gpu: int
    model: str
    node: str
    instance: str
    profile: str
    fields: tuple[tuple[int, int], ...]
    """Number and cell of each."""
    measured: int
    beside: tuple[tuple[int, int], ...]
    energy: int
    memory: int
    holders: tuple[tuple[Workload, tuple[int, ...]], ...]
    given: frozenset[Who]
    """Those of the holders who were given it, whether or not they work on it."""
    last_holders: tuple[Workload, ...]
    conditions: tuple[tuple[str, str, int], ...]
    """As the exporter says: name, detail, cell of since when."""
    told: tuple[tuple[int, int], ...]
    """As its fields say: number and cell."""


class Layout:
    """Of samples with these names and labels, in this order."""

    def __init__(
        self,
        samples: Sequence[ParsedSample],
        measured: str,
        node_labels: Sequence[str],
        address: str,
        beside: tuple[int, ...] = (),
        profiles: Mapping[tuple[str, str], str] | None = None,
    ) -> None:
        """`address` stands for the node where no label names it, `profiles` for those of MIG instances, by UUID and
        instance."""
        found = SortedSamples(samples, measured, beside)
        self.nodes = tuple(dict.fromkeys(filter(None, (first_label(of, node_labels) for of in found.hosts()))))
        """Every name of a node, in the samples' order."""
        self.is_podgpu = found.is_podgpu
        self._simulated = found.simulated
        self.lasts = found.lasts
        """False: which devices there are depends on the values, and the next ones need a layout of their own."""
        self._units = tuple(found.units)
        self._sources, self._lost = tuple(found.sources), tuple(found.lost)
        self._joined: list[_Joined] = []
        self._size = len(samples)
        self._may_be_broken = False
        node = self.nodes[0] if self.nodes else address
        self._devices = tuple(
            self._device(*at, of, first_label(of.labels, node_labels) or node, found.measured, beside, profiles or {})
            for at, of in found.devices.items()
        )

    def _device(
        self,
        uuid: str,
        instance: str,
        model: str,
        of: FoundDevice,
        node: str,
        measured: int,
        beside: tuple[int, ...],
        profiles: Mapping[tuple[str, str], str],
    ) -> _Device:
        index = of.labels.get("gpu", "")
        profile = of.labels.get("GPU_I_PROFILE", "") or profiles.get((uuid, instance), "")
        self._may_be_broken |= bool(of.conditions or of.told)
        cells = {number: self._cell(of, number) for number in (*FIELDS, measured, *beside) if number in of.fields}
        return _Device(
            uuid,
            int(index) if index.isdecimal() and len(index) <= _MOST_DIGITS else -1,
            intern(model),
            node,
            intern(instance),
            intern(profile),
            tuple((number, cells[number]) for number in FIELDS if number in cells),
            cells.get(measured, ABSENT),
            tuple((number, cells[number]) for number in beside if number in cells),
            of.energy,
            of.memory,
            tuple((holder, tuple(figures)) for holder, figures in of.holders.values()),
            frozenset(of.given),
            tuple(of.last_holders),
            tuple((name, *rest) for name, rest in of.conditions.items()),
            tuple(of.told),
        )

    def _cell(self, of: FoundDevice, number: int) -> int:
        """Virtual GPUs have a series per holder: of power podgpu gives each its part, all else is repeated."""
        by_holder = of.fields[number]
        parts = [by_holder[()]] if () in by_holder else list(by_holder.values())
        if len(parts) == len(parts[0]) == 1:
            return parts[0][0]
        add_up: Callable[[list[float]], float] = sum if self.is_podgpu and number == POWER else max
        self._joined.append(_Joined(tuple(map(tuple, parts)), add_up))
        return self._size + len(self._joined) - 1

    # Filled

    def view(self, values: Sequence[float], totals: Mapping[tuple[str, str], int] = NO_TOTALS) -> View:
        """`values`: one for each of the samples. `totals`: memory of devices, by UUID and instance, whose samples do
        not tell it."""
        cells = self._cells(values)
        down = [source[:_LONGEST_SOURCE] for source, at in self._sources if cells[at] == 0][:_MOST_SOURCES]
        lost = [value for value in (cells[at] for at in self._lost) if value and value < _MOST_LOST]
        return View(
            tuple(self._filled(cells, totals)),
            (f"the exporter cannot read: {few_of(down)}",) if down else (),
            simulated=self._simulated,
            trouble=Trouble(tuple(down), round(lost[-1]) if lost else 0),
        )

    def _cells(self, values: Sequence[float]) -> Cells:
        cells: Cells = [value if 0 <= value <= MOST else None for value in values]
        for at, _, unit in self._units:
            value = cells[at]
            if value is not None:
                cells[at] = unit.value(value)
        cells += [joined.value(cells) for joined in self._joined]
        cells.append(None)  # under ABSENT
        return cells

    def _filled(self, cells: Cells, totals: Mapping[tuple[str, str], int]) -> Iterator[DeviceFigures]:
        broken = self._conditions(cells) if self._may_be_broken else {}
        for of in self._devices:
            known = {number: value for number, at in of.fields if _is_value(value := cells[at])}
            used, total = memory_of(known, cells[of.memory])
            measured = cells[of.measured]
            wrong = broken.get(of.uuid, ())
            present = not wrong or is_there(wrong)
            yield DeviceFigures(
                of.uuid,
                of.gpu,
                of.model,
                of.node,
                of.instance,
                of.profile,
                utilization_of(known),
                used,
                totals.get((of.uuid, of.instance)) if total is None and totals else total,
                known.get(POWER),
                known.get(TEMPERATURE),
                cells[of.energy],
                measured if _is_value(measured) else None,
                tuple([(number, value) for number, at in of.beside if _is_value(value := cells[at])]),
                tuple([_holder(who, at, cells) for who, at in of.holders if present or who.who in of.given]),
                wrong,
                present,
                of.last_holders,
            )

    def _conditions(self, cells: Cells) -> dict[str, tuple[Condition, ...]]:
        """UUID -> what is wrong with the GPU, and so with its instances. podgpu says it in words, and since when."""
        found: dict[str, tuple[Condition, ...]] = {}
        for of in self._devices:
            told = () if self.is_podgpu else [condition_of_field(number, cells[at]) for number, at in of.told]
            known = {condition.name: condition for condition in reversed(told) if condition is not None}
            known |= {name: Condition.of(name, cells[at], detail) for name, detail, at in of.conditions}
            if known and not of.instance:
                found[of.uuid] = in_order({c.name: c for c in (*found.get(of.uuid, ()), *known.values())}.values())
        return found


def _is_value(value: float | None) -> TypeGuard[float]:
    return value is not None and value < DCGM_BLANK


def _holder(holder: Workload, at: tuple[int, ...], cells: Cells) -> HolderFigures:
    utilization, memory, processes, busy, idle, energy, share = [cells[cell] for cell in at]
    return HolderFigures(
        holder,
        utilization,
        None if memory is None else round(memory),
        None if processes is None else round(processes),
        busy,
        idle,
        energy,
        share,
    )
