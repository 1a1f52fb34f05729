"""Divides GPUs among their holders, classifies each part as used or idle, and sums the parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from podgpu.metrics.conditions import DRIVER_AWAY, LOST, NODE_GONE, UNREADABLE
from podgpu.metrics.mig import billed_name, part_of_gpu, slices_of_profile
from podgpu.model import RESERVATION, DeviceState, Holder, MigInstance, Slot, WorkloadOwner

Use = Literal["used", "idle", "unknown"]
BLIND = frozenset({LOST, UNREADABLE, DRIVER_AWAY, NODE_GONE})  # conditions under which all figures are outdated
_DIGITS = 4


class HeldPart(msgspec.Struct, frozen=True, gc=False):
    """One holder's part of one GPU. Totals, waste, cost and counts are sums of these."""

    gpu: DeviceState
    instance: MigInstance | None
    holder: Holder
    part: float  # fraction of the physical GPU; the parts of a GPU add up to at most 1
    share: float  # fraction of the GPU or MIG instance that it holds
    use: Use
    idle_since: float | None = None  # Unix time; None if busy or unknown
    active_at: float | None = None  # monotonic time of the last reading with activity, or of the first reading
    owner: WorkloadOwner | None = None
    cost_per_hour: float | None = None

    @property
    def slot(self) -> Slot:
        return self.instance or self.gpu

    @property
    def model(self) -> str:
        """The billed model: `<model>`, or `<model> MIG <profile>`."""
        return slot_model(self.gpu, self.instance)


def slot_model(gpu: DeviceState, instance: MigInstance | None) -> str:
    return gpu.model if instance is None else billed_name(gpu.model, instance.profile)


def is_lost(gpu: DeviceState) -> bool:
    return any(condition.name == LOST for condition in gpu.conditions)


def is_blind(gpu: DeviceState) -> bool:
    return any(condition.name in BLIND for condition in gpu.conditions)


def is_shown(gpu: DeviceState) -> bool:
    return not gpu.hidden or any(not instance.hidden for instance in gpu.instances)


def holders_of(gpu: DeviceState, slot: Slot) -> Sequence[Holder]:
    """Returns the unique holders. Holders of a lost GPU must also be known from an allocation source.

    Holders without identity are omitted, unless a scheduler reserved the device for them.
    """
    holders = slot.holders
    if not holders or (len(holders) == 1 and holders[0].key and not gpu.conditions):
        return holders
    lost = is_lost(gpu)
    unique: dict[tuple[str, ...], Holder] = {}
    for holder in holders:
        if (holder.key and (holder.source or not lost)) or holder.source == RESERVATION:
            unique.setdefault(holder.key, holder)
    return tuple(unique.values())


def divide(wanted: Sequence[float | None], whole: float) -> list[float]:
    """Divides `whole` into the wanted amounts, or scales them down to fit. Each None gets an equal part of the rest."""
    total = sum(part for part in wanted if part is not None)
    scale = whole / total if total > whole else 1.0
    unspecified = wanted.count(None)
    rest = max(0.0, whole - total) / unspecified if unspecified else 0.0
    return [rest if part is None else part * scale for part in wanted]


def divide_gpu(gpu: DeviceState) -> list[tuple[MigInstance | None, float]]:
    """Returns the shown MIG instances with their fraction of the GPU, and the GPU itself with the rest."""
    if not gpu.instances:
        return [] if gpu.hidden else [(None, 1.0)]
    instances = [instance for instance in gpu.instances if not instance.hidden]
    parts = divide([part_of_gpu(gpu.model, instance.profile) for instance in instances], 1.0)
    slots: list[tuple[MigInstance | None, float]] = list(zip(instances, parts, strict=True))
    return slots if gpu.hidden else [*slots, (None, max(0.0, 1.0 - sum(parts)))]


def divide_slot(holders: Sequence[Holder]) -> list[float]:
    """Returns each holder's share of the GPU or MIG instance."""
    if len(holders) == 1 and holders[0].share_ratio in (None, 1):
        return [1.0]
    return divide([None if h.share_ratio is None else min(h.share_ratio, 1.0) for h in holders], 1.0)


def classify_use(slot: Slot, holder: Holder, idle_since: float | None, watched: bool) -> Use:
    """Classifies a holder's part of a readable GPU as used, idle or unknown.

    If `watched`, earlier rounds are known, so a holder at 0 % without `idle_since` was busy recently.
    """
    if idle_since is not None:
        return "idle"
    if holder.source == RESERVATION:
        return "used" if slot.utilization_ratio else "unknown"
    usage = holder.usage
    own = None if usage is None else usage.utilization_ratio
    processes = None if usage is None else usage.processes
    ratio = slot.utilization_ratio if own is None else own
    if ratio:
        return "used"
    if own == 0 and processes and slot.utilization_ratio:
        return "unknown"  # driver samples credit only the busiest process, so 0 does not mean idle
    if ratio is None and processes != 0:
        return "unknown"
    return "used" if watched and ratio is not None else "idle"


def runs_nothing(slot: Slot, holder: Holder) -> bool:
    """Returns True if the holder is known to be idle. On a GPU with another busy process this is unknown."""
    usage = holder.usage
    if usage is None or usage.utilization_ratio is None:
        return slot.utilization_ratio == 0
    return usage.utilization_ratio == 0 and not (usage.processes and slot.utilization_ratio)


def slot_utilization(slot: Slot) -> float | None:
    """Returns the utilisation over the same time window as that of the holders, so that the parts add up.

    If the window has no figures, as with metrics text, returns at least the sum of the holders.
    """
    ratios = [h.usage.utilization_ratio for h in slot.holders if h.usage is not None]
    reported = [ratio for ratio in ratios if ratio is not None]
    if not reported:
        return slot.utilization_ratio
    window = None if slot.usage is None else slot.usage.utilization_ratio
    whole = slot.utilization_ratio if window is None else window
    return None if whole is None else max(whole, sum(reported))


def gpu_utilization(gpu: DeviceState) -> float | None:
    """Returns the utilisation. In MIG mode the driver reports none, so it is the mean over the instances, by size."""
    weighted = [
        (ratio, slices_of_profile(instance.profile) or 1)
        for instance in gpu.instances
        if not instance.hidden and (ratio := slot_utilization(instance)) is not None
    ]
    if weighted:
        return sum(ratio * size for ratio, size in weighted) / sum(size for _, size in weighted)
    return None if gpu.hidden else slot_utilization(gpu)


# Sums


class Totals(msgspec.Struct, omit_defaults=True):
    """Sums in GPUs. `allocated` = `used` + `idle` + `unknown`, `gpus` = `allocated` + `free`.

    Costs are None if no held GPU has a price.
    """

    gpus: int
    allocated: float
    used: float
    idle: float
    unknown: float
    free: float
    broken: int
    power_watts: float | None = None
    cost_per_hour: float | None = None
    wasted_per_hour: float | None = None


class HeldSums(msgspec.Struct, omit_defaults=True):
    """The totals of one pod, or of one namespace."""

    allocated: float
    used: float
    idle: float
    unknown: float
    cost_per_hour: float | None = None
    wasted_per_hour: float | None = None


def sum_held(parts: Iterable[HeldPart], priced: bool) -> HeldSums:
    uses: dict[Use, float] = {"used": 0.0, "idle": 0.0, "unknown": 0.0}
    cost = wasted = 0.0
    held = has_price = False
    for part in parts:
        held = True
        uses[part.use] += part.part
        if part.cost_per_hour is not None:
            has_price = True
            cost += part.cost_per_hour
            if part.use == "idle":
                wasted += part.cost_per_hour
    has_cost = priced and (has_price or not held)
    allocated = round(sum(uses.values()), _DIGITS)
    rounded = {use: round(amount, _DIGITS) for use, amount in uses.items()}
    largest = max(rounded, key=lambda use: rounded[use])  # absorbs the rounding error
    rounded[largest] = round(allocated - sum(amount for use, amount in rounded.items() if use != largest), _DIGITS)
    return HeldSums(
        allocated=allocated,
        used=rounded["used"],
        idle=rounded["idle"],
        unknown=rounded["unknown"],
        cost_per_hour=round(cost, _DIGITS) if has_cost else None,
        wasted_per_hour=round(wasted, _DIGITS) if has_cost else None,
    )


def sum_totals(held: HeldSums, gpus: int, broken: int, watts: float | None) -> Totals:
    return Totals(
        gpus=gpus,
        allocated=held.allocated,
        used=held.used,
        idle=held.idle,
        unknown=held.unknown,
        free=round(max(0.0, gpus - held.allocated), _DIGITS),
        broken=broken,
        power_watts=None if watts is None else round(watts, 1),
        cost_per_hour=held.cost_per_hour,
        wasted_per_hour=held.wasted_per_hour,
    )
