"""This module tells as families what containers really use: device and workload labels as on the DCGM series, base
units."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from podgpu.metrics import families as f
from podgpu.metrics.dcgm import device_labels, holder_pairs, model_name
from podgpu.metrics.families import FamilySpec
from podgpu.metrics.policy import Policy
from podgpu.model import ContainerUsage, Device, DeviceTotals, NamespaceTotals, Snapshot, Usage
from podgpu.series import Family, Labels, Sample

T = TypeVar("T")
_NS = 1_000_000_000
_MJ = 1000
Figure = int | float | None


def _seconds(ns: int | None) -> float | None:
    return None if ns is None else ns / _NS


def _joules(mj: int | None) -> float | None:
    return None if mj is None else mj / _MJ


CONTAINER_FAMILIES: tuple[tuple[FamilySpec, Callable[[ContainerUsage], Figure]], ...] = (
    (f.CONTAINER_UTILIZATION, lambda u: u.utilization),
    (f.CONTAINER_MEMORY, lambda u: u.memory),
    (f.CONTAINER_PROCESSES, lambda u: u.processes),
    (f.CONTAINER_ALLOCATED, lambda u: _seconds(u.allocated_ns)),
    (f.CONTAINER_BUSY, lambda u: _seconds(u.busy_ns)),
    (f.CONTAINER_BUSY_MIN, lambda u: _seconds(u.busy_min_ns)),
    (f.CONTAINER_BUSY_MAX, lambda u: _seconds(u.busy_max_ns)),
    (f.CONTAINER_IDLE, lambda u: _seconds(u.idle_ns)),
    (f.CONTAINER_ENERGY, lambda u: _joules(u.energy_mj)),
)
DEVICE_FAMILIES: tuple[tuple[FamilySpec, Callable[[DeviceTotals], Figure]], ...] = (
    (f.DEVICE_BUSY, lambda t: _seconds(t.busy_ns)),
    (f.DEVICE_ENERGY, lambda t: _joules(t.energy_mj)),
    (f.DEVICE_MEMORY, lambda t: t.memory_used),
    (f.UNATTRIBUTED_BUSY, lambda t: _seconds(t.unattributed_busy_ns)),
    (f.UNATTRIBUTED_ENERGY, lambda t: _joules(t.unattributed_energy_mj)),
    (f.UNATTRIBUTED_MEMORY, lambda t: t.unattributed_memory),
)
NAMESPACE_FAMILIES: tuple[tuple[FamilySpec, Callable[[NamespaceTotals], Figure]], ...] = (
    (f.NAMESPACE_ALLOCATED, lambda t: _seconds(t.allocated_ns)),
    (f.NAMESPACE_BUSY, lambda t: _seconds(t.busy_ns)),
    (f.NAMESPACE_ENERGY, lambda t: _joules(t.energy_mj)),
)


def usage_families(snapshot: Snapshot, policy: Policy) -> list[Family]:
    usage = snapshot.usage
    if usage == Usage():
        return []
    known = {d.key: d for d in snapshot.devices}
    place = {key: n for n, key in enumerate(known)}
    containers = [
        (_container_labels(known[c.device], c, policy), c)
        for c in sorted((c for c in usage.containers if c.device in known), key=lambda c: place[c.device])
    ]
    devices = [
        (device_labels(known[t.device], (), (), (), policy), t)
        for t in sorted((t for t in usage.devices if t.device in known), key=lambda t: place[t.device])
    ]
    namespaces = [(_namespace_labels(t, policy), t) for t in usage.namespaces]
    return [
        *(spec.of(_samples(containers, figure)) for spec, figure in CONTAINER_FAMILIES),
        *(spec.of(_samples(devices, figure)) for spec, figure in DEVICE_FAMILIES),
        f.DEVICE_USAGE_METHOD.of(
            [Sample(labels.plus(("method", t.method)), 1) for labels, t in devices if t.method is not None]
        ),
        *(spec.of(_samples(namespaces, figure)) for spec, figure in NAMESPACE_FAMILIES),
    ]


def _container_labels(device: Device, usage: ContainerUsage, policy: Policy) -> Labels:
    return device_labels(device, (), (), tuple(holder_pairs(usage.holder, policy)), policy)


def _namespace_labels(totals: NamespaceTotals, policy: Policy) -> Labels:
    model = model_name(totals.model, policy.replace_blanks_in_model_name)
    return Labels([("namespace", totals.namespace), ("modelName", model)])


def _samples(rows: Iterable[tuple[Labels, T]], figure: Callable[[T], Figure]) -> list[Sample]:
    found = ((labels, figure(row)) for labels, row in rows)
    return [Sample(labels, value) for labels, value in found if value is not None]
