"""Real servers that scrape real expositions; and what podgpu says of the same expositions when it reads them itself."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

from podgpu.cluster.prom.backend import PrometheusBackend, PrometheusPlace
from podgpu.cluster.reading import ClusterReading, NodeReading, Scope
from podgpu.cluster.scraping.exposition import ExpositionReader
from podgpu.cluster.settings import UsedMeans, ViewSettings
from podgpu.figures.device import DeviceFigures
from tests.cluster.instants import both_ways
from tests.cluster.real_servers import expositions_at, needs, prometheus, victoria_metrics, wait_for
from tests.nodes.node import FIXTURES
from tests.two_names import renamed

NODES = FIXTURES.parent / "nodes"
SETTINGS = ViewSettings(interval=1.0, window=5.0)
USED = "DCGM_FI_DEV_MEM_COPY_UTIL"
A_QUARTER = SETTINGS.interval / 4
"""Of the time between two scrapes: a turn is all queries, and most of them find what the last found."""


@dataclass(frozen=True)
class Exporter:
    exposition: str
    honor_labels: bool = True
    copies: Sequence[Mapping[str, str]] = ({},)
    """Labels of the target, once for each time it is scraped."""


OWN_POD = {"namespace": "monitoring", "pod": "exporter", "container": "exporter"}
H200 = (FIXTURES / "h200" / "dcp_pod.prom").read_text()
EXPORTERS = {
    # dcgm-exporter as the GPU operator has it scraped: the pods' names become exported_*.
    "dcgm": Exporter(H200, honor_labels=False, copies=[OWN_POD]),
    # The same without a pod on its GPU: all that is left is its own.
    "dcgm-free": Exporter((FIXTURES / "h200" / "default.prom").read_text(), honor_labels=False, copies=[OWN_POD]),
    # podgpu's, over an HA pair.
    "podgpu": Exporter(
        (NODES / "usage-time-sliced" / "expected.prom").read_text(),
        copies=[OWN_POD | {"prometheus_replica": "0"}, OWN_POD | {"prometheus_replica": "1"}],
    ),
    "podgpu-mig": Exporter((NODES / "usage-mig" / "expected.prom").read_text(), copies=[OWN_POD]),
    "old-names": Exporter((FIXTURES / "h200" / "old.prom").read_text(), copies=[OWN_POD]),
    # dcgm-exporter 4.9's names and labels, and a podgpu that has both generations' while dashboards move.
    "new-names": Exporter(renamed(H200, "4.9"), honor_labels=False, copies=[OWN_POD]),
    "both-names": Exporter(renamed(H200, "both"), copies=[OWN_POD]),
    "both-mig": Exporter(renamed((NODES / "mig" / "expected.prom").read_text(), "both"), copies=[OWN_POD]),
    # One GPU lost, one that hangs, one with an XID; and a node without its driver, whose last GPU was held.
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
    """Each exporter on a node and with GPUs of its own: the texts were recorded on one machine, or simulated alike."""
    exposition = EXPORTERS[name].exposition
    for host in ("vm", "node-1"):
        exposition = exposition.replace(f'ostname="{host}"', f'ostname="{name}"')
    return exposition.replace('UUID="GPU-', f'UUID="GPU-{name}-').replace('uuid="GPU-', f'uuid="GPU-{name}-')


@contextmanager
def exporters() -> Iterator[tuple[str, set[str]]]:
    """HOST:PORT that has every exposition at /NAME, and the names of those that are away."""
    away: set[str] = set()

    with expositions_at(exposition_of, away) as address:
        yield address, away


def configuration(address: str) -> str:
    jobs = [
        {
            "job_name": name,
            "metrics_path": f"/{name}",
            "honor_labels": exporter.honor_labels,
            "static_configs": [{"targets": [address], "labels": dict(labels)} for labels in exporter.copies],
        }
        for name, exporter in EXPORTERS.items()
    ]
    return json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs})


class Live:
    def __init__(self, url: str, away: set[str]) -> None:
        self.away = away
        self.url = url
        self._backend = PrometheusBackend(PrometheusPlace(url), SETTINGS)
        self._runner = asyncio.Runner()

    def turn(self) -> ClusterReading:
        self._runner.run(self._backend.turn())
        return self._backend.reading()

    def close(self) -> None:
        self._runner.run(self._backend.close())
        self._runner.close()

    def settled(self) -> ClusterReading:
        """All exporters scraped, and a window full of it."""
        return self.turn_until(
            lambda reading: (
                {node.node for node in reading.nodes} == set(EXPORTERS)
                and len(reading.rolling or {}) > 5
                and all(_age(reading, name) < 4 for name in EXPORTERS)
            ),
            "every node is there, and averages are",
        )

    def turn_until(self, holds: Callable[[ClusterReading], bool], what: str) -> ClusterReading:
        """The first reading of which it holds: in the next, an exporter that was not scraped in time may be missing."""
        readings: list[ClusterReading] = []

        def is_there() -> bool:
            readings[:] = [self.turn()]
            return holds(readings[0])

        wait_for(is_there, what, every=A_QUARTER)
        return readings[0]


def _names_at(url: str) -> set[str]:
    """As somebody sees it who looks for the first time."""
    once = Live(url, set())
    try:
        return {node.node for node in once.turn().nodes}
    finally:
        once.close()


@pytest.fixture(scope="module", params=SERVERS.values())
def live(request: pytest.FixtureRequest) -> Iterator[Live]:
    serving: Serving = request.param
    with (
        tempfile.TemporaryDirectory(prefix="pg") as folder,
        exporters() as (address, away),
        serving(Path(folder), configuration=configuration(address)) as url,
    ):
        # A server may have taken in half of a first exposition: what a backend saw then, it remembers for a while.
        wait_for(lambda: _names_at(url) == set(EXPORTERS), "every exporter was scraped", every=A_QUARTER)
        found = Live(url, away)
        yield found
        found.close()


def directly(name: str) -> NodeReading:
    return ExpositionReader(name, "nowhere", USED).read(exposition_of(name).encode(), 0.0, 0.0)


def comparable(device: DeviceFigures) -> DeviceFigures:
    return replace(device, holders=tuple(sorted(device.holders, key=lambda of: of.who)))


def in_order(node: NodeReading) -> list[DeviceFigures]:
    return sorted(map(comparable, node.devices), key=lambda device: device.key)


def test_the_same_as_reading_the_expositions(live: Live) -> None:
    """Every figure, every holder and every counter, each once."""
    reading = live.settled()
    nodes = reading.nodes
    assert [outcome.error for outcome in reading.outcomes] == [""], "every query was answered"
    assert sorted(node.node for node in nodes) == sorted(EXPORTERS)
    for node in nodes:
        expected = directly(node.node)
        assert node.named
        assert in_order(node) == in_order(expected)
        assert sorted(node.namespaces) == sorted(expected.namespaces)
        assert node.notes == expected.notes
        assert node.trouble == expected.trouble
        assert node.taken_at == expected.taken_at


def test_averages_of_expositions_that_stand_still_are_theirs(live: Live) -> None:
    """Once the window has no instant from before all exporters were scraped."""
    measured = [device.measured for name in EXPORTERS for device in directly(name).devices]
    used = [value / 100 for value in measured if value is not None and value > 0]
    expected = pytest.approx(sum(used) / len(used))
    reading = live.turn_until(
        lambda reading: (reading.rolling or {}).get(Scope("cluster")) == expected, f"the average is {expected}"
    )
    rolling = reading.rolling or {}
    assert rolling[Scope("node", node="dcgm")] == pytest.approx(0.09)
    assert rolling[Scope("node", node="new-names")] == pytest.approx(0.09), "hostname, and a ratio"
    assert rolling[Scope("node", node="both-names")] == pytest.approx(0.09)
    assert rolling[Scope("namespace", "research")] > 0
    assert Scope("namespace", "monitoring") not in rolling


@pytest.mark.parametrize("used_means", ["busy", "allocated", "processes"])
@pytest.mark.parametrize("used_field", [USED, "DCGM_FI_PROF_GR_ENGINE_ACTIVE"])
def test_an_instant_worked_out_here_is_the_servers(live: Live, used_means: UsedMeans, used_field: str) -> None:
    """Whatever names, labels and copies its texts came with. VictoriaMetrics shows what it has scraped a second later:
    between two questions about one moment there may be more of it."""
    live.settled()
    settings = replace(SETTINGS, used_means=used_means, used_field=used_field)
    # Nobody counts processes of GPUs that have these fields.
    scopes = set() if used_means == "processes" else {"cluster", "node", "model", "namespace"}

    def agree() -> bool:
        ((here, asked),) = both_ways(live.url, time.time() - 3, settings)
        return here == pytest.approx(asked) and {scope.scope for scope in here} == scopes

    wait_for(agree, "both ways lead to the same figures", every=A_QUARTER)


def test_a_node_that_is_lost_is_told_as_it_was_and_grows_old(live: Live) -> None:
    """Prometheus marks its series as ended at once; VictoriaMetrics 1.79 goes on with the last ones, which grow old."""
    before = {node.node: node for node in live.settled().nodes}
    live.away.add("dcgm")
    try:
        reading = live.turn_until(
            lambda reading: [name for name in EXPORTERS if _age(reading, name) > 4] == ["dcgm"], "it alone is old"
        )
    finally:
        live.away.clear()
    assert in_order(_node(reading, "dcgm")) == in_order(before["dcgm"])


def _age(reading: ClusterReading, name: str) -> float:
    return time.monotonic() - _node(reading, name).read_at


def _node(reading: ClusterReading, name: str) -> NodeReading:
    return next(node for node in reading.nodes if node.node == name)
