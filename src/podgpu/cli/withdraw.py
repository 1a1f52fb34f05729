"""`podgpu withdraw`: removes what the exporters wrote to Kubernetes."""

from __future__ import annotations

import asyncio

import click

from podgpu.cli.options import make_command
from podgpu.errors import SourceError, StartError, plural
from podgpu.kube.client import ApiClient
from podgpu.kube.config import load_config
from podgpu.writers.node_condition import TYPE
from podgpu.writers.withdraw import Withdrawal, Withdrawn


@make_command(
    "withdraw",
    ("podgpu withdraw", "remove what exporters wrote with --write, after you uninstalled them"),
)
def command(kubeconfig: str) -> None:
    """Remove from Kubernetes what the exporters wrote: Events, Node conditions, taints.

    Uninstall the exporters first, or remove --write from their options. Otherwise they write again.
    The chart runs this command when it is uninstalled.
    """
    config = load_config(kubeconfig)

    async def run() -> Withdrawn:
        async with ApiClient(config) as client:
            return await Withdrawal(client).run()

    try:
        withdrawn = asyncio.run(run())
    except SourceError as error:
        raise StartError(f"not everything could be removed: {error}") from error
    click.echo(
        f"removed the condition {TYPE} of {plural(withdrawn.nodes, 'Node')}, "
        f"{plural(withdrawn.rules, 'DeviceTaintRule')} and {plural(withdrawn.events, 'Event')}"
    )
