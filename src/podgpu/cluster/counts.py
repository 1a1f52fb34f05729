"""This module says how many devices there are, held, used, free and wasted: per node, per model, per namespace. Pure.

A GPU cut into MIG instances is not counted itself: its instances are, as devices of a model of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from podgpu.cluster.idle import IdleHolder
from podgpu.cluster.nodes import NodeView
from podgpu.cluster.settings import UsedMeans, ViewSettings
from podgpu.figures.device import DeviceFigures, HolderFigures, device_model
from podgpu.figures.parts import holder_parts

T = TypeVar("T")


@dataclass(slots=True)
class DeviceCount:
    devices: int = 0
    allocated: int = 0
    used: int | None = None
    """None: of no device is it known."""

    @property
    def free(self) -> int:
        return self.devices - self.allocated


@dataclass(slots=True)
class NamespaceCount:
    """In parts of a device, of which `WHOLE` are one (figures/parts.py)."""

    allocated: int = 0
    used: int | None = None
    """None: of no device is it known."""
    idle: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    nodes: dict[tuple[str, str], DeviceCount] = field(default_factory=dict)
    """(node, model)."""
    models: dict[str, DeviceCount] = field(default_factory=dict)
    namespaces: dict[tuple[str, str], NamespaceCount] = field(default_factory=dict)
    """(namespace, model)."""

    def add_to_namespaces(self, device: DeviceFigures, model: str, is_used: bool | None, means: UsedMeans) -> None:
        for of, part in holder_parts(device.holders):
            if of.holder.namespace:
                found = self.of_namespace(of.holder.namespace, model)
                found.allocated += part
                if is_used is not None:
                    found.used = (found.used or 0) + (part if is_used and _takes_part(of, means) else 0)

    def of_namespace(self, namespace: str, model: str) -> NamespaceCount:
        key = namespace, model
        found = self.namespaces.get(key)
        if found is None:
            found = self.namespaces[key] = NamespaceCount()
        return found


def count(
    nodes: Iterable[NodeView], contested: frozenset[str], wasted: Iterable[IdleHolder], settings: ViewSettings
) -> Counts:
    """Old nodes are not counted. A GPU that several nodes claim counts on each, and once for model and namespace."""
    counts, means = Counts(), settings.used_means
    counted_at: dict[tuple[str, str], str] = {}
    cut: set[tuple[str, str]] = set()
    for node in nodes:
        if node.old:
            continue
        cut.update([(node.name, device.uuid) for device in node.devices if device.instance])
        for device in node.devices:
            if cut and not device.instance and (node.name, device.uuid) in cut:
                continue
            model, is_held, is_used = device_model(device), bool(device.holders), is_in_use(device, means)
            found = [_of(counts.nodes, (node.name, model))]
            if device.uuid not in contested or counted_at.setdefault(device.key, node.name) == node.name:
                found.append(_of(counts.models, model))
                counts.add_to_namespaces(device, model, is_used, means)
            for tally in found:
                tally.devices += 1
                tally.allocated += is_held
                if is_used is not None:
                    tally.used = (tally.used or 0) + is_used
    for node, device, of, _ in wasted:
        is_cut = not device.instance and (node.name, device.uuid) in cut
        if of.holder.namespace and not is_cut and counted_at.get(device.key, node.name) == node.name:
            part = next(part for one_of, part in holder_parts(device.holders) if one_of is of)
            counts.of_namespace(of.holder.namespace, device_model(device)).idle += part
    return counts


def _of(counts: dict[T, DeviceCount], key: T) -> DeviceCount:
    found = counts.get(key)
    if found is None:
        found = counts[key] = DeviceCount()
    return found


def is_in_use(device: DeviceFigures, means: UsedMeans) -> bool | None:
    """As in `used.py`; a device without the field (a MIG instance, mostly) by its utilisation. What nobody holds has no
    holder's process. None: nobody can tell."""
    if means == "allocated":
        return bool(device.holders)
    if means == "processes":
        told = [h.processes for h in device.holders if h.processes is not None]
        return any(told) if told or not device.holders else None
    if device.measured is not None:
        return device.measured > 0
    ratios = (device.utilization, *(h.utilization for h in device.holders))
    known = [ratio for ratio in ratios if ratio is not None]
    return any(known) if known else None


def _takes_part(of: HolderFigures, means: UsedMeans) -> bool:
    """Whether a holder of a device in use is among those who use it. It is where nobody knows."""
    if means == "allocated":
        return True
    return bool(of.processes) if means == "processes" else of.utilization != 0
