"""What the tokens of LLM engines cost. The only place of these figures.

Only pods whose tokens were read count: their whole bill, divided by their tokens. The bill has
three parts: the time that a pod used the GPU, the time that it waited for another container, and
the rest, in which it was idle or used less than its share. A time without a measured use is a
fourth part. So a range can be added up from charges of any length, and the parts are its sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from podgpu.charge import Amounts, Charge, scale_bill, sum_charges
from podgpu.model import group_by
from podgpu.past.bills.token_fit import NoFit, TokenFit

_DIGITS = 4
_MILLION = 1e6
_LEAST_COVERED = 0.9  # of the allocated time; with less, the cost is that of other tokens


class CostParts(NamedTuple):
    """The bill of pods, in money. The parts add up to it."""

    used: float = 0.0
    waiting: float = 0.0  # another container had the GPU
    idle: float = 0.0  # idle, or the unused rest of a share
    unknown: float = 0.0  # the use was not measured

    @property
    def total(self) -> float:
        return math.fsum(self)


class EngineSums(NamedTuple):
    """Sums over the pods whose tokens were read."""

    amounts: Amounts
    cost: CostParts
    # Cost of the time that the pods really used, whether it was theirs or the share of others.
    cost_at_use: float
    is_priced: bool  # all of their GPUs have a price


class TokenCost(msgspec.Struct, frozen=True):
    """The cost of the pods with engines. The other parts add up to `total`."""

    total: float
    used: float
    waiting: float
    idle: float
    unknown: float


class TokenSplit(msgspec.Struct, frozen=True, omit_defaults=True):
    """GPU time and cost of a million tokens of each kind, by regression over 5 minutes.

    Costs are those of the time used. Absent if the two kinds cannot be told apart.
    """

    prompt_gpu_seconds: float
    generated_gpu_seconds: float
    residual_ratio: float  # typical error of 5 minutes, divided by their mean busy time
    steps: int  # number of 5 minutes
    prompt_cost: float | None = None
    generated_cost: float | None = None


class TokenFigures(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Figures of the pods whose tokens were read, over a range."""

    per_second: float | None = None
    per_used_gpu_second: float | None = None
    joules_per_token: float | None = None
    cost: TokenCost | None = None
    cost_per_million: TokenCost | None = None
    # As if the pods had paid for the time that they used, and for nothing else. The same for a
    # pod alone on a GPU and on a shared one.
    cost_per_million_at_use: float | None = None
    per_million: TokenSplit | None = None  # of prompt and of generated tokens
    per_million_reason: str = ""  # why `per_million` is absent, if the regression found nothing
    reason: str = ""  # why figures per token are absent


def sum_engines(usage: Iterable[Charge], currency: str) -> EngineSums | None:
    """Adds up the pods whose tokens were read. Returns None if there is none."""
    pods = group_by(usage, _key_of)
    amounts = Amounts()
    parts: list[CostParts] = []
    at_use = 0.0
    is_priced = bool(currency)
    for charges in pods.values():
        own = sum_charges(charges)
        if not own.token_seconds:
            continue

        amounts = amounts.plus(own)
        # Charges in another currency, or without a price, have no cost here.
        in_currency = [charge for charge in charges if charge.currency == currency]
        priced = sum_charges(in_currency)
        if priced.allocated_seconds != own.allocated_seconds:
            is_priced = False
        parts.append(_divide_cost(own, priced.cost))
        at_use += scale_bill(priced.cost, own.allocated_seconds, own.busy_seconds)

    if not amounts.token_seconds:
        return None

    cost = CostParts(
        used=math.fsum(part.used for part in parts),
        waiting=math.fsum(part.waiting for part in parts),
        idle=math.fsum(part.idle for part in parts),
        unknown=math.fsum(part.unknown for part in parts),
    )
    return EngineSums(amounts, cost, at_use, is_priced)


def _key_of(charge: Charge) -> tuple[str, ...]:
    return charge.cluster, *charge.account.key


def _divide_cost(amounts: Amounts, cost: float) -> CostParts:
    """Divides the bill of one pod. Time beyond its share is not on its bill."""
    allocated = amounts.allocated_seconds
    measured = min(amounts.measured_seconds, allocated)
    used = min(amounts.busy_seconds, measured)
    waited = min(amounts.waited_seconds, measured - used)

    used_cost = scale_bill(cost, allocated, used)
    waiting_cost = scale_bill(cost, allocated, waited)
    unknown_cost = scale_bill(cost, allocated, allocated - measured)
    idle_cost = max(0.0, cost - used_cost - waiting_cost - unknown_cost)
    return CostParts(used_cost, waiting_cost, idle_cost, unknown_cost)


def make_token_figures(
    sums: EngineSums, currency: str, seconds: float, fit: TokenFit | NoFit | None = None
) -> TokenFigures:
    """`seconds`: length of the range. `fit` is None if it was not computed."""
    amounts = sums.amounts
    tokens = amounts.prompt_tokens + amounts.generated_tokens
    cost = _round_cost(sums.cost, 1.0) if sums.is_priced else None
    problem = _explain_missing(amounts)
    if problem:
        return TokenFigures(cost=cost, reason=problem)

    is_measured = amounts.measured_seconds >= _LEAST_COVERED * amounts.allocated_seconds
    is_used = is_measured and amounts.busy_seconds > 0
    per_used = None
    if is_used:
        per_used = round(tokens / amounts.busy_seconds, _DIGITS)

    joules = None
    if amounts.energy_joules:
        # Significant digits, because it may be far below 1.
        joules = float(f"{amounts.energy_joules / tokens:.6g}")

    per_million = None
    at_use = None
    reason = ""
    if sums.is_priced:
        per_million = _round_cost(sums.cost, _MILLION / tokens)
        if is_used:
            at_use = round(sums.cost_at_use / tokens * _MILLION, _DIGITS)
    elif currency:
        reason = f"some of these GPUs have no price in {currency}"

    return TokenFigures(
        per_second=round(tokens / seconds, _DIGITS) if seconds else None,
        per_used_gpu_second=per_used,
        joules_per_token=joules,
        cost=cost,
        cost_per_million=per_million,
        cost_per_million_at_use=at_use,
        per_million=_make_split(fit, sums) if isinstance(fit, TokenFit) else None,
        per_million_reason=fit.reason if isinstance(fit, NoFit) else "",
        reason=reason,
    )


def _explain_missing(amounts: Amounts) -> str:
    """Returns why there are no figures per token. Empty if there are some."""
    if not amounts.prompt_tokens + amounts.generated_tokens:
        return "there were no tokens in this range"

    covered = amounts.token_seconds / amounts.allocated_seconds
    if covered < _LEAST_COVERED:
        return (
            f"tokens were read in {covered:.0%} of the allocated time only: choose a range in which"
            " podgpu reads them"
        )
    return ""


def _make_split(fit: TokenFit, sums: EngineSums) -> TokenSplit:
    prompt_cost = None
    generated_cost = None
    if sums.is_priced and sums.amounts.busy_seconds:
        busy = sums.amounts.busy_seconds
        cost = sums.cost_at_use
        prompt_cost = round(scale_bill(cost, busy, fit.prompt * _MILLION), _DIGITS)
        generated_cost = round(scale_bill(cost, busy, fit.generated * _MILLION), _DIGITS)

    return TokenSplit(
        prompt_gpu_seconds=round(fit.prompt * _MILLION, _DIGITS),
        generated_gpu_seconds=round(fit.generated * _MILLION, _DIGITS),
        residual_ratio=round(fit.residual_ratio, _DIGITS),
        steps=fit.steps,
        prompt_cost=prompt_cost,
        generated_cost=generated_cost,
    )


def _round_cost(parts: CostParts, factor: float) -> TokenCost:
    """Rounds to 4 digits. The largest part absorbs the error, so that the parts still add up."""
    total = round(parts.total * factor, _DIGITS)
    rounded = {}
    for name, part in parts._asdict().items():
        rounded[name] = round(part * factor, _DIGITS)

    largest = max(rounded, key=rounded.__getitem__)
    error = total - math.fsum(rounded.values())
    rounded[largest] = round(rounded[largest] + error, _DIGITS)
    return TokenCost(total, **rounded)
