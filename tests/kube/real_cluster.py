"""A real kube-apiserver and kube-scheduler, for objects that tests make by hand.

Needs PODGPU_KUBE_BIN, see tests/kube/real_api_server.py. There is no controller and no kubelet.
"""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.certificates import Certificates
from tests.kube.real_api_server import RealApiServer, find_program, real_api_server, token_of
from tests.net import free_port

Object = dict[str, Any]
_MERGE_PATCH = "application/merge-patch+json"
_PATHS = {
    "Namespace": "/api/v1/namespaces",
    "Node": "/api/v1/nodes",
    "Pod": "/api/v1/namespaces/{namespace}/pods",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "PriorityClass": "/apis/scheduling.k8s.io/v1/priorityclasses",
    "DeviceClass": "/apis/resource.k8s.io/v1/deviceclasses",
    "ResourceSlice": "/apis/resource.k8s.io/v1/resourceslices",
    "ResourceClaim": "/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims",
    "ResourceQuota": "/api/v1/namespaces/{namespace}/resourcequotas",
    "ReplicaSet": "/apis/apps/v1/namespaces/{namespace}/replicasets",
    "Job": "/apis/batch/v1/namespaces/{namespace}/jobs",
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
    "Workload": "/apis/kueue.x-k8s.io/v1beta1/namespaces/{namespace}/workloads",
    "LocalQueue": "/apis/kueue.x-k8s.io/v1beta1/namespaces/{namespace}/localqueues",
    "ClusterQueue": "/apis/kueue.x-k8s.io/v1beta1/clusterqueues",
}


class RealCluster:
    def __init__(self, server: RealApiServer, scheduler: subprocess.Popen[bytes]) -> None:
        self.kubeconfig = server.kubeconfig("admin")
        self.kubeconfig_of_user = server.kubeconfig("allowed")
        self.server = server
        self._scheduler = scheduler
        self._created: list[str] = []

    def request(
        self, method: str, path: str, body: Object | None = None, kind: str = "application/json"
    ) -> Object:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {token_of('admin')}", "Content-Type": kind}
        request = urllib.request.Request(self.server.url + path, data, headers, method=method)
        context = self.server.certificates.client()
        try:
            with urllib.request.urlopen(request, context=context) as response:
                answer: Object = json.load(response)
                return answer
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode()
            raise AssertionError(f"{method} {path}: {error.code} {text}") from error

    def path(self, body: Object) -> str:
        metadata = body["metadata"]
        collection = _PATHS[body["kind"]].format(namespace=metadata.get("namespace", ""))
        return f"{collection}/{metadata['name']}"

    def create(self, body: Object) -> None:
        """Creates an object and then writes its status, as controllers do."""
        path = self.path(body)
        self.request("POST", path.rpartition("/")[0], body)
        self._created.append(path)
        status = body.get("status")
        # Custom resources of tests have no subresource.
        if status and "kueue" not in path and status != {"phase": "Pending"}:
            self.request("PATCH", f"{path}/status", {"status": status}, _MERGE_PATCH)
        if body["kind"] == "Node":
            # The API server taints new nodes, and a controller would remove the taint.
            taints = body["spec"].get("taints")
            self.request("PATCH", path, {"spec": {"taints": taints}}, _MERGE_PATCH)

    def read(self, body: Object) -> Object:
        return self.request("GET", self.path(body))

    def delete(self, path: str) -> None:
        self.request("DELETE", f"{path}?gracePeriodSeconds=0")

    def clear(self) -> None:
        """Deletes what was created, and then all pods, also those of controllers."""
        pods = self.request("GET", "/api/v1/pods")["items"]
        paths = [self.path({"kind": "Pod", **body}) for body in pods]
        for path in (*reversed(self._created), *paths):
            with suppress(AssertionError):
                self.delete(path)
        self._created.clear()

    @contextmanager
    def running_controllers(self, *names: str) -> Iterator[None]:
        """Runs controllers of kube-controller-manager."""
        folder = self.server.folder
        command = [
            find_program("kube-controller-manager"),
            f"--kubeconfig={self.kubeconfig}",
            f"--controllers={','.join(names)}",
            "--leader-elect=false",
            "--secure-port=0",
            f"--cert-dir={folder / 'controllers'}",
        ]
        with (folder / "controllers.log").open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
            try:
                yield
            finally:
                process.kill()
                process.wait()

    def pause_scheduler(self) -> None:
        self._scheduler.send_signal(signal.SIGSTOP)

    def resume_scheduler(self) -> None:
        self._scheduler.send_signal(signal.SIGCONT)


@contextmanager
def run_cluster(folder: Path, certificates: Certificates) -> Iterator[RealCluster]:
    program = find_program("kube-scheduler")
    with real_api_server(folder, certificates) as server:
        command = [
            program,
            f"--kubeconfig={server.kubeconfig('admin')}",
            "--leader-elect=false",
            "--authentication-skip-lookup=true",
            "--bind-address=127.0.0.1",
            f"--secure-port={free_port()}",
            f"--cert-dir={folder / 'scheduler'}",
        ]
        log = folder / "scheduler.log"
        with log.open("wb") as output:
            scheduler = subprocess.Popen(command, stdout=output, stderr=output)
            cluster = RealCluster(server, scheduler)
            try:
                yield cluster
            finally:
                cluster.resume_scheduler()
                scheduler.kill()
                scheduler.wait()
