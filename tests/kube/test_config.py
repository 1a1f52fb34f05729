"""Tests how the API server is found: service account, merged kubeconfigs, and errors with file and
field.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import yaml

from podgpu.kube.config import NoApi, load_config
from tests.kube.conftest import SetVariables

PEM = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
EXEC = {"apiVersion": "client.authentication.k8s.io/v1", "command": "login"}
PEM64 = base64.b64encode(PEM.encode()).decode()


def kubeconfig(
    cluster: dict[str, Any] | None = None, user: dict[str, Any] | None = None, name: str = "lab"
) -> Any:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": name,
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "clusters": [
            {"name": name, "cluster": {"server": "https://10.0.0.1:6443/"} | (cluster or {})}
        ],
        "users": [{"name": name, "user": user or {}}],
    }


def write(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return str(path)


@pytest.fixture
def account(tmp_path: Path) -> Path:
    folder = tmp_path / "serviceaccount"
    folder.mkdir()
    for name, text in (("token", "secret-token"), ("ca.crt", PEM)):
        (folder / name).write_text(text)
    return folder


IN_POD = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
    "HOME": "/nowhere",
}


def test_a_pod_uses_its_service_account(account: Path, set_variables: SetVariables) -> None:
    set_variables(IN_POD)
    found = load_config(service_account=str(account))
    assert found.server == "https://10.96.0.1:443"
    assert found.token_file == str(account / "token")
    assert found.ca.file == str(account / "ca.crt")


def test_a_named_kubeconfig_wins_over_the_service_account(
    account: Path, tmp_path: Path, set_variables: SetVariables
) -> None:
    set_variables(IN_POD)
    file = write(tmp_path / "config", kubeconfig())
    assert load_config(file, service_account=str(account)).server == "https://10.0.0.1:6443"


def test_a_pod_without_a_token_gets_advice(tmp_path: Path, set_variables: SetVariables) -> None:
    set_variables(IN_POD)
    with pytest.raises(NoApi, match="automountServiceAccountToken"):
        load_config(service_account=str(tmp_path))


def test_several_files_are_merged_and_the_first_wins(
    tmp_path: Path, set_variables: SetVariables
) -> None:
    first, second = (
        kubeconfig({"server": "https://first"}),
        kubeconfig({"server": "https://second"}, {"token": "t"}),
    )
    first["users"] = []
    second["current-context"] = "other"
    files = [write(tmp_path / "a", first), str(tmp_path / "missing"), write(tmp_path / "b", second)]
    set_variables({"KUBECONFIG": ":".join(files)})
    merged = load_config(service_account=str(tmp_path))
    assert (merged.server, merged.token) == ("https://first", "t")


def test_paths_are_relative_to_the_file_that_has_them(tmp_path: Path) -> None:
    user = {"client-certificate": "pki/me.crt", "client-key": "/abs/me.key", "tokenFile": "token"}
    found = load_config(
        write(tmp_path / "config", kubeconfig({"certificate-authority": "ca.crt"}, user))
    )
    assert found.ca.file == str(tmp_path / "ca.crt")
    assert (found.certificate.file, found.key.file) == (str(tmp_path / "pki/me.crt"), "/abs/me.key")
    assert found.token_file == str(tmp_path / "token")


def test_an_exec_plugin_is_read_whole(tmp_path: Path) -> None:
    more = {
        "args": ["--cluster", "lab"],
        "env": [{"name": "PROFILE", "value": "ops"}],
        "interactiveMode": "IfAvailable",
    }
    plugin = EXEC | {"command": "./bin/login"} | more
    found = load_config(write(tmp_path / "config", kubeconfig(user={"exec": plugin}))).plugin
    assert found is not None
    assert (found.command, found.args) == (f"{tmp_path}/./bin/login", ("--cluster", "lab"))
    assert [(variable.name, variable.value) for variable in found.env or ()] == [("PROFILE", "ops")]


def test_the_representation_hides_credentials(tmp_path: Path) -> None:
    plugin = EXEC | {
        "args": ["--password=secret"],
        "env": [{"name": "PASSWORD", "value": "secret"}],
    }
    user = {
        "token": "secret",
        "client-certificate-data": PEM64,
        "client-key-data": PEM64,
        "exec": plugin,
    }
    shown = repr(load_config(write(tmp_path / "config", kubeconfig(user=user))))
    assert "secret" not in shown
    assert "AAAA" not in shown


@pytest.mark.parametrize("server", ["http://10.0.0.1:8080", "http://api.example"])
def test_a_token_is_not_sent_without_tls(tmp_path: Path, server: str) -> None:
    with pytest.raises(NoApi, match="plain HTTP"):
        load_config(write(tmp_path / "config", kubeconfig({"server": server}, {"token": "t"})))


@pytest.mark.parametrize(
    ("cluster", "user", "field"),
    [
        ({"server": "https://me:pw@host"}, {}, "clusters[lab].cluster.server"),
        ({"server": "https://[::1"}, {}, "clusters[lab].cluster.server"),
        ({"server": ["https://host"]}, {}, "clusters[lab].cluster.server: is not a text"),
        ({"proxy-url": "http://proxy"}, {}, "clusters[lab].cluster.proxy-url: is not supported"),
        (
            {"certificate-authority-data": "%%%"},
            {},
            "clusters[lab].cluster.certificate-authority-data",
        ),
        ({}, {"username": "me"}, "users[lab].user.username: is not supported"),
        ({}, {"auth-provider": {"name": "gcp"}}, "users[lab].user.auth-provider"),
        ({}, {"as": "admin"}, "users[lab].user.as: is not supported"),
        (
            {},
            {"exec": EXEC | {"apiVersion": "client.authentication.k8s.io/v1alpha1"}},
            "user.exec.apiVersion",
        ),
        (
            {},
            {"exec": EXEC | {"interactiveMode": "Always"}},
            "users[lab].user.exec.interactiveMode",
        ),
    ],
)
def test_errors_name_file_and_field(tmp_path: Path, cluster: Any, user: Any, field: str) -> None:
    file = write(tmp_path / "config", kubeconfig(cluster, user))
    with pytest.raises(NoApi) as caught:
        load_config(file)
    assert str(caught.value).startswith(file)
    assert field in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "current-context is not set"),
        ("[]", "expected `object`, got `array`: is it a kubeconfig?"),
        ("current-context: x", "contexts has no entry 'x'"),
        (
            "contexts: [{name: x, context: {cluster: y}}]\ncurrent-context: x",
            "clusters has no entry 'y'",
        ),
        ("contexts: [{name: x}]\ncurrent-context: x", "clusters has no entry ''"),
        (
            "current-context: !!python/object:os.system {}",
            "not YAML: could not determine a constructor",
        ),
    ],
)
def test_what_is_no_kubeconfig(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(NoApi) as caught:
        load_config(write(tmp_path / "config", content))
    assert message in str(caught.value)


def test_a_syntax_error_does_not_quote_the_line(tmp_path: Path) -> None:
    with pytest.raises(NoApi, match="line 3: not YAML") as caught:
        load_config(write(tmp_path / "config", "a: b\ntoken: 'secret-token\n"))
    assert "secret-token" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_names_that_look_like_numbers_or_flags_stay_names(tmp_path: Path) -> None:
    content = yaml.safe_dump(kubeconfig(user={"token": "t"}, name="on")).replace("'on'", "on")
    assert load_config(write(tmp_path / "config", content)).token == "t"
    content = yaml.safe_dump(kubeconfig(user={"token": "t"}, name="0123")).replace("'0123'", "0123")
    assert load_config(write(tmp_path / "config", content)).token == "t"
