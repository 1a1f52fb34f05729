"""Exporters and cluster views under attack: processes with the chart's options, their logs, what they take."""

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
from secrets import randbelow
from typing import Any, NamedTuple

import bcrypt
import yaml

from endurance.attack.exporter_process import WELL, WELL_VARIABLE, driver
from endurance.attack.scraper import Check, Login, exposition_of, free_port
from endurance.vitals import Vitals, vitals_of
from podgpu.autoscale.x509 import issue
from podgpu.simulate.kubelet import SimulatedKubelet, SimulatedPod

ROOT = Path(__file__).parents[2]
LOGIN = Login("prometheus", "correct horse")
DESCRIPTORS = 1024
"""As a container often has it."""
KUBELET_SECONDS = 1.5
SCRAPE_SECONDS = 1.5
NODE = "honest"
_PATIENCE = 120.0
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
    authority: str = ""
    """The file with whom its certificate is of; empty: it speaks no TLS."""

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


class Victims(NamedTuple):
    exporter: Victim
    cluster: Victim
    secure_exporter: Victim
    """Speaks TLS."""
    secure_cluster: Victim
    """Speaks TLS, too, and finds its exporters by an API server: the one before, and some that mean no good."""


@contextmanager
def victims(
    folder: Path,
    hostile: Sequence[str],
    discovered: Sequence[int] = (),
    well: bool = False,
    scrape_seconds: float = SCRAPE_SECONDS,
) -> Iterator[Victims]:
    """All started. `hostile`: URLs of exporters that mean no good; `discovered`: ports of some that the API
    server names. `well`: the GPUs and the kubelet are. `scrape_seconds`: how long the cluster views wait for a text."""
    secrets = _write_secrets(folder)
    for name in ("proc", "log/pods", "log/containers"):
        (folder / name).mkdir(parents=True)
    with ExitStack() as stack:
        kubelet = SimulatedKubelet if well else SlowKubelet
        stack.enter_context(kubelet(str(folder / "kubelet.sock"), pods()))
        stack.enter_context(SimulatedKubelet(str(folder / "quick.sock"), pods()))
        variables = {"NODE_NAME": NODE} | ({WELL_VARIABLE: "1"} if well else {})
        words = _exporter_words(folder, "kubelet.sock", secrets["web"])
        exporter = stack.enter_context(_victim("exporter", words, folder, variables))
        words = _exporter_words(folder, "quick.sock", secrets["web_tls"])
        secure = stack.enter_context(_victim("exporter over TLS", words, folder, variables, secrets["authority"]))
        urls = [f"http://127.0.0.1:{exporter.port}/metrics", *hostile]
        words = _cluster_words(("--scrape", ",".join(urls)), secrets, secrets["web"], scrape_seconds)
        cluster = stack.enter_context(_victim("cluster", words, folder, {}))
        (api,) = stack.enter_context(beside("endurance.attack.hostile_api", secure.port, *discovered))
        words = _cluster_words(_discovery(folder, api), secrets, secrets["web_tls"], scrape_seconds)
        # Nobody but the honest exporter speaks TLS: its authority is one of the system's.
        trust = {"SSL_CERT_FILE": secrets["authority"]}
        finder = stack.enter_context(_victim("cluster over TLS", words, folder, trust, secrets["authority"]))
        yield Victims(exporter, cluster, secure, finder)


def _exporter_words(folder: Path, kubelet: str, web: str) -> list[str]:
    return [
        *("-m", "endurance.attack.exporter_process", "exporter", "--telemetry", "simulated"),
        *("-c", "1000", "-k", "--allocation", "kubelet", "--allocation-interval", "1s"),
        *("--pod-resources-kubelet-socket", str(folder / kubelet)),
        *("--path-proc", str(folder / "proc"), "--path-varlog", str(folder / "log")),
        *("--web-config-file", web),
    ]


def _cluster_words(targets: Sequence[str], secrets: Mapping[str, str], web: str, seconds: float) -> list[str]:
    return [
        *("-m", "podgpu", "cluster", *targets, "--interval", "2s", "--scrape-timeout", f"{1000 * seconds:.0f}ms"),
        *("--stale-after", f"{4000 * seconds:.0f}ms"),
        *("--exporter-username", LOGIN.user, "--exporter-password-file", secrets["password"]),
        *("--web-config-file", web),
    ]


def _discovery(folder: Path, api_port: int) -> list[str]:
    kubeconfig = folder / "kubeconfig"
    document = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{api_port}"}}],
        "users": [{"name": "me", "user": {}}],
    }
    kubeconfig.write_text(json.dumps(document), encoding="utf-8")  # JSON is YAML
    return ["--discover-kubernetes", "monitoring/app=podgpu", "--kubeconfig", str(kubeconfig)]


def _write_secrets(folder: Path) -> dict[str, str]:
    hashed = bcrypt.hashpw(LOGIN.password.encode(), bcrypt.gensalt(10)).decode()
    issued = issue(["127.0.0.1"], time.time() - 3600, time.time() + 86_400, randbelow)
    users = {"basic_auth_users": {LOGIN.user: hashed}}
    tls = {"cert_file": str(folder / "tls.crt"), "key_file": str(folder / "tls.key")}
    contents = {
        "web": json.dumps(users),
        "web_tls": json.dumps({"tls_server_config": tls, **users}),
        "password": LOGIN.password,
        "authority": issued.authority,
        "tls.crt": issued.certificate,
        "tls.key": issued.key,
    }
    for name, content in contents.items():
        (folder / name).write_text(content, encoding="utf-8")
    return {name: str(folder / name) for name in contents}


@contextmanager
def beside(module: str, *words: object) -> Iterator[list[int]]:
    """A helper in a process of its own; the ports it listens on."""
    command = [sys.executable, "-m", module, *map(str, words)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            yield [int(port) for port in process.stdout.readline().split()]
        finally:
            process.kill()


@contextmanager
def _victim(
    name: str, words: Sequence[str], folder: Path, variables: Mapping[str, str], authority: str = ""
) -> Iterator[Victim]:
    port, probe_port = free_port(), free_port()
    addresses = ["-a", f"127.0.0.1:{port}", "--probe-address", f"127.0.0.1:{probe_port}"]
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "LANG", "PYTHONPATH")}
    log = folder / f"{name.replace(' ', '_')}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *words, *addresses],
            stdout=output,
            stderr=output,
            cwd=ROOT,
            env={**kept, **variables},
        )
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    victim = Victim(name, process, port, probe_port, log, memory_limit(name.partition(" ")[0]), authority)
    try:
        yield victim
    finally:
        process.kill()
        process.wait()


def wait_until_well(victim: Victim, check: Check) -> None:
    """It answers, and there is nothing wrong with its exposition: whatever hangs in the first turn, it is over, and
    even a slow kubelet's pods are there."""
    give_up_at = time.monotonic() + _PATIENCE
    pause = threading.Event()
    while wrong := check(exposition_of(victim.port, LOGIN, victim.authority)):
        if not victim.is_alive or time.monotonic() > give_up_at:
            raise RuntimeError(f"{victim.name} does not come up, {wrong}: {victim.log.read_text()[-2000:]}")
        pause.wait(0.1)
