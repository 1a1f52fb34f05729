"""A real kube-apiserver with scheduler and controllers, but without a kubelet.

PODGPU_KUBE_BIN names the folder of kube-apiserver, kube-scheduler, kube-controller-manager and
kubectl. PODGPU_ETCD names the program etcd; by default it is found in $PATH.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from deploy.render import CHART, run_helm
from tests.net import free_port
from tests.nodes.clock import PATIENCE

BIN = os.environ.get("PODGPU_KUBE_BIN", "")
ETCD = os.environ.get("PODGPU_ETCD") or shutil.which("etcd") or ""
MISSING = "" if BIN and ETCD else "PODGPU_KUBE_BIN is not set, or there is no etcd"
_TOKEN = "admin-token"
_CONTROLLERS = "*,-node-lifecycle-controller,-taint-eviction-controller"


class Cluster:
    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.url = f"https://127.0.0.1:{port}"
        self.kubeconfig = self.write_kubeconfig("admin", _TOKEN)

    def write_kubeconfig(self, name: str, token: str) -> str:
        """Returns the path of a kubeconfig with this token."""
        cluster = {"server": self.url, "insecure-skip-tls-verify": True}
        content = {
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token}}],
        }
        path = self.folder / f"kubeconfig-{name}"
        path.write_text(json.dumps(content), encoding="utf-8")
        return str(path)

    def run(self, *arguments: str, stdin: str = "") -> str:
        command = [f"{BIN}/kubectl", "--kubeconfig", self.kubeconfig, *arguments]
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, f"{' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def get(self, *arguments: str) -> Any:
        return json.loads(self.run("get", *arguments, "-o", "json"))

    def apply(self, *objects: dict[str, Any]) -> None:
        self.run("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))

    def apply_chart(self, write: str, *templates: str) -> None:
        """Applies some templates of the chart, with `exporter.write={…}`, in the namespace gpu."""
        shown = [part for one in templates for part in ("-s", f"templates/exporter/{one}.yaml")]
        text = run_helm(
            "template",
            "podgpu",
            str(CHART),
            "-n",
            "gpu",
            "--set",
            f"exporter.write={write}",
            *shown,
        ).stdout
        objects = [one for one in yaml.safe_load_all(text) if one and one["kind"] != "Job"]
        self.apply(*objects)

    def make_token(self, account: str) -> str:
        return self.run("create", "token", account, "-n", "gpu").strip()

    def add_node(self, name: str) -> None:
        """Adds a Node that is ready, and to which the scheduler may assign pods."""
        labels = {"kubernetes.io/hostname": name}
        self.apply(
            {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
        )
        amounts = {"cpu": "8", "memory": "16Gi", "pods": "110"}
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "ready"}
        status = {"capacity": amounts, "allocatable": amounts, "conditions": [ready]}
        patch = json.dumps({"status": status})
        self.run("patch", "node", name, "--subresource=status", "--type=merge", "-p", patch)
        self.run("patch", "node", name, "--type=merge", "-p", '{"spec": {"taints": null}}')


@contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    port, etcd_port, peer_port = free_port(), free_port(), free_port()
    key = str(folder / "service-account.key")
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    (folder / "tokens.csv").write_text(f'{_TOKEN},admin,admin,"system:masters"\n')
    cluster = Cluster(folder, port)
    etcd = f"http://127.0.0.1:{etcd_port}"
    peer = f"http://127.0.0.1:{peer_port}"
    commands = [
        _make_command(
            ETCD,
            data_dir=folder / "etcd",
            listen_client_urls=etcd,
            advertise_client_urls=etcd,
            listen_peer_urls=peer,
            initial_advertise_peer_urls=peer,
            initial_cluster=f"default={peer}",
        ),
        _make_command(
            f"{BIN}/kube-apiserver",
            etcd_servers=etcd,
            bind_address="127.0.0.1",
            secure_port=port,
            cert_dir=folder / "certificates",
            service_account_key_file=key,
            service_account_signing_key_file=key,
            service_account_issuer="https://kubernetes.default",
            service_cluster_ip_range="10.0.0.0/24",
            token_auth_file=folder / "tokens.csv",
            authorization_mode="RBAC",
        ),
        _make_command(
            f"{BIN}/kube-scheduler",
            kubeconfig=cluster.kubeconfig,
            leader_elect="false",
            authentication_skip_lookup="true",
            secure_port=free_port(),
        ),
        _make_command(
            f"{BIN}/kube-controller-manager",
            kubeconfig=cluster.kubeconfig,
            service_account_private_key_file=key,
            use_service_account_credentials="true",
            controllers=_CONTROLLERS,
            leader_elect="false",
            authentication_skip_lookup="true",
            secure_port=free_port(),
        ),
    ]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number, command in enumerate(commands):
            processes.append(_start(command, folder / f"log-{number}"))
            if number == 1:
                _wait_ready(cluster)
        yield cluster
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(PATIENCE)


def _make_command(program: str, **flags: object) -> list[str]:
    return [program, *(f"--{name.replace('_', '-')}={value}" for name, value in flags.items())]


def _start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)


def _wait_ready(cluster: Cluster) -> None:
    command = [f"{BIN}/kubectl", "--kubeconfig", cluster.kubeconfig, "get", "--raw", "/readyz"]
    end = time.monotonic() + PATIENCE
    while subprocess.run(command, capture_output=True).returncode:
        assert time.monotonic() < end, "the API server is not ready; see its log"
        time.sleep(0.3)
