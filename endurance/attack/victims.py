"""The exporter and the cluster view under attack: processes with the chart's options, their logs, what they take."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bcrypt
import yaml

from endurance.attack.exporter_process import WELL, WELL_VARIABLE, driver
from endurance.attack.scraper import Login, answers, free_port
from endurance.vitals import Vitals, vitals_of
from podgpu.simulate.kubelet import SimulatedKubelet, SimulatedPod

ROOT = Path(__file__).parents[2]
LOGIN = Login("prometheus", "correct horse")
DESCRIPTORS = 1024
"""As a container often has it."""
KUBELET_SECONDS = 1.5
NODE = "honest"
_PATIENCE = 60.0
_MIB_OF = {"Mi": 1.0, "Gi": 1024.0}


@dataclass
class Victim:
    name: str
    process: subprocess.Popen[bytes]
    port: int
    probe_port: int
    log: Path
    limit: float
    """MiB, of the chart."""

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def vitals(self, at: float) -> Vitals:
        return vitals_of(self.process.pid, at)

    @property
    def log_bytes(self) -> int:
        return self.log.stat().st_size


class SlowKubelet(SimulatedKubelet):
    """Answers after a while, each time."""

    def service(self, call: Any) -> Any:
        handler = super().service(call)
        time.sleep(KUBELET_SECONDS)
        return handler


def memory_limit(component: str) -> float:
    """MiB that the chart lets it have."""
    values = yaml.safe_load((ROOT / "deploy" / "helm" / "podgpu" / "values.yaml").read_text(encoding="utf-8"))
    text = values[component]["resources"]["limits"]["memory"]
    return float(text[:-2]) * _MIB_OF[text[-2:]]


def pods() -> list[SimulatedPod]:
    """Each well GPU has its own pod: `on-0` on the first, and so on."""
    uuids = [gpu.uuid for gpu in driver().machine.gpus]
    return [SimulatedPod("ns", f"on-{n}", {"main": {"nvidia.com/gpu": [uuids[n]]}}) for n in WELL]


@contextmanager
def victims(folder: Path, hostile: Sequence[str], well: bool = False) -> Iterator[tuple[Victim, Victim]]:
    """Both up and answering. `hostile`: URLs of exporters that mean no good. `well`: the GPUs and the kubelet are."""
    secrets = _write_secrets(folder)
    for name in ("proc", "log/pods", "log/containers"):
        (folder / name).mkdir(parents=True)
    with ExitStack() as stack:
        kubelet = SimulatedKubelet if well else SlowKubelet
        stack.enter_context(kubelet(str(folder / "kubelet.sock"), pods()))
        variables = {"NODE_NAME": NODE} | ({WELL_VARIABLE: "1"} if well else {})
        exporter = stack.enter_context(_victim("exporter", _exporter_words(folder, secrets), folder, variables))
        urls = [f"http://127.0.0.1:{exporter.port}/metrics", *hostile]
        cluster = stack.enter_context(_victim("cluster", _cluster_words(urls, secrets), folder, {}))
        yield exporter, cluster


def _exporter_words(folder: Path, secrets: Mapping[str, str]) -> list[str]:
    return [
        *("-m", "endurance.attack.exporter_process", "exporter", "--telemetry", "simulated"),
        *("-c", "1000", "-k", "--allocation", "kubelet", "--allocation-interval", "1s"),
        *("--pod-resources-kubelet-socket", str(folder / "kubelet.sock")),
        *("--path-proc", str(folder / "proc"), "--path-varlog", str(folder / "log")),
        *("--web-config-file", secrets["web"]),
    ]


def _cluster_words(urls: Sequence[str], secrets: Mapping[str, str]) -> list[str]:
    return [
        *("-m", "podgpu", "cluster", "--scrape", ",".join(urls), "--interval", "2s", "--scrape-timeout", "1500ms"),
        *("--exporter-username", LOGIN.user, "--exporter-password-file", secrets["password"]),
        *("--web-config-file", secrets["web"]),
    ]


def _write_secrets(folder: Path) -> dict[str, str]:
    hashed = bcrypt.hashpw(LOGIN.password.encode(), bcrypt.gensalt(10)).decode()
    web, password = folder / "web.yml", folder / "password"
    web.write_text(json.dumps({"basic_auth_users": {LOGIN.user: hashed}}), encoding="utf-8")  # JSON is YAML
    password.write_text(LOGIN.password, encoding="utf-8")
    return {"web": str(web), "password": str(password)}


@contextmanager
def _victim(name: str, words: Sequence[str], folder: Path, variables: Mapping[str, str]) -> Iterator[Victim]:
    port, probe_port = free_port(), free_port()
    addresses = ["-a", f"127.0.0.1:{port}", "--probe-address", f"127.0.0.1:{probe_port}"]
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "LANG", "PYTHONPATH")}
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *words, *addresses],
            stdout=output,
            stderr=output,
            cwd=ROOT,
            env={**kept, **variables},
        )
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    victim = Victim(name, process, port, probe_port, log, memory_limit(name))
    try:
        _wait_until_up(victim)
        yield victim
    finally:
        process.kill()
        process.wait()


def _wait_until_up(victim: Victim) -> None:
    give_up_at = time.monotonic() + _PATIENCE
    pause = threading.Event()
    while not answers(victim.port, LOGIN):
        if not victim.is_alive or time.monotonic() > give_up_at:
            raise RuntimeError(f"{victim.name} does not come up: {victim.log.read_text()[-2000:]}")
        pause.wait(0.1)
