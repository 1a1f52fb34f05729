"""This module makes podgpu's own families of a snapshot: what dcgm-exporter's names cannot say, what is wrong with the
GPUs, and the exporter on itself."""

from __future__ import annotations

import sys
from collections import Counter as Tally
from functools import lru_cache

from podgpu import __version__
from podgpu.metrics import families as f
from podgpu.metrics.dcgm import Pairs, model_name
from podgpu.metrics.fields import fields
from podgpu.metrics.policy import Policy
from podgpu.model import Device, Snapshot, Workload, physical
from podgpu.series import NO_LABELS, Family, Labels, Sample

_NS = 1_000_000_000


def device_families(snapshot: Snapshot, host: Pairs) -> list[Family]:
    allocations = _allocations(snapshot)
    return [
        f.DEVICE_COUNT.of(_device_counts(snapshot, host)),
        f.THROTTLED.of(_throttled(snapshot, host)),
        f.DEVICE_XIDS.of(_device_xids(snapshot, host)),
        f.XIDS.of(_xids(snapshot, host, last_seen=False)),
        f.XID_LAST_SEEN.of(_xids(snapshot, host, last_seen=True)),
        f.ALLOCATION_INFO.of([Sample(labels, 1) for labels, _ in allocations]),
        f.ALLOCATION_SHARE.of([Sample(labels, share) for labels, share in allocations if share is not None]),
    ]


def self_families(snapshot: Snapshot) -> list[Family]:
    """What stays true even when the figures are too old to be served."""
    return [
        f.BUILD_INFO.of([Sample(_build_labels(), 1)]),
        f.SOURCE_UP.of([Sample(_source(o.source), int(o.ok)) for o in snapshot.outcomes]),
        f.SOURCE_ERRORS.of([Sample(_source_reason(*key), n) for key, n in sorted(snapshot.errors.items())]),
        f.COLLECT_DURATION.of([Sample(_source(o.source), o.seconds) for o in snapshot.outcomes]),
        f.SNAPSHOT_TIMESTAMP.of([Sample(NO_LABELS, snapshot.taken_at)] if snapshot.taken_at else []),
        f.UNMAPPED.of(_unmapped(snapshot)),
        f.UNSUPPORTED.of(_unsupported(snapshot)),
        f.DROPPED.of([Sample(Labels([("field", fields()[i].name)]), n) for i, n in sorted(snapshot.dropped.items())]),
    ]


@lru_cache(maxsize=1024)
def _device(device: Device, host: Pairs, *more: tuple[str, str]) -> Labels:
    """No model name and no label-type fields: a driver upgrade must not fork a counter."""
    pairs = [
        ("gpu", device.number),
        ("UUID", device.uuid),
        ("pci_bus_id", device.pci_bus_id),
        ("device", device.name),
    ]
    if device.gi_id is not None:
        pairs += [("GPU_I_PROFILE", device.profile), ("GPU_I_ID", str(device.gi_id))]
    return Labels([*pairs, *host, *more])


@lru_cache(maxsize=64)
def _source(source: str) -> Labels:
    return Labels([("source", source)])


@lru_cache(maxsize=256)
def _source_reason(source: str, reason: str) -> Labels:
    return Labels([("source", source), ("reason", reason)])


@lru_cache(maxsize=1)
def _build_labels() -> Labels:
    return Labels([("version", __version__), ("python_version", "{}.{}.{}".format(*sys.version_info))])


def _device_counts(snapshot: Snapshot, host: Pairs) -> list[Sample]:
    count = snapshot.device_count
    states = (("expected", count.expected), ("visible", count.visible), ("lost", count.lost))
    return [Sample(Labels([("state", s), *host]), n) for s, n in states if n is not None]


def _throttled(snapshot: Snapshot, host: Pairs) -> list[Sample]:
    samples = []
    for reading in snapshot.readings:
        for field_id, reason in f.THROTTLE_REASONS.items():
            nanoseconds = reading.values.get(field_id)
            if isinstance(nanoseconds, int) and not reading.device.is_instance:
                labels = _device(reading.device, host, ("reason", reason))
                samples.append(Sample(labels, nanoseconds / _NS))
    return samples


def _device_xids(snapshot: Snapshot, host: Pairs) -> list[Sample]:
    """From 0 for every GPU: a counter born at 1 hides its first event from increase()."""
    totals: Tally[str] = Tally()
    for tally in snapshot.xids:
        totals[physical(tally.device)] += tally.total
    return [Sample(_device(d, host), totals[d.uuid]) for d in snapshot.devices if not d.is_instance]


def _xids(snapshot: Snapshot, host: Pairs, *, last_seen: bool) -> list[Sample]:
    known = {d.key: d for d in snapshot.devices}
    return [
        Sample(
            _device(known[t.device], host, ("xid", str(t.xid))),
            t.last_seen if last_seen else t.total,
        )
        for t in snapshot.xids
        if t.device in known
    ]


def _allocations(snapshot: Snapshot) -> list[tuple[Labels, float | None]]:
    known = {d.key: d for d in snapshot.devices}
    return [
        (_allocation_labels(known[a.device], a.holder, a.source), a.share)
        for a in snapshot.assignments
        if a.device in known
    ]


@lru_cache(maxsize=4096)
def _allocation_labels(device: Device, holder: Workload, source: str) -> Labels:
    pairs = [("gpu", device.number), ("UUID", device.uuid), ("device", device.name)]
    if device.gi_id is not None:
        pairs.append(("GPU_I_ID", str(device.gi_id)))
    return Labels([*pairs, *named(holder), ("source", source)])


def named(holder: Workload) -> list[tuple[str, str]]:
    if holder.job:
        return [(f.JOB_LABEL, holder.job)]
    nameless = zip(f.NAMELESS_LABELS, (holder.uid, holder.container_id), strict=True)
    pairs = zip(f.POD_LABELS, (holder.namespace, holder.pod, holder.container), strict=True)
    return [*pairs, *(() if holder.pod else nameless)]


def _unmapped(snapshot: Snapshot) -> list[Sample]:
    counts = Tally((u.source, u.reason) for u in snapshot.unmapped)
    return [Sample(_source_reason(*key), n) for key, n in sorted(counts.items())]


def _unsupported(snapshot: Snapshot) -> list[Sample]:
    known = {d.key: d for d in snapshot.devices}
    return [
        Sample(_unsupported_labels(known[key], field_id), 1)
        for key, field_id in sorted(snapshot.unsupported)
        if key in known
    ]


@lru_cache(maxsize=4096)
def _unsupported_labels(device: Device, field_id: int) -> Labels:
    instance = [] if device.gi_id is None else [("GPU_I_ID", str(device.gi_id))]
    name = fields()[field_id].name
    return Labels([("gpu", device.number), ("UUID", device.uuid), *instance, ("field", name)])


def health_families(snapshot: Snapshot, policy: Policy) -> list[Family]:
    health: list[Sample] = []
    since: list[Sample] = []
    last: list[Sample] = []
    host, blanks = policy.host, policy.replace_blanks_in_model_name
    for of in snapshot.health:
        device = of.device
        for finding in of.findings:
            condition = ("condition", finding.condition)
            health.append(Sample(_labels(device, host, blanks, condition), 1))
            detail = (("detail", finding.detail),) if finding.detail else ()
            since.append(Sample(_labels(device, host, blanks, condition, *detail), round(finding.since, 3)))
        health += (Sample(_labels(device, host, blanks, ("condition", name)), 0) for name in of.fine)
        last += (Sample(Labels([*_names(device, blanks), *named(holder)]), 1) for holder in of.last_holders)
    return [f.DEVICE_HEALTH.of(health), f.CONDITION_SINCE.of(since), f.LAST_HOLDER.of(last)]


@lru_cache(maxsize=1024)
def _labels(device: Device, host: Pairs, replace_blanks: bool, *more: tuple[str, str]) -> Labels:
    number, uuid, name, model = _names(device, replace_blanks)
    return Labels([number, uuid, ("pci_bus_id", device.pci_bus_id), name, model, *host, *more])


def _names(device: Device, replace_blanks: bool) -> Pairs:
    return (
        ("gpu", device.number),
        ("UUID", device.uuid),
        ("device", device.name),
        ("modelName", model_name(device.model, replace_blanks)),
    )
