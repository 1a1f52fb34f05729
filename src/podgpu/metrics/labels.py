"""The labels of devices and holders, in dcgm-exporter's names and order, and the user's settings
for them.

The families of dcgm-exporter (`dcgm.py`) and podgpu's own families (`render.py`) use the same
labels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from podgpu.metrics.counters import CounterSpec
from podgpu.metrics.encode import Labels
from podgpu.model import DeviceState, GpuOrInstance, Holder, MigInstance, NodeState, Workload

LabelPairs = tuple[tuple[str, str], ...]
POD_LABELS = ("namespace", "pod", "container")
OLD_POD_LABELS = (
    "pod_namespace",
    "pod_name",
    "container_name",
)  # pod labels of dcgm-exporter 1.x, used with `-o`
EXPORTED = tuple(f"exported_{name}" for name in POD_LABELS)
"""Names that Prometheus gives to pod labels if the scrape target has pod labels, too (honor_labels:
false).
"""
JOB_LABEL = "hpc_job"
NAMELESS_LABELS = (
    "pod_uid",
    "container_id",
)  # labels that identify a holder whose pod name is unknown
HOLDER_LABELS = frozenset(
    {*POD_LABELS, *OLD_POD_LABELS, JOB_LABEL, *NAMELESS_LABELS, "vgpu"}
    | {
        f"dra_{part}"
        for part in ("claim_name", "claim_namespace", "device_name", "driver_name", "pool_name")
    }
    | {"dra_mig_device_uuid", "dra_mig_profile"}
)
"""Labels that describe the holder of a device, in all versions of dcgm-exporter and podgpu."""
_RESERVED = HOLDER_LABELS | {
    *(
        "gpu",
        "UUID",
        "pci_bus_id",
        "device",
        "modelName",
        "GPU_I_PROFILE",
        "GPU_I_ID",
        "Hostname",
        "hostname",
    ),
    *("err_code", "err_msg", "window_size_in_ms", "xid", "clock_event", "le"),
    *("health_watch", "health_error_code", "health_error_severity", "health_error_category"),
    *("peer_gpu", "link_status"),
}
"""Label names that dcgm-exporter or podgpu uses. A Kubernetes pod label with one of these names is
renamed.
"""


@dataclass(frozen=True)
class Policy:
    """The user's settings for series and labels."""

    counters: tuple[CounterSpec, ...] = ()
    hostname: str = ""  # if empty, series have no host label
    hostname_labels: tuple[str, ...] = ("Hostname",)
    old_namespace: bool = (
        False  # label names of dcgm-exporter 1.x: uuid, pod_name, pod_namespace, container_name
    )
    replace_blanks_in_model_name: bool = False
    pod_uid: bool = False
    dcgm_holders: bool = (
        True  # if False, DCGM series have no pod labels; podgpu's own series always have them
    )
    virtual_gpus: bool = False  # render one series per holder of a device
    copy_parent_values: bool = (
        False  # repeat the GPU's values on its MIG instances, as dcgm-exporter does
    )
    gpu_manager: bool = False
    wait_pairs: int = (
        0  # % of time that one container must wait for another to get a series; 0: no such series
    )
    process_metrics: bool = False  # render the process_* families
    xid_window_ms: int = 300_000
    clock_window_ms: int = 300_000

    @cached_property
    def field_ids(self) -> frozenset[int]:
        return frozenset(counter.field.id for counter in self.counters)

    @cached_property
    def host(self) -> LabelPairs:
        return (
            tuple((label, self.hostname) for label in self.hostname_labels) if self.hostname else ()
        )

    def model_name(self, model: str) -> str:
        return re.sub(r"\s+", "-", model.strip()) if self.replace_blanks_in_model_name else model


make_labels = lru_cache(maxsize=2048)(Labels)
"""Creates `Labels` from a tuple of pairs. Results are cached, because most labels are the same in
every scrape.
"""


def all_devices(state: NodeState) -> Iterator[tuple[DeviceState, GpuOrInstance]]:
    """Yields pairs of GPU and device. The device is the GPU itself or one of its MIG instances."""
    for gpu in state.devices:
        yield gpu, gpu
        yield from ((gpu, instance) for instance in gpu.instances)


def visible_devices(state: NodeState) -> list[tuple[DeviceState, GpuOrInstance]]:
    return [(gpu, device) for gpu, device in all_devices(state) if not device.hidden]


def assigned_holders(device: GpuOrInstance) -> list[Holder]:
    """Returns the holders that have the device allocated. Omits workloads that use it without an
    allocation.
    """
    return [holder for holder in device.holders if holder.source]


def device_names(gpu: DeviceState, device: GpuOrInstance, policy: Policy) -> dict[str, str]:
    """Returns the labels of a GPU or a MIG instance, in dcgm-exporter's order."""
    index = "" if gpu.index is None else str(gpu.index)
    names = {
        "gpu": index,
        "UUID": gpu.uuid,
        "pci_bus_id": gpu.pci_bus_id,
        "device": index and f"{gpu.maker}{index}",
        "modelName": policy.model_name(gpu.model),
    }
    if isinstance(device, MigInstance):
        names |= {"GPU_I_PROFILE": device.profile, "GPU_I_ID": str(device.id)}
    return {**names, **dict(policy.host)}


def holder_pairs(holder: Workload, policy: Policy) -> list[tuple[str, str]]:
    """Returns the holder's labels in DCGM series and usage series. Omits empty labels."""
    names = holder_names(holder, OLD_POD_LABELS if policy.old_namespace else POD_LABELS)
    if policy.pod_uid and not holder.job:
        names[NAMELESS_LABELS[0]] = holder.uid
    return [pair for pair in names.items() if pair[1]]


def holder_names(holder: Workload, pod_labels: tuple[str, ...] = POD_LABELS) -> dict[str, str]:
    """Returns the holder's labels in podgpu's allocation families.

    Keeps empty labels. Without them, Prometheus (honor_labels: true) would add the labels of the
    exporter's own pod.
    """
    if holder.job:
        return {JOB_LABEL: holder.job}
    names = dict(zip(pod_labels, (holder.namespace, holder.pod, holder.container), strict=True))
    nameless = zip(NAMELESS_LABELS, (holder.uid, holder.container_id), strict=True)
    return names if holder.pod else {**names, **dict(nameless)}


def dcgm_labels(
    names: Mapping[str, str],
    policy: Policy,
    attributes: Iterable[tuple[str, str]] = (),
    label_values: LabelPairs = (),
    pod_labels: Mapping[str, str] | None = None,
) -> Labels:
    """Builds the labels of a DCGM series in dcgm-exporter's order. `attributes`: the holder's
    labels.
    """
    pairs = [
        ("uuid" if policy.old_namespace and name == "UUID" else name, text)
        for name, text in names.items()
    ]
    attributes = sorted(attributes)
    if label_values or pod_labels:
        taken = _RESERVED.union(name for name, _ in (*pairs, *label_values, *attributes))
        pairs += sorted((*label_values, *_rename_pod_labels(taken, pod_labels or {})))
    return make_labels((*pairs, *attributes))


def _rename_pod_labels(
    taken: frozenset[str], pod_labels: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Renames pod labels whose name is in `taken` to `pod_label_<name>`, as dcgm-exporter does
    since 4.8.3.
    """
    free = {name: text for name, text in pod_labels.items() if name not in taken}
    yield from free.items()
    for name, text in pod_labels.items():
        if name in taken:
            names = (
                f"pod_label_{name}",
                *(f"pod_label_{name}_conflict{n}" for n in range(1, len(pod_labels) + 1)),
            )
            new = next(
                candidate for candidate in names if candidate not in free and candidate not in taken
            )
            free[new] = text
            yield new, text


def with_attributes(labels: Labels, *more: tuple[str, str]) -> Labels:
    """Adds labels such as err_code. They are sorted together with the holder's labels, as in
    dcgm-exporter.
    """
    cut = next(
        (i for i, (name, _) in enumerate(labels.pairs) if name in HOLDER_LABELS), len(labels.pairs)
    )
    return make_labels((*labels.pairs[:cut], *sorted((*labels.pairs[cut:], *more))))
