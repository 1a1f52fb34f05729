"""What is held and idle, in hours and money, by pod, owner and namespace."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.cluster.collect import NodeReading
from podgpu.cluster.prices import NO_PRICES, Price, Prices
from podgpu.cluster.waste import (
    ENDED_SECONDS,
    GroupBy,
    WasteAnswer,
    WasteLedger,
    WasteRow,
    csv_name,
    encode_waste_csv,
    escape_cell,
)
from podgpu.history.queries import UsageRow
from podgpu.history.store import Amounts
from podgpu.model import Holder, WorkloadOwner
from tests.cluster.states import WALL, World, gpu, holder, lost, mig, node

PRICES = Prices("EUR", {"*": Price(10.0)})
JOB = WorkloadOwner("Job", "train")
OWNERS = {("ml", "a"): JOB, ("ml", "b"): JOB}
IDLE, BUSY = {"utilization_ratio": 0.0}, {"utilization_ratio": 0.5}


class Ledger:
    def __init__(self, prices: Prices = PRICES, **limits: int) -> None:
        self.world, self.ledger, self.prices, self.at = World(), WasteLedger(**limits), prices, 0.0

    def round(self, *gpus: Any, seconds: float = 15.0, **more: Any) -> None:
        self.at += seconds
        self.take(node("n1", *gpus, read_at=self.at), **more)

    def take(self, *nodes: NodeReading, **more: Any) -> None:
        state = self.world.round(*nodes, at=self.at, prices=self.prices, owners=OWNERS, **more)
        self.ledger.update(state, self.at, 45.0)

    def answer(self, by: GroupBy = "pod") -> WasteAnswer:
        return self.ledger.answer(by, WALL, WALL, "example", simulated=True)

    def rows(self, by: GroupBy = "pod") -> list[WasteRow]:
        return self.answer(by).rows


def test_hours_and_money_of_an_idle_holder_beside_a_busy_one() -> None:
    ledger = Ledger()
    for _ in range(241):
        ledger.round(
            gpu(0, holder("a", **IDLE)), gpu(1, holder("b", **BUSY)), gpu(2, holder("w", "web", **IDLE), busy=0.0)
        )
    a, web, b = ledger.rows()
    assert (a.pod, a.idle_hours, a.allocated_hours, a.wasted, a.cost_per_hour) == ("a", 1.0, 1.0, 10.0, 10.0)
    assert (a.owner, a.idle_since, a.gpus, a.idle_gpus) == (JOB, round(WALL + 15), 1.0, 1.0)
    assert (web.pod, web.wasted) == ("w", 10.0)
    assert (b.pod, b.idle_hours, b.allocated_hours, b.wasted, b.idle_since) == ("b", 0.0, 1.0, 0.0, None)
    together = ledger.rows("owner")[0]
    assert (together.owner, together.pod, together.gpus, together.idle_gpus, together.wasted) == (
        JOB,
        "",
        2.0,
        1.0,
        10.0,
    )
    assert [row.namespace for row in ledger.rows("namespace")] == ["ml", "web"]


def test_parts_of_gpus_and_idle_times_within_a_round() -> None:
    ledger = Ledger()
    for _ in range(2):
        shared = gpu(0, holder("a", share=0.25, **IDLE), holder("b", share=0.75, **BUSY))
        ledger.round(shared, gpu(1, instances=(mig(1, holder("m", **IDLE)),)), seconds=36.0)
    rows = {row.pod: row for row in ledger.rows()}
    assert (rows["a"].idle_hours, rows["a"].wasted) == (0.0025, 0.025)
    assert rows["m"].allocated_hours == pytest.approx(0.01 / 7, abs=1e-4)
    late = Ledger()
    for at, since in ((15.0, None), (30.0, WALL + 25.0)):
        late.at = at
        late.take(node("n1", gpu(0, holder("a", utilization_ratio=0.0, idle_since=since)), read_at=at, exporter_id="x"))
    assert late.rows()[0].idle_hours == round(5 / 3600, 4), "it worked for the first ten seconds"


def test_what_was_not_read_is_not_charged() -> None:
    ledger = Ledger()
    ledger.round(gpu(0, holder("a", **IDLE)))
    ledger.round(gpu(0, holder("a", **IDLE)), seconds=46.0)
    assert ledger.rows()[0].allocated_hours == 0
    ledger.round(lost(0, holder("a")), seconds=36.0)
    (row,) = ledger.rows()
    assert (row.allocated_hours, row.idle_hours) == (0.01, 0.0)


def test_without_prices_there_are_hours_and_another_currency_starts_again() -> None:
    ledger = Ledger(NO_PRICES)
    for _ in range(2):
        ledger.round(gpu(0, holder("a", **IDLE)), seconds=36.0)
    (row,) = ledger.rows()
    assert (row.idle_hours, row.wasted, row.cost_per_hour) == (0.01, None, None)
    ledger.prices = PRICES
    ledger.round(gpu(0, holder("a", **IDLE)), seconds=36.0)
    assert ledger.rows()[0].wasted == 0.1
    ledger.prices = Prices("USD", {"*": Price(20.0)})
    ledger.round(gpu(0, holder("a", **IDLE)), seconds=36.0)
    assert (ledger.answer().currency, ledger.rows()[0].wasted) == ("USD", 0.2)


def test_ended_pods_have_rows_for_a_day_and_their_owners_longer() -> None:
    ledger = Ledger()
    for _ in range(2):
        ledger.round(gpu(0, holder("a", **IDLE)), seconds=36.0)
    ledger.round(gpu(0))
    (row,) = ledger.rows()
    assert (row.gpus, row.ended_at, row.idle_hours) == (0.0, round(WALL + ledger.at), 0.01)
    ledger.round(gpu(0), seconds=ENDED_SECONDS + 1)
    assert ledger.rows() == []
    (owner,) = ledger.rows("owner")
    assert (owner.owner, owner.idle_hours, owner.wasted) == (JOB, 0.01, 0.1)
    bounded = Ledger(max_ended=3, max_owners=2)
    for number in range(50):
        bounded.round(gpu(0, holder(f"p{number}", f"ns{number}", **IDLE)))
    assert len(bounded.rows()) == 4
    assert len(bounded.rows("namespace")) == 6


def test_a_restart_continues_from_the_history_file() -> None:
    ledger = Ledger()
    stored = Amounts(allocated_seconds=7200, idle_seconds=3600, cost=20, idle_cost=10)
    rows = [
        UsageRow(("ml", "a", "", "", "", "Job", "train"), "EUR", int(WALL) - 60, stored),
        UsageRow(("ml", "old", "", "", "", "", ""), "EUR", int(WALL) - 2 * 86_400, stored),
    ]
    ledger.ledger.restore(rows, 0.0, WALL)
    ledger.round(gpu(0, holder("a", **IDLE)))
    ledger.round(gpu(0, holder("a", **IDLE)), seconds=36.0)
    (row,) = ledger.rows()
    assert (row.pod, row.owner, row.allocated_hours, row.wasted) == ("a", JOB, 2.01, 10.1)
    assert sum(row.idle_hours for row in ledger.rows("namespace")) == 2.01


@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=4), max_size=8))
def test_sums_agree_and_never_decrease(rounds: list[list[tuple[int, bool]]]) -> None:
    ledger, last = Ledger(), 0.0
    for held in rounds:
        ledger.round(*(gpu(n, holder(f"p{pod}", **(IDLE if idle else BUSY))) for n, (pod, idle) in enumerate(held)))
        totals = [sum(row.wasted or 0 for row in ledger.rows(by)) for by in ("pod", "owner", "namespace")]
        assert totals == pytest.approx([totals[0]] * 3, abs=1e-3)
        assert totals[0] >= last - 1e-9
        last = totals[0]
        assert all(row.idle_hours <= row.allocated_hours for row in ledger.rows())


def test_json_and_csv() -> None:
    ledger = Ledger()
    job = Holder(job="=1+1", source="slurm", usage=holder(**IDLE).usage)
    for _ in range(2):
        ledger.round(gpu(0, job), gpu(1, holder("a", **IDLE)), seconds=36.0)
    ledger.round(gpu(0, job))
    document = json.loads(msgspec.json.encode(ledger.answer()))
    assert {name: document[name] for name in ("api", "by", "currency", "prices", "simulated")} == {
        "api": "podgpu/v1",
        "by": "pod",
        "currency": "EUR",
        "prices": "example",
        "simulated": True,
    }
    assert {"namespace": "", "job": "=1+1"}.items() <= document["rows"][0].items()
    assert document["rows"][1]["owner"] == {"kind": "Job", "name": "train"}
    table = list(csv.DictReader(io.StringIO(encode_waste_csv(ledger.answer()).decode())))
    assert [row["job"] for row in table] == ["'=1+1", ""], "not a formula"
    assert (table[1]["owner_name"], table[1]["pod"], table[1]["idle_since"]) == ("train", "a", "")
    assert table[1]["ended_at"] == "2023-11-14T22:16:27Z"
    assert csv_name(ledger.answer()) == "podgpu-waste-by-pod-SIMULATED.csv"


@given(st.text(max_size=5))
def test_no_cell_is_a_formula(name: str) -> None:
    assert not escape_cell(name).lstrip(" ").startswith(("=", "+", "-", "@", "\t", "\r", "\n", "|", "%"))
