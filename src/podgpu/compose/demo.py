"""This module assembles `podgpu demo` and has it played: exporters on simulated nodes, the cluster view over them, and
the director, by whom things happen there."""

from __future__ import annotations

import math
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from aiohttp import web

from podgpu.agent.loop import Agent, Settings
from podgpu.clock import Clock
from podgpu.cluster.loop import Cluster
from podgpu.cluster.prices import ReadPrices
from podgpu.cluster.scrape import FixedTargets, ScrapeCollector
from podgpu.cluster.settings import ViewSettings
from podgpu.compose.agent import assemble_agent
from podgpu.compose.allocations import Holders
from podgpu.compose.histories import cluster_recorder, node_recorder
from podgpu.errors import StartError
from podgpu.figures.device import SIMULATED
from podgpu.gpu.nvml import NvmlTelemetry
from podgpu.history.recorder import HistoryRecorder
from podgpu.holders.identity import IdentityReader
from podgpu.holders.kubelet import KubeletAllocation
from podgpu.metrics.counters import shipped_counters
from podgpu.metrics.render import Policy
from podgpu.model import WorkloadOwner
from podgpu.simulate.demo import Act, Play, StageNode, acts, owner_of
from podgpu.usage.containers import ContainerFinder
from podgpu.web.app import Listener, Several, run
from podgpu.web.cluster_app import cluster_application
from podgpu.web.exporter_app import PageSources, application
from podgpu.web.node_page import NodeWaste
from podgpu.web.sockets import Address

OTHER_GPUS = ("6xH100,2xH100/1x3g.40gb+1x2g.20gb+1x1g.10gb", "4xH200")
"""Of the nodes after the first."""
CLUSTER_OPTION = "--cluster-address"
CLUSTER = ViewSettings(interval=2.0, stale_after=6.0, drop_after=120.0, window=60.0, idle_after=30.0)
_NAMES_APART = 8
_LOOPBACK = "127.0.0.1"
_STOP_SECONDS = 2.0


class DemoSettings(NamedTuple):
    gpus: str
    """Of the first node."""
    address: Address
    """Of the first node's exporter; the others take any port of the loopback."""
    cluster_address: Address
    calm: bool
    prices: ReadPrices


class Audience(Protocol):
    """Whoever is told how the demo goes."""

    def staged(self, node: StageNode, gpus: str) -> None: ...
    def begun(self, bound: Sequence[Address], first: Agent, script: Sequence[Act]) -> None:
        """All of them listen, the cluster last; `first`: the agent of the first node."""

    def happened(self, act: Act) -> None: ...


def run_demo(settings: DemoSettings, audience: Audience) -> None:
    """Until SIGINT or SIGTERM. Raises UsageError and StartError."""
    addresses = [settings.address, *(Address(_LOOPBACK, 0) for _ in OTHER_GPUS)]
    with ExitStack() as at_the_end:
        nodes = []
        for number, spec in enumerate((settings.gpus, *OTHER_GPUS), start=1):
            nodes.append(at_the_end.enter_context(_node(number, spec)))
            audience.staged(nodes[-1], spec)
        exporters = [exporter_on(node, settings.prices) for node in nodes]
        with ThreadPoolExecutor(len(exporters)) as pool:  # each waits a second between its first two readings
            list(pool.map(lambda exporter: exporter.agent.warm_up(), exporters))
        several = Several(
            [member for exporter in exporters for member in (exporter.agent, exporter.recorder, exporter.waste)]
        )
        targets: list[str] = []
        cluster = Cluster(
            lambda: ScrapeCollector(
                FixedTargets(targets), keep_fields=CLUSTER.keep_fields, owners=lambda: owners_of(nodes)
            ),
            CLUSTER,
            settings.prices,
        )
        recorder = cluster_recorder(cluster)
        listeners = [
            *(Listener(exporter.application(), where) for exporter, where in zip(exporters, addresses, strict=True)),
            Listener(cluster_application(cluster, history=recorder), settings.cluster_address, CLUSTER_OPTION),
        ]
        script = [] if settings.calm else acts(nodes)

        def listening(bound: Sequence[Address]) -> None:
            targets.extend(f"http://{_LOOPBACK}:{where.port}/metrics" for where in bound[:-1])
            for member in (cluster, recorder, Director(Play(script), audience.happened)):
                several.add(member)
            audience.begun(bound, exporters[0].agent, script)

        run(several, listeners, listening)


class Director:
    """Has the play's acts carried out when their time has come, and says so (a `web.app.Service`)."""

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
            for act in self._play.go_on(self._clock() - began):
                self._on_act(act)

    def reload(self) -> None:
        """It goes on as written."""

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)


# One node


@contextmanager
def _node(number: int, gpus: str) -> Iterator[StageNode]:
    name, first = f"node-{number}", (number - 1) * _NAMES_APART
    with (
        tempfile.TemporaryDirectory(prefix=f"podgpu-demo-{number}-") as directory,
        StageNode(name, gpus, Path(directory), first=first, seed=number - 1) as node,
    ):
        yield node


class Exporter(NamedTuple):
    """One node's exporter, and what runs beside it."""

    node: StageNode
    agent: Agent
    recorder: HistoryRecorder
    waste: NodeWaste
    prices: ReadPrices

    def application(self) -> web.Application:
        """Whoever asks it while its node is dead finds the connection broken."""
        app = application(self.agent, page=PageSources(self.recorder, self.prices, self.waste.statement))

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
    agent = _agent(node, clock or Clock())
    return Exporter(node, agent, node_recorder(agent, prices=prices), NodeWaste(agent, prices), prices)


def _agent(node: StageNode, clock: Clock) -> Agent:
    count, host = node.gpus, node.root
    names = IdentityReader(str(host / "pods"), str(host / "containers"))
    return assemble_agent(
        NvmlTelemetry(node.driver, SIMULATED, lambda: count, clock=clock.monotonic, wall=clock.wall),
        Holders([KubeletAllocation(node.kubelet.socket)], names.read),
        Settings(
            interval=1.0,
            allocation_interval=1.0,
            policy=Policy(counters=shipped_counters("dcp") or (), hostname=node.name),
        ),
        ContainerFinder(str(host / "proc")),
        clock,
    )


def owners_of(nodes: Sequence[StageNode]) -> dict[tuple[str, str], WorkloadOwner]:
    """As the API server would tell."""
    named = {(tenant.namespace, tenant.pod) for node in nodes for tenant in node.tenants}
    return {(namespace, pod): WorkloadOwner(*owner) for namespace, pod in named if (owner := owner_of(pod)) is not None}
