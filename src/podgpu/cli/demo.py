"""`podgpu demo`: runs exporters with simulated GPUs, and the cluster view.

In each cycle a job ends, GPUs and an exporter fail, and everything recovers.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import click
from aiohttp import web

from podgpu.agent.loop import Agent, Settings
from podgpu.cli.demo_past import make_past
from podgpu.cli.options import make_command, options_of
from podgpu.cli.terminal import configure_logging
from podgpu.clock import Clock
from podgpu.cluster.collect import ViewSettings
from podgpu.cluster.loop import Cluster
from podgpu.cluster.prices import ReadPrices, read_prices
from podgpu.cluster.record import cluster_recorder, cluster_usage
from podgpu.cluster.scrape import FixedTargets, ScrapeCollector
from podgpu.errors import StartError
from podgpu.gpu.nvml import NvmlTelemetry
from podgpu.gpu.nvml.switch_splitter import SwitchLogFactory
from podgpu.history.recorder import HistoryRecorder
from podgpu.holders.identity import IdentityReader
from podgpu.holders.kubelet import KubeletAllocation
from podgpu.holders.reader import HolderSources
from podgpu.metrics.counters import shipped_counters
from podgpu.metrics.labels import Policy
from podgpu.model import WorkloadOwner
from podgpu.simulate.driver import TurnLog
from podgpu.simulate.node import StageNode, Tenant
from podgpu.usage.containers import ContainerFinder
from podgpu.web.app import Listener, Service, run
from podgpu.web.cluster_app import cluster_application
from podgpu.web.exporter_app import PageSources, application
from podgpu.web.node_page import node_recorder, node_usage
from podgpu.web.sockets import Address

CLUSTER_OPTION = "--cluster-address"
OTHER_GPUS = ("6xH100,2xH100/1x3g.40gb+1x2g.20gb+1x1g.10gb", "4xH200")  # GPUs of the second and third node
CLUSTER = ViewSettings(interval=2.0, stale_after=6.0, drop_after=120.0, window=60.0, idle_after=30.0)
_PODS_PER_NODE = 8
_LOOPBACK = "127.0.0.1"
_STOP_SECONDS = 2.0
CYCLE_SECONDS = 150.0
_XID = 48  # a double-bit memory error, after which the GPU must be reset
_LOST_GPU = 3
_JOB = "llm-train"
_FIRST_JOB = 2  # number of the job that runs on the third node at the start
_OWNERS = {
    _JOB: "Job",
    "finetune": "Job",
    "diffusion": "Job",
    "chat": "Deployment",
    "embed": "Deployment",
    "ocr": "Deployment",
    "jupyter-ada": "Notebook",
    "jupyter": "StatefulSet",
}
"""Prefix of a pod's name -> kind of its owner."""
_TEAMS = {"research": "nlp", "serving": "chat", "batch": "search"}
"""Namespace -> value of the label team of its pods. Other pods belong to the team data-science."""


@make_command(
    "demo",
    options_of("demo"),
    ("podgpu demo", "open http://localhost:9401/ in a browser"),
    ("podgpu demo --calm", "the same without faults"),
    ("podgpu top --cluster localhost:9401", "in a second terminal: show the demo as a table"),
)
def command(address: Address, cluster_address: Address, gpus: str, calm: bool, prices: str) -> None:
    """Run three exporters on SIMULATED GPUs with simulated kubelets, and the cluster view.

    Needs no GPU and no cluster. Within a minute, a job ends, a GPU reports an XID error, another falls off the bus and
    a node goes down. After two minutes everything is well again. --calm turns this off.
    """
    configure_logging("text", debug=False)
    # The other nodes use the ports after the cluster view's, so that Prometheus can scrape them.
    others = [Address(address.host, address.port and address.port + 2 + number) for number in range(len(OTHER_GPUS))]
    addresses = [address, *others]
    run_demo([gpus, *OTHER_GPUS], addresses, cluster_address, calm, read_prices(prices))
    click.echo("demo ended")


def run_demo(
    gpus: Sequence[str], addresses: Sequence[Address], cluster_address: Address, calm: bool, prices: ReadPrices
) -> None:
    """Runs until SIGINT or SIGTERM."""
    with ExitStack() as stack:
        nodes = []
        for number, spec in enumerate(gpus):
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="podgpu-demo-")))
            node = StageNode(f"node-{number + 1}", spec, root, first=number * _PODS_PER_NODE)
            nodes.append(stack.enter_context(node))
            click.echo(f"SIMULATED {node.name}: {spec}, {len(node.kubelet.pods)} pods")
        exporters = [make_exporter(node, prices) for node in nodes]
        # In parallel, because each exporter waits a second between its first two readings.
        with ThreadPoolExecutor(len(exporters)) as pool:
            list(pool.map(lambda exporter: exporter.agent.warm_up(), exporters))
        targets: list[str] = []
        cluster = Cluster(
            lambda: ScrapeCollector(FixedTargets(targets), CLUSTER, owners=lambda: find_owners(nodes)),
            CLUSTER,
            prices,
        )
        recorder = cluster_recorder(cluster)
        write_past(nodes, recorder, [exporter.recorder for exporter in exporters], prices, time.time())
        listeners = [
            *(Listener(exporter.application(), where) for exporter, where in zip(exporters, addresses, strict=True)),
            Listener(
                cluster_application(cluster, history=recorder, usage=cluster_usage(cluster, recorder)),
                cluster_address,
                CLUSTER_OPTION,
            ),
        ]
        script = [] if calm else make_script(nodes)
        director = Director(script, lambda act: click.echo(f"demo: {act.message}"))
        parts = [part for each in exporters for part in (each.agent, each.recorder)]
        services: list[Service] = [*parts, cluster, recorder, director]

        def on_listening(bound: Sequence[Address]) -> None:
            targets.extend(f"http://{where.host or _LOOPBACK}:{where.port}/metrics" for where in bound[:-1])
            _print_overview(bound, script)

        run(services, listeners, on_listening)


def write_past(
    nodes: Sequence[StageNode],
    recorder: HistoryRecorder,
    of_nodes: Sequence[HistoryRecorder],
    prices: ReadPrices,
    now: float,
) -> None:
    """Writes a simulated day before `now` to the history of the cluster and of each node."""
    for round_ in make_past(nodes, owners_of, team_of, prices()[0], now):
        recorder.append(round_)
        for node, own in zip(nodes, of_nodes, strict=True):
            own.append(round_._replace(gpus=[sample for sample in round_.gpus if sample.node == node.name]))


def _print_overview(bound: Sequence[Address], script: Sequence[Act]) -> None:
    *nodes, cluster = bound
    click.echo("All values come from a simulated driver.\n")
    click.echo(f"  the cluster  {cluster.url}/          a page; {cluster.url}/metrics")
    for number, node in enumerate(nodes, start=1):
        click.echo(f"  node-{number}       {node.url}/          a page; {node.url}/metrics")
    podgpu = os.path.relpath(sys.argv[0]) if sys.argv[0].endswith("/podgpu") else "podgpu"
    click.echo(f"  a terminal   {podgpu} top --cluster {cluster.url}\n")
    if script:
        click.echo(f"Events, repeated every {CYCLE_SECONDS:.0f} s (turn them off with --calm):")
        for act in script:
            click.echo(f"  {act.at:4.0f} s  {act.message}")
    click.echo("Ctrl-C ends the demo.")


class Act(NamedTuple):
    at: float  # seconds since the start of the cycle
    message: str
    do: Callable[[], object]


def make_script(nodes: Sequence[StageNode]) -> list[Act]:
    """Returns the events of the demo's three nodes. All faults exist at the same time between 30 and 90 seconds."""
    first, lost, last = nodes
    ill = min(6, first.gpus - 1)
    job = [tenant for tenant in last.tenants if tenant.pod == f"{_JOB}-{_FIRST_JOB}"]
    numbers = itertools.count(_FIRST_JOB + 1)

    def end_job() -> None:
        last.move_out(job[0].namespace, job[0].pod)

    def begin_next_job() -> None:
        name = f"{_JOB}-{next(numbers)}"
        job[:] = [replace(tenant, pod=name) for tenant in job]
        last.move_in(*job)

    return [
        Act(10.0, f"{last.name}: a training job ends", end_job),
        Act(15.0, f"{first.name}: GPU {ill} reports XID {_XID}", lambda: first.driver.raise_xid(ill, _XID)),
        Act(20.0, f"{lost.name}: GPU {_LOST_GPU} falls off the bus", lambda: lost.driver.lose(_LOST_GPU)),
        Act(30.0, f"{last.name}: the exporter stops answering", lambda: setattr(last, "answers", False)),
        Act(90.0, f"{last.name}: the exporter answers again", lambda: setattr(last, "answers", True)),
        Act(95.0, f"{last.name}: the next training job begins", begin_next_job),
        Act(105.0, f"{lost.name}: GPU {_LOST_GPU} answers again", lambda: lost.driver.recover(_LOST_GPU)),
        Act(115.0, f"{first.name}: GPU {ill} is reset", lambda: first.reset(ill)),
    ]


def schedule(script: Sequence[Act]) -> Iterator[tuple[float, Act]]:
    """Yields each event with its time since the start, cycle after cycle."""
    for cycle in itertools.count() if script else ():
        for act in script:
            yield cycle * CYCLE_SECONDS + act.at, act


class Director:
    """Runs the scheduled events of the demo."""

    fatal: StartError | None = None

    def __init__(self, script: Sequence[Act], on_act: Callable[[Act], object]) -> None:
        self._script = script
        self._on_act = on_act
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._direct, name="director", daemon=True)

    def start(self, on_fatal: Callable[[], object]) -> None:
        self._thread.start()

    def _direct(self) -> None:
        began = time.monotonic()
        for at, act in schedule(self._script):
            if self._stopping.wait(max(0.0, began + at - time.monotonic())):
                return
            act.do()
            self._on_act(act)

    def reload(self) -> None: ...

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)


class DemoExporter(NamedTuple):
    """The exporter of one simulated node."""

    node: StageNode
    agent: Agent
    recorder: HistoryRecorder
    prices: ReadPrices

    def application(self) -> web.Application:
        """Builds the application, which closes connections while the simulated node is down."""
        usage = node_usage(self.agent, self.recorder, self.prices)
        app = application(self.agent, page=PageSources(self.recorder, self.prices, usage))

        @web.middleware
        async def close_while_down(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            if not self.node.answers and request.transport is not None:
                request.transport.abort()
            return await handler(request)

        app.middlewares.insert(0, close_while_down)
        return app


def team_of(namespace: str) -> str:
    return _TEAMS.get(namespace, "data-science")


def make_exporter(node: StageNode, prices: ReadPrices, clock: Clock | None = None) -> DemoExporter:
    clock = clock or Clock()
    names = IdentityReader(str(node.root / "pods"), str(node.root / "containers"))
    count = node.gpus
    agent = Agent(
        NvmlTelemetry(
            node.driver,
            "simulated",
            lambda: count,
            clock=clock.monotonic,
            wall=clock.wall,
            switch_logs=SwitchLogFactory("exact", lambda gpu, _: TurnLog(node.driver, gpu.uuid), lambda: True),
        ),
        HolderSources([KubeletAllocation(node.kubelet.socket)], names.read),
        Settings(
            interval=1.0,
            allocation_interval=1.0,
            policy=Policy(counters=shipped_counters("dcp") or (), hostname=node.name),
        ),
        clock,
        containers=ContainerFinder(str(node.root / "proc")),
        pod_labels=lambda: {(t.namespace, t.pod): (("team", team_of(t.namespace)),) for t in node.tenants},
    )
    return DemoExporter(node, agent, node_recorder(agent, prices=prices), prices)


def find_owners(nodes: Sequence[StageNode]) -> dict[tuple[str, str], WorkloadOwner]:
    """Returns simulated owners of pods. In a real cluster, owners are read from the API server."""
    return owners_of([tenant for node in nodes for tenant in node.tenants])


def owners_of(tenants: Sequence[Tenant]) -> dict[tuple[str, str], WorkloadOwner]:
    owners = {}
    for tenant in tenants:
        prefix = next((prefix for prefix in _OWNERS if tenant.pod.startswith(f"{prefix}-")), None)
        if prefix is not None:
            kind = _OWNERS[prefix]
            owners[tenant.namespace, tenant.pod] = WorkloadOwner(kind, tenant.pod if kind == "Job" else prefix)
    return owners
