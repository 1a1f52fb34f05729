"""GPU-hours, energy and cost of a range, from counters in a real Prometheus and VictoriaMetrics."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import subprocess
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from urllib.parse import urlencode

import msgspec
import pytest
import yaml

from podgpu.clock import Clock
from podgpu.errors import SourceError, UsageError
from podgpu.fleet.prices import Price, Prices
from podgpu.fleet.read.prometheus import PrometheusServer
from podgpu.fleet.settings import ViewSettings
from podgpu.fleet.state import ClusterState
from podgpu.model import DeviceState, DeviceTotals, Holder, WorkloadOwner
from podgpu.past.bills.bill import RangeAnswer, RangeQuery, RangeRow, describe_row
from podgpu.past.books.record import make_gpu_samples
from podgpu.past.books.recorder import HistoryRecorder
from podgpu.past.gpu_history import MAX_POINTS
from podgpu.past.sqlite.sqlite_past import SqlitePast
from tests.fleet import states
from tests.fleet.prometheus_double import Asked, Reply, error, running_double
from tests.fleet.real_servers import Point, needs, prometheus, victoria_metrics
from tests.fleet.states import World, holder, node, prometheus_past, state_of
from tests.fleet.test_prometheus_live import Serving
from tests.nodes.clock import PATIENCE
from tests.process import podgpu
from tests.web.server import Client

HOUR, DAY, STEP = 3600, 86_400, 15
MODEL = {"modelName": "H100"}
HELD = {"UUID": "GPU-0", **MODEL, "namespace": "ml", "pod": "train", "container": "main"}
ENDED = {"UUID": "GPU-1", **MODEL, "namespace": "ml", "pod": "ended", "container": "main"}
SHARED = {"UUID": "GPU-1", **MODEL, "namespace": "web", "pod": "half", "container": "main"}
SLICE = {**MODEL, "UUID": "GPU-2", "GPU_I_ID": "1", "GPU_I_PROFILE": "1g.10gb"}
MIG = {**SLICE, "namespace": "web", "pod": "slice", "container": "main"}
PRICES = Prices("EUR", {"H100": Price(10.0)})
END = time.time() // STEP * STEP - 2 * STEP
START = END - 4 * HOUR
RULES = Path(__file__).parents[2] / "deploy/helm/podgpu/files/rules/podgpu-usage.yaml"


def points(longer: int = 0) -> Iterator[Point]:
    """Four hours. The exporter restarts after two at another address. One pod ends after one. The
    last GPU is free.

    `longer`: seconds after END for which the last state continues.
    """
    for number in range((4 * HOUR + longer) // STEP + 1):
        seconds = number * STEP
        at, restarted = START + seconds, seconds >= 2 * HOUR
        since = seconds - 2 * HOUR if restarted else seconds
        instance = {"job": "podgpu", "instance": "10.0.0.2:9400" if restarted else "10.0.0.1:9400"}
        held = [(HELD, 1.0, 0.25, 100.0, 0.0), (MIG, 1.0, 0.5, 50.0, 0.0)]
        for bound, busy in (("min", 0.225), ("max", 0.3)):
            yield Point(
                f"podgpu_container_gpu_busy_seconds_{bound}_total",
                {**instance, **HELD},
                busy * since,
                at,
            )
        if seconds <= HOUR:
            held.append((ENDED, 1.0, 0.0, 40.0, 1.0))
        else:
            held.append((SHARED, 0.5, 0.0, 40.0, 1.0))
            since_shared = since if restarted else seconds - HOUR
        for labels, share, busy, watts, idle in held:
            age = since_shared if labels is SHARED else since
            for replica in ({"replica": "a"}, {"replica": "b"}):
                name = {**instance, **replica, **labels}
                yield Point("podgpu_container_gpu_allocated_seconds_total", name, share * age, at)
                yield Point("podgpu_container_gpu_busy_seconds_total", name, busy * age, at)
                wasted = {**name, "kind": "idle"}
                yield Point(
                    "podgpu_container_gpu_wasted_seconds_total", wasted, share * idle * age, at
                )
                yield Point("podgpu_container_gpu_energy_joules_total", name, watts * age, at)
                yield Point("podgpu_container_gpu_wait_seconds_total", name, 0.1 * age, at)
                yield Point("podgpu_allocation_share_ratio", name, share, at)
        for uuid, method in (("GPU-0", "exact" if restarted else "switches"), ("GPU-1", "mps")):
            yield Point(
                "podgpu_device_usage_method", {**instance, "UUID": uuid, "method": method}, 1, at
            )
        for gpu in range(4):
            node = {"Hostname": "abac"[gpu]}
            yield Point(
                "DCGM_FI_DEV_GPU_TEMP", {**instance, "UUID": f"GPU-{gpu}", **MODEL, **node}, 40, at
            )
        yield Point("kube_node_labels", {"node": "a", "label_pool": "spot"}, 1, at)
        yield Point("kube_node_labels", {"node": "b"}, 1, at)
        free = {**instance, "UUID": "GPU-3", **MODEL}
        yield Point("podgpu_device_unattributed_energy_joules_total", free, 60.0 * since, at)
        if seconds <= HOUR:
            pod = {"namespace": "ml", "pod": "ended", "owner_kind": "Job", "owner_name": "batch"}
            yield Point("kube_pod_owner", {**pod, "owner_is_controller": "true"}, 1, at)
            yield Point(
                "kube_pod_labels", {"namespace": "ml", "pod": "ended", "label_team": "nlp"}, 1, at
            )


def ask(
    url: str,
    by: str = "pod",
    start: float | None = START,
    end: float | None = END,
    prices: Prices = PRICES,
    state: ClusterState | None = None,
) -> RangeAnswer:
    past = prometheus_past(PrometheusServer(url), state or state_of(), prices)
    return asyncio.run(past.range(RangeQuery(by, start=start, end=end)))


def rows_of(answer: RangeAnswer) -> dict[str, RangeRow]:
    return {describe_row(row): row for row in answer.rows}


both_servers = pytest.mark.parametrize(
    "serving",
    [
        pytest.param(prometheus, marks=needs("prometheus", "promtool")),
        pytest.param(victoria_metrics, marks=needs("victoria-metrics")),
    ],
)


@both_servers
def test_hours_and_cost_with_a_restart_and_an_ended_pod(serving: Serving, tmp_path: Path) -> None:
    with serving(tmp_path, points(longer=HOUR)) as url:  # this test may run long after END
        answer, again = ask(url), ask(url)
        by_owner, by_team = rows_of(ask(url, "owner")), rows_of(ask(url, "label:team"))
        early = ask(url, start=START - 4 * HOUR)
        dearer = ask(
            url,
            prices=Prices(
                "EUR", PRICES.models, changes=[(END - HOUR, Prices("EUR", {"*": Price(30.0)}))]
            ),
        )
        by_node = Prices(
            "EUR", PRICES.models, nodes=[({"pool": "spot"}, Prices("EUR", {"*": Price(4.0)}))]
        )
        spot = [ask(url, by, prices=by_node) for by in ("pod", "namespace")]
        unlabelled = ask(url, "label:app.kubernetes.io/name", start=END - HOUR)
        by_digit = ask(url, "label:1st", start=END - HOUR)
        with pytest.raises(UsageError, match="by=label:__name__: pods have no labels"):
            ask(url, "label:__name__")
    assert msgspec.json.encode(answer) == msgspec.json.encode(again), (
        "two processes give the same answer"
    )
    rows = rows_of(answer)

    def figures(name: str) -> list[float | None]:
        row = rows[name]
        return [row.gpu_hours, row.used_hours, row.idle_hours, row.energy_kwh, row.cost, row.wasted]

    assert figures("ml/train") == pytest.approx([4.0, 1.0, 0.0, 0.4, 40.0, 0.0], rel=0.01)
    assert figures("ml/ended") == pytest.approx([1.0, 0.0, 1.0, 0.04, 10.0, 10.0], rel=0.01)
    assert figures("web/half") == pytest.approx([1.5, 0.0, 1.5, 0.12, 15.0, 15.0], rel=0.01)
    assert figures("web/slice") == pytest.approx([4 / 7, 2 / 7, 0.0, 0.2, 40 / 7, 0.0], rel=0.01)
    free = 16 - 4 - 1 - 1.5 - 4 / 7
    assert figures("unallocated") == pytest.approx([free, 0.0, 0.0, 0.24, free * 10, 0.0], rel=0.01)
    assert answer.totals.gpu_hours == pytest.approx(16.0, rel=0.005), "hours of the GPUs"
    assert answer.totals.cost == pytest.approx(160.0, rel=0.005)
    assert rows["ml/train"].mean_use == pytest.approx(0.25, rel=0.01)
    assert rows["ml/train"].waited_hours == pytest.approx(0.4, rel=0.01)
    assert by_owner["ml/Job/batch"].owner == WorkloadOwner("Job", "batch")
    assert by_team["nlp"].gpu_hours == rows["ml/ended"].gpu_hours
    assert rows_of(dearer)["ml/train"].cost == pytest.approx(3 * 10 + 30, rel=0.01), (
        "the last hour has a higher price"
    )
    costs = {name: row.cost for name, row in rows_of(spot[0]).items()}
    rest = 1.5 * 10 + (4 - 4 / 7) * 4
    assert costs == pytest.approx(
        {
            "ml/train": 16.0,
            "ml/ended": 10.0,
            "web/half": 15.0,
            "web/slice": 16 / 7,
            "unallocated": rest,
        },
        rel=0.01,
    )
    assert [answer.totals.cost for answer in spot] == pytest.approx(
        [16 + 25 + 16 / 7 + rest] * 2, rel=0.005
    )
    assert any("4.00 GPU-hours have no price" in note for note in spot[0].notes), (
        "the labels of node c are unknown"
    )
    assert any("no GPU metrics at" in note for note in early.notes)
    assert early.totals.gpu_hours == pytest.approx(16.0, rel=0.005)
    assert any("no pod has the label" in note for note in unlabelled.notes)
    assert not any("missing" in note for note in by_digit.notes)


@both_servers
def test_two_processes_give_the_same_bytes(serving: Serving, tmp_path: Path) -> None:
    """The second process starts later, so it has no data in memory."""
    # The view shows GPUs of now, and this test may begin long after END.
    delay = time.time() // STEP * STEP - 2 * STEP - END
    first = [replace(point, at=point.at + delay) for point in points()]
    twins = [replace(point, labels={**point.labels, "cluster": "b"}) for point in first]
    prices = tmp_path / "prices.yaml"
    prices.write_text("{currency: EUR, models: {H100: {gpu_hour: 10}}}")
    arguments = (
        "cluster",
        "--interval",
        "1s",
        "--prices",
        str(prices),
        "--owners",
        "none",
        "--prometheus",
    )
    span = f"from={START + delay}&to={END + delay}"
    paths = [f"range?by={by}&{span}" for by in ("pod", "owner", "namespace", "label:team")]
    paths += [f"waste?by=owner&{span}", f"range?by=pod&{span}&format=csv"]
    answers: list[list[bytes]] = []
    with serving(tmp_path, [*first, *twins]) as url:
        for number in range(2):
            folder = tmp_path / str(number)
            folder.mkdir()
            with podgpu(
                (*arguments, url), folder, lambda process: _is_ready(process.client)
            ) as process:
                answers.append([process.client.ask(f"/api/v1/{path}").body for path in paths])
                answers[-1].append(_ask_at_one_time(process.client, "/api/v1/waste?range=6h"))
                totals = json.loads(process.client.ask("/api/v1/view").body)["totals"]
                answers[-1].append(json.dumps(totals).encode())
    for path, one, two in zip([*paths, "waste now", "head"], *answers, strict=True):
        assert one == two, path
    namespaces = json.loads(answers[0][2])["rows"]
    hours = {
        (row.get("cluster", ""), row["namespace"]): row["gpu_hours"]
        for row in namespaces
        if "namespace" in row
    }
    web = 1.5 + 4 / 7
    expected = {("", "ml"): 5.0, ("b", "ml"): 5.0, ("", "web"): web, ("b", "web"): web}
    assert hours == pytest.approx(expected, rel=0.01)
    assert json.loads(answers[0][-1])["gpus"] == 4
    table = list(csv.DictReader(io.StringIO(answers[0][5].decode())))
    assert {row["SubAccountId"] for row in table} == {"", "b"}
    assert sum(float(row["ConsumedQuantity"]) for row in table) == pytest.approx(32.0, rel=0.005), (
        "hours of the GPUs"
    )
    # Two rows if the range begins before midnight.
    train = [row for row in table if (row["x_Pod"], row["SubAccountId"]) == ("train", "b")]
    used = []
    for bound in ("Min", "", "Max"):
        used.append(sum(float(row[f"x_UsedGpuHours{bound}"]) for row in train))
    assert used == pytest.approx([0.9, 1.0, 1.2], rel=0.01)
    methods: dict[str, set[str]] = defaultdict(set)
    for row in table:
        if row["SubAccountId"] == "b":
            methods[row["x_Pod"]].update(row["x_UsageMethod"].split())
    assert methods == {
        "train": {"exact", "switches"},
        "ended": {"mps"},
        "half": {"mps"},
        "slice": set(),
        "": set(),
    }


@both_servers
def test_current_gpus_are_those_of_the_last_round(serving: Serving, tmp_path: Path) -> None:
    """The pod ml/new has no usage yet. Nodes of the state have no cluster name, but Prometheus has
    one.
    """
    held = (
        states.gpu(number, holder(name), model="H100")
        for number, name in enumerate(("train", "new"))
    )
    state = state_of(states.node("n1", *held), prices=PRICES)
    with serving(
        tmp_path, [replace(point, labels={**point.labels, "cluster": "a"}) for point in points(120)]
    ) as url:
        rows = rows_of(ask(url, start=START, end=None, state=state))
        unknown = rows_of(ask(url, start=START, end=None))
    current = {name: (row.gpus, row.cost_per_hour) for name, row in rows.items() if row.pod}
    assert current == {
        "a/ml/train": (1, 10),
        "a/ml/new": (1, 10),
        **dict.fromkeys(("a/ml/ended", "a/web/half", "a/web/slice"), (0, None)),
    }
    assert {row.gpus for row in unknown.values()} == {None}, "unknown without a round"


def _is_ready(client: Client) -> bool:
    try:
        return client.ask("/ready").status == 200
    except OSError:
        return False


def _ask_at_one_time(client: Client, path: str) -> bytes:
    """Removes the times of the range, which change with each request."""
    answer = json.loads(client.ask(path).body)
    return json.dumps([[row.get("pod"), row["idle_hours"]] for row in answer["rows"]]).encode()


def ten_days(begin: float) -> Iterator[Point]:
    for seconds in range(0, 10 * DAY + 1, 120):
        at = begin + seconds
        for labels, share, idle in ((HELD, 1.0, 0.0), (SHARED, 0.5, 1.0)):
            name = {"job": "podgpu", "instance": "a", **labels}
            yield Point("podgpu_container_gpu_allocated_seconds_total", name, share * seconds, at)
            yield Point(
                "podgpu_container_gpu_busy_seconds_total", name, 0.25 * seconds * (1 - idle), at
            )
            yield Point(
                "podgpu_container_gpu_wasted_seconds_total",
                {**name, "kind": "idle"},
                share * idle * seconds,
                at,
            )
            yield Point("podgpu_allocation_share_ratio", name, share, at)
            yield Point("podgpu_allocation_info", name, 1, at)
            yield Point(
                "DCGM_FI_DEV_GPU_TEMP", {"instance": "a", "UUID": labels["UUID"], **MODEL}, 40, at
            )
        yield Point(
            "podgpu_device_usage_method",
            {"instance": "a", "UUID": "GPU-0", "method": "exact"},
            1,
            at,
        )
        pod = {"namespace": "ml", "pod": "train", "owner_kind": "Job", "owner_name": "batch"}
        yield Point("kube_pod_owner", {**pod, "owner_is_controller": "true"}, 1, at)


def evaluate_rules(url: str, begin: float, end: float) -> list[Point]:
    """Computes the samples that the server's recording rules would have stored."""
    short, _ = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    owners = f"({short['rules'][0]['expr']})"
    points, sums = [], defaultdict[tuple[str, float], float](float)
    for rule in short["rules"][1:]:
        expression = rule["expr"].replace("last_over_time(podgpu:pod_owner:info[10m])", owners)
        form = {"query": expression, "start": begin + 300, "end": end, "step": 300}
        with urllib.request.urlopen(
            f"{url}/api/v1/query_range", urlencode(form).encode(), timeout=PATIENCE
        ) as answer:
            found = json.load(answer)["data"]["result"]
        for series in found:
            labels = {**series["metric"], **rule["labels"]}
            for at, value in series["values"]:
                points.append(Point("podgpu:usage:increase5m", labels, float(value), at))
                sums[json.dumps(labels), -(-at // HOUR) * HOUR] += float(value)
    return points + [
        Point("podgpu:usage:sum1h", json.loads(labels), total, at)
        for (labels, at), total in sums.items()
    ]


@needs("victoria-metrics")
def test_recording_rules_are_used_if_they_cover_the_range(tmp_path: Path) -> None:
    begin = END // HOUR * HOUR - 10 * DAY
    end = begin + 10 * DAY
    raw, recorded = tmp_path / "raw", tmp_path / "recorded"
    raw.mkdir(), recorded.mkdir()
    with victoria_metrics(raw, ten_days(begin)) as url:
        before = {by: ask(url, by, begin, end) for by in ("owner", "namespace")}
        rules = evaluate_rules(url, begin, end)
    late = [point for point in rules if point.at > end - DAY or not point.name.endswith("5m")]
    with victoria_metrics(recorded, [*ten_days(begin), *late]) as url:
        after = {by: ask(url, by, begin, end) for by in ("owner", "namespace")}
        day, days = (ask(url, "owner", end - length * DAY, end) for length in (1, 2))
        longer = ask(url, "owner", begin - 10 * DAY, end)
        history = asyncio.run(prometheus_past(PrometheusServer(url)).gpu("GPU-0", "", 12 * DAY))
    assert history is not None
    temperatures = history.series["temperature_celsius"]
    assert len(temperatures) <= MAX_POINTS
    assert temperatures.count(40) == pytest.approx(len(temperatures) * 10 / 12, abs=3)
    assert {answer.source for answer in before.values()} == {"counters"}
    assert {answer.source for answer in (*after.values(), longer)} == {"podgpu:usage:sum1h"}
    assert (day.source, days.source) == ("podgpu:usage:increase5m", "counters")
    for by, answer in after.items():
        rows = rows_of(answer)
        for name, row in rows_of(before[by]).items():
            found, expected = (
                (one.gpu_hours, one.used_hours, one.idle_hours, one.cost, one.wasted)
                for one in (rows[name], row)
            )
            assert found == pytest.approx(expected, rel=0.005, abs=1.0), name
            assert (
                rows[name].methods == row.methods == (["exact"] if name.startswith("ml") else [])
            ), name
        assert (answer.methods, answer.notes) == (["exact"], [])
    assert rows_of(day)["ml/Job/batch"].gpu_hours == pytest.approx(24.0, rel=0.005)
    assert rows_of(day)["web/half"].wasted == pytest.approx(120.0, rel=0.005)


@needs("vmalert")
def test_vmalert_accepts_the_rules() -> None:
    subprocess.run(
        ["vmalert", "-dryRun", f"-rule={RULES.parent}/*.yaml"], check=True, capture_output=True
    )


class MonthPod(NamedTuple):
    gpu: int
    namespace: str
    start: float
    end: float
    share: float
    idle: float  # fraction of the time
    use: float  # fraction of the share, in the rest of the time

    def counters(self, held: float) -> dict[str, float]:
        """Returns the exporter's counters after `held` seconds, by their name."""
        works = held * (1 - self.idle)
        return {
            "allocated_seconds": held * self.share,
            "busy_seconds": works * self.share * self.use,
            "wasted_seconds idle": held * self.idle * self.share,
            "wasted_seconds underused": works * self.share * (1 - self.use),
            "energy_joules": held * self.share * 300 + works * self.share * 400,
        }

    def usage(self, held: float) -> dict[str, Any]:
        """Returns the same counters as in the exporter's document."""
        counters = self.counters(held)
        return {
            "utilization_ratio": (1 - self.idle) * self.use,
            "allocated_ns": round(counters["allocated_seconds"] * 1e9),
            "busy_ns": round(counters["busy_seconds"] * 1e9),
            "idle_ns": round(held * self.idle * 1e9),
            "wasted_underused_ns": round(counters["wasted_seconds underused"] * 1e9),
            "energy_mj": round(counters["energy_joules"] * 1e3),
        }


class Month:
    """Pods on two GPUs, one of them shared, an exporter that restarts, and periods without samples."""

    def __init__(self, begin: float) -> None:
        random = Random(30)
        self.begin, self.length, self.step = begin, 30 * DAY, 120
        self.restarts = sorted(random.uniform(0, self.length) for _ in range(20))
        starts = [random.uniform(0, self.length) for _ in range(15)]
        self.gaps = [(start, start + random.uniform(300, 3600)) for start in starts]
        self.pods: list[MonthPod] = []
        for gpu, share in ((0, 1.0), (1, 0.5), (1, 0.25)):
            at = random.uniform(0, HOUR)
            while at < self.length:
                end = min(at + random.uniform(HOUR, 40 * HOUR), self.length)
                namespace = random.choice(("ml", "web"))
                idle = random.choice((0.0, 0.3, 1.0))
                self.pods.append(MonthPod(gpu, namespace, at, end, share, idle, random.random()))
                at = end + random.uniform(0, 2 * HOUR)

    def times(self) -> Iterator[int]:
        """Yields the seconds of all samples."""
        for seconds in range(0, self.length + 1, self.step):
            if not any(start <= seconds < end for start, end in self.gaps):
                yield seconds

    def pods_at(self, seconds: float) -> Iterator[tuple[str, MonthPod, float]]:
        """Yields the name of each pod, the pod, and for how long its exporter has counted it."""
        restarted = max((one for one in self.restarts if one <= seconds), default=0.0)
        for number, pod in enumerate(self.pods):
            if pod.start <= seconds < pod.end:
                yield f"pod-{number}", pod, seconds - max(pod.start, restarted)

    def points(self) -> Iterator[Point]:
        for seconds in self.times():
            at = self.begin + seconds
            for gpu in range(2):
                labels = {"instance": "a", "UUID": f"GPU-{gpu}", **MODEL}
                yield Point("DCGM_FI_DEV_GPU_TEMP", labels, 40, at)
            for name, pod, held in self.pods_at(seconds):
                labels = {"instance": "a", "UUID": f"GPU-{pod.gpu}", **MODEL}
                labels |= {"namespace": pod.namespace, "pod": name, "container": "main"}
                yield Point("podgpu_allocation_share_ratio", labels, pod.share, at)
                for key, value in pod.counters(held).items():
                    counter, _, kind = key.partition(" ")
                    own = {**labels, "kind": kind} if kind else labels
                    yield Point(f"podgpu_container_gpu_{counter}_total", own, value, at)

    def record(self, folder: Path) -> dict[str, RangeRow]:
        """Returns the bill of the month from SQLite. The cluster view reads the same exporter."""
        now = 0.0
        clock = Clock(lambda: now, lambda: self.begin + now)
        recorder = HistoryRecorder(clock=clock, directory=str(folder))
        world = World(ViewSettings(interval=self.step, stale_after=3 * self.step))
        for seconds in self.times():
            now = float(seconds)
            run = f"run-{sum(one <= now for one in self.restarts)}"
            reading = node("n1", *self.gpus(now), read_at=now, exporter_id=run)
            state = world.round(reading, at=now, wall=self.begin + now, prices=PRICES)
            recorder.add(make_gpu_samples(state))
            recorder.record()
        query = RangeQuery("namespace", start=self.begin, end=self.begin + self.length)
        answer = asyncio.run(SqlitePast(recorder, lambda: state).range(query))
        recorder.stop()
        return rows_of(answer)

    def gpus(self, seconds: float) -> list[DeviceState]:
        holders: list[list[Holder]] = [[], []]
        for name, pod, held in self.pods_at(seconds):
            own = holder(name, pod.namespace, share=pod.share, **pod.usage(held))
            holders[pod.gpu].append(own)
        return [
            states.gpu(index, *own, model="H100", usage=DeviceTotals(method="exact"))
            for index, own in enumerate(holders)
        ]

    def bill(self, namespace: str) -> dict[str, float]:
        """Returns what is true."""
        sums: dict[str, float] = defaultdict(float)
        for pod in self.pods:
            if pod.namespace == namespace:
                for name, amount in pod.counters(pod.end - pod.start).items():
                    sums[name] += amount / HOUR
        return {
            "gpu_hours": sums["allocated_seconds"],
            "used_hours": sums["busy_seconds"],
            "idle_hours": sums["wasted_seconds idle"],
            "energy_kwh": sums["energy_joules"] / 1000,
            "cost": 10 * sums["allocated_seconds"],
            "wasted": 10 * sums["wasted_seconds idle"],
            "under-used hours": sums["wasted_seconds underused"],
            "under-used cost": 10 * sums["wasted_seconds underused"],
        }


def bill_of(row: RangeRow) -> dict[str, float | None]:
    names = ("gpu_hours", "used_hours", "idle_hours", "energy_kwh", "cost", "wasted")
    bill = {name: getattr(row, name) for name in names}
    waste = row.waste
    assert waste is not None
    assert waste.cost is not None
    return bill | {
        "under-used hours": waste.hours.underused,
        "under-used cost": waste.cost.underused,
    }


@both_servers
def test_a_month_with_restarts_ended_pods_and_gaps_is_billed_within_half_a_percent(
    serving: Serving, tmp_path: Path
) -> None:
    month = Month(END // HOUR * HOUR - 30 * DAY)
    with serving(tmp_path, month.points()) as url:
        answer = ask(url, "namespace", month.begin, month.begin + month.length)
    assert [note for note in answer.notes if note.startswith("missing")] == []
    rows = rows_of(answer)
    recorded = month.record(tmp_path / "sqlite")
    for namespace in ("ml", "web"):
        in_sqlite = bill_of(recorded[namespace])
        in_engine = bill_of(rows[namespace])
        assert in_sqlite == pytest.approx(in_engine, rel=0.005), namespace
        # Some pods end in a gap, so the last minutes before their end are unknown.
        assert in_engine == pytest.approx(month.bill(namespace), rel=0.01), namespace
    # The exporter counts held time in gaps, but no engine knows whether the GPUs were there.
    missing = recorded["unallocated"].gpu_hours - rows["unallocated"].gpu_hours
    gaps = sum(end - start for start, end in month.gaps)
    assert 0 <= missing <= 2 * gaps / HOUR


def test_a_failing_query_is_named_and_the_rest_is_shown() -> None:
    def misbehave(asked: Asked) -> Reply | None:
        is_large = (
            "busy" in asked.query
            or "count_over_time" in asked.query
            or asked.query.startswith("group(")
        )
        return error(422, "query processing would load too many samples") if is_large else None

    with running_double() as double:
        double.put("podgpu_container_gpu_allocated_seconds_total", 7200, **HELD)
        double.misbehave = misbehave
        found = ask(double.url, start=double.now - 4 * HOUR, end=double.now)
    assert any("missing: busy" in note and "too many samples" in note for note in found.notes)
    assert any("missing: gpu seconds" in note for note in found.notes)
    assert any("missing: GPUs at" in note for note in found.notes)
    assert not any("has no GPU metrics" in note for note in found.notes), (
        "unknown, as the query failed"
    )
    (row,) = found.rows
    assert (row.pod, row.gpu_hours, row.unknown_hours, row.cost) == ("train", 2.0, 2.0, 20.0)
    with pytest.raises(SourceError):
        ask("http://127.0.0.1:9")
