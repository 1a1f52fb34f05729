"""This module computes the used-GPU utilisation: the mean of one field over the devices in use, for the cluster and for
each part of it. Pure.

A scope with data and nothing in use has the mean 0; one without data is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from podgpu.cluster.nodes import NodeView
from podgpu.cluster.reading import Scope
from podgpu.cluster.settings import ViewSettings
from podgpu.figures.device import DeviceFigures, HolderFigures, Owner, device_model

CLUSTER = Scope("cluster")
_OVER_FULL = 1.01
"""A counter read a moment too late tells a little more than everything. What is beyond that is no value."""
Owners = Mapping[tuple[str, str], Owner]
Holders = Sequence[HolderFigures]
T = TypeVar("T")


class Used(NamedTuple):
    """`mean` in the field's own unit."""

    devices: int
    mean: float


class _Tally:
    """One scope, as far as it was counted."""

    __slots__ = ("devices", "total")

    def __init__(self) -> None:
        self.devices = 0
        self.total = 0.0

    def used(self) -> Used:
        return Used(self.devices, self.total / self.devices if self.devices else 0.0)


class _Tallies:
    """Of the whole cluster, by what is not yet a scope: this is looked up for each device, and strings cost least."""

    def __init__(self, owners: Owners) -> None:
        self._owners = owners
        self._cluster = _Tally()
        self._models: dict[str, _Tally] = {}
        self._namespaces: dict[str, _Tally] = {}
        self._by_owner: dict[tuple[str, Owner], _Tally] = {}
        self._nodes: dict[str, _Tally] = {}
        self._had: set[tuple[_Tally, tuple[str, str]]] = set()

    def of_node(self, name: str) -> _Tally:
        return self._nodes.get(name) or _new(self._nodes, name)

    def across(self, device: DeviceFigures, holders: Holders) -> list[_Tally]:
        """Those of more than a node that the device counts in, each once. Asking is enough to have it there."""
        model = device_model(device)
        found = [self._cluster, self._models.get(model) or _new(self._models, model)]
        for of in holders:
            namespace = of.holder.namespace
            if namespace:
                found.append(self._namespaces.get(namespace) or _new(self._namespaces, namespace))
                owner = self._owners.get((namespace, of.holder.pod))
                if owner is not None:
                    key = namespace, owner
                    found.append(self._by_owner.get(key) or _new(self._by_owner, key))
        return found if len(holders) < 2 else list(dict.fromkeys(found))

    def not_had(self, device: DeviceFigures, tallies: Sequence[_Tally]) -> list[_Tally]:
        """Those in which a device that several nodes claim does not count yet. It does now."""
        found = [tally for tally in tallies if (tally, device.key) not in self._had]
        self._had.update((tally, device.key) for tally in found)
        return found

    def by_scope(self) -> dict[Scope, Used]:
        if not self._nodes:
            return {}
        found = {CLUSTER: self._cluster}
        found |= {Scope("node", node=name): tally for name, tally in self._nodes.items()}
        found |= {Scope("model", model=name): tally for name, tally in self._models.items()}
        found |= {Scope("namespace", name): tally for name, tally in self._namespaces.items()}
        found |= {Scope("owner", name, "", "", *owner): tally for (name, owner), tally in self._by_owner.items()}
        return {scope: tally.used() for scope, tally in found.items()}


def _new(tallies: dict[T, _Tally], key: T) -> _Tally:
    tallies[key] = tally = _Tally()
    return tally


def used_by_scope(
    nodes: Iterable[NodeView], contested: frozenset[str], owners: Owners, settings: ViewSettings
) -> dict[Scope, Used]:
    """Old nodes count for nothing."""
    full, in_use = settings.full, IN_USE[settings.used_means]
    most = full * _OVER_FULL
    tallies = _Tallies(owners)
    for node in nodes:
        if node.old:
            continue
        inside = _held_inside(node.devices)
        cut = {device.uuid for device in node.devices if device.instance and device.measured is not None}
        for device in node.devices:
            value = device.measured
            if value is None or not 0 <= value <= most:
                continue
            if device.uuid in cut and not device.instance:
                continue  # its instances are counted
            holders: Holders = device.holders
            if inside and not device.instance:
                holders = (*holders, *inside.get(device.uuid, ()))
            is_used = in_use(value, holders)
            if is_used is None:
                continue
            found = tallies.across(device, holders)
            if device.uuid in contested:
                found = tallies.not_had(device, found)
            found.append(tallies.of_node(node.name))
            if is_used:
                for tally in found:
                    tally.devices += 1
                    tally.total += value if value <= full else full
    return tallies.by_scope()


def _held_inside(devices: Iterable[DeviceFigures]) -> dict[str, list[HolderFigures]]:
    """A GPU in MIG mode is held by whoever holds one of its instances."""
    inside: dict[str, list[HolderFigures]] = {}
    for device in devices:
        if device.instance:
            inside.setdefault(device.uuid, []).extend(device.holders)
    return inside


# In use? None: nobody can tell.


def _is_busy(value: float, holders: Holders) -> bool | None:
    return value > 0


def _is_allocated(value: float, holders: Holders) -> bool | None:
    return bool(holders)


def _has_processes(value: float, holders: Holders) -> bool | None:
    told = [h.processes for h in holders if h.processes is not None]
    return any(told) if told else None


IN_USE: Mapping[str, Callable[[float, Holders], bool | None]] = {
    "busy": _is_busy,
    "allocated": _is_allocated,
    "processes": _has_processes,
}
