"""The labels of devices and holders, in dcgm-exporter's names and order, and their settings.

The families of dcgm-exporter (`dcgm.py`) and podgpu's own families (`render.py`) use the same
labels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from podgpu.metrics.counters import CounterSpec
from podgpu.metrics.encode import Labels
from podgpu.model import (
    DeviceState,
    GpuOrInstance,
    Holder,
    MigInstance,
    NodeState,
    Pairs,
    Workload,
    all_devices,
    device_name,
)

POD_LABELS = ("namespace", "pod", "container")
# pod labels of dcgm-exporter 1.x, used with `-o`
OLD_POD_LABELS = ("pod_namespace", "pod_name", "container_name")
# names that Prometheus gives to pod labels if the scrape target has pod labels, too
# (honor_labels: false)
EXPORTED = ("exported_namespace", "exported_pod", "exported_container")
JOB_LABEL = "hpc_job"
NAMELESS_LABELS = ("pod_uid", "container_id")  # identify a holder whose pod name is unknown
HOLDER_LABELS = frozenset(
    {
        *POD_LABELS,
        *OLD_POD_LABELS,
        JOB_LABEL,
        *NAMELESS_LABELS,
        "vgpu",
        "dra_claim_name",
        "dra_claim_namespace",
        "dra_device_name",
        "dra_driver_name",
        "dra_pool_name",
        "dra_mig_device_uuid",
        "dra_mig_profile",
    }
)
"""Labels that describe the holder of a device, in all versions of dcgm-exporter and podgpu."""
_DEVICE_LABELS = {"gpu", "UUID", "pci_bus_id", "device", "modelName", "GPU_I_PROFILE", "GPU_I_ID"}
_HOST_LABELS = {"Hostname", "hostname"}
_EVENT_LABELS = {"err_code", "err_msg", "window_size_in_ms", "xid", "clock_event", "le"}
_HEALTH_LABELS = {
    "health_watch",
    "health_error_code",
    "health_error_severity",
    "health_error_category",
}
_LINK_LABELS = {"peer_gpu", "link_status"}
_RESERVED = HOLDER_LABELS.union(
    _DEVICE_LABELS, _HOST_LABELS, _EVENT_LABELS, _HEALTH_LABELS, _LINK_LABELS
)
"""Label names of dcgm-exporter and podgpu. A Kubernetes pod label with such a name is renamed."""


@dataclass(frozen=True)
class Policy:
    """The user's settings for series and labels."""

    counters: tuple[CounterSpec, ...] = ()
    hostname: str = ""  # if empty, series have no host label
    hostname_labels: tuple[str, ...] = ("Hostname",)
    # label names of dcgm-exporter 1.x: uuid, pod_name, pod_namespace, container_name
    old_namespace: bool = False
    replace_blanks_in_model_name: bool = False
    pod_uid: bool = False
    # if False, DCGM series have no pod labels; podgpu's own series always have them
    dcgm_holders: bool = True
    virtual_gpus: bool = False  # render one series per holder of a device
    # repeat the GPU's values on its MIG instances, as dcgm-exporter does
    copy_parent_values: bool = False
    gpu_manager: bool = False
    # % of time that one container must wait for another to get a series; 0: no such series
    wait_pairs: int = 0
    process_metrics: bool = False  # render the process_* families
    xid_window_ms: int = 300_000
    clock_window_ms: int = 300_000

    @cached_property
    def field_ids(self) -> frozenset[int]:
        return frozenset(counter.field.id for counter in self.counters)

    @cached_property
    def host(self) -> Pairs:
        if not self.hostname:
            return ()
        return tuple((label, self.hostname) for label in self.hostname_labels)

    def model_name(self, model: str) -> str:
        if self.replace_blanks_in_model_name:
            return re.sub(r"\s+", "-", model.strip())
        return model


make_labels = lru_cache(maxsize=2048)(Labels)
"""Creates `Labels` from a tuple of pairs. Cached, because most labels are the same in every scrape.
"""


def visible_devices(state: NodeState) -> list[tuple[DeviceState, GpuOrInstance]]:
    return [(gpu, device) for gpu, device in all_devices(state) if not device.hidden]


def assigned_holders(device: GpuOrInstance) -> list[Holder]:
    """Returns the holders that have the device allocated.

    Omits workloads that use it without an allocation.
    """
    return [holder for holder in device.holders if holder.source]


def device_names(gpu: DeviceState, device: GpuOrInstance, policy: Policy) -> dict[str, str]:
    """Returns the labels of a GPU or a MIG instance, in dcgm-exporter's order."""
    names = {
        "gpu": "" if gpu.index is None else str(gpu.index),
        "UUID": gpu.uuid,
        "pci_bus_id": gpu.pci_bus_id,
        "device": device_name(gpu.maker, gpu.index),
        "modelName": policy.model_name(gpu.model),
    }

    if isinstance(device, MigInstance):
        names |= {"GPU_I_PROFILE": device.profile, "GPU_I_ID": str(device.id)}
    names.update(policy.host)
    return names


def holder_pairs(holder: Workload, policy: Policy) -> list[tuple[str, str]]:
    """Returns the holder's labels in DCGM series and usage series. Omits empty labels."""
    names = holder_names(holder, OLD_POD_LABELS if policy.old_namespace else POD_LABELS)
    if policy.pod_uid and not holder.job:
        names["pod_uid"] = holder.uid
    return [(name, text) for name, text in names.items() if text]


def holder_names(holder: Workload, pod_labels: tuple[str, ...] = POD_LABELS) -> dict[str, str]:
    """Returns the holder's labels in podgpu's allocation families.

    Keeps empty labels. Without them, Prometheus (honor_labels: true) would add the labels of the
    exporter's own pod.
    """
    if holder.job:
        return {JOB_LABEL: holder.job}
    namespace, pod, container = pod_labels
    names = {namespace: holder.namespace, pod: holder.pod, container: holder.container}
    if not holder.pod:
        names["pod_uid"] = holder.uid
        names["container_id"] = holder.container_id

    return names


def dcgm_labels(
    names: Mapping[str, str],
    policy: Policy,
    attributes: Iterable[tuple[str, str]] = (),
    label_values: Pairs = (),
    pod_labels: Mapping[str, str] | None = None,
) -> Labels:
    """Builds the labels of a DCGM series in dcgm-exporter's order.

    `attributes`: the holder's labels.
    """
    pairs = list(names.items())
    if policy.old_namespace:
        pairs = [("uuid" if name == "UUID" else name, text) for name, text in pairs]
    own = sorted(attributes)
    # Most series have neither, and finding the names that are taken is slow.
    if label_values or pod_labels:
        used = [*pairs, *label_values, *own]
        taken = _RESERVED.union(name for name, _ in used)
        renamed = _rename_pod_labels(taken, pod_labels or {})
        pairs += sorted([*label_values, *renamed.items()])

    return make_labels((*pairs, *own))


def _rename_pod_labels(taken: frozenset[str], pod_labels: Mapping[str, str]) -> dict[str, str]:
    """Renames pod labels whose name is taken, as dcgm-exporter does since 4.8.3.

    The new name is `pod_label_<name>`, or `pod_label_<name>_conflict1` and so on.
    """
    labels = {name: text for name, text in pod_labels.items() if name not in taken}
    for name, text in pod_labels.items():
        if name not in taken:
            continue

        new = f"pod_label_{name}"
        conflicts = 0
        while new in labels or new in taken:
            conflicts += 1
            new = f"pod_label_{name}_conflict{conflicts}"

        labels[new] = text

    return labels


def with_attributes(labels: Labels, more: Iterable[tuple[str, str]]) -> Labels:
    """Adds labels such as err_code.

    They are sorted together with the holder's labels, as in dcgm-exporter.
    """
    pairs = labels.pairs
    first = 0  # label of the holder
    while first < len(pairs) and pairs[first][0] not in HOLDER_LABELS:
        first += 1

    attributes = sorted([*pairs[first:], *more])
    return make_labels((*pairs[:first], *attributes))
