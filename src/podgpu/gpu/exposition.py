"""Parses an exporter's metrics text and finds the GPUs in its labels, for all forms since dcgm-exporter 1.x."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from podgpu.errors import SourceError
from podgpu.http_client import check_is_metrics
from podgpu.metrics.families import HOLDER_LABELS
from podgpu.metrics.parse import BadExposition, ParsedFamily, ParsedSample, parse_text
from podgpu.model import Device

LabelSet = Mapping[str, str]
_UUIDS = ("UUID", "uuid", "gpu_uuid")
_MODELS = ("modelName", "model_name")
_OTHER_ENTITIES = ("nvlink", "nvswitch", "cpu", "cpucore")
_NVIDIA = re.compile(r"nvidia([0-9]{1,9})")
_NUMBER = re.compile(r"[0-9]{1,9}")
_MAX_PARTS = 200_000
"""Lines and labels of a text. Many times more than the largest node has; limits memory."""


@dataclass(frozen=True)
class ParsedExposition:
    families: tuple[ParsedFamily, ...]
    devices: tuple[Device, ...]
    """Each GPU before its MIG instances."""
    devices_by_labels: Mapping[int, Device]
    """id() of a sample's labels -> its device."""

    def find_device(self, sample: ParsedSample) -> Device | None:
        return self.devices_by_labels.get(id(sample.labels))


def parse_exposition(content: bytes, shown: str) -> ParsedExposition:
    """Raises SourceError: not_prometheus, malformed (with line and reason) or duplicate_series."""
    check_is_metrics(content, shown)
    try:
        families = tuple(parse_text(content.decode(), _MAX_PARTS))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise SourceError("malformed", f"{shown}: line {line}: byte {error.start} is not UTF-8") from error
    except BadExposition as error:
        raise SourceError("malformed", f"{shown}: {error}") from error
    label_sets = {id(s.labels): s.labels for family in families for s in family.samples}
    _check_duplicates(families, label_sets, shown)
    return ParsedExposition(families, *_find_devices(label_sets))


def _check_duplicates(families: Iterable[ParsedFamily], sets: Mapping[int, LabelSet], shown: str) -> None:
    """Raises SourceError if a series occurs twice with different values.

    Equal values are accepted: dcgm-exporter 4.8 repeats the PCIe bytes of its 1.x counters.
    """
    same = {key: frozenset(labels.items()) for key, labels in sets.items()}
    for family in families:
        keys = [(s.name, same[id(s.labels)]) for s in family.samples]
        if len(set(keys)) != len(keys):
            values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
            for key, sample in zip(keys, family.samples, strict=True):
                if not _equal(values.setdefault(key, sample.value), sample.value):
                    labels = ascii(dict(sample.labels))[:300]
                    why = f"{sample.name} occurs twice with different values: {labels}"
                    raise SourceError("duplicate_series", f"{shown}: {why}")


def _equal(left: float, right: float) -> bool:
    return left == right or (left != left and right != right)  # NaN


def _find_devices(label_sets: Mapping[int, LabelSet]) -> tuple[tuple[Device, ...], dict[int, Device]]:
    named = {key: device for key, labels in label_sets.items() if (device := _parse_device(labels)) is not None}
    devices: dict[str, Device] = {}
    for device in named.values():
        devices[device.key] = _combine(devices.get(device.key, device), device)
    instances = [d for d in devices.values() if d.is_instance]
    for instance in instances:  # dcgm-exporter shows only the instances of a GPU in MIG mode
        gpu = devices.get(instance.uuid) or replace(instance, gi_id=None, profile="", mig_uuids=())
        devices[instance.uuid] = replace(gpu, mig_enabled=True)
    gpus = sorted((d for d in devices.values() if not d.is_instance), key=lambda d: (d.index, d.uuid))
    of_gpu: dict[str, list[Device]] = {}
    for instance in sorted(instances, key=lambda d: d.gi_id or 0):
        of_gpu.setdefault(instance.uuid, []).append(instance)
    order = tuple(d for gpu in gpus for d in (gpu, *of_gpu.get(gpu.uuid, ())))
    return order, {key: devices[device.key] for key, device in named.items()}


def _parse_device(labels: LabelSet) -> Device | None:
    """Returns the GPU or MIG instance of a label set, None without a UUID or an index."""
    uuid = _first(labels, _UUIDS)
    index = _parse_index(labels)
    if not uuid or index is None:
        return None
    gi_id = labels.get("GPU_I_ID", "")
    return Device(
        index=index,
        uuid=uuid,
        pci_bus_id=labels.get("pci_bus_id", ""),
        model=_first(labels, _MODELS),
        gi_id=int(gi_id) if _NUMBER.fullmatch(gi_id) else None,
        profile=labels.get("GPU_I_PROFILE", ""),
        mig_uuids=tuple(uuid for uuid in (labels.get("dra_mig_device_uuid", ""),) if uuid),
    )


def _parse_index(labels: LabelSet) -> int | None:
    if _NUMBER.fullmatch(labels.get("gpu", "")):
        return int(labels["gpu"])
    match = _NVIDIA.fullmatch(labels.get("device", ""))
    return int(match[1]) if match else None


def _first(labels: LabelSet, names: Iterable[str]) -> str:
    return next((labels[name] for name in names if labels.get(name)), "")


def _combine(known: Device, more: Device) -> Device:
    """NVLink series lack some labels of other series."""
    if known == more:
        return known
    return replace(
        known,
        pci_bus_id=known.pci_bus_id or more.pci_bus_id,
        model=known.model or more.model,
        profile=known.profile or more.profile,
        mig_uuids=known.mig_uuids or more.mig_uuids,
    )


def is_of_device(labels: LabelSet) -> bool:
    """Returns False for links and other parts of a device."""
    return not any(name in labels for name in _OTHER_ENTITIES)


def names_holder(labels: LabelSet) -> bool:
    return not HOLDER_LABELS.isdisjoint(labels)


def select_copy(copies: Sequence[ParsedSample]) -> ParsedSample | None:
    """Series that differ only in their holder are copies of one figure.

    Returns the copy without a holder, or the value on which all agree, else None.
    """
    without_holder = [sample for sample in copies if not names_holder(sample.labels)]
    first, *others = without_holder or copies
    return first if all(_equal(sample.value, first.value) for sample in others) else None
