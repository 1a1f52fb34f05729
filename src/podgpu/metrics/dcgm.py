"""Renders the metric families of dcgm-exporter, with the same names and the same order of labels.

A series has pod labels if exactly one workload holds the device. With virtual GPUs, there is one
series per holder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property

from podgpu.metrics.conditions import conditions, health_code, xid_spec
from podgpu.metrics.counters import CounterSpec
from podgpu.metrics.encode import Family, Labels, Sample
from podgpu.metrics.fields import (
    CLOCK_EVENTS,
    ENGINE,
    FB_USED,
    HEALTH,
    HEALTH_FIELD,
    POWER,
    TOTAL_ENERGY,
    UTIL,
    XID_FIELD,
    XID_NAME,
    factor_1x,
    fields,
)
from podgpu.metrics.labels import (
    Policy,
    assigned_holders,
    dcgm_labels,
    device_names,
    holder_pairs,
    make_labels,
    visible_devices,
    with_attributes,
)
from podgpu.metrics.values import scale_number
from podgpu.model import (
    MIB,
    MJ,
    DeviceState,
    EntityState,
    GpuOrInstance,
    Holder,
    HolderUsage,
    MigInstance,
    NodeState,
    Pairs,
    Value,
    select_keys,
)

Values = Mapping[str, Value]
GPU_UTIL_RATIO = "DCGM_FI_DEV_GPU_UTIL_RATIO"
FB_USED_BYTES = "DCGM_FI_DEV_FB_USED_BYTES"
ENERGY_JOULES = "DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL"
ATTRIBUTED = frozenset(
    {UTIL, FB_USED, POWER, TOTAL_ENERGY, GPU_UTIL_RATIO, FB_USED_BYTES, ENERGY_JOULES}
)
"""Fields with a separate value for each holder of a shared GPU (virtual GPUs)."""
_ALSO_OF_DEVICE = frozenset({UTIL, FB_USED, GPU_UTIL_RATIO, FB_USED_BYTES})
"""With virtual GPUs, these fields have one series for the whole device, besides one per holder."""
_DECODER_FIELDS = frozenset({"DCGM_FI_DEV_DEC_UTIL", "DCGM_FI_DEV_DEC_UTIL_RATIO"})
_ACTIVITY = frozenset(
    field.name
    for field in fields().values()
    if field.name.startswith("DCGM_FI_PROF_")
    or field.unit in ("ratio 0-1", "% (0-100)", "B/s", "KB/s", "MB/s")
) - {"DCGM_FI_DEV_FAN_SPEED"}
"""Ratios and rates that measure activity. They cannot be split among the holders of a device."""
XID_COUNT_FIELD = 9001
CLOCK_EVENTS_COUNT_FIELD = 9002
XID_TOTAL_FIELD = 9005
CLOCK_EVENTS_TOTAL_FIELD = 9006
_WINDOW = "window_size_in_ms"
# DCGM's results of a health check
_PASS = 0
_WARN = 10
_FAIL = 20


def render_dcgm(state: NodeState, policy: Policy) -> list[Family]:
    """Renders the families that the counter file lists, sorted by field id as in dcgm-exporter."""
    renderer = _Renderer(state, policy)
    for gpu, device in visible_devices(state):
        if device.fields is not None:
            renderer.add_device(gpu, device, device.fields)

    for entity in state.entities:
        renderer.add_entity(entity)

    families = []
    for counter, samples in renderer.families:
        families.append(
            Family(counter.name, counter.type, counter.help, tuple(samples), dcgm_numbers=True)
        )

    return families


class _Renderer:
    def __init__(self, state: NodeState, policy: Policy) -> None:
        self._policy = policy
        self._pod_labels = state.pod_labels
        self._label_counters = [counter for counter in policy.counters if counter.is_label]
        self._gpus = state.devices
        self.families: list[tuple[CounterSpec, list[Sample]]] = []
        for counter in sorted(policy.counters, key=lambda counter: counter.field.id):
            if not counter.is_label:
                self.families.append((counter, []))

    def add_device(self, gpu: DeviceState, device: GpuOrInstance, values: Values) -> None:
        """Adds the series of a GPU or MIG instance. `values`: the device's fields."""
        policy = self._policy
        parent = gpu.fields or {}
        if policy.copy_parent_values and isinstance(device, MigInstance):
            values = {**parent, **values}

        names = device_names(gpu, device, policy)
        texts = _label_values(self._label_counters, values, parent)
        plain = dcgm_labels(names, policy, label_values=texts)

        holders = assigned_holders(device) if policy.dcgm_holders else []
        by_key = {holder.key: holder for holder in holders}
        is_shared = len(by_key) > 1

        if holders and policy.virtual_gpus:
            self._add_values(plain, _values_of_device(values, holders, is_shared))
            self._add_details(plain, device)
            for holder in holders:
                labels = self._held_labels(names, texts, holder)
                self._add_values(labels, _values_of_holder(values, holder, is_shared))
                self._add_events(labels, device)

            return

        # The values belong to the only holder, or to the device. dcgm-exporter repeats them for
        # every job.
        series = []
        for holder in by_key.values():
            if holder.job or not is_shared:
                series.append(self._held_labels(names, texts, holder))

        for labels in series or [plain]:
            self._add_values(labels, values)
            self._add_details(labels, device)
            self._add_events(labels, device)

    def add_entity(self, entity: EntityState) -> None:
        """Adds the series of a link, a switch, a CPU and so on."""
        names = dict(entity.labels)
        model = names.get("model_name")
        if model is not None:
            names["model_name"] = self._policy.model_name(model)

        counters = [one for one in self._label_counters if one.field.level == entity.kind]
        texts = _label_values(counters, entity.fields, {})
        texts += self._node_labels
        pairs = (*names.items(), *self._policy.host, *sorted(texts))
        self._add_values(make_labels(pairs), entity.fields)

    @cached_property
    def _node_labels(self) -> Pairs:
        """Labels that all series of the node have, such as the driver's version."""
        counters = [one for one in self._label_counters if one.field.level == "GLOBAL"]
        for gpu in self._gpus:
            labels = _label_values(counters, gpu.fields or {}, {})
            if labels:
                return labels
        return ()

    def _held_labels(self, names: dict[str, str], texts: Pairs, holder: Holder) -> Labels:
        attributes = list(holder_pairs(holder, self._policy))
        attributes += holder.labels.items()
        if self._policy.virtual_gpus and holder.replica:
            attributes.append(("vgpu", holder.replica))
        pod = f"{holder.namespace}/{holder.pod}"
        pod_labels = self._pod_labels.get(pod)
        return dcgm_labels(names, self._policy, attributes, texts, pod_labels)

    def _add_values(self, labels: Labels, values: Values) -> None:
        for counter, samples in self.families:
            field = counter.field
            value = values.get(field.name)
            if value is None or isinstance(value, str) or field.id in _EVENTS:
                continue
            if counter.name == field.name_1x:
                factor = factor_1x(field)
                if factor != 1.0:
                    value = scale_number(field, value, factor)

            samples.append(Sample(labels, value))

    def _add_details(self, labels: Labels, device: GpuOrInstance) -> None:
        """Adds values that have additional labels, such as the results of health checks."""
        for name, more, value in device.details:
            for counter, samples in self.families:
                if counter.field.name == name:
                    samples.append(Sample(with_attributes(labels, more.items()), value))

    def _add_events(self, labels: Labels, device: GpuOrInstance) -> None:
        """Adds the numbers of XIDs and clock events. podgpu counts these events itself."""
        for counter, samples in self.families:
            list_events = _EVENTS.get(counter.field.id)
            if list_events is None:
                continue
            for count, more in list_events(device, self._policy):
                samples.append(Sample(with_attributes(labels, more), count))


def _label_values(counters: Iterable[CounterSpec], values: Values, parent: Values) -> Pairs:
    """Returns the labels of counters of type label.

    If a MIG instance has no value, its GPU's value is used.
    """
    labels = []
    for counter in counters:
        name = counter.field.name
        value = values.get(name, parent.get(name))
        if value is not None:
            labels.append((counter.name, str(value)))
    return tuple(labels)


# Events and health. Each function yields the value and the additional labels of each sample.

_Samples = Iterator[tuple[int, Pairs]]
_NO_EVENTS = (0, 0)


def _last_xid(device: GpuOrInstance, _policy: Policy) -> _Samples:
    if XID_NAME not in device.unsupported:
        xid = device.last_xid or 0
        yield xid, (("err_code", str(xid)), ("err_msg", xid_spec(xid).err_msg))


def _recent_xids(device: GpuOrInstance, policy: Policy) -> _Samples:
    window = (_WINDOW, str(policy.xid_window_ms))
    recent = [count for count in device.xids if count.in_window]
    for count in recent:
        yield count.in_window, (window, ("xid", str(count.xid)))
    if not recent:
        yield 0, (window,)


def _all_xids(device: GpuOrInstance, _policy: Policy) -> _Samples:
    for count in device.xids:
        yield count.total, (("xid", str(count.xid)),)


def _recent_clock_events(device: GpuOrInstance, policy: Policy) -> _Samples:
    window = (_WINDOW, str(policy.clock_window_ms))
    for event in CLOCK_EVENTS.values():
        in_window, _ = device.clock_events.get(event, _NO_EVENTS)
        if in_window:
            yield in_window, (("clock_event", event), window)


def _all_clock_events(device: GpuOrInstance, _policy: Policy) -> _Samples:
    for event in CLOCK_EVENTS.values():
        _, total = device.clock_events.get(event, _NO_EVENTS)
        if total:
            yield total, (("clock_event", event),)


def _health_by_watch(gpu: GpuOrInstance, _policy: Policy) -> _Samples:
    """Yields the worst condition of each health check of DCGM. Omits unknown checks."""
    # If DCGM is the source, its own results are in the details.
    has_own_results = any(name == HEALTH for name, _, _ in gpu.details)
    if has_own_results or not isinstance(gpu, DeviceState):
        return

    present = {condition.name for condition in gpu.conditions}
    worst: dict[str, tuple[int, int]] = {}  # health check -> health and error code
    for name, spec in conditions().items():
        watch = spec.dcgm_watch
        if not watch:
            continue
        if name in present:
            health = _FAIL if spec.severity == "broken" else _WARN
            result = health, int(spec.dcgm_code)
            # If both are equally bad, the higher code is reported.
            worst[watch] = max(result, worst.get(watch, result))
        # A check can have several conditions. It passes only if none is present.
        elif name in gpu.healthy:
            worst.setdefault(watch, (_PASS, 0))

    for watch, (health, number) in worst.items():
        labels = health_labels(watch, number)
        yield health, tuple(labels.items())


_EVENTS: Mapping[int, Callable[[GpuOrInstance, Policy], _Samples]] = {
    XID_FIELD: _last_xid,
    XID_COUNT_FIELD: _recent_xids,
    XID_TOTAL_FIELD: _all_xids,
    CLOCK_EVENTS_COUNT_FIELD: _recent_clock_events,
    CLOCK_EVENTS_TOTAL_FIELD: _all_clock_events,
    HEALTH_FIELD: _health_by_watch,
}
"""Fields that podgpu counts or derives itself, by field id."""


def health_labels(watch: str, number: int) -> dict[str, str]:
    """Returns the labels of a health check. `number`: DCGM's error code."""
    code = health_code(number)
    return {
        "health_error_code": code.name,
        "health_error_severity": code.severity,
        "health_error_category": code.category,
        "health_watch": watch,
    }


# Virtual GPUs


def _values_of_device(
    values: Values, holders: Iterable[Holder], is_shared: bool
) -> dict[str, Value]:
    """Returns the values that have a series without a holder."""
    names = set(_ALSO_OF_DEVICE)
    if is_shared:
        names |= _ACTIVITY
        # What is unknown of a holder is shown for the device.
        for holder in holders:
            names |= ATTRIBUTED - _own_values(values, holder.known_usage).keys()
    return select_keys(values, names)


def _values_of_holder(values: Values, holder: Holder, is_shared: bool) -> dict[str, Value]:
    """Returns the holder's own values, and the device's values of the other fields.

    Unknown values of a shared device are omitted: dcgm-exporter repeats the device's values for
    every holder. The only holder has the device's values instead. Activity fields of a shared
    device are omitted, except two that OpenCost needs: GR_ENGINE_ACTIVE has the holder's own value,
    and DEC_UTIL, by which OpenCost finds the device, is kept if it is 0.
    """
    own = _own_values(values, holder.known_usage)
    if not is_shared:
        return {**values, **own}

    ratio = holder.known_usage.utilization_ratio
    if ENGINE in values and ratio is not None:
        own[ENGINE] = ratio
    for name, value in values.items():
        is_idle_decoder = name in _DECODER_FIELDS and value == 0
        if is_idle_decoder or name not in ATTRIBUTED | _ACTIVITY:
            own[name] = value

    return own


def _own_values(device: Values, usage: HolderUsage) -> dict[str, Value]:
    """Returns the holder's known values of the device's fields in `ATTRIBUTED`."""
    own: dict[str, Value] = {}
    ratio = usage.utilization_ratio
    if ratio is not None:
        own[UTIL] = round(100 * ratio)
        own[GPU_UTIL_RATIO] = round(ratio, 2)

    memory = usage.memory_used_bytes
    if memory is not None:
        own[FB_USED] = memory // MIB
        own[FB_USED_BYTES] = memory

    power = device.get(POWER)
    if isinstance(power, int | float) and usage.power_ratio is not None:
        own[POWER] = power * usage.power_ratio

    if usage.energy_mj is not None:
        own[TOTAL_ENERGY] = usage.energy_mj
        own[ENERGY_JOULES] = usage.energy_mj // MJ

    return select_keys(own, device)
