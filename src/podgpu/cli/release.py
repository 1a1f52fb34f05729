"""`podgpu release`: lets an exporter close the driver for some time, so that a GPU can be reset."""

from __future__ import annotations

import click

from podgpu.cli.kubectl_exec import DEFAULT_PORT, Kubectl, list_exporters
from podgpu.cli.operator_request import send_operator_request
from podgpu.cli.options import make_command


@make_command(
    "release",
    ("podgpu release", "on the node: close the driver for 5 minutes"),
    ("podgpu release --node gpu-7 --seconds 600", "from a machine with kubectl"),
)
def command(node: str, seconds: int, url: str) -> None:
    """Let podgpu's exporter close the driver for some time, so that a GPU can be reset.

    `kubectl drain --ignore-daemonsets` leaves the exporter on the node. While it has the driver
    open, `nvidia-smi -r` fails.

    With --node, uses kubectl and its current context. You need permission to list pods and to run
    commands in podgpu's namespace (`pods/exec`).
    """
    if not node:
        own_url = url or f"localhost:{DEFAULT_PORT}"
        text = send_operator_request(own_url, "release", {"seconds": str(seconds)})
        click.echo(text)
        return

    kubectl = Kubectl("release")
    # A node may have several exporters. Each has the driver open.
    for pod in list_exporters(kubectl, node):
        pod_url = url or f"localhost:{pod.port}"
        words = ["podgpu", "release", "--seconds", str(seconds), "--url", pod_url]
        text = pod.run(kubectl, *words)
        click.echo(f"{node}: {text}")
