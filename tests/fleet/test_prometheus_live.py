"""Real servers that scrape exporters. Results are compared with a direct read of the same metrics
text.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from podgpu.fleet.read.prometheus import PrometheusCollector, PrometheusServer
from podgpu.fleet.readings import ClusterReading, NodeReading
from podgpu.fleet.settings import ViewSettings
from podgpu.fleet.state import ClusterState, build_cluster_state
from podgpu.metrics.adapter import node_from_samples, samples_in
from podgpu.model import DeviceTotals, Holder, NodeState
from tests.fleet.real_servers import expositions_at, needs, prometheus, victoria_metrics
from tests.nodes.clock import wait_until
from tests.nodes.node import FIXTURES
from tests.two_names import renamed

NODES = FIXTURES.parent / "nodes"
SETTINGS = ViewSettings(interval=1.0, window=5.0)
USED = "DCGM_FI_DEV_MEM_COPY_UTIL"


@dataclass(frozen=True)
class Exporter:
    exposition: str
    honor_labels: bool = True
    copies: Sequence[Mapping[str, str]] = ({},)
    """Target labels of each scrape job."""


OWN_POD = {"namespace": "monitoring", "pod": "exporter", "container": "exporter"}
H200 = (FIXTURES / "h200" / "dcp_pod.prom").read_text()
EXPORTERS = {
    # Scraped as with the GPU operator: the workload's pod becomes exported_pod.
    "dcgm": Exporter(H200, honor_labels=False, copies=[OWN_POD]),
    # The same without a pod on the GPU. The label `pod` is the exporter's.
    "dcgm-free": Exporter(
        (FIXTURES / "h200" / "default.prom").read_text(), honor_labels=False, copies=[OWN_POD]
    ),
    # Scraped by an HA pair.
    "podgpu": Exporter(
        (NODES / "usage-time-sliced" / "expected.prom").read_text(),
        copies=[OWN_POD | {"prometheus_replica": "0"}, OWN_POD | {"prometheus_replica": "1"}],
    ),
    "podgpu-mig": Exporter((NODES / "usage-mig" / "expected.prom").read_text(), copies=[OWN_POD]),
    "old-names": Exporter((FIXTURES / "h200" / "old.prom").read_text(), copies=[OWN_POD]),
    # Names and labels of dcgm-exporter 4.9, and a podgpu that has both generations.
    "new-names": Exporter(renamed(H200, "4.9"), honor_labels=False, copies=[OWN_POD]),
    "both-names": Exporter(renamed(H200, "both"), copies=[OWN_POD]),
    "both-mig": Exporter(
        renamed((NODES / "mig" / "expected.prom").read_text(), "both"), copies=[OWN_POD]
    ),
    # One node has a lost GPU, a hung one and one with an XID. Another node has no driver.
    "broken": Exporter((NODES / "faulty" / "expected.prom").read_text(), copies=[OWN_POD]),
    "no-driver": Exporter(
        'podgpu_exporter_build_info{version="1",python_version="3"} 1\n'
        'podgpu_device_count{state="lost",Hostname="vm"} 2\n'
        'podgpu_exporter_source_up{source="nvml"} 0\n'
        + "".join(
            f'podgpu_device_condition_since_timestamp_seconds{{gpu="{n}",UUID="GPU-{n}",modelName="H100",Hostname="vm",'
            f'condition="{condition}",detail="{detail}"}} 1700000000.25\n'
            for n, condition, detail in ((0, "driver_away", "driver_not_loaded"), (1, "lost", ""))
        )
        + 'podgpu_device_last_holder_info{gpu="1",UUID="GPU-1",modelName="H100",namespace="ns",pod="p"} 1\n',
        honor_labels=False,
        copies=[OWN_POD],
    ),
}
SERVERS = {
    "prometheus": pytest.param(prometheus, marks=needs("prometheus")),
    "victoria-metrics": pytest.param(victoria_metrics, marks=needs("victoria-metrics")),
}
Serving = Callable[..., AbstractContextManager[str]]


@cache
def exposition_of(name: str) -> str:
    """Returns the exporter's text with its own node name and UUIDs."""
    exposition = EXPORTERS[name].exposition
    for host in ("vm", "node-1"):
        exposition = exposition.replace(f'ostname="{host}"', f'ostname="{name}"')
    return exposition.replace('UUID="GPU-', f'UUID="GPU-{name}-').replace(
        'uuid="GPU-', f'uuid="GPU-{name}-'
    )


@contextmanager
def exporters() -> Iterator[tuple[str, set[str]]]:
    """Yields HOST:PORT that serves every exporter at /NAME, and the names of the exporters that
    fail.
    """
    away: set[str] = set()

    with expositions_at(exposition_of, away) as address:
        yield address, away


def configuration(address: str) -> str:
    jobs = [
        {
            "job_name": name,
            "metrics_path": f"/{name}",
            "honor_labels": exporter.honor_labels,
            "static_configs": [
                {"targets": [address], "labels": dict(labels)} for labels in exporter.copies
            ],
        }
        for name, exporter in EXPORTERS.items()
    ]
    return json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs})


class Live:
    def __init__(self, url: str, failing: set[str]) -> None:
        self.failing = failing
        self._collector = PrometheusCollector(PrometheusServer(url), SETTINGS)
        self._runner = asyncio.Runner()
        self._state: ClusterState | None = None

    def run_round(self) -> ClusterReading:
        """Returns the nodes of the cluster's state, including nodes that are no longer scraped."""
        reading = self._runner.run(self._collector.run_round())
        self._state = build_cluster_state(
            reading, self._state, SETTINGS, time.monotonic(), time.time()
        )
        nodes = tuple(replace(node.reading, state=node.state) for node in self._state.nodes)
        return dataclasses.replace(reading, nodes=nodes)

    def close(self) -> None:
        self._runner.run(self._collector.close())
        self._runner.close()

    def run_until(self, holds: Callable[[ClusterReading], bool], what: str) -> ClusterReading:
        readings: list[ClusterReading] = []

        def check() -> bool:
            readings[:] = [self.run_round()]
            return holds(readings[0])

        wait_until(check, what)
        return readings[0]


@pytest.fixture(scope="module", params=SERVERS.values())
def live(request: pytest.FixtureRequest) -> Iterator[Live]:
    serving: Serving = request.param
    with (
        tempfile.TemporaryDirectory(prefix="pg") as folder,
        exporters() as (address, failing),
        serving(Path(folder), configuration=configuration(address)) as url,
    ):
        live = Live(url, failing)
        yield live
        live.close()


def read_directly(name: str) -> NodeState:
    (state,) = node_from_samples(
        samples_in(exposition_of(name)), "nowhere", keep_fields=frozenset({USED})
    )
    return state


def comparable(state: NodeState) -> object:
    """Removes fields that Prometheus does not provide, and sorts the rest."""
    reduced = replace(
        state,
        taken_at=state.taken_at
        if state.producer == "podgpu" and state.devices and state.version != "1"
        else None,
        gpus_expected=None,
        gpus_visible=None,
        sources=tuple(sorted(state.sources, key=lambda source: source.name)),
        namespaces=(),
        devices=tuple(
            replace(
                device,
                pci_bus_id="",
                holders=in_order(device.holders),
                usage=comparable_usage(device.usage),
                last_xid=None,
                instances=tuple(
                    replace(
                        part, holders=in_order(part.holders), usage=comparable_usage(part.usage)
                    )
                    for part in sorted(device.instances, key=lambda part: part.id)
                ),
            )
            for device in state.devices
        ),
    )
    return to_builtins(reduced)


def comparable_usage(usage: DeviceTotals | None) -> DeviceTotals | None:
    reduced = usage and DeviceTotals(
        memory_used_bytes=usage.memory_used_bytes, energy_mj=usage.energy_mj
    )
    return None if reduced == DeviceTotals() else reduced


def in_order(holders: Sequence[Holder]) -> tuple[Holder, ...]:
    return tuple(sorted(map(comparable_holder, holders), key=lambda holder: holder.key))


def comparable_holder(holder: Holder) -> Holder:
    usage = holder.usage and replace(
        holder.usage,
        allocated_ns=None,
        busy_min_ns=None,
        busy_max_ns=None,
        wasted_idle_ns=None,
    )
    return replace(holder, labels={}, usage=usage)


def test_the_same_documents_as_from_text(live: Live) -> None:
    expected = {name: comparable(read_directly(name)) for name in EXPORTERS}

    def is_complete(reading: ClusterReading) -> bool:
        return {n.state.node: comparable(n.state) for n in reading.nodes} == expected

    with contextlib.suppress(AssertionError):  # the comparison below reports the difference
        live.run_until(is_complete, "all documents are complete")
    reading = live.run_round()
    for node in reading.nodes:
        assert comparable(node.state) == expected[node.state.node]
        assert node.named
    assert {node.state.node for node in reading.nodes} == set(EXPORTERS)
    assert [outcome.error for outcome in reading.outcomes] == [""]


@pytest.mark.fault(
    "Prometheus can no longer scrape an exporter",
    (
        "Its node stays as it was last known, and becomes stale after --stale-after; other nodes "
        "are "
        "not affected"
    ),
)
def test_a_node_that_is_no_longer_scraped(live: Live) -> None:
    """Prometheus ends its series immediately. VictoriaMetrics 1.79 returns the last samples, which
    become stale.
    """
    live.run_until(
        lambda reading: {n.state.node for n in reading.nodes} == set(EXPORTERS),
        "all nodes are known",
    )
    live.failing.add("dcgm")
    try:
        reading = live.run_until(
            lambda reading: [name for name in EXPORTERS if age(reading, name) > 4] == ["dcgm"],
            "only dcgm is old",
        )
    finally:
        live.failing.clear()
    # The series may end between two queries of a round. Values may then be missing, but no GPU.
    known = [device.uuid for device in read_directly("dcgm").devices]
    assert [device.uuid for device in node_of(reading, "dcgm").state.devices] == known


def age(reading: ClusterReading, name: str) -> float:
    return time.monotonic() - node_of(reading, name).read_at


def node_of(reading: ClusterReading, name: str) -> NodeReading:
    return next(node for node in reading.nodes if node.state.node == name)
