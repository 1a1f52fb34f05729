"""Tests single decisions of the bill: its notes, the names and the order of its rows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from podgpu.charge import UNALLOCATED, Amounts, Charge, HeldTime, Tokens, UsageAccount, charge
from podgpu.fleet.prices import Price, Prices
from podgpu.model import Holder
from podgpu.past.bills.bill import (
    RangeAnswer,
    RangeQuery,
    describe_row,
    group_now,
    make_range,
    parse_range_query,
)
from podgpu.past.books.gpu_sample import GpuSample
from podgpu.past.books.store import HistoryStore
from podgpu.past.sqlite.sqlite_bills import read_range_answer
from tests.fleet.states import gpu, holder, node, state_of

HOUR = 3600.0
START = 1_800_000_000
PRICES = Prices("EUR", {"*": Price(2.0)})
POD = UsageAccount("ml", "train", labels='{"team": "a"}', methods="exact")


def priced(account: UsageAccount = POD, currency: str = "EUR", **amounts: float) -> Charge:
    known = {"allocated_seconds": HOUR, "measured_seconds": HOUR, "cost": 2.0, **amounts}
    return Charge(account, amounts=Amounts(**known), currency=currency)


def make_bill(
    *usage: Charge, by: str = "pod", order: str = "cost", prices: Prices = PRICES
) -> RangeAnswer:
    query = parse_range_query({"by": by}, "wasted" if order == "wasted" else "cost")
    return make_range(query, (0.0, HOUR), usage, prices, {})


@pytest.mark.parametrize("by", ["pod", "namespace", "label:team"])
def test_a_complete_bill_has_no_notes(by: str) -> None:
    answer = make_bill(priced(), priced(UNALLOCATED), by=by)
    assert answer.notes == []
    assert (answer.totals.unpriced_hours, answer.totals.unheld_hours) == (None, None)


def test_a_label_that_no_pod_has() -> None:
    [note] = make_bill(priced(), by="label:tier").notes
    assert note.startswith("no pod has the label 'tier'")


@pytest.mark.parametrize(("seconds", "expected"), [(18.0, ["0.01 GPU-hours"]), (17.0, [])])
def test_hours_without_a_price_from_half_a_hundredth_on(
    seconds: float, expected: Sequence[str]
) -> None:
    other = priced(currency="", allocated_seconds=seconds, measured_seconds=seconds, cost=0.0)
    notes = make_bill(priced(), other).notes
    assert [note.partition(" have no price in EUR")[0] for note in notes] == expected


@pytest.mark.parametrize(("seconds", "expected"), [(18.0, ["0.01 "]), (17.0, [])])
def test_hours_in_which_something_ran_without_a_holder(
    seconds: float, expected: Sequence[str]
) -> None:
    notes = make_bill(priced(UNALLOCATED, unheld_seconds=seconds)).notes
    assert [note.partition("unallocated GPU-hours were in use")[0] for note in notes] == expected


@pytest.mark.parametrize(
    ("methods", "measured_seconds", "is_noted"),
    [("mps exact", 0.0, True), ("mps", HOUR, False), ("exact", 0.0, False)],
)
def test_hours_under_mps_are_noted_if_their_use_is_unknown(
    methods: str, measured_seconds: float, is_noted: bool
) -> None:
    account = POD._replace(methods=methods)
    notes = make_bill(priced(account, measured_seconds=measured_seconds)).notes
    assert [note[:30] for note in notes] == ["the use of 1.0 GPU-hours is un"] * is_noted


def test_without_prices_no_hours_are_counted_as_unpriced() -> None:
    answer = make_bill(priced(currency=""), prices=Prices("", {}))
    assert answer.notes == ["there are no prices: start podgpu with --prices"]
    assert (answer.totals.unpriced_hours, answer.totals.cost) == (None, None)


def test_rows_are_sorted_by_cost_then_by_hours() -> None:
    def row(name: str, hours: float, cost: float) -> Charge:
        return priced(UsageAccount("ml", name), allocated_seconds=hours * HOUR, cost=cost)

    usage = [priced(UNALLOCATED, cost=9.0), row("long", 3.0, 1.0), row("dear", 1.0, 2.0)]
    usage += [row("same-b", 2.0, 1.0), row("same-a", 2.0, 1.0)]
    rows = make_bill(*usage).rows
    assert [row.pod for row in rows] == ["dear", "long", "same-a", "same-b", ""]


def test_waste_is_sorted_by_money_then_by_hours() -> None:
    def idle(name: str, seconds: float, cost: float) -> Charge:
        return priced(UsageAccount("ml", name), idle_seconds=seconds, idle_cost=cost)

    usage = [
        idle("cheap", 900.0, 0.1),
        idle("same-b", 300.0, 0.5),
        idle("same-a", 300.0, 0.5),
        idle("longer", 600.0, 0.5),
        idle("dear", 60.0, 1.0),
        priced(UNALLOCATED),
    ]
    rows = make_bill(*usage, order="wasted").rows
    assert [row.pod for row in rows] == ["dear", "longer", "same-a", "same-b", "cheap"]


@pytest.mark.parametrize(
    ("account", "text"),
    [
        (UsageAccount("ml", "web"), "ml/web"),
        (UsageAccount("ml", uid="u-1"), "ml/u-1"),
        (UsageAccount(container_id="c-1"), "c-1"),
        (UsageAccount(job="17"), "job 17"),
        (UsageAccount(job="user ann", user="ann"), "user ann"),
        (UNALLOCATED, "unallocated"),
    ],
)
def test_a_row_is_named_by_what_is_known(account: UsageAccount, text: str) -> None:
    [row] = make_bill(priced(account)).rows
    assert describe_row(row) == text


def test_a_range_may_have_only_one_end() -> None:
    assert parse_range_query({"from": "5"}).bounds(60.0) == (5.0, 60.0)
    assert parse_range_query({"to": "50", "range": "1m"}).bounds(60.0) == (-10.0, 50.0)


def test_a_reservation_for_an_unknown_pod_is_no_current_row() -> None:
    state = state_of(node("n1", gpu(0, Holder(source="kubelet")), gpu(1, holder("a"))))
    rows = group_now(state, [], RangeQuery("pod"))
    assert [dict(name)["pod"] for name in rows] == ["a"]


def test_a_row_without_usage_has_no_waste() -> None:
    name = (("cluster", ""), ("namespace", "ml"), ("pod", "new"))
    answer = make_range(RangeQuery(), (0.0, HOUR), [], PRICES, {name: {"gpus": 1.0}})
    [row] = answer.rows
    assert (row.gpus, row.waste, answer.totals.waste) == (1.0, None, None)


def test_pods_without_an_owner_have_a_row_each() -> None:
    usage = [priced(UsageAccount("ml", name)) for name in ("a", "b")]
    owned = [
        priced(UsageAccount("ml", name, owner_kind="Job", owner_name="j")) for name in ("c", "d")
    ]
    rows = make_bill(*usage, *owned, by="owner").rows
    assert [describe_row(row) for row in rows] == ["ml/Job/j", "ml/a", "ml/b"]


def test_pods_of_the_same_name_in_two_clusters_have_their_own_current_values() -> None:
    east = replace(node("n1", gpu(0, holder("a"))), cluster="east")
    west = replace(node("n2", gpu(1, holder("a")), gpu(2, holder("b"))), cluster="west")
    account = UsageAccount("ml", "a")
    usage = [Charge(account, cluster=cluster) for cluster in ("east", "west")]
    rows = group_now(state_of(east, west), usage, RangeQuery("namespace"))
    gpus = {dict(name)["cluster"]: row["gpus"] for name, row in rows.items()}
    assert gpus == {"east": 1.0, "west": 2.0}
    # Each pod has the owner that is recorded in its cluster.
    usage = [
        Charge(account._replace(owner_kind="Job", owner_name=cluster), cluster=cluster)
        for cluster in ("east", "west")
    ]
    rows = group_now(state_of(east, west), usage, RangeQuery("owner"))
    owners = [dict(name).get("owner") for name in rows]
    assert [owner and owner.name for owner in owners] == ["east", "west", None]
    # With usage of one cluster, a pod of the other one is not confused with it.
    rows = group_now(state_of(east, west), usage[:1], RangeQuery("namespace"))
    assert {dict(name)["cluster"] for name in rows} == {"east", "west"}


def test_a_user_is_an_account_only_without_a_job_or_container() -> None:
    gpus = (
        gpu(0, Holder(user="ann")),
        gpu(1, Holder(job="17", user="ann")),
        gpu(2, Holder(container_id="c-1", user="ann")),
    )
    rows = [dict(name) for name in group_now(state_of(node("n1", *gpus)), [], RangeQuery("pod"))]
    names = [(row["job"], row["container_id"], row["user"]) for row in rows]
    assert names == [("user ann", "", "ann"), ("17", "", ""), ("", "c-1", "")]


def test_ids_name_only_workloads_without_a_pod_name() -> None:
    gpus = (
        gpu(0, Holder("ml", "a", uid="u-1", container_id="c-1")),
        gpu(1, Holder(uid="u-2", container_id="c-2")),
    )
    rows = [dict(name) for name in group_now(state_of(node("n1", *gpus)), [], RangeQuery("pod"))]
    ids = [(row["pod"], row["uid"], row["container_id"]) for row in rows]
    assert ids == [("a", "", ""), ("", "u-2", "c-2")]


def test_the_bill_of_an_empty_history_is_empty() -> None:
    store = HistoryStore()
    with store.reader() as db:
        answer = read_range_answer(db, RangeQuery(), START + 600.0, state_of(prices=PRICES))
    store.close()
    assert (answer.rows, answer.totals.gpu_hours) == ([], 0.0)
    assert answer.recorded_from == START + 600.0


def test_tokens_per_second_count_only_recorded_time() -> None:
    store = HistoryStore()
    tokens = Tokens(prompt=600.0, generated=600.0)
    for at in (0, 300):
        amounts = charge(HeldTime(300.0, busy=150.0, tokens=tokens), 1.0, 2.0)
        charges = [Charge(POD, "main", amounts, currency="EUR")]
        store.append(START + at, [GpuSample("GPU-0", "", "n1", 0, None, charges)])
    with store.reader() as db:
        answer = read_range_answer(db, RangeQuery(), START + 600.0, state_of(prices=PRICES))
    store.close()
    assert answer.totals.tokens is not None
    assert answer.totals.tokens.per_second == 4.0
    assert answer.recorded_from == START
