"""Pages of GPUs from a real Prometheus and VictoriaMetrics with more GPUs than podgpu reads in a
round.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from podgpu.errors import SourceError, UsageError
from podgpu.fleet.prices import Price, Prices
from podgpu.fleet.read.pages import GpuQuery, PrometheusSelection, parse_gpu_query
from podgpu.fleet.read.prometheus import PrometheusCollector, PrometheusServer
from podgpu.fleet.round import Cluster, PublishedState
from podgpu.fleet.settings import ViewSettings
from podgpu.fleet.view import View, make_pod
from podgpu.model import WorkloadOwner
from tests.fleet.prometheus_double import error, running_double
from tests.fleet.real_servers import Point
from tests.fleet.test_prometheus_live import Serving
from tests.fleet.test_prometheus_ranges import both_servers

PRICES = Prices("EUR", {"H100": Price(10.0)})


def points(now: float) -> Iterator[Point]:
    """Nodes n0 to n2 of cluster east, and n2 and n3 of west, with 4 GPUs each.

    GPU 0 is idle, and GPU 3 is free. GPU 2 of west/n3 is lost.
    """
    for at in range(int(now) - 600, int(now) + 61, 15):
        for cluster, node in (("east", 0), ("east", 1), ("east", 2), ("west", 2), ("west", 3)):
            target = {"cluster": cluster, "job": "podgpu", "instance": f"10.0.0.{node}:9400"}
            yield Point("podgpu_exporter_build_info", {**target, "version": "1"}, 1, at)
            for gpu in range(4):
                uuid, host = (
                    f"GPU-{cluster}-{node}-{gpu}",
                    {"modelName": "H100", "Hostname": f"n{node}"},
                )
                device = {**target, "gpu": str(gpu), "UUID": uuid}
                holder = {
                    "namespace": f"team-{gpu % 2}",
                    "pod": f"job-{node}-{gpu}",
                    "container": "main",
                }
                if uuid == "GPU-west-3-2":
                    since = "podgpu_device_condition_since_timestamp_seconds"
                    yield Point(since, {**device, **host, "condition": "lost"}, now - 600, at)
                    continue
                busy = (10 * node + gpu if gpu else 0) / 100
                yield Point("DCGM_FI_DEV_GPU_TEMP", {**device, **host}, 40, at)
                yield Point(
                    "DCGM_FI_DEV_GPU_UTIL",
                    {**device, **host},
                    100 * busy if at > now - 400 else 0,
                    at,
                )
                yield Point("DCGM_FI_DEV_FB_USED", {**device, **host}, 10 * gpu - node, at)
                yield Point("DCGM_FI_DEV_FB_FREE", {**device, **host}, 1000, at)
                if gpu < 3:
                    yield Point(
                        "podgpu_allocation_info", {**device, **holder, "source": "kubelet"}, 1, at
                    )
                    used = {**device, **host, **holder}
                    seconds = at - now + 600
                    yield Point("podgpu_container_gpu_allocated_seconds_total", used, seconds, at)
                    yield Point(
                        "podgpu_container_gpu_idle_seconds_total", used, 0 if gpu else seconds, at
                    )
                    yield Point("podgpu_container_gpu_utilization_ratio", used, busy, at)
                    owner = {"owner_kind": "Job", "owner_name": f"job-{node}", "cluster": cluster}
                    pod = {name: holder[name] for name in ("namespace", "pod")}
                    yield Point("podgpu:pod_owner:info", {**owner, **pod}, 1, at)
                    owner |= {"owner_is_controller": "true", "instance": "kube-state-metrics"}
                    yield Point("kube_pod_owner", {**owner, **pod}, 1, at)


CASES = {  # request -> number of matching nodes, and nodes on the page
    "ns=team-1": (5, ["east/n0", "east/n1", "east/n2", "west/n2", "west/n3"]),
    "ns=team-1&page=2": (5, []),
    "cluster=west": (2, ["west/n2", "west/n3"]),
    "node=n2&state=free": (2, ["east/n2", "west/n2"]),
    "node=west/n2&state=held": (1, ["west/n2"]),
    "pod=job-3-1&ns=team-1": (1, ["west/n3"]),
    "owner=Job/job-3": (1, ["west/n3"]),
    "gpu=GPU-east-1-3&model=H100": (1, ["east/n1"]),
    "state=idle&q=JOB-0- n0": (1, ["east/n0"]),
    "state=idle&pod=job-0-1": (0, []),
    "state=used&q=w*": (0, []),
    "state=broken": (1, ["west/n3"]),
    "sort=utilization": (5, ["west/n3", "east/n2", "west/n2", "east/n1", "east/n0"]),
    "sort=memory&cluster=east": (3, ["east/n0", "east/n1", "east/n2"]),
    "sort=idle&ns=team-0&node=n1": (1, ["east/n1"]),
    "sort=broken": (1, ["west/n3"]),
}


@both_servers
def test_pages_of_many_gpus(serving: Serving, tmp_path: Path) -> None:
    settings = ViewSettings(max_gpus=3)

    async def read(url: str) -> tuple[View, dict[str, PublishedState]]:
        server = PrometheusServer(url)
        collector = PrometheusCollector(server, settings)
        cluster = Cluster(lambda: collector, settings, lambda: (PRICES, ()))
        await cluster.round(collector)
        select = PrometheusSelection(server, cluster, lambda: (PRICES, ()))
        queries = {
            text: parse_gpu_query(dict(part.split("=") for part in text.split("&")))
            for text in CASES
        }
        pages = {text: await select(query) for text, query in queries.items() if query}
        assert await select(GpuQuery(node="n2", state="free")) is pages["node=n2&state=free"], (
            "the result is cached"
        )
        await collector.close()
        return cluster.published.view, pages

    stored = sorted(
        points(time.time() // 15 * 15), key=lambda point: (point.name, sorted(point.labels.items()))
    )
    with serving(tmp_path, stored) as url:
        head, pages = asyncio.run(read(url))
    assert any("podgpu-usage.yaml" in note for note in head.notes)
    assert (head.paged, head.nodes, head.totals.gpus, head.totals.broken) == (True, [], 19, 1)
    assert (head.totals.allocated, head.totals.free, head.totals.unheld_unknown) == (0, 0, 19), (
        "without the rule"
    )
    for text, page in pages.items():
        found, names = CASES[text]
        assert (page.view.found, [node.name for node in page.view.nodes]) == (
            found,
            sorted(names),
        ), text
        assert page.view.totals == head.totals
    (node,) = pages["owner=Job/job-3"].view.nodes
    assert [gpu.holders[0].use for gpu in node.gpus[:2]] == ["idle", "used"]
    assert node.gpus[0].holders[0].owner == WorkloadOwner("Job", "job-3")
    one = pages["pod=job-3-1&ns=team-1"]
    pod = make_pod(one.state, one.view, "team-1", "job-3-1")
    assert pod is not None
    assert pod.totals.cost_per_hour == 10.0


@both_servers
def test_a_past_time(serving: Serving, tmp_path: Path) -> None:
    now = time.time() // 15 * 15

    async def read(url: str, most: float, *queries: GpuQuery) -> list[View]:
        server, settings = PrometheusServer(url), ViewSettings(max_gpus=most)
        cluster = Cluster(lambda: PrometheusCollector(server, settings), settings)
        select = PrometheusSelection(server, cluster, lambda: (PRICES, ()))
        with pytest.raises(UsageError, match="no GPU metrics at"):
            await select(GpuQuery(at=now - 5000))
        return [(await select(query)).view for query in queries]

    stored = sorted(points(now), key=lambda point: (point.name, sorted(point.labels.items())))
    with serving(tmp_path, stored) as url:
        earlier, later = asyncio.run(
            read(url, math.inf, GpuQuery(at=now - 450), GpuQuery(at=now - 30))
        )
        (page,) = asyncio.run(read(url, 3, GpuQuery(node="n1", at=now - 450)))
    assert (earlier.at, earlier.taken_at, earlier.totals.gpus, earlier.totals.broken) == (
        now - 450,
        now - 450,
        20,
        1,
    )
    assert (earlier.totals.allocated, earlier.totals.cost_per_hour) == (14, 140.0)
    free = [
        [node.gpus[3].utilization_ratio for node in view.nodes] for view in (earlier, later, page)
    ]
    assert free == [[0] * 5, [0.03, 0.13, 0.23, 0.23, 0.33], [0]]
    assert not any(node.old for view in (earlier, later) for node in view.nodes)
    assert earlier.nodes[0].gpus[0].holders[0].owner == WorkloadOwner("Job", "job-0")
    assert (page.paged, page.found, [node.name for node in page.nodes]) == (True, 1, ["east/n1"])


def test_bad_requests_and_a_failing_server() -> None:
    wrong = {
        "sort=colour": "sort='colour': use broken, idle, utilization or memory",
        "state=old": "state='old': use held, free, used, idle or broken",
        "page=0": "page='0': write a number from 1 to 1000000",
        "page=many": "page='many': write a number from 1 to 1000000",
        "at=noon": "at='noon': write a Unix time in seconds",
    }
    for text, message in wrong.items():
        name, value = text.split("=")
        with pytest.raises(UsageError) as refused:
            parse_gpu_query({"ns": "ml", name: value})
        assert str(refused.value) == message
        assert refused.value.facts == {"parameter": name}
    assert parse_gpu_query({"range": "1h"}) is None
    with running_double() as double:
        cluster = Cluster(lambda: None, ViewSettings())  # type: ignore[arg-type,return-value]
        select = PrometheusSelection(PrometheusServer(double.url), cluster, lambda: (PRICES, ()))
        double.misbehave = lambda asked: error(422, "too many samples")
        for _ in range(2):  # failures are not cached
            with pytest.raises(SourceError, match="too many samples"):
                asyncio.run(select(GpuQuery(ns="ml")))
        assert len(double.asked) == 2
