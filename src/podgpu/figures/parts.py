"""This module divides GPUs: what part of one each MIG instance is, and each holder's part of what it holds. Pure.

Parts are whole numbers, of which `WHOLE` are one GPU: whatever is divided adds up to what it was, and never to more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from podgpu.figures.device import DeviceFigures, HolderFigures, has_identity
from podgpu.metrics.mig import slices_of_gpu, slices_of_profile

WHOLE = 720_720 * 1_000_000
"""One GPU. Up to 16 holders have equal parts of it, or of a seventh of it, without a rest."""


@dataclass(slots=True)
class PhysicalGpu:
    """A GPU with the MIG instances it is cut into."""

    own: DeviceFigures | None = None
    """What is known of the GPU itself; None: only its instances are."""
    instances: list[DeviceFigures] = field(default_factory=list)

    @property
    def devices(self) -> list[DeviceFigures]:
        return self.instances if self.own is None else [self.own, *self.instances]

    @property
    def utilization(self) -> float | None:
        """Of a GPU in MIG mode the mean over its instances that have one, each by its compute slices: the driver has
        none for the GPU. One whose profile does not say counts as a slice."""
        known = [
            (d.utilization, slices_of_profile(d.profile) or 1) for d in self.instances if d.utilization is not None
        ]
        if known:
            return sum(ratio * slices for ratio, slices in known) / sum(slices for _, slices in known)
        return None if self.own is None else self.own.utilization

    @property
    def power_watts(self) -> float | None:
        if self.own is not None and self.own.power_watts is not None:
            return self.own.power_watts
        known = [d.power_watts for d in self.instances if d.power_watts is not None]
        return sum(known) if known else None

    def slots(self) -> Iterator[tuple[DeviceFigures, int]]:
        """Each instance with its part of the GPU; the GPU itself with what is not cut off."""
        left = WHOLE
        if self.instances:
            model = (self.own or self.instances[0]).model
            wanted = [_slices(device.profile, model) for device in self.instances]
            for device, part in zip(self.instances, divide(wanted, WHOLE), strict=True):
                left -= part
                yield device, part
        if self.own is not None:
            yield self.own, left


def physical_gpus(devices: Iterable[DeviceFigures]) -> list[PhysicalGpu]:
    """The GPUs of one node, in the order in which they are first told of."""
    found: dict[str, PhysicalGpu] = {}
    for device in devices:
        gpu = found.get(device.uuid)
        if gpu is None:
            gpu = found[device.uuid] = PhysicalGpu()
        if device.instance:
            gpu.instances.append(device)
        elif gpu.own is None:
            gpu.own = device
    return list(found.values())


def physical_gpus_once(devices: Iterable[DeviceFigures], counted: set[str]) -> Iterator[PhysicalGpu]:
    """The GPUs of one node but for those in `counted`, which they are then: one that several nodes say is theirs counts
    where it is first told of."""
    for gpu in physical_gpus(devices):
        uuid = gpu.devices[0].uuid
        if not has_identity(uuid) or uuid not in counted:
            counted.add(uuid)
            yield gpu


def holder_parts(holders: Sequence[HolderFigures], whole: int = WHOLE) -> list[tuple[HolderFigures, int]]:
    """Each holder's part of a device that is so much of a GPU: what it was given; who was given nobody knows how much
    has as much as every other such, of what is left."""
    if len(holders) == 1 and holders[0].share in (None, 1):
        return [(holders[0], whole)]
    wanted = [None if h.share is None else round(min(max(h.share, 0.0), 1.0) * whole) for h in holders]
    return list(zip(holders, divide(wanted, whole), strict=True))


def divide(wanted: Sequence[int | None], whole: int) -> list[int]:
    """What each wants; None: an equal part of what the others leave. More than there is was wanted: all get less."""
    total, others = sum(filter(None, wanted)), wanted.count(None)
    if total > whole:
        wanted = [None if part is None else part * whole // total for part in wanted]
        total = sum(filter(None, wanted))
    found = []
    for part in wanted:
        if part is None:
            part = (whole - total) // others
            total, others = total + part, others - 1
        found.append(part)
    return found


def _slices(profile: str, model: str) -> int | None:
    slices, of_gpu = slices_of_profile(profile), slices_of_gpu(model)
    return None if slices is None else WHOLE * min(slices, of_gpu) // of_gpu
