"""This module keeps the books: what one workload used of one device, what the device did in all, what a namespace used
of one model.

A counter that was never known has no figure; one that was known once keeps it, whatever a later turn cannot tell.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from podgpu.model import ContainerUsage, DeviceTotals, NamespaceTotals, UsageMethod, Workload
from podgpu.usage.charges import UNKNOWN, Charge


def plus(counter: int | None, more: int | None) -> int | None:
    return counter if more is None else (counter or 0) + more


@dataclass(frozen=True, slots=True)
class Entry:
    """What one turn adds to an account. None: this turn does not tell."""

    allocated_ns: int | None = None
    busy_ns: int | None = None
    idle_ns: int | None = None
    energy_mj: int | None = None
    busy_bounds_ns: tuple[int, int] | None = None


@dataclass(slots=True)
class Account:
    """One workload on one device, from when it came until it neither holds nor uses it."""

    workload: Workload
    using: bool = False
    """Had a process there when processes were last seen."""
    holding: bool = False
    """Held the device in the last turn."""
    utilization: float | None = None
    memory: int | None = None
    processes: int | None = None
    allocated_ns: int | None = None
    busy_ns: int | None = None
    idle_ns: int | None = None
    energy_mj: int | None = None
    idle_run_ns: int | None = None
    """The idle time since it last ran anything."""
    busy_min_ns: int | None = None
    busy_max_ns: int | None = None
    _owed: int = 0
    """What is allocated beyond the last whole nanosecond, in units of one nanosecond / `_unit`."""
    _unit: int = 1

    @property
    def has_left(self) -> bool:
        """For who held the device until now and does so no more: whether it is known to be gone for good, or under the
        same uid if it comes back."""
        return self.holding and bool(self.workload.uid)

    def allocate(self, share: Fraction, elapsed_ns: int) -> int:
        """Whole nanoseconds due by now. What is less is carried on, so that long sums are exact."""
        carried = self._owed * share.denominator // self._unit
        self._unit = share.denominator
        due, self._owed = divmod(carried + share.numerator * elapsed_ns, self._unit)
        return due

    def add(self, entry: Entry) -> None:
        self.allocated_ns = plus(self.allocated_ns, entry.allocated_ns)
        self.busy_ns = plus(self.busy_ns, entry.busy_ns)
        self.idle_ns = plus(self.idle_ns, entry.idle_ns)
        self.energy_mj = plus(self.energy_mj, entry.energy_mj)
        if entry.busy_bounds_ns is not None:
            self.busy_min_ns = plus(self.busy_min_ns, entry.busy_bounds_ns[0])
            self.busy_max_ns = plus(self.busy_max_ns, entry.busy_bounds_ns[1])
        may_have_run = entry.busy_ns is not None and (entry.busy_ns > 0 or entry.idle_ns is None)
        self.idle_run_ns = 0 if may_have_run else plus(self.idle_run_ns, entry.idle_ns)

    def statement(self, device: str) -> ContainerUsage:
        return ContainerUsage(
            device,
            self.workload,
            self.utilization,
            self.memory,
            self.processes,
            self.allocated_ns,
            self.busy_ns,
            self.idle_ns,
            self.energy_mj,
            idle_run_ns=self.idle_run_ns,
            busy_min_ns=self.busy_min_ns,
            busy_max_ns=self.busy_max_ns,
        )


@dataclass(slots=True)
class DeviceBook:
    """One device since it was first seen. `rest` is what nobody could be charged for."""

    model: str
    seen_into: bool = False
    """Whether its processes were ever seen. Before, everything is in the rest and it says nothing about anybody."""
    busy_ns: int | None = None
    busy_rest_ns: int | None = None
    energy_mj: int | None = None
    energy_rest_mj: int | None = None
    memory: Charge = UNKNOWN
    method: UsageMethod | None = None

    def add(self, busy: Charge, energy: Charge) -> None:
        self.busy_ns = plus(self.busy_ns, busy.whole)
        self.busy_rest_ns = plus(self.busy_rest_ns, busy.rest)
        self.energy_mj = plus(self.energy_mj, energy.whole)
        self.energy_rest_mj = plus(self.energy_rest_mj, energy.rest)

    def statement(self, device: str) -> DeviceTotals:
        return DeviceTotals(
            device,
            self.busy_ns,
            self.energy_mj,
            self.memory.whole,
            self.busy_rest_ns if self.seen_into else None,
            self.energy_rest_mj if self.seen_into else None,
            None if self.memory.parts is None else self.memory.rest,
            self.method,
        )


@dataclass(slots=True)
class NamespaceBook:
    """All workloads of one namespace on all devices of one model, those that ended included."""

    allocated_ns: int = 0
    busy_ns: int | None = None
    energy_mj: int | None = None

    def add(self, entry: Entry) -> None:
        self.allocated_ns += entry.allocated_ns or 0
        self.busy_ns = plus(self.busy_ns, entry.busy_ns)
        self.energy_mj = plus(self.energy_mj, entry.energy_mj)

    def statement(self, namespace: str, model: str) -> NamespaceTotals:
        return NamespaceTotals(namespace, model, self.allocated_ns, self.busy_ns, self.energy_mj)
