"""`podgpu demo`: exporters on simulated GPUs, and the cluster view."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from podgpu.agent.loop import Agent
from podgpu.cli.exporter_options import PRICES_HELP
from podgpu.cli.options import Option, make_command
from podgpu.cluster.prices import EXAMPLE, read_prices
from podgpu.compose.demo import CLUSTER_OPTION, DemoSettings, run_demo
from podgpu.compose.process import configure_logging
from podgpu.simulate.demo import CYCLE_SECONDS, Act, StageNode
from podgpu.web.sockets import Address, parse_address

_SAMPLES = ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_POWER_USAGE", "podgpu_container_gpu_utilization_ratio")


DEMO_OPTIONS = (
    Option("address", "a", default=":9400", help="Address of the first node's exporter.", ours=True),
    Option("cluster-address", default=":9401", help="Address of the cluster view.", ours=True),
    Option("gpus", default="8xH100", help="GPUs of the first node, such as 2xA100,1xH100/7x1g.10gb.", ours=True),
    Option("calm", help="No faults, and no pods that start or end.", kind="flag", ours=True),
    Option("prices", default=EXAMPLE, help=PRICES_HELP, ours=True),
)


@make_command(
    "demo",
    DEMO_OPTIONS,
    ("podgpu demo", "open http://localhost:9401/ in a browser"),
    ("podgpu demo --calm", "the same without faults"),
    ("podgpu top --cluster localhost:9401", "in a second terminal: the demo as a table"),
)
def command(address: str, cluster_address: str, gpus: str, calm: bool, prices: str) -> None:
    """Run three exporters on SIMULATED GPUs with simulated kubelets, and the cluster view.

    Needs no GPU and no cluster. Unless --calm is given, a job ends, a GPU reports an XID, another falls off the bus
    and a node goes down within a minute; all of it recovers after two.
    """
    configure_logging("text", debug=False)
    exporter, cluster = parse_address(address), parse_address(cluster_address, CLUSTER_OPTION)
    run_demo(DemoSettings(gpus, exporter, cluster, calm, read_prices(prices)), _Terminal())
    click.echo("demo ended")


class _Terminal:
    """Prints the progress of the demo."""

    def staged(self, node: StageNode, gpus: str) -> None:
        count, socket = len(node.kubelet.pods), node.kubelet.socket
        click.echo(f"SIMULATED {node.name}: {gpus}, {count} pods, kubelet on {socket}")

    def begun(self, bound: Sequence[Address], first: Agent, script: Sequence[Act]) -> None:
        click.echo("All figures come from a simulated driver.\n")
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
            click.echo(f"Events, repeated every {CYCLE_SECONDS:.0f} s (turn them off with --calm):")
            for act in script:
                click.echo(f"  {act.at:4.0f} s  {act.says}")
        count = len([line for line in lines if not line.startswith("#")])
        click.echo(f"... {count} series. Ctrl-C ends the demo.")

    def happened(self, act: Act) -> None:
        click.echo(f"demo: {act.says}")


def _command() -> str:
    """The podgpu command as it can be typed here; `make demo` has it in .venv/bin."""
    path = Path(sys.argv[0])
    return os.path.relpath(path) if path.name == "podgpu" and path.exists() else "python -m podgpu"
