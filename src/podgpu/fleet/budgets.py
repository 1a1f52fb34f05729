"""Budgets of namespaces and pod labels, read from `--budgets FILE`.

currency: EUR  # the currency of the prices
budgets:  # per calendar month (UTC)
  - {namespace: research, per_month: 5000}
  - {label: team, value: vision, per_month: 12000}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from podgpu.errors import Note, UsageError
from podgpu.files import read_last_valid
from podgpu.known import divide_known, round_known
from podgpu.money import write_money

_MAX_FILE_BYTES = 256 * 1024
_Text = Annotated[str, Meta(max_length=256)]


class Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a namespace, or of the pods with a label."""

    per_month: Annotated[float, Meta(gt=0, le=1e12)]
    namespace: _Text = ""
    label: _Text = ""
    value: _Text = ""

    @property
    def name(self) -> str:
        if self.label:
            return f"{self.label}={self.value}"
        return f"namespace {self.namespace}"


class BudgetFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    currency: Annotated[str, Meta(min_length=1, max_length=16)]
    budgets: Annotated[tuple[Budget, ...], Meta(min_length=1, max_length=1000)]


class BudgetUse(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How much of a budget the current month has cost."""

    namespace: str = ""
    label: str = ""
    value: str = ""
    currency: str
    per_month: float
    cost: float
    ratio: float  # cost divided by the budget
    forecast: float | None = None  # cost of the whole month. None if it is not known

    @property
    def name(self) -> str:
        return Budget(self.per_month, self.namespace, self.label, self.value).name

    @property
    def forecast_ratio(self) -> float | None:
        return round_known(divide_known(self.forecast, self.per_month), 4)

    @property
    def warning(self) -> str:
        """Empty if the cost of the month is within the budget."""
        budget = f"{write_money(self.per_month, self.currency)} per month"
        if self.ratio > 1:
            cost = write_money(self.cost, self.currency)
            return f"{self.name}: {cost} exceed the budget of {budget}"
        if self.forecast is None or self.forecast <= self.per_month:
            return ""

        forecast = f"the forecast of {write_money(self.forecast, self.currency)}"
        used = f"{self.ratio:.0%} are used"
        return f"{self.name}: {forecast} exceeds the budget of {budget} ({used})"


ReadBudgetFile = Callable[[], tuple[BudgetFile, tuple[Note, ...]]]
BudgetUses = tuple[Sequence[BudgetUse], Sequence[Note]]
"""The use of all budgets, and what is wrong."""


def parse_budgets(content: bytes, file: str) -> BudgetFile:
    """Parses the file. Raises UsageError, with the file and the invalid entry in the message."""
    from podgpu.decode import decode_yaml  # so that a server without budgets does not load YAML

    parsed = decode_yaml(content, file, BudgetFile)
    for number, budget in enumerate(parsed.budgets):
        has_namespace = bool(budget.namespace)
        has_label = bool(budget.label)
        is_incomplete = has_label != bool(budget.value)
        if is_incomplete or has_namespace == has_label:
            text = "a budget needs either a namespace, or a label and its value"
            raise UsageError(f"{file}: budgets[{number}]: {text}")

    names = Counter(budget.name for budget in parsed.budgets)
    twice = [name for name, number in names.items() if number > 1]
    if twice:
        raise UsageError(f"{file}: {twice[0]} has several budgets")

    return parsed


def read_budgets(path: str) -> ReadBudgetFile:
    """Returns a reader for the value of `--budgets`."""
    return read_last_valid("--budgets", "budgets", path, parse_budgets, _MAX_FILE_BYTES)
