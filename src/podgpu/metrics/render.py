"""Renders a `NodeState` as metric families."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import lru_cache

from podgpu.metrics.dcgm import render_dcgm
from podgpu.metrics.encode import NO_LABELS, Family, Labels, Sample
from podgpu.metrics.families import families_in, make_families
from podgpu.metrics.labels import (
    DeviceNames,
    Pairs,
    Policy,
    assigned_holders,
    device_labels,
    holder_names,
    holder_pairs,
    model_name,
    names_of_device,
    visible_slots,
)
from podgpu.metrics.mig import billed_name
from podgpu.model import DeviceState, Document, NamespaceUsage, NodeState, Workload

__all__ = ["Policy", "render_dcgm", "render_node", "render_podgpu", "render_self"]

_NS = 1_000_000_000


def render_node(state: NodeState, policy: Policy) -> list[Family]:
    """Renders all families of `/metrics` except gpu-manager's and process_*."""
    return [*render_dcgm(state, policy), *render_podgpu(state, policy), *render_self(state)]


def render_podgpu(state: NodeState, policy: Policy) -> list[Family]:
    """Renders podgpu's families about devices, holders and namespaces."""
    return [*_usage(state, policy), *_health(state, policy), *_devices(state, policy)]


def render_self(state: NodeState) -> list[Family]:
    """Renders podgpu's families about the exporter itself. They are served even if the GPU readings are stale."""
    last = [source for source in state.sources if source.up is not None]
    errors = sorted((s.name, reason, count) for s in state.sources for reason, count in s.errors.items())
    unmapped = sorted((s.name, reason, count) for s in state.sources for reason, count in s.unmapped.items())
    unsupported = [(names, field) for names, _, slot in visible_slots(state) for field in slot.unsupported]
    taken_at = [] if state.taken_at is None else [Sample(NO_LABELS, state.taken_at)]
    durations = [Sample(_labels(("source", s.name)), s.seconds) for s in last if s.seconds is not None]
    dropped = [Sample(_labels(("field", name)), count) for name, count in sorted(state.dropped.items())]
    samples = {
        "podgpu_exporter_build_info": [Sample(_build_labels(state.version), 1)],
        "podgpu_exporter_source_up": [Sample(_labels(("source", s.name)), int(bool(s.up))) for s in last],
        "podgpu_exporter_source_errors_total": [Sample(_reason_labels(name, reason), n) for name, reason, n in errors],
        "podgpu_exporter_collect_duration_seconds": durations,
        "podgpu_exporter_snapshot_timestamp_seconds": taken_at,
        "podgpu_exporter_unmapped_assignments": [Sample(_reason_labels(name, why), n) for name, why, n in unmapped],
        "podgpu_exporter_unsupported_field": [Sample(_unsupported_labels(*field), 1) for field in unsupported],
        "podgpu_exporter_dropped_values_total": dropped,
    }
    return make_families("exporter", samples)


@lru_cache(maxsize=1024)
def _labels(*pairs: tuple[str, str]) -> Labels:
    return Labels(pairs)


def _reason_labels(source: str, reason: str) -> Labels:
    return _labels(("source", source), ("reason", reason))


@lru_cache(maxsize=1)
def _build_labels(version: str) -> Labels:
    return Labels([("version", version), ("python_version", "{}.{}.{}".format(*sys.version_info))])


@lru_cache(maxsize=4096)
def _unsupported_labels(names: DeviceNames, field: str) -> Labels:
    return Labels([("gpu", names.gpu), ("UUID", names.uuid), *names.instance_id, ("field", field)])


# Usage, in base units. Labels of devices and holders are the same as on dcgm-exporter's series.


def _figures(part: str, rows: Sequence[tuple[Labels, Document]]) -> list[Family]:
    """Renders the families whose samples are members of this part of the document."""
    families = []
    for spec in families_in("exporter").values():
        if spec.part == part:
            numbers = ((labels, getattr(row, spec.member)) for labels, row in rows)
            divisor = spec.factor if spec.factor > 1 else None
            samples = [Sample(labels, n / divisor if divisor else n) for labels, n in numbers if n is not None]
            families.append(spec.of(samples))
    return families


def _usage(state: NodeState, policy: Policy) -> list[Family]:
    slots = visible_slots(state)
    holders = [
        (device_labels(names, (), (), tuple(holder_pairs(holder, policy)), policy), holder.usage)
        for names, _, slot in slots
        for holder in slot.holders
        if holder.usage is not None
    ]
    devices = [
        (device_labels(names, (), (), (), policy), slot.usage) for names, _, slot in slots if slot.usage is not None
    ]
    namespaces = [(_namespace_labels(usage, policy), usage) for usage in state.namespaces]
    methods = [Sample(labels.plus(("method", usage.method)), 1) for labels, usage in devices if usage.method]
    return [
        *_figures("holder_usage", holders),
        *_figures("slot_usage", devices),
        *make_families("exporter", {"podgpu_device_usage_method": methods}),
        *_figures("namespaces", namespaces),
    ]


def _namespace_labels(usage: NamespaceUsage, policy: Policy) -> Labels:
    model = billed_name(usage.model, usage.profile) if usage.profile else usage.model
    return _labels(("namespace", usage.namespace), ("modelName", _model_name(model, policy)))


# Health


def _health(state: NodeState, policy: Policy) -> list[Family]:
    health: list[Sample] = []
    since: list[Sample] = []
    last: list[Sample] = []
    for gpu in state.devices:
        names = names_of_device(gpu)
        for condition in gpu.conditions:
            name = ("condition", condition.name)
            health.append(Sample(_health_labels(names, policy, name), 1))
            detail = (("detail", condition.detail),) if condition.detail else ()
            if condition.since is not None:
                since.append(Sample(_health_labels(names, policy, name, *detail), round(condition.since, 3)))
        health += (Sample(_health_labels(names, policy, ("condition", name)), 0) for name in gpu.healthy)
        last += (Sample(_last_holder_labels(names, policy, holder), 1) for holder in gpu.last_holders)
    samples = {
        "podgpu_device_health": health,
        "podgpu_device_condition_since_timestamp_seconds": since,
        "podgpu_device_last_holder_info": last,
    }
    return make_families("exporter", samples)


@lru_cache(maxsize=1024)
def _health_labels(names: DeviceNames, policy: Policy, *more: tuple[str, str]) -> Labels:
    return Labels([*names.gpu_labels, ("modelName", _model_name(names.model, policy)), *policy.host, *more])


def _last_holder_labels(names: DeviceNames, policy: Policy, holder: Workload) -> Labels:
    return Labels([*names.short_labels, ("modelName", _model_name(names.model, policy)), *holder_names(holder)])


def _model_name(model: str, policy: Policy) -> str:
    return model_name(model, policy.replace_blanks_in_model_name)


# Devices and holders


def _devices(state: NodeState, policy: Policy) -> list[Family]:
    counts = (("expected", state.gpus_expected), ("visible", state.gpus_visible), ("lost", state.gpus_lost))
    slots = visible_slots(state)
    gpus = [(names, gpu) for names, gpu, slot in slots if slot is gpu]
    xids = [(_device_labels(names, policy, ("xid", str(x.xid))), x) for names, _, slot in slots for x in slot.xids]
    holders = [
        (_allocation_labels(names, tuple(holder_names(holder)), holder.source), holder)
        for names, _, slot in slots
        for holder in assigned_holders(slot)
    ]
    throttled = [(names, reason, ns) for names, gpu in gpus for reason, ns in gpu.throttled_ns.items()]
    samples = {
        "podgpu_device_count": [Sample(_labels(("state", s), *policy.host), n) for s, n in counts if n is not None],
        "podgpu_device_throttled_seconds_total": [
            Sample(_device_labels(names, policy, ("reason", reason)), ns / _NS) for names, reason, ns in throttled
        ],
        "podgpu_device_xid_errors_total": [
            Sample(_device_labels(names, policy), _count_xids(gpu)) for names, gpu in gpus
        ],
        "podgpu_xid_errors_total": [Sample(labels, xid.total) for labels, xid in xids],
        "podgpu_xid_last_seen_timestamp_seconds": [Sample(labels, xid.last_seen) for labels, xid in xids],
        "podgpu_allocation_info": [Sample(labels, 1) for labels, _ in holders],
    }
    return [*make_families("exporter", samples), *_figures("holder", holders)]


def _count_xids(gpu: DeviceState) -> int:
    """Returns the number of XIDs. It is 0 before the first event, so that increase() includes that event."""
    return sum(xid.total for slot in (gpu, *gpu.instances) for xid in slot.xids)


@lru_cache(maxsize=1024)
def _device_labels(names: DeviceNames, policy: Policy, *more: tuple[str, str]) -> Labels:
    """Omits the model name and label-type fields, because a driver upgrade must not start a new series."""
    return Labels([*names.gpu_labels, *names.instance_labels, *policy.host, *more])


@lru_cache(maxsize=4096)
def _allocation_labels(names: DeviceNames, holder: Pairs, source: str) -> Labels:
    return Labels([*names.short_labels, *names.instance_id, *holder, ("source", source)])
