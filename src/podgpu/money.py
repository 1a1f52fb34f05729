"""Writes money for people. The page has the same rules in `web/page/format.js`."""

from __future__ import annotations

import math

_NO_DECIMALS = "BIF CLP DJF GNF ISK JPY KMF KRW PYG RWF UGX UYI VND VUV XAF XOF XPF"
_THREE_DECIMALS = "BHD IQD JOD KWD LYD OMR TND"
_DECIMALS = dict.fromkeys(_NO_DECIMALS.split(), 0) | dict.fromkeys(_THREE_DECIMALS.split(), 3)
_LEAST = 1e-6  # less is a rounding error


def write_money(amount: float, currency: str) -> str:
    """Returns a text such as `1,234.50 EUR`, `1,235 JPY` or, without a currency, `1,234.50`."""
    text = write_decimal(amount, _DECIMALS.get(currency, 2))
    return f"{text} {currency}".rstrip()


def write_decimal(amount: float, decimals: int = 2) -> str:
    """An amount that would be written as 0 has two significant digits: `0.0034`."""
    size = abs(amount)
    if _LEAST <= size < 0.5 / 10**decimals:
        decimals = 1 - math.floor(math.log10(size))
    return f"{amount:,.{decimals}f}"
