"""Charges holders for GPU time, energy and money. The only place of this formula.

The recorder (`past/books/record.py`), Prometheus (`past/prometheus/prometheus_charges.py`) and the
demo describe a time window as a `HeldTime` and call `charge`. The history stores the result, so the
bill of a period is a sum of charges.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import fsum
from operator import add
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import astuple

from podgpu.known import add_known, round_known
from podgpu.model import WorkloadOwner

_HOUR = 3600


class Figures(NamedTuple):
    """Values of a GPU, or of one holder on a shared GPU. Unknown values are None."""

    utilization_ratio: float | None = None
    memory_used_bytes: float | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None

    def plus(self, other: Figures) -> Figures:
        """Adds the values of another container of the same pod.

        A sum is None only if the value is unknown in both.
        """
        return Figures(*map(add_known, self, other))


class Amounts(NamedTuple):
    """Usage over a period. Times are in GPU seconds: half a GPU for 10 s is 5 allocated seconds."""

    allocated_seconds: float = 0.0
    idle_seconds: float = 0.0
    cost: float = 0.0
    idle_cost: float = 0.0  # cost of the idle time, included in the total cost
    measured_seconds: float = 0.0  # allocated time for which the busy time is known
    busy_seconds: float = 0.0
    busy_min_seconds: float = 0.0
    busy_max_seconds: float = 0.0
    energy_joules: float = 0.0
    waited_seconds: float = 0.0  # time spent waiting while another workload used the GPU
    underused_seconds: float = 0.0  # unused time of shares that were in use
    underused_cost: float = 0.0  # cost of this time, included in the total cost
    counted_seconds: float = 0.0  # allocated time for which under-used time is known
    prompt_tokens: float = 0.0
    generated_tokens: float = 0.0
    token_seconds: float = 0.0  # allocated time for which the tokens are known
    # Time of a GPU that nobody is known to hold, while something ran on it. A part of the allocated
    # time of `UNALLOCATED`, which is not wasted.
    unheld_seconds: float = 0.0
    unheld_cost: float = 0.0  # included in the total cost

    def plus(self, other: Amounts) -> Amounts:
        return Amounts(*map(add, self, other))


class Amount(NamedTuple):
    """Where one of the `Amounts` is stored, read and shown. Empty names: nowhere."""

    field: str  # of `Amounts`
    column: str  # in SQLite, and `kind` of the recording rules
    unit: Literal["seconds", "joules", "money", "tokens"]
    counter: str = ""  # of the exporters, in Prometheus
    matcher: str = ""  # selects the series of the counter
    key: str = ""  # in the JSON, in hours, kWh, money or tokens
    cell: str = ""  # column in CSV


AMOUNTS = (
    Amount(
        "allocated_seconds",
        "allocated",
        "seconds",
        counter="podgpu_container_gpu_allocated_seconds_total",
        key="allocated_hours",
    ),
    Amount(
        "idle_seconds",
        "idle",
        "seconds",
        counter="podgpu_container_gpu_wasted_seconds_total",
        matcher='kind="idle"',
        key="idle_hours",
        cell="x_IdleGpuHours",
    ),
    Amount("cost", "cost", "money", key="cost"),
    Amount("idle_cost", "idle_cost", "money", key="wasted", cell="x_WastedCost"),
    Amount("measured_seconds", "measured", "seconds"),
    Amount(
        "busy_seconds",
        "busy",
        "seconds",
        counter="podgpu_container_gpu_busy_seconds_total",
        key="used_hours",
        cell="x_UsedGpuHours",
    ),
    Amount(
        "busy_min_seconds",
        "busy_min",
        "seconds",
        counter="podgpu_container_gpu_busy_seconds_min_total",
        key="used_hours_min",
        cell="x_UsedGpuHoursMin",
    ),
    Amount(
        "busy_max_seconds",
        "busy_max",
        "seconds",
        counter="podgpu_container_gpu_busy_seconds_max_total",
        key="used_hours_max",
        cell="x_UsedGpuHoursMax",
    ),
    Amount(
        "energy_joules",
        "energy",
        "joules",
        counter="podgpu_container_gpu_energy_joules_total",
        key="energy_kwh",
        cell="x_EnergyKwh",
    ),
    Amount(
        "waited_seconds",
        "waited",
        "seconds",
        counter="podgpu_container_gpu_wait_seconds_total",
        key="waited_hours",
        cell="x_WaitedGpuHours",
    ),
    Amount(
        "underused_seconds",
        "underused",
        "seconds",
        counter="podgpu_container_gpu_wasted_seconds_total",
        matcher='kind="underused"',
    ),
    Amount("underused_cost", "underused_cost", "money"),
    Amount("counted_seconds", "counted", "seconds"),
    Amount("prompt_tokens", "prompt_tokens", "tokens", key="prompt_tokens", cell="x_PromptTokens"),
    Amount(
        "generated_tokens",
        "generated_tokens",
        "tokens",
        key="generated_tokens",
        cell="x_GeneratedTokens",
    ),
    Amount("token_seconds", "token_seconds", "seconds"),
    Amount("unheld_seconds", "unheld", "seconds"),
    Amount("unheld_cost", "unheld_cost", "money"),
)
"""The fields of `Amounts`, in their order. A new one gets a column in old history files, too."""


class UsageAccount(NamedTuple):
    """A pod or job to which usage is charged.

    Owner, labels and methods may become known later, so they are not in the key.
    """

    namespace: str = ""
    pod: str = ""
    job: str = ""
    uid: str = ""  # set only if the pod name is unknown
    container_id: str = ""  # set only if the pod name is unknown
    owner_kind: str = ""
    owner_name: str = ""
    labels: str = ""  # JSON object
    methods: str = ""  # how use was measured (see podgpu_device_usage_method): words
    user: str = ""  # if the workload is neither a pod nor a job; `job` is then "user NAME"
    model: str = ""  # that its LLM engine serves; several names are separated by commas

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        return self.namespace, self.pod, self.job, self.uid, self.container_id

    @property
    def owner(self) -> WorkloadOwner | None:
        if not self.owner_name:
            return None
        return WorkloadOwner(self.owner_kind, self.owner_name)


UNALLOCATED = UsageAccount()  # the account for GPUs, and fractions of GPUs, that no pod or job held


class Charge(NamedTuple):
    """The usage of one account.

    In records, that of one container on one GPU since the last record. Otherwise, of a period.
    """

    account: UsageAccount
    container: str = ""  # set only in records
    amounts: Amounts = Amounts()
    # In records: the holder's own values on a shared GPU. None to use the GPU's values.
    figures: Figures | None = None
    currency: str = ""  # empty if the GPU has no price
    cluster: str = ""  # set only if the usage is read from Prometheus


def sum_charges(charges: Iterable[Charge]) -> Amounts:
    """Adds up with `fsum`, so that the order of the charges does not matter."""
    rows = [charge.amounts for charge in charges]
    if not rows:
        return Amounts()
    columns = zip(*rows, strict=True)
    return Amounts(*map(fsum, columns))


class Tokens(NamedTuple):
    """Numbers of tokens of an LLM engine."""

    prompt: float = 0.0
    generated: float = 0.0

    def plus(self, other: Tokens) -> Tokens:
        return Tokens(self.prompt + other.prompt, self.generated + other.generated)


class HeldTime(NamedTuple):
    """What one holder did on one GPU or MIG instance in a time window, in seconds.

    None if it was not measured.
    """

    held: float
    share: float = 1.0  # the holder's fraction of the device
    busy: float | None = None
    busy_min: float | None = None
    busy_max: float | None = None
    idle: float | None = None
    waited: float | None = None
    joules: float | None = None
    underused: float | None = None  # unused seconds of the share, without idle time
    tokens: Tokens | None = None  # of the container's LLM engine; its GPUs share them


class Waste(msgspec.Struct, frozen=True, omit_defaults=True):
    """The parts of waste in one unit: GPUs, hours or money. Unknown parts are None.

    Idle: allocated and not used at all. Under-used: the unused rest of a share that is in use.
    Unallocated: no pod or job had it. A second of a GPU is in at most one part.
    """

    idle: float | None = None
    underused: float | None = None
    unallocated: float | None = None

    @property
    def total(self) -> float:
        """The sum of the known parts."""
        return (self.idle or 0.0) + (self.underused or 0.0) + (self.unallocated or 0.0)

    def plus(self, other: Waste) -> Waste:
        return Waste(*map(add_known, astuple(self), astuple(other)))

    def times(self, factor: float) -> Waste:
        return Waste(*(None if part is None else part * factor for part in astuple(self)))

    def priced(self, price: float | None) -> Waste | None:
        """Multiplies each part by the price of an hour. Returns None if there is no price."""
        if price is None:
            return None
        return self.times(price)

    def rounded(self, digits: int) -> Waste:
        return Waste(*(round_known(part, digits) for part in astuple(self)))


def price_hours(hours: float, price: float | None) -> float | None:
    """Multiplies hours of a device, or a number of devices, by the price of an hour.

    Returns None if the device has no price.
    """
    if price is None:
        return None
    return hours * price


def scale_bill(cost: float, billed_seconds: float, seconds: float) -> float:
    """Returns what `seconds` cost if `billed_seconds`, which is not 0, cost `cost`."""
    return cost / billed_seconds * seconds


def charge(time: HeldTime, size: float, price: float | None) -> Amounts:
    """Charges a holder.

    `size`: the device's fraction of a physical GPU. `price`: of an hour of the device, or None.
    """
    busy = time.busy or 0.0
    idle = min(time.held, time.idle or 0.0)
    # Held and idle times count by the share. Busy time is the device's time that the holder used.
    allocated = time.share * time.held
    allocated_idle = time.share * idle
    underused = min(allocated - allocated_idle, time.underused or 0.0)
    # In idle time, the use is known: it is 0.
    measured = allocated_idle if time.busy is None else allocated
    # Without a measured maximum, all time that is not idle may have been busy.
    busy_max = time.held - idle if time.busy_max is None else time.busy_max
    tokens = time.tokens or Tokens()
    allocated_gpu_seconds = allocated * size

    return Amounts(
        allocated_seconds=allocated_gpu_seconds,
        idle_seconds=allocated_idle * size,
        cost=_price_seconds(allocated, price),
        idle_cost=_price_seconds(allocated_idle, price),
        measured_seconds=measured * size,
        busy_seconds=busy * size,
        busy_min_seconds=(time.busy_min or 0.0) * size,
        busy_max_seconds=max(busy_max, busy) * size,
        energy_joules=time.joules or 0.0,
        waited_seconds=(time.waited or 0.0) * size,
        underused_seconds=underused * size,
        underused_cost=_price_seconds(underused, price),
        counted_seconds=0.0 if time.underused is None else allocated_gpu_seconds,
        prompt_tokens=tokens.prompt,
        generated_tokens=tokens.generated,
        token_seconds=0.0 if time.tokens is None else allocated_gpu_seconds,
    )


def charge_rest(
    seconds: float, size: float, held_seconds: float, price: float | None, is_used: bool = False
) -> Amounts:
    """Charges the time of a device that no holder had.

    `size` and `price`: see `charge`. `held_seconds`: allocated GPU seconds of all holders of the
    device. `is_used`: something ran on the GPU, although nobody is known to hold it.
    """
    # MIG instances may take the whole GPU, so that nothing is left of it.
    if size == 0:
        return Amounts()

    rest = max(0.0, size * seconds - held_seconds)
    cost = _price_seconds(rest / size, price)
    if is_used:
        return Amounts(rest, cost=cost, unheld_seconds=rest, unheld_cost=cost)
    return Amounts(rest, cost=cost)


def _price_seconds(seconds: float, price: float | None) -> float:
    return price_hours(seconds / _HOUR, price) or 0.0
