"""Builds `NodeState` documents from the metrics of dcgm-exporter or podgpu.

The input is metrics text or results of Prometheus queries. DCGM fields get the name and unit of
dcgm-exporter 4.8.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from podgpu.metrics.conditions import (
    FIELD_CONDITIONS,
    LOST,
    XID,
    conditions,
    field_detail,
    xid_spec,
)
from podgpu.metrics.encode import FamilySpec, families_in
from podgpu.metrics.fields import (
    DEVICE_LEVELS,
    KEY_FIELDS,
    POWER,
    TOTAL_ENERGY,
    XID_NAME,
    Meaning,
    fields,
    meaning,
)
from podgpu.metrics.labels import EXPORTED, JOB_LABEL, NAMELESS_LABELS, OLD_POD_LABELS, POD_LABELS
from podgpu.metrics.parse import ParsedSample, parse_text
from podgpu.metrics.values import device_figures, gpu_figures, is_within_unit
from podgpu.model import (
    RESERVATION,
    NodeState,
    PodName,
    Workload,
    WorkloadKey,
    convert_node,
    device_key,
    select_keys,
)

NODE_LABELS = ("Hostname", "hostname", "node", "instance")
UUID_LABELS = ("UUID", "uuid", "gpu_uuid")
MODEL_LABELS = ("modelName", "model_name")
GPU_LABELS = (*UUID_LABELS, "gpu")  # labels that identify the GPU; the first one present is used
IDENTITY = {
    "gpu": "index",
    "pci_bus_id": "pci_bus_id",
    "device": "device",
    "GPU_I_PROFILE": "profile",
    **dict.fromkeys(UUID_LABELS, "uuid"),
    **dict.fromkeys(MODEL_LABELS, "model"),
}
"""Label -> key of `_ScrapedDevice.identity`."""
_MAX_IDENTITY = 5  # labels of a whole GPU, which has no profile
# labels for (namespace, pod, container); the first row whose pod label is present is used
POD_LABEL_VARIANTS = (
    EXPORTED,  # names after Prometheus renamed them (honor_labels: false)
    POD_LABELS,
    OLD_POD_LABELS,
)
WORKLOAD_LABELS = (
    *EXPORTED,
    *POD_LABELS,
    *OLD_POD_LABELS,
    JOB_LABEL,
    *NAMELESS_LABELS,
    "vgpu",
)
TARGET_LABELS = ("job", "instance")
# distinguish the two Prometheus servers of an HA pair
REPLICA_LABELS = ("prometheus_replica", "replica")
_MAX_AMOUNT = 2**63 - 1024  # largest float below 2**63, the limit of `Amount`
DCGM_BLANK = 0x7FFFFFF0  # the smallest of DCGM's codes for "no value"
_DIVIDED_FIELDS = {POWER, TOTAL_ENERGY}  # podgpu splits power and energy among virtual GPUs
_CONDITION_FIELDS = {
    fields()[number].name: condition for number, condition in FIELD_CONDITIONS.items()
}

LabelMap = Mapping[str, str]


# Rules that determine where a sample is stored in `NodeState`


@cache
def rules_for(keep_fields: frozenset[str] | None) -> dict[str, FamilySpec | Meaning]:
    """Returns the rule for each known metric.

    The rule is a `FamilySpec` for podgpu's metrics, and a `Meaning` for DCGM fields. `keep_fields`:
    DCGM fields to store, besides those that podgpu needs. If None, all fields are stored.
    """
    needed = {*KEY_FIELDS, *_CONDITION_FIELDS, XID_NAME, *(keep_fields or ())}
    rules: dict[str, FamilySpec | Meaning] = {}
    for name, spec in families_in("exporter").items():
        if spec.part:
            rules[name] = spec

    for declared in fields().values():
        is_number_of_device = declared.level in DEVICE_LEVELS and declared.type != "text"
        # What an exporter counts itself has several series per device.
        if not is_number_of_device or declared.name.startswith("DCGM_EXP_"):
            continue
        for name in declared.names:
            field_meaning = meaning(name)
            if field_meaning is None:
                continue
            if keep_fields is None or field_meaning.field.name in needed:
                rules[name] = field_meaning
    return rules


# Builders collect samples, and convert them to `NodeState` at the end.


Members = dict[str, Any]
"""Members of `NodeState` or of a nested struct, by name. `convert_node` checks their types."""


@dataclass(slots=True)
class _ScrapedDevice:
    identity: dict[str, str] = field(default_factory=dict)
    # The value of each series, by field and holder (or ()).
    series: dict[str, dict[WorkloadKey, float]] = field(default_factory=dict)
    # DCGM fields with text values, which are exported as labels
    texts: dict[str, str] = field(default_factory=dict)
    usage: Members = field(default_factory=dict)
    holders: dict[WorkloadKey, Members] = field(default_factory=dict)
    conditions: dict[str, Members] = field(default_factory=dict)
    instances: dict[int, _ScrapedDevice] = field(default_factory=dict)

    # Set when all samples have been added.
    values: dict[str, float] = field(default_factory=dict)  # by field
    holder_source: str = ""  # of holders whose labels name no source

    def list_parts(self) -> list[_ScrapedDevice]:
        """Returns the GPU and its MIG instances."""
        return [self, *self.instances.values()]

    def build_gpu(self, keep_fields: frozenset[str] | None) -> Members:
        """Returns the fields of `DeviceState`."""
        present = self.conditions
        is_lost = LOST in present

        instances = []
        for number, builder in self.instances.items():
            instance = builder.build_device(keep_fields, is_lost)
            instances.append({"id": number, **instance})

        maker, number_in_name = _split_device_name(self.identity.get("device", ""))
        index = self.identity.get("index") or number_in_name
        is_empty = not (self.values or present or self.holders or self.usage)

        return {
            **self.build_device(keep_fields, is_lost),
            **gpu_figures(self.values),
            "index": _parse_integer(index),
            "maker": maker or "nvidia",
            "conditions": [present[name] for name in conditions() if name in present],
            "last_holders": [holder for holder in self.holders.values() if "is_last" in holder],
            "mig_enabled": bool(instances),
            # Only instances of the GPU have series.
            "hidden": bool(instances) and is_empty,
            "instances": instances,
        }

    def build_device(self, keep_fields: frozenset[str] | None, is_lost: bool) -> Members:
        """Returns the fields that GPUs and MIG instances have in common (`GpuOrInstance`)."""
        stored: dict[str, float | str] = {**self.texts, **self.values}
        if keep_fields is not None:
            stored = select_keys(stored, keep_fields)

        holders = self._build_holders()
        # Nobody can use a lost GPU, but its allocation stays.
        if is_lost:
            holders = [holder for holder in holders if holder.get("source")]
        return {
            **self.identity,
            **device_figures(self.values),
            "usage": self.usage or None,
            "holders": holders,
            "fields": stored if self.values else None,
            "last_xid": int(self.values.get(XID_NAME, 0)) or None,
        }

    def _build_holders(self) -> list[Members]:
        holders = []
        for key, holder in self.holders.items():
            if "is_last" in holder:
                continue
            # A reservation names no workload.
            if not key:
                holder = {"source": RESERVATION}
            holders.append({"source": self.holder_source, **holder})

        return holders


def _resolve_podgpu(gpu: _ScrapedDevice) -> None:
    """Sets the values in podgpu's metrics.

    If only a device's holders have series, these are added up or, for values of the whole device,
    the maximum is taken.
    """
    for device in gpu.list_parts():
        for name, by_holder in device.series.items():
            merge = sum if name in _DIVIDED_FIELDS else max
            device.values[name] = merge(_select_values(by_holder))


def _resolve_dcgm_exporter(gpu: _ScrapedDevice) -> None:
    """Sets the values in dcgm-exporter's metrics, and what it does not report itself.

    It repeats a device's value for each holder. If these values are not all equal, the field is
    omitted.
    """
    for device in gpu.list_parts():
        device.holder_source = "dcgm-exporter"
        for name, by_holder in device.series.items():
            distinct = set(_select_values(by_holder))
            if len(distinct) == 1:
                device.values[name] = distinct.pop()

    gpu.conditions = _read_conditions([device.values for device in gpu.list_parts()])


def _select_values(by_holder: Mapping[WorkloadKey, float]) -> Collection[float]:
    """Returns the value of the whole device if it has a series, otherwise those of its holders."""
    if () in by_holder:
        return [by_holder[()]]
    return by_holder.values()


def _split_device_name(name: str) -> tuple[str, str]:
    """Returns maker and index: `nvidia` and `0` for `nvidia0`."""
    maker = name.rstrip("0123456789")
    return maker, name.removeprefix(maker)


class _NodeBuilder:
    def __init__(self, own_pods: Collection[PodName]) -> None:
        self._own_pods = own_pods
        # by UUID, or by index if unknown
        self._gpus: dict[str, _ScrapedDevice] = defaultdict(_ScrapedDevice)
        self._members: Members = {}
        self._sources: dict[str, float] = {}
        self._namespaces: dict[tuple[str, str, str], Members] = defaultdict(dict)

    def add_field(self, rule: Meaning, sample: ParsedSample) -> None:
        found = self._find_device(sample.labels)
        value = rule.value(sample.value)
        # Other fields, such as energy and bytes, may be as large as a DCGM code.
        limit = DCGM_BLANK if rule.field.name in KEY_FIELDS else _MAX_AMOUNT
        is_possible = 0 <= value < limit and is_within_unit(rule.field, value)
        if found is None or not is_possible:
            return
        gpu, device, holder = found
        key = () if holder is None else holder.key
        if device is not gpu and not rule.field.per_instance:
            # dcgm-exporter repeats the GPU's values on its MIG instances.
            device = gpu
            key = ()

        by_holder = device.series.setdefault(rule.field.name, {})
        by_holder[key] = int(value) if value.is_integer() else value

        if not device.texts:
            device.texts = _read_texts(sample.labels)

    def add_own(self, spec: FamilySpec, sample: ParsedSample) -> None:
        labels = sample.labels
        value = sample.value * (spec.factor or 1)
        members = self._find_members(spec.part, labels)
        if members is None:
            return

        if spec.part == "conditions":
            name = labels["condition"]
            since = value if value >= 0 else None
            members[name] = {"name": name, "since": since, "detail": labels.get("detail", "")}
        elif spec.is_text:
            members[spec.member] = labels.get(spec.member, "")
        elif 0 <= value < _MAX_AMOUNT:
            member = spec.member
            if "{" in member:
                # A missing label counts as empty, so that no member has this name.
                member = member.format_map(defaultdict(str, labels))
            members[member] = round(value) if spec.factor else value

    def _find_members(self, part: str, labels: LabelMap) -> Members | None:
        """Returns the dict in which a sample is stored, or None if the labels identify none."""
        if part == "node":
            return self._members
        if part == "sources":
            return self._sources
        if part == "namespaces":
            return self._find_namespace(labels)

        found = self._find_device(labels)
        if found is None:
            return None
        gpu, device, workload = found
        if part == "conditions":
            # Ignores unknown conditions, which a newer podgpu may report.
            is_known = labels.get("condition") in conditions()
            return gpu.conditions if is_known else None

        if part == "device_totals":
            return device.usage
        if workload is None:
            return None

        holder = device.holders[workload.key]
        if part != "holder_usage":
            return holder
        usage: Members = holder.setdefault("usage", {})
        return usage

    def _find_namespace(self, labels: LabelMap) -> Members | None:
        namespace = labels.get("exported_namespace") or labels.get("namespace")
        if not namespace:
            return None
        model, _, profile = labels.get("modelName", "").partition(" MIG ")
        return self._namespaces[namespace, model, profile]

    def _find_device(
        self, labels: LabelMap
    ) -> tuple[_ScrapedDevice, _ScrapedDevice, Workload | None] | None:
        """Returns the GPU, the device and the holder. None if the labels name no GPU.

        The device is the GPU itself or one of its MIG instances.
        """
        gpu_id = read_gpu_id(labels)
        instance = labels.get("GPU_I_ID", "")
        number = _parse_integer(instance)
        if not gpu_id or (instance and number is None):
            return None

        gpu = self._gpus[gpu_id]
        device = gpu if number is None else gpu.instances.setdefault(number, _ScrapedDevice())
        for builder in (gpu, device):
            # Not every series has all labels.
            if len(builder.identity) < _MAX_IDENTITY:
                for label, name in IDENTITY.items():
                    if labels.get(label):
                        builder.identity[name] = labels[label]

        return gpu, device, self._add_holder(device, labels)

    def _add_holder(self, device: _ScrapedDevice, labels: LabelMap) -> Workload | None:
        """Adds the holder that the labels name, and returns it. None if they name none.

        The holder of a reservation is unknown, so it has no names.
        """
        workload = read_workload(labels, self._own_pods)
        if workload is None and labels.get("source") != RESERVATION:
            return None
        # A pod that only reserves the GPU is not its holder.
        if workload is None or workload.is_reservation:
            workload = Workload()

        holder = device.holders.setdefault(workload.key, msgspec.structs.asdict(workload))
        if "vgpu" in labels:
            holder["replica"] = labels["vgpu"]
        if "dra_claim_name" in labels:
            dra = {name: value for name, value in labels.items() if name.startswith("dra_")}
            holder["labels"] = dra

        return workload

    def build(
        self, name: str, keep_fields: frozenset[str] | None, scraped_at: float | None
    ) -> NodeState:
        """Builds the document.

        Raises msgspec.ValidationError if a value exceeds a limit of `NodeState`.
        """
        is_podgpu = "version" in self._members
        resolve = _resolve_podgpu if is_podgpu else _resolve_dcgm_exporter
        devices = []
        for gpu in self._gpus.values():
            resolve(gpu)
            devices.append(gpu.build_gpu(keep_fields))
        devices.sort(key=lambda gpu: (gpu["index"] is None, gpu["index"], gpu.get("uuid", "")))

        namespaces = []
        for (namespace, model, profile), usage in self._namespaces.items():
            identity = {"namespace": namespace, "model": model, "profile": profile}
            namespaces.append(identity | usage)

        document = {
            "taken_at": scraped_at,
            **self._members,
            "producer": "podgpu" if is_podgpu else "dcgm-exporter",
            "node": name,
            "simulated": "simulated" in self._sources,
            "devices": devices,
            "namespaces": namespaces,
            "sources": self._build_sources(devices),
        }
        return convert_node(document)

    def _build_sources(self, devices: Iterable[Members]) -> list[Members]:
        # The worker `gpu0` reads the GPU with the index 0.
        uuids = {}
        for gpu in devices:
            worker = f"gpu{gpu['index']}"
            uuids[worker] = gpu.get("uuid", "")

        sources = []
        for source, up in self._sources.items():
            uuid = uuids.get(source, "")
            sources.append({"name": source, "up": up > 0, "device": uuid})

        return sources


def read_workload(labels: LabelMap, own_pods: Collection[PodName] = ()) -> Workload | None:
    """Returns the holder that the labels identify, or None.

    `own_pods`: the exporter's pods, which are ignored. Prometheus adds their names to series
    without a pod label.
    """
    if job := labels.get(JOB_LABEL):
        return Workload(job=job)

    for namespace_label, pod_label, container_label in POD_LABEL_VARIANTS:
        pod = labels.get(pod_label)
        if not pod:
            continue
        namespace = labels.get(namespace_label, "")
        if pod_label != "pod" or (namespace, pod) not in own_pods:
            return Workload(namespace, pod, labels.get(container_label, ""))

    uid = labels.get("pod_uid", "")
    container_id = labels.get("container_id", "")
    if not uid and not container_id:
        return None

    name = labels.get("exported_container", "")
    # With the label `pod` of the exporter's own pod, `container` is the exporter's, too.
    if not name and not labels.get("pod"):
        name = labels.get("container", "")
    return Workload(container=name, uid=uid, container_id=container_id)


def first_label(labels: LabelMap, names: Iterable[str]) -> str:
    """Returns the first label of `names` that is set, or an empty string."""
    for name in names:
        value = labels.get(name)
        if value:
            return value
    return ""


def read_gpu_id(labels: LabelMap) -> str:
    """Returns the GPU's UUID or index, or an empty string if the series belongs to no GPU."""
    # Called for every sample. `first_label` takes five times as long.
    get = labels.get
    return get("UUID") or get("uuid") or get("gpu_uuid") or get("gpu", "")


def read_device_key(labels: LabelMap) -> str:
    """Returns `Device.key` of the GPU or MIG instance, or an empty string without a UUID."""
    uuid = first_label(labels, UUID_LABELS)
    return uuid and device_key(uuid, _parse_integer(labels.get("GPU_I_ID", "")))


def _read_conditions(devices: Iterable[dict[str, float]]) -> dict[str, Members]:
    """Derives a GPU's conditions from dcgm-exporter's fields. Their start times are unknown."""
    present: dict[str, Members] = {}
    for values in devices:
        for name, value in values.items():
            if not 0 < value < DCGM_BLANK:
                continue

            condition = _CONDITION_FIELDS.get(name)
            if condition:
                detail = field_detail(condition, value)
                present.setdefault(condition, {"name": condition, "detail": detail})
            elif name == XID_NAME and xid_spec(int(value)).needs_action:
                present.setdefault(XID, {"name": XID, "detail": str(int(value))})

    return present


def _read_texts(labels: LabelMap) -> dict[str, str]:
    """Returns the DCGM fields with text values, which are exported as labels."""
    texts = {}
    for name, text in labels.items():
        if name.startswith("DCGM_FI_"):
            field_meaning = meaning(name)
            if field_meaning is not None:
                texts[field_meaning.field.name] = text
    return texts


def _parse_integer(text: str) -> int | None:
    if text.isascii() and text.isdecimal() and len(text) <= 9:
        return int(text)
    return None


# Entry points


def node_from_samples(
    samples: Iterable[ParsedSample],
    address: str = "",
    *,
    own_pods: Collection[PodName] = (),
    scraped_at: float | None = None,
    keep_fields: frozenset[str] | None = None,
    node_labels: Sequence[str] = NODE_LABELS,
) -> list[NodeState]:
    """Builds one `NodeState` per node from the samples of one scrape target.

    If no sample has a node label, the node's name is `address`. Raises msgspec.ValidationError if a
    value is too large.
    """
    rules = rules_for(keep_fields)
    relevant = [sample for sample in samples if sample.name in rules]

    states = []
    for name, own in _split_by_node(relevant, node_labels, address).items():
        builder = _NodeBuilder(own_pods)
        for sample in own:
            rule = rules[sample.name]
            if isinstance(rule, FamilySpec):
                builder.add_own(rule, sample)
            else:
                builder.add_field(rule, sample)

        states.append(builder.build(name, keep_fields, scraped_at))

    return states


def _split_by_node(
    samples: list[ParsedSample], node_labels: Sequence[str], address: str
) -> dict[str, list[ParsedSample]]:
    """Groups samples by node.

    A sample without a node label belongs to its GPU's node, else to the most common node.
    """
    label = _find_node_label(samples, node_labels)
    node_of_gpu: dict[str, str] = {}
    for sample in samples:
        if name := sample.labels.get(label):
            node_of_gpu[read_gpu_id(sample.labels)] = name

    usual = address
    if node_of_gpu:
        usual = Counter(node_of_gpu.values()).most_common(1)[0][0]

    groups: dict[str, list[ParsedSample]] = {usual: []}
    for sample in samples:
        name = sample.labels.get(label) or node_of_gpu.get(read_gpu_id(sample.labels), usual)
        groups.setdefault(name, []).append(sample)

    return groups


def _find_node_label(samples: list[ParsedSample], node_labels: Sequence[str]) -> str:
    for label in node_labels:
        if any(label in sample.labels for sample in samples):
            return label
    return ""


def samples_in(text: str) -> Iterator[ParsedSample]:
    """Returns the samples in metrics text. Raises BadExposition if the text is malformed."""
    families = parse_text(text)
    return chain.from_iterable(family.samples for family in families)


class TargetState(NamedTuple):
    """A document built from the Prometheus series of one target."""

    cluster: str
    instance: str
    scraped_at: float | None
    state: NodeState


_CopyKey = tuple[tuple[str, ...], tuple[str, ...]]
"""Values of the target labels, and of `REPLICA_LABELS`."""


class _Copies:
    """The samples of several queries, divided by target and replica."""

    def __init__(self, target_labels: Sequence[str]) -> None:
        self.samples: dict[_CopyKey, list[ParsedSample]] = defaultdict(list)
        self.times: dict[_CopyKey, float] = {}
        # The key has no cluster, because `up` may lack the cluster label.
        self.own_pods: dict[tuple[str, str], set[PodName]] = defaultdict(set)
        self._target_labels = target_labels

    def add(self, vector: Iterable[ParsedSample]) -> None:
        for sample in vector:
            name = sample.name
            get = sample.labels.get
            pod = get("pod")
            if pod is not None and _shows_own_pod(sample):
                exporter = get("job", ""), get("instance", "")
                self.own_pods[exporter].add((get("namespace", ""), pod))

            # Lists, because generators take longer.
            target = tuple([get(label, "") for label in self._target_labels])
            replica = tuple([get(label, "") for label in REPLICA_LABELS])
            # The result of a function, here `timestamp`, has no name.
            if not name:
                self.times[target, replica] = sample.value
            elif name != "up":
                self.samples[target, replica].append(sample)

    def sort(self) -> list[_CopyKey]:
        """Returns the copies, the oldest first."""
        return sorted(self.samples, key=lambda copy: (self.times.get(copy, 0.0), copy))


def _shows_own_pod(sample: ParsedSample) -> bool:
    """Returns True if the label `pod` is the name of the exporter's pod."""
    name = sample.name
    return name == "up" or "exported_pod" in sample.labels or name.startswith("podgpu_exporter_")


def nodes_from_vectors(
    vectors: Iterable[Iterable[ParsedSample]],
    *,
    keep_fields: frozenset[str] | None = None,
    node_labels: Sequence[str] = NODE_LABELS,
    cluster_label: str = "cluster",
) -> tuple[list[TargetState], dict[str, str]]:
    """Returns the documents of all targets, and error messages by instance.

    `vectors`: results of instant queries. If an HA pair of Prometheus servers provides two copies
    of a target, the newest copy is used. Samples of `up` identify the exporters' own pods. A sample
    without a metric name contains the time of a target's last scrape.
    """
    copies = _Copies((cluster_label, *TARGET_LABELS))
    for vector in vectors:
        copies.add(vector)

    newest: dict[tuple[tuple[str, ...], str], TargetState] = {}
    errors: dict[str, str] = {}
    for copy in copies.sort():
        target, _ = copy
        cluster, job, instance = target
        scraped_at = copies.times.get(copy)
        try:
            states = node_from_samples(
                copies.samples[copy],
                instance,
                own_pods=copies.own_pods[job, instance],
                scraped_at=scraped_at,
                keep_fields=keep_fields,
                node_labels=node_labels,
            )
        except msgspec.ValidationError as error:
            errors[instance] = str(error)
            continue

        # Replaces those of an older copy.
        for state in states:
            newest[target, state.node] = TargetState(cluster, instance, scraped_at, state)

    return list(newest.values()), errors
