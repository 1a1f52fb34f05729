"""This module understands an exporter's text, and which GPUs its labels mean, in all forms since dcgm-exporter 1.x.

Several series of one device that differ only in who holds it are copies of one figure; `settled` says which it is.
"""

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
_MOST_PARTS = 200_000
"""Lines and labels of a text: many times what the largest node's has, and what a hostile one may cost in memory."""


@dataclass(frozen=True)
class ParsedExposition:
    """One exposition of one fetch."""

    families: tuple[ParsedFamily, ...]
    devices: tuple[Device, ...]
    """Each GPU before its MIG instances."""
    of_labels: Mapping[int, Device]
    """id of a sample's labels -> the device they name; other labels name no GPU."""

    def device_of(self, sample: ParsedSample) -> Device | None:
        return self.of_labels.get(id(sample.labels))


def parse_exposition(content: bytes, shown: str) -> ParsedExposition:
    """Raises SourceError: not_prometheus, malformed with line and reason, duplicate_series."""
    check_is_metrics(content, shown)
    try:
        families = tuple(parse_text(content.decode(), _MOST_PARTS))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise SourceError("malformed", f"{shown}: line {line}: byte {error.start} is not UTF-8") from error
    except BadExposition as error:
        raise SourceError("malformed", f"{shown}: {error}") from error
    label_sets = {id(s.labels): s.labels for family in families for s in family.samples}
    _refuse_duplicates(families, label_sets, shown)
    return ParsedExposition(families, *_find_devices(label_sets))


def _refuse_duplicates(families: Iterable[ParsedFamily], sets: Mapping[int, LabelSet], shown: str) -> None:
    """A series that comes twice with two values: which is true nobody can say.

    Twice with one value is harmless, and dcgm-exporter 4.8 itself does it with its 1.x counters (PCIe bytes).
    """
    same = {key: frozenset(labels.items()) for key, labels in sets.items()}
    for family in families:
        keys = [(s.name, same[id(s.labels)]) for s in family.samples]
        if len(set(keys)) != len(keys):
            values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
            for key, sample in zip(keys, family.samples, strict=True):
                if not _equal(values.setdefault(key, sample.value), sample.value):
                    labels = ascii(dict(sample.labels))[:300]
                    why = f"{sample.name} comes twice, with different values, for {labels}"
                    raise SourceError("duplicate_series", f"{shown}: {why}")


def _equal(left: float, right: float) -> bool:
    return left == right or (left != left and right != right)  # NaN


# Devices


def _find_devices(label_sets: Mapping[int, LabelSet]) -> tuple[tuple[Device, ...], dict[int, Device]]:
    named = {key: device for key, labels in label_sets.items() if (device := _device(labels)) is not None}
    known: dict[str, Device] = {}
    for device in named.values():
        known[device.key] = _united(known.get(device.key, device), device)
    instances = [d for d in known.values() if d.is_instance]
    for instance in instances:  # dcgm-exporter shows the instances of a GPU and not the GPU itself
        gpu = known.get(instance.uuid) or replace(instance, gi_id=None, profile="", mig_uuids=())
        known[instance.uuid] = replace(gpu, mig_enabled=True)
    gpus = sorted((d for d in known.values() if not d.is_instance), key=lambda d: (d.index, d.uuid))
    of_gpu: dict[str, list[Device]] = {}
    for instance in sorted(instances, key=lambda d: d.gi_id or 0):
        of_gpu.setdefault(instance.uuid, []).append(instance)
    order = tuple(d for gpu in gpus for d in (gpu, *of_gpu.get(gpu.uuid, ())))
    return order, {key: known[device.key] for key, device in named.items()}


def _device(labels: LabelSet) -> Device | None:
    """The GPU or MIG instance a label set names; without a UUID or a number it is none for sure."""
    uuid = _first(labels, _UUIDS)
    index = _index(labels)
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


def _index(labels: LabelSet) -> int | None:
    if _NUMBER.fullmatch(labels.get("gpu", "")):
        return int(labels["gpu"])
    match = _NVIDIA.fullmatch(labels.get("device", ""))
    return int(match[1]) if match else None


def _first(labels: LabelSet, names: Iterable[str]) -> str:
    return next((labels[name] for name in names if labels.get(name)), "")


def _united(known: Device, more: Device) -> Device:
    """What either says: NVLink series leave out what others have."""
    if known == more:
        return known
    return replace(
        known,
        pci_bus_id=known.pci_bus_id or more.pci_bus_id,
        model=known.model or more.model,
        profile=known.profile or more.profile,
        mig_uuids=known.mig_uuids or more.mig_uuids,
    )


# Copies


def is_of_device(labels: LabelSet) -> bool:
    """A figure of the device itself, not of a link or another part beside it."""
    return not any(name in labels for name in _OTHER_ENTITIES)


def names_holder(labels: LabelSet) -> bool:
    return not HOLDER_LABELS.isdisjoint(labels)


def settled(copies: Sequence[ParsedSample]) -> ParsedSample | None:
    """The figure behind several copies: the one that names no holder, else what all agree on; None: they do not."""
    of_nobody = [sample for sample in copies if not names_holder(sample.labels)]
    first, *others = of_nobody or copies
    return first if all(_equal(sample.value, first.value) for sample in others) else None
