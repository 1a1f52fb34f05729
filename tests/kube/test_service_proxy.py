"""Reads a view through a simulated API server: finding the Service, logins and messages."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from podgpu.cli.main import run, run_kubectl
from podgpu.errors import SourceError, UsageError
from podgpu.kube.config import ApiConfig, NoApi, load_user_config
from podgpu.kube.service_proxy import KubeAddress, ServiceName, parse_service
from tests.certificates import Certificates
from tests.kube.api_server import SimulatedApiServer
from tests.kube.conftest import SetVariables
from tests.kube.test_config import kubeconfig, write
from tests.net import free_port
from tests.top.servers import answer, podgpu_server, serving

SEGMENT = "http:podgpu-cluster:9401"
PODS = {"api": "podgpu/v1", "pods": []}
FRAME = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}


def service(
    name: str = "podgpu-cluster",
    namespace: str = "gpus",
    component: str = "cluster",
    **port: Any,
) -> dict[str, Any]:
    labels = {"app.kubernetes.io/part-of": "podgpu", "app.kubernetes.io/component": component}
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {"ports": [{"name": "metrics", "port": 9401} | port]},
    }


@pytest.fixture
def server() -> Iterator[SimulatedApiServer]:
    with SimulatedApiServer() as running:
        yield running


@pytest.fixture
def config(server: SimulatedApiServer) -> ApiConfig:
    return ApiConfig(server=server.url, origin="the test", token="secret", namespace="own")


@pytest.fixture
def view() -> Iterator[str]:
    """Serves /api/v1/pods. Yields the URL."""
    with podgpu_server({"/api/v1/pods": PODS, "/health": b"OK"}) as running:
        yield f"http://{running.address}"


def read(config: ApiConfig, service: str = "", path: str = "api/v1/pods") -> bytes:
    address = KubeAddress(config, parse_service(service) if service else None)
    return address.open(5.0).get_blocking(path, {"x": "a b&c"})


def fail(config: ApiConfig, service: str = "", path: str = "api/v1/pods") -> SourceError:
    with pytest.raises(SourceError) as caught:
        read(config, service, path)
    assert "secret" not in str(caught.value)
    return caught.value


# Finding the Service


def test_the_service_is_found_by_the_labels_of_the_chart(
    server: SimulatedApiServer, config: ApiConfig, view: str
) -> None:
    other = service("web", "web")
    other["metadata"]["labels"] = {}
    server.put("services", service(port=80), service("demo", component="demo"), other)
    server.proxied = {"gpus/http:podgpu-cluster:80": view}
    assert json.loads(read(config)) == PODS
    last = server.requests[-1]
    assert last.path == "/api/v1/namespaces/gpus/services/http:podgpu-cluster:80/proxy/api/v1/pods"
    assert last.query == {"x": "a b&c"}
    assert last.headers["Accept-Encoding"] == "gzip"


def test_a_demo_is_used_if_there_is_nothing_else(
    server: SimulatedApiServer, config: ApiConfig, view: str
) -> None:
    demo = service("podgpu-demo", component="demo", port=9400)
    demo["spec"]["ports"].append({"name": "page", "port": 9401})
    server.put("services", demo)
    server.proxied = {"gpus/http:podgpu-demo:9401": view}
    assert json.loads(read(config)) == PODS


def test_the_protocol_of_the_port_counts(
    server: SimulatedApiServer, config: ApiConfig, view: str
) -> None:
    server.put("services", service(appProtocol="https"))
    server.proxied = {"gpus/https:podgpu-cluster:9401": view}
    assert json.loads(read(config)) == PODS


def test_of_several_services_one_must_be_chosen(
    server: SimulatedApiServer, config: ApiConfig, view: str
) -> None:
    server.put("services", service(), service("second", "b"))
    error = fail(config)
    assert (error.reason, str(error)) == (
        "ambiguous",
        "there are 2 views of podgpu: choose one of b/second, gpus/podgpu-cluster with --service",
    )
    server.proxied = {"b/http:second:9401": view}
    assert json.loads(read(config, "b/second")) == PODS


def test_no_service(server: SimulatedApiServer, config: ApiConfig) -> None:
    error = fail(config)
    assert error.reason == "not_found"
    assert str(error).startswith("this Kubernetes cluster has no Service of podgpu's cluster view:")


def test_the_context_namespace_is_listed_if_the_cluster_may_not_be(
    server: SimulatedApiServer, config: ApiConfig, view: str
) -> None:
    server.forbidden_paths = frozenset({"/api/v1/services"})
    server.put("services", service("mine", "own"), service())
    server.proxied = {"own/http:mine:9401": view}
    assert json.loads(read(config)) == PODS


@pytest.mark.parametrize("namespace", ["own", "monitoring", "podgpu"])
def test_usual_names_are_tried_if_services_may_not_be_listed(
    namespace: str, server: SimulatedApiServer, config: ApiConfig, view: str
) -> None:
    server.forbidden_paths = frozenset({"/api/v1/services", "/api/v1/namespaces/own/services"})
    server.proxied = {f"{namespace}/{SEGMENT}": view}
    assert json.loads(read(config)) == PODS


def test_a_view_that_answers_404_itself_is_found(
    server: SimulatedApiServer, config: ApiConfig
) -> None:
    server.forbidden_paths = frozenset({"/api/v1/services", "/api/v1/namespaces/own/services"})
    with podgpu_server({"/api/v1/pods": PODS}) as running:
        server.proxied = {f"own/{SEGMENT}": f"http://{running.address}"}
        assert json.loads(read(config)) == PODS


def test_the_role_is_for_the_first_namespace_that_may_have_the_service(
    server: SimulatedApiServer, config: ApiConfig
) -> None:
    server.forbidden_paths = frozenset({"/api/v1/services", "/api/v1/namespaces/own/services"})
    server.unproxied_namespaces = frozenset({"monitoring"})
    error = fail(config)
    assert error.reason == "forbidden"
    role, _ = yaml.safe_load_all(error.remedy.partition("\n\n")[2])
    assert role["metadata"]["namespace"] == "monitoring"


def test_no_usual_name_exists(server: SimulatedApiServer, config: ApiConfig) -> None:
    server.forbidden_paths = frozenset({"/api/v1/services", "/api/v1/namespaces/own/services"})
    text = (
        "none of the Services own/podgpu-cluster, monitoring/podgpu-cluster, podgpu/podgpu-cluster "
        "exists, and you may not list Services: name podgpu's Service with --service NAMESPACE/NAME"
    )
    assert str(fail(config)) == text


def test_a_service_is_found_once(server: SimulatedApiServer, config: ApiConfig, view: str) -> None:
    """`top` reads in another thread, with two clients."""
    server.put("services", service())
    server.proxied = {f"gpus/{SEGMENT}": view}
    address = KubeAddress(config)
    first, second = address.open(5.0), address.open(1.0)
    assert first.shown == second.shown == "Service gpus/podgpu-cluster"
    answers = [first.get_blocking("api/v1/pods")]
    thread = threading.Thread(target=lambda: answers.append(second.get_blocking("/api/v1/pods")))
    thread.start()
    thread.join()
    assert [json.loads(body) for body in answers] == [PODS, PODS]
    assert [request.path for request in server.requests].count("/api/v1/services") == 1


@pytest.mark.parametrize(
    ("text", "segment"),
    [
        ("a/b", "http:b:9401"),
        ("a/b:80", "http:b:80"),
        ("a/https:b:metrics", "https:b:metrics"),
        ("a/https:b", "https:b:9401"),
    ],
)
def test_names_of_services(text: str, segment: str) -> None:
    parsed = parse_service(text)
    assert (parsed.namespace, parsed.segment) == ("a", segment)


@pytest.mark.parametrize("text", ["", "b", "a/b/c", "a/ftp:b:1", "../b", "a/b?x", "A/b", "a/b:"])
def test_wrong_names_of_services(text: str) -> None:
    with pytest.raises(UsageError, match="write NAMESPACE/NAME"):
        parse_service(text)


# Messages


def test_a_user_without_permission_gets_a_role(
    server: SimulatedApiServer, config: ApiConfig
) -> None:
    server.may_proxy = False
    server.users = {"secret": {"username": "oidc:ann\n"}}
    error = fail(config, "gpus/podgpu-cluster")
    assert error.reason == "forbidden"
    assert str(error).startswith(
        "you may not read podgpu through the API server: verb get, resource services/proxy, "
        'namespace gpus (services "http:podgpu-cluster:9401" is forbidden: User "ann" cannot get'
    )
    role, binding = yaml.safe_load_all(error.remedy.partition("\n\n")[2])
    assert role["metadata"] == {"name": "podgpu-view", "namespace": "gpus"}
    assert role["rules"] == [
        {
            "apiGroups": [""],
            "resources": ["services/proxy"],
            "resourceNames": [SEGMENT],
            "verbs": ["get"],
        }
    ]
    assert binding["subjects"][0]["name"] == "oidc:ann\n"


def test_the_user_of_the_role_may_be_unknown(server: SimulatedApiServer, config: ApiConfig) -> None:
    server.may_proxy = False
    server.forbidden_paths = frozenset({"/api/v1/services", "/api/v1/namespaces/own/services"})
    error = fail(config)
    assert "tried own/podgpu-cluster, monitoring/podgpu-cluster, podgpu/podgpu" in str(error)
    [role, binding] = yaml.safe_load_all(error.remedy.partition("\n\n")[2])
    assert role["metadata"]["namespace"] == "own"
    assert binding["subjects"][0]["name"] == "NAME OF THE USER"


@pytest.mark.parametrize("chosen", ["", "gpus/podgpu-cluster"])
def test_credentials_that_the_api_server_rejects(
    chosen: str, server: SimulatedApiServer, config: ApiConfig
) -> None:
    server.tokens = frozenset({"another"})
    error = fail(config, chosen)
    assert error.reason == "unauthorized"
    text = f"the API server {server.url} rejected your credentials from the test (401): log in"
    assert str(error).startswith(text)


def test_a_service_that_does_not_exist(server: SimulatedApiServer, config: ApiConfig) -> None:
    error = fail(config, "gpus/podgpu-cluster")
    assert error.reason == "not_found"
    text = 'there is no Service gpus/podgpu-cluster (services "podgpu-cluster" not found): install'
    assert str(error).startswith(text)


def test_a_service_without_endpoints(server: SimulatedApiServer, config: ApiConfig) -> None:
    server.proxied = {f"gpus/{SEGMENT}": ""}
    error = fail(config, "gpus/podgpu-cluster")
    assert error.reason == "unreachable"
    text = "the Service gpus/podgpu-cluster does not answer (no endpoints available for service"
    assert str(error).startswith(text)
    assert "kubectl -n gpus get pods,endpoints" in str(error)


@pytest.mark.parametrize(
    ("head", "body", "reason", "message"),
    [
        (
            "401 Unauthorized",
            b'{"error": "log in"}',
            "unauthorized",
            "podgpu behind the Service gpus/podgpu-cluster asks for a login of its own (401)",
        ),
        (
            "404 Not Found",
            b'{"error": "too many GPUs\\nx"}',
            "http_404",
            r"Service gpus/podgpu-cluster answers 404: too many GPUs\nx",
        ),
        (
            "403 Forbidden",
            b'{"error": "several clusters"}',
            "http_403",
            "Service gpus/podgpu-cluster answers 403: several clusters",
        ),
        (
            "302 Found",
            b"<html>",
            "http_302",
            "Service gpus/podgpu-cluster answers 302: is it the Service of podgpu cluster?",
        ),
    ],
)
def test_errors_of_the_view_are_told_apart(
    head: str,
    body: bytes,
    reason: str,
    message: str,
    server: SimulatedApiServer,
    config: ApiConfig,
) -> None:
    reply = answer(body, f"HTTP/1.1 {head}\r\nConnection: close\r\n".encode())
    with serving(reply) as running:
        server.proxied = {f"gpus/{SEGMENT}": f"http://{running.address}"}
        error = fail(config, "gpus/podgpu-cluster")
    assert error.reason == reason
    assert str(error).startswith(message)


@pytest.mark.parametrize(
    ("status", "shown"),
    [
        ({"message": "etcd is\naway"}, "etcd is away"),
        ({"reason": "Timeout"}, "Timeout"),
        ({}, "no message"),
        ({"message": "x" * 700}, "x" * 600),
    ],
)
def test_other_errors_of_the_api_server(
    status: dict[str, str], shown: str, server: SimulatedApiServer, config: ApiConfig
) -> None:
    reply = answer(
        json.dumps({"kind": "Status"} | status).encode(),
        b"HTTP/1.1 504 Gateway Timeout\r\nConnection: close\r\n",
    )
    with serving(reply) as running:
        server.proxied = {f"gpus/{SEGMENT}": f"http://{running.address}"}
        error = fail(config, "gpus/podgpu-cluster")
    assert error.reason == "http_504"
    start = "the API server answers 504 for the Service gpus/podgpu-cluster: "
    assert str(error) == start + shown


@pytest.mark.parametrize("status", [429, 500])
def test_a_busy_api_server_is_one(
    server: SimulatedApiServer, config: ApiConfig, status: int
) -> None:
    server.refusal = (status, "too many requests, try again")
    error = str(fail(config))
    assert f"with status {status} (too many requests, try again)" in error
    assert "check that it is an API server" not in error


def test_an_answer_that_is_no_list(server: SimulatedApiServer, config: ApiConfig) -> None:
    server.raw_answer = b"<html>"
    error = fail(config)
    assert error.reason == "bad_answer"
    assert "(the answer is not a list of Services): check that it is an API server" in str(error)
    server.raw_answer = None
    server.refusal = 500, "etcd is away"
    assert "with status 500 (etcd is away)" in str(fail(config))


def test_no_api_server(tmp_path: Path) -> None:
    config = ApiConfig(server=f"http://127.0.0.1:{free_port()}", origin="the test")
    error = fail(config)
    assert error.reason == "unreachable"
    assert "nothing listens there" in str(error)


def test_a_certificate_that_is_not_trusted(certificates: Certificates, view: str) -> None:
    with SimulatedApiServer(certificates.server_context()) as server:
        server.proxied = {f"gpus/{SEGMENT}": view}
        document = kubeconfig({"server": server.url}, {"token": "secret"})
        folder = certificates.folder
        file = write(folder / "untrusted.yaml", document)
        error = fail(load_user_config(file), "gpus/podgpu-cluster")
        assert error.reason == "tls"
        assert "its certificate is not trusted" in str(error)

        for trust in (
            {"certificate-authority": certificates.path("ca.crt")},
            {"insecure-skip-tls-verify": True},
        ):
            document = kubeconfig({"server": server.url} | trust, {"token": "secret"})
            file = write(folder / "trusted.yaml", document)
            assert json.loads(read(load_user_config(file), "gpus/podgpu-cluster")) == PODS


@pytest.mark.parametrize("is_mac", [False, True])
def test_a_client_certificate(
    is_mac: bool, certificates: Certificates, view: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_mac:
        monkeypatch.delattr(os, "memfd_create")
    context = certificates.server_context(ask_client=True)
    with SimulatedApiServer(context) as server:
        server.proxied = {f"gpus/{SEGMENT}": view}
        cluster = {"server": server.url, "certificate-authority": certificates.path("ca.crt")}
        user = {
            "client-certificate": certificates.path("client.crt"),
            "client-key": certificates.path("client.key"),
        }
        file = write(certificates.folder / "pair.yaml", kubeconfig(cluster, user))
        assert json.loads(read(load_user_config(file), "gpus/podgpu-cluster")) == PODS
        file = write(certificates.folder / "without.yaml", kubeconfig(cluster))
        with pytest.raises(SourceError):
            read(load_user_config(file), "gpus/podgpu-cluster")


# The kubeconfig of a person


def test_the_kubeconfig_of_a_person_wins_over_the_service_account(
    tmp_path: Path, set_variables: SetVariables
) -> None:
    document = kubeconfig()
    document["contexts"][0]["context"]["namespace"] = "team"
    document["contexts"].append({"name": "other", "context": {"cluster": "lab", "user": "lab"}})
    file = write(tmp_path / "config", document)
    in_pod = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    set_variables({"KUBECONFIG": f"/nowhere:{file}", **in_pod})
    found = load_user_config()
    assert (found.server, found.namespace) == ("https://10.0.0.1:6443", "team")
    assert load_user_config(file, "other").namespace == ""


def test_the_kubeconfig_at_home(tmp_path: Path, set_variables: SetVariables) -> None:
    set_variables({"HOME": str(tmp_path)})
    (tmp_path / ".kube").mkdir()
    write(tmp_path / ".kube/config", kubeconfig())
    assert load_user_config().server == "https://10.0.0.1:6443"


def test_no_kubeconfig(tmp_path: Path, set_variables: SetVariables) -> None:
    set_variables({"HOME": str(tmp_path)})
    with pytest.raises(NoApi) as caught:
        load_user_config()
    text = f"there is no kubeconfig: {tmp_path}/.kube/config cannot be found: set $KUBECONFIG"
    assert str(caught.value).startswith(text)


def test_no_such_context(tmp_path: Path) -> None:
    file = write(tmp_path / "config", kubeconfig())
    with pytest.raises(NoApi) as caught:
        load_user_config(file, "prod")
    assert str(caught.value) == f"--context prod: {file} has no such context; it has lab"


def test_a_token_is_not_sent_without_tls(tmp_path: Path) -> None:
    document = kubeconfig({"server": "http://10.0.0.1"}, {"token": "secret"})
    with pytest.raises(NoApi, match="is plain HTTP"):
        load_user_config(write(tmp_path / "config", document))


# Credential plugins


def login(tmp_path: Path, server: SimulatedApiServer, script: str, mode: str = "") -> str:
    """Writes a plugin and the kubeconfig that runs it. Returns the kubeconfig."""
    program = tmp_path / "login"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    plugin = {"apiVersion": FRAME["apiVersion"], "command": str(program)}
    if mode:
        plugin["interactiveMode"] = mode
    return write(tmp_path / "config", kubeconfig({"server": server.url}, {"exec": plugin}))


def printing(token: str) -> str:
    return f"echo '{json.dumps(FRAME | {'status': {'token': token}})}'"


def test_a_plugin_logs_in_once_and_its_messages_are_shown(
    server: SimulatedApiServer, view: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server.tokens = frozenset({"made"})
    server.put("services", service())
    server.proxied = {f"gpus/{SEGMENT}": view}
    script = f"echo x >> {tmp_path}/runs; echo 'open https://login' >&2; {printing('made')}"
    config = load_user_config(login(tmp_path, server, script))
    client = KubeAddress(config).open(5.0)
    for _ in range(3):
        assert json.loads(client.get_blocking("api/v1/pods")) == PODS
    assert (tmp_path / "runs").read_text() == "x\n"
    assert capfd.readouterr().err == "open https://login\n"


def test_a_plugin_runs_again_after_its_token_is_rejected(
    server: SimulatedApiServer, view: str, tmp_path: Path
) -> None:
    server.proxied = {f"gpus/{SEGMENT}": view}
    script = f'echo x >> {tmp_path}/runs; T=token-$(wc -l < {tmp_path}/runs | tr -d " ")\n'
    script += 'echo "{\\"apiVersion\\": \\"client.authentication.k8s.io/v1\\", \\"status\\": '
    script += '{\\"token\\": \\"$T\\"}}"'
    server.tokens = frozenset({"token-1"})
    config = load_user_config(login(tmp_path, server, script))
    client = KubeAddress(config, parse_service("gpus/podgpu-cluster")).open(5.0)
    client.get_blocking("api/v1/pods")
    server.tokens = frozenset({"token-2"})
    with pytest.raises(SourceError, match="rejected your credentials"):
        client.get_blocking("api/v1/pods")
    assert json.loads(client.get_blocking("api/v1/pods")) == PODS


def test_a_plugin_that_fails_or_needs_a_terminal(
    server: SimulatedApiServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = load_user_config(login(tmp_path, server, "echo why >&2; exit 7"))
    error = fail(config)
    assert error.reason == "exec_plugin"
    assert str(error).endswith("/login failed with exit code 7")
    assert capfd.readouterr().err == "why\n"
    config = load_user_config(login(tmp_path, server, printing("t"), "Always"))
    assert str(fail(config)).endswith("/login needs a terminal (interactiveMode: Always)")


@pytest.mark.parametrize("mode", ["IfAvailable", "Always"])
def test_a_plugin_may_ask_on_the_terminal(
    mode: str, server: SimulatedApiServer, view: str, tmp_path: Path
) -> None:
    server.tokens = frozenset({"typed"})
    server.proxied = {f"gpus/{SEGMENT}": view}
    script = 'printf "Token: " >&2; read T; echo "{\\"apiVersion\\": '
    script += '\\"client.authentication.k8s.io/v1\\", \\"status\\": {\\"token\\": \\"$T\\"}}"'
    file = login(tmp_path, server, script, mode)
    command = [sys.executable, "-m", "podgpu", "pods", "--kube", "--kubeconfig", file]
    command += ["--service", "gpus/podgpu-cluster"]
    main_end, terminal = pty.openpty()
    with subprocess.Popen(
        command, stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        os.write(main_end, b"typed\n")
        out, err = process.communicate(timeout=60)
    os.close(main_end)
    os.close(terminal)
    assert (process.returncode, err) == (0, "Token: ")
    assert out == "No pod holds a GPU.\n"


# The commands


@pytest.fixture
def file(server: SimulatedApiServer, view: str, tmp_path: Path) -> str:
    server.put("services", service())
    server.proxied = {f"gpus/{SEGMENT}": view}
    return write(tmp_path / "config", kubeconfig({"server": server.url}))


def test_the_plugin_reads_the_kubeconfig(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_kubectl(["pods", "--kubeconfig", file]) == 0
    assert capsys.readouterr().out == "No pod holds a GPU.\n"
    assert run(["pods", "--kube", "--kubeconfig", file, "--context", "lab"]) == 0


MAC = """
import os, select, signal, socket
for module, names in (
    (os, ("memfd_create", "pidfd_open", "eventfd", "sched_getaffinity", "posix_fadvise")),
    (select, ("epoll",)),
    (socket, ("AF_NETLINK", "SO_PEERCRED")),
    (signal, ("pidfd_send_signal",)),
):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
# Python 3.13 chose its implementation by sched_getaffinity when it started.
os.process_cpu_count = os.cpu_count
from podgpu.__main__ import kubectl_main
kubectl_main()
"""
"""Runs the plugin without functions that only Linux has."""


@pytest.mark.parametrize("command", [["pods"], ["top", "--once"]])
def test_the_plugin_needs_nothing_that_only_linux_has(command: list[str], file: str) -> None:
    arguments = [sys.executable, "-c", MAC, *command, "--kubeconfig", file]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    if command == ["pods"]:
        assert (done.returncode, done.stdout) == (0, "No pod holds a GPU.\n")
    else:
        assert "Service gpus/podgpu-cluster answers 404: no such path" in done.stderr


def test_a_url_overrides_the_default_of_the_plugin(
    view: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_kubectl(["pods", "--url", view]) == 0
    assert capsys.readouterr().out == "No pod holds a GPU.\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pods", "--kube", "--url", "x:1"], "--kube and --url cannot be combined: give one of"),
        (["pods", "--context", "x"], "--context needs --kube"),
        (["pods", "--context", "x", "--url", "x:1"], "--context needs --kube"),
        (["pods", "--service", "a/b"], "--service needs --kube"),
        (["top", "--kube", "--cluster", "x:1"], "--kube and --cluster cannot be combined"),
        (["top", "--kube", "-d", "g"], "--devices is for the local driver and cannot be combined"),
        (["top", "--kube", "--service", "x"], "--service x: write NAMESPACE/NAME"),
    ],
)
def test_wrong_options(
    arguments: list[str], message: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--kube" in arguments:
        arguments = [*arguments, "--kubeconfig", file]
    assert run(arguments) == 2
    assert capsys.readouterr().err.startswith(f"podgpu: {message}")


def test_the_role_is_printed_below_the_message(
    file: str, server: SimulatedApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.may_proxy = False
    assert run_kubectl(["top", "--kubeconfig", file]) == 1
    message, _, remedy = capsys.readouterr().err.partition("\n\n")
    assert message.startswith("podgpu: you may not read podgpu through the API server")
    assert "\n" not in message
    assert remedy.startswith("An administrator can allow it with `kubectl apply -f FILE`:\n\napiV")


@pytest.mark.parametrize("command", ["top", "pods", "cost", "report", "savings", "why", "waste"])
def test_the_help_of_the_plugin_is_about_the_plugin(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_kubectl([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert "localhost" not in out, "the plugin reads through the API server"
    examples = out.partition("Examples:")[2]
    assert examples.count("$ ") == examples.count("$ kubectl podgpu ") > 0
    assert "--kube" not in examples
    assert run([command, "--help"]) == 0
    assert "--kube" in capsys.readouterr().out


def test_commands_of_a_node_are_not_commands_of_the_plugin(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_kubectl(["exporter"]) == 2
    text = "podgpu: 'exporter' runs on a node or a server: use podgpu exporter (see kubectl podgpu"
    assert capsys.readouterr().err.startswith(text)
    assert run_kubectl(["--help"]) == 0
    listed = capsys.readouterr().out
    assert "Usage: kubectl podgpu" in listed
    assert "exporter" not in listed


def test_the_segment_is_that_of_a_role() -> None:
    named = ServiceName("gpus", "podgpu-cluster")
    assert named.path == f"/api/v1/namespaces/gpus/services/{SEGMENT}/proxy/"
