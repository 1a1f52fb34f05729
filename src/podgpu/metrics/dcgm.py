"""This module makes dcgm-exporter's families of a snapshot: its names, its labels in its order.

A device has many holders. Pod labels go on a series when exactly one workload holds the device; with several the
device's figure belongs to none of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from podgpu.metrics.counters import Counter
from podgpu.metrics.families import (
    CLOCK_EVENTS,
    HOLDER_LABELS,
    JOB_LABEL,
    NAMELESS_LABELS,
    OLD_POD_LABELS,
    POD_LABELS,
)
from podgpu.metrics.fields import XID_FIELD, xid_text
from podgpu.metrics.policy import Policy
from podgpu.model import (
    Assignment,
    ContainerUsage,
    Detail,
    Device,
    OtherReading,
    PodLabels,
    Snapshot,
    Value,
    Workload,
    XidTally,
)
from podgpu.series import Family, Labels, Sample

GPU_UTIL, FB_USED, POWER_USAGE, TOTAL_ENERGY = 203, 252, 155, 156
GPU_UTIL_RATIO, FB_USED_BYTES, ENERGY_JOULES = 1613, 1627, 1611
ATTRIBUTED = frozenset({GPU_UTIL, FB_USED, POWER_USAGE, TOTAL_ENERGY, GPU_UTIL_RATIO, FB_USED_BYTES, ENERGY_JOULES})
KEPT_FOR_DEVICE = frozenset({GPU_UTIL, FB_USED, GPU_UTIL_RATIO, FB_USED_BYTES})
"""The device's own series stays beside the holders' for these two, as in dcgm-exporter, under either name."""
_MIB = 1024 * 1024
_MJ = 1000
Pairs = tuple[tuple[str, str], ...]
XID_COUNT_FIELD, XID_TOTAL_FIELD = 9001, 9005
CLOCK_EVENTS_COUNT_FIELD, CLOCK_EVENTS_TOTAL_FIELD = 9002, 9006
_DETAILED = frozenset({9003, 9004})
"""Health and NVLink reach: the device's own, whoever holds it."""


def dcgm_families(snapshot: Snapshot, policy: Policy) -> Iterator[Family]:
    """The families of the counter file, ordered by field id as dcgm-exporter orders them."""
    labelled = _label_readings(snapshot, policy)
    for counter in sorted(policy.counters, key=lambda c: c.field.id):
        if not counter.is_label:
            samples = tuple(_samples(counter, labelled, snapshot, policy))
            yield Family(counter.name, counter.type, counter.help, samples, dcgm_numbers=True)


@dataclass(frozen=True, slots=True)
class _Labelled:
    """One device's values under one set of labels."""

    device: Device
    values: Mapping[int, Value]
    labels: Labels
    parent_values: Mapping[int, Value]
    only: frozenset[int] | None = None
    """The fields this is for; None: all."""
    details: tuple[Detail, ...] = ()

    def has(self, field_id: int) -> bool:
        return self.only is None or field_id in self.only


def _label_readings(snapshot: Snapshot, policy: Policy) -> list[_Labelled]:
    label_counters = [c for c in policy.counters if c.is_label]
    parents = {r.device.uuid: r.values for r in snapshot.readings if not r.device.is_instance}
    sole = sole_holders(snapshot.assignments)
    held = _by_device(snapshot.assignments) if policy.virtual_gpus else {}
    used = {(u.device, u.holder.who): u for u in snapshot.usage.containers} if held else {}
    labelled: list[_Labelled] = []
    for reading in snapshot.readings:
        parent = parents.get(reading.device.uuid, {})
        plain = partial(device_labels, reading.device, _label_values(label_counters, reading.values, parent))
        holders = held.get(reading.device.key)
        if holders:
            alone = plain((), (), policy)
            device = _Labelled(
                reading.device, reading.values, alone, parent, KEPT_FOR_DEVICE | _DETAILED, reading.details
            )
            labelled.append(device)
            for assignment in holders:
                usage = used.get((assignment.device, assignment.holder.who))
                own = own_values(reading.values, usage)
                labels = plain(*_virtual_labels(assignment, snapshot.pod_labels, policy), policy)
                labelled.append(_Labelled(reading.device, own, labels, parent))
        else:
            labels = plain(*_holder_labels(sole.get(reading.device.key), snapshot.pod_labels, policy), policy)
            labelled.append(_Labelled(reading.device, reading.values, labels, parent, None, reading.details))
    return labelled


def _by_device(assignments: Iterable[Assignment]) -> dict[str, list[Assignment]]:
    held: dict[str, list[Assignment]] = {}
    for assignment in assignments:
        held.setdefault(assignment.device, []).append(assignment)
    return held


def _virtual_labels(assignment: Assignment, pod_labels: PodLabels, policy: Policy) -> tuple[Pairs, Pairs]:
    own, attributes = _holder_labels(assignment, pod_labels, policy)
    return own, (*attributes, ("vgpu", assignment.replica)) if assignment.replica else attributes


def sole_holders(assignments: Iterable[Assignment]) -> dict[str, Assignment]:
    """Device key -> the assignment of the one workload that holds it; devices with several holders are not here."""
    held: dict[str, Assignment | None] = {}
    for assignment in assignments:
        known = held.setdefault(assignment.device, assignment)
        if known is None or known.holder.who != assignment.holder.who:
            held[assignment.device] = None
    return {device: assignment for device, assignment in held.items() if assignment is not None}


def _label_values(
    counters: Iterable[Counter], values: Mapping[int, Value], parent: Mapping[int, Value]
) -> tuple[tuple[str, str], ...]:
    """Label-type fields as pairs; an instance carries its GPU's where it has none of its own."""
    found = ((c.name, values.get(c.field.id, parent.get(c.field.id))) for c in counters)
    return tuple((name, str(value)) for name, value in found if value is not None)


def _holder_labels(assignment: Assignment | None, pod_labels: PodLabels, policy: Policy) -> tuple[Pairs, Pairs]:
    """The pod's own labels, and the attributes that say who holds the device."""
    if assignment is None:
        return (), ()
    holder = assignment.holder
    own = pod_labels.get((holder.namespace, holder.pod), ())
    return own, (*holder_pairs(holder, policy), *assignment.attributes)


@lru_cache(maxsize=4096)
def device_labels(device: Device, label_values: Pairs, pod_labels: Pairs, attributes: Pairs, policy: Policy) -> Labels:
    """dcgm-exporter's labels in dcgm-exporter's order. A pod's label that would be another's has a name of its own."""
    pairs = [
        ("gpu", device.number),
        ("uuid" if policy.old_namespace else "UUID", device.uuid),
        ("pci_bus_id", device.pci_bus_id),
        ("device", device.name),
        ("modelName", model_name(device.model, policy.replace_blanks_in_model_name)),
    ]
    if device.gi_id is not None:
        pairs += [("GPU_I_PROFILE", device.profile), ("GPU_I_ID", str(device.gi_id))]
    pairs += policy.host
    taken = _RESERVED.union(name for name, _ in (*pairs, *label_values, *attributes))
    pairs += sorted((*label_values, *_beside(taken, pod_labels)))
    pairs += sorted(attributes)
    return Labels(pairs)


def _beside(taken: frozenset[str], pod_labels: Pairs) -> Iterator[tuple[str, str]]:
    """A pod's labels beside all others: one whose name is taken is `pod_label_<name>`, as since dcgm-exporter 4.8.3."""
    free = dict(pair for pair in pod_labels if pair[0] not in taken)
    yield from free.items()
    for name, value in pod_labels:
        if name in taken:
            names = (f"pod_label_{name}", *(f"pod_label_{name}_conflict{n}" for n in range(1, len(pod_labels) + 1)))
            new = next(candidate for candidate in names if candidate not in free and candidate not in taken)
            free[new] = value
            yield new, value


def model_name(model: str, replace_blanks: bool) -> str:
    return re.sub(r"\s+", "-", model.strip()) if replace_blanks else model


def holder_pairs(holder: Workload, policy: Policy) -> list[tuple[str, str]]:
    """What is not known has no label; who has no name goes by uid and container id."""
    if holder.job:
        return [(JOB_LABEL, holder.job)]
    names, (uid, container_id) = OLD_POD_LABELS if policy.old_namespace else POD_LABELS, NAMELESS_LABELS
    pairs = [*zip(names, (holder.namespace, holder.pod, holder.container), strict=True)]
    pairs += [(uid, holder.uid)] if policy.pod_uid or not holder.pod else []
    pairs += [] if holder.pod else [(container_id, holder.container_id)]
    return [pair for pair in pairs if pair[1]]


def _samples(counter: Counter, labelled: Sequence[_Labelled], snapshot: Snapshot, policy: Policy) -> Iterator[Sample]:
    field_id = counter.field.id
    if field_id == XID_FIELD:
        yield from _xid_samples(labelled, snapshot)
    elif field_id == XID_COUNT_FIELD:
        yield from _xid_window_samples(labelled, snapshot, policy)
    elif field_id == XID_TOTAL_FIELD:
        yield from _xid_total_samples(labelled, snapshot)
    elif field_id == CLOCK_EVENTS_COUNT_FIELD:
        yield from _clock_event_samples(labelled, snapshot, policy)
    elif field_id == CLOCK_EVENTS_TOTAL_FIELD:
        yield from _clock_event_total_samples(labelled, snapshot)
    else:
        yield from _field_samples(counter, labelled, policy)
        yield from _detail_samples(field_id, labelled)
        yield from _other_samples(counter, snapshot.others, policy)


def _field_samples(counter: Counter, labelled: Sequence[_Labelled], policy: Policy) -> Iterator[Sample]:
    field_id = counter.field.id
    for item in labelled:
        value = item.values.get(field_id) if item.has(field_id) else None
        if value is None and policy.copy_parent_values and item.device.is_instance:
            value = item.parent_values.get(field_id)
        if value is not None and not isinstance(value, str):
            yield Sample(item.labels, value)


def _detail_samples(field_id: int, labelled: Sequence[_Labelled]) -> Iterator[Sample]:
    for item in labelled:
        for detail in item.details:
            if detail.field == field_id:
                yield Sample(_with_attributes(item.labels, *detail.labels), detail.value)


def _other_samples(counter: Counter, others: Sequence[OtherReading], policy: Policy) -> Iterator[Sample]:
    """Switches, links and CPUs have labels of their own kind, and no pod."""
    for other in others:
        value = other.values.get(counter.field.id)
        if value is not None and not isinstance(value, str):
            yield Sample(_other_labels(other, policy), value)


def _other_labels(other: OtherReading, policy: Policy) -> Labels:
    own = {"model_name": policy.replace_blanks_in_model_name}
    pairs = [(name, model_name(value, own.get(name, False))) for name, value in other.labels]
    label_counters = (c for c in policy.counters if c.is_label and c.field.level == other.kind)
    return Labels((*pairs, *policy.host, *sorted(_label_values(label_counters, other.values, {}))))


def _xid_samples(labelled: Sequence[_Labelled], snapshot: Snapshot) -> Iterator[Sample]:
    """The newest XID, 0 before the first; its number and text as labels, as dcgm-exporter has them."""
    unsupported = {key for key, field in snapshot.unsupported if field == XID_FIELD}
    for item in labelled:
        if not item.has(XID_FIELD) or item.device.key in unsupported:
            continue
        xid = snapshot.last_xid.get(item.device.key, 0)
        yield Sample(_with_attributes(item.labels, ("err_code", str(xid)), ("err_msg", xid_text(xid))), xid)


def _xid_window_samples(labelled: Sequence[_Labelled], snapshot: Snapshot, policy: Policy) -> Iterator[Sample]:
    window = ("window_size_in_ms", str(policy.xid_window_ms))
    seen: dict[str, list[XidTally]] = {}
    for tally in snapshot.xids:
        if tally.in_window:
            seen.setdefault(tally.device, []).append(tally)
    for item in labelled:
        if not item.has(XID_COUNT_FIELD):
            continue
        tallies = seen.get(item.device.key, ())
        for tally in tallies:
            yield Sample(_with_attributes(item.labels, window, ("xid", str(tally.xid))), tally.in_window)
        if not tallies:
            yield Sample(_with_attributes(item.labels, window), 0)


def _xid_total_samples(labelled: Sequence[_Labelled], snapshot: Snapshot) -> Iterator[Sample]:
    """Events since the start, by XID. Before a device's first there is no series, as in dcgm-exporter."""
    seen: dict[str, list[XidTally]] = {}
    for tally in snapshot.xids:
        seen.setdefault(tally.device, []).append(tally)
    for item in labelled:
        if item.has(XID_TOTAL_FIELD):
            for tally in seen.get(item.device.key, ()):
                yield Sample(_with_attributes(item.labels, ("xid", str(tally.xid))), tally.total)


def _clock_event_total_samples(labelled: Sequence[_Labelled], snapshot: Snapshot) -> Iterator[Sample]:
    """How often each reason began since the start. Before the first time there is no series, as in dcgm-exporter."""
    for item in labelled:
        if item.has(CLOCK_EVENTS_TOTAL_FIELD):
            for event in CLOCK_EVENTS.values():
                count = snapshot.clock_event_totals.get((item.device.key, event))
                if count:
                    yield Sample(_with_attributes(item.labels, ("clock_event", event)), count)


def _clock_event_samples(labelled: Sequence[_Labelled], snapshot: Snapshot, policy: Policy) -> Iterator[Sample]:
    window = ("window_size_in_ms", str(policy.clock_window_ms))
    for item in labelled:
        for event in CLOCK_EVENTS.values():
            count = snapshot.clock_events.get((item.device.key, event))
            if count and item.has(CLOCK_EVENTS_COUNT_FIELD):
                yield Sample(_with_attributes(item.labels, ("clock_event", event), window), count)


_RESERVED = HOLDER_LABELS | {
    *("gpu", "UUID", "pci_bus_id", "device", "modelName", "GPU_I_PROFILE", "GPU_I_ID", "Hostname", "hostname"),
    *("err_code", "err_msg", "window_size_in_ms", "xid", "clock_event", "le"),
    *("health_watch", "health_error_code", "health_error_severity", "health_error_category"),
    *("peer_gpu", "link_status"),
}
"""Names of other labels, or that some family adds itself: a pod label may not take them."""


@lru_cache(maxsize=4096)
def _with_attributes(labels: Labels, *more: tuple[str, str]) -> Labels:
    """dcgm-exporter sorts err_code, window_size_in_ms and the like among the pod labels."""
    cut = next((i for i, (name, _) in enumerate(labels.pairs) if name in HOLDER_LABELS), len(labels.pairs))
    return Labels((*labels.pairs[:cut], *sorted((*labels.pairs[cut:], *more))))


# One series per holder of a shared device


def own_values(device: Mapping[int, Value], usage: ContainerUsage | None) -> dict[int, Value]:
    """The device's values as one holder sees them, with `--kubernetes-virtual-gpus`. dcgm-exporter copies the device's
    figures to every holder; here they are what the holder itself used, and absent where that is not known."""
    values = {field: value for field, value in device.items() if field not in ATTRIBUTED}
    own = {} if usage is None else _attributed(device, usage)
    return values | {field: value for field, value in own.items() if field in device and value is not None}


def _attributed(device: Mapping[int, Value], usage: ContainerUsage) -> dict[int, Value | None]:
    power = device.get(POWER_USAGE)
    watts = power * usage.power_part if usage.power_part is not None and isinstance(power, float) else None
    return {
        GPU_UTIL: None if usage.utilization is None else round(100 * usage.utilization),
        FB_USED: None if usage.memory is None else usage.memory // _MIB,
        POWER_USAGE: watts,
        TOTAL_ENERGY: usage.energy_mj,
        GPU_UTIL_RATIO: None if usage.utilization is None else round(usage.utilization, 2),
        FB_USED_BYTES: usage.memory,
        ENERGY_JOULES: None if usage.energy_mj is None else usage.energy_mj // _MJ,
    }
