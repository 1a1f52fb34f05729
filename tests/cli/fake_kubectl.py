"""A small program in the place of kubectl: it runs the command of `kubectl exec` on this machine."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import podgpu

KUBECTL = """#!/bin/sh
printf '%s\\n' "$*" >>{log}
if [ "$1" = --context ]; then shift 2; fi
if [ "$1" = get ]; then exec cat {pods}; fi
while [ "$1" != -- ]; do shift; done
shift 2
PYTHONPATH={source} exec {python} -m podgpu "$@"
"""


def pod(name: str, port: int, phase: str = "Running", container: str = "podgpu") -> dict[str, Any]:
    ports = [{"name": "probes", "containerPort": 1}, {"name": "metrics", "containerPort": port}]
    return {
        "metadata": {"namespace": "monitoring", "name": name},
        "spec": {"containers": [{"name": container, "ports": ports}]},
        "status": {"phase": phase},
    }


class Kubectl:
    def __init__(self, folder: Path) -> None:
        self._log = folder / "kubectl.log"
        self._pods = folder / "pods.json"
        program = folder / "kubectl"
        words = {
            "log": self._log,
            "pods": self._pods,
            "python": sys.executable,
            "source": Path(podgpu.__file__).parents[1],
        }
        quoted = {name: shlex.quote(str(word)) for name, word in words.items()}
        program.write_text(KUBECTL.format(**quoted))
        program.chmod(0o755)

    def has_pods(self, *pods: dict[str, Any]) -> None:
        self._pods.write_text(json.dumps({"items": pods}))

    @property
    def commands(self) -> list[str]:
        return self._log.read_text().splitlines()
