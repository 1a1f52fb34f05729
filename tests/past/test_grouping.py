"""Bills for which the database adds up accounts are those of the single accounts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random

import msgspec
import pytest

from podgpu.charge import UNALLOCATED, Charge, HeldTime, Tokens, UsageAccount, charge
from podgpu.fleet.prices import Price, Prices
from podgpu.past.bills.bill import RangeQuery, make_range
from podgpu.past.books.gpu_sample import GpuSample
from podgpu.past.books.store import HistoryStore
from podgpu.past.sqlite.sqlite_bills import read_range_answer
from podgpu.past.sqlite.sqlite_charges import read_charges, read_usage_start
from tests.fleet.states import gpu, holder, node, state_of

DAY = 86_400
START = 1_800_000_000 // DAY * DAY
END = START + 3 * DAY
PRICES = Prices("EUR", {"*": Price(2.0)}, "file")


def make_accounts(random: Random) -> Iterator[UsageAccount]:
    for number in range(40):
        kind, name = random.choice((("Deployment", "web"), ("Job", "train"), ("", "")))
        labels = json.dumps({"team": random.choice("ab"), "app": "x"} if kind else {"app": "y"})
        method = random.choice(("exact", "samples"))
        names = (random.choice(("ml", "dev")), f"pod-{number}")
        yield UsageAccount(*names, "", "", "", kind, name, labels, method)
    yield UsageAccount(job="17")
    yield UsageAccount(job="user ann", user="ann")
    yield UNALLOCATED


def write(store: HistoryStore, random: Random) -> None:
    accounts = list(make_accounts(random))
    for start in range(START, END, 1800):
        charges = []
        for account in random.sample(accounts, 20):
            has_engine = account.pod in ("pod-1", "pod-2")
            time = HeldTime(
                held=300.0,
                share=random.choice((0.5, 1.0)),
                busy=random.uniform(0, 200),
                idle=random.uniform(0, 100),
                joules=random.uniform(0, 1e5),
                tokens=Tokens(100.0, 50.0) if has_engine else None,
            )
            price, currency = random.choice(((2.0, "EUR"), (None, "")))
            charges.append(Charge(account, "main", charge(time, 1.0, price), currency=currency))
        store.append(start, [GpuSample("GPU-0", "", "n1", 0, None, charges)])


@pytest.mark.parametrize("by", ["pod", "owner", "namespace", "label:team", "model"])
@pytest.mark.parametrize("visible", [None, frozenset({"ml"})])
def test_the_answer_is_that_of_single_accounts(by: str, visible: frozenset[str] | None) -> None:
    store = HistoryStore()
    write(store, Random(by))
    query = RangeQuery(by, start=START + 1000.0, end=END - 1000.0, visible=visible)
    with store.reader() as db:
        answer = read_range_answer(db, query, END, state_of(prices=PRICES))
        bounds = query.bounds(END)
        single = read_charges(db, *bounds, END)
        since = float(read_usage_start(db) or 0)
    store.close()
    expected = make_range(query, bounds, single, PRICES, {}, since)
    assert len(expected.rows) >= 2
    # Tokens of pods over 5 minutes are read separately.
    for figures in (answer.totals, expected.totals, *answer.rows, *expected.rows):
        if figures.tokens is not None:
            figures.tokens = msgspec.structs.replace(
                figures.tokens, per_million=None, per_million_reason=""
            )
    found = msgspec.to_builtins(answer)
    found.pop("recorded_from", None)
    assert found["labels"] == ["app", "team"]
    assert found == msgspec.to_builtins(expected)


def test_the_history_knows_the_owner_of_a_pod_that_runs_now() -> None:
    store = HistoryStore()
    account = UsageAccount("ml", "train", owner_kind="Job", owner_name="batch")
    other = account._replace(pod="ended")
    amounts = charge(HeldTime(300.0), 1.0, 2.0)
    charges = [Charge(one, "main", amounts, currency="EUR") for one in (account, other)]
    store.append(START, [GpuSample("GPU-0", "", "n1", 0, None, charges)])
    state = state_of(node("n1", gpu(0, holder("train"))), prices=PRICES)
    with store.reader() as db:
        [row] = read_range_answer(db, RangeQuery("owner"), START + 600.0, state).rows
    store.close()
    assert (row.owner and row.owner.text, row.gpus) == ("Job/batch", 1.0)
