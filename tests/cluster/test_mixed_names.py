"""Exporters with dcgm-exporter 4.8's names, 4.9's and both: one view, each GPU once, each figure right."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from podgpu.cluster.metrics import cluster_families
from podgpu.cluster.scraping.backend import FixedTargets, ScrapeBackend, ScrapeSettings
from podgpu.cluster.settings import ViewSettings
from podgpu.cluster.view import ClusterView, Memory, assemble
from podgpu.http_client import Access
from podgpu.metrics.names import NameSet
from tests.nodes.clock import FakeClock
from tests.nodes.node import Description, node_of
from tests.web.server import running

MIB = 1 << 20
UUIDS = [f"GPU-0000000{n}-1111-2222-3333-444444444444" for n in range(6)]
DUTIES = (0.2, 0.5, 0.94)
TOTAL = 81559 * MIB


def description(number: int, names: NameSet) -> Description:
    """Two GPUs: a pod works on the first, nobody has the second."""
    uuids = UUIDS[2 * number : 2 * number + 2]
    pod = {"namespace": "research", "name": f"train-{number}", "containers": {"main": {"nvidia.com/gpu": uuids[:1]}}}
    return Description(
        about="one of a fleet",
        gpus="2xH100",
        arguments=["-k", "--allocation", "kubelet", "--container-usage=false", "--dcgm-names", names],
        hostname=f"node-{number}",
        uuids=uuids,
        loads=[{"gpu": 0, "pid": 100, "duty": DUTIES[number], "memory": (number + 1) << 30}],
        pods=[pod],
    )


def view_of(names: Sequence[NameSet], settings: ViewSettings) -> ClusterView:
    """Real exporters on sockets, scraped once."""
    with ExitStack() as stack:
        urls, clock = [], FakeClock()
        for number, one in enumerate(names):
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="pg", dir="/tmp")))
            node = stack.enter_context(node_of(description(number, one), folder))
            node.take_turns()
            clock = node.clock
            urls.append(f"{stack.enter_context(running(node.agent)).address.url}/metrics")
        return asyncio.run(_scraped(urls, settings, clock))


async def _scraped(urls: Sequence[str], settings: ViewSettings, clock: FakeClock) -> ClusterView:
    credentials = Access(prefix="exporter", server="the exporter")
    backend = ScrapeBackend(
        FixedTargets(urls), credentials, ScrapeSettings(used_field=settings.used_field), clock=clock
    )
    try:
        await backend.turn()
        reading = backend.reading()
    finally:
        await backend.close()
    return assemble(reading, Memory(), settings, clock.monotonic(), clock.wall())


def own_page(names: NameSet) -> dict[str, Any]:
    """What a node's own web page shows."""
    with TemporaryDirectory(prefix="pg", dir="/tmp") as folder, node_of(description(1, names), Path(folder)) as node:
        node.take_turns()
        with running(node.agent) as client:
            told: dict[str, Any] = json.loads(client.ask("/api/v1/view").text)
            return told


@pytest.mark.parametrize("names", ["4.9", "both"])
def test_a_nodes_own_page_does_not_go_by_its_names(names: NameSet) -> None:
    old = own_page("4.8")
    assert own_page(names) == old
    assert old["nodes"][0]["gpus"][0]["utilization_ratio"] == DUTIES[1]


MIXED: list[list[NameSet]] = [["4.8", "4.9", "both"], ["both", "4.8", "4.9"], ["4.9", "4.9", "4.9"]]


@pytest.mark.parametrize("names", MIXED, ids="-".join)
def test_each_gpu_once_and_each_figure_right(names: list[NameSet]) -> None:
    view = view_of(names, ViewSettings(used_field="DCGM_FI_DEV_GPU_UTIL"))
    assert [node.name for node in view.nodes] == ["node-0", "node-1", "node-2"]
    for number, node in enumerate(view.nodes):
        first, second = node.devices
        assert [d.uuid for d in node.devices] == UUIDS[2 * number : 2 * number + 2]
        assert (first.utilization, second.utilization) == (DUTIES[number], 0.0)
        assert (first.memory_used, first.memory_total) == ((number + 1) << 30, TOTAL)
        assert first.power_watts is not None
        assert first.temperature is not None
        assert second.power_watts is not None
        assert 60 < second.power_watts < first.power_watts < 700
        assert 20 < first.temperature < 90
        assert [of.holder.pod for of in first.holders] == [f"train-{number}"]
        assert second.holders == ()
    text = {family.name: family.samples for family in cluster_families(view)}
    assert text["avg_GPU_utilization"][0].value == pytest.approx(100 * sum(DUTIES) / 3)
    assert sum(sample.value for sample in text["podgpu_node_gpus"]) == 6


@pytest.mark.parametrize("names", MIXED, ids="-".join)
@pytest.mark.parametrize("field", ["DCGM_FI_DEV_MEM_COPY_UTIL", "DCGM_FI_DEV_MEMORY_UTIL_RATIO"])
def test_the_view_does_not_go_by_the_names(names: list[NameSet], field: str) -> None:
    """Not by those of the exporters, and not by the one the used field is asked for by."""
    old, mixed = view_of(["4.8"] * 3, ViewSettings()), view_of(names, ViewSettings(used_field=field))
    assert [list(node.devices) for node in mixed.nodes] == [list(node.devices) for node in old.nodes]
    assert mixed.used == old.used
    assert mixed.counts == old.counts
    assert mixed.rolling == old.rolling
