"""Compares the cost of the current month with the budgets, in a thread."""

from __future__ import annotations

import asyncio

from podgpu.errors import Note, PodgpuError
from podgpu.fleet.budgets import Budget, BudgetUse, BudgetUses, ReadBudgetFile
from podgpu.known import round_known, select_known, sum_all
from podgpu.past.bills.bill import RangeQuery
from podgpu.past.bills.costs import CostsAnswer, CostsQuery
from podgpu.past.interface import Past
from podgpu.watch import Watch

_SECONDS = 60.0  # the page and the alerts show a changed file after at most this time
_FIRST_SECONDS = 5.0  # until a cost is known


class BudgetWatch(Watch):
    name = "budgets"

    def __init__(self, past: Past, budgets: ReadBudgetFile) -> None:
        super().__init__()
        self._past = past
        self._budgets = budgets
        self._latest: BudgetUses = ((), ())

    def read(self) -> BudgetUses:
        """Returns the last result."""
        return self._latest

    def update(self) -> None:
        uses, notes = asyncio.run(self._compute())
        self._latest = uses, notes
        self.pause = _SECONDS if uses else _FIRST_SECONDS

    async def _compute(self) -> BudgetUses:
        """Returns the use of each budget, and notes. A cost that cannot be read is a note."""
        file, notes = self._budgets()
        uses = []
        answers: dict[str, CostsAnswer] = {}
        for budget in file.budgets:
            by = f"label:{budget.label}" if budget.label else "namespace"
            if by not in answers:
                query = CostsQuery(RangeQuery(by), is_month=True, most_rows=None)
                try:
                    answers[by] = await self._past.costs(query)
                except PodgpuError as error:
                    text = f"--budgets: the cost is unknown: {error}"
                    return (), (*notes, Note("--budgets cost", text))

            answer = answers[by]
            if answer.currency and answer.currency != file.currency:
                text = (
                    f"--budgets: the budgets are in {file.currency}, but the prices in"
                    f" {answer.currency}: use one currency"
                )
                return (), (*notes, Note("--budgets currency", text))

            use = _compare(budget, answer)
            if use is not None:
                uses.append(use)

        return uses, notes


def _compare(budget: Budget, answer: CostsAnswer) -> BudgetUse | None:
    """Returns None if the cost of this month is unknown. It is 0 for a namespace without GPUs."""
    if not select_known(answer.totals.steps.cost):
        return None

    costs = []
    forecasts = []
    for row in answer.rows:
        if (row.namespace, row.label) == (budget.namespace, budget.value):
            costs.append(row.cost)
            forecasts.append(row.forecast)

    total = sum_all(costs)
    # One of its rows has no price.
    if total is None:
        return None

    cost = round(total, 4)
    forecast = None
    if answer.forecast is not None:
        forecast = round_known(sum_all(forecasts), 4)

    return BudgetUse(
        namespace=budget.namespace,
        label=budget.label,
        value=budget.value,
        currency=answer.currency,
        per_month=budget.per_month,
        cost=cost,
        ratio=round(cost / budget.per_month, 4),
        forecast=forecast,
    )
