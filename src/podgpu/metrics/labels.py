"""The rendering policy, and the labels of devices and holders."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from podgpu.metrics.counters import CounterSpec
from podgpu.metrics.encode import Labels
from podgpu.metrics.families import HOLDER_LABELS, JOB_LABEL, NAMELESS_LABELS, OLD_POD_LABELS, POD_LABELS
from podgpu.model import DeviceState, Holder, MigInstance, NodeState, Slot, Workload

Pairs = tuple[tuple[str, str], ...]
_RESERVED = HOLDER_LABELS | {
    *("gpu", "UUID", "pci_bus_id", "device", "modelName", "GPU_I_PROFILE", "GPU_I_ID", "Hostname", "hostname"),
    *("err_code", "err_msg", "window_size_in_ms", "xid", "clock_event", "le"),
    *("health_watch", "health_error_code", "health_error_severity", "health_error_category"),
    *("peer_gpu", "link_status"),
}
"""Label names of dcgm-exporter's and podgpu's families. A pod label with one of these names is renamed."""


@dataclass(frozen=True, eq=False)  # compared by identity, because it is part of the keys of the label caches
class Policy:
    """The user's settings for series and labels."""

    counters: tuple[CounterSpec, ...] = ()
    hostname: str = ""  # no host label if empty
    hostname_labels: tuple[str, ...] = ("Hostname",)
    old_namespace: bool = False  # label names of dcgm-exporter 1.x: uuid, pod_name, pod_namespace, container_name
    replace_blanks_in_model_name: bool = False
    pod_uid: bool = False
    virtual_gpus: bool = False  # one series per holder of a shared device
    copy_parent_values: bool = False  # repeat the GPU's values on its MIG instances, as dcgm-exporter does
    gpu_manager: bool = False
    process_metrics: str = ""  # path of /proc; no process_* families if empty
    xid_window_ms: int = 300_000
    clock_window_ms: int = 300_000

    @property
    def host(self) -> Pairs:
        return tuple((label, self.hostname) for label in self.hostname_labels) if self.hostname else ()


@dataclass(frozen=True, eq=False)  # compared by identity, like Policy: `_make_names` returns one object per device
class DeviceNames:
    """Label values that identify a GPU or a MIG instance."""

    gpu: str
    uuid: str
    pci_bus_id: str
    device: str
    model: str
    instance: str = ""
    profile: str = ""

    @property
    def gpu_labels(self) -> Pairs:
        return ("gpu", self.gpu), ("UUID", self.uuid), ("pci_bus_id", self.pci_bus_id), ("device", self.device)

    @property
    def short_labels(self) -> Pairs:
        return ("gpu", self.gpu), ("UUID", self.uuid), ("device", self.device)

    @property
    def instance_id(self) -> Pairs:
        return (("GPU_I_ID", self.instance),) if self.instance else ()

    @property
    def instance_labels(self) -> Pairs:
        return (("GPU_I_PROFILE", self.profile), *self.instance_id) if self.instance else ()


def names_of_device(gpu: DeviceState, instance: MigInstance | None = None) -> DeviceNames:
    own = (gpu.index, gpu.uuid, gpu.pci_bus_id, gpu.maker, gpu.model)
    return _make_names(*own) if instance is None else _make_names(*own, instance.id, instance.profile)


@lru_cache(maxsize=4096)
def _make_names(
    index: int | None, uuid: str, bus_id: str, maker: str, model: str, instance: int | None = None, profile: str = ""
) -> DeviceNames:
    gpu, device = ("", "") if index is None else (str(index), f"{maker}{index}")
    return DeviceNames(gpu, uuid, bus_id, device, model, "" if instance is None else str(instance), profile)


def all_slots(state: NodeState) -> Iterator[tuple[DeviceNames, DeviceState, Slot]]:
    for gpu in state.devices:
        yield names_of_device(gpu), gpu, gpu
        for instance in gpu.instances:
            yield names_of_device(gpu, instance), gpu, instance


def visible_slots(state: NodeState) -> list[tuple[DeviceNames, DeviceState, Slot]]:
    return [entry for entry in all_slots(state) if not entry[2].hidden]


def assigned_holders(slot: Slot) -> list[Holder]:
    """Returns the holders to which a source assigned the device, without workloads that only use it."""
    return [holder for holder in slot.holders if holder.source]


def model_name(model: str, replace_blanks: bool) -> str:
    return re.sub(r"\s+", "-", model.strip()) if replace_blanks else model


def holder_pairs(holder: Workload, policy: Policy) -> list[tuple[str, str]]:
    """Returns the holder's labels for dcgm-exporter's series and usage series. Empty labels are omitted."""
    if holder.job:
        return [(JOB_LABEL, holder.job)]
    names, (uid, container_id) = OLD_POD_LABELS if policy.old_namespace else POD_LABELS, NAMELESS_LABELS
    pairs = [*zip(names, (holder.namespace, holder.pod, holder.container), strict=True)]
    pairs += [(uid, holder.uid)] if policy.pod_uid or not holder.pod else []
    pairs += [] if holder.pod else [(container_id, holder.container_id)]
    return [pair for pair in pairs if pair[1]]


def holder_names(holder: Workload) -> list[tuple[str, str]]:
    """Returns the holder's labels for podgpu's allocation families. They do not depend on the policy."""
    if holder.job:
        return [(JOB_LABEL, holder.job)]
    nameless = zip(NAMELESS_LABELS, (holder.uid, holder.container_id), strict=True)
    pairs = zip(POD_LABELS, (holder.namespace, holder.pod, holder.container), strict=True)
    return [*pairs, *(() if holder.pod else nameless)]


@lru_cache(maxsize=4096)
def device_labels(
    names: DeviceNames, label_values: Pairs, pod_labels: Pairs, attributes: Pairs, policy: Policy
) -> Labels:
    """Builds dcgm-exporter's labels in its order."""
    pairs = [
        ("gpu", names.gpu),
        ("uuid" if policy.old_namespace else "UUID", names.uuid),
        ("pci_bus_id", names.pci_bus_id),
        ("device", names.device),
        ("modelName", model_name(names.model, policy.replace_blanks_in_model_name)),
        *names.instance_labels,
        *policy.host,
    ]
    taken = _RESERVED.union(name for name, _ in (*pairs, *label_values, *attributes))
    pairs += sorted((*label_values, *_rename_pod_labels(taken, pod_labels)))
    pairs += sorted(attributes)
    return Labels(pairs)


def _rename_pod_labels(taken: frozenset[str], pod_labels: Pairs) -> Iterator[tuple[str, str]]:
    """Renames pod labels whose name is taken to `pod_label_<name>`, as dcgm-exporter does since 4.8.3."""
    free = dict(pair for pair in pod_labels if pair[0] not in taken)
    yield from free.items()
    for name, value in pod_labels:
        if name in taken:
            names = (f"pod_label_{name}", *(f"pod_label_{name}_conflict{n}" for n in range(1, len(pod_labels) + 1)))
            new = next(candidate for candidate in names if candidate not in free and candidate not in taken)
            free[new] = value
            yield new, value


@lru_cache(maxsize=4096)
def with_attributes(labels: Labels, *more: tuple[str, str]) -> Labels:
    """Adds labels such as err_code in dcgm-exporter's order: sorted together with the pod labels."""
    cut = next((i for i, (name, _) in enumerate(labels.pairs) if name in HOLDER_LABELS), len(labels.pairs))
    return Labels((*labels.pairs[:cut], *sorted((*labels.pairs[cut:], *more))))
