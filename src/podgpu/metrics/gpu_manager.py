"""This module makes gpu-manager's four families of a snapshot: its names, labels and units, for every container on a
GPU. Pure.

Cards are gpu0, gpu1 and so on, and `total` is their plain sum. A MIG instance is its part of the card it is on. Where
the use of one card cannot be known, that card has no series and the container no total; what it asked for stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import fsum

from podgpu.metrics import families as f
from podgpu.metrics.mig import part_of_gpu
from podgpu.metrics.policy import Policy
from podgpu.model import ContainerUsage, Device, Snapshot, Value, VcudaRequest, Who
from podgpu.model import physical as gpu_of
from podgpu.series import Family, Labels, Sample

FB_TOTAL_FIELD = 250
"""In MiB; a MIG instance has its own."""
_CORES_OF_A_CARD = 100
_BLOCK_MIB = 256
_MIB = 1024 * 1024
_DECIMALS = 6

Figure = int | float | None


@dataclass(slots=True)
class _Part:
    """One device that a container holds or uses."""

    key: str
    device: Device | None
    """None: it is not shown, or not there any more."""
    memory_total: Value | None
    held: bool = False
    share: float | None = None
    usage: ContainerUsage | None = None

    @property
    def of_card(self) -> float | None:
        if self.device is not None:
            return part_of_gpu(self.device.model, self.device.profile) if self.device.is_instance else 1.0
        return 1.0 if gpu_of(self.key) == self.key else None


@dataclass(slots=True)
class _Container:
    parts: dict[str, _Part] = field(default_factory=dict)
    vcuda: VcudaRequest | None = None


Containers = Sequence[tuple[Who, _Container]]


def gpu_manager_families(snapshot: Snapshot, policy: Policy) -> list[Family]:
    containers, node = sorted(_containers(snapshot).items(), key=lambda item: item[0]), policy.hostname
    return [
        f.GPU_MANAGER_UTILIZATION.of(_card_samples(containers, node, "gpu", _utilization, _percent)),
        f.GPU_MANAGER_MEMORY.of(_card_samples(containers, node, "gpu_memory", _memory, _whole_mib)),
        f.GPU_MANAGER_REQUESTED.of(_request_samples(containers, node, "req_of_gpu", _requested_cards)),
        f.GPU_MANAGER_REQUESTED_MEMORY.of(_request_samples(containers, node, "req_of_gpu_memory", _requested_mib)),
    ]


# Who there is


def _containers(snapshot: Snapshot) -> dict[Who, _Container]:
    """Those that hold a device, use one, or asked gpu-manager for one. An HPC job has no pod, and no series here."""
    devices = {d.key: d for d in snapshot.devices}
    totals = {r.device.key: r.values.get(FB_TOTAL_FIELD) for r in snapshot.readings}
    found: dict[Who, _Container] = {}

    def part(who: Who, key: str) -> _Part:
        parts = found.setdefault(who, _Container()).parts
        return parts.setdefault(key, _Part(key, devices.get(key), totals.get(key)))

    for assignment in snapshot.assignments:
        if assignment.holder.pod:
            held = part(assignment.holder.who, assignment.device)
            held.held, held.share = True, assignment.share
    for usage in snapshot.usage.containers:
        if usage.holder.pod:
            part(usage.holder.who, usage.device).usage = usage
    for request in snapshot.vcuda:
        if request.holder.pod:
            found.setdefault(request.holder.who, _Container()).vcuda = request
    return found


# What they use


def _card_samples(
    containers: Containers, node: str, label: str, figure: Callable[[_Part], Figure], shown: Callable[[Figure], Figure]
) -> list[Sample]:
    samples = []
    for who, container in containers:
        cards = {f"gpu{index}": shown(value) for index, value in _by_card(container.parts, figure).items()}
        values = {**cards, "total": _tidy(_add(cards.values()))}
        samples += [Sample(_labels(who, node, label, card), v) for card, v in values.items() if v is not None]
    return samples


def _by_card(parts: Mapping[str, _Part], figure: Callable[[_Part], Figure]) -> dict[int, Figure]:
    """In the order of the cards. Several instances on one card add up."""
    figures: dict[int, list[Figure]] = {}
    for part in parts.values():
        if part.device is not None:
            figures.setdefault(part.device.index, []).append(figure(part))
    return {index: _add(figures[index]) for index in sorted(figures)}


def _utilization(part: _Part) -> Figure:
    of_card = part.of_card
    if part.usage is None or part.usage.utilization is None or of_card is None:
        return None
    return part.usage.utilization * of_card


def _percent(ratio: Figure) -> Figure:
    return None if ratio is None else _tidy(ratio * 100)


def _memory(part: _Part) -> Figure:
    return None if part.usage is None else part.usage.memory


def _whole_mib(size: Figure) -> Figure:
    return None if size is None else int(size // _MIB)


# What they asked for


def _request_samples(
    containers: Containers, node: str, label: str, figure: Callable[[_Container], Figure]
) -> list[Sample]:
    figures = ((who, figure(container)) for who, container in containers)
    return [Sample(_labels(who, node, label, "total"), value) for who, value in figures if value is not None]


def _requested_cards(container: _Container) -> Figure:
    if container.vcuda is not None and container.vcuda.cores:
        return container.vcuda.cores / _CORES_OF_A_CARD
    return _tidy(_add(_times(part.share, part.of_card) for part in container.parts.values() if part.held))


def _requested_mib(container: _Container) -> Figure:
    if container.vcuda is not None and container.vcuda.memory_blocks:
        return container.vcuda.memory_blocks * _BLOCK_MIB
    whole = _add(_times(part.share, part.memory_total) for part in container.parts.values() if part.held)
    return None if whole is None else round(whole)


def _times(share: float | None, whole: Value | None) -> Figure:
    return None if share is None or whole is None or isinstance(whole, str) else share * whole


def _add(figures: Iterable[Figure]) -> Figure:
    """None when there is nothing to add, and when one is not known: the sum of the others would be taken for all."""
    known: list[int | float] = []
    for figure in figures:
        if figure is None:
            return None
        known.append(figure)
    exact = all(isinstance(figure, int) for figure in known)
    return (sum(known) if exact else fsum(known)) if known else None  # fsum: the same in any order


def _tidy(figure: Figure) -> Figure:
    """Without the traces of binary fractions: 57, not 56.99999999999999."""
    return round(figure, _DECIMALS) if isinstance(figure, float) else figure


@lru_cache(maxsize=4096)
def _labels(who: Who, node: str, label: str, card: str) -> Labels:
    _, namespace, pod, container = who
    named = zip(f.GPU_MANAGER_LABELS, (pod, namespace, node or None, container), strict=True)
    return Labels([*((name, value) for name, value in named if value is not None), (label, card)])
