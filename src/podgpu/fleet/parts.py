"""Splits GPUs among their holders, and adds up the shares that are used, idle or unknown (see
`idle.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypeVar

import msgspec
from msgspec.structs import asdict, replace

from podgpu.charge import HeldTime
from podgpu.fleet.prices import Prices
from podgpu.metrics.conditions import DRIVER_AWAY, LOST, NODE_GONE, UNREADABLE
from podgpu.metrics.mig import billed_name, fraction_of_gpu, slices_of_profile
from podgpu.model import (
    MIB,
    RESERVATION,
    DeviceState,
    GpuOrInstance,
    Holder,
    MigInstance,
    WorkloadOwner,
    device_key,
)

N = TypeVar("N", int, float)
Use = Literal["used", "idle", "unknown"]
BLIND = frozenset(
    {LOST, UNREADABLE, DRIVER_AWAY, NODE_GONE}
)  # values of GPUs with these conditions are outdated
MPS_REASON = "not known under MPS"
_DIGITS = 4
_LEAST_WORK = 256 * MIB  # less than a CUDA context needs, but more than the driver itself uses


class HeldPart(msgspec.Struct, frozen=True, gc=False):
    """The share of one GPU that one holder has. Totals, waste, cost and counts are sums of these
    shares.
    """

    gpu: DeviceState
    instance: MigInstance | None
    holder: Holder
    device_size: (
        float  # size of the MIG instance as a fraction of the GPU; 1 if there are no instances
    )
    share: float  # the holder's fraction of the MIG instance, or of the GPU if it has no instances
    use: Use
    last_idle_since: float | None = None  # Unix time; keeps its value while the GPU cannot be read
    owner: WorkloadOwner | None = None
    price: float | None = None  # of an hour of the device
    cluster: str = ""
    measured_idle: float | None = (
        None  # seconds; None if the holder was busy, or if its idle time is an estimate
    )
    # What the holder did between the last two readings of its counters, by the node's clock.
    window: HeldTime | None = None
    # What the holder did since the last round, by our clock. This is charged.
    spent: HeldTime | None = None

    @property
    def cost_per_hour(self) -> float | None:
        return None if self.price is None else self.price * self.share

    @property
    def gpu_fraction(self) -> float:
        """Fraction of the physical GPU. The fractions of all holders add up to at most 1."""
        return self.share * self.device_size

    @property
    def idle_since(self) -> float | None:
        """Unix time when the holder became idle. None if it is busy or its use is unknown."""
        return self.last_idle_since if self.use == "idle" else None

    @property
    def unknown_because(self) -> str:
        """The reason why `use` is unknown. Empty if `use` is known, or if podgpu does not know the
        reason.
        """
        return MPS_REASON if self.use == "unknown" and self.is_mps_client else ""

    @property
    def is_mps_client(self) -> bool:
        return is_mps_client(self.device, self.holder)

    @property
    def device(self) -> GpuOrInstance:
        return self.instance or self.gpu

    @property
    def device_key(self) -> str:
        return key_of(self.gpu, self.instance)


def gpu_id(gpu: DeviceState) -> str:
    """Returns the UUID, or `gpu <index>` if the exporter reports none."""
    return gpu.uuid or f"gpu {'?' if gpu.index is None else gpu.index}"


def key_of(gpu: DeviceState, instance: MigInstance | None) -> str:
    """Identifies a GPU or MIG instance within its node, in the form of `Device.key`."""
    return device_key(gpu_id(gpu), None if instance is None else instance.id)


def device_model(gpu: DeviceState, instance: MigInstance | None) -> str:
    """Returns the model name for prices and bills: `<model>`, or `<model> MIG <profile>`."""
    return gpu.model if instance is None else billed_name(gpu.model, instance.profile)


def device_price(
    prices: Prices, gpu: DeviceState, instance: MigInstance | None, size: float
) -> float | None:
    """Returns the price of an hour of the MIG instance, or of the part of the GPU that is in no
    instance.
    """
    hour = prices.of(device_model(gpu, instance)).gpu_hour
    return hour if hour is None or instance is not None else hour * size


def is_lost(gpu: DeviceState) -> bool:
    return any(condition.name == LOST for condition in gpu.conditions)


def is_blind(gpu: DeviceState) -> bool:
    return any(condition.name in BLIND for condition in gpu.conditions)


def is_shown(gpu: DeviceState) -> bool:
    return not gpu.hidden or any(not instance.hidden for instance in gpu.instances)


def holders_of(gpu: DeviceState, device: GpuOrInstance) -> Sequence[Holder]:
    """Returns the holders without duplicates. For a lost GPU, returns only holders that an
    allocation source reports.

    Omits unidentified holders, except if a scheduler reserved the device for them.
    """
    holders = device.holders
    if not holders or (len(holders) == 1 and holders[0].key and not gpu.conditions):
        return holders
    lost = is_lost(gpu)
    unique: dict[tuple[str, ...], Holder] = {}
    for holder in holders:
        if (holder.key and (holder.source or not lost)) or holder.source == RESERVATION:
            unique.setdefault(holder.key, holder)
    return tuple(unique.values())


def divide(wanted: Sequence[float | None], whole: float) -> list[float]:
    """Scales the amounts down if their sum exceeds `whole`. None stands for an equal share of the
    remainder.
    """
    total = sum(amount for amount in wanted if amount is not None)
    scale = whole / total if total > whole else 1.0
    unspecified = wanted.count(None)
    rest = max(0.0, whole - total) / unspecified if unspecified else 0.0
    return [rest if amount is None else amount * scale for amount in wanted]


def divide_gpu(gpu: DeviceState) -> list[tuple[MigInstance | None, float]]:
    """Returns each shown MIG instance with its fraction of the GPU, then None (the GPU itself) with
    the remainder.
    """
    if not gpu.instances:
        return [] if gpu.hidden else [(None, 1.0)]
    instances = [instance for instance in gpu.instances if not instance.hidden]
    fractions = divide(
        [fraction_of_gpu(gpu.model, instance.profile) for instance in instances], 1.0
    )
    devices: list[tuple[MigInstance | None, float]] = list(zip(instances, fractions, strict=True))
    return devices if gpu.hidden else [*devices, (None, max(0.0, 1.0 - sum(fractions)))]


def divide_device(holders: Sequence[Holder]) -> list[float]:
    """Returns each holder's share of the GPU or MIG instance."""
    if len(holders) == 1 and holders[0].share_ratio in (None, 1):
        return [1.0]
    return divide(
        [None if h.share_ratio is None else min(h.share_ratio, 1.0) for h in holders], 1.0
    )


def is_mps_client(device: GpuOrInstance, holder: Holder) -> bool:
    """Returns True if the holder's use is unknown, because under MPS the driver reports only the
    MPS server's use.
    """
    is_unmeasured = holder.usage is not None and holder.usage.utilization_ratio is None
    return is_unmeasured and device.usage is not None and device.usage.method == "mps"


def device_utilization(device: GpuOrInstance) -> float | None:
    window = None if device.usage is None else device.usage.utilization_ratio
    return _whole(
        device.utilization_ratio,
        window,
        [h.usage.utilization_ratio for h in device.holders if h.usage],
    )


def device_memory(device: GpuOrInstance) -> int | None:
    window = None if device.usage is None else device.usage.memory_used_bytes
    return _whole(
        device.memory_used_bytes,
        window,
        [h.usage.memory_used_bytes for h in device.holders if h.usage],
    )


def _whole(latest: N | None, window: N | None, of_holders: Sequence[N | None]) -> N | None:
    """Returns the device's value, but never less than the sum of its holders' values.

    If holders have values, prefers `window`, which covers the same time as these values. Otherwise,
    prefers `latest`.
    """
    known = [value for value in of_holders if value is not None]
    if not known:
        return window if latest is None else latest
    whole = latest if window is None else window
    return sum(known) if whole is None else max(whole, sum(known))


def gpu_utilization(gpu: DeviceState) -> float | None:
    """Returns the GPU's utilisation. In MIG mode, this is the mean over its instances, weighted by
    size.
    """
    weighted = [
        (ratio, slices_of_profile(instance.profile) or 1)
        for instance in gpu.instances
        if not instance.hidden and (ratio := device_utilization(instance)) is not None
    ]
    if weighted:
        return sum(ratio * size for ratio, size in weighted) / sum(size for _, size in weighted)
    return None if gpu.hidden else device_utilization(gpu)


def may_be_busy(utilization: float | None, memory: int | None) -> bool:
    """Returns whether a device without a known holder may be in use."""
    return utilization > 0 if utilization is not None else (memory or 0) >= _LEAST_WORK


# Sums


class HeldSums(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Sums over holders, in GPUs. `allocated` = `used` + `idle` + `unknown`. Costs are None if no
    GPU has a price.
    """

    allocated: float
    used: float
    idle: float
    unknown: float
    cost_per_hour: float | None = None
    wasted_per_hour: float | None = None

    def rounded(self) -> HeldSums:
        """Rounds to 4 digits. The largest amount absorbs the rounding error, so that the amounts
        still add up.
        """
        amounts = {name: amount for name, amount in asdict(self).items() if amount is not None}
        sums = HeldSums(**{name: round(amount, _DIGITS) for name, amount in amounts.items()})
        largest, *others = sorted(
            ("used", "idle", "unknown"), key=lambda name: -getattr(sums, name)
        )
        rest = sums.allocated - sum(getattr(sums, name) for name in others)
        return replace(sums, **{largest: round(rest, _DIGITS)})


class Totals(HeldSums, kw_only=True):
    """`gpus` = `allocated` + `free` + `unheld_unknown`."""

    gpus: int
    free: float
    unheld_unknown: float = (
        0.0  # without a known holder, but perhaps in use: the node is gone, or the GPU is busy
    )
    broken: int
    power_watts: float | None = None


def sum_held(parts: Iterable[HeldPart], currency: str = "", by_device: bool = False) -> HeldSums:
    """Adds up the holders' fractions of GPUs. With `by_device`, a MIG instance counts as one GPU.

    If `parts` is empty, costs are 0 with a `currency` and None without.
    """
    uses: dict[Use, float] = {"used": 0.0, "idle": 0.0, "unknown": 0.0}
    costs, wasted = [], []
    is_empty = True
    for part in parts:
        is_empty = False
        uses[part.use] += part.share if by_device else part.gpu_fraction
        if part.cost_per_hour is not None:
            costs.append(part.cost_per_hour)
            wasted.append(part.cost_per_hour if part.use == "idle" else 0.0)
    has_cost = bool(costs) or (is_empty and bool(currency))
    return HeldSums(
        allocated=sum(uses.values()),
        **uses,
        cost_per_hour=sum(costs) if has_cost else None,
        wasted_per_hour=sum(wasted) if has_cost else None,
    )
