"""Renders a `NodeState` as metric families."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache

from podgpu.metrics.dcgm import render_dcgm
from podgpu.metrics.encode import Family, Labels, Sample, families_in, make_families
from podgpu.metrics.labels import (
    Policy,
    assigned_holders,
    dcgm_labels,
    device_names,
    holder_names,
    holder_pairs,
    make_labels,
    visible_slots,
)
from podgpu.metrics.mig import billed_name
from podgpu.model import NS, DeviceState, Document, NodeState

MAX_WAIT_PAIRS = 20  # per device
Row = tuple[str, Mapping[str, str], int | float]
"""Family, labels, value. The sample has those labels that families.csv lists for the family."""


def render_node(state: NodeState, policy: Policy) -> list[Family]:
    """Renders all families of `/metrics` except gpu-manager's and process_*."""
    return [*render_dcgm(state, policy), *render_podgpu(state, policy), *render_self(state)]


def render_podgpu(state: NodeState, policy: Policy) -> list[Family]:
    """Renders podgpu's families about devices, holders and namespaces."""
    rows = (*_waits(state, policy), *_health(state, policy), *_devices(state, policy))
    return [*_usage(state, policy), *_collect(rows, policy)]


def render_self(state: NodeState) -> list[Family]:
    """Renders podgpu's families about the exporter itself. They are served even if the GPU readings are stale."""
    return _collect(_self(state), Policy())


def _collect(rows: Iterable[Row], policy: Policy) -> list[Family]:
    samples: dict[str, list[Sample]] = {}
    for family, labels, value in rows:
        names = _label_names(family, policy.hostname_labels)
        selected = _select_labels(names, tuple(map(labels.get, names)))
        samples.setdefault(family, []).append(Sample(selected, value))
    return make_families("exporter", samples)


@cache
def _label_names(family: str, hostname_labels: tuple[str, ...]) -> tuple[str, ...]:
    names = families_in("exporter")[family].labels
    return tuple(new for name in names for new in (hostname_labels if name == "Hostname" else (name,)))


@lru_cache(maxsize=2048)
def _select_labels(names: tuple[str, ...], values: tuple[str | None, ...]) -> Labels:
    return Labels((name, value) for name, value in zip(names, values, strict=True) if value is not None)


def _self(state: NodeState) -> Iterator[Row]:
    versions = {"version": state.version, "python_version": "{}.{}.{}".format(*sys.version_info)}
    yield "podgpu_exporter_build_info", versions, 1
    for source in state.sources:
        labels = {"source": source.name}
        if source.up is not None:
            yield "podgpu_exporter_source_up", labels, int(source.up)
            if source.seconds is not None:
                yield "podgpu_exporter_collect_duration_seconds", labels, source.seconds
        for reason, count in sorted(source.errors.items()):
            yield "podgpu_exporter_source_errors_total", {**labels, "reason": reason}, count
        for reason, count in sorted(source.unmapped.items()):
            yield "podgpu_exporter_unmapped_assignments", {**labels, "reason": reason}, count
    if state.taken_at is not None:
        yield "podgpu_exporter_snapshot_timestamp_seconds", {}, state.taken_at
    for gpu, slot in visible_slots(state):
        if slot.unsupported:
            names = device_names(gpu, slot, Policy())
            for field in slot.unsupported:
                yield "podgpu_exporter_unsupported_field", {**names, "field": field}, 1
    for field, count in sorted(state.dropped.items()):
        yield "podgpu_exporter_dropped_values_total", {"field": field}, count


# Usage, in base units. Labels of devices and holders are the same as on dcgm-exporter's series.


def _usage(state: NodeState, policy: Policy) -> list[Family]:
    holders: list[tuple[Labels, Document]] = []
    devices: list[tuple[Labels, Document]] = []
    for gpu, slot in visible_slots(state):
        names = device_names(gpu, slot, policy)
        for holder in slot.holders:
            if holder.usage is not None and holder.has_labels:
                holders.append((dcgm_labels(names, policy, holder_pairs(holder, policy)), holder.usage))
        if slot.usage is not None:
            devices.append((dcgm_labels(names, policy), slot.usage))
    namespaces: list[tuple[Labels, Document]] = []
    for usage in state.namespaces:
        model = billed_name(usage.model, usage.profile) if usage.profile else usage.model
        labels = make_labels((("namespace", usage.namespace), ("modelName", policy.model_name(model))))
        namespaces.append((labels, usage))
    return [
        *_figures("holder_usage", holders),
        *_figures("slot_usage", devices),
        *_figures("namespaces", namespaces),
    ]


def _waits(state: NodeState, policy: Policy) -> Iterator[Row]:
    """Renders the pairs of pods of which one waits for the other at least `policy.wait_pairs` percent of the time."""
    for gpu, slot in visible_slots(state) if policy.wait_pairs else ():
        names = device_names(gpu, slot, policy)
        waiters = [(holder, holder.usage) for holder in slot.holders if holder.usage is not None and holder.pod]
        pairs = [(part, holder) for holder, usage in waiters for part in usage.waits_for if part.pod]
        pairs.sort(key=lambda pair: -pair[0].ratio)
        for part, holder in pairs[:MAX_WAIT_PAIRS]:
            if 100 * part.ratio >= policy.wait_pairs:
                runner = {f"runner_{name}": text for name, text in holder_names(part).items()}
                yield "podgpu_container_gpu_waits_for_ratio", {**names, **holder_names(holder), **runner}, part.ratio


def _figures(part: str, rows: Iterable[tuple[Labels, Document]]) -> Iterator[Family]:
    """Renders the families whose samples are members of this part of the document."""
    for spec in families_in("exporter").values():
        if spec.part == part:
            members = [(labels, getattr(row, spec.member)) for labels, row in rows]
            if spec.is_text:
                texts = (make_labels((*labels.pairs, (spec.member, text))) for labels, text in members if text)
                yield spec.of(Sample(labels, 1) for labels in texts)
            else:
                divisor = spec.factor if spec.factor > 1 else None
                yield spec.of(Sample(labels, n / divisor if divisor else n) for labels, n in members if n is not None)


# Health, devices and allocations


def _health(state: NodeState, policy: Policy) -> Iterator[Row]:
    for gpu in state.devices:
        names = device_names(gpu, gpu, policy)
        for condition in gpu.conditions:
            labels = {**names, "condition": condition.name}
            yield "podgpu_device_health", labels, 1
            if condition.detail:
                labels["detail"] = condition.detail
            if condition.since is not None:
                yield "podgpu_device_condition_since_timestamp_seconds", labels, round(condition.since, 3)
        for condition_name in gpu.healthy:
            yield "podgpu_device_health", {**names, "condition": condition_name}, 0
        for holder in gpu.last_holders:
            yield "podgpu_device_last_holder_info", {**names, **holder_names(holder)}, 1


def _devices(state: NodeState, policy: Policy) -> Iterator[Row]:
    counts = {"expected": state.gpus_expected, "visible": state.gpus_visible, "lost": state.gpus_lost}
    for status, count in counts.items():
        if count is not None:
            yield "podgpu_device_count", {"state": status, **dict(policy.host)}, count
    for gpu, slot in visible_slots(state):
        names = device_names(gpu, slot, policy)
        if slot is gpu:
            yield "podgpu_device_xid_errors_total", names, _count_xids(gpu)
            for reason, ns in gpu.throttled_ns.items():
                yield "podgpu_device_throttled_seconds_total", {**names, "reason": reason}, ns / NS
        for xid in slot.xids:
            labels = {**names, "xid": str(xid.xid)}
            yield "podgpu_xid_errors_total", labels, xid.total
            yield "podgpu_xid_last_seen_timestamp_seconds", labels, xid.last_seen
        for holder in assigned_holders(slot):
            labels = {**names, **holder_names(holder), "source": holder.source}
            yield "podgpu_allocation_info", labels, 1
            if holder.share_ratio is not None:
                yield "podgpu_allocation_share_ratio", labels, holder.share_ratio


def _count_xids(gpu: DeviceState) -> int:
    """Returns the number of XIDs. It is 0 before the first event, so that increase() includes that event."""
    return sum(xid.total for slot in (gpu, *gpu.instances) for xid in slot.xids)
