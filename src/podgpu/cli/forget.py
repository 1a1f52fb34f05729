"""`podgpu forget`: removes a lost GPU from the page, or clears the XIDs of a repaired GPU."""

from __future__ import annotations

import click

from podgpu.cli.operator_request import send_operator_request
from podgpu.cli.options import make_command
from podgpu.errors import UsageError


@make_command(
    "forget",
    ("podgpu forget GPU-5d1c…", "on the node: remove the GPU from the exporter's page and metrics"),
    ("podgpu forget GPU-5d1c… --url localhost:9401", "remove it from the page of podgpu cluster"),
    (
        "kubectl -n NAMESPACE exec POD-ON-THAT-NODE -- podgpu forget GPU-5d1c…",
        "the first example, in Kubernetes",
    ),
)
@click.argument("uuid", metavar="GPU-UUID")
def command(uuid: str, url: str) -> None:
    """Stop showing a lost GPU, or clear the XID errors of a repaired one.

    Run this command on the machine (or in the pod) of that podgpu, because it accepts only local
    requests.
    """
    # Such as "$UUID" of a variable that is not set.
    if not uuid.strip():
        raise UsageError("forget needs the UUID of a GPU, as nvidia-smi -L prints it")

    click.echo(send_operator_request(url, "forget", {"gpu": uuid}))
