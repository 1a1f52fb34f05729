"""`podgpu demo`: exporters on simulated GPUs and the cluster view over them, with nothing to install, no privilege."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click

from podgpu.accounting.containers import ContainerFinder
from podgpu.agent.loop import Agent, Settings
from podgpu.allocation.identity import IdentityReader
from podgpu.allocation.kubelet import KubeletAllocation
from podgpu.catalog.counters import shipped_counters
from podgpu.cli.help import podgpu_command
from podgpu.cluster.loop import Cluster
from podgpu.cluster.publish import Publisher
from podgpu.cluster.scraping.backend import FixedTargets, ScrapeBackend
from podgpu.cluster.settings import ViewSettings
from podgpu.compose.process import configure_logging
from podgpu.errors import StartError
from podgpu.join import Policy
from podgpu.serve.app import Listener, Served, application, run
from podgpu.serve.cluster_app import cluster_application
from podgpu.serve.sockets import Address, parse_address
from podgpu.simulate.driver import SimulatedNvml
from podgpu.simulate.kubelet import SimulatedKubelet
from podgpu.simulate.node import furnish, place_loads, pods, tenants
from podgpu.telemetry.nvml import NvmlTelemetry

_SAMPLES = ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_POWER_USAGE", "podgpu_container_gpu_utilization_ratio")
_OTHER_GPUS = ("6xH100,2xH100/1x3g.40gb+1x2g.20gb+1x1g.10gb", "4xH200")
_NAMES_APART = 8
_CLUSTER = ViewSettings(interval=2.0, stale_after=6.0, drop_after=30.0, window=60.0, idle_after=30.0, simulated=True)
_LOOPBACK = "127.0.0.1"


@podgpu_command(
    "demo",
    ("podgpu demo", "open http://localhost:9401/ in a browser"),
    ("podgpu demo --gpus 2xA100,1xH100/7x1g.10gb", "other GPUs on the first node, one of them in MIG parts"),
    ("podgpu top --cluster localhost:9401", "in a second terminal: the demo as a table"),
)
@click.option("-a", "--address", default=":9400", show_default=True, help="Address of the first node's exporter.")
@click.option("--cluster-address", default=":9401", show_default=True, help="Address of the cluster view.")
@click.option(
    "--gpus", default="8xH100", show_default=True, help="GPUs of the first node, such as 2xA100,1xH100/7x1g.10gb."
)
def command(address: str, cluster_address: str, gpus: str) -> None:
    """Run three exporters on SIMULATED GPUs with simulated kubelets, and the cluster view over them.

    Needs no GPU and no cluster.
    """
    configure_logging("text", debug=False)
    addresses = [parse_address(address), Address(_LOOPBACK, 0), Address(_LOOPBACK, 0)]
    listen = parse_address(cluster_address, "--cluster-address")
    with ExitStack() as at_the_end:
        agents = [
            at_the_end.enter_context(_node(number, spec)) for number, spec in enumerate((gpus, *_OTHER_GPUS), start=1)
        ]
        for agent in agents:
            agent.warm_up()
        several = Several(agents)
        targets: list[str] = []
        cluster = Cluster(lambda: ScrapeBackend(FixedTargets(targets)), Publisher(_CLUSTER))
        listeners = [
            *(Listener(application(agent), where) for agent, where in zip(agents, addresses, strict=True)),
            Listener(cluster_application(cluster), listen, "--cluster-address"),
        ]

        def listening(bound: Sequence[Address]) -> None:
            targets.extend(f"http://{_LOOPBACK}:{where.port}/metrics" for where in bound[:-1])
            several.add(cluster)
            _announce(bound, agents[0])

        run(several, listeners, listening)
    click.echo("demo ended")


class Several:
    """Served as one: all of them start and stop together, and one that must end ends them all."""

    def __init__(self, members: Sequence[Served]) -> None:
        self._members = list(members)

    def add(self, member: Served) -> None:
        self._members.append(member)

    @property
    def fatal(self) -> StartError | None:
        return next((member.fatal for member in self._members if member.fatal is not None), None)

    def start(self, on_fatal: Callable[[], object]) -> None:
        for member in self._members:
            member.start(on_fatal)

    def reload(self) -> None:
        for member in self._members:
            member.reload()

    def stop(self) -> None:
        for member in reversed(self._members):
            member.stop()


@contextmanager
def _node(number: int, gpus: str) -> Iterator[Agent]:
    driver = SimulatedNvml(gpus, seed=number - 1)
    on_node = tenants(driver, first=(number - 1) * _NAMES_APART)
    place_loads(driver, on_node)
    with tempfile.TemporaryDirectory(prefix=f"podgpu-demo-{number}-") as directory:
        host = Path(directory)
        furnish(host, on_node)
        socket = str(host / "kubelet.sock")
        with SimulatedKubelet(socket, pods(on_node)):
            click.echo(f"SIMULATED node-{number}: {gpus}, {len(pods(on_node))} pods by a real gRPC server on {socket}")
            yield _agent(driver, host, socket, f"node-{number}")


def _agent(driver: SimulatedNvml, host: Path, socket: str, name: str) -> Agent:
    count = len(driver.machine.gpus)
    policy = Policy(counters=shipped_counters("dcp") or (), hostname=name)
    names = IdentityReader(str(host / "pods"), str(host / "containers"))
    return Agent(
        NvmlTelemetry(driver, "simulated", count_expected=lambda: count),
        [KubeletAllocation(socket)],
        Settings(interval=1.0, allocation_interval=1.0, policy=policy),
        identities=names.read,
        containers=ContainerFinder(str(host / "proc")),
    )


def _command() -> str:
    """As it can be typed from where this was started: `make demo` has it in .venv/bin."""
    path = Path(sys.argv[0])
    return os.path.relpath(path) if path.name == "podgpu" and path.exists() else "python -m podgpu"


def _announce(bound: Sequence[Address], agent: Agent) -> None:
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
    click.echo(f"... {len([line for line in lines if not line.startswith('#')])} series in all. Ctrl-C ends the demo.")
