"""`podgpu release`: lets an exporter close the driver for some time, so that a GPU can be reset."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import click

from podgpu.cli.operator_request import send_operator_request
from podgpu.cli.options import make_command
from podgpu.errors import SourceError, StartError, few_of

_SELECTOR = "app.kubernetes.io/component=exporter"
_CONTAINER = "podgpu"
_URL = "localhost:9400"
_KUBECTL_SECONDS = 60.0


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
        click.echo(send_operator_request(url or _URL, "release", {"seconds": str(seconds)}))
        return
    for pod in _list_exporters(node):
        click.echo(f"{node}: {_release_in_pod(pod, seconds, url)}")


def _list_exporters(node: str) -> list[dict[str, Any]]:
    """Returns the running pods of the exporter on the node. Raises SourceError if it has none."""
    selector = ["--selector", _SELECTOR, "--field-selector", f"spec.nodeName={node}"]
    answer = _run_kubectl("get", "pods", "--all-namespaces", *selector, "--output", "json")
    try:
        pods = [pod for pod in json.loads(answer)["items"] if _find_container(pod)]
        running = [pod for pod in pods if pod["status"]["phase"] == "Running"]
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError("malformed", "kubectl get pods returned no list of pods") from error
    if not running:
        raise SourceError(
            "not_found",
            f"node {node} has no running pod of podgpu's exporter ({_SELECTOR}, container "
            f"{_CONTAINER}): check the node's name with `kubectl get nodes`; if another program "
            "has the driver open, `fuser -v /dev/nvidia*` on the node names it",
        )
    return running


def _find_container(pod: dict[str, Any]) -> dict[str, Any] | None:
    containers = pod["spec"]["containers"]
    return next((each for each in containers if each["name"] == _CONTAINER), None)


def _release_in_pod(pod: dict[str, Any], seconds: int, url: str) -> str:
    for port in _list_ports(pod):
        url = url or f"localhost:{port}"
    metadata = pod["metadata"]
    place = ["--namespace", metadata["namespace"], metadata["name"], "--container", _CONTAINER]
    release = ["podgpu", "release", "--seconds", str(seconds), "--url", url or _URL]
    return _run_kubectl("exec", *place, "--", *release)


def _list_ports(pod: dict[str, Any]) -> Iterator[int]:
    container = _find_container(pod) or {}
    for port in container.get("ports", ()):
        if port.get("name") == "metrics":
            yield port["containerPort"]


def _run_kubectl(*arguments: str) -> str:
    """Returns the output. Raises SourceError with kubectl's message if it fails."""
    program = shutil.which("kubectl")
    if program is None:
        raise StartError(
            "--node needs kubectl, which is not in PATH: install it, or run `podgpu release` "
            "in the pod of podgpu's exporter on that node"
        )
    try:
        result = subprocess.run(
            [program, *arguments], capture_output=True, timeout=_KUBECTL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        text = f"kubectl {arguments[0]} did not end within {_KUBECTL_SECONDS:.0f} s"
        raise SourceError("timeout", text) from error
    except OSError as error:
        raise StartError(f"{program} cannot be run: {error.strerror}") from error
    if result.returncode != 0:
        lines = result.stderr.decode(errors="replace").strip().splitlines()
        raise SourceError("kubectl", f"kubectl {arguments[0]}: {few_of(lines)}")
    return result.stdout.decode(errors="replace").strip()
