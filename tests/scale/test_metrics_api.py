"""Responses of the custom metrics API over real HTTPS.

Clients are the API server's front proxy, and others.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from podgpu.scale.metrics_api import (
    FrontProxy,
    MetricsApi,
    format_quantity,
    issue,
    parse_front_proxy,
)
from podgpu.tls import Pem
from podgpu.web.app import Address, Listener, listening
from podgpu.web.connections import ConnectionLimits
from tests.certificates import Certificates
from tests.scale.scenes import Stage, busy, gpu, holder, pod

CUSTOM = "/apis/custom.metrics.k8s.io"
V2 = f"{CUSTOM}/v1beta2"


def get(stage: Stage, *paths: str, method: str = "GET") -> list[tuple[int, Any]]:
    """Sends a request without TLS. The caller is not checked."""

    async def run() -> list[tuple[int, Any]]:
        app = MetricsApi(stage.store, *issue("api.test", "test")[1:], FrontProxy).application()
        answers = []
        async with (
            listening(Listener(app, Address("127.0.0.1", 0)), ConnectionLimits()) as bound,
            aiohttp.ClientSession() as session,
        ):
            for path in paths:
                async with session.request(method, URL(bound.url + path, encoded=True)) as answer:
                    answers.append((answer.status, json.loads(await answer.read())))
        return answers

    return asyncio.run(run())


def cluster() -> Stage:
    """serving/a and b run on n1 and n2 (half and fully busy).

    serving/web has no GPU. other/x runs on n2.
    """
    stage = Stage(
        [
            pod("a"),
            pod("b", node="n2"),
            pod("web", asks=False),
            pod("x", namespace="other", owner="", node="n2"),
        ]
    )
    stage.turns(
        4,
        n1=(
            gpu(
                0, holder("a", utilization=0.5), utilization=0.5, power_watts=400.25, measured=50.0
            ),
        ),
        n2=(
            gpu(0, holder("b", utilization=1.0), uuid="GPU-b", utilization=1.0, measured=100.0),
            gpu(
                1,
                holder("x", namespace="other", utilization=0.1),
                uuid="GPU-x",
                utilization=0.1,
                measured=10.0,
            ),
        ),
    )
    stage.now += 6.0
    return stage


WORKLOAD = "namespaces/serving/deployments.apps/inference/gpu_utilization?metricLabelSelector="


def test_values() -> None:
    values = {
        "namespaces/serving/pods/*/gpu_utilization?labelSelector=app%3Dinference": {
            "a": "50",
            "b": "100",
        },
        "namespaces/serving/pods/%2A/gpu_utilization": {"a": "50", "b": "100"},
        "namespaces/serving/pods/a/gpu_power": {"a": "400250m"},
        "namespaces/serving/metrics/gpu_utilization": {"serving": "75"},
        "namespaces/serving/metrics/avg_GPU_utilization": {"serving": "75"},
        f"{WORKLOAD}aggregate%3Dmax": {"inference": "100"},
        f"{WORKLOAD}aggregate%3Dp50,window%3D30s": {"inference": "75"},
    }
    answers = get(cluster(), *(f"{V2}/{path}" for path in values))
    found = [
        {item["describedObject"]["name"]: item["value"] for item in body["items"]}
        for _, body in answers
    ]
    assert found == list(values.values())


def test_both_versions_with_the_metrics_selector() -> None:
    path = "namespaces/serving/pods/a/gpu_utilization?metricLabelSelector=window%3D30s,missing%3Dleave-out"
    (_, old), (_, new) = get(cluster(), f"{CUSTOM}/v1beta1/{path}", f"{V2}/{path}")
    selector = {"matchLabels": {"window": "30s", "missing": "leave-out"}}
    common = {
        "describedObject": {
            "kind": "Pod",
            "namespace": "serving",
            "name": "a",
            "apiVersion": "/v1",
        },
        **{"timestamp": "2023-11-14T22:16:00Z", "value": "50"},
    }
    (item,) = old["items"]
    assert item == {**common, "metricName": "gpu_utilization", "window": 30, "selector": selector}
    (item,) = new["items"]
    assert item == {
        **common,
        "metric": {"name": "gpu_utilization", "selector": selector},
        "windowSeconds": 30,
    }


REFERENCE = json.loads(
    (Path(__file__).parents[1] / "data/custom-metrics-apiserver.json").read_text()
)
"""Responses of custom-metrics-apiserver 1.35 by path, with invented values and one item per list.
"""


@pytest.mark.parametrize("path", REFERENCE)
def test_answers_have_the_shape_of_the_reference_adapter(path: str) -> None:
    ((_, answer),) = get(cluster(), f"{CUSTOM}/{path}")
    expected = REFERENCE[path]
    if expected["kind"] == "Status":
        assert {**answer, "message": ""} == {**expected, "message": ""}
        return
    items = answer.pop("items")
    assert answer == {key: value for key, value in expected.items() if key != "items"}
    (reference,) = expected["items"]
    for item in items:
        assert item.keys() == reference.keys()
        found, wanted = item["describedObject"], reference["describedObject"]
        assert {**found, "name": ""} == {**wanted, "name": ""}
        for key in {"metric", "metricName", "selector"} & item.keys():
            assert item[key] == reference[key]
        for key in {"window", "windowSeconds", "value", "timestamp"} & item.keys():
            assert type(item[key]) is type(reference[key])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (73.5, "73500m"),
        (42.0, "42"),
        (0.0001, "1m"),
        (33.333333, "33333m"),
        (1e6, "1000000"),
    ],
)
def test_quantities_are_in_thousandths_if_needed(value: float, text: str) -> None:
    assert format_quantity(value) == text


def test_discovery() -> None:
    answers = get(cluster(), "/apis", CUSTOM, V2, f"{CUSTOM}/v1beta1", "/openapi/v2")
    assert [status for status, _ in answers] == [200] * 5
    groups, group, new, old, _ = (body for _, body in answers)
    assert [entry["name"] for entry in groups["groups"]] == ["custom.metrics.k8s.io"]
    assert group["preferredVersion"]["version"] == "v1beta2"
    assert new["groupVersion"] == "custom.metrics.k8s.io/v1beta2"
    assert old["groupVersion"] == "custom.metrics.k8s.io/v1beta1"
    names = {entry["name"]: entry for entry in new["resources"]}
    assert names["pods/gpu_utilization"]["namespaced"]
    assert not names["namespaces/gpu_power"]["namespaced"]
    assert "deployments.apps/avg_GPU_utilization" in names


def test_a_wrong_request_has_its_status_and_a_reason() -> None:
    wrong = {
        "namespaces/serving/pods/*/gpu_utilization?labelSelector=app%3Dnobody": (404, "app=nobody"),
        "namespaces/serving/pods/*/gpu_utilization?metricLabelSelector=windw%3D5m": (
            400,
            "must be one of window",
        ),
        "namespaces/serving/pods/*/gpu_utilization?metricLabelSelector=!window": (
            400,
            "window=VALUE",
        ),
        "namespaces/serving/pods/web/gpu_utilization": (
            404,
            "none of its 1 running pods holds a GPU",
        ),
        "namespaces/serving/pods/gone/gpu_utilization": (404, "serving/gone has no running pod"),
        "namespaces/serving/pods/a/gpu_sm_activity": (503, "DCGM_FI_PROF_SM_ACTIVE"),
        "namespaces/serving/ingresses.networking.k8s.io/main/gpu_power": (404, "of this API"),
        "pods/a/gpu_power": (404, "see /apis"),
        "namespaces//metrics/gpu_power": (404, "not a path of this API"),
        "namespaces/other/../serving/pods/*/gpu_utilization": (404, "not a path of this API"),
        "namespaces/other/%2e%2e/serving/pods/*/gpu_utilization": (404, "not a path of this API"),
    }
    answers = get(cluster(), *(f"{V2}/{path}" for path in wrong))
    for (path, (status, text)), (code, body) in zip(wrong.items(), answers, strict=True):
        assert (code, body["kind"], body["code"], body["status"]) == (
            status,
            "Status",
            status,
            "Failure",
        ), path
        assert text in body["message"]


@pytest.mark.fault(
    "no exporter answers (the HPA polls)",
    "503 with the reason for each metric; discovery and probes are not affected",
)
def test_missing_values_do_not_affect_discovery() -> None:
    stage = cluster()
    stage.now -= 6.0
    stage.turns(6)
    stage.now += 6.0
    answers = get(stage, f"{V2}/namespaces/serving/pods/*/gpu_utilization", V2, "/apis")
    assert [status for status, _ in answers] == [503, 200, 200]
    assert ", last read " in answers[0][1]["message"]
    assert answers[0][1]["reason"] == "ServiceUnavailable"


def test_other_methods_and_paths_have_an_error_in_json() -> None:
    assert [status for status, _ in get(cluster(), V2, "/apis", method="POST")] == [405, 405]
    ((status, body),) = get(cluster(), "/api/v1/pods")
    assert (status, body["reason"]) == (404, "NotFound")


METRIC = f"{V2}/namespaces/serving/pods/*/gpu_utilization?labelSelector=app%3Dinference"


def configmap(certificates: Certificates, ca: str = "ca", names: str = '["client"]') -> FrontProxy:
    data = {
        "requestheader-client-ca-file": certificates.text(f"{ca}.crt"),
        "requestheader-allowed-names": names,
    }
    proxy = parse_front_proxy({"data": data})
    assert proxy is not None
    return proxy


@dataclass
class Site:
    """The metrics API with TLS. `ca` is the front proxy's CA, and `client` is its name."""

    certificates: Certificates
    folder: Path
    proxy: FrontProxy = field(default_factory=FrontProxy)
    url: str = ""

    def run(self, use: Callable[[], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            stage = Stage([pod("a")])
            stage.turns(4, n1=(busy("a", 0.735, 0),))
            certificate, key = (
                Pem(file=str(self.folder / name)) for name in ("tls.crt", "tls.key")
            )
            api = MetricsApi(stage.store, certificate, key, lambda: self.proxy)
            listener = Listener(api.application(), Address("127.0.0.1", 0), tls=api.tls)
            async with listening(listener, ConnectionLimits()) as bound:
                self.url = bound.url
                return await use()

        return asyncio.run(run())

    async def get(self, shows: str = "client") -> tuple[int, Any]:
        context = self.certificates.client(shows)
        async with (
            aiohttp.ClientSession() as session,
            session.get(self.url + METRIC, ssl=context) as answer,
        ):
            return answer.status, json.loads(await answer.read())

    async def fails(self, shows: str) -> bool:
        try:
            await self.get(shows)
        except (aiohttp.ClientError, ssl.SSLError):
            return True
        return False


@pytest.fixture
def site(certificates: Certificates, tmp_path: Path) -> Site:
    certificates.put("server", tmp_path)
    return Site(certificates, tmp_path, configmap(certificates))


def test_the_front_proxy_is_answered(site: Site) -> None:
    status, body = site.run(site.get)
    assert status == 200
    (item,) = body["items"]
    assert (item["value"], item["describedObject"]["name"], item["windowSeconds"]) == (
        "73500m",
        "a",
        60,
    )


@pytest.mark.parametrize("shows", ["", "outsider", "expired"])
def test_other_clients_fail_the_handshake(site: Site, shows: str) -> None:
    async def use() -> tuple[bool, int]:
        return await site.fails(shows), (await site.get())[0]

    assert site.run(use) == (True, 200)


@pytest.mark.parametrize(("names", "status"), [('["client"]', 403), ("[]", 200)])
def test_the_front_proxys_name_is_checked(site: Site, names: str, status: int) -> None:
    site.proxy = configmap(site.certificates, names=names)
    answer = site.run(lambda: site.get("scraper"))
    assert answer[0] == status
    assert status == 200 or "requestheader-allowed-names" in answer[1]["message"]


@pytest.mark.fault(
    "the API server's front-proxy CA is changed",
    "new connections with the old one are rejected; the new one counts at once",
)
def test_the_front_proxys_ca_may_change(site: Site) -> None:
    async def use() -> tuple[bool, int]:
        await site.get()
        site.proxy = configmap(site.certificates, ca="stranger", names='["outsider"]')
        return await site.fails("client"), (await site.get("outsider"))[0]

    assert site.run(use) == (True, 200)


def test_before_the_configmap_is_read_every_connection_fails(site: Site) -> None:
    assert parse_front_proxy({}) is None
    site.proxy = FrontProxy()
    assert site.run(lambda: site.fails("client"))


def test_a_replaced_server_certificate_is_used_for_the_next_connection(site: Site) -> None:
    async def use() -> list[Any]:
        (site.folder / "tls.key").write_text("half of a rotation")
        answers: list[Any] = [(await site.get())[0]]
        for name in ("crt", "key"):
            shutil.copy(site.certificates.path(f"elsewhere.{name}"), site.folder / f"tls.{name}")
        return [*answers, await site.fails("client")]

    assert site.run(use) == [200, True]
