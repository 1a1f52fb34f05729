"""`podgpu demo`: exporters on simulated GPUs and the cluster view over them, with nothing to install, no privilege."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click

from podgpu.accounting.containers import ContainerFinder
from podgpu.agent.loop import Agent, Settings
from podgpu.allocation.identity import IdentityReader
from podgpu.allocation.kubelet import KubeletAllocation
from podgpu.catalog.counters import shipped_counters
from podgpu.cli.help import podgpu_command
from podgpu.cluster.publish import Publisher
from podgpu.cluster.scraping.backend import FixedTargets, ScrapeBackend
from podgpu.cluster.settings import ViewSettings
from podgpu.compose.histories import cluster_with_keeper, history_of, node_keeper
from podgpu.compose.process import configure_logging
from podgpu.join import Policy
from podgpu.serve.app import Listener, Several, application, run
from podgpu.serve.cluster_app import cluster_application
from podgpu.serve.sockets import Address, parse_address
from podgpu.simulate.driver import SimulatedNvml
from podgpu.simulate.kubelet import SimulatedKubelet
from podgpu.simulate.node import furnish, place_loads, pods, tenants
from podgpu.telemetry.nvml import NvmlTelemetry

_SAMPLES = ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_POWER_USAGE", "podgpu_container_gpu_utilization_ratio")
_OTHER_GPUS = ("6xH100,2xH100/1x3g.40gb+1x2g.20gb+1x1g.10gb", "4xH200")
_NAMES_APART = 8
_CLUSTER = ViewSettings(interval=2.0, stale_after=6.0, drop_after=30.0, window=60.0, idle_after=30.0)
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
        keepers = [node_keeper(agent) for agent in agents]
        several = Several([*agents, *keepers])
        targets: list[str] = []
        cluster, keeper = cluster_with_keeper(lambda: ScrapeBackend(FixedTargets(targets)), Publisher(_CLUSTER))
        nodes = zip(agents, keepers, addresses, strict=True)
        listeners = [
            *(Listener(application(agent, history=history_of(beside)), where) for agent, beside, where in nodes),
            Listener(cluster_application(cluster, history=history_of(keeper)), listen, "--cluster-address"),
        ]

        def listening(bound: Sequence[Address]) -> None:
            targets.extend(f"http://{_LOOPBACK}:{where.port}/metrics" for where in bound[:-1])
            several.add(cluster)
            several.add(keeper)
            _announce(bound, agents[0])

        run(several, listeners, listening)
    click.echo("demo ended")


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
