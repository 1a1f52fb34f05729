"""`kubectl podgpu` with a real kubectl, kube-apiserver and RBAC, and a running `podgpu demo`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml

from podgpu.web.app import Address
from tests.certificates import Certificates
from tests.cli.view_server import served_cluster
from tests.kube.real_api_server import (
    RealApiServer,
    find_program,
    own_address,
    real_api_server,
)
from tests.net import free_port, read_if_ready
from tests.nodes.clock import wait_until
from tests.process import PODGPU

PLUGIN = f"""#!{sys.executable}
from podgpu.__main__ import kubectl_main

kubectl_main()
"""


def role(namespace: str, user: str, segment: str) -> list[Any]:
    api = "rbac.authorization.k8s.io"
    metadata = {"namespace": namespace, "name": "podgpu-view"}
    rule = {"apiGroups": [""], "resources": ["services/proxy"], "verbs": ["get"]}
    return [
        {
            "apiVersion": f"{api}/v1",
            "kind": "Role",
            "metadata": metadata,
            "rules": [rule | {"resourceNames": [segment]}],
        },
        {
            "apiVersion": f"{api}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": api, "kind": "Role", "name": "podgpu-view"},
            "subjects": [{"apiGroup": api, "kind": "User", "name": user}],
        },
    ]


@dataclass(frozen=True)
class Lab:
    server: RealApiServer
    view: str  # URL of the demo
    bin: Path  # folder with the plugin

    def run(self, kubeconfig: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs `kubectl podgpu ARGUMENTS`, with the plugin in PATH."""
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            [find_program("kubectl"), "podgpu", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PATH": path, "KUBECONFIG": kubeconfig, "HOME": str(self.bin)},
        )

    def show(self, kubeconfig: str, *arguments: str) -> str:
        done = self.run(kubeconfig, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def fail(self, user: str, *arguments: str) -> str:
        done = self.run(self.server.kubeconfig(user), *arguments)
        assert done.returncode == 1, done.stdout + done.stderr
        return done.stderr

    def fetch(self, path: str) -> Any:
        with urlopen(f"{self.view}/{path}") as answer:
            return json.load(answer)


@contextmanager
def demo(address: str, port: int) -> Iterator[str]:
    """Runs `podgpu demo` and yields the URL of its cluster view."""
    command = [*PODGPU, "demo", "--calm", "-a", f"127.0.0.1:{free_port()}"]
    command += ["--cluster-address", f"{address}:{port}"]
    url = f"http://{address}:{port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as popen:
        try:
            wait_until(lambda: _has_pods(url), "the demo has pods")
            yield url
        finally:
            popen.terminate()


def _has_pods(url: str) -> bool:
    answer = read_if_ready(f"{url}/api/v1/pods")
    return answer is not None and len(json.loads(answer)["pods"]) > 10


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("kubectl")
    plugins = folder / "bin"
    plugins.mkdir()
    plugin = plugins / "kubectl-podgpu"
    plugin.write_text(PLUGIN, encoding="utf-8")
    plugin.chmod(0o755)
    address, port = own_address(), free_port()
    with real_api_server(folder, certificates) as server, demo(address, port) as view:
        for namespace in ("monitoring", "empty"):
            server.kubectl("create", "namespace", namespace)
        server.add_service("monitoring", "podgpu-cluster", port)
        server.apply(*role("monitoring", "allowed", "http:podgpu-cluster:9401"))
        yield Lab(server, view, plugins)


def test_a_user_who_may_only_use_the_proxy(lab: Lab) -> None:
    """He may not even list Services: podgpu finds its Service by the usual name."""
    config = lab.server.kubeconfig("allowed")
    listing = subprocess.run(
        [find_program("kubectl"), "get", "services", "-n", "monitoring"],
        env=os.environ | {"KUBECONFIG": config},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "cannot list resource" in listing.stderr
    pods = lab.show(config, "pods")
    assert "research/llm-train-0" in pods
    for arguments in (
        ["top"],
        ["why"],
        ["waste"],
        ["cost"],
        ["savings", "--range", "24h"],
        ["report"],
        [],
    ):
        text = lab.show(config, *arguments)
        assert "research" in text or text.startswith("Savings, "), arguments


@pytest.mark.parametrize("arguments", [[], ["--service", "monitoring/podgpu-cluster"]])
def test_a_user_who_may_not(lab: Lab, arguments: list[str]) -> None:
    text = lab.fail("denied", "pods", *arguments)
    message, _, remedy = text.partition("\n\n")
    assert message.startswith("podgpu: you may not read podgpu through the API server: verb get")
    assert "resource services/proxy" in message
    assert "monitoring" in message
    assert "Traceback" not in text
    objects = list(yaml.safe_load_all(remedy.partition("\n\n")[2]))
    assert objects == role("monitoring", "denied", "http:podgpu-cluster:9401")


def test_the_printed_role_lets_the_user_in(lab: Lab) -> None:
    lab.server.kubectl("create", "namespace", "later")
    try:
        remedy = lab.fail("denied", "top", "--service", "later/podgpu-cluster").partition("FILE`:")
        lab.server.kubectl("apply", "-f", "-", text=remedy[2])
        text = lab.fail("denied", "top", "--service", "later/podgpu-cluster")
        assert "there is no Service later/podgpu-cluster" in text
    finally:
        lab.server.kubectl("delete", "namespace", "later", "--wait=false")


def test_an_administrator_finds_the_service_by_its_labels(lab: Lab) -> None:
    lab.server.add_service("empty", "other", int(lab.view.rpartition(":")[2]))
    try:
        text = lab.fail("admin", "pods")
        assert "there are 2 views of podgpu: choose one of empty/other, monitoring/podgpu" in text
        admin = lab.server.kubeconfig("admin")
        assert "llm-train-0" in lab.show(admin, "pods", "--service", "empty/other")
    finally:
        lab.server.kubectl("delete", "service", "other", "-n", "empty")
    assert "llm-train-0" in lab.show(lab.server.kubeconfig("admin"), "pods")


def test_a_service_without_endpoints(lab: Lab) -> None:
    lab.server.add_service("empty", "asleep", 1, labels={})
    lab.server.kubectl("delete", "endpointslice", "asleep", "-n", "empty")
    text = lab.fail("admin", "pods", "--service", "empty/asleep")
    assert "the Service empty/asleep does not answer (no endpoints available" in text
    assert "kubectl -n empty get pods" in text


def test_a_service_whose_pod_does_not_listen(lab: Lab) -> None:
    lab.server.add_service("empty", "closed", free_port(), labels={})
    text = lab.fail("admin", "pods", "--service", "empty/closed")
    assert "the Service empty/closed does not answer (error trying to reach service" in text
    text = lab.fail("admin", "pods", "--service", "empty/closed:80")
    assert "no service port" in text


def test_wrong_credentials(lab: Lab) -> None:
    config = lab.server.kubeconfig("allowed", token="wrong-secret")
    done = lab.run(config, "pods")
    assert done.returncode == 1
    assert "rejected your credentials" in done.stderr
    assert "wrong-secret" not in done.stderr


def test_a_client_certificate(lab: Lab, certificates: Certificates) -> None:
    files = {
        "client-certificate": certificates.path("client.crt"),
        "client-key": certificates.path("client.key"),
    }
    done = lab.run(lab.server.kubeconfig("client", **files), "pods")
    assert done.returncode == 1
    assert "resource services/proxy" in done.stderr
    assert 'name: "client"' in done.stderr
    lab.server.apply(*role("monitoring", "client", "http:podgpu-cluster:9401"))
    try:
        text = lab.show(lab.server.kubeconfig("client", **files), "pods")
        assert "llm-train-0" in text
    finally:
        lab.server.apply(*role("monitoring", "allowed", "http:podgpu-cluster:9401"))


def test_an_exec_plugin(lab: Lab, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    login = tmp_path / "login"
    credential = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {"token": "token-of-allowed"},
    }
    script = f"#!/bin/sh\necho x >> {runs}\necho 'open https://login' >&2\ncat <<E\n"
    login.write_text(f"{script}{json.dumps(credential)}\nE\n", encoding="utf-8")
    login.chmod(0o755)
    exec_plugin = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": str(login),
        "interactiveMode": "IfAvailable",
    }
    config = lab.server.kubeconfig("exec", exec=exec_plugin)
    done = lab.run(config, "report", "--range", "24h")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "open https://login\n"
    assert runs.read_text() == "x\n", "several requests need one login"


@pytest.mark.parametrize("config", [None, {"audience": "gpus", "pinned": True}])
def test_a_plugin_gets_what_kubectl_gives_it(lab: Lab, tmp_path: Path, config: Any) -> None:
    login = tmp_path / "login"
    status = {"apiVersion": "client.authentication.k8s.io/v1", "status": {"token": "no"}}
    script = (
        f"#!/bin/sh\necho \"$KUBERNETES_EXEC_INFO\" >> {tmp_path}/info\necho '{json.dumps(status)}'"
    )
    login.write_text(f"{script}\n", encoding="utf-8")
    login.chmod(0o755)
    plugin = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "command": str(login),
        "interactiveMode": "IfAvailable",
        "provideClusterInfo": True,
    }
    file = Path(lab.server.kubeconfig("info", exec=plugin))
    document = yaml.safe_load(file.read_text(encoding="utf-8"))
    if config is not None:
        extension = {"name": "client.authentication.k8s.io/exec", "extension": config}
        document["clusters"][0]["cluster"]["extensions"] = [extension]
    file.write_text(yaml.safe_dump(document), encoding="utf-8")

    subprocess.run(
        [find_program("kubectl"), "get", "namespaces"],
        env=os.environ | {"KUBECONFIG": str(file)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    by_kubectl = (tmp_path / "info").read_text().splitlines()
    (tmp_path / "info").unlink()
    assert "rejected your credentials" in lab.run(str(file), "pods").stderr
    by_podgpu = (tmp_path / "info").read_text().splitlines()
    assert json.loads(by_podgpu[0]) == json.loads(by_kubectl[0])


def test_the_figures_are_those_of_the_view(lab: Lab) -> None:
    """Each command prints the same through kubectl and by URL, as tables and as JSON."""
    config = lab.server.kubeconfig("admin")
    with served_cluster(Address(own_address(), 0)) as url:
        lab.server.add_service("empty", "still", int(url.rpartition(":")[2]), labels={})
        through = ("--service", "empty/still")
        for arguments in (
            ("top",),
            ("top", "--json"),
            ("pods",),
            ("pods", "-o", "json"),
            ("waste",),
            ("cost",),
            ("cost", "--by", "owner"),
        ):
            shown = lab.show(config, *arguments, *through)
            assert _without_times(shown) == _without_times(lab.show("", *arguments, "--url", url))
        with urlopen(f"{url}/api/v1/view") as answer:
            assert json.loads(lab.show(config, "top", "--json", *through)) == json.load(answer)


def _without_times(text: str) -> str:
    """Removes the period of a bill, which ends when the command runs."""
    return re.sub(r", \d\S+Z to \S+Z", "", text)
