"""Tests requests to a real HTTP server, TLS, and error messages."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from podgpu import __version__
from podgpu.errors import SourceError
from podgpu.kube.client import ApiClient, explain_status
from podgpu.kube.config import ApiConfig, ExecPlugin
from podgpu.kube.reflector import Informer
from podgpu.tls import Pem
from tests.certificates import Certificates
from tests.kube.api_server import SimulatedApiServer

from .conftest import HURRY, PODS, eventually, name_of, pod


def get(
    config: ApiConfig, path: str = PODS, params: dict[str, str] | None = None, **options: Any
) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        async with ApiClient(config, **options) as client:
            return await client.get(path, params)

    return asyncio.run(ask())


def failure(config: ApiConfig, path: str = PODS, **options: Any) -> SourceError:
    with pytest.raises(SourceError) as caught:
        get(config, path, **options)
    return caught.value


def test_a_list_with_a_selector(server: SimulatedApiServer, config: ApiConfig) -> None:
    server.put("pods", pod("here"), pod("there", node="node-b"))
    answer = get(config, params={"fieldSelector": "spec.nodeName=node-a"})
    assert [one["metadata"]["name"] for one in answer["items"]] == ["here"]
    assert server.requests[0].query == {"fieldSelector": "spec.nodeName=node-a"}
    assert server.requests[0].headers["User-Agent"] == f"podgpu/{__version__}"
    assert server.requests[0].headers["Accept-Encoding"] == "identity", (
        "compression would delay events"
    )
    assert "Authorization" not in server.requests[0].headers


def test_unauthorized(
    server: SimulatedApiServer, config: ApiConfig, caplog: pytest.LogCaptureFixture
) -> None:
    server.tokens = frozenset({"good"})
    with caplog.at_level(logging.DEBUG):
        error = failure(replace(config, token="bad-secret"))
    assert error.reason == "unauthorized"
    assert "the test" in str(error)
    assert "bad-secret" not in caplog.text + str(error) + repr(error.__cause__)
    assert len(server.requests) == 1  # no retry, because the token has not changed


async def test_a_new_token_is_read_after_the_old_one_is_rejected(
    server: SimulatedApiServer, config: ApiConfig, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("old")
    server.tokens = frozenset({"old"})
    async with ApiClient(replace(config, token_file=str(file))) as client:
        await client.get(PODS)
        server.tokens = frozenset({"new"})
        file.write_text("new")
        with pytest.raises(SourceError, match="status 401"):
            await client.get(PODS)
        await client.get(PODS)
    assert [request.token for request in server.requests] == ["old", "old", "new"]


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (403, "forbidden"),
        (404, "not_found"),
        (410, "gone"),
        (429, "server_error"),
        (503, "server_error"),
    ],
)
def test_refusals(server: SimulatedApiServer, config: ApiConfig, status: int, reason: str) -> None:
    server.refusal = (status, "the server's own words")
    error = failure(config)
    assert error.reason == reason
    assert "the server's own words" in str(error)
    assert ("add this permission" in str(error)) == (status == 403)


def test_a_refusal_that_is_no_status_is_quoted() -> None:
    """Such as of another server at this address."""
    error = explain_status(404, b'{"error": "no such\\npage"}', PODS, "the test")
    assert '({"error": "no such\\npage"})' in str(error)


@pytest.mark.parametrize("answer", [b"", b"<html>", b"[]", b"7", b"\xff", b"[" * 100_000])
def test_an_answer_that_is_no_object(
    server: SimulatedApiServer, config: ApiConfig, answer: bytes
) -> None:
    server.raw_answer = answer
    assert failure(config).reason == "bad_answer"


def config_for(server: SimulatedApiServer, certificates: Certificates, ca: str = "ca") -> ApiConfig:
    return ApiConfig(server.url, "the test", ca=Pem(file=certificates.path(f"{ca}.crt")))


@pytest.mark.parametrize(
    ("shown", "trusted", "message"),
    [
        ("server", "stranger", "unable to get local issuer certificate"),
        ("elsewhere", "ca", "IP address mismatch"),
        ("expired", "ca", "has expired"),
    ],
)
def test_certificate_errors_are_explained(
    certificates: Certificates, shown: str, trusted: str, message: str
) -> None:
    with SimulatedApiServer(certificates.server_context(shown)) as server:
        config = config_for(server, certificates, trusted)
        error = failure(config)
        assert error.reason == "tls"
        assert message in str(error)
        assert get(replace(config, ca=Pem(), verify=False))["items"] == []


def test_the_servers_name_can_be_overridden(certificates: Certificates) -> None:
    with SimulatedApiServer(certificates.server_context("elsewhere")) as server:
        config = config_for(server, certificates)
        assert get(replace(config, tls_server_name="api.test"))["items"] == []
        assert "Hostname mismatch" in str(failure(replace(config, tls_server_name="wrong.test")))


def test_a_client_certificate_is_shown(certificates: Certificates) -> None:
    with SimulatedApiServer(certificates.server_context(ask_client=True)) as server:
        config = config_for(server, certificates)
        certificate, key = (
            Pem(file=certificates.path("client.crt")),
            Pem(text=certificates.text("client.key")),
        )
        assert get(replace(config, certificate=certificate, key=key))["items"] == []
        assert failure(config).reason in ("tls", "unreachable")


def test_a_client_certificate_of_a_plugin_is_shown(
    certificates: Certificates, tmp_path: Path
) -> None:
    version = "client.authentication.k8s.io/v1"
    pair = {
        "clientCertificateData": certificates.text("client.crt"),
        "clientKeyData": certificates.text("client.key"),
    }
    script = tmp_path / "plugin.py"
    answer = {"apiVersion": version, "status": pair}
    script.write_text(f"import json\nprint(json.dumps({answer!r}))")
    plugin = ExecPlugin(sys.executable, version, ("-S", str(script)))
    with SimulatedApiServer(certificates.server_context(ask_client=True)) as server:
        config = config_for(server, certificates)
        assert get(replace(config, plugin=plugin))["items"] == []


@pytest.mark.parametrize(
    ("ca", "certificate", "key", "message"),
    [
        (Pem(text="no certificate"), Pem(), Pem(), "contains no usable certificates"),
        (Pem(file="/nowhere/ca.crt"), Pem(), Pem(), "the test: /nowhere/ca.crt does not exist"),
        (
            Pem(),
            Pem(text="no certificate"),
            Pem(text="no key"),
            "the client certificate and its key must be a certificate and a key in PEM",
        ),
    ],
)
def test_files_that_are_no_certificates(ca: Pem, certificate: Pem, key: Pem, message: str) -> None:
    config = ApiConfig("https://127.0.0.1:1", "the test", ca=ca, certificate=certificate, key=key)
    error = failure(config)
    assert error.reason == "tls"
    assert message in str(error)


def test_a_watcher_uses_a_replaced_ca(certificates: Certificates, tmp_path: Path) -> None:
    authority = tmp_path / "ca.crt"
    shutil.copy(certificates.path("stranger.crt"), authority)
    with SimulatedApiServer(certificates.server_context()) as server:
        server.put("pods", pod("one"))
        config = ApiConfig(server.url, "the test", ca=Pem(file=str(authority)))
        with closing(Informer(config, PODS, {}, name_of, settings=HURRY)) as watcher:
            eventually(lambda: watcher.error is not None)
            assert watcher.error is not None
            assert watcher.error.reason == "tls"
            shutil.copy(certificates.path("ca.crt"), authority)
            eventually(lambda: watcher.items() == ("one",))
            eventually(lambda: watcher.error is None)
