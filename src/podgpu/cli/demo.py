"""`podgpu demo` runs exporters on simulated GPUs and the cluster view over them: nothing to install, no privilege."""

from __future__ import annotations

import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import click
from aiohttp import web

from podgpu.accounting.containers import ContainerFinder
from podgpu.agent.loop import Agent, Settings
from podgpu.agent.waste_watch import WasteWatch
from podgpu.allocation.identity import IdentityReader
from podgpu.allocation.kubelet import KubeletAllocation
from podgpu.catalog.counters import shipped_counters
from podgpu.cli.help import podgpu_command
from podgpu.cli.option_table import PRICES_HELP
from podgpu.clock import Clock
from podgpu.cluster.publish import Publisher
from podgpu.cluster.scraping.backend import FixedTargets, ScrapeBackend
from podgpu.cluster.settings import ViewSettings
from podgpu.compose.histories import cluster_with_keeper, history_of, node_keeper
from podgpu.compose.process import configure_logging
from podgpu.configuration.price_file import EXAMPLE, read_prices
from podgpu.errors import StartError
from podgpu.figures.device import SIMULATED, Owner
from podgpu.figures.prices import ReadPrices
from podgpu.history.keeper import Keeper
from podgpu.join import Policy
from podgpu.serve.app import Listener, Several, run
from podgpu.serve.cluster_app import cluster_application
from podgpu.serve.exporter_app import application
from podgpu.serve.routes import BesideFigures
from podgpu.serve.sockets import Address, parse_address
from podgpu.simulate.scenario import CYCLE_SECONDS, Act, Play, acts
from podgpu.simulate.stage import StageNode, owner_of
from podgpu.telemetry.nvml import NvmlTelemetry

_SAMPLES = ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_POWER_USAGE", "podgpu_container_gpu_utilization_ratio")
OTHER_GPUS = ("6xH100,2xH100/1x3g.40gb+1x2g.20gb+1x1g.10gb", "4xH200")
_NAMES_APART = 8
CLUSTER = ViewSettings(interval=2.0, stale_after=6.0, drop_after=120.0, window=60.0, idle_after=30.0)
_LOOPBACK = "127.0.0.1"
_STOP_SECONDS = 2.0


@podgpu_command(
    "demo",
    ("podgpu demo", "open http://localhost:9401/ in a browser"),
    ("podgpu demo --calm", "the same, and nothing breaks: for screenshots"),
    ("podgpu top --cluster localhost:9401", "in a second terminal: the demo as a table"),
)
@click.option("-a", "--address", default=":9400", show_default=True, help="Address of the first node's exporter.")
@click.option("--cluster-address", default=":9401", show_default=True, help="Address of the cluster view.")
@click.option(
    "--gpus", default="8xH100", show_default=True, help="GPUs of the first node, such as 2xA100,1xH100/7x1g.10gb."
)
@click.option(
    "--calm", is_flag=True, help="Nothing breaks and no pod comes or goes; without it GPUs, jobs and a node do."
)
@click.option("--prices", default=EXAMPLE, show_default=True, help=PRICES_HELP)
def command(address: str, cluster_address: str, gpus: str, calm: bool, prices: str) -> None:
    """Run three exporters on SIMULATED GPUs with simulated kubelets, and the cluster view over them.

    Needs no GPU and no cluster. Loads vary, a notebook idles; and unless --calm is given, a job ends, a GPU has an XID,
    another falls off the bus and a node dies, within a minute, and all of it is well again after two.
    """
    configure_logging("text", debug=False)
    addresses = [parse_address(address), Address(_LOOPBACK, 0), Address(_LOOPBACK, 0)]
    listen = parse_address(cluster_address, "--cluster-address")
    read = read_prices(prices)
    with ExitStack() as at_the_end:
        nodes = [
            at_the_end.enter_context(_node(number, spec)) for number, spec in enumerate((gpus, *OTHER_GPUS), start=1)
        ]
        exporters = [exporter_on(node, read) for node in nodes]
        with ThreadPoolExecutor(len(exporters)) as pool:  # each waits a second between its first two readings
            list(pool.map(lambda exporter: exporter.agent.warm_up(), exporters))
        several = Several(
            [member for exporter in exporters for member in (exporter.agent, exporter.keeper, exporter.waste)]
        )
        targets: list[str] = []
        cluster, keeper = cluster_with_keeper(
            lambda: ScrapeBackend(FixedTargets(targets), owners=lambda: owners_of(nodes)), Publisher(CLUSTER, read)
        )
        listeners = [
            *(Listener(exporter.application(), where) for exporter, where in zip(exporters, addresses, strict=True)),
            Listener(cluster_application(cluster, history=history_of(keeper)), listen, "--cluster-address"),
        ]
        script = [] if calm else acts(nodes)

        def listening(bound: Sequence[Address]) -> None:
            targets.extend(f"http://{_LOOPBACK}:{where.port}/metrics" for where in bound[:-1])
            for member in (cluster, keeper, Director(Play(script))):
                several.add(member)
            _announce(bound, exporters[0].agent, script)

        run(several, listeners, listening)
    click.echo("demo ended")


class Director:
    """Has the play's acts carried out when their time has come, and says so."""

    fatal: StartError | None = None

    def __init__(self, play: Play, clock: Callable[[], float] = time.monotonic) -> None:
        self._play = play
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
            for act in self._play.go_on(self._clock() - began):
                click.echo(f"demo: {act.says}")

    def reload(self) -> None:
        """It goes on as written."""

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)


@contextmanager
def _node(number: int, gpus: str) -> Iterator[StageNode]:
    name, first = f"node-{number}", (number - 1) * _NAMES_APART
    with (
        tempfile.TemporaryDirectory(prefix=f"podgpu-demo-{number}-") as directory,
        StageNode(name, gpus, Path(directory), first=first, seed=number - 1) as node,
    ):
        count, socket = len(node.kubelet.pods), node.kubelet.socket
        click.echo(f"SIMULATED {name}: {gpus}, {count} pods by a real gRPC server on {socket}")
        yield node


class Exporter(NamedTuple):
    """One node's exporter, and what runs beside it."""

    node: StageNode
    agent: Agent
    keeper: Keeper
    waste: WasteWatch
    prices: ReadPrices

    def application(self) -> web.Application:
        """Whoever asks it while its node is dead finds the connection broken."""
        app = application(self.agent, shown=BesideFigures(history_of(self.keeper), self.prices, self.waste.wasted))

        @web.middleware
        async def unless_dead(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            if not self.node.answers and request.transport is not None:
                request.transport.abort()
            return await handler(request)

        app.middlewares.insert(0, unless_dead)
        return app


def exporter_on(node: StageNode, prices: ReadPrices, clock: Clock | None = None) -> Exporter:
    agent = _agent(node, clock)
    return Exporter(node, agent, node_keeper(agent), WasteWatch(agent, prices), prices)


def _agent(node: StageNode, clock: Clock | None) -> Agent:
    count, host = node.gpus, node.root
    clock = clock or Clock()
    policy = Policy(counters=shipped_counters("dcp") or (), hostname=node.name)
    names = IdentityReader(str(host / "pods"), str(host / "containers"))
    return Agent(
        NvmlTelemetry(node.driver, SIMULATED, lambda: count, clock=clock.monotonic, wall=clock.wall),
        [KubeletAllocation(node.kubelet.socket)],
        Settings(interval=1.0, allocation_interval=1.0, policy=policy),
        clock,
        identities=names.read,
        containers=ContainerFinder(str(host / "proc")),
    )


def owners_of(nodes: Sequence[StageNode]) -> dict[tuple[str, str], Owner]:
    """As the API server would tell."""
    named = {(tenant.namespace, tenant.pod) for node in nodes for tenant in node.tenants}
    return {(namespace, pod): Owner(*owner) for namespace, pod in named if (owner := owner_of(pod)) is not None}


def _command() -> str:
    """As it can be typed from where this was started: `make demo` has it in .venv/bin."""
    path = Path(sys.argv[0])
    return os.path.relpath(path) if path.name == "podgpu" and path.exists() else "python -m podgpu"


def _announce(bound: Sequence[Address], agent: Agent, script: Sequence[Act]) -> None:
    click.echo("Every figure is made up by podgpu's simulated driver.\n")
    click.echo(f"  the cluster  {bound[-1].url}/          a page; {bound[-1].url}/metrics")
    click.echo(f"  node-1       {bound[0].url}/          a page; {bound[0].url}/metrics, /health, /ready")
    for number, address in enumerate(bound[1:-1], start=2):
        click.echo(f"  node-{number}       {address.url}/          a page")
    click.echo(f"  a terminal   {_command()} top --cluster {bound[-1].url}\n")
    lines = agent.published.fresh.plain.decode().splitlines()
    for name in _SAMPLES:
        family = [line for line in lines if line.startswith(name)]
        for line in family[:2]:
            click.echo(line)
    if script:
        click.echo(f"What happens, again every {CYCLE_SECONDS:.0f} s (podgpu demo --calm: nothing does):")
        for act in script:
            click.echo(f"  {act.at:4.0f} s  {act.says}")
    click.echo(f"... {len([line for line in lines if not line.startswith('#')])} series in all. Ctrl-C ends the demo.")
