"""This module counts what is held and idle, hour by hour and in money, for each pod since counting began. Pure but for
what it keeps, which is bounded: those that ended are known for a day, then only in the sums of what made them.

Time counts from one reading to the next, for a holder that was there in both: what nobody looked at is in no sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from podgpu.figures.device import DeviceFigures, HolderFigures, Owner, has_identity
from podgpu.figures.parts import WHOLE, holder_parts, physical_gpus_once
from podgpu.figures.prices import NO_PRICES, Prices, PriceTags
from podgpu.figures.totals import Use, gpu_is_blind, use_of
from podgpu.model import Who, Workload

NS = 1_000_000_000
_MONEY = 10**12
"""Prices are whole numbers of this part of a unit of money: as many digits as a file of prices may write."""
ENDED_SECONDS = 24 * 3600.0
"""For so long who ended has a row of its own."""
MOST_ENDED = 10_000
"""Past that, who ended first has none any more."""
MOST_LEFT = 20_000
"""Owners of pods that have no row any more; past that the longest unchanged are forgotten."""
_Place = tuple[str, str, str, Who]
"""Node (empty where the UUID says it all), UUID, instance, holder."""


_NOBODY: Mapping[Who, float] = {}


class Pod(NamedTuple):
    """Whom a row is about; without a pod's name a job's, or what is known of a container."""

    namespace: str
    pod: str
    job: str = ""
    uid: str = ""
    container_id: str = ""


class Holding(NamedTuple):
    """What one holder has of one device at one moment."""

    place: _Place
    workload: Workload
    part: int
    """Of a GPU, of which `WHOLE` are one."""
    use: Use
    idle_since: float | None
    price: int | None
    """An hour of it, in units of `_MONEY`; None: no price is known."""
    read_at: float
    """Monotonic time at which this was so."""


def holdings(
    node: str,
    devices: Iterable[DeviceFigures],
    counted: set[str],
    read_at: float,
    idle: Mapping[int, Mapping[Who, float]] | None = None,
    tags: PriceTags | None = None,
    *,
    old: bool = False,
) -> Iterator[Holding]:
    """One node's. `idle`: where every holder is followed, id() of a device -> its idle holders -> since when."""
    for gpu in physical_gpus_once(devices, counted):
        blind = old or gpu_is_blind(gpu)
        for device, part in gpu.slots():
            if not device.holders:
                continue
            price, named = None if tags is None else tags.hour(device), "" if has_identity(device.uuid) else node
            resting = None if idle is None else idle.get(id(device), _NOBODY)
            whole = (part or 1) if device.instance else WHOLE
            for of, share in holder_parts(device.holders, part):
                use, since = ("unknown", None) if blind else _use(device, of, resting)
                rate = None if price is None else _rate(price, share, whole)
                place = named, device.uuid, device.instance, of.who
                yield Holding(place, of.holder, share, use, since, rate, read_at)


@lru_cache(maxsize=1024)
def _rate(price: Fraction, share: int, whole: int) -> int:
    """An hour of a part of a device in units of `_MONEY`: most holders of a cluster have the same few parts."""
    return round(price * share * _MONEY / whole)


def _use(device: DeviceFigures, of: HolderFigures, resting: Mapping[Who, float] | None) -> tuple[Use, float | None]:
    if resting is None:
        return use_of(device, of), of.idle_since
    since = resting.get(of.who)
    use = use_of(device, of, watched=True)
    return ("idle", since) if since is not None and use != "unknown" else (use, None)


# What is kept


class Amounts(NamedTuple):
    """Part-nanoseconds, and money times nanoseconds."""

    allocated: int = 0
    idle: int = 0
    wasted: int | None = None
    """None: nothing of it had a price."""

    def plus(self, other: Amounts) -> Amounts:
        wasted = self.wasted if other.wasted is None else (self.wasted or 0) + other.wasted
        return Amounts(self.allocated + other.allocated, self.idle + other.idle, wasted)

    @property
    def allocated_hours(self) -> float:
        return self.allocated / (3600 * NS * WHOLE)

    @property
    def idle_hours(self) -> float:
        return self.idle / (3600 * NS * WHOLE)

    @property
    def money(self) -> float | None:
        return None if self.wasted is None else self.wasted / (3600 * NS * _MONEY)


NOTHING = Amounts()


class PodWaste(NamedTuple):
    """One pod: what it has now, and what it came to."""

    pod: Pod
    owner: Owner | None
    amounts: Amounts
    part: int = 0
    idle_part: int = 0
    cost: int | None = None
    """An hour of what it has now, in units of `_MONEY`."""
    idle_cost: int = 0
    idle_since: float | None = None
    """Since when nothing that it has is used; None: something is, or that is not known."""
    ended_at: float | None = None
    """Unix time; None: it is there."""

    @property
    def cost_per_hour(self) -> float | None:
        return None if self.cost is None else self.cost / _MONEY

    @property
    def wasted_per_hour(self) -> float | None:
        return None if self.cost is None else self.idle_cost / _MONEY


class Left(NamedTuple):
    """What pods came to that have no row any more."""

    namespace: str
    owner: Owner | None


@dataclass(frozen=True, slots=True)
class WasteStatement:
    counting_since: float | None = None
    currency: str = ""
    pods: tuple[PodWaste, ...] = ()
    left: Mapping[Left, Amounts] = field(default_factory=dict)


@dataclass(slots=True)
class _Account:
    """Its amounts are apart: they grow with every reading of every holder."""

    owner: Owner | None = None
    allocated: int = 0
    idle: int = 0
    wasted: int | None = None
    holdings: list[Holding] = field(default_factory=list)
    """As of the last turn; empty: it ended."""
    ended: float | None = None
    """Monotonic."""

    @property
    def amounts(self) -> Amounts:
        return Amounts(self.allocated, self.idle, self.wasted)

    def charge(self, holding: Holding, ns: int) -> None:
        self.allocated += holding.part * ns
        if holding.use == "idle":
            self.idle += holding.part * ns
        if holding.price is not None:
            self.wasted = (self.wasted or 0) + (holding.price * ns if holding.use == "idle" else 0)


class WasteLedger:
    """Keeps an account for each pod, and where every holder was seen last."""

    def __init__(self, most_ended: int = MOST_ENDED, most_left: int = MOST_LEFT) -> None:
        self._most_ended = most_ended
        self._most_left = most_left
        self._seen: dict[_Place, float] = {}
        self._accounts: dict[Pod, _Account] = {}
        self._left: dict[Left, Amounts] = {}
        self._prices: Prices = NO_PRICES

    def turn(
        self,
        found: Iterable[Holding],
        now: float,
        longest_gap: float,
        owners: Mapping[tuple[str, str], Owner] | None = None,
        prices: Prices = NO_PRICES,
    ) -> None:
        """Everything that is held at this moment; `now` is monotonic. Readings that are further apart than
        `longest_gap` seconds say nothing of what was between them."""
        if prices.currency != self._prices.currency:
            self._forget_money()
        self._prices = prices
        seen: dict[_Place, float] = {}
        there: dict[Pod, list[Holding]] = {}
        for holding in found:
            before = self._seen.get(holding.place)
            seen[holding.place] = holding.read_at
            pod = pod_of(holding.workload)
            held = there.get(pod)
            if held is None:
                there[pod] = [holding]
            else:
                held.append(holding)
            account = self._accounts.get(pod)
            if account is None:
                account = self._accounts[pod] = _Account()
            seconds = 0.0 if before is None else holding.read_at - before
            account.charge(holding, round(seconds * NS) if 0 < seconds <= longest_gap else 0)
        self._seen = seen
        for pod, account in self._accounts.items():
            account.holdings = there.get(pod, [])
            if account.holdings:
                account.ended = None
                if owners:
                    account.owner = owners.get(pod[:2], account.owner)
            elif account.ended is None:
                account.ended = now
        self._forget(now)

    def statement(self, now: float, wall: float, counting_since: float | None) -> WasteStatement:
        pods = tuple([_stated(pod, account, wall - now) for pod, account in self._accounts.items()])
        return WasteStatement(counting_since, self._prices.currency, pods, dict(self._left))

    def restore(self, earlier: WasteStatement, there_until: float, now: float, wall: float) -> None:
        """Goes on from what was counted before podgpu was started anew. `there_until`: Unix time until which those who
        had not ended were seen; who is there again goes on. Times between are in no sum."""
        if self._prices is NO_PRICES:
            self._prices = replace(NO_PRICES, currency=earlier.currency)
        same_money = self._prices.currency == earlier.currency

        def known(amounts: Amounts) -> Amounts:
            return amounts if same_money else amounts._replace(wasted=None)

        for of in earlier.pods:
            account = self._accounts.get(of.pod)
            if account is None:
                ended_at = there_until if of.ended_at is None else of.ended_at
                account = self._accounts[of.pod] = _Account(of.owner, ended=now - max(0.0, wall - ended_at))
            account.owner = account.owner or of.owner
            account.allocated, account.idle, account.wasted = account.amounts.plus(known(of.amounts))
        for left, amounts in earlier.left.items():
            self._left[left] = self._left.pop(left, NOTHING).plus(known(amounts))
        self._forget(now)

    def __len__(self) -> int:
        return len(self._accounts) + len(self._left) + len(self._seen)

    def _forget(self, now: float) -> None:
        """Who ended long ago, or first of too many, goes into the sums of what made it."""
        ended = [(account.ended, pod) for pod, account in self._accounts.items() if account.ended is not None]
        too_many = len(ended) - self._most_ended
        if too_many > 0:
            ended.sort()
        for number, (at, pod) in enumerate(ended):
            if number < too_many or now - at > ENDED_SECONDS:
                account = self._accounts.pop(pod)
                left = Left(pod.namespace, account.owner)
                self._left[left] = self._left.pop(left, NOTHING).plus(account.amounts)
        for left in list(self._left)[: max(0, len(self._left) - self._most_left)]:
            del self._left[left]

    def _forget_money(self) -> None:
        """Amounts of one currency are nothing in another."""
        for account in self._accounts.values():
            account.wasted = None
        self._left = {left: amounts._replace(wasted=None) for left, amounts in self._left.items()}


def pod_of(workload: Workload) -> Pod:
    if workload.pod:
        return Pod(workload.namespace, workload.pod)
    return Pod(workload.namespace, "", workload.job, workload.uid, workload.container_id)


def _stated(pod: Pod, account: _Account, wall_ahead: float) -> PodWaste:
    held = account.holdings
    if not held:
        ended_at = None if account.ended is None else account.ended + wall_ahead
        return PodWaste(pod, account.owner, account.amounts, ended_at=ended_at)
    if len(held) == 1:
        (_, _, part, use, since, price, _) = held[0]
        if use != "idle":
            return PodWaste(pod, account.owner, account.amounts, part, 0, price)
        return PodWaste(pod, account.owner, account.amounts, part, part, price, price or 0, since)
    idle = [holding for holding in held if holding.use == "idle"]
    known = [holding.idle_since for holding in idle if holding.idle_since is not None]
    prices = [holding.price for holding in held if holding.price is not None]
    return PodWaste(
        pod,
        account.owner,
        account.amounts,
        sum(holding.part for holding in held),
        sum(holding.part for holding in idle),
        sum(prices) if prices else None,
        sum(holding.price for holding in idle if holding.price is not None),
        max(known) if len(known) == len(held) else None,
    )
