"""Fixtures: a simulated API server over real HTTP, and informers with short delays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from podgpu.kube.config import ApiConfig
from podgpu.kube.reflector import Informer, ReflectorSettings
from tests.kube.api_server import SimulatedApiServer
from tests.nodes.clock import wait_until

PODS = "/api/v1/pods"
eventually = wait_until
HURRY = ReflectorSettings(
    first_delay=0.01, max_delay=0.02, max_refused_delay=0.02, request_seconds=5.0
)


def pod(name: str, node: str = "node-a", namespace: str = "team", **labels: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {"nodeName": node},
    }


def name_of(body: dict[str, Any]) -> str | None:
    return str(body["metadata"]["name"])


SetVariables = Callable[[Mapping[str, str]], None]


@pytest.fixture
def set_variables(monkeypatch: pytest.MonkeyPatch) -> SetVariables:
    """Returns a function that sets the variables from which an API server is found."""

    def set_all(variables: Mapping[str, str]) -> None:
        for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_all


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

    def make(
        keep: Callable[[dict[str, Any]], Any] = name_of, path: str = PODS, **options: Any
    ) -> Informer[Any]:
        params = options.pop("params", {})
        used = options.pop("config", config)
        made.append(Informer(used, path, params, keep, **({"settings": HURRY} | options)))
        return made[-1]

    yield make
    for watcher in made:
        watcher.close()
