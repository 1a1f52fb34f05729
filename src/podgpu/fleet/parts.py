"""Splits GPUs among their holders, and adds up the shares that are used, idle or unknown.

`hold.py` defines what is idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from typing import Literal, TypeVar

import msgspec
from msgspec.structs import asdict

from podgpu.charge import HeldTime, Tokens, Waste, price_hours
from podgpu.fleet.prices import Prices
from podgpu.known import select_known
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
# The values of GPUs with these conditions are outdated.
BLIND = frozenset({LOST, UNREADABLE, DRIVER_AWAY, NODE_GONE})
MPS_REASON = "not known under MPS"
_DIGITS = 4
_LEAST_WORK = 256 * MIB  # less than a CUDA context needs, but more than the driver itself uses


class WasteRate(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is wasted now, in GPUs and money. `cost_per_hour` is None without prices."""

    gpus: Waste = Waste()
    cost_per_hour: Waste | None = None

    def plus(self, other: WasteRate) -> WasteRate:
        gpus = self.gpus.plus(other.gpus)
        if self.cost_per_hour is None or other.cost_per_hour is None:
            cost = self.cost_per_hour or other.cost_per_hour
        else:
            cost = self.cost_per_hour.plus(other.cost_per_hour)
        return WasteRate(gpus, cost)

    def rounded(self) -> WasteRate | None:
        """Returns None if nothing is known."""
        if self.gpus == Waste():
            return None
        cost = None
        if self.cost_per_hour is not None:
            cost = self.cost_per_hour.rounded(_DIGITS)
        return WasteRate(self.gpus.rounded(_DIGITS), cost)


def add_waste(one: WasteRate | None, other: WasteRate | None) -> WasteRate | None:
    return (one or WasteRate()).plus(other or WasteRate()).rounded()


def make_rate(waste: Waste, size: float, price: float | None) -> WasteRate:
    """`waste`: fractions of a device. `size`: its fraction of a GPU. `price`: of its hour."""
    return WasteRate(waste.times(size), waste.priced(price))


class EngineState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The LLM engine in a container that holds GPUs. Unknown values are None."""

    engine: str = ""  # such as vllm; empty if none has answered yet
    models: tuple[str, ...] = ()
    counted: Tokens = Tokens()  # since podgpu first read it
    per_second: Tokens | None = None  # between the last two readings
    running: float | None = None  # requests
    waiting: float | None = None
    cache_ratio: float | None = None
    first_token_seconds: float | None = None  # 95th percentile of the last 5 minutes
    first_token_before_seconds: float | None = None  # of the half hour before
    reason: str = ""  # short code, if the engine could not be read
    message: str = ""

    @property
    def model(self) -> str:
        return ", ".join(self.models)


ContainerName = tuple[str, str, str]  # namespace, pod and container


def container_name(holder: Holder) -> ContainerName:
    return holder.namespace, holder.pod, holder.container


class HeldPart(msgspec.Struct, frozen=True, gc=False):
    """The share of one GPU that one holder has.

    Totals, waste, cost and counts are sums of these shares.
    """

    gpu: DeviceState
    instance: MigInstance | None
    holder: Holder
    device_size: float  # the MIG instance's fraction of the GPU; 1 if there are no instances
    share: float  # the holder's fraction of the MIG instance, or of the GPU if it has no instances
    use: Use
    last_idle_since: float | None = None  # Unix time; keeps its value while the GPU cannot be read
    owner: WorkloadOwner | None = None
    price: float | None = None  # of an hour of the device
    cluster: str = ""
    # Seconds. None if the holder was busy, or if its idle time is an estimate.
    measured_idle: float | None = None
    # What the holder did between the last two readings of its counters, by the node's clock.
    window: HeldTime | None = None
    # What the holder did since the last round, by our clock. This is charged.
    spent: HeldTime | None = None
    counted_at: float = 0.0  # monotonic time of the reading in which its counters last changed
    engine: EngineState | None = None  # the LLM engine of the container, if engines are read

    @property
    def cost_per_hour(self) -> float | None:
        return price_hours(self.share, self.price)

    @property
    def waste(self) -> WasteRate:
        """What the holder wastes now. Unknown use is not wasted.

        Under-used time is None if the exporter does not count it.
        """
        if self.use == "unknown":
            return WasteRate()
        if self.use == "idle":
            return self._make_rate(Waste(idle=self.share, underused=0.0))

        # If Prometheus has not scraped the exporter again, nothing is spent since the last round.
        # Then the time between the last two readings of the counters is used.
        for time in (self.spent, self.window):
            if time is None or time.underused is None or not time.held:
                continue
            unused = min(self.share, time.underused / time.held)
            return self._make_rate(Waste(idle=0.0, underused=unused))

        return self._make_rate(Waste(idle=0.0))

    def _make_rate(self, waste: Waste) -> WasteRate:
        return make_rate(waste, self.device_size, self.price)

    @property
    def gpu_fraction(self) -> float:
        """Fraction of the physical GPU. The fractions of all holders add up to at most 1."""
        return self.share * self.device_size

    @property
    def idle_since(self) -> float | None:
        """Unix time when the holder became idle. None if it is busy or its use is unknown."""
        if self.use != "idle":
            return None
        return self.last_idle_since

    @property
    def unknown_because(self) -> str:
        """The reason why `use` is unknown. Empty if there is none, or if it is not known."""
        if self.use == "unknown" and self.is_mps_client:
            return MPS_REASON
        return ""

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
    index = "?" if gpu.index is None else gpu.index
    return gpu.uuid or f"gpu {index}"


def key_of(gpu: DeviceState, instance: MigInstance | None) -> str:
    """Identifies a GPU or MIG instance within its node, in the form of `Device.key`."""
    return device_key(gpu_id(gpu), None if instance is None else instance.id)


def device_model(gpu: DeviceState, instance: MigInstance | None) -> str:
    """Returns the model name for prices and bills: `<model>`, or `<model> MIG <profile>`."""
    if instance is None:
        return gpu.model
    return billed_name(gpu.model, instance.profile)


def device_price(
    prices: Prices, gpu: DeviceState, instance: MigInstance | None, size: float
) -> float | None:
    """Returns the price of an hour of the MIG instance.

    Without an instance, returns that of the part of the GPU that is in no instance.
    """
    hour = prices.of(device_model(gpu, instance)).gpu_hour
    if hour is None or instance is not None:
        return hour
    return price_hours(size, hour)


def is_lost(gpu: DeviceState) -> bool:
    return any(condition.name == LOST for condition in gpu.conditions)


def is_blind(gpu: DeviceState) -> bool:
    return any(condition.name in BLIND for condition in gpu.conditions)


def is_shown(gpu: DeviceState) -> bool:
    if not gpu.hidden:
        return True
    return any(not instance.hidden for instance in gpu.instances)


def holders_of(gpu: DeviceState, device: GpuOrInstance) -> Sequence[Holder]:
    """Returns the holders without duplicates.

    For a lost GPU, returns only holders that an allocation source reports. Omits unidentified
    holders, except if a scheduler reserved the device for them.
    """
    holders = device.holders
    if not holders:
        return holders
    # The usual case. With that of `divide_device`, it saves 13 ms for 8,000 GPUs.
    if len(holders) == 1 and holders[0].key and not gpu.conditions:
        return holders

    lost = is_lost(gpu)
    unique: dict[tuple[str, ...], Holder] = {}
    for holder in holders:
        is_identified = holder.key and (holder.source or not lost)
        if is_identified or holder.source == RESERVATION:
            unique.setdefault(holder.key, holder)

    return tuple(unique.values())


def _divide(wanted: Sequence[float | None]) -> list[float]:
    """Scales the fractions down if their sum exceeds 1.

    None stands for an equal share of the remainder.
    """
    total = sum(select_known(wanted))
    scale = 1.0 / max(1.0, total)
    remainder = max(0.0, 1.0 - total)
    equal_share = remainder / max(1, wanted.count(None))

    fractions = []
    for fraction in wanted:
        if fraction is None:
            fractions.append(equal_share)
        else:
            fractions.append(fraction * scale)

    return fractions


def divide_gpu(gpu: DeviceState) -> list[tuple[MigInstance | None, float]]:
    """Returns each shown MIG instance with its fraction of the GPU.

    Then, if the GPU is shown, returns None (the GPU itself) with the remainder.
    """
    if not gpu.instances:
        if gpu.hidden:
            return []
        return [(None, 1.0)]

    instances = [instance for instance in gpu.instances if not instance.hidden]
    wanted = [fraction_of_gpu(gpu.model, instance.profile) for instance in instances]
    fractions = _divide(wanted)
    devices: list[tuple[MigInstance | None, float]] = list(zip(instances, fractions, strict=True))
    if not gpu.hidden:
        remainder = 1.0 - sum(fractions)
        devices.append((None, max(0.0, remainder)))

    return devices


def divide_device(holders: Sequence[Holder]) -> list[float]:
    """Returns each holder's share of the GPU or MIG instance."""
    # The usual case, see `holders_of`.
    if len(holders) == 1 and holders[0].share_ratio in (None, 1):
        return [1.0]

    wanted = []
    for holder in holders:
        share = holder.share_ratio
        wanted.append(None if share is None else min(share, 1.0))
    return _divide(wanted)


def is_mps_client(device: GpuOrInstance, holder: Holder) -> bool:
    """Returns True if the driver reports only the use of the MPS server, not the holder's own."""
    if device.known_usage.method != "mps":
        return False
    return holder.usage is not None and holder.usage.utilization_ratio is None


def device_utilization(device: GpuOrInstance) -> float | None:
    of_holders = [holder.known_usage.utilization_ratio for holder in device.holders]
    window = device.known_usage.utilization_ratio
    return _whole(device.utilization_ratio, window, of_holders)


def device_memory(device: GpuOrInstance) -> int | None:
    of_holders = [holder.known_usage.memory_used_bytes for holder in device.holders]
    window = device.known_usage.memory_used_bytes
    return _whole(device.memory_used_bytes, window, of_holders)


def _whole(latest: N | None, window: N | None, of_holders: Sequence[N | None]) -> N | None:
    """Returns the device's value, but never less than the sum of its holders' values.

    If holders have values, prefers `window`, which covers the same time as these values.
    Otherwise, prefers `latest`.
    """
    known = select_known(of_holders)
    if not known:
        if latest is None:
            return window
        return latest

    whole = latest if window is None else window
    if whole is None:
        return sum(known)

    return max(whole, sum(known))


def read_number(device: GpuOrInstance, field: str) -> float | None:
    """Returns the value of a DCGM field. None if it is unknown, or no number."""
    value = device.fields.get(field) if device.fields else None
    if not isinstance(value, int | float):
        return None
    return float(value)


def gpu_utilization(gpu: DeviceState) -> float | None:
    """Returns the GPU's utilisation.

    In MIG mode, this is the mean over its instances, weighted by size.
    """
    total = 0.0
    slices = 0
    for instance in gpu.instances:
        ratio = None if instance.hidden else device_utilization(instance)
        if ratio is not None:
            size = slices_of_profile(instance.profile) or 1
            total += ratio * size
            slices += size

    if slices:
        return total / slices
    if gpu.hidden:
        return None

    return device_utilization(gpu)


def may_be_busy(utilization: float | None, memory: int | None) -> bool:
    """Returns whether a device without a known holder may be in use."""
    if utilization is not None:
        return utilization > 0
    return (memory or 0) >= _LEAST_WORK


# Sums


class HeldSums(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Sums over holders, in GPUs: `allocated` = `used` + `idle` + `unknown`.

    Costs are None if no GPU has a price.
    """

    allocated: float
    used: float
    idle: float
    unknown: float
    cost_per_hour: float | None = None
    wasted_per_hour: float | None = None  # cost of idle GPUs
    waste: WasteRate | None = None

    def rounded(self) -> HeldSums:
        """Rounds to 4 digits.

        The largest amount absorbs the rounding error, so that the amounts still add up.
        """
        sums = copy(self)
        if self.waste is not None:
            sums.waste = self.waste.rounded()
        for name, amount in asdict(self).items():
            if isinstance(amount, float):
                setattr(sums, name, round(amount, _DIGITS))

        error = sums.allocated - (sums.used + sums.idle + sums.unknown)
        largest = max(("used", "idle", "unknown"), key=lambda name: getattr(sums, name))
        amount = getattr(sums, largest) + error
        setattr(sums, largest, round(amount, _DIGITS))
        return sums


class Totals(HeldSums, kw_only=True):
    """`gpus` = `allocated` + `free` + `unheld_unknown`."""

    gpus: int
    free: float
    # Without a known holder, but perhaps in use: the node is gone, or the GPU is busy.
    unheld_unknown: float = 0.0
    # Of GPUs in use without a known holder: paid for, and not wasted. None without a price.
    unheld_cost_per_hour: float | None = None
    broken: int
    # Kubernetes calls them unhealthy, but podgpu finds no problem. `broken` does not count them.
    kubernetes_unhealthy: int = 0
    power_watts: float | None = None


def sum_held(parts: Iterable[HeldPart], currency: str = "", by_device: bool = False) -> HeldSums:
    """Adds up the holders' fractions of GPUs. With `by_device`, a MIG instance counts as one GPU.

    If `parts` is empty, costs are 0 with a `currency` and None without.
    """
    uses: dict[Use, float] = {"used": 0.0, "idle": 0.0, "unknown": 0.0}
    costs = []
    waste = WasteRate()
    is_empty = True
    for part in parts:
        is_empty = False
        uses[part.use] += part.share if by_device else part.gpu_fraction
        waste = waste.plus(part.waste)
        cost = part.cost_per_hour
        if cost is not None:
            costs.append(cost)

    waste_cost = waste.cost_per_hour or Waste()
    has_cost = bool(costs) or (is_empty and bool(currency))

    return HeldSums(
        allocated=sum(uses.values()),
        **uses,
        cost_per_hour=sum(costs) if has_cost else None,
        wasted_per_hour=(waste_cost.idle or 0.0) if has_cost else None,
        waste=waste,
    )
