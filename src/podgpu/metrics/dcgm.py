"""Renders the metric families of dcgm-exporter, with the same names and the same order of labels.

A series has pod labels if exactly one workload holds the device. With virtual GPUs, there is one
series per holder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from podgpu.metrics.conditions import xid_spec
from podgpu.metrics.counters import CounterSpec
from podgpu.metrics.encode import Family, Labels, Sample
from podgpu.metrics.fields import (
    CLOCK_EVENTS,
    ENGINE,
    FB_USED,
    POWER,
    UTIL,
    XID_FIELD,
    factor_1x,
    fields,
)
from podgpu.metrics.labels import (
    LabelPairs,
    Policy,
    assigned_holders,
    dcgm_labels,
    device_names,
    holder_pairs,
    make_labels,
    visible_devices,
    with_attributes,
)
from podgpu.metrics.values import converted
from podgpu.model import (
    MIB,
    MJ,
    EntityState,
    GpuOrInstance,
    Holder,
    HolderUsage,
    MigInstance,
    NodeState,
    Value,
)

Values = Mapping[str, Value]
_Families = list[tuple[CounterSpec, list[Sample]]]
GPU_UTIL_RATIO, FB_USED_BYTES = "DCGM_FI_DEV_GPU_UTIL_RATIO", "DCGM_FI_DEV_FB_USED_BYTES"
TOTAL_ENERGY, ENERGY_JOULES = (
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
    "DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL",
)
ATTRIBUTED = frozenset(
    {UTIL, FB_USED, POWER, TOTAL_ENERGY, GPU_UTIL_RATIO, FB_USED_BYTES, ENERGY_JOULES}
)
"""Fields with a separate value for each holder of a shared GPU (virtual GPUs)."""
_ALSO_OF_DEVICE = frozenset({UTIL, FB_USED, GPU_UTIL_RATIO, FB_USED_BYTES})
"""With virtual GPUs, these fields have one series per holder and one series for the whole device.
"""
_DECODER_FIELDS = frozenset({"DCGM_FI_DEV_DEC_UTIL", "DCGM_FI_DEV_DEC_UTIL_RATIO"})
_ACTIVITY = frozenset(
    field.name
    for field in fields().values()
    if field.name.startswith("DCGM_FI_PROF_")
    or field.unit in ("ratio 0-1", "% (0-100)", "B/s", "KB/s", "MB/s")
) - {"DCGM_FI_DEV_FAN_SPEED"}
"""Ratios and rates that measure activity. On a shared device, they cannot be split among the
holders.
"""
XID_COUNT_FIELD, XID_TOTAL_FIELD = 9001, 9005
CLOCK_EVENTS_COUNT_FIELD, CLOCK_EVENTS_TOTAL_FIELD = 9002, 9006
_EVENT_FIELDS = {
    XID_FIELD,
    XID_COUNT_FIELD,
    XID_TOTAL_FIELD,
    CLOCK_EVENTS_COUNT_FIELD,
    CLOCK_EVENTS_TOTAL_FIELD,
}


def render_dcgm(state: NodeState, policy: Policy) -> list[Family]:
    """Renders the families that the counter file lists. The families are sorted by field id, as in
    dcgm-exporter.
    """
    counters = sorted((c for c in policy.counters if not c.is_label), key=lambda c: c.field.id)
    label_counters = [c for c in policy.counters if c.is_label]
    families: _Families = [(counter, []) for counter in counters]
    for gpu, device in visible_devices(state):
        if device.fields is None:
            continue
        parent = gpu.fields or {}
        repeated = parent if policy.copy_parent_values and isinstance(device, MigInstance) else {}
        names, texts = (
            device_names(gpu, device, policy),
            _label_values(label_counters, device.fields, parent),
        )
        holders = assigned_holders(device) if policy.dcgm_holders else []
        is_shared = len({holder.key for holder in holders}) > 1
        values = {**repeated, **device.fields}
        has_holder_series = bool(holders) and policy.virtual_gpus
        if holders and not is_shared and not has_holder_series:
            labels = _held_labels(names, texts, holders[0], state, policy)
        else:
            labels = dcgm_labels(names, policy, label_values=texts)
        if has_holder_series:
            of_device = _ALSO_OF_DEVICE | _ACTIVITY if is_shared else _ALSO_OF_DEVICE
            values = {name: value for name, value in values.items() if name in of_device}
        _add_values(families, labels, values)
        _add_details(families, labels, device)
        if not has_holder_series:
            _add_events(families, labels, device, policy)
            continue
        for holder in holders:
            values = {**repeated, **_attributed_values(device.fields, holder.usage)}
            if is_shared:
                values = _holder_activity(values, device.fields, holder.usage)
            labels = _held_labels(names, texts, holder, state, policy)
            _add_values(families, labels, values)
            _add_events(families, labels, device, policy)
    for entity in state.entities:
        _add_values(families, _entity_labels(entity, policy), entity.fields)
    return [
        Family(c.name, c.type, c.help, tuple(samples), dcgm_numbers=True) for c, samples in families
    ]


def _held_labels(
    names: dict[str, str], texts: LabelPairs, holder: Holder, state: NodeState, policy: Policy
) -> Labels:
    attributes = [*holder_pairs(holder, policy), *holder.labels.items()]
    if policy.virtual_gpus and holder.replica:
        attributes.append(("vgpu", holder.replica))
    return dcgm_labels(
        names, policy, attributes, texts, state.pod_labels.get(f"{holder.namespace}/{holder.pod}")
    )


def _label_values(counters: Iterable[CounterSpec], values: Values, parent: Values) -> LabelPairs:
    """Returns the labels of counters of type label. If a MIG instance has no value, its GPU's value
    is used.
    """
    labels = ((c.name, values.get(c.field.name, parent.get(c.field.name))) for c in counters)
    return tuple((name, str(value)) for name, value in labels if value is not None)


def _add_values(families: _Families, labels: Labels, values: Values) -> None:
    for counter, samples in families:
        field = counter.field
        value = values.get(field.name)
        if value is not None and not isinstance(value, str) and field.id not in _EVENT_FIELDS:
            if counter.name == field.name_1x and (factor := factor_1x(field)) != 1.0:
                value = converted(field, value, factor)
            samples.append(Sample(labels, value))


def _add_details(families: _Families, labels: Labels, device: GpuOrInstance) -> None:
    """Adds values that have additional labels, such as the results of health checks."""
    for name, more, value in device.details:
        for counter, samples in families:
            if counter.field.name == name:
                samples.append(Sample(with_attributes(labels, *more.items()), value))


def _add_events(families: _Families, labels: Labels, device: GpuOrInstance, policy: Policy) -> None:
    """Adds the numbers of XIDs and clock events. podgpu counts these events itself."""
    for counter, samples in families:
        if counter.field.id in _EVENT_FIELDS:
            counts = _count_events(counter.field.id, device, policy)
            samples += [Sample(with_attributes(labels, *more), count) for count, more in counts]


def _count_events(
    field_id: int, device: GpuOrInstance, policy: Policy
) -> Iterator[tuple[int, LabelPairs]]:
    """Yields value and additional labels of each sample of an event field. The value of XID_FIELD
    is the newest XID.
    """
    window = "window_size_in_ms"
    if field_id == XID_FIELD and fields()[XID_FIELD].name not in device.unsupported:
        xid = device.last_xid or 0
        yield xid, (("err_code", str(xid)), ("err_msg", xid_spec(xid).text))
    elif field_id == XID_COUNT_FIELD:
        recent = [count for count in device.xids if count.in_window]
        for count in recent:
            yield count.in_window, ((window, str(policy.xid_window_ms)), ("xid", str(count.xid)))
        if not recent:
            yield 0, ((window, str(policy.xid_window_ms)),)
    elif field_id == XID_TOTAL_FIELD:
        for count in device.xids:
            yield count.total, (("xid", str(count.xid)),)
    elif field_id in (CLOCK_EVENTS_COUNT_FIELD, CLOCK_EVENTS_TOTAL_FIELD):
        for event in CLOCK_EVENTS.values():
            in_window, total = device.clock_events.get(event, (0, 0))
            if field_id == CLOCK_EVENTS_TOTAL_FIELD and total:
                yield total, (("clock_event", event),)
            elif field_id == CLOCK_EVENTS_COUNT_FIELD and in_window:
                yield in_window, (("clock_event", event), (window, str(policy.clock_window_ms)))


def _entity_labels(entity: EntityState, policy: Policy) -> Labels:
    pairs = [
        (n, policy.model_name(text) if n == "model_name" else text)
        for n, text in entity.labels.items()
    ]
    label_counters = (c for c in policy.counters if c.is_label and c.field.level == entity.kind)
    return make_labels(
        (*pairs, *policy.host, *sorted(_label_values(label_counters, entity.fields, {})))
    )


# Virtual GPUs


def _attributed_values(device: Values, usage: HolderUsage | None) -> dict[str, Value]:
    """Returns the holder's own values for the fields in `ATTRIBUTED`, and the device's values for
    all other fields.

    Unknown values are omitted. dcgm-exporter instead repeats the device's values for every holder.
    """
    values = {name: value for name, value in device.items() if name not in ATTRIBUTED}
    own = {} if usage is None else _own_values(device, usage)
    return values | {
        name: value for name, value in own.items() if name in device and value is not None
    }


def _holder_activity(values: Values, device: Values, usage: HolderUsage | None) -> dict[str, Value]:
    """Removes the activity fields of a shared device. Two fields remain, because OpenCost needs
    them.

    GR_ENGINE_ACTIVE gets the holder's own value. DEC_UTIL, by which OpenCost finds the device, is
    kept if it is 0.
    """
    kept = {
        name: value
        for name, value in values.items()
        if name not in _ACTIVITY or name in ATTRIBUTED or (name in _DECODER_FIELDS and value == 0)
    }
    if ENGINE in device and usage is not None and usage.utilization_ratio is not None:
        kept[ENGINE] = usage.utilization_ratio
    return kept


def _own_values(device: Values, usage: HolderUsage) -> dict[str, int | float | None]:
    power, ratio, memory = device.get(POWER), usage.utilization_ratio, usage.memory_used_bytes
    watts = (
        power * usage.power_ratio
        if isinstance(power, int | float) and usage.power_ratio is not None
        else None
    )
    return {
        UTIL: None if ratio is None else round(100 * ratio),
        FB_USED: None if memory is None else memory // MIB,
        POWER: watts,
        TOTAL_ENERGY: usage.energy_mj,
        GPU_UTIL_RATIO: None if ratio is None else round(ratio, 2),
        FB_USED_BYTES: memory,
        ENERGY_JOULES: None if usage.energy_mj is None else usage.energy_mj // MJ,
    }
