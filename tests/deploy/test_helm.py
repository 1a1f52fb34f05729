"""`helm install`, `upgrade` and `uninstall` of the chart by the real helm, on an API server that
only stores objects.

No controller and no kubelet runs, so a hook that needs a pod would never finish.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from deploy.render import CHART, NAMESPACE, ROOT, run_helm
from tests.net import QuietHandler, serving

KINDS = {
    "v1": (
        "Secret",
        "ServiceAccount",
        "Service",
        "ConfigMap",
        "Namespace",
        "PersistentVolumeClaim",
    ),
    "apps/v1": ("Deployment", "DaemonSet"),
    "batch/v1": ("Job",),
    "rbac.authorization.k8s.io/v1": ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"),
    "policy/v1": ("PodDisruptionBudget",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "storage.k8s.io/v1": ("StorageClass",),
    "apiregistration.k8s.io/v1": ("APIService",),
}
CLUSTER_WIDE = {"ClusterRole", "ClusterRoleBinding", "APIService", "Namespace", "StorageClass"}
VERBS = ["create", "delete", "get", "list", "patch", "update"]
IN_NAMESPACE = ["--namespace", NAMESPACE]
AUTOSCALE = ["--set", "autoscale.enabled=true", "--set", "cluster.enabled=true"]


def _plural(kind: str) -> str:
    if kind.endswith("ss"):
        return f"{kind}es"
    return f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"


class _Store(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.deleted: list[str] = []


class _Handler(QuietHandler):
    """Stores JSON, and helm's release Secrets as protobuf."""

    server: _Store

    def _answer(self, body: bytes | dict[str, Any], status: int = 200) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        kind = "vnd.kubernetes.protobuf" if content.startswith(b"k8s") else "json"
        self.send_response(status)
        self.send_header("Content-Type", f"application/{kind}")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if (found := _discovery(path)) is not None:
            self._answer(found)
        elif path in self.server.objects:
            self._answer(self.server.objects[path])
        elif path.endswith("/secrets"):
            self._answer(
                _secret_list(
                    [body for name, body in self.server.objects.items() if name.startswith(path)]
                )
            )
        else:
            self._answer(
                {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}, 404
            )

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        is_json = body.startswith(b"{")
        name = (
            json.loads(body)["metadata"]["name"]
            if is_json
            else re.findall(rb"sh\.helm\.[\w.-]+", body)[0].decode()
        )
        self.server.objects[f"{self.path.partition('?')[0]}/{name}"] = body
        self._answer(body, 201)

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.objects[self.path.partition("?")[0]] = body
        self._answer(body)

    def do_PATCH(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(self.server.objects[self.path.partition("?")[0]])

    def do_DELETE(self) -> None:
        path = self.path.partition("?")[0]
        self.server.deleted.append(path)
        if self.server.objects.pop(path, None) is None:
            self._answer(
                {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}, 404
            )
        else:
            self._answer({"kind": "Status", "status": "Success"})


def _secret_list(secrets: Sequence[bytes]) -> bytes:
    """Encodes a SecretList. Each Secret is wrapped in `runtime.Unknown`."""
    items = [_decode_message(secret.removeprefix(b"k8s\0"))[2] for secret in secrets]
    listed = b"".join(_encode_field(2, item) for item in items)
    kind = _encode_field(1, b"v1") + _encode_field(2, b"SecretList")
    return b"k8s\0" + _encode_field(1, kind) + _encode_field(2, listed)


def _encode_field(number: int, content: bytes) -> bytes:
    length, size = bytearray(), len(content)
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + content


def _decode_message(message: bytes) -> dict[int, bytes]:
    """Decodes a message whose fields are all bytes."""
    fields: dict[int, bytes] = {}
    position = 0
    while position < len(message):
        number, position = message[position] >> 3, position + 1
        size = shift = 0
        while message[position] > 127:
            size |= (message[position] & 127) << shift
            position, shift = position + 1, shift + 7
        size |= message[position] << shift
        position += 1
        fields[number], position = message[position : position + size], position + size
    return fields


def _discovery(path: str) -> dict[str, Any] | None:
    groups = [version for version in KINDS if "/" in version]
    if path == "/version":
        return {"major": "1", "minor": "33", "gitVersion": "v1.33.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        versions = [{"groupVersion": version, "version": "v1"} for version in groups]
        rows = [
            {"name": v["groupVersion"].partition("/")[0], "versions": [v], "preferredVersion": v}
            for v in versions
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": rows}
    version = (
        path.removeprefix("/apis/") if path.startswith("/apis/") else path.removeprefix("/api/")
    )
    if version not in KINDS:
        return None
    resources = [
        {
            "name": _plural(kind).lower(),
            "kind": kind,
            "namespaced": kind not in CLUSTER_WIDE,
            "verbs": VERBS,
        }
        for kind in KINDS[version]
    ]
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": version,
        "resources": resources,
    }


@contextmanager
def _store(folder: Path) -> Iterator[_Store]:
    server = _Store()
    config = {
        "current-context": "test",
        "clusters": [
            {"name": "test", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
        ],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": ""}}],
    }
    (folder / "kubeconfig").write_text(json.dumps(config), encoding="utf-8")
    with serving(server):
        yield server


def _helm(folder: Path, *arguments: str) -> None:
    done = run_helm(*arguments, "--kubeconfig", str(folder / "kubeconfig"))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("how", [[], ["--no-hooks"]], ids=["plain", "no hooks"])
def test_uninstall_needs_no_pod_and_leaves_nothing(how: list[str], tmp_path: Path) -> None:
    """An APIService without a backend blocks the deletion of every namespace, so it must be deleted
    first.
    """
    with _store(tmp_path) as store:
        _helm(
            tmp_path,
            "install",
            "podgpu",
            str(CHART),
            "--disable-openapi-validation",
            *AUTOSCALE,
            *IN_NAMESPACE,
        )
        installed = [path for path in store.objects if "/secrets/" not in path]
        assert len(installed) > 15
        _helm(tmp_path, "uninstall", "podgpu", "--timeout", "20s", *how, *IN_NAMESPACE)
        assert store.objects == {}
    services = [n for n, path in enumerate(store.deleted) if "/apiservices/" in path]
    others = [
        n for n, path in enumerate(store.deleted) if "/secrets/" not in path and n not in services
    ]
    assert len(services) == 2
    assert max(services) < min(others)


@pytest.mark.parametrize("is_default", [True, False])
def test_without_a_default_storage_class_no_claim_stays_pending(
    is_default: bool, tmp_path: Path
) -> None:
    annotation = "storageclass.kubernetes.io/is-default-class"
    fast = {
        "kind": "StorageClass",
        "apiVersion": "storage.k8s.io/v1",
        "metadata": {"name": "fast", "annotations": {annotation: str(is_default).lower()}},
    }
    classes = {"kind": "StorageClassList", "apiVersion": "storage.k8s.io/v1", "items": [fast]}
    command = ["install", "podgpu", str(CHART), "--disable-openapi-validation"]
    values = ["--set", "cluster.profile=full", *IN_NAMESPACE]
    with _store(tmp_path) as store:
        store.objects["/api/v1/namespaces/kube-system"] = (
            b'{"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": "kube-system"}}'
        )
        store.objects["/apis/storage.k8s.io/v1/storageclasses"] = json.dumps(classes).encode()
        kubeconfig = ["--kubeconfig", str(tmp_path / "kubeconfig")]
        done = run_helm(*command, *values, *kubeconfig)
        assert done.returncode == 0, done.stderr
        claims = [path for path in store.objects if "persistentvolumeclaims" in path]
        (deployment,) = [
            body
            for path, body in store.objects.items()
            if path.endswith("podgpu-cluster") and "deployments" in path
        ]
    assert bool(claims) is is_default
    assert ("no default StorageClass" in done.stdout) is not is_default
    assert (b"no default StorageClass" in deployment) is not is_default
    assert (b"emptyDir" in deployment) is not is_default


def test_a_missing_secret_of_keda_is_refused(tmp_path: Path) -> None:
    """Its pods would not start, and the APIServices would then block namespaces."""
    values = ["--set", "autoscale.enabled=true,autoscale.keda.secretName=podgpu-keda-server"]
    command = ["install", "podgpu", str(CHART), "--disable-openapi-validation", *values]
    place = [*IN_NAMESPACE, "--kubeconfig", str(tmp_path / "kubeconfig")]
    with _store(tmp_path) as store:
        store.objects[f"/api/v1/namespaces/{NAMESPACE}"] = b'{"kind": "Namespace"}'
        done = run_helm(*command, *place)
        missing = f"there is no Secret podgpu-keda-server in the namespace {NAMESPACE}"
        assert missing in done.stderr
        secret = {"kind": "Secret", "apiVersion": "v1", "metadata": {"name": "podgpu-keda-server"}}
        path = f"/api/v1/namespaces/{NAMESPACE}/secrets/podgpu-keda-server"
        store.objects[path] = json.dumps(secret).encode()
        done = run_helm(*command, *place)
        assert "there is no Secret" not in done.stderr
        assert any(name.endswith("/deployments/podgpu-autoscale") for name in store.objects)


def _commands(page: str) -> list[list[str]]:
    """Returns the arguments after the chart name of each `helm upgrade --install podgpu` command on
    a page.
    """
    text = (
        (ROOT / page)
        .read_text(encoding="utf-8")
        .replace("\\\n", " ")
        .replace("--create-namespace", "")
    )
    return [
        shlex.split(line)
        for line in re.findall(r"^\$ helm upgrade --install podgpu \S+ (.+)$", text, re.MULTILINE)
    ]


@pytest.mark.parametrize("page", ["docs/hook.md", "docs/holders.md"])
def test_documented_upgrades_keep_the_cluster_view(page: str, tmp_path: Path) -> None:
    """The README's command enables the cluster view. The commands of other pages are run after
    it.
    """
    (first,) = _commands("README.md")
    with _store(tmp_path) as store:
        for arguments in (first, *_commands(page)):
            _helm(
                tmp_path,
                "upgrade",
                "--install",
                "podgpu",
                str(CHART),
                "--disable-openapi-validation",
                *arguments,
            )
        assert _commands(page)
        assert any(path.endswith("/deployments/podgpu-cluster") for path in store.objects)
