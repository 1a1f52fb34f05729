"""`podgpu demo` runs exporters on simulated GPUs and the cluster view over them: nothing to install, no privilege."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from podgpu.agent.loop import Agent
from podgpu.cli.help import podgpu_command
from podgpu.cli.option_table import PRICES_HELP
from podgpu.cluster.prices import EXAMPLE, read_prices
from podgpu.compose.demo import CLUSTER_OPTION, DemoSettings, run_demo
from podgpu.compose.process import configure_logging
from podgpu.simulate.scenario import CYCLE_SECONDS, Act
from podgpu.simulate.stage import StageNode
from podgpu.web.sockets import Address, parse_address

_SAMPLES = ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_POWER_USAGE", "podgpu_container_gpu_utilization_ratio")


@podgpu_command(
    "demo",
    ("podgpu demo", "open http://localhost:9401/ in a browser"),
    ("podgpu demo --calm", "the same, and nothing breaks: for screenshots"),
    ("podgpu top --cluster localhost:9401", "in a second terminal: the demo as a table"),
)
@click.option("-a", "--address", default=":9400", show_default=True, help="Address of the first node's exporter.")
@click.option(CLUSTER_OPTION, default=":9401", show_default=True, help="Address of the cluster view.")
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
    exporter, cluster = parse_address(address), parse_address(cluster_address, CLUSTER_OPTION)
    run_demo(DemoSettings(gpus, exporter, cluster, calm, read_prices(prices)), _Terminal())
    click.echo("demo ended")


class _Terminal:
    """Tells whoever started the demo how it goes (`compose.demo.Audience`)."""

    def staged(self, node: StageNode, gpus: str) -> None:
        count, socket = len(node.kubelet.pods), node.kubelet.socket
        click.echo(f"SIMULATED {node.name}: {gpus}, {count} pods by a real gRPC server on {socket}")

    def begun(self, bound: Sequence[Address], first: Agent, script: Sequence[Act]) -> None:
        click.echo("Every figure is made up by podgpu's simulated driver.\n")
        click.echo(f"  the cluster  {bound[-1].url}/          a page; {bound[-1].url}/metrics")
        click.echo(f"  node-1       {bound[0].url}/          a page; {bound[0].url}/metrics, /health, /ready")
        for number, address in enumerate(bound[1:-1], start=2):
            click.echo(f"  node-{number}       {address.url}/          a page")
        click.echo(f"  a terminal   {_command()} top --cluster {bound[-1].url}\n")
        lines = first.published.fresh.plain.decode().splitlines()
        for name in _SAMPLES:
            family = [line for line in lines if line.startswith(name)]
            for line in family[:2]:
                click.echo(line)
        if script:
            click.echo(f"What happens, again every {CYCLE_SECONDS:.0f} s (podgpu demo --calm: nothing does):")
            for act in script:
                click.echo(f"  {act.at:4.0f} s  {act.says}")
        count = len([line for line in lines if not line.startswith("#")])
        click.echo(f"... {count} series in all. Ctrl-C ends the demo.")

    def happened(self, act: Act) -> None:
        click.echo(f"demo: {act.says}")


def _command() -> str:
    """As it can be typed from where this was started: `make demo` has it in .venv/bin."""
    path = Path(sys.argv[0])
    return os.path.relpath(path) if path.name == "podgpu" and path.exists() else "python -m podgpu"
