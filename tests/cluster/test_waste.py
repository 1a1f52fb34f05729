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
from podgpu.cluster.record import RoundReader
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.state import ClusterState
from podgpu.cluster.view import make_view
from podgpu.cluster.waste import (
    ENDED_SECONDS,
    GroupBy,
    WasteAnswer,
    WasteRow,
    csv_name,
    encode_waste_csv,
    escape_cell,
    make_waste,
)
from podgpu.history.queries import read_usage, read_usage_start
from podgpu.history.store import HistoryStore
from podgpu.model import Holder, SlotUsage, WorkloadOwner
from tests.cluster.states import WALL, World, gpu, holder, lost, mig, node

PRICES = Prices("EUR", {"*": Price(10.0)})
JOB = WorkloadOwner("Job", "train")
OWNERS = {("ml", "a"): JOB, ("ml", "b"): JOB}
IDLE, BUSY = {"utilization_ratio": 0.0}, {"utilization_ratio": 0.5}


class Ledger:
    """Stores each round in a history, as the recorder does."""

    def __init__(self, prices: Prices = PRICES) -> None:
        self.world, self.store, self.prices, self.at = World(), HistoryStore(), prices, 0.0
        self.read_round = RoundReader(lambda: self.world.state, 45.0, self.wall)

    def wall(self) -> float:
        return WALL + self.at

    def round(self, *gpus: Any, seconds: float = 15.0, **more: Any) -> None:
        self.at += seconds
        self.take(node("n1", *gpus, read_at=self.at, simulated=True), **more)

    def take(self, *nodes: NodeReading, **more: Any) -> None:
        self.world.round(*nodes, at=self.at, prices=self.prices, owners=OWNERS, **more)
        round_ = self.read_round()
        assert round_ is not None
        self.store.append(round_)

    def answer(self, by: GroupBy = "pod") -> WasteAnswer:
        state = self.world.state or ClusterState(ViewSettings(), WALL)
        with self.store.reader() as db:
            return make_waste(by, state, read_usage(db, self.prices.currency), read_usage_start(db), self.wall())

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


def test_use_under_mps_is_not_known_and_the_row_says_so() -> None:
    ledger = Ledger()
    clients = [holder(pod, share=0.5, processes=1, memory_used_bytes=1) for pod in ("a", "b")]
    for busy in (0.0, 0.72, 0.0):
        ledger.round(gpu(0, *clients, busy=busy, usage=SlotUsage(method="mps")), gpu(1, holder("idle", **IDLE)))
    rows = {row.pod: row for row in ledger.rows()}
    assert (rows["a"].idle_gpus, rows["a"].idle_hours, rows["a"].wasted) == (0.0, 0.0, 0.0)
    assert [rows[pod].unknown_because for pod in ("a", "b", "idle")] == ["not known under MPS"] * 2 + [""]
    table = {row["pod"]: row for row in csv.DictReader(io.StringIO(encode_waste_csv(ledger.answer()).decode()))}
    assert table["a"]["unknown_because"] == "not known under MPS"
    assert ledger.world.state is not None
    holders = make_view(ledger.world.state).nodes[0].gpus[0].holders
    assert [(one.use, one.unknown_because) for one in holders] == [("unknown", "not known under MPS")] * 2


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
    assert (row.gpus, row.ended_at, row.idle_hours) == (0.0, (WALL + ledger.at) // 15 * 15, 0.01), (
        "rounds are stored every 15 s"
    )
    ledger.round(gpu(0), seconds=ENDED_SECONDS + 1)
    assert ledger.rows() == []
    (owner,) = ledger.rows("owner")
    assert (owner.owner, owner.idle_hours, owner.wasted) == (JOB, 0.01, 0.1)


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
        "prices": "file",
        "simulated": True,
    }
    assert {"namespace": "", "job": "=1+1"}.items() <= document["rows"][0].items()
    assert document["rows"][1]["owner"] == {"kind": "Job", "name": "train"}
    table = list(csv.DictReader(io.StringIO(encode_waste_csv(ledger.answer()).decode())))
    assert [row["job"] for row in table] == ["'=1+1", ""], "not a formula"
    assert (table[1]["owner_name"], table[1]["pod"], table[1]["idle_since"]) == ("train", "a", "")
    assert table[1]["ended_at"] == "2023-11-14T22:16:15Z"
    assert csv_name(ledger.answer()) == "podgpu-waste-by-pod-SIMULATED.csv"


@given(st.text(max_size=5))
def test_no_cell_is_a_formula(name: str) -> None:
    assert not escape_cell(name).lstrip(" ").startswith(("=", "+", "-", "@", "\t", "\r", "\n", "|", "%"))
