"""Dividing a whole into whole numbers that add up to it again. Pure, and exact at any size: no floats."""

from __future__ import annotations

from collections.abc import Sequence


def split(total: int, weights: Sequence[int]) -> list[int]:
    """`total` in proportion to the weights, each part less than one unit from its exact proportion.

    What rounding down leaves goes to the largest remainders, the earlier of two equal ones first. Where all weights
    are 0 so are the parts, which is the only case in which they do not add up: whose it is then, the caller says.
    """
    whole = sum(weights)
    if whole == 0:
        return [0] * len(weights)
    parts, remainders = [], []
    for weight in weights:
        part, remainder = divmod(total * weight, whole)
        parts.append(part)
        remainders.append(remainder)
    by_remainder = sorted(range(len(weights)), key=lambda place: -remainders[place])
    for place in by_remainder[: total - sum(parts)]:
        parts[place] += 1
    return parts
