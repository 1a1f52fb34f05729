"""What is held and idle, in hours and money: counted from reading to reading, known for a day, never lost in sums."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podgpu.cluster.reading import ClusterReading
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.view import ClusterView, Memory, assemble
from podgpu.errors import UsageError
from podgpu.figures import waste
from podgpu.figures.device import Condition, DeviceFigures, HolderFigures, Owner
from podgpu.figures.prices import NO_PRICES, Price, Prices
from podgpu.figures.waste_rows import By, Source, csv_name, harmless, waste_asked, waste_csv, waste_json
from podgpu.model import Workload
from tests.cluster.view_readings import H100, WALL, gpu, holder, holdings, node

PRICES = Prices("EUR", {H100: Price(Fraction("3.60"))})
"""A milli-euro a second."""
OWNERS = {("ml", "train"): Owner("Job", "train"), ("ml", "serve"): Owner("Deployment", "serve")}


class World:
    """Rounds of 15 s on one node."""

    def __init__(self, prices: Prices = PRICES, owners: Mapping[tuple[str, str], Owner] | None = None) -> None:
        self.memory = Memory()
        self.prices = prices
        self.owners = owners or {}
        self.at = -15.0

    def turn(self, *devices: DeviceFigures, rounds: int = 1, seconds: float = 15.0) -> ClusterView:
        for _ in range(rounds):
            self.at += seconds
            reading = ClusterReading((node("n1", *devices, read_at=self.at),), owners=self.owners)
            view = assemble(reading, self.memory, ViewSettings(), self.at, WALL + self.at, prices=self.prices)
        return view


def rows(view: ClusterView, by: By = "pod") -> list[dict[str, Any]]:
    document = json.loads(waste_json(view.waste, by, Source()))
    found: list[dict[str, Any]] = document["rows"]
    return found


IDLE, BUSY = holder("train", utilization=0.0), holder("serve", utilization=0.5)


def test_hours_and_money_of_an_idle_holder_beside_a_busy_one() -> None:
    world = World(owners=OWNERS)
    view = world.turn(gpu(0, IDLE), gpu(1, BUSY), rounds=241)
    train, serve = rows(view)
    assert train == {
        "namespace": "ml",
        "pod": "train",
        "owner": {"kind": "Job", "name": "train"},
        "gpus": 1.0,
        "idle_gpus": 1.0,
        "idle_hours": 1.0,
        "allocated_hours": 1.0,
        "wasted": 3.6,
        "cost_per_hour": 3.6,
        "idle_since": WALL,
    }
    assert (serve["idle_hours"], serve["allocated_hours"], serve["wasted"]) == (0.0, 1.0, 0.0)
    assert "idle_since" not in serve
    (ml,) = rows(view, "namespace")
    assert (ml["namespace"], ml["gpus"], ml["idle_hours"], ml["wasted"]) == ("ml", 2.0, 1.0, 3.6)
    assert [row["owner"]["name"] for row in rows(view, "owner")] == ["train", "serve"]
    assert all("pod" not in row for row in rows(view, "owner"))


def test_parts_of_gpus() -> None:
    world = World()
    instance = DeviceFigures(
        "GPU-9", 9, H100, instance="1", profile="1g.10gb", utilization=0.0, holders=(holder("mig"),)
    )
    shared = gpu(0, holder("a", utilization=0.0, share=0.25), holder("b", utilization=0.9, share=0.5))
    view = world.turn(instance, shared, rounds=241)
    told = {row["pod"]: row for row in rows(view)}
    assert (told["mig"]["gpus"], told["mig"]["idle_hours"], told["mig"]["wasted"]) == (0.1429, 0.1429, 0.5143)
    assert (told["a"]["gpus"], told["a"]["wasted"], told["a"]["cost_per_hour"]) == (0.25, 0.9, 0.9)
    assert (told["b"]["idle_gpus"], told["b"]["cost_per_hour"]) == (0.0, 1.8)


def test_what_nobody_looked_at_counts_for_nothing() -> None:
    world = World()
    world.turn(gpu(0, IDLE), rounds=2)
    (row,) = rows(world.turn(gpu(0, IDLE), seconds=600.0))
    assert row["allocated_hours"] == row["idle_hours"] == round(15 / 3600, 4)


def test_a_lost_gpu_is_held_and_nobody_knows_whether_it_is_idle() -> None:
    world, lost = World(), gpu(0, IDLE, present=False, conditions=(Condition("lost", 1.0, "it is lost", "reset it"),))
    (row,) = rows(world.turn(lost, rounds=241))
    assert (row["allocated_hours"], row["idle_hours"], row["idle_gpus"], row["wasted"]) == (1.0, 0.0, 0.0, 0.0)


def test_without_prices_there_are_hours_and_no_money() -> None:
    (row,) = rows(World(NO_PRICES).turn(gpu(0, IDLE), rounds=241))
    assert row["idle_hours"] == 1.0
    assert not {"wasted", "cost_per_hour"} & row.keys()
    (row,) = rows(World(Prices("EUR", {"other": Price(Fraction(1))})).turn(gpu(0, IDLE), rounds=3))
    assert "wasted" not in row, "a model without a price"


def test_money_of_another_currency_begins_anew() -> None:
    world = World()
    world.turn(gpu(0, IDLE), rounds=241)
    world.prices = Prices("USD", PRICES.models)
    (row,) = rows(world.turn(gpu(0, IDLE), rounds=1))
    assert (row["wasted"], row["idle_hours"]) == (0.015, round(1 + 15 / 3600, 4))


def test_who_ended_is_known_for_a_day_and_its_owner_for_ever() -> None:
    world = World(owners=OWNERS)
    world.turn(gpu(0, IDLE), gpu(1, holder("bare", utilization=0.0)), rounds=241)
    view = world.turn(gpu(0))
    ended = [row for row in rows(view) if row["pod"] == "train"]
    assert [(row["gpus"], row["idle_hours"], row["ended_at"]) for row in ended] == [(0.0, 1.0, WALL + world.at)]
    assert "cost_per_hour" not in ended[0]
    world.turn(gpu(0), seconds=waste.ENDED_SECONDS - 1)
    assert len(rows(world.turn(gpu(0), seconds=1.0))) == 2
    view = world.turn(gpu(0), seconds=1.0)
    assert rows(view) == []
    by_owner = {(row.get("owner", {}).get("name"), row["idle_hours"]) for row in rows(view, "owner")}
    assert by_owner == {("train", 1.0), (None, 1.0)}
    (ml,) = rows(view, "namespace")
    assert (ml["idle_hours"], ml["wasted"], ml["gpus"]) == (2.0, 7.2, 0.0)


def test_who_comes_back_goes_on() -> None:
    world = World()
    world.turn(gpu(0, IDLE), rounds=121)
    world.turn(gpu(0))
    (row,) = rows(world.turn(gpu(0, IDLE), rounds=121))
    assert (row["idle_hours"], "ended_at" in row) == (1.0, False)


def test_a_thousand_pods_an_hour_leave_a_bounded_memory() -> None:
    ledger = waste.WasteLedger(most_ended=50, most_left=20)
    for number in range(500):
        name = Workload(f"ns-{number % 40}", f"pod-{number}", "main")
        device = gpu(0, HolderFigures(name, utilization=0.0))
        for at in (number * 30.0, number * 30.0 + 15.0):
            ledger.turn(waste.holdings("n1", [device], set(), at), at, 60.0)
    assert len(ledger) <= 50 + 1 + 20 + 1
    statement = ledger.statement(0.0, WALL, WALL)
    assert len(statement.pods) == 51
    assert len(statement.left) == 20


def test_a_clock_that_is_set_moves_the_end_along() -> None:
    ledger = waste.WasteLedger()
    for at, devices in ((0.0, [gpu(0, IDLE)]), (15.0, [])):
        ledger.turn(waste.holdings("n1", devices, set(), at), at, 60.0)
    (pod,) = ledger.statement(75.0, 1_000_000.0, None).pods
    assert pod.ended_at == 1_000_000.0 - 60.0


@given(st.lists(holdings(), min_size=2, max_size=4))
@settings(max_examples=60)
def test_sums_agree_and_never_fall(all_: list[ClusterReading]) -> None:
    memory, before = Memory(), {}
    for number, reading in enumerate(all_):
        view = assemble(reading, memory, ViewSettings(), 15.0 * number, WALL + 15.0 * number, prices=PRICES)
        by = {name: rows(view, name) for name in ("pod", "owner", "namespace")}  # type: ignore[arg-type]
        for figure in ("idle_hours", "allocated_hours", "gpus"):
            sums = [sum(row[figure] for row in of) for of in by.values()]
            assert max(sums) - min(sums) < 1e-3
        for row in by["namespace"]:
            assert row["idle_hours"] <= row["allocated_hours"]
            assert row["allocated_hours"] >= before.get(row["namespace"], 0.0)
        before = {row["namespace"]: row["allocated_hours"] for row in by["namespace"]}
        for of in ("pod", "owner", "namespace"):
            cells = list(csv.reader(io.StringIO(waste_csv(view.waste, of, Source()).decode())))  # type: ignore[arg-type]
            assert {len(line) for line in cells} == {len(cells[0])}
            assert len(cells) == 1 + len(by[of])


# As a table


@pytest.mark.parametrize("name", ["=cmd|' /C calc'!A0", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", " =1", "%0A", "|x"])
def test_no_cell_is_a_formula(name: str) -> None:
    pod = HolderFigures(Workload(name, name, "main"), utilization=0.0)
    view = World(owners={(name, name): Owner(name, name)}).turn(gpu(0, pod), rounds=2)
    for by in ("pod", "owner", "namespace"):
        (_, cells) = csv.reader(io.StringIO(waste_csv(view.waste, by, Source()).decode(), newline=""))  # type: ignore[arg-type]
        assert all(cell[:1] in "'0123456789" or cell.isalpha() for cell in cells if cell), cells
        assert f"'{name}" in cells
    assert harmless("train-0") == "train-0"


def test_a_table_that_says_what_its_money_is() -> None:
    view = World().turn(gpu(0, IDLE), rounds=241)
    text = waste_csv(view.waste, "pod", Source("example")).decode()
    (row,) = csv.DictReader(io.StringIO(text))
    assert (row["namespace"], row["pod"], row["wasted"], row["currency"], row["prices"]) == (
        *("ml", "train", "3.6"),
        *("EUR", "example"),
    )
    assert (row["idle_since"], row["ended_at"], row["owner_kind"]) == ("2023-11-14T22:15:00Z", "", "")
    assert csv_name("pod", Source(simulated=True)) == "podgpu-waste-by-pod-SIMULATED.csv"


def test_who_is_no_pod_has_a_row_all_the_same() -> None:
    job = HolderFigures(Workload(job="4711"), utilization=0.0)
    nameless = HolderFigures(Workload(container_id="abc"), utilization=0.0)
    view = World().turn(gpu(0, job), gpu(1, nameless), rounds=2)
    assert {(row["namespace"], row.get("job"), row.get("container_id")) for row in rows(view)} == {
        ("", "4711", None),
        ("", None, "abc"),
    }


def test_what_may_be_asked_for() -> None:
    assert waste_asked({}) == ("pod", "json")
    assert waste_asked({"by": "owner", "format": "csv"}) == ("owner", "csv")
    for query in ({"by": "node"}, {"format": "xls"}, {"by": ""}, {"by": "x" * 10_000}):
        with pytest.raises(UsageError, match=r"there are (pod, owner and namespace|json and csv)") as refused:
            waste_asked(query)
        assert len(str(refused.value)) < 200
