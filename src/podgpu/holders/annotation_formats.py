"""This module reads the annotations in which schedulers note the GPUs they gave a pod: koordinator, HAMi, Volcano,
gpu-manager. Pure.

One function for each format, from a pod to what it was granted. Text that is not in the format is refused as a whole:
half an allocation would be a wrong one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction

from podgpu.errors import SourceError
from podgpu.holders import vcuda
from podgpu.json_shape import as_list, as_object, as_text
from podgpu.kube.objects import ContainerRecord, PodRecord, parse_quantity

KOORDINATOR_DEVICES = "scheduling.koordinator.sh/device-allocated"
HAMI_DEVICES = "hami.io/vgpu-devices-allocated"
HAMI_MIG_DEVICES = "hami.io/vgpu-mig-allocations"
HAMI_1_DEVICES = "4pd.io/vgpu-ids-new"
VOLCANO_DEVICES = "volcano.sh/vgpu-ids-new"
GPU_MANAGER_ASSIGNED = "tencent.com/gpu-assigned"
GPU_MANAGER_CARDS = "tencent.com/predicate-gpu-idx-"
"""Followed by the number of the container."""

_READ = frozenset(
    {
        KOORDINATOR_DEVICES,
        HAMI_DEVICES,
        HAMI_MIG_DEVICES,
        HAMI_1_DEVICES,
        VOLCANO_DEVICES,
        GPU_MANAGER_ASSIGNED,
    }
)
GPU_RESOURCES = (
    "nvidia.com/gpu",
    "nvidia.com/mig-",
    "nvidia.com/vgpu",
    "koordinator.sh/gpu",
    "tencent.com/vcuda-",
    "volcano.sh/vgpu",
    "4pd.io/vgpu",
)
"""How the resources begin by which a container asks for a GPU or a part of one."""

MIB = 1024 * 1024
VCUDA_MEMORY = 256 * MIB
"""What one unit of tencent.com/vcuda-memory stands for."""


def is_read(annotation: str) -> bool:
    """What a watcher of pods must keep of their annotations for the functions below."""
    return annotation in _READ or annotation.startswith(GPU_MANAGER_CARDS)


def asks_for_gpu(container: ContainerRecord) -> bool:
    return any(name.startswith(GPU_RESOURCES) and container.amount(name) for name, _ in container.requests)


@dataclass(frozen=True, slots=True)
class Grant:
    """One device, or a part of it, given to one container."""

    container: str | None
    """None: to the pod as a whole; which of its containers was meant is not said."""
    device: str | int
    """An id as it stands in the annotation, or N of /dev/nvidiaN."""
    key: str
    """The annotation that says so."""
    share: float | None = None
    memory: int | None = None
    """Bytes."""


class BadAnnotation(SourceError):
    """Text that is not in the format of its annotation. It costs the pod its devices, and no other pod anything."""

    def __init__(self, pod: PodRecord, key: str, what: str) -> None:
        super().__init__(
            "bad_annotation",
            f"the annotation {_one_line(key)} of pod {_one_line(pod.namespace)}/{_one_line(pod.name)} cannot be"
            f" understood ({_one_line(what)}): its GPUs have no holder until whatever writes the annotation is fixed",
        )
        self.key = key


def read_grants(pod: PodRecord) -> list[Grant]:
    """What the pod was given, by the first format that says anything: a pod has one scheduler."""
    for format_ in FORMATS:
        grants = format_(pod)
        if grants:
            return grants
    return []


@contextmanager
def _reading(pod: PodRecord, key: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, RecursionError) as error:  # ValueError: not JSON, not the shape, a number of 5,000 digits
        raise BadAnnotation(pod, key, str(error)) from error


def _one_line(text: str) -> str:
    shown = text if text.isprintable() else "".join(letter if letter.isprintable() else " " for letter in text)
    return " ".join(shown.split())[:253]


def _share(percent: Fraction | int) -> float | None:
    """None for 0, which is no limit, and for more than a whole device, which is no share."""
    return float(Fraction(percent) / 100) if 0 < percent <= 100 else None


def _optional_text(entry: dict[str, object], key: str, where: str) -> str:
    value = entry.get(key)
    return "" if value is None else as_text(value, f"{where}: {key}")


def _number(text: str, what: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise ValueError(f"{what} {text[:40]!a} is not a number")
    return int(text)


# koordinator


def koordinator_grants(pod: PodRecord) -> list[Grant]:
    """JSON: device type -> list of devices, for the pod as a whole. Other types than gpu are passed over."""
    with _reading(pod, KOORDINATOR_DEVICES):
        return [
            _koordinator_gpu(entry, f"gpu entry {number}") for number, entry in enumerate(_koordinator_gpus(pod), 1)
        ]


def koordinator_minors(pod: PodRecord) -> list[int]:
    """The minors koordinator's own hook writes into NVIDIA_VISIBLE_DEVICES; empty when an entry has none, beside its id
    or in its place."""
    with _reading(pod, KOORDINATOR_DEVICES):
        minors = [as_object(entry, "a gpu entry").get("minor") for entry in _koordinator_gpus(pod)]
        return [_minor(minor, "a gpu entry") for minor in minors] if all(type(minor) is int for minor in minors) else []


def _koordinator_gpus(pod: PodRecord) -> list[object]:
    text = pod.annotation(KOORDINATOR_DEVICES)
    return as_list(as_object(json.loads(text), "the whole").get("gpu"), "gpu") if text else []


def _koordinator_gpu(value: object, where: str) -> Grant:
    entry = as_object(value, where)
    asked = entry.get("resources")
    resources = {} if asked is None else as_object(asked, f"{where}: resources")
    core, ratio, memory = (
        _json_quantity(resources.get(f"koordinator.sh/{name}"), f"{where}: {name}")
        for name in ("gpu-core", "gpu-memory-ratio", "gpu-memory")
    )
    # Older versions write no id.
    device = _optional_text(entry, "id", where) or _minor(entry.get("minor"), where)
    return Grant(None, device, KOORDINATOR_DEVICES, _share(core) or _share(ratio), int(memory) or None)


def _json_quantity(value: object, where: str) -> Fraction:
    """Written as text; Kubernetes also takes plain numbers. 0 when it is not there."""
    if value is None:
        return Fraction(0)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return parse_quantity(str(value) if is_number else as_text(value, where))


def _minor(value: object, where: str) -> int:
    if type(value) is not int or not 0 <= value < 1_000_000:
        raise ValueError(f"{where} has neither an id nor a minor number")
    return value


# HAMi, and what took its text form over


@dataclass(frozen=True, slots=True)
class _Slice:
    device: str
    share: float | None
    memory: int | None


_Slot = list[_Slice | None]
"""What one container was given. None: a device that is no GPU, or not there yet."""


def hami_grants(pod: PodRecord) -> list[Grant]:
    """HAMi 2. Init containers come first since 2.9; before, they did not count."""
    every = (*pod.init_containers, *pod.containers)
    return _positional(pod, HAMI_DEVICES, (every, pod.containers, _asking(every)))


def hami_1_grants(pod: PodRecord) -> list[Grant]:
    return _positional(pod, HAMI_1_DEVICES, (pod.containers, _asking(pod.containers)))


def volcano_grants(pod: PodRecord) -> list[Grant]:
    """Volcano's scheduler leaves containers out that ask for no GPU, rather than leave their places empty."""
    return _positional(pod, VOLCANO_DEVICES, (_asking(pod.containers), pod.containers))


def _asking(containers: Sequence[ContainerRecord]) -> tuple[ContainerRecord, ...]:
    return tuple(container for container in containers if asks_for_gpu(container))


def _positional(pod: PodRecord, key: str, orders: Sequence[Sequence[ContainerRecord]]) -> list[Grant]:
    text = pod.annotation(key)
    if not text:
        return []
    with _reading(pod, key):
        slots = parse_slots(text)
    if key == HAMI_DEVICES:
        slots = _with_mig(pod, slots)
    with _reading(pod, key):
        order = _choose_order(slots, orders)
    return [
        Grant(container.name, entry.device, key, entry.share, entry.memory)
        for container, slot in zip(order, slots, strict=False)
        for entry in slot
        if entry is not None
    ]


def parse_slots(text: str) -> list[_Slot]:
    """Containers end with `;`, devices with `:`. A place left empty stays: the number of a place is its meaning."""
    return [_parse_slot(slot) for slot in text.strip().removesuffix(";").split(";")]


def _parse_slot(text: str) -> _Slot:
    return [_parse_slice(part) for part in text.split(":") if part]


def _parse_slice(text: str) -> _Slice | None:
    fields = text.split(",")
    if len(fields) < 4:
        raise ValueError(f"{text[:80]!a} is not an id, a type, a memory size and a percentage")
    memory, cores = _number(fields[2], "memory size"), _number(fields[3], "percentage")
    # Some versions write `,,0,0` for a container without devices. Version 1 has other vendors' cards here as well.
    if not fields[0] or (fields[1] and "NVIDIA" not in fields[1].upper()):
        return None
    return _Slice(fields[0], _share(cores), memory * MIB or None)


def _choose_order(slots: Sequence[_Slot], orders: Sequence[Sequence[ContainerRecord]]) -> Sequence[ContainerRecord]:
    """Whose places these are.

    Versions differ in whom they count, and HAMi 2.10 leaves places out by mistake (HAMi#2899, HAMi#3079): the right
    order is the one in which exactly those are given a GPU who ask for one. Where that cannot be seen, as names of
    resources can be configured, it is the one of the same length, or else the one of all containers.
    """
    filled = [number for number, slot in enumerate(slots) if any(slot)]
    needed = max(filled, default=-1) + 1
    for order in orders:
        if needed <= len(order) and {order[number].name for number in filled} == {
            container.name for container in _asking(order)
        }:
            return order
    fallback = next((order for order in orders if len(order) == len(slots)), max(orders, key=len))
    if needed > len(fallback):
        raise ValueError(f"place {needed} is filled, but the pod has {len(fallback)} containers")
    return fallback


def _with_mig(pod: PodRecord, slots: Sequence[_Slot]) -> list[_Slot]:
    """MIG instances in the place of the GPUs they were made on. One that is not made yet is held by nobody."""
    text = pod.annotation(HAMI_MIG_DEVICES)
    new = [list(slot) for slot in slots]
    if text:
        with _reading(pod, HAMI_MIG_DEVICES):
            for number, value in enumerate(as_list(json.loads(text), "the whole"), 1):
                _put_mig(new, as_object(value, f"entry {number}"), f"entry {number}")
    return new


def _put_mig(slots: list[_Slot], entry: dict[str, object], where: str) -> None:
    slot, place = (_index(entry.get(key), f"{where}: {key}") for key in ("containerIndex", "deviceIndex"))
    if slot >= len(slots) or place >= len(slots[slot]):
        raise ValueError(f"{where}: device {place} of container {slot} is not in {HAMI_DEVICES}")
    whole = slots[slot][place]
    gpu = _optional_text(entry, "gpuUUID", where)
    if whole is None or (gpu and gpu.lower() != whole.device.lower()):
        raise ValueError(f"{where}: gpuUUID is another than in {HAMI_DEVICES}")
    mig = _optional_text(entry, "migUUID", where)
    # Each instance is made for one container, which has all of it.
    slots[slot][place] = replace(whole, device=mig, share=1.0) if mig else None


def _index(value: object, where: str) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{where} is not a number")
    return value


# gpu-manager


def gpu_manager_grants(pod: PodRecord) -> list[Grant]:
    """One annotation for each container. Before gpu-assigned is true they are the scheduler's wish only."""
    if pod.annotation(GPU_MANAGER_ASSIGNED) != "true":
        return []
    grants: list[Grant] = []
    for key, text in pod.annotations:
        if key.startswith(GPU_MANAGER_CARDS):
            with _reading(pod, key):
                grants += _gpu_manager_cards(pod, key, text)
    return grants


def _gpu_manager_cards(pod: PodRecord, key: str, text: str) -> list[Grant]:
    number = _number(key.removeprefix(GPU_MANAGER_CARDS), "container")
    if number >= len(pod.containers):
        raise ValueError(f"there is no container {number}: the pod has {len(pod.containers)}")
    container = pod.containers[number]
    cards = sorted({_number(card.strip(), "card") for card in text.split(",")}) if text else []
    cores, blocks = container.amount(vcuda.CORE), container.amount(vcuda.MEMORY)
    # Less than 100 is a part of one card, 100 and more are whole cards; memory is asked for of all cards together.
    share = 1.0 if cores >= 100 else _share(cores) if len(cards) == 1 else None
    memory = int(blocks * VCUDA_MEMORY) or None if len(cards) == 1 else None
    return [Grant(container.name, card, key, share, memory) for card in cards]


FORMATS: tuple[Callable[[PodRecord], list[Grant]], ...] = (
    koordinator_grants,
    hami_grants,
    hami_1_grants,
    volcano_grants,
    gpu_manager_grants,
)
