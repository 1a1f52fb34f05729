"""A dcgm-exporter without pod labels and a podgpu report the same GPUs. The dcgm-exporter's node
name sorts first.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import msgspec
import pytest

from podgpu.fleet.prices import Price, Prices
from podgpu.fleet.read.prometheus import PrometheusCollector, PrometheusServer
from podgpu.fleet.read.scrape import ScrapeCollector
from podgpu.fleet.readings import Collector, NodeReading
from podgpu.fleet.round import Cluster
from podgpu.fleet.settings import ViewSettings
from podgpu.fleet.view import make_view
from podgpu.model import DeviceState, NodeState, encode_node
from podgpu.scale.answers import compute_value
from podgpu.scale.pods import RunningPods
from podgpu.scale.requests import MetricRequest, PodSelector, find_metric
from podgpu.scale.samples import SampleStore
from tests.fleet.exporters import Exporter, running_exporters
from tests.fleet.prometheus_double import running_double
from tests.fleet.states import H100, World, gpu, holder
from tests.scale.scenes import pod

PODS = ("train", "infer")
PRICES = Prices("EUR", {H100: Price(3.0)})


def labels(number: int, node: str) -> dict[str, str]:
    return {"gpu": str(number), "UUID": f"GPU-{number}", "modelName": H100, "Hostname": node}


@asynccontextmanager
async def scraping() -> AsyncIterator[tuple[Collector, str, str]]:
    devices = tuple(
        gpu(n, holder(name, utilization_ratio=0.5), busy=0.5) for n, name in enumerate(PODS)
    )
    podgpu = Exporter(
        document=encode_node(NodeState(producer="podgpu", node="zeta", devices=devices))
    )
    pairs = [",".join(f'{k}="{v}"' for k, v in labels(n, "alpha").items()) for n in range(2)]
    dcgm = Exporter("".join(f"DCGM_FI_DEV_GPU_UTIL{{{text}}} 50\n" for text in pairs).encode())
    async with running_exporters(dcgm, podgpu) as urls:
        yield ScrapeCollector(lambda: urls, ViewSettings()), podgpu.url, dcgm.url


@asynccontextmanager
async def prometheus() -> AsyncIterator[tuple[Collector, str, str]]:
    with running_double() as double:
        for instance, node in (("alpha:9400", "alpha"), ("zeta:9400", "zeta")):
            target = {"job": node, "instance": instance}
            for number, name in enumerate(PODS):
                own = labels(number, node) | target
                double.put("DCGM_FI_DEV_GPU_UTIL", 50, **own)
                if node == "zeta":
                    held = {"namespace": "ml", "pod": name, "container": "main"}
                    double.put("podgpu_allocation_info", 1, source="kubelet", **own, **held)
                    double.put("podgpu_container_gpu_utilization_ratio", 0.5, **own, **held)
        double.put("podgpu_exporter_build_info", 1, version="1", job="zeta", instance="zeta:9400")
        yield (
            PrometheusCollector(PrometheusServer(double.url), ViewSettings()),
            "zeta:9400",
            "alpha:9400",
        )


@pytest.mark.fault(
    (
        "The exporter that names the pods stops, and a second exporter without pods still reports "
        "the "
        "same GPUs"
    ),
    (
        "The holders are unknown, not free, and a warning names both exporters, until the first "
        "exporter answers again"
    ),
)
@pytest.mark.parametrize(
    "listed", [True, None]
)  # None: Prometheus, where the series of a stopped exporter disappear
@pytest.mark.parametrize("node", ["alpha", "zeta"])
def test_the_exporter_that_names_the_pods_stops(listed: bool | None, node: str) -> None:
    named = tuple(
        gpu(n, holder(name, utilization_ratio=0.0), busy=0.0) for n, name in enumerate(PODS)
    )
    first = NodeState(producer="podgpu", node="zeta", devices=named)
    second = NodeState(
        producer="dcgm-exporter", node=node, devices=tuple(gpu(n, busy=0.0) for n in range(2))
    )
    world = World(ViewSettings())
    for at, answered in ((0.0, 0.0), (100.0, 0.0), (200.0, 0.0), (215.0, 215.0)):
        readings = [NodeReading(state=second, read_at=at, target="http://dcgm", listed=listed)]
        if listed or at == answered:
            readings.append(
                NodeReading(state=first, read_at=answered, target="http://podgpu", listed=listed)
            )
        view = make_view(world.round(*readings, at=at, prices=PRICES))
        totals = (view.totals.allocated, view.totals.unheld_unknown, view.totals.free)
        assert totals == ((2.0, 0.0, 0.0) if at == answered else (0.0, 2.0, 0.0))
        (alert,) = view.alerts
        assert "http://podgpu" in alert.text
        assert "http://dcgm" in alert.text


@pytest.mark.parametrize(
    ("producer", "names_holders", "still_names_holders"),
    [
        ("podgpu", False, False),  # it never named a holder
        ("podgpu", True, True),  # the other exporter names holders, too
        ("dcgm-exporter", True, False),  # holders of pod labels
    ],
)
def test_an_exporter_that_stops_and_is_not_missed(
    producer: str, names_holders: bool, still_names_holders: bool
) -> None:
    idle = holder(utilization_ratio=0.0)

    def devices(named: bool) -> tuple[DeviceState, ...]:
        return (gpu(0, *([idle] if named else []), busy=0.0),)

    stopped = NodeState(producer=producer, node="n1", devices=devices(names_holders))
    other = NodeState(producer="dcgm-exporter", node="n1", devices=devices(still_names_holders))
    world = World(ViewSettings())
    for at in (0.0, 100.0):
        readings = [
            NodeReading(state=other, read_at=at, target="http://dcgm", listed=True),
            NodeReading(state=stopped, read_at=0.0, target="http://stopped", listed=True),
        ]
        state = world.round(*readings, at=at)
    assert [entry.reading.target for entry in state.nodes] == ["http://dcgm"]
    assert state.nodes[0].silent is None
    assert state.alerts == ()
    assert make_view(state).totals.unheld_unknown == 0.0


@pytest.mark.fault(
    "Two exporters report the same GPUs, and only one of them names the pods",
    (
        "The exporter that names the pods is used for the page, the costs and autoscaling; a "
        "warning "
        "names both exporters"
    ),
)
@pytest.mark.parametrize("collecting", [scraping, prometheus])
async def test_the_exporter_that_names_the_pods_is_used(
    collecting: Callable[[], AbstractAsyncContextManager[tuple[Collector, str, str]]],
) -> None:
    settings = ViewSettings()
    running = RunningPods({("ml", name): pod(name, "ml", node="zeta") for name in PODS})
    store = SampleStore(settings, 600.0, lambda: running)
    async with collecting() as (collector, used, other):
        cluster = Cluster(lambda: collector, settings, lambda: (PRICES, ()))
        await cluster.round(collector)
        await collector.close()
    store.add_round(cluster.published.state)
    view = json.loads(msgspec.json.encode(cluster.published.view))
    assert (
        view["totals"]["gpus"],
        view["totals"]["allocated"],
        view["totals"]["cost_per_hour"],
    ) == (2, 2.0, 6.0)
    assert [namespace["namespace"] for namespace in view["namespaces"]] == ["ml"]
    assert [node["name"] for node in view["nodes"]] == ["zeta"]
    (warning,) = view["alerts"]
    assert warning["severity"] == "warning"
    assert used in warning["text"]
    assert other in warning["text"]
    request = MetricRequest(
        find_metric("gpu_utilization"), PodSelector("ml"), window=settings.interval
    )
    assert compute_value(store.snapshot(), request).value == pytest.approx(50)
