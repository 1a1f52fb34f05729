"""The figures of savings that are metrics. `past/savings_watch.py` computes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class SavedGpus(NamedTuple):
    """What lines of a kind, or one pod in a line, would save in a month of 730 hours."""

    kind: str  # stop, shrink or share
    gpus: float
    cost: float | None = None  # None without a price
    cluster: str = ""
    namespace: str = ""
    pod: str = ""  # empty for a kind
    model: str = ""
    target: str = ""


class SavingsFigures(NamedTuple):
    kinds: Sequence[SavedGpus] = ()
    pods: Sequence[SavedGpus] = ()
    currency: str = ""
    prediction_error_ratio: float | None = None


NO_SAVINGS = SavingsFigures()
"""Not computed yet, or not computed here."""
