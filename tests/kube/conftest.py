"""A simulated API server over real HTTP, watchers that hurry, and certificates made by openssl."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from podgpu.kube.config import ApiConfig
from podgpu.kube.reflector import Informer, ReflectorSettings
from tests.kube.api_server import SimulatedApiServer
from tests.nodes.clock import PATIENCE

PODS = "/api/v1/pods"
HURRY = ReflectorSettings(first_delay=0.01, max_delay=0.02, max_refused_delay=0.02, request_seconds=5.0)


def pod(name: str, node: str = "node-a", namespace: str = "team", **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": namespace, "labels": labels}, "spec": {"nodeName": node}}


def name_of(body: dict[str, Any]) -> str | None:
    return str(body["metadata"]["name"])


def eventually(true: Callable[[], object], within: float = PATIENCE) -> None:
    until = time.monotonic() + within
    while not true():
        assert time.monotonic() < until, "did not become true in time"
        time.sleep(0.002)


@pytest.fixture
def server() -> Iterator[SimulatedApiServer]:
    with SimulatedApiServer() as running:
        yield running


@pytest.fixture
def config(server: SimulatedApiServer) -> ApiConfig:
    return ApiConfig(server=server.url, origin="the test")


@pytest.fixture
def watch(config: ApiConfig) -> Iterator[Callable[..., Informer[Any]]]:
    made: list[Informer[Any]] = []

    def make(keep: Callable[[dict[str, Any]], Any] = name_of, path: str = PODS, **options: Any) -> Informer[Any]:
        params = options.pop("params", {})
        used = options.pop("config", config)
        made.append(Informer(used, path, params, keep, **({"settings": HURRY} | options)))
        return made[-1]

    yield make
    for watcher in made:
        watcher.close()


@dataclass(frozen=True)
class Certificates:
    """An authority, a server certificate for 127.0.0.1 and `api.test`, a client's, and an expired server's."""

    folder: Path

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def text(self, name: str) -> str:
        return (self.folder / name).read_text()

    def server_context(self, name: str = "server", ask_client: bool = False) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.path(f"{name}.crt"), self.path(f"{name}.key"))
        if ask_client:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.path("ca.crt"))
        return context


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    folder = tmp_path_factory.mktemp("certificates")
    _make_authority(folder, "ca")
    _make_authority(folder, "stranger")
    _make_certificate(folder, "server", "subjectAltName=IP:127.0.0.1,DNS:api.test")
    _make_certificate(folder, "elsewhere", "subjectAltName=DNS:api.test")
    _make_certificate(folder, "expired", "subjectAltName=IP:127.0.0.1", days=-1)
    _make_certificate(folder, "client", "extendedKeyUsage=clientAuth")
    return Certificates(folder)


def _openssl(folder: Path, *words: str) -> None:
    done = subprocess.run(["openssl", *words], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"this openssl cannot make the certificates: {done.stderr[-200:]}")


_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _make_authority(folder: Path, name: str) -> None:
    files = ("-keyout", f"{name}.key", "-out", f"{name}.crt")
    _openssl(folder, "req", "-x509", *_KEY, *files, "-subj", f"/CN={name}", "-days", "2")


def _make_certificate(folder: Path, name: str, extension: str, days: int = 2) -> None:
    (folder / f"{name}.ext").write_text(extension + "\n")
    _openssl(folder, "req", *_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
    signer = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", f"{name}.ext")
    _openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.crt", *signer, "-days", str(days))
