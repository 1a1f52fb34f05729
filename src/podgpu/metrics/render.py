"""Renders a `NodeState` as metric families."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from itertools import chain

from podgpu.metrics.encode import Family, FamilySpec, Labels, Sample, families_in, make_families
from podgpu.metrics.labels import (
    Policy,
    assigned_holders,
    dcgm_labels,
    device_names,
    holder_names,
    holder_pairs,
    make_labels,
    visible_devices,
)
from podgpu.metrics.mig import billed_name, fraction_of_gpu
from podgpu.model import (
    MIB,
    NS,
    DeviceState,
    DeviceTotals,
    GpuOrInstance,
    HolderUsage,
    MigInstance,
    NamespaceUsage,
    NodeState,
    SourceStatus,
    VcudaRequest,
    Workload,
    all_devices,
)

MAX_WAIT_PAIRS = 20  # per device
_PYTHON = platform.python_version()
_SINCE_START = frozenset(
    {
        "podgpu_device_xid_errors_total",
        "podgpu_xid_errors_total",
        "podgpu_container_xid_errors_total",
        "podgpu_exporter_source_errors_total",
        "podgpu_exporter_dropped_values_total",
    }
)
"""Counters that were 0 when the exporter started."""
_CORES_OF_A_CARD = 100
_BLOCK_MIB = 256
_DECIMALS = 6  # sums are rounded, because of floating-point errors such as 56.99999999999999
Number = int | float | None
Counted = HolderUsage | DeviceTotals | NamespaceUsage
_ContainerName = tuple[str, str, str]  # namespace, pod, container
Row = tuple[str, Mapping[str, str], int | float]
"""Family, labels, value. Labels that families.csv does not list for the family are dropped."""


def render_own(state: NodeState, policy: Policy) -> list[Family]:
    """Renders podgpu's own families, except the process_* families."""
    rows = chain(_waits(state, policy), _health(state, policy), _devices(state, policy))
    return _usage(state, policy) + _collect(rows, policy, state) + render_self(state)


def render_self(state: NodeState) -> list[Family]:
    """Renders podgpu's families about the exporter itself.

    They are served even if the GPU readings are stale.
    """
    return _collect(_self(state), Policy(), state)


def _collect(rows: Iterable[Row], policy: Policy, state: NodeState) -> list[Family]:
    samples: dict[str, list[Sample]] = {}
    for family, labels, value in rows:
        names = _label_names(family, policy.hostname_labels)
        texts = tuple(map(labels.get, names))
        selected = _select_labels(names, texts)
        since = state.counted_since if family in _SINCE_START else None
        own = samples.setdefault(family, [])
        own.append(Sample(selected, value, since))

    return make_families("exporter", samples)


@cache
def _label_names(family: str, hostname_labels: tuple[str, ...]) -> tuple[str, ...]:
    names: list[str] = []
    for name in families_in("exporter")[family].labels:
        if name == "Hostname":
            names += hostname_labels
        else:
            names.append(name)
    return tuple(names)


@lru_cache(maxsize=2048)
def _select_labels(names: tuple[str, ...], values: tuple[str | None, ...]) -> Labels:
    pairs = zip(names, values, strict=True)
    return Labels((name, value) for name, value in pairs if value is not None)


def _source(source: SourceStatus) -> Iterator[Row]:
    labels = {"source": source.name}
    if source.up is not None:
        yield "podgpu_exporter_source_up", labels, int(source.up)
        if source.seconds is not None:
            yield "podgpu_exporter_collect_duration_seconds", labels, source.seconds

    for reason, count in sorted(source.errors.items()):
        yield "podgpu_exporter_source_errors_total", {**labels, "reason": reason}, count

    for reason, count in sorted(source.unmapped.items()):
        yield "podgpu_exporter_unmapped_assignments", {**labels, "reason": reason}, count


def _self(state: NodeState) -> Iterator[Row]:
    versions = {"version": state.version, "python_version": _PYTHON}
    yield "podgpu_exporter_build_info", versions, 1

    for source in state.sources:
        yield from _source(source)

    if state.taken_at is not None:
        yield "podgpu_exporter_snapshot_timestamp_seconds", {}, state.taken_at
    for gpu, device in visible_devices(state):
        if device.unsupported:
            names = device_names(gpu, device, Policy())
            for field in device.unsupported:
                yield "podgpu_exporter_unsupported_field", {**names, "field": field}, 1

    for field, count in sorted(state.dropped.items()):
        yield "podgpu_exporter_dropped_values_total", {"field": field}, count


# Usage in base units. These series have the same labels of devices and holders as dcgm-exporter's
# series.


def _usage(state: NodeState, policy: Policy) -> list[Family]:
    holders: list[tuple[Labels, Counted]] = []
    devices: list[tuple[Labels, Counted]] = []
    for gpu, device in visible_devices(state):
        names = device_names(gpu, device, policy)
        for holder in device.holders:
            if holder.usage is not None and holder.has_labels:
                labels = dcgm_labels(names, policy, holder_pairs(holder, policy))
                holders.append((labels, holder.usage))

        if device.usage is not None:
            devices.append((dcgm_labels(names, policy), device.usage))

    namespaces: list[tuple[Labels, Counted]] = []
    for usage in state.namespaces:
        model = billed_name(usage.model, usage.profile) if usage.profile else usage.model
        pairs = (("namespace", usage.namespace), ("modelName", policy.model_name(model)))
        namespaces.append((make_labels(pairs), usage))

    families = list(_figures("holder_usage", holders))
    families += _figures("device_totals", devices)
    families += _figures("namespaces", namespaces)
    return families


def _figures(part: str, rows: Iterable[tuple[Labels, Counted]]) -> Iterator[Family]:
    """Renders the families whose `FamilySpec.part` is `part`.

    `rows`: labels, and the struct with the values.
    """
    for spec in _families_of(part):
        samples = []
        for member, pairs in spec.list_members():
            for labels, struct in rows:
                value = getattr(struct, member)
                if value is None or value == "":
                    continue

                more = pairs
                if spec.is_text:
                    more = ((member, value),)
                    value = 1
                elif spec.factor > 1:
                    value /= spec.factor

                own = make_labels((*labels.pairs, *more)) if more else labels
                samples.append(Sample(own, value, struct.counted_since))

        yield spec.of(samples)


@cache
def _families_of(part: str) -> list[FamilySpec]:
    return [spec for spec in families_in("exporter").values() if spec.part == part]


# Waiting, health, devices and allocations


def _waits(state: NodeState, policy: Policy) -> Iterator[Row]:
    """Yields a row per pair of containers of which one waits for the other.

    Omits pairs that wait less than `policy.wait_pairs` % of the time.
    """
    if not policy.wait_pairs:
        return
    for gpu, device in visible_devices(state):
        names = device_names(gpu, device, policy)
        pairs = []
        for holder in device.holders:
            if holder.pod:
                runners = holder.known_usage.waits_for
                pairs += [(holder, runner) for runner in runners if runner.pod]

        # The longest waits come first.
        pairs.sort(key=lambda pair: pair[1].ratio, reverse=True)
        for holder, runner in pairs[:MAX_WAIT_PAIRS]:
            if 100 * runner.ratio >= policy.wait_pairs:
                labels = {**names, **holder_names(holder)}
                for name, text in holder_names(runner).items():
                    labels[f"runner_{name}"] = text

                yield "podgpu_container_gpu_waits_for_ratio", labels, runner.ratio


def _health(state: NodeState, policy: Policy) -> Iterator[Row]:
    for gpu in state.devices:
        names = device_names(gpu, gpu, policy)
        for condition in gpu.conditions:
            labels = {**names, "condition": condition.name}
            yield "podgpu_device_health", labels, 1
            if condition.since is not None:
                if condition.detail:
                    labels = {**labels, "detail": condition.detail}
                since = round(condition.since, 3)
                yield "podgpu_device_condition_since_timestamp_seconds", labels, since

        for condition_name in gpu.healthy:
            yield "podgpu_device_health", {**names, "condition": condition_name}, 0

        for failure in gpu.failures:
            labels = {**names, "condition": failure.condition}
            yield "podgpu_device_recent_failures", labels, failure.count
            last = round(failure.last, 3)
            yield "podgpu_device_last_failure_timestamp_seconds", labels, last

        for holder in gpu.last_holders:
            yield "podgpu_device_last_holder_info", {**names, **holder_names(holder)}, 1


def _count_xids(gpu: DeviceState) -> int:
    """Returns 0 before the first event, so that increase() includes that event."""
    count = 0
    for device in (gpu, *gpu.instances):
        count += sum(xid.total for xid in device.xids)
    return count


def _xids(device: GpuOrInstance, names: Mapping[str, str]) -> Iterator[Row]:
    for xid in device.xids:
        labels = {**names, "xid": str(xid.xid)}
        yield "podgpu_xid_errors_total", labels, xid.total
        yield "podgpu_xid_last_seen_timestamp_seconds", labels, xid.last_seen

        for culprit in xid.culprits:
            of_container = {**labels, **holder_names(culprit)}
            yield "podgpu_container_xid_errors_total", of_container, culprit.total


def _devices(state: NodeState, policy: Policy) -> Iterator[Row]:
    counts = {
        "expected": state.gpus_expected,
        "visible": state.gpus_visible,
        "lost": state.gpus_lost,
    }
    for status, count in counts.items():
        if count is not None:
            yield "podgpu_device_count", {"state": status, **dict(policy.host)}, count

    for gpu, device in visible_devices(state):
        names = device_names(gpu, device, policy)
        if device is gpu:
            yield "podgpu_device_xid_errors_total", names, _count_xids(gpu)
            for reason, ns in gpu.throttled_ns.items():
                yield "podgpu_device_throttled_seconds_total", {**names, "reason": reason}, ns / NS

        yield from _xids(device, names)
        for orphan in device.orphans:
            labels = {**names, **holder_names(orphan.former or Workload()), "pid": str(orphan.pid)}
            yield "podgpu_device_orphaned_memory_bytes", labels, orphan.memory_used_bytes

        for holder in assigned_holders(device):
            labels = {**names, **holder_names(holder), "source": holder.source}
            yield "podgpu_allocation_info", labels, 1
            if holder.share_ratio is not None:
                yield "podgpu_allocation_share_ratio", labels, holder.share_ratio


# The four families of tkestack gpu-manager. They have one series per card (gpu0, gpu1 and so on),
# and `total` is the sum of the cards. A MIG instance is counted as a fraction of its card. If the
# usage of a card is unknown, that card has no series and the container has no total.


def render_gpu_manager(state: NodeState, policy: Policy) -> list[Family]:
    """Renders all containers that hold, use or requested a device.

    Omits HPC jobs, because they have no pod.
    """
    families = families_in("gpu-manager")
    samples: dict[str, list[Sample]] = {name: [] for name in families}
    containers = _find_containers(state)
    for key in sorted(containers):
        namespace, pod, container_name = key
        pairs = [("pod_name", pod), ("namespace", namespace)]
        if policy.hostname:
            pairs.append(("node", policy.hostname))
        pairs.append(("container_name", container_name))

        for name, values in containers[key].measure().items():
            # The label of the card has another name in each family. families.csv lists it last.
            card_label = families[name].labels[-1]
            for card, value in values.items():
                if value is not None:
                    labels = make_labels((*pairs, (card_label, card)))
                    samples[name].append(Sample(labels, value))

    return make_families("gpu-manager", samples)


def _find_containers(state: NodeState) -> dict[_ContainerName, _GpuManagerContainer]:
    containers: defaultdict[_ContainerName, _GpuManagerContainer]
    containers = defaultdict(_GpuManagerContainer)
    for request in state.vcuda:
        if request.pod:
            containers[_name_container(request)].request = request

    for gpu, device in all_devices(state):
        fraction: Number = 1.0
        if isinstance(device, MigInstance):
            fraction = fraction_of_gpu(gpu.model, device.profile)
        memory = None if device.hidden else device.memory_total_bytes
        for holder in device.holders:
            if not holder.pod:
                continue

            container = containers[_name_container(holder)]
            if gpu.index is not None and not device.hidden:
                usage = holder.known_usage
                ratio = _multiply(usage.utilization_ratio, fraction)
                container.percents[gpu.index].append(_multiply(ratio, 100))
                container.used_bytes[gpu.index].append(usage.memory_used_bytes)

            if holder.source:
                container.held_cards.append(_multiply(holder.share_ratio, fraction))
                container.held_bytes.append(_multiply(holder.share_ratio, memory))

    return containers


def _name_container(workload: Workload) -> _ContainerName:
    return workload.namespace, workload.pod, workload.container


@dataclass(slots=True)
class _GpuManagerContainer:
    """A container that holds, uses or requested devices. A card may have several devices."""

    request: VcudaRequest = field(default_factory=VcudaRequest)
    percents: dict[int, list[Number]] = field(default_factory=partial(defaultdict, list))
    used_bytes: dict[int, list[Number]] = field(default_factory=partial(defaultdict, list))
    held_cards: list[Number] = field(default_factory=list)  # fractions of the cards
    held_bytes: list[Number] = field(default_factory=list)

    def measure(self) -> dict[str, dict[str, Number]]:
        """Returns the values by family and card."""
        percents: dict[str, Number] = {}
        mebibytes: dict[str, Number] = {}
        for index in sorted(self.percents):
            card = f"gpu{index}"
            used = _add(self.used_bytes[index])
            percents[card] = _add(self.percents[index])
            mebibytes[card] = None if used is None else int(used // MIB)

        percents["total"] = _add(percents.values())
        mebibytes["total"] = _add(mebibytes.values())

        # A container that requested no vcuda resources holds cards or fractions of them.
        cards: Number = self.request.cores / _CORES_OF_A_CARD
        if not cards:
            cards = _add(self.held_cards)

        memory: Number = self.request.memory_blocks * _BLOCK_MIB
        if not memory:
            held = _add(self.held_bytes)
            # A fraction of a card's memory is rarely a whole number.
            memory = None if held is None else round(held / MIB)

        return {
            "container_gpu_utilization": percents,
            "container_gpu_memory_total": mebibytes,
            "container_request_gpu_utilization": {"total": cards},
            "container_request_gpu_memory": {"total": memory},
        }


def _multiply(ratio: Number, whole: Number) -> Number:
    if ratio is None or whole is None:
        return None
    return ratio * whole


def _add(numbers: Iterable[Number]) -> Number:
    """Returns the sum, or None if there are no numbers or one of them is unknown."""
    total: Number = None
    for number in numbers:
        if number is None:
            return None
        total = number + (total or 0)

    if total is None:
        return None
    return round(total, _DECIMALS)
