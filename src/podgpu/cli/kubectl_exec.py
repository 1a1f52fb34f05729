"""Runs podgpu's own commands in the pods of its exporters, with kubectl."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any, NamedTuple

from podgpu.errors import SourceError, StartError, few_of

_SELECTOR = "app.kubernetes.io/component=exporter"
_CONTAINER = "podgpu"
DEFAULT_PORT = 9400
_SECONDS = 60.0
_LOG_LINE = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d")  # as klog writes it


def _decode(output: bytes) -> str:
    return output.decode(errors="replace").strip()


def _drop_log(lines: Sequence[str]) -> Sequence[str]:
    """Drops lines of kubectl's log, which repeat its message if no API server answers."""
    messages = [line for line in lines if _LOG_LINE.match(line) is None]
    return messages or lines


class Kubectl(NamedTuple):
    command: str  # podgpu's command, for messages
    options: Sequence[str] = ()  # such as --context

    def run(self, *arguments: str, seconds: float = _SECONDS, shows_messages: bool = False) -> str:
        """Returns the output. Raises SourceError with kubectl's message if it fails.

        With `shows_messages`, messages of the command go to standard error at once.
        """
        program = shutil.which("kubectl")
        if program is None:
            raise StartError(
                "--node needs kubectl, which is not in PATH: install it, or run "
                f"`podgpu {self.command}` in the pod of podgpu's exporter on that node"
            )

        try:
            result = subprocess.run(
                [program, *self.options, *arguments],
                stdout=subprocess.PIPE,
                stderr=None if shows_messages else subprocess.PIPE,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            text = f"kubectl {arguments[0]} did not end within {seconds:.0f} s"
            raise SourceError("timeout", text) from error
        except OSError as error:
            raise StartError(f"{program} cannot be run: {error.strerror}") from error

        if result.returncode != 0:
            messages = _decode(result.stderr or b"")
            why = f"exit code {result.returncode}"
            if messages:
                why = few_of(_drop_log(messages.splitlines()))
            raise SourceError("kubectl", f"kubectl {arguments[0]}: {why}")
        return _decode(result.stdout)


class ExporterPod(NamedTuple):
    namespace: str
    name: str
    port: int  # of its metrics

    def run(
        self,
        kubectl: Kubectl,
        *command: str,
        seconds: float = _SECONDS,
        shows_messages: bool = False,
    ) -> str:
        """Runs a command in the exporter's container and returns its output."""
        place = ["--namespace", self.namespace, self.name, "--container", _CONTAINER]
        return kubectl.run(
            "exec", *place, "--", *command, seconds=seconds, shows_messages=shows_messages
        )


def list_exporters(kubectl: Kubectl, node: str) -> list[ExporterPod]:
    """Returns the running pods of the exporter on the node. Raises SourceError if it has none."""
    selector = ["--selector", _SELECTOR, "--field-selector", f"spec.nodeName={node}"]
    answer = kubectl.run("get", "pods", "--all-namespaces", *selector, "--output", "json")

    running = []
    try:
        for pod in json.loads(answer)["items"]:
            metadata = pod["metadata"]
            for container in pod["spec"]["containers"]:
                if container["name"] == _CONTAINER and pod["status"]["phase"] == "Running":
                    port = _find_port(container)
                    running.append(ExporterPod(metadata["namespace"], metadata["name"], port))
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


def _find_port(container: dict[str, Any]) -> int:
    for port in container.get("ports", ()):
        if port.get("name") == "metrics":
            return int(port["containerPort"])
    return DEFAULT_PORT
