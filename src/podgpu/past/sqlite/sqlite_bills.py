"""Reads bills, and costs over time, from SQLite."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from sqlite3 import Connection

from podgpu.charge import Charge
from podgpu.errors import texts_of, utc_text
from podgpu.fleet.state import ClusterState, describe_unpriced
from podgpu.past.accounts import account_of
from podgpu.past.bills.bill import (
    CurrentRows,
    PeriodAnswer,
    RangeAnswer,
    RangeQuery,
    StepCharge,
    group_now,
    make_range,
)
from podgpu.past.bills.costs import (
    CostsAnswer,
    CostsQuery,
    CostStep,
    first_forecast_day,
    make_costs,
    select_budgets,
)
from podgpu.past.books.schema import OPEN, UNSETTLED, fetch_value
from podgpu.past.sqlite.sqlite_charges import (
    SINGLE,
    Grouping,
    read_accounts,
    read_charges,
    read_engines,
    read_steps,
    read_token_steps,
    read_usage_start,
)
from podgpu.past.time_steps import COARSE, DAY, HOUR

# By kind of row: the accounts that the database may add up (as SQL), and the fields that name their
# row. Unallocated GPUs, and pods without an owner, have rows of their own.
_NAMED_BY = {
    "namespace": ("namespace <> ''", {"namespace"}),
    "owner": ("owner_name <> ''", {"namespace", "owner_kind", "owner_name"}),
    "label": ("namespace <> ''", {"namespace", "labels"}),
}
_HOURS_OF_DAY = 24
_FULL_DAYS = f"""
SELECT hour / {DAY} * {DAY} AS day FROM (
    SELECT time AS hour FROM period WHERE resolution = {HOUR} UNION
    SELECT time / {HOUR} * {HOUR} FROM usage WHERE resolution IN ({OPEN}, {UNSETTLED}))
GROUP BY day HAVING count(*) = {_HOURS_OF_DAY}"""


def group_accounts(
    query: RangeQuery, also: Collection[str] = (), engines: Iterable[int] = ()
) -> Grouping:
    """Returns which accounts have the same row, so that the database adds them up.

    `also`: fields to keep. `engines`: ids of accounts that are not added up with others.
    """
    kind = "label" if query.label else query.by
    if kind not in _NAMED_BY:
        return SINGLE

    condition, names = _NAMED_BY[kind]
    engine_ids = ", ".join(map(str, engines))
    condition = f"{condition} AND account.id NOT IN ({engine_ids})"
    return Grouping(condition, frozenset(names).union(also))


def read_range_answer(
    db: Connection, query: RangeQuery, now: float, state: ClusterState
) -> RangeAnswer:
    start, end = query.bounds(now)
    # What tokens cost is computed for each pod with an LLM engine.
    grouping = group_accounts(query, ("labels", "methods"), read_engines(db))
    charges = read_charges(db, start, end, now, grouping)

    current: CurrentRows = {}
    if query.end is None:
        current = _group_held(db, state, charges, query)

    token_steps: Sequence[StepCharge] = ()
    if any(charge.amounts.token_seconds for charge in charges):
        token_steps = read_token_steps(db, start, end)

    recorded_since = read_usage_start(db)
    answer = make_range(
        query,
        (start, end),
        charges,
        state.prices,
        current,
        recorded_from=recorded_since or 0.0,
        token_steps=token_steps,
    )
    _add_record(answer, state, recorded_since, now)
    return answer


def _add_record(
    answer: PeriodAnswer, state: ClusterState, recorded_since: int | None, now: float
) -> None:
    """Adds what the history does not have. `recorded_since`: None if nothing is recorded."""
    answer.simulated = state.simulated
    answer.notes[:0] = texts_of(describe_unpriced(state.nodes, state.prices))
    if recorded_since is None or answer.from_ + COARSE < recorded_since:
        answer.recorded_from = now if recorded_since is None else float(recorded_since)
        answer.notes.insert(0, f"there is no record before {utc_text(answer.recorded_from)}")


def _group_held(
    db: Connection, state: ClusterState, usage: Sequence[Charge], query: RangeQuery
) -> CurrentRows:
    """Maps each row to its current values. The history may know owners and labels of more pods."""
    keys: set[tuple[str, ...]] = set()
    for node in state.nodes:
        for part in node.held:
            if part.holder.key:
                keys.add(account_of(part).key)

    accounts = read_accounts(db, sorted(keys))
    held = [Charge(account) for account in accounts]
    return group_now(state, [*usage, *held], query)


def read_costs_answer(
    db: Connection, query: CostsQuery, now: float, state: ClusterState
) -> CostsAnswer:
    requested_start = query.windows(now).start
    hours_kept_since = fetch_value(db, "SELECT since FROM kept WHERE resolution = ?", HOUR)
    if query.step == HOUR and hours_kept_since is not None:
        query = query._replace(kept_since=hours_kept_since)

    windows = query.windows(now)
    first = max(query.first_step(now), query.kept_since)
    steps = _read_steps(db, query.range, query.step, first, windows.recorded_until, now)
    days: list[CostStep] = []
    if query.has_forecast and query.step == DAY:
        days = steps
    elif query.has_forecast:
        first_day = first_forecast_day(now)
        days = _read_steps(db, query.range, DAY, first_day, now, now)

    answer = make_costs(query, now, state.prices, steps, days)
    answer.budgets = select_budgets(state.budgets, query.range)
    _add_record(answer, state, read_usage_start(db), now)
    if requested_start < windows.start:
        kept_since = utc_text(query.kept_since)
        answer.notes.insert(0, f"hours before {kept_since} are not kept: use days")

    return answer


def _read_steps(
    db: Connection, query: RangeQuery, step: int, start: int, end: float, now: float
) -> list[CostStep]:
    charges_by_step = read_steps(db, start, end, now, step, group_accounts(query))
    full_days = {day for (day,) in db.execute(_FULL_DAYS)}

    steps = []
    for time, charges in charges_by_step.items():
        is_over = time + step <= end
        is_full = step == HOUR or time in full_days
        is_complete = is_over and is_full
        steps.append(CostStep(time, charges, is_complete))

    return steps
