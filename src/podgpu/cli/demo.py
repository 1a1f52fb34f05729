"""`podgpu demo`: the exporter's main job on simulated GPUs, with nothing to install and no privilege."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from podgpu.accounting.containers import ContainerFinder
from podgpu.agent.loop import Agent, Settings
from podgpu.allocation.identity import IdentityReader
from podgpu.allocation.kubelet import KubeletAllocation
from podgpu.catalog.counters import shipped_counters
from podgpu.cli.logs import configure_logging
from podgpu.join import Policy
from podgpu.serve.app import Address, parse_address, serve
from podgpu.simulate.driver import SimulatedNvml
from podgpu.simulate.kubelet import SimulatedKubelet
from podgpu.simulate.node import furnish, place_loads, pods, tenants
from podgpu.telemetry.nvml import NvmlTelemetry

_SAMPLES = ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_POWER_USAGE", "podgpu_container_gpu_utilization_ratio")


@click.command("demo", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-a", "--address", default=":9400", show_default=True, help="Address to listen on.")
@click.option("--gpus", default="8xH100", show_default=True, help="Which GPUs, such as 2xA100,1xH100/7x1g.10gb.")
def command(address: str, gpus: str) -> None:
    """Run the exporter on SIMULATED GPUs with a simulated kubelet. Needs no GPU and no cluster."""
    configure_logging("text", debug=False)
    listen = parse_address(address)
    driver = SimulatedNvml(gpus)
    on_node = tenants(driver)
    place_loads(driver, on_node)
    with tempfile.TemporaryDirectory(prefix="podgpu-demo-") as directory:
        host = Path(directory)
        furnish(host, on_node)
        socket = str(host / "kubelet.sock")
        with SimulatedKubelet(socket, pods(on_node)):
            agent = _agent(driver, host, socket)
            agent.warm_up()
            click.echo(f"SIMULATED GPUs ({gpus}): every figure below is made up by podgpu's simulated driver.")
            click.echo(f"  kubelet   a real gRPC server on {socket}, {len(pods(on_node))} pods")
            serve(agent, listen, lambda bound: _announce(bound, agent))
    click.echo("demo ended")


def _agent(driver: SimulatedNvml, host: Path, socket: str) -> Agent:
    count = len(driver.machine.gpus)
    policy = Policy(counters=shipped_counters("dcp") or (), hostname="simulated-node")
    names = IdentityReader(str(host / "pods"), str(host / "containers"))
    return Agent(
        NvmlTelemetry(driver, "simulated", count_expected=lambda: count),
        [KubeletAllocation(socket)],
        Settings(interval=1.0, allocation_interval=1.0, policy=policy),
        identities=lambda: names.read().complete,
        containers=ContainerFinder(str(host / "proc")),
    )


def _announce(bound: Address, agent: Agent) -> None:
    click.echo(f"  exporter  {bound.url}/metrics   (also /health, /ready)\n")
    lines = agent.published.fresh.plain.decode().splitlines()
    for name in _SAMPLES:
        family = [line for line in lines if line.startswith(name)]
        for line in family[:3]:
            click.echo(line)
    click.echo(f"... {len([line for line in lines if not line.startswith('#')])} series in all. Ctrl-C ends the demo.")
