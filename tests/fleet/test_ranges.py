"""GPU-hours, energy and cost of a range, by pod, owner, namespace and label."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import math
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from sqlite3 import Connection
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from podgpu.charge import Amounts, Charge, UsageAccount
from podgpu.clock import Clock
from podgpu.errors import UsageError, utc_text
from podgpu.fleet.parts import Totals
from podgpu.fleet.prices import NO_PRICES, Price, Prices
from podgpu.fleet.read.pages import GpuQuery
from podgpu.fleet.round import PublishedState
from podgpu.fleet.settings import ViewSettings
from podgpu.fleet.state import ClusterState
from podgpu.fleet.view import GpuView, make_view
from podgpu.model import Condition, DeviceTotals, Holder, HolderUsage, WorkloadOwner
from podgpu.past.bills.bill import (
    RangeAnswer,
    RangeQuery,
    RangeRow,
    describe_row,
    group_now,
    parse_range_query,
)
from podgpu.past.bills.focus import encode_csv, escape_cell, split_days
from podgpu.past.books.record import make_gpu_samples
from podgpu.past.books.recorder import HistoryRecorder
from podgpu.past.sqlite.sqlite_moment import read_past
from podgpu.past.sqlite.sqlite_past import SqlitePast
from tests.fleet.states import H100, WALL, World, gpu, holder, lost, mig, node, state_of
from tests.simulated import stop_after_test

DAY = 86_400
PRICES = Prices("EUR", {"*": Price(10.0)})
PAIR = (("a", 0.1), ("b", 0.6))
OWNERS = {("ml", "a"): WorkloadOwner("Job", "train"), ("ml", "b"): WorkloadOwner("Job", "train")}


class Cluster:
    """One node, recorded every 15 s."""

    def __init__(
        self,
        directory: str = "",
        prices: Prices = PRICES,
        at: float = 0.0,
        longest_gap: float = 60.0,
    ) -> None:
        self.world = World(ViewSettings(stale_after=max(45.0, longest_gap)))
        self.prices, self.at = prices, at
        clock = Clock(monotonic=lambda: self.at, wall=lambda: WALL + self.at)
        self.recorder = HistoryRecorder(lambda: make_gpu_samples(self.state()), clock, directory)
        stop_after_test.append(self.recorder.stop)
        self.past = SqlitePast(self.recorder, self.state)

    def state(self) -> ClusterState:
        assert self.world.state is not None
        return self.world.state

    def round(self, *gpus: Any, seconds: float = 15.0, **more: Any) -> None:
        self.at += seconds
        engines = more.pop("engines", {})
        self.world.round(
            node("n1", *gpus, read_at=self.at, **more),
            at=self.at,
            engines=engines,
            prices=self.prices,
            owners=OWNERS,
        )
        self.recorder.record()

    def wasted(self, by: str = "pod", **more: Any) -> list[RangeRow]:
        return self.range(by, order="wasted", **more).rows

    def range(self, by: str = "pod", **more: Any) -> RangeAnswer:
        return asyncio.run(self.past.range(RangeQuery(by, **more)))

    def rows(self, by: str = "pod", **more: Any) -> dict[str, RangeRow]:
        return {describe_row(row): row for row in self.range(by, **more).rows}


def used(
    pod: str, seconds: float, *, busy: float, joules: float = 0.0, share: float | None = None
) -> Any:
    """Returns a holder whose counters have run for `seconds`."""
    return holder(
        pod,
        share=share,
        utilization_ratio=busy,
        busy_ns=int(busy * seconds * 10**9),
        energy_mj=int(joules * 1000),
    )


def an_hour(cluster: Cluster) -> None:
    labels = {"ml/a": {"team": "nlp"}, "ml/b": {"team": "vision"}}
    for number in range(241):
        seconds = number * 15.0
        one = gpu(
            0,
            used("a", seconds, busy=0.25, joules=seconds * 100),
            busy=0.25,
            usage=DeviceTotals(method="samples"),
        )
        two = gpu(
            1,
            used("b", seconds, busy=0.0, joules=seconds * 50, share=0.5),
            busy=0.0,
            usage=DeviceTotals(),
        )
        cluster.round(one, two, gpu(2), pod_labels=labels)


def test_hours_energy_and_cost_of_an_hour() -> None:
    cluster = Cluster()
    an_hour(cluster)
    answer = cluster.range()
    assert answer.from_ == pytest.approx(WALL + cluster.at - DAY, abs=300), (
        "a new history has only short steps"
    )
    assert cluster.range(seconds=3600).notes == []
    a, b, rest = answer.rows
    assert (a.pod, a.gpu_hours, a.used_hours, a.idle_hours, a.mean_use) == (
        "a",
        1.0,
        0.25,
        0.0,
        0.25,
    )
    assert (a.energy_kwh, a.cost, a.wasted, a.owner) == (
        0.1,
        10.0,
        0.0,
        WorkloadOwner("Job", "train"),
    )
    assert (b.gpu_hours, b.idle_hours, b.mean_use, b.cost, b.wasted) == (0.5, 0.5, 0.0, 5.0, 5.0)
    assert (rest.unallocated, rest.gpu_hours, rest.cost, rest.mean_use) == (True, 1.5, 15.0, None)
    totals = answer.totals
    assert (totals.gpu_hours, totals.allocated_hours, totals.cost, totals.unallocated_cost) == (
        3.0,
        1.5,
        30.0,
        15.0,
    )
    assert (totals.used_hours, totals.idle_hours, totals.wasted, totals.energy_kwh) == (
        0.25,
        0.5,
        5.0,
        0.15,
    )
    assert (answer.methods, answer.currency) == (["samples"], "EUR")
    assert [row.methods for row in answer.rows] == [["samples"], [], []], (
        "each row has its own method"
    )
    together = cluster.rows("owner")["ml/Job/train"]
    assert (together.gpu_hours, together.cost, together.mean_use) == (
        1.5,
        15.0,
        round(0.25 / 1.5, 4),
    )
    assert {name: row.cost for name, row in cluster.rows("label:team").items()} == {
        "nlp": 10.0,
        "vision": 5.0,
        "unallocated": 15.0,
    }
    cluster.round(gpu(3, holder("new")), pod_labels={"ml/new": {"team": "nlp"}})
    assert cluster.rows("label:team").keys() == {"nlp", "vision", "unallocated"}, (
        "also for a pod without records"
    )


def test_an_ended_pod_and_a_restart_are_part_of_the_range(tmp_path: Path) -> None:
    before = Cluster(str(tmp_path))
    an_hour(before)
    before.recorder.stop()
    after = Cluster(str(tmp_path), at=before.at + 600)
    after.round(gpu(0, usage=DeviceTotals(method="exact")), gpu(1), gpu(2))
    assert [(row.pod, row.methods) for row in after.range().rows] == [
        ("a", ["samples"]),
        ("b", []),
        ("", []),
    ]
    assert after.range().totals == before_totals(3.0)
    after.round(gpu(0), gpu(1), gpu(2), seconds=12 * 3600)
    assert after.range(seconds=3600).rows == []
    assert after.range(start=WALL - DAY, end=WALL + 3600 * 2).totals.gpu_hours == 3.0
    after.recorder.stop()


def before_totals(hours: float) -> Any:
    cluster = Cluster()
    an_hour(cluster)
    assert cluster.range().totals.gpu_hours == hours
    return cluster.range().totals


def test_ranges_of_minutes_hours_and_days_are_read_from_the_matching_steps() -> None:
    cluster = Cluster(longest_gap=300.0)
    for _ in range(10 * DAY // 300 + 1):
        cluster.round(gpu(0, holder("a", utilization_ratio=1.0), busy=1.0), seconds=300.0)
    assert cluster.range(seconds=3600).totals.gpu_hours == pytest.approx(1.0, abs=0.09)
    assert cluster.range(seconds=DAY).totals.gpu_hours == pytest.approx(24.0, abs=1.0)
    assert cluster.range(seconds=30 * DAY).totals.gpu_hours == pytest.approx(240.0, abs=0.1)
    answer = cluster.range(seconds=7 * DAY)
    length = (answer.to - answer.from_) / 3600
    assert answer.totals.gpu_hours == pytest.approx(length, abs=0.1)
    assert 168 <= length < 168 + 24, (
        "in memory, hours are stored for a day; longer ranges begin with a day"
    )


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1), st.booleans()), min_size=2, max_size=19)
)
def test_sums_equal_the_counters_of_the_exporter(rounds: list[tuple[int, float, bool]]) -> None:
    """Each row equals the increase of the exporter's counters, also if pods share a GPU or the
    exporter restarts.
    """
    cluster = Cluster()
    busy: Counter[str] = Counter()
    energy: Counter[str] = Counter()
    expected: Counter[str] = Counter()
    kept: set[str] = set()
    exporters = 0
    for pods, load, restarts in rounds:
        if restarts:
            exporters += 1
            busy.clear()
            energy.clear()
        names = {f"p{n}" for n in range(pods)}
        parts = names | {""}
        for name in parts:
            part = load / max(1, pods) * 15
            growth = {"busy": round(part * 1e9), "energy": round(part * 1e6)}
            busy[name] += growth["busy"]
            energy[name] += growth["energy"]
            if name in kept:
                expected[f"{name} energy"] += growth["energy"]
                expected[f"{name} busy"] += growth["busy"]
        holders = [
            holder(n, share=1 / pods, utilization_ratio=load, busy_ns=busy[n], energy_mj=energy[n])
            for n in sorted(names)
        ]
        usage = DeviceTotals(unattributed_energy_mj=energy[""])
        cluster.round(gpu(0, *holders, busy=load, usage=usage), exporter_id=f"exporter-{exporters}")
        kept = parts
    rows, totals = cluster.rows(), cluster.range().totals
    assert totals.gpu_hours == pytest.approx((len(rounds) - 1) * 15 / 3600, abs=1e-3), (
        "hours of the GPU"
    )
    assert sum(row.gpu_hours for row in rows.values()) == pytest.approx(totals.gpu_hours, abs=1e-3)
    for name in ("p0", "p1", "p2"):
        row = rows.get(f"ml/{name}")
        assert (row.used_hours if row else 0) == pytest.approx(
            expected[f"{name} busy"] / 3.6e12, abs=1e-4
        )
    joules = sum(value for name, value in expected.items() if name.endswith("energy")) / 1000
    assert (totals.energy_kwh or 0) == pytest.approx(joules / 3.6e6, abs=1e-4)


def test_mig_instances_add_up_to_the_gpu_and_have_their_own_prices() -> None:
    cluster = Cluster()
    for _ in range(241):
        cut = (mig(1, holder("m", utilization_ratio=0.5), busy=0.5), mig(2, profile="2g.20gb"))
        cluster.round(gpu(0, instances=cut, power_mw=700_000))
    rows, totals = cluster.rows(), cluster.range().totals
    assert rows["ml/m"].gpu_hours == pytest.approx(1 / 7, abs=1e-4)
    assert rows["ml/m"].mean_use == pytest.approx(0.5, abs=1e-3)
    assert rows["ml/m"].energy_kwh == pytest.approx(0.1, abs=1e-4), "the pod's share of the power"
    assert (totals.gpu_hours, totals.cost, totals.energy_kwh) == pytest.approx(
        (1.0, 10.0, 0.7), abs=1e-3
    )


def test_what_is_missing_is_said_and_the_rest_is_shown() -> None:
    cluster = Cluster(prices=Prices("EUR", {H100: Price(10.0)}))
    for _ in range(3):
        unknown = holder("b", share=0.5, processes=1)
        cluster.round(
            gpu(0, holder("a", utilization_ratio=0.0), busy=0.0),
            gpu(1, unknown, model="Odd"),
            seconds=36.0,
        )
    answer = cluster.range("label:team", seconds=30 * DAY)
    notes = "\n".join(answer.notes)
    assert "there is no record before 2023-11-14T22:1" in notes
    assert "no pod has the label 'team'" in notes
    assert "0.02 GPU-hours have no price in EUR" in notes
    totals = answer.totals
    assert (totals.cost, totals.wasted, totals.unknown_hours, totals.unpriced_hours) == (
        0.2,
        0.2,
        0.01,
        0.02,
    )
    assert [describe_row(row) for row in answer.rows] == ["(none)", "unallocated"]
    cluster.world.round(prices=NO_PRICES)
    answer = cluster.range()
    assert (answer.totals.cost, answer.totals.gpu_hours, answer.totals.unpriced_hours) == (
        None,
        0.04,
        None,
    )


def test_prices_by_node_label() -> None:
    prices = Prices(
        "EUR", {"*": Price(10.0)}, nodes=[({"capacity": "spot"}, Prices("EUR", {"*": Price(4.0)}))]
    )
    cluster = Cluster(prices=prices)
    for labels in ({}, {}, {"capacity": "spot"}, None):
        cluster.round(
            gpu(0, holder("a", utilization_ratio=0.5), busy=0.5),
            gpu(1),
            seconds=36.0,
            labels=labels,
        )
        (shown,) = make_view(cluster.state()).nodes
        price = None if labels is None else 4.0 if labels else 10.0
        assert [one.price_per_hour for one in shown.gpus] == [price] * 2
        assert cluster.rows()["ml/a"].cost_per_hour == price
    answer = cluster.range()
    assert (answer.totals.cost, answer.totals.unallocated_cost, answer.totals.gpu_hours) == (
        0.28,
        0.14,
        0.06,
    )
    notes = "\n".join(answer.notes)
    assert "the labels of n1 are unknown" in notes
    (note,) = state_of(node("n1", gpu(0), labels={}), prices=prices).notes
    assert note.text.startswith("no node has the label capacity")
    assert "0.02 GPU-hours have no price in EUR" in notes


def test_idle_time_is_not_counted_as_unknown_too() -> None:
    cluster = Cluster()
    cluster.round(gpu(0, holder("a"), busy=0.0))  # for example, while the driver is released
    cluster.round(gpu(0, used("a", 36.0, busy=0.0), busy=0.0), seconds=36.0)
    totals = cluster.range().totals
    assert (totals.allocated_hours, totals.idle_hours, totals.unknown_hours) == (0.01, 0.01, 0.0)


def test_current_gpus_if_another_cluster_is_only_in_the_past() -> None:
    usage = [
        Charge(UsageAccount("ml", pod), amounts=Amounts(9.0), cluster=name)
        for pod, name in (("a", "east"), ("b", "west"))
    ]
    now = group_now(state_of(node("n1", gpu(0, holder("a")))), usage, RangeQuery("namespace", 3600))
    assert {dict(name)["cluster"]: row["gpus"] for name, row in now.items()} == {
        "east": 1,
        "west": 0,
    }


def write_csv(cluster: Cluster, by: str, **more: Any) -> list[dict[str, str]]:
    """Asks for the range as the page does."""
    query = RangeQuery(by, **more)
    whole = cluster.range(by, **more)
    days = [cluster.range(**day._asdict()) for day in split_days(query, whole)]
    return list(csv.DictReader(io.StringIO(encode_csv(days).decode())))


def test_csv_has_the_columns_of_focus() -> None:
    cluster = Cluster()
    an_hour(cluster)
    first, *_, last = write_csv(cluster, "label:team", seconds=DAY)
    assert (first["BilledCost"], first["BillingCurrency"], first["ConsumedUnit"]) == (
        "10.0",
        "EUR",
        "GPU-Hours",
    )
    assert (first["Tags"], first["x_UsedGpuHours"], first["x_UsageMethod"]) == (
        '{"team": "nlp"}',
        "0.25",
        "samples",
    )
    assert (last["ChargeDescription"], last["ConsumedQuantity"]) == (
        "GPU hours: unallocated",
        "1.5",
    )
    assert last["AllocatedMethodId"] == last["AllocatedResourceId"] == ""
    assert write_csv(cluster, "pod", start=0.0, end=DAY) == []


@pytest.mark.parametrize("by", ["pod", "owner", "namespace", "label:team"])
def test_csv_is_valid_focus_1_4(by: str) -> None:
    validator = pytest.importorskip("focus_data_toolkit.model.validator")
    cluster = Cluster()
    an_hour(cluster)
    rows = write_csv(cluster, by, seconds=DAY)
    report = validator.lint_focus_1_4_structure("Cost and Usage", rows)
    assert report.messages() == []
    assert report.row_count > 0


def test_csv_has_a_row_per_day_and_charge_and_months_as_billing_periods() -> None:
    cluster = Cluster()
    an_hour(cluster)
    cluster.round(gpu(0, holder("a")))
    start = 1_793_491_200.0 - 1800  # half an hour before November 2026
    whole = cluster.range(seconds=DAY)
    whole.from_ = start
    whole.recorded_from = None
    whole.to = start + 1800 + 2 * DAY
    days = split_days(RangeQuery(), whole)
    assert [(day.start, day.end) for day in days] == [
        (start, start + 1800),
        (start + 1800, start + 1800 + DAY),
        (start + 1800 + DAY, start + 1800 + 2 * DAY),
    ]
    answers = []
    for day in days:
        assert day.start is not None
        assert day.end is not None
        answers.append(msgspec.structs.replace(whole, from_=day.start, to=day.end))
    rows = list(csv.DictReader(io.StringIO(encode_csv(answers).decode())))
    periods = ("BillingPeriodStart", "BillingPeriodEnd", "ChargePeriodStart", "ChargePeriodEnd")
    found = {tuple(row[name][:13] for name in periods) for row in rows}
    assert found == {
        ("2026-10-01T00", "2026-11-01T00", "2026-10-31T23", "2026-11-01T00"),
        ("2026-11-01T00", "2026-12-01T00", "2026-11-01T00", "2026-11-02T00"),
        ("2026-11-01T00", "2026-12-01T00", "2026-11-02T00", "2026-11-03T00"),
    }
    with pytest.raises(UsageError, match="at most 366 days"):
        split_days(RangeQuery(), msgspec.structs.replace(whole, to=start + 367 * DAY))


@pytest.mark.parametrize(
    ("rounds", "seconds"), [(2, DAY), (3, 60), (40, 100), (100, 630), (100, 3600)]
)
def test_csv_of_a_short_range_has_the_sums_of_the_json(rounds: int, seconds: int) -> None:
    cluster = Cluster(at=DAY - WALL % DAY - 300.0)  # 5 minutes before midnight
    for number in range(rounds):
        cluster.round(gpu(0, used("a", number * 15.0, busy=0.25)), gpu(1))
    cluster.at += 7.0  # between two rounds
    answer = cluster.range(seconds=seconds)
    rows = write_csv(cluster, "pod", seconds=seconds)
    totals = answer.totals
    assert totals.gpu_hours > 0
    assert totals.cost is not None
    rounding = 5e-5 * (len(rows) + 1)
    hours = sum(float(row["ConsumedQuantity"]) for row in rows)
    assert hours == pytest.approx(totals.gpu_hours, abs=rounding)
    cost = sum(float(row["BilledCost"]) for row in rows)
    assert cost == pytest.approx(totals.cost, abs=rounding)
    start = max(seconds for seconds in (answer.from_, answer.recorded_from) if seconds)
    assert rows[0]["ChargePeriodStart"] <= utc_text(start)
    assert rows[-1]["ChargePeriodEnd"] == utc_text(answer.to)


@pytest.mark.parametrize("days", [1, 7])
def test_a_constant_load_has_the_same_sum_at_any_time(days: int) -> None:
    """The range is as long as asked, also if it starts within a stored step."""
    cluster = Cluster(longest_gap=1000.0)
    cluster.round(gpu(0, holder("a")), seconds=285.0)
    for _ in range((days + 2) * DAY // 300):
        cluster.round(gpu(0, holder("a")), seconds=300.0)
    for _ in range(12):
        for _ in range(20):
            cluster.round(gpu(0, holder("a")))
        cluster.at += 4.0
        answer = cluster.range(seconds=days * DAY)
        cluster.at -= 4.0
        assert answer.to - answer.from_ == days * DAY
        assert answer.totals.gpu_hours == pytest.approx(24 * days, abs=0.01)


def test_ranges_that_meet_share_no_usage() -> None:
    cluster = Cluster(longest_gap=1000.0)
    cluster.round(gpu(0, holder("a")))
    for _ in range(40 * DAY // 900):
        cluster.round(gpu(0, holder("a")), seconds=900.0)
    now = WALL + cluster.at
    times = [now - 39 * DAY, now - 20.7 * DAY, now - 20.5 * DAY, now - 30.6 * 3600, now - 1000, now]
    for start, end in pairwise(times):
        hours = cluster.range(start=start, end=end).totals.gpu_hours
        assert hours == pytest.approx((end - start) / 3600, abs=0.26)
    assert WALL % DAY, "the first day is shorter, and nothing tells when it began"
    whole = cluster.range(start=WALL, end=now).totals.gpu_hours
    assert whole == pytest.approx(cluster.at / 3600, abs=0.26)


def test_csv_says_who_got_which_part_of_the_gpus() -> None:
    cluster = Cluster()
    an_hour(cluster)
    rows = {row["x_Pod"]: row for row in write_csv(cluster, "pod", seconds=DAY)}
    pod = rows["a"]
    assert pod["AllocatedMethodId"] == "podgpu:allocated-time"
    assert pod["AllocatedResourceName"] == "a"
    assert pod["AllocatedResourceId"] == "ml/a"
    total = sum(float(row["BilledCost"]) for row in rows.values())
    [part] = json.loads(pod["AllocatedMethodDetails"])["Elements"]
    assert part["AllocatedRatio"] == pytest.approx(float(pod["BilledCost"]) / total)
    assert part["UsageQuantity"] == float(pod["ConsumedQuantity"])


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"by": "gpu"}, "use pod, owner, namespace, model or label:NAME"),
        ({"by": "label:"}, "use pod, owner, namespace, model or label:NAME"),
        ({"range": "1y"}, "write a length of time, such as"),
        ({"format": "xml"}, "use json or csv"),
        ({"from": "yesterday"}, "write a Unix time"),
        ({"to": "nan"}, "write a Unix time"),
        ({"from": "1794950735", "to": "10"}, "from=1794950735 is not before to=10"),
    ],
)
def test_a_wrong_query_is_refused(query: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_range_query(query)


# Waste: the same rows, with current values


IDLE: dict[str, Any] = {"utilization_ratio": 0.0}
BUSY: dict[str, Any] = {"utilization_ratio": 0.5}


def test_hours_and_money_of_an_idle_holder_beside_a_busy_one() -> None:
    cluster = Cluster()
    for _ in range(241):
        cluster.round(
            gpu(0, holder("a", **IDLE)),
            gpu(1, holder("b", **BUSY)),
            gpu(2, holder("w", "web", **IDLE), busy=0.0),
        )
    a, web, b = cluster.wasted()
    assert (a.pod, a.idle_hours, a.allocated_hours, a.wasted, a.cost_per_hour) == (
        "a",
        1.0,
        1.0,
        10.0,
        10.0,
    )
    assert (a.owner, a.idle_since, a.gpus, a.idle_gpus) == (
        OWNERS["ml", "a"],
        round(WALL + 15),
        1.0,
        1.0,
    )
    assert (web.pod, web.wasted) == ("w", 10.0)
    assert (b.pod, b.idle_hours, b.allocated_hours, b.wasted, b.idle_since) == (
        "b",
        0.0,
        1.0,
        0.0,
        None,
    )
    together = cluster.wasted("owner")[0]
    assert (together.owner, together.pod, together.gpus) == (OWNERS["ml", "a"], "", 2.0)
    assert (together.idle_gpus, together.wasted) == (1.0, 10.0)
    assert [row.namespace for row in cluster.wasted("namespace")] == ["ml", "web"]
    cluster.round(gpu(0), gpu(1), gpu(2))
    assert [(row.pod, row.gpus, row.wasted) for row in cluster.wasted()] == [
        ("a", 0, 10),
        ("w", 0, 10),
        ("b", 0, 0),
    ]
    assert cluster.wasted(end=WALL + 3000.0)[0].gpus is None, (
        "current values do not belong to a past range"
    )


def test_use_under_mps_is_not_known_and_the_row_says_so() -> None:
    cluster = Cluster()
    clients = [holder(pod, share=0.5, processes=1, memory_used_bytes=1) for pod in ("a", "b")]
    for busy in (0.0, 0.72, 0.0):
        cluster.round(
            gpu(0, *clients, busy=busy, usage=DeviceTotals(method="mps")),
            gpu(1, holder("idle", **IDLE)),
        )
    rows = {row.pod: row for row in cluster.wasted()}
    assert (rows["a"].idle_gpus, rows["a"].idle_hours, rows["a"].wasted) == (0.0, 0.0, 0.0)
    assert [rows[pod].unknown_because for pod in ("a", "b", "idle")] == [
        "not known under MPS"
    ] * 2 + [""]
    answer = cluster.range(end=WALL + cluster.at)
    assert answer.totals.unknown_hours == round(30 / 3600, 4)
    (note,) = [note for note in answer.notes if "not known under MPS" in note]
    assert f"the use of {answer.totals.unknown_hours:.4g} GPU-hours is unknown" in note
    holders = make_view(cluster.state()).nodes[0].gpus[0].holders
    assert [(one.use, one.unknown_because) for one in holders] == [
        ("unknown", "not known under MPS")
    ] * 2


def test_idle_time_within_a_round_and_time_that_was_not_read() -> None:
    cluster = Cluster()
    for since in (None, WALL + 25.0):
        cluster.round(gpu(0, holder("a", utilization_ratio=0.0, idle_since=since)), exporter_id="x")
    assert cluster.wasted()[0].idle_hours == round(5 / 3600, 4), "busy during the first ten seconds"
    cluster.round(gpu(0, holder("a", **IDLE)), seconds=61.0)
    assert cluster.wasted()[0].allocated_hours == round(15 / 3600, 4), "the gap is too long"
    cluster.round(lost(0, holder("a")), seconds=36.0)
    (row,) = cluster.wasted()
    assert (row.allocated_hours, row.idle_hours) == (round(51 / 3600, 4), round(5 / 3600, 4))


def test_another_currency_starts_again() -> None:
    cluster = Cluster(prices=NO_PRICES)
    for prices in (NO_PRICES, NO_PRICES, PRICES, Prices("USD", {"*": Price(20.0)})):
        cluster.prices = prices
        cluster.round(gpu(0, holder("a", **IDLE)), seconds=36.0)
    answer = cluster.range(order="wasted")
    assert (answer.currency, answer.rows[0].idle_hours, answer.rows[0].wasted) == ("USD", 0.03, 0.2)


def test_bounds_of_the_use_come_from_the_exporter_or_are_the_time_that_is_not_idle() -> None:
    cluster = Cluster()
    for number in range(241):
        exact = holder(
            "a", utilization_ratio=0.5, busy_ns=number * 7_500_000_000, busy_min_ns=number * 6_000_000_000,
            busy_max_ns=number * 9_000_000_000, wait_ns=number * 3_000_000_000,
        )  # fmt: skip
        cluster.round(
            gpu(0, exact, busy=0.5), gpu(1, used("b", number * 15.0, busy=0.25), busy=0.25)
        )
    rows = cluster.rows()
    assert [rows["ml/a"].used_hours_min, rows["ml/a"].used_hours, rows["ml/a"].used_hours_max] == [
        0.4,
        0.5,
        0.6,
    ]
    assert (rows["ml/a"].waited_hours, rows["ml/b"].waited_hours) == (0.2, None)
    assert [rows["ml/b"].used_hours_min, rows["ml/b"].used_hours, rows["ml/b"].used_hours_max] == [
        0.0,
        0.25,
        1.0,
    ]


@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=4), max_size=8))
def test_sums_of_all_groups_agree_and_never_decrease(rounds: list[list[tuple[int, bool]]]) -> None:
    cluster, last = Cluster(), 0.0
    for held in rounds:
        cluster.round(
            *(
                gpu(n, holder(f"p{pod}", **(IDLE if idle else BUSY)))
                for n, (pod, idle) in enumerate(held)
            )
        )
        rows = cluster.wasted()
        assert all(row.idle_hours <= row.allocated_hours for row in rows)
        wasted = sum(row.wasted or 0 for row in rows)
        assert wasted >= last - 1e-9
        last = wasted
    if rounds:
        totals = [
            sum(row.wasted or 0 for row in cluster.wasted(by)) for by in ("owner", "namespace")
        ]
        assert totals == pytest.approx([last] * 2, abs=1e-3)


@pytest.mark.parametrize("sign", [*"=+-@", "\uff1d", "\uff0b", "\uff0d", "\uff20"])
@pytest.mark.parametrize(
    "before", ["", " ", "\u00a0", "\ufeff", "\0", "\u200b", "\u3000", ";", ",", "\0; \ufeff"]
)
def test_a_cell_is_no_formula_behind_invisible_characters(before: str, sign: str) -> None:
    cell = f"{before}{sign}1+1"
    assert escape_cell(cell) == f"'{cell}"


@pytest.mark.parametrize("cell", ["", "ml", " ml", ";ml", "a=b", "gpu-1", "\ufeffml", "５"])
def test_other_cells_stay_as_they_are(cell: str) -> None:
    assert escape_cell(cell) == cell


@given(st.text(max_size=5))
def test_no_cell_is_a_formula(name: str) -> None:
    assert (
        not escape_cell(name)
        .lstrip(" ")
        .startswith(("=", "+", "-", "@", "\t", "\r", "\n", "|", "%"))
    )


def past_gpu(cluster: Cluster, seconds: float) -> tuple[GpuView, Totals]:
    view = asyncio.run(cluster.past.find(GpuQuery(at=WALL + seconds))).view
    return view.nodes[0].gpus[0], view.totals


def count_steps(pods: int) -> int:
    """Returns the lines that are executed to show a past time with this many pods on one GPU."""
    cluster = Cluster()
    own = [holder(f"p{number}", utilization_ratio=0.5 / pods) for number in range(pods)]
    for _ in range(2):
        cluster.round(gpu(0, *own, busy=0.7))
    steps = 0

    def trace(*_: object) -> Any:
        nonlocal steps
        steps += 1
        return trace

    def read(db: Connection, _: float) -> int:
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            then = PublishedState(read_past(db, WALL + 15, cluster.state()))
            shown = json.loads(then.view_json[0].plain)
        finally:
            sys.settrace(before)
        return len(shown["nodes"][0]["gpus"][0]["holders"])

    assert asyncio.run(cluster.recorder.ask(read)) == pods
    return steps


def test_a_past_time_is_linear_in_the_holders() -> None:
    assert count_steps(2000) < 5 * count_steps(500)


def test_two_containers_of_a_pod_at_a_past_time_are_not_counted_twice() -> None:
    cluster = Cluster()
    own = [
        holder("p", container=name, utilization_ratio=use, memory_used_bytes=1 << 30)
        for name, use in PAIR
    ]
    for _ in range(2):
        cluster.round(gpu(0, *own, busy=0.7, memory_used_bytes=2 << 30))
    then, _ = past_gpu(cluster, 15)
    assert (then.utilization_ratio, then.memory_used_bytes) == (0.7, 2 << 30)
    assert [one.utilization_ratio for one in then.holders] == [None, None], (
        "the history has only their sum"
    )
    pod = asyncio.run(cluster.past.pod("ml", "p", 60))
    assert pod is not None
    assert set(pod.devices[0].series["utilization_ratio"]) == {None, 0.7}


def test_two_pods_that_started_together_on_a_shared_gpu_at_a_past_time() -> None:
    cluster = Cluster()
    for number in range(300):
        cluster.round(gpu(0, *(() if number < 3 else (holder("a"), holder("b"))), busy=0.9))
    then, _ = past_gpu(cluster, 200)
    assert (then.utilization_ratio, [one.pod for one in then.holders]) == (0.9, ["a", "b"])


def test_a_job_that_has_ended_is_idle_at_a_past_time() -> None:
    cluster, job = (
        Cluster(),
        Holder(job="17", user="ada", source="slurm", usage=HolderUsage(utilization_ratio=0.0)),
    )
    for held in (*[(job,)] * 150, ()):  # longer than --idle-after
        cluster.round(gpu(0, *held, busy=0.0))
    assert past_gpu(cluster, 2220)[0].holders[0].idle_since == pytest.approx(WALL, abs=60)


@pytest.mark.parametrize("method", ["mps", "samples"])
def test_unknown_use_is_unknown_at_a_past_time(method: str) -> None:
    idle = None if method == "mps" else 0.0  # the driver attributes a sample to the busiest process
    cluster, busy = Cluster(), None if method == "mps" else 0.7
    pods = (
        holder(name, utilization_ratio=use, processes=1) for name, use in (("a", busy), ("b", idle))
    )
    cluster.round(gpu(0, *pods, busy=0.7, usage=DeviceTotals(utilization_ratio=0.7, method=method)))
    then, totals = past_gpu(cluster, 15)
    assert then.holders[1].use == "unknown"
    now = make_view(cluster.state()).totals
    assert (totals.used, totals.unknown, totals.wasted_per_hour) == (
        now.used,
        now.unknown,
        now.wasted_per_hour,
    )


@pytest.mark.parametrize(
    ("uses", "method", "wasted"),
    [
        ((0.6,), "samples", [0.4]),
        ((0.3, 0.1), "exact", [0.2, 0.4]),
        # Only what nobody used is certainly unused.
        ((0.3, 0.1), "samples", [0.1, 0.1]),
        ((0.7, 0.1), "exact", [0.0, 0.4]),
    ],
)
def test_what_pods_did_not_use_of_their_shares_at_a_past_time(
    uses: tuple[float, ...], method: str, wasted: list[float]
) -> None:
    cluster = Cluster()
    whole = sum(uses)
    usage = DeviceTotals(utilization_ratio=whole, method=method)
    pods = []
    for number, use in enumerate(uses):
        pods.append(holder(f"p{number}", utilization_ratio=use))
    for _ in range(2):
        cluster.round(gpu(0, *pods, busy=whole, usage=usage))

    then, totals = past_gpu(cluster, 15)
    found = []
    for one in then.holders:
        assert one.waste is not None
        found.append(one.waste.gpus.underused)
    assert found == pytest.approx(wasted)
    assert totals.waste is not None
    assert totals.waste.gpus.underused == pytest.approx(sum(wasted))


def test_an_idle_pod_is_not_under_used_at_a_past_time() -> None:
    cluster = Cluster()
    for _ in range(2):
        cluster.round(gpu(0, holder("a", utilization_ratio=0.0, idle_since=WALL), busy=0.0))
    then, totals = past_gpu(cluster, 15)
    assert then.holders[0].use == "idle"
    assert totals.waste is not None
    assert (totals.waste.gpus.idle, totals.waste.gpus.underused) == (1.0, 0.0)


def test_a_condition_that_began_at_an_infinite_time_is_stored() -> None:
    cluster = Cluster()
    cluster.round(gpu(0, conditions=(Condition("lost", math.inf),)))
    assert [one.condition for one in past_gpu(cluster, 15)[0].conditions] == ["lost"]


def test_a_range_says_that_a_restart_would_lose_it(tmp_path: Path) -> None:
    # The last cluster finds the file locked by the one before it.
    clusters = [Cluster(), Cluster(str(tmp_path)), Cluster(str(tmp_path))]
    for cluster in clusters:
        cluster.round(gpu(0))
    assert [cluster.range().in_memory for cluster in clusters] == [True, False, True]
