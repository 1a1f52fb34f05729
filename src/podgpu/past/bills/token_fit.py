"""Separates the cost of prompt tokens from that of generated tokens.

Engines count both, but not the GPU time of each. In every 5 minutes, the busy time is about
`a * prompt tokens + b * generated tokens`, so a and b follow from many 5 minutes (least squares).
They are shown only if both are clearly different from 0: a load whose prompts and answers always
have the same ratio says nothing about either.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from podgpu.charge import Amounts

_LEAST_STEPS = 12  # an hour
_LEAST_T = 4.0  # estimate divided by its standard error
_LEAST_DETERMINANT = 1e-4  # of the correlation of both counters; 0 if they are proportional
_LARGEST_RESIDUAL = 0.25


class TokenFit(NamedTuple):
    """GPU seconds of a token."""

    prompt: float
    generated: float
    residual_ratio: float  # typical error of 5 minutes, divided by their mean busy time
    steps: int


class NoFit(NamedTuple):
    """The two kinds of tokens cannot be told apart."""

    reason: str


def fit_tokens(steps: Iterable[Amounts]) -> TokenFit | NoFit:
    """`steps`: what a pod, model or owner used in 5 minutes each."""
    used = [step for step in steps if step.busy_seconds > 0]
    if len(used) < _LEAST_STEPS:
        return NoFit(
            f"it needs {_LEAST_STEPS} periods of 5 minutes with work, and {len(used)} are recorded"
        )

    prompts = [step.prompt_tokens for step in used]
    generateds = [step.generated_tokens for step in used]
    busy = [step.busy_seconds for step in used]

    # The normal equations. p: prompt tokens, g: generated tokens, b: busy time
    pp = _sum_products(prompts, prompts)
    gg = _sum_products(generateds, generateds)
    pg = _sum_products(prompts, generateds)
    pb = _sum_products(prompts, busy)
    gb = _sum_products(generateds, busy)
    if not pp:
        return NoFit("there were no prompt tokens")
    if not gg:
        return NoFit("there were no generated tokens")

    determinant = pp * gg - pg * pg
    if determinant < _LEAST_DETERMINANT * pp * gg:
        return NoFit("prompt and generated tokens always had the same ratio")

    prompt = (gg * pb - pg * gb) / determinant
    generated = (pp * gb - pg * pb) / determinant
    variance = _compute_variance(used, prompt, generated)
    mean_busy = math.fsum(busy) / len(used)
    residual = math.sqrt(variance) / mean_busy
    if residual > _LARGEST_RESIDUAL:
        return NoFit(
            f"the tokens do not explain the GPU time: 5 minutes differ by {residual:.0%}, and"
            f" {_LARGEST_RESIDUAL:.0%} is the most"
        )

    is_prompt_clear = _is_clear(prompt, variance * gg / determinant)
    is_generated_clear = _is_clear(generated, variance * pp / determinant)
    if not is_prompt_clear or not is_generated_clear:
        return NoFit(
            "the result is not significant: the GPU time of one kind of tokens is less than"
            f" {_LEAST_T:.0f} times its standard error"
        )

    return TokenFit(prompt, generated, residual, len(used))


def _is_clear(estimate: float, variance: float) -> bool:
    """`variance`: of the estimate."""
    return estimate > 0 and estimate >= _LEAST_T * math.sqrt(variance)


def _compute_variance(used: Sequence[Amounts], prompt: float, generated: float) -> float:
    """Returns the variance of the busy time that the two times per token do not explain."""
    squares = []
    for step in used:
        expected = prompt * step.prompt_tokens + generated * step.generated_tokens
        error = step.busy_seconds - expected
        squares.append(error**2)
    # Two parameters were estimated from the same steps.
    return math.fsum(squares) / (len(used) - 2)


def _sum_products(one: Iterable[float], other: Iterable[float]) -> float:
    return math.fsum(map(operator.mul, one, other))
