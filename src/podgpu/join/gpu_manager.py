"""gpu-manager's four families from a snapshot: its names, labels and units, for every container that holds a GPU.

Cards are gpu0, gpu1 and so on; `total` is their plain sum. A MIG instance counts as its part of the card it is on.
Where the use of one card cannot be known that card has no series and there is no total; what was asked for stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from podgpu.catalog import families as f
from podgpu.catalog.families import FamilySpec
from podgpu.catalog.mig import part_of_gpu
from podgpu.join.policy import Policy
from podgpu.model import (
    Assignment,
    ContainerUsage,
    Device,
    Family,
    Labels,
    Sample,
    Snapshot,
    VcudaRequest,
    Workload,
    physical,
)

FB_TOTAL_FIELD = 250
"""MiB; of a MIG instance its own."""

_BLOCK_MIB = 256
_MIB_BITS = 20
_DECIMALS = 6
Figure = int | float | None
Who = tuple[str, str, str]
"""Namespace, pod and container: what the labels say. Who has no pod's name (an HPC job) has no series here."""


@dataclass(slots=True)
class _Container:
    cards: dict[int, list[tuple[Device, ContainerUsage | None]]] = field(default_factory=dict)
    """Index of a card -> the device or instances on it, each with what is known of its use."""
    assignments: list[Assignment] = field(default_factory=list)
    vcuda: VcudaRequest | None = None


def gpu_manager_families(snapshot: Snapshot, policy: Policy) -> list[Family]:
    containers = sorted(_containers(snapshot).items())
    devices = {d.key: d for d in snapshot.devices}
    memory = {r.device.key: r.values.get(FB_TOTAL_FIELD) for r in snapshot.readings}

    def cards(spec: FamilySpec, figure: Callable[[Device, ContainerUsage], Figure], shown: Callable[..., Figure]) -> Family:
        samples = (_labelled(who, policy.hostname, spec, _per_card(c, figure, shown)) for who, c in containers)
        return spec.of([one for of_container in samples for one in of_container])

    return [
        cards(f.GPU_MANAGER_UTILIZATION, _utilization, _percent),
        cards(f.GPU_MANAGER_MEMORY, lambda _, usage: usage.memory, lambda b: b >> _MIB_BITS),
    ]
