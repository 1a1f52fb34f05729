"""The faults of `podgpu demo` in its JSON over real HTTP, with exporters, a cluster and a simulated
clock.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from base64 import b64decode
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from podgpu.cli.main import run
from podgpu.clock import Clock
from podgpu.fleet.prices import read_prices
from podgpu.fleet.read.scrape import ScrapeCollector
from podgpu.fleet.round import Cluster
from podgpu.labs.demo import (
    CLUSTER,
    CYCLE_SECONDS,
    OTHER_GPUS,
    Act,
    DemoExporter,
    find_owners,
    make_exporter,
    make_node,
    make_script,
    schedule,
)
from podgpu.labs.demo_past import write_past
from podgpu.past.bills.bill import RangeQuery
from podgpu.past.books.record import cluster_recorder
from podgpu.past.books.recorder import HistoryRecorder
from podgpu.past.sqlite.sqlite_past import SqlitePast
from podgpu.past.time_steps import HOUR
from podgpu.web.cluster_app import cluster_application
from podgpu.web.exporter_app import build_state
from tests.nodes.clock import FakeClock
from tests.web.server import Client, running

STEP = 2.0
LEAP = 2 * STEP
"""A longer step between checks. Nodes do not become stale in this time."""


class Demo:
    """The demo's nodes, exporters and cluster, without the threads of the real command."""

    def __init__(self, opened: ExitStack, script: bool = True, past: bool = False) -> None:
        self.time = FakeClock()
        clock = Clock(self.time.monotonic, self.time.wall)
        prices = read_prices("example")
        specs = enumerate(("8xH100", *OTHER_GPUS))
        self.nodes = [
            opened.enter_context(make_node(number, gpus, clock)) for number, gpus in specs
        ]
        self.exporters = [make_exporter(node, prices) for node in self.nodes]
        for exporter in self.exporters:
            opened.callback(exporter.agent.stop)
            opened.callback(exporter.recorder.stop)
        self.clients = [
            opened.enter_context(running(one.agent, app=_app(one))) for one in self.exporters
        ]
        urls = [f"http://127.0.0.1:{client.address.port}/metrics" for client in self.clients]
        self._loop = asyncio.new_event_loop()
        opened.callback(self._loop.close)
        self._backend = ScrapeCollector(
            lambda: urls, CLUSTER, clock=clock, read_owners=lambda: find_owners(self.nodes)
        )
        opened.callback(lambda: self._loop.run_until_complete(self._backend.close()))
        self.cluster = Cluster(lambda: self._backend, CLUSTER, prices, clock)
        self._recorder = cluster_recorder(self.cluster)
        opened.callback(self._recorder.stop)
        if past:
            for _ in range(2):
                self.time.advance(STEP)
                self._read_exporters()
            write_past(self.exporters, self._recorder, prices()[0], self.time.wall())
        recorded = SqlitePast(self._recorder, lambda: self.cluster.published.state)
        app: Any = partial(cluster_application, past=recorded)
        self.page: Client = opened.enter_context(running(self.cluster, app=app))  # type: ignore[arg-type]
        self._due = schedule(make_script(self.nodes) if script else [])
        self._next = next(self._due, None)
        self.at = 0.0
        self.done: list[Act] = []
        self.go_to(4.0)

    def go_to(self, at: float) -> dict[str, Any]:
        """Runs the demo until this time, the last three steps at its real interval. Returns the
        cluster's view.
        """
        while self.at < at:
            self.step(LEAP if self.at + LEAP <= at - 3 * STEP else STEP)
        return self.ask("/api/v1/view")

    def step(self, seconds: float) -> None:
        self.at += seconds
        self.time.advance(seconds)
        while self._next is not None and self._next[0] <= self.at:
            self._next[1].do()
            self.done.append(self._next[1])
            self._next = next(self._due, None)
        self._read_exporters()
        for exporter in self.exporters:
            exporter.recorder.record()
        self._loop.run_until_complete(self.cluster.round(self._backend))
        self._recorder.record()

    def _read_exporters(self) -> None:
        for exporter in self.exporters:
            exporter.agent.read_telemetry()
            exporter.agent.read_allocation()
            exporter.agent.read_usage()

    def ask(self, path: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.page.ask(path).body)
        return found


def _app(of: DemoExporter) -> Any:
    return lambda _agent: of.application


@pytest.fixture
def demo() -> Iterator[Demo]:
    with ExitStack() as opened:
        yield Demo(opened)


@pytest.fixture(scope="module")
def past() -> Iterator[Demo]:
    """A demo with a past, for all tests that only read it."""
    with ExitStack() as opened:
        yield Demo(opened, past=True)


def gpus(view: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    return {(node["name"], gpu["index"]): gpu for node in view["nodes"] for gpu in node["gpus"]}


def by_name(gpu: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {condition["condition"]: condition for condition in gpu.get("conditions", ())}


def conditions(gpu: dict[str, Any]) -> set[str]:
    return {one["condition"] for one in gpu.get("conditions", ())}


def pods(view: dict[str, Any]) -> set[str]:
    return {h.get("pod", "") for gpu in gpus(view).values() for h in gpu.get("holders", ())}


def test_in_a_cycle_everything_breaks_and_is_mended(demo: Demo) -> None:
    well = demo.go_to(8.0)
    assert well["totals"]["broken"] == 0
    assert (well["totals"]["gpus"], well["prices"], well["simulated"]) == (22, "example", True)
    assert well["totals"]["wasted_per_hour"] > 0
    assert {"llm-train-2", "jupyter-ada-0"} <= pods(well)

    ill = demo.go_to(28.0)
    assert "llm-train-2" not in pods(ill), "the job ended"
    found = gpus(ill)
    assert conditions(found["node-1", 6]) == {"recovery_action", "xid"}
    assert conditions(found["node-2", 3]) == {"lost"}
    assert [h["pod"] for h in found["node-2", 3]["holders"]] == ["chat-1"], (
        "a lost GPU keeps its holder"
    )
    fields = demo.ask(f"/api/v1/gpus/{found['node-2', 3]['uuid']}")["fields"]
    assert {field["name"] for field in fields if field["value"]} == {
        "DCGM_FI_DEV_PCI_BUSID",
        "DCGM_FI_DEV_SERIAL",
    }
    assert (ill["totals"]["gpus"], ill["totals"]["broken"]) == (22, 2)

    dead = demo.go_to(44.0)
    (last,) = [node for node in dead["nodes"] if node["name"] == "node-3"]
    assert last["old"]
    assert [conditions(gpu) for gpu in last["gpus"]] == [{"node_gone"}] * 4, (
        "GPUs of a gone node stay"
    )
    assert (dead["totals"]["gpus"], dead["totals"]["broken"]) == (22, 6)
    assert dead["totals"]["unknown"] >= 3.0, "held GPUs of a gone node count as unknown"

    events = {event.get("uuid"): event["at"] for event in demo.ask("/api/v1/events")["events"]}
    for gpu in (gpus(dead)["node-1", 6], gpus(dead)["node-2", 3]):
        assert events[gpu["uuid"]] == pytest.approx(gpu["conditions"][0]["since"], abs=1), (
            "the time of the tile"
        )

    demo.go_to(130.0)
    check_events(demo)
    mended = demo.go_to(CYCLE_SECONDS - 10.0)
    assert mended["totals"]["broken"] == 0
    assert not any(node.get("old") for node in mended["nodes"])
    assert "llm-train-3" in pods(mended), "another job got the GPUs"
    assert mended["totals"]["allocated"] == well["totals"]["allocated"]

    again = demo.go_to(CYCLE_SECONDS + 28.0)
    assert again["totals"]["broken"] == 2
    first, second = (gpus(view)["node-1", 6] for view in (ill, again))
    assert conditions(second) - conditions(first) == {"recurring"}
    advice = [by_name(gpu)["xid"]["do"] for gpu in (first, second)]
    assert advice[0] != advice[1], "the XID came back"
    assert not {"llm-train-2", "llm-train-3"} & pods(again)
    ended = {row["pod"] for row in demo.ask("/api/v1/waste")["rows"] if row["gpus"] == 0}
    assert ended == {"llm-train-2", "llm-train-3"}
    assert len(demo.done) == 8 + 3

    demo.go_to(180.0)
    check_summary(demo)


def check_events(demo: Demo) -> None:
    answer = demo.ask("/api/v1/events?range=1h")
    told = [(event["kind"], event["text"]) for event in reversed(answer["events"])]
    gone = "node-3, 4 GPUs: its node does not answer"
    lost = "GPU 3 of node-2: the driver no longer lists it: it fell off the bus or was removed"
    assert ("ended", "research/llm-train-2 ended on GPU 0, 1 of node-3") in told
    assert ("started", "research/llm-train-3 started on GPU 0, 1 of node-3") in told
    kinds = dict.fromkeys(kind for kind, _ in told)
    texts = {kind: [text for each, text in told if each == kind] for kind in kinds}
    assert texts["node_gone"] == [gone], "a gone node is one event"
    assert texts["lost"] == [lost]
    assert "node-3, 4 GPUs: its node did not answer" in texts["recovered"]
    assert "GPU 3 of node-2: it was lost" in texts["recovered"]
    assert {kind for kind, _ in told} >= {"xid", "idle"}
    assert sum(kind in ("started", "ended") for kind, _ in told) == 2, (
        "pods of a gone node did not end"
    )
    own = demo.ask("/api/v1/events?pod=research/llm-train-2")["events"]
    assert [event["kind"] for event in own] == ["ended"]
    of_gpu = demo.ask(f"/api/v1/events?gpu={demo.nodes[1].driver.gpus[3].uuid}")["events"]
    assert [event["kind"] for event in of_gpu] == ["recovered", "lost"]
    assert demo.page.ask("/api/v1/events?gpu=x&pod=y").status == 400


def check_summary(demo: Demo) -> None:
    ended = demo.ask("/api/v1/summary/research/llm-train-3")
    assert (ended["gpus"], ended["nodes"], ended["owner"]["kind"]) == (2, ["node-3"], "Job")
    assert ended["to"] - ended["from"] == ended["duration_seconds"]
    assert 0.8 < ended["mean_use"] <= ended["peak_use"] <= 1.0
    assert ended["mean_device_use"] == ended["mean_use"]
    assert 0.7 < ended["mean_share_use"] <= 1.0
    assert ended["peak_memory_bytes"] == pytest.approx(61 * 1024**3, rel=0.01)
    assert ended["cost"] > 0
    assert ended["energy_kwh"] > 0
    assert demo.page.ask("/api/v1/summary/research/no-such-pod").status == 404


def test_calm_nothing_breaks_and_the_idle_notebook_is_the_waste() -> None:
    with ExitStack() as opened:
        demo = Demo(opened, script=False)
        views = [demo.go_to(seconds) for seconds in (16.0, 32.0, 48.0, 64.0)]
        owners, notebook = (
            demo.ask("/api/v1/waste?by=owner"),
            demo.ask("/api/v1/pods/notebooks/jupyter-ada-0"),
        )
        assert demo.done == []
    shares: dict[str, set[float]] = {}
    awaited: set[str] = set()
    for view in views:
        assert view["totals"]["broken"] == 0
        for held in (held for gpu in gpus(view).values() for held in gpu.get("holders", ())):
            shares.setdefault(held.get("pod", ""), set()).add(
                round(held.get("utilization_ratio", 0.0), 2)
            )
            awaited |= {part.get("pod", "") for part in held.get("waits_for", ())}
    assert len(shares["chat-0"]) > 2, "the load of a service varies"
    assert shares["jupyter-ada-0"] == {0.0}
    assert min(shares["llm-train-0"]) > 0.7
    assert {"embed-0", "ocr-0"} <= awaited, "pods on a shared GPU wait for each other"
    assert len({gpu["uuid"] for gpu in gpus(views[0]).values()}) == 22
    first = max(owners["rows"], key=lambda row: row.get("wasted", 0.0))
    assert (first["owner"], first["gpus"]) == ({"kind": "Notebook", "name": "jupyter-ada"}, 2.0)
    assert first["wasted"] == pytest.approx(2 * 2.8 * 60 / 3600, abs=0.01)
    assert notebook["owner"] == {"kind": "Notebook", "name": "jupyter-ada"}
    assert notebook["totals"]["cost_per_hour"] == notebook["totals"]["wasted_per_hour"] == 2.8


def test_the_past_of_an_a30_has_its_own_slices() -> None:
    """A profile 2g is half of an A30, which has 4 compute slices."""
    time = FakeClock()
    clock = Clock(time.monotonic, time.wall)
    prices = read_prices("example")
    with make_node(0, "1xA30/1x2g.12gb", clock) as node:
        exporter = make_exporter(node, prices)
        exporter.agent.warm_up()
        recorder = HistoryRecorder(clock=clock)
        write_past([exporter], recorder, prices()[0], clock.wall())
        past = SqlitePast(recorder, partial(build_state, exporter.agent, prices))
        start, end = clock.wall() - 20 * HOUR, clock.wall() - 10 * HOUR
        answer = asyncio.run(past.range(RangeQuery(start=start, end=end)))
        recorder.stop()
        exporter.recorder.stop()
        exporter.agent.stop()
    assert answer.totals.allocated_hours == pytest.approx(answer.totals.gpu_hours / 2)
    assert answer.totals.gpu_hours >= 10


def test_the_demo_has_a_past_from_its_first_second(
    past: Demo, capsys: pytest.CaptureFixture[str]
) -> None:
    told = past.ask("/api/v1/events")["events"]
    assert {event["kind"] for event in told} == {
        *("started", "ended", "recovered", "idle"),
        *("xid", "lost", "thermal", "node_gone"),
    }
    by_team = past.ask("/api/v1/range?range=24h&by=label:team")
    assert {row.get("label") for row in by_team["rows"]} == {
        "nlp",
        "chat",
        "search",
        "data-science",
        None,
    }
    assert by_team["labels"] == ["team"]
    totals = by_team["totals"]
    assert totals["gpu_hours"] == pytest.approx(22 * 24, rel=0.02)
    most = 22 * (by_team["to"] - by_team["from"]) / 3600
    assert totals["gpu_hours"] <= most, "no time is counted twice"
    assert totals["used_hours_min"] == pytest.approx(totals["used_hours"], rel=0.01)
    hour = past.ask("/api/v1/range?range=1h")
    assert hour["totals"]["gpu_hours"] <= 22 * (hour["to"] - hour["from"]) / 3600
    use = past.ask(f"/api/v1/history/gpus/{past.nodes[0].driver.gpus[0].uuid}")["series"][
        "utilization_ratio"
    ]
    assert len(use) >= 240
    assert use.count(None) <= 3, "the charts of one hour have no gaps"
    assert by_team["totals"]["wasted"] > 100
    users = {row["job"] for row in past.ask("/api/v1/range")["rows"] if "job" in row}
    assert users == {"4711", "user ada", "user cleo"}
    assert run(["report", "--url", f"127.0.0.1:{past.page.address.port}", "--by", "pod"]) == 0
    (job_line,) = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("| job 4711 ")
    ]
    assert " of its share |" in job_line, (
        "it uses more than half of the GPU that it shares with cleo"
    )
    shown = [
        held for gpu in gpus(past.ask("/api/v1/view")).values() for held in gpu.get("holders", ())
    ]
    assert {held["user"] for held in shown if "user" in held} == {"ada", "ben", "cleo"}
    job = past.ask("/api/v1/summary/research/finetune-4")
    assert "hint" not in job, "percentiles of two GPUs cannot be added up"
    (ended,) = [
        event for event in told if event["kind"] == "ended" and event["pod"] == "finetune-4"
    ]
    assert job["duration_seconds"] == ended["seconds"]
    assert job["gpu_hours"] == pytest.approx(2 * job["duration_seconds"] / 3600, rel=0.01)
    idle = past.ask("/api/v1/summary/notebooks/jupyter-ada-0")
    (held,) = gpus(past.ask("/api/v1/view"))["node-1", 5]["holders"]
    live_hours = (past.time.wall() - held["idle_since"]) / 3600
    assert live_hours == pytest.approx(idle["idle_hours"], rel=0.01), (
        "the idle time equals that of the history"
    )
    assert [event["kind"] for event in told].count("idle") == 2, (
        "one open alert for each idle notebook"
    )
    embed, ocr = (past.ask(f"/api/v1/summary/batch/{name}-0") for name in ("embed", "ocr"))
    assert embed["energy_kwh"] / ocr["energy_kwh"] == pytest.approx(
        embed["used_hours"] / ocr["used_hours"], rel=0.1
    )
    assert embed["mean_use"] <= embed["peak_use"]
    assert embed["wait_seconds"] > 0
    assert (embed["shared"], embed.keys() & {"tensor_active_ratio", "mean_power_watts"}) == (
        True,
        set(),
    )
    alone, part = (
        past.ask(f"/api/v1/summary/{pod}")
        for pod in ("research/diffusion-0", "notebooks/jupyter-14-0")
    )
    assert 0 < alone["tensor_active_ratio"] < 0.1 * alone["current_use"]
    assert 0.3 < alone["mean_power_watts"] / alone["power_limit_watts"] < 0.7
    assert 0 < part["tensor_active_ratio"] < part["current_use"]
    assert "mean_power_watts" not in part, "a MIG instance has no power of its own"
    lines = past.ask("/api/v1/history")["devices"]
    assert len(lines) == 28, "22 GPUs and 6 MIG instances"
    gaps = {uuid for uuid, line in lines.items() if b64decode(line).count(255) > 2}
    assert gaps == {past.nodes[1].driver.gpus[3].uuid}, "only the GPU that was lost has a gap"
    on_node = json.loads(past.clients[2].ask("/api/v1/events").body)["events"]
    assert {event["node"] for event in on_node} == {"node-3"}


def test_the_cluster_almost_an_hour_ago(past: Demo) -> None:
    at = past.time.wall() - 3500
    then, now = past.ask(f"/api/v1/view?at={at}"), past.ask("/api/v1/view")
    assert (then["taken_at"], then["at"], then["step_seconds"]) == (at, at, 15)
    found, current = gpus(then), gpus(now)
    assert found.keys() == current.keys()
    assert (then["totals"]["gpus"], then["totals"]["broken"], now["totals"]["broken"]) == (22, 1, 0)
    lost = found["node-2", 3]
    assert (conditions(lost), lost["absent"], "utilization_ratio" in lost) == (
        {"lost"},
        True,
        False,
    )
    assert [h["pod"] for h in lost["holders"]] == ["chat-1"]
    ended = found["node-3", 0]["holders"][0]
    assert (ended["pod"], ended["owner"]["kind"], ended["use"]) == ("finetune-5", "Job", "used")
    assert "finetune-5" not in pods(now)
    idle = found["node-1", 5]["holders"][0]
    assert (idle["use"], at - idle["idle_since"]) == ("idle", pytest.approx(23 * 3600, rel=0.01))
    shared = found["node-1", 4]
    assert shared["utilization_ratio"] == pytest.approx(
        sum(h["utilization_ratio"] for h in shared["holders"]), abs=0.001
    )
    mig, mig_now = found["node-2", 6]["instances"], current["node-2", 6]["instances"]
    assert [(i["id"], i["profile"]) for i in mig] == [(i["id"], i["profile"]) for i in mig_now]
    assert {h.get("job", h.get("user")) for h in found["workstation-1", 1]["holders"]} == {
        "4711",
        "cleo",
    }
    for uuid in (lost["uuid"], found["node-1", 0]["uuid"]):
        history = past.ask(f"/api/v1/history/gpus/{uuid}?range=1h")
        step = history["series"]["utilization_ratio"][
            int((at - history["from"]) // history["step_seconds"])
        ]
        (gpu,) = (gpu for gpu in found.values() if gpu["uuid"] == uuid)
        assert gpu.get("utilization_ratio") == step, "the view and the chart show the same"
    around = past.ask(f"/api/v1/events?range=1h&to={at + 1800}")
    assert {event["kind"] for event in around["events"]} == {"lost", "recovered", "ended"}
    assert all(around["from"] <= event["at"] <= at + 1800 for event in around["events"])
    event = next(event for event in around["events"] if event["kind"] == "lost")
    since = gpus(past.ask(f"/api/v1/view?at={event['at']}"))["node-2", 3]["conditions"][0]["since"]
    assert since == event["at"], "a link from the event shows the fault"
    for text in ("abc", "nan", "1e308", "-1", "9e10", "1000", str(at - 90_000)):
        answer = past.page.ask(f"/api/v1/view?at={text}")
        assert answer.status == 400
        assert "error" in json.loads(answer.body)
    (gone,) = (
        node
        for node in past.ask(f"/api/v1/view?at={at - 4.05 * 3600}")["nodes"]
        if node.get("gone")
    )
    uses = [[(h["pod"], h["use"]) for h in gpu.get("holders", ())] for gpu in gone["gpus"]]
    assert (gone["name"], uses) == ("node-3", [[], [], *[[("chat-2", "unknown")]] * 2])
    of_node = json.loads(past.clients[2].ask(f"/api/v1/view?at={at}").body)
    assert (of_node["scope"], pods(of_node)) == ("node", {"finetune-5", "chat-2"})


def test_without_grpc_the_message_names_the_package_to_install() -> None:
    program = (
        "import sys; sys.modules['grpc'] = None; from podgpu.cli.main import main; main(['demo'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    advice = (
        "run pip install '.[demo]' in podgpu's source tree, "
        "or use the image with the tag -autoscale"
    )
    assert (done.returncode, done.stderr) == (
        1,
        f"podgpu: podgpu demo needs the package grpc: {advice}\n",
    )


def test_the_hours_of_the_past_are_compared_with_those_of_the_day_before(past: Demo) -> None:
    costs = past.ask("/api/v1/costs?range=24h&by=namespace&step=hour")
    before = costs["previous"]["totals"]["steps"]["cost"]
    assert before.count(None) <= 1
    assert max(filter(None, before)) == pytest.approx(min(filter(None, before)), rel=0.1)
    compared = costs["previous"]["compared"]
    assert compared["steps"] >= 20
    assert compared["cost"] == pytest.approx(compared["previous_cost"], rel=0.1)


def test_all_days_of_the_past_are_complete(past: Demo) -> None:
    """The page draws the others pale."""
    for page in (past.page, past.clients[0]):
        costs = json.loads(page.ask("/api/v1/costs?range=30d&step=day").body)
        today = costs["complete"].pop()
        assert (today, costs["complete"]) == (False, [True] * 29)
        *days, _ = costs["totals"]["steps"]["cost"]
        assert max(days) == pytest.approx(min(days), rel=0.01)


def test_prompt_and_generated_tokens_of_the_past_have_a_cost_each(past: Demo) -> None:
    split = past.ask("/api/v1/summary/serving/chat-0")["tokens"]["per_million"]
    assert 0 < split["prompt_cost"] < split["generated_cost"]
