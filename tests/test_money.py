"""Money as people read it. tests/browser/test_money.py has the same cases for the page."""

from __future__ import annotations

import pytest

from podgpu.money import write_decimal, write_money


@pytest.mark.parametrize(
    ("amount", "currency", "text"),
    [
        (1234.5, "USD", "1,234.50 USD"),
        (1234.5, "JPY", "1,234 JPY"),
        (1234.5, "KWD", "1,234.500 KWD"),
        (1234.5, "credits", "1,234.50 credits"),
        (1234.5, "", "1,234.50"),
        (0.005, "USD", "0.01 USD"),
        (0.0034, "USD", "0.0034 USD"),
        (-0.0034, "USD", "-0.0034 USD"),
        (0.3, "JPY", "0.30 JPY"),
        (1.2e-6, "credits", "0.0000012 credits"),
        (1e-13, "USD", "0.00 USD"),
        (0.0, "USD", "0.00 USD"),
    ],
)
def test_money_has_the_decimals_of_its_currency(amount: float, currency: str, text: str) -> None:
    assert write_money(amount, currency) == text


def test_small_numbers_are_not_written_as_zero() -> None:
    assert write_decimal(0.004) == "0.0040"
    assert write_decimal(0.005) == "0.01"
    assert write_decimal(0.0) == "0.00"
