"""`podgpu demo`: runs exporters with simulated GPUs, and the cluster view."""

from __future__ import annotations

import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import click
from aiohttp import web

from podgpu.agent.loop import Agent, Settings
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
from podgpu.history.recorder import HistoryRecorder
from podgpu.holders.identity import IdentityReader
from podgpu.holders.kubelet import KubeletAllocation
from podgpu.holders.reader import HolderSources
from podgpu.metrics.counters import shipped_counters
from podgpu.metrics.labels import Policy
from podgpu.model import WorkloadOwner
from podgpu.simulate.demo import CYCLE_SECONDS, Act, Play, StageNode, acts, find_pod_owner
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


@make_command(
    "demo",
    options_of("demo"),
    ("podgpu demo", "open http://localhost:9401/ in a browser"),
    ("podgpu demo --calm", "the same without faults"),
    ("podgpu top --cluster localhost:9401", "in a second terminal: the demo as a table"),
)
def command(address: Address, cluster_address: Address, gpus: str, calm: bool, prices: str) -> None:
    """Run three exporters on SIMULATED GPUs with simulated kubelets, and the cluster view.

    Needs no GPU and no cluster. Unless --calm is given, a job ends, a GPU reports an XID, another falls off the bus
    and a node goes down within a minute; all of it recovers after two.
    """
    configure_logging("text", debug=False)
    addresses = [address, *(Address(_LOOPBACK, 0) for _ in OTHER_GPUS)]
    run_demo([gpus, *OTHER_GPUS], addresses, cluster_address, calm, read_prices(prices))
    click.echo("demo ended")


def run_demo(
    gpus: Sequence[str], addresses: Sequence[Address], cluster_address: Address, calm: bool, prices: ReadPrices
) -> None:
    """Runs until SIGINT or SIGTERM. Raises UsageError and StartError."""
    with ExitStack() as stack:
        nodes = []
        for number, spec in enumerate(gpus):
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="podgpu-demo-")))
            node = StageNode(f"node-{number + 1}", spec, root, first=number * _PODS_PER_NODE, seed=number)
            nodes.append(stack.enter_context(node))
            click.echo(f"SIMULATED {node.name}: {spec}, {len(node.kubelet.pods)} pods")
        exporters = [make_exporter(node, prices) for node in nodes]
        # In parallel, because each waits a second between its first two readings.
        with ThreadPoolExecutor(len(exporters)) as pool:
            list(pool.map(lambda exporter: exporter.agent.warm_up(), exporters))
        targets: list[str] = []
        cluster = Cluster(
            lambda: ScrapeCollector(FixedTargets(targets), CLUSTER, owners=lambda: find_owners(nodes)),
            CLUSTER,
            prices,
        )
        recorder = cluster_recorder(cluster)
        listeners = [
            *(Listener(exporter.application(), where) for exporter, where in zip(exporters, addresses, strict=True)),
            Listener(
                cluster_application(cluster, history=recorder, usage=cluster_usage(cluster, recorder)),
                cluster_address,
                CLUSTER_OPTION,
            ),
        ]
        script = [] if calm else acts(nodes)
        director = Director(Play(script), lambda act: click.echo(f"demo: {act.message}"))
        parts = [part for each in exporters for part in (each.agent, each.recorder)]
        services: list[Service] = [*parts, cluster, recorder, director]

        def on_listening(bound: Sequence[Address]) -> None:
            targets.extend(f"http://{_LOOPBACK}:{where.port}/metrics" for where in bound[:-1])
            _print_overview(bound, script)

        run(services, listeners, on_listening)


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


class Director:
    """Runs the scheduled events of the demo."""

    fatal: StartError | None = None

    def __init__(
        self, play: Play, on_act: Callable[[Act], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._play = play
        self._on_act = on_act
        self._clock = clock
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, on_fatal: Callable[[], object]) -> None:
        del on_fatal
        self._thread = threading.Thread(target=self._direct, name="director", daemon=True)
        self._thread.start()

    def _direct(self) -> None:
        began = self._clock()
        while not math.isinf(self._play.next_at):
            if self._stopping.wait(max(0.0, began + self._play.next_at - self._clock())):
                return
            for act in self._play.run_due(self._clock() - began):
                self._on_act(act)

    def reload(self) -> None: ...

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
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


def make_exporter(node: StageNode, prices: ReadPrices, clock: Clock | None = None) -> DemoExporter:
    clock = clock or Clock()
    names = IdentityReader(str(node.root / "pods"), str(node.root / "containers"))
    count = node.gpus
    agent = Agent(
        NvmlTelemetry(node.driver, "simulated", lambda: count, clock=clock.monotonic, wall=clock.wall),
        HolderSources([KubeletAllocation(node.kubelet.socket)], names.read),
        Settings(
            interval=1.0,
            allocation_interval=1.0,
            policy=Policy(counters=shipped_counters("dcp") or (), hostname=node.name),
        ),
        clock,
        containers=ContainerFinder(str(node.root / "proc")),
    )
    return DemoExporter(node, agent, node_recorder(agent, prices=prices), prices)


def find_owners(nodes: Sequence[StageNode]) -> dict[tuple[str, str], WorkloadOwner]:
    """Returns the simulated owners of pods. In a cluster, they are read from the API server."""
    pods = {(tenant.namespace, tenant.pod) for node in nodes for tenant in node.tenants}
    return {
        (namespace, pod): WorkloadOwner(*owner) for namespace, pod in pods if (owner := find_pod_owner(pod)) is not None
    }
