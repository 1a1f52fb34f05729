"""Whole numbers in proportion."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.usage.charges import split


@pytest.mark.parametrize(
    ("total", "weights", "parts"),
    [
        (10, [1, 1], [5, 5]),
        (10, [1, 1, 1], [4, 3, 3]),
        (2, [1, 1, 1], [1, 1, 0]),
        (1, [1, 2], [0, 1]),
        (7, [0, 5, 0], [0, 7, 0]),
        (0, [3, 4], [0, 0]),
        (5, [0, 0], [0, 0]),
        (5, [], []),
        (10**40 + 1, [10**30, 10**30], [5 * 10**39 + 1, 5 * 10**39]),
    ],
)
def test_known_splits(total: int, weights: list[int], parts: list[int]) -> None:
    assert split(total, weights) == parts


TOTALS = st.integers(0, 10**30)
WEIGHTS = st.lists(st.integers(0, 10**30) | st.integers(0, 3), min_size=1).filter(any)


@given(TOTALS, WEIGHTS)
def test_the_parts_add_up(total: int, weights: list[int]) -> None:
    assert sum(split(total, weights)) == total


@given(TOTALS, WEIGHTS)
def test_each_part_is_within_one_of_its_proportion(total: int, weights: list[int]) -> None:
    for part, weight in zip(split(total, weights), weights, strict=True):
        assert abs(part - Fraction(total * weight, sum(weights))) < 1
        assert part >= 0
        assert part == 0 or weight > 0, "who weighs nothing gets nothing"


@given(TOTALS, WEIGHTS)
def test_who_weighs_more_never_gets_less(total: int, weights: list[int]) -> None:
    parts = [part for _, part in sorted(zip(weights, split(total, weights), strict=True))]
    assert parts == sorted(parts)


@given(TOTALS, WEIGHTS)
def test_the_unit_of_the_weights_does_not_matter(total: int, weights: list[int]) -> None:
    assert split(total, [weight * 1000 for weight in weights]) == split(total, weights)
