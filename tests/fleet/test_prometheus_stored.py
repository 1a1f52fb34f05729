"""Rounds and histories from the stored samples of a real Prometheus and VictoriaMetrics."""

from __future__ import annotations

import asyncio
import base64
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from podgpu.errors import SourceError
from podgpu.fleet.read.prometheus import (
    PodOwners,
    PrometheusClient,
    PrometheusCollector,
    PrometheusServer,
)
from podgpu.fleet.readings import ClusterReading
from podgpu.fleet.settings import ViewSettings
from podgpu.model import WorkloadOwner
from podgpu.past.gpu_history import JSON
from podgpu.past.prometheus.prometheus_past import CACHE_SECONDS
from podgpu.past.prometheus.prometheus_series import Window
from podgpu.past.queries import parse_range
from tests.fleet.prometheus_double import PrometheusDouble, Reply, running_double
from tests.fleet.real_servers import Point, needs, prometheus, victoria_metrics
from tests.fleet.states import prometheus_past

MIB = 1024 * 1024
PODGPU = {
    "job": "podgpu",
    "instance": "10.0.0.1:9400",
    "Hostname": "node-a",
    "gpu": "0",
    "UUID": "GPU-podgpu",
}
SHARED = {
    "job": "podgpu",
    "instance": "10.0.0.1:9400",
    "Hostname": "node-a",
    "gpu": "1",
    "UUID": "GPU-shared",
}
DCGM = {
    **{
        "job": "dcgm",
        "instance": "10.0.0.2:9400",
        "namespace": "gpu-operator",
        "pod": "dcgm-exporter-x",
    },
    **{"hostname": "node-b", "gpu": "3", "uuid": "GPU-dcgm"},
}
IDLE = DCGM | {"gpu": "4", "uuid": "GPU-idle"}
OLD = {"job": "old", "instance": "10.0.0.4:9400", "gpu": "0", "uuid": "GPU-old"}
MIG = {
    "job": "mig",
    "instance": "10.0.0.3:9400",
    "Hostname": "node-c",
    "gpu": "0",
    "UUID": "GPU-mig",
}
HELD = {"namespace": "research", "pod": "train", "container": "main"}
OTHER = {"namespace": "vision", "pod": "infer", "container": "main"}
EXPORTED = {
    "exported_namespace": "research",
    "exported_pod": "old-train",
    "exported_container": "main",
}
IDLE_AFTER = 240.0
NOW = 0.0
"""Time of the last sample, set before the server starts."""


def points() -> Iterator[Point]:
    """One sample every 15 s in the last hour and every minute in the 23 h before, with a gap of
    five minutes.

    The load changed half an hour ago.
    """
    moments = [
        *(NOW - 86_400 + 60 * n for n in range(23 * 60)),
        *(NOW - 3600 + 15 * n for n in range(241)),
    ]
    for at in moments:
        ago = NOW - at
        if 300 < ago <= 600:
            continue
        early = ago > 1800
        yield Point("DCGM_FI_DEV_GPU_UTIL", PODGPU, 25 if early else 75, at)
        yield Point("DCGM_FI_DEV_FB_USED", PODGPU, 1000, at)
        yield Point("DCGM_FI_DEV_POWER_USAGE", PODGPU, 300.5, at)
        yield Point("DCGM_FI_DEV_GPU_TEMP", PODGPU, 0x7FFFFFF0 if ago < 60 else 55, at)
        if early:
            yield Point("podgpu_allocation_info", {**PODGPU, **HELD, "source": "kubelet"}, 1, at)
        yield Point("podgpu_device_health", {**PODGPU, "condition": "xid"}, 0 if early else 1, at)
        yield Point("podgpu_device_health", {**PODGPU, "condition": "lost"}, 0, at)
        yield Point("DCGM_FI_DEV_GPU_UTIL", SHARED, 90, at)
        yield Point("DCGM_FI_DEV_POWER_USAGE", SHARED, 400, at)
        for holder, part in ((HELD, 0.3), (OTHER, 0.6)):
            yield Point("podgpu_allocation_info", {**SHARED, **holder, "source": "kubelet"}, 1, at)
            yield Point("podgpu_container_gpu_utilization_ratio", {**SHARED, **holder}, part, at)
            yield Point(
                "podgpu_container_gpu_memory_used_bytes",
                {**SHARED, **holder},
                part * 1000 * MIB,
                at,
            )
        yield Point("DCGM_FI_DEV_GPU_UTIL_RATIO", {**DCGM, **EXPORTED}, 0.5, at)
        yield Point("DCGM_FI_DEV_FB_USED_BYTES", {**DCGM, **EXPORTED}, 512 * MIB, at)
        yield Point(
            "up", {name: DCGM[name] for name in ("job", "instance", "namespace", "pod")}, 1, at
        )
        yield Point(
            "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
            {**MIG, "GPU_I_ID": "7", "GPU_I_PROFILE": "1g.10gb"},
            0.125,
            at,
        )
        yield Point(
            "DCGM_FI_DEV_POWER_USAGE", {**MIG, "GPU_I_ID": "7", "GPU_I_PROFILE": "1g.10gb"}, 200, at
        )
        yield Point("dcgm_gpu_utilization", OLD, 12, at)
        yield Point("DCGM_FI_DEV_GPU_UTIL_RATIO", IDLE, 0, at)
        yield from points_of_a_round(at)


def points_of_a_round(at: float) -> Iterator[Point]:
    target = {name: PODGPU[name] for name in ("job", "instance")}
    yield Point("up", target, 1, at)
    yield Point("podgpu_exporter_build_info", {**target, "version": "1"}, 1, at)
    yield Point("podgpu_exporter_snapshot_timestamp_seconds", target, at - 2, at)
    usage = {**target, "namespace": "research", "modelName": "NVIDIA H100"}
    yield Point("podgpu_namespace_gpu_allocated_seconds_total", usage, at - NOW + 86_400, at)
    for holder in (HELD, OTHER):
        yield Point("podgpu_allocation_share_ratio", {**SHARED, **holder}, 0.5, at)
    controller = {"namespace": "research", "owner_is_controller": "true"}
    pod = {"pod": "train", "owner_kind": "ReplicaSet", "owner_name": "train-7d9c"}
    yield Point("kube_pod_owner", {**controller, **pod}, 1, at)
    owner = {"replicaset": "train-7d9c", "owner_kind": "Deployment", "owner_name": "train"}
    yield Point("kube_replicaset_owner", {**controller, **owner}, 1, at)


def _as_json(answer: msgspec.Struct | None) -> JSON | None:
    return None if answer is None else json.loads(msgspec.json.encode(answer))


class Reader:
    def __init__(self, url: str) -> None:
        self._url = url
        self._runner = asyncio.Runner()
        self._history = prometheus_past(PrometheusServer(url))

    def gpu(self, uuid: str, length: str = "1h", instance: str = "") -> JSON | None:
        return _as_json(self._runner.run(self._history.gpu(uuid, instance, parse_range(length))))

    def pod(self, namespace: str, pod: str, length: str = "1h") -> JSON | None:
        return _as_json(self._runner.run(self._history.pod(namespace, pod, parse_range(length))))

    def sparklines(self) -> JSON:
        return self._runner.run(self._history.sparklines())

    def round(self, **options: Any) -> ClusterReading:
        collector = PrometheusCollector(
            PrometheusServer(self._url, **options), ViewSettings(idle_after=IDLE_AFTER)
        )
        reading = self._runner.run(collector.run_round())
        self._runner.run(collector.close())
        assert [outcome.error for outcome in reading.outcomes] == [""], reading.outcomes
        return reading

    def close(self) -> None:
        self._runner.close()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(prometheus, marks=needs("prometheus", "promtool"), id="prometheus"),
        pytest.param(victoria_metrics, marks=needs("victoria-metrics"), id="victoria-metrics"),
    ],
)
def reader(request: pytest.FixtureRequest) -> Iterator[Reader]:
    global NOW
    NOW = time.time() // 15 * 15  # not at import, because other tests may run for minutes first
    serve: Callable[..., Any] = request.param
    stored = sorted(
        points(), key=lambda point: (point.name, sorted(point.labels.items()), point.at)
    )
    with tempfile.TemporaryDirectory(prefix="pg") as folder, serve(Path(folder), stored) as url:
        found = Reader(url)
        yield found
        found.close()


def holders_of(reading: ClusterReading) -> dict[str, list[str]]:
    """Returns the pods of every GPU and MIG instance, by UUID."""
    slots: list[tuple[str, Any]] = [
        (device.uuid if slot is device else f"{device.uuid}/{slot.id}", slot)  # type: ignore[attr-defined]
        for node in reading.nodes
        for device in node.state.devices
        for slot in (device, *device.instances)
    ]
    assert len(dict(slots)) == len(slots), "a device is listed twice"
    return {name: sorted(holder.pod for holder in slot.holders) for name, slot in slots}


def test_a_round(reader: Reader) -> None:
    before = time.monotonic()
    reading = reader.round()
    assert holders_of(reading) == {
        **{
            "GPU-podgpu": [],
            "GPU-shared": ["infer", "train"],
            "GPU-dcgm": ["old-train"],
            "GPU-idle": [],
        },
        **{"GPU-mig": [], "GPU-mig/7": [], "GPU-old": []},
    }
    assert {node.state.node: node.named for node in reading.nodes} == {
        **{"node-a": True, "node-b": True, "node-c": True},
        "10.0.0.4:9400": False,
    }
    (node,) = (node for node in reading.nodes if node.state.node == "node-a")
    assert node.target == "10.0.0.1:9400"
    assert node.read_at <= before
    assert [holder.share_ratio for device in node.state.devices for holder in device.holders] == [
        0.5,
        0.5,
    ]
    assert reading.nodes[0].owners == {("research", "train"): WorkloadOwner("Deployment", "train")}
    assert set(reading.idle_for) == {"GPU-idle"}
    assert reading.idle_for["GPU-idle"] >= IDLE_AFTER


def test_match_applies_to_everything(reader: Reader) -> None:
    assert set(holders_of(reader.round(match='job="dcgm"'))) == {"GPU-dcgm", "GPU-idle"}
    reading = reader.round(match='cluster="elsewhere"')
    assert reading.nodes == ()
    assert any("--match is right" in note.text for note in reading.notes)


def test_a_match_that_up_does_not_have(reader: Reader) -> None:
    """`up` has no hostname. The exporter's pod must still not become a holder."""
    assert holders_of(reader.round(match='hostname="node-b"')) == {
        "GPU-dcgm": ["old-train"],
        "GPU-idle": [],
    }


def test_other_node_labels(reader: Reader) -> None:
    nodes = reader.round(node_labels=("instance",)).nodes
    assert {node.state.node: node.named for node in nodes} == {
        f"10.0.0.{n}:9400": False for n in range(1, 5)
    }


def of(answer: JSON | None, series: str) -> dict[float, float | None]:
    """Returns values by the end of their step, in seconds before NOW."""
    assert answer is not None
    values, step = answer["series"][series], answer["step_seconds"]
    return {NOW - (answer["from"] + (n + 1) * step): value for n, value in enumerate(values)}


def at(values: Mapping[float, float | None], ago: float) -> float | None:
    return min(values.items(), key=lambda item: abs(item[0] - ago))[1]


def test_a_gpu_over_an_hour(reader: Reader) -> None:
    answer = reader.gpu("GPU-podgpu")
    assert answer is not None
    assert (answer["uuid"], answer["node"], answer["index"], answer["step_seconds"]) == (
        "GPU-podgpu",
        "node-a",
        0,
        15,
    )
    assert {len(values) for values in answer["series"].values()} == {240}
    ratio = of(answer, "utilization_ratio")
    assert (at(ratio, 3000), at(ratio, 1200), at(ratio, 100)) == (0.25, 0.75, 0.75)
    assert at(of(answer, "memory_used_bytes"), 1200) == 1000 * MIB
    assert at(of(answer, "power_watts"), 1200) == 300.5
    heat = of(answer, "temperature_celsius")
    assert at(heat, 1200) == 55
    assert {value for ago, value in heat.items() if ago < 45} == {None}, (
        "DCGM's code for a missing value"
    )
    (held,) = answer["holders"]
    assert (held["namespace"], held["pod"], held["container"]) == ("research", "train", "main")
    assert held["to"] == pytest.approx(NOW - 1800, abs=330), (
        "Prometheus looks back by up to five minutes"
    )
    marks = answer["marks"]
    assert {mark["condition"] for mark in marks} == {"xid"}
    assert marks[0]["at"] == pytest.approx(NOW - 1800, abs=30)
    assert ["until" in mark for mark in marks] == [False]


def test_a_gpu_over_a_day(reader: Reader) -> None:
    answer = reader.gpu("GPU-podgpu", "24h")
    assert answer is not None
    assert (answer["step_seconds"], len(answer["series"]["power_watts"])) == (300, 288)
    ratio = of(answer, "utilization_ratio")
    assert at(ratio, 40_000) == pytest.approx(0.25)
    assert at(ratio, 1200) == pytest.approx(0.75)
    assert reader.gpu("GPU-podgpu", "6h") is not None


def test_newer_names_and_the_exporter_s_pod(reader: Reader) -> None:
    """Names of 4.9 in base units, and the label `uuid`. Prometheus added the labels of the
    exporter's pod.
    """
    answer = reader.gpu("GPU-dcgm")
    assert answer is not None
    assert (answer["node"], answer["index"]) == ("node-b", 3)
    assert at(of(answer, "utilization_ratio"), 1200) == 0.5
    assert at(of(answer, "memory_used_bytes"), 1200) == 512 * MIB
    assert [held["pod"] for held in answer["holders"]] == ["old-train"]
    assert reader.pod("gpu-operator", "dcgm-exporter-x") is None
    old = reader.pod("research", "old-train")
    assert old is not None
    assert [device["uuid"] for device in old["devices"]] == ["GPU-dcgm"]
    assert (
        at(
            of(old["devices"][0] | {"from": old["from"], "step_seconds": 15}, "utilization_ratio"),
            1200,
        )
        == 0.5
    )
    oldest = reader.gpu("GPU-old")
    assert at(of(oldest, "utilization_ratio"), 1200) == pytest.approx(0.12)


def test_a_pod_has_its_own_part_of_a_shared_gpu(reader: Reader) -> None:
    answer = reader.pod("research", "train")
    assert answer is not None
    alone, shared = answer["devices"]
    assert [alone["uuid"], shared["uuid"]] == ["GPU-podgpu", "GPU-shared"]
    head = {"from": answer["from"], "step_seconds": answer["step_seconds"]}
    assert at(of(alone | head, "utilization_ratio"), 3000) == 0.25, "the pod was the only holder"
    assert at(of(alone | head, "utilization_ratio"), 100) is None, "the pod no longer held the GPU"
    assert at(of(shared | head, "utilization_ratio"), 1200) == pytest.approx(0.3)
    assert at(of(shared | head, "memory_used_bytes"), 1200) == 300 * MIB
    assert set(of(shared | head, "power_watts").values()) == {None}, "the power is of both pods"


@needs("prometheus", "promtool")
def test_an_ended_pod_has_the_figures_and_conditions_until_its_end(tmp_path: Path) -> None:
    """The pod ends within a step of 5 minutes. Without stale markers, Prometheus would look back
    further.
    """
    now = time.time() // 15 * 15
    stored = []
    for ago in range(3000, 0, -15):
        held = ago > 1950
        stored.append(
            Point(
                "DCGM_FI_DEV_GPU_UTIL",
                PODGPU | (HELD if held else {}),
                99 if held else 0,
                now - ago,
            )
        )
        stored.append(
            Point(
                "podgpu_device_health", {**PODGPU, "condition": "xid"}, 0 if held else 1, now - ago
            )
        )
    stored.sort(key=lambda point: (point.name, sorted(point.labels.items()), point.at))
    with prometheus(tmp_path, stored, options=["--query.lookback-delta=14s"]) as url:
        reader = Reader(url)
        answer = reader.pod("research", "train", "24h")
        reader.close()
    assert answer is not None
    (device,) = answer["devices"]
    assert {value for value in device["series"]["utilization_ratio"] if value is not None} == {0.99}
    assert answer["marks"] == []


def test_a_mig_instance(reader: Reader) -> None:
    answer = reader.gpu("GPU-mig", instance="7")
    assert answer is not None
    assert at(of(answer, "utilization_ratio"), 1200) == 0.125
    assert set(answer["series"]["power_watts"]) == {None}, (
        "power is a value of the GPU, not of the pod"
    )
    whole = reader.gpu("GPU-mig")
    assert at(of(whole, "power_watts"), 1200) == 200


def test_sparklines(reader: Reader) -> None:
    answer = reader.sparklines()
    assert (answer["points"], answer["step_seconds"]) == (60, 60)
    lines = {name: base64.b64decode(line) for name, line in answer["devices"].items()}
    assert set(lines) == {
        "GPU-podgpu",
        "GPU-shared",
        "GPU-dcgm",
        "GPU-idle",
        "GPU-mig/7",
        "GPU-old",
    }
    assert {len(line) for line in lines.values()} == {60}
    assert (lines["GPU-podgpu"][10], lines["GPU-podgpu"][40]) == (50, 150)
    assert lines["GPU-dcgm"][40] == 100
    assert lines["GPU-mig/7"][40] == 25


def test_unknown_gpus_and_pods(reader: Reader) -> None:
    assert reader.gpu("GPU-nobody") is None
    assert reader.gpu("GPU-podgpu", instance="3") is None
    assert reader.pod("research", "nobody") is None
    assert reader.gpu('GPU-"}) or vector(1) #') is None


# A server with faults


@pytest.mark.fault(
    "Prometheus is away or overloaded when history is requested",
    "The request is answered with 503 and the reason within 10 s; rounds continue",
)
def test_failures_are_not_cached() -> None:
    async def go(double: PrometheusDouble) -> None:
        history = prometheus_past(PrometheusServer(double.url, timeout=2.0))
        double.misbehave = lambda asked: Reply(b"busy", 503)
        with pytest.raises(SourceError, match="503"):
            await history.sparklines()
        before = len(double.asked)
        with pytest.raises(SourceError, match="503"):
            await history.sparklines()
        assert len(double.asked) > before

    with running_double() as double:
        asyncio.run(go(double))


def test_equal_requests_share_one_answer() -> None:
    empty = json.dumps(
        {"status": "success", "data": {"resultType": "matrix", "result": []}}
    ).encode()

    async def go(double: PrometheusDouble) -> None:
        now = 0.0
        history = prometheus_past(PrometheusServer(double.url), clock=lambda: now)
        double.misbehave = lambda asked: (
            Reply(empty) if asked.path.endswith("query_range") else None
        )
        for _ in range(2):
            await asyncio.gather(*(history.sparklines() for _ in range(50)))
        queries = len([one for one in double.asked if one.path.endswith("query_range")])
        assert queries <= 2, "at most as many queries as may run concurrently"
        now = CACHE_SECONDS + 1
        await history.sparklines()
        assert len([one for one in double.asked if one.path.endswith("query_range")]) == queries + 1

    with running_double() as double:
        asyncio.run(go(double))


def test_runs_of_steps() -> None:
    window = Window(1000.0, 100, 10)
    assert window.find_runs({0, 1, 3, 8, 9}) == [(1000.0, 1400.0), (1800.0, None)]


def test_a_step_has_the_point_at_its_end() -> None:
    window = Window(1000.0, 100, 4)
    points = [(1000.0, 0.9), (1100.0, 0.5), (1210.0, 0.6), (1400.0, 0.8), (1500.0, 0.7)]
    assert window.align("utilization_ratio", points) == [0.5, 0.6, None, 0.8]
    assert window.align("power_watts", points) == [0.5, 0.6, None, 0.8]


def test_a_ratio_slightly_above_1_is_1_and_others_are_unknown() -> None:
    window = Window(1000.0, 100, 5)
    points = [(1100.0, 1.005), (1200.0, 1.02), (1300.0, -0.1), (1400.0, 0.0), (1500.0, 1.01)]
    assert window.align("utilization_ratio", points) == [1.0, None, None, 0.0, 1.0]
    assert window.align("power_watts", points)[:2] == [1.005, 1.02]


@needs("victoria-metrics")
def test_queries_for_many_gpus_and_pods_are_not_too_long(tmp_path: Path) -> None:
    """VictoriaMetrics accepts queries of 16 KiB. The pod changed its GPU 40 times."""
    now = time.time() // 15 * 15 - 30
    gpus = [f"GPU-{number:08x}-0000-0000-0000-000000000000" for number in range(40)]
    held = [{"instance": "a", "UUID": uuid, "namespace": "ml", "pod": "web-0"} for uuid in gpus]
    pods = [("ml", f"{'long-name-' * 5}{number}") for number in range(300)]

    async def read_owners(url: str) -> int:
        async with aclosing(PrometheusClient(PrometheusServer(url))) as client:
            return len(await PodOwners(client, "", "cluster", "").read(pods))

    owned = {"owner_is_controller": "true", "owner_kind": "Job", "owner_name": "batch"}
    stored = [Point("podgpu_allocation_info", labels, 1, now) for labels in held]
    stored += [
        Point("kube_pod_owner", {**owned, "namespace": "ml", "pod": pod}, 1, now) for _, pod in pods
    ]
    with victoria_metrics(tmp_path, stored) as url:
        reader = Reader(url)
        answer = reader.pod("ml", "web-0")
        assert asyncio.run(read_owners(url)) == len(pods)
        reader.close()
    assert answer is not None
    assert [device["uuid"] for device in answer["devices"]] == gpus
