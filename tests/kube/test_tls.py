"""TLS with the API server: trusted CAs, client certificates, and errors."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from podgpu.kube.config import ApiConfig
from podgpu.kube.reflector import Informer
from podgpu.tls import Pem
from tests.certificates import Certificates
from tests.kube.api_server import SimulatedApiServer

from .conftest import HURRY, PODS, eventually, name_of, pod
from .test_client import failure, get


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
def test_certificate_errors_are_explained(certificates: Certificates, shown: str, trusted: str, message: str) -> None:
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
        certificate, key = Pem(file=certificates.path("client.crt")), Pem(text=certificates.text("client.key"))
        assert get(replace(config, certificate=certificate, key=key))["items"] == []
        assert failure(config).reason in ("tls", "unreachable")


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
        with Informer(config, PODS, {}, name_of, settings=HURRY) as watcher:
            eventually(lambda: watcher.error is not None)
            assert watcher.error is not None
            assert watcher.error.reason == "tls"
            shutil.copy(certificates.path("ca.crt"), authority)
            eventually(lambda: watcher.items() == ("one",))
            eventually(lambda: watcher.error is None)
