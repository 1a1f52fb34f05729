"""What the custom and the external metrics API answer, over real HTTP, to somebody who may ask."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from podgpu.autoscale.authentication import Rejection
from podgpu.autoscale.metrics_api import MetricsApi, format_quantity
from podgpu.autoscale.requests import ResourceAttributes
from podgpu.web.app import Listener, listening
from podgpu.web.connections import ConnectionLimits
from podgpu.web.sockets import Address
from tests.autoscale.scenes import Stage, gpu, holder, pod

CUSTOM_GROUP = "/apis/custom.metrics.k8s.io"
V2 = f"{CUSTOM_GROUP}/v1beta2"
EXTERNAL_GROUP = "/apis/external.metrics.k8s.io/v1beta1"


class OpenGate:
    def __init__(self) -> None:
        self.asked: list[ResourceAttributes | None] = []

    async def check(self, request: web.Request, target: ResourceAttributes | None) -> Rejection | None:
        self.asked.append(target)
        return None


def get(
    stage: Stage,
    *paths: str,
    external: bool = False,
    method: str = "GET",
    accept: str = "*/*",
    gate: OpenGate | None = None,
) -> list[tuple[int, Any]]:
    async def run() -> list[tuple[int, Any]]:
        app = MetricsApi(stage.store, gate or OpenGate(), external=external).application()
        found = []
        async with (
            listening(Listener(app, Address("127.0.0.1", 0)), ConnectionLimits()) as bound,
            aiohttp.ClientSession() as s,
        ):
            for path in paths:
                async with s.request(method, bound.url + path, headers={"Accept": accept}) as answer:
                    found.append((answer.status, json.loads(await answer.read())))
        return found

    return asyncio.run(run())


def cluster() -> Stage:
    """serving/a and b on n1 and n2 (half and fully busy), web without a GPU, other/x on n2."""
    stage = Stage(
        [pod("a"), pod("b", node="n2"), pod("web", asks=False), pod("x", namespace="other", owner="", node="n2")],
        node_labels={"n1": (("zone", "a"),), "n2": (("zone", "b"),)},
    )
    for _ in range(4):
        stage.turn(
            n1=(gpu(0, holder("a", utilization=0.5), utilization=0.5, power_watts=400.25, measured=50.0),),
            n2=(
                gpu(0, holder("b", utilization=1.0), uuid="GPU-b", utilization=1.0, measured=100.0),
                gpu(1, holder("x", namespace="other", utilization=0.1), uuid="GPU-x", utilization=0.1, measured=10.0),
            ),
        )
    stage.now += 6.0
    return stage


def values(body: Any) -> dict[str, str]:
    return {item["describedObject"]["name"]: item["value"] for item in body["items"]}


def value(path: str, **more: Any) -> dict[str, str]:
    ((status, body),) = get(cluster(), path, **more)
    assert status == 200, body
    return values(body)


# Metrics


def test_pods_by_label() -> None:
    pods = f"{V2}/namespaces/serving/pods"
    assert value(f"{pods}/*/gpu_utilization?labelSelector=app%3Dinference") == {"a": "50", "b": "100"}
    assert value(f"{pods}/*/gpu_utilization?labelSelector=app%20in%20(inference),!x") == {"a": "50", "b": "100"}
    assert value(f"{pods}/%2A/gpu_utilization") == {"a": "50", "b": "100"}
    assert value(f"{pods}/a/gpu_power") == {"a": "400250m"}


def test_a_namespace_a_node_and_a_workload() -> None:
    assert value(f"{V2}/namespaces/serving/metrics/gpu_utilization") == {"serving": "75"}
    assert value(f"{V2}/namespaces/serving/gpu_utilization") == {"serving": "75"}
    assert value(f"{V2}/nodes/n2/gpu_utilization") == {"n2": "55"}
    assert value(f"{V2}/nodes/*/gpu_utilization?labelSelector=zone%3Da") == {"n1": "50"}
    assert value(f"{V2}/nodes/*/gpu_utilization") == {"n1": "50", "n2": "55"}
    assert value(f"{V2}/namespaces/serving/deployments.apps/inference/gpu_utilization") == {"inference": "75"}
    assert value(f"{V2}/namespaces/serving/metrics/avg_GPU_utilization") == {"serving": "75"}


def test_the_metrics_selector_says_how_it_is_made() -> None:
    path = f"{V2}/namespaces/serving/deployments.apps/inference/gpu_utilization?metricLabelSelector="
    assert value(f"{path}aggregate%3Dmax") == {"inference": "100"}
    assert value(f"{path}aggregate%3Dp50,window%3D30s") == {"inference": "75"}


def test_both_versions_in_their_own_words() -> None:
    path = "namespaces/serving/pods/a/gpu_utilization"
    (_, old), (_, new) = get(cluster(), f"{CUSTOM_GROUP}/v1beta1/{path}", f"{V2}/{path}")
    assert old["items"][0] == {
        "describedObject": {"kind": "Pod", "namespace": "serving", "name": "a", "apiVersion": "/v1"},
        **{"metricName": "gpu_utilization", "timestamp": "2023-11-14T22:16:00Z", "window": 60},
        **{"value": "50", "selector": None},
    }
    assert new["items"][0]["metric"] == {"name": "gpu_utilization", "selector": None}
    assert new["items"][0]["windowSeconds"] == 60
    assert (old["apiVersion"], new["apiVersion"]) == ("custom.metrics.k8s.io/v1beta1", "custom.metrics.k8s.io/v1beta2")


REFERENCE = json.loads((Path(__file__).parents[1] / "data/custom-metrics-apiserver.json").read_text())
"""Path -> what an adapter of custom-metrics-apiserver 1.35 answered, of figures that were made up; one item a list."""


@pytest.mark.parametrize("path", REFERENCE)
def test_answers_have_the_reference_adapters_shape(path: str) -> None:
    ((_, answer),) = get(cluster(), f"{CUSTOM_GROUP}/{path}")
    expected = REFERENCE[path]
    if expected["kind"] == "Status":
        assert {**answer, "message": ""} == {**expected, "message": ""}
        return
    items = answer.pop("items")
    assert answer == {key: value for key, value in expected.items() if key != "items"}
    (reference,) = expected["items"]
    for item in items:
        assert item.keys() == reference.keys()
        alike = ("kind", "apiVersion", "namespace")
        found, wanted = item["describedObject"], reference["describedObject"]
        assert found.keys() == wanted.keys()
        assert [found.get(key) for key in alike] == [wanted.get(key) for key in alike]
        for key in {"metric", "metricName", "selector"} & item.keys():
            assert item[key] == reference[key]
        for key in {"window", "windowSeconds", "value", "timestamp"} & item.keys():
            assert type(item[key]) is type(reference[key])


@pytest.mark.parametrize("whom", ["pods/*", "pods/a", "deployments.apps/inference"])
def test_answers_repeat_the_metrics_selector_as_the_reference_adapter_does(whom: str) -> None:
    path = f"namespaces/serving/{whom}/gpu_utilization?metricLabelSelector=window%3D30s,missing%3Dleave-out"
    (_, old), (_, new) = get(cluster(), f"{CUSTOM_GROUP}/v1beta1/{path}", f"{V2}/{path}")
    repeated = {"matchLabels": {"window": "30s", "missing": "leave-out"}}
    assert [item["selector"] for item in old["items"]] == [repeated] * len(old["items"])
    assert new["items"]
    assert new["items"][0]["metric"] == {"name": "gpu_utilization", "selector": repeated}


def test_external_metrics_of_a_workload_a_namespace_and_the_cluster() -> None:
    base = f"{EXTERNAL_GROUP}/namespaces/serving"
    found = get(
        cluster(),
        f"{base}/gpu_utilization?labelSelector=owner%3DDeployment.inference",
        f"{base}/gpu_utilization",
        f"{base}/avg_GPU_utilization?labelSelector=scope%3Dcluster",
        external=True,
    )
    assert [body["items"][0]["value"] for _, body in found] == ["75", "75", "53333m"]
    assert found[0][1]["kind"] == "ExternalMetricValueList"


def test_who_asks_for_the_cluster_must_be_allowed_all_namespaces() -> None:
    gate, path = OpenGate(), f"{EXTERNAL_GROUP}/namespaces/serving/gpu_utilization"
    scopes = ("scope%3Dcluster", "scope%3Dnamespace,window%3D30s", "window%3D30s,scope%20in%20(cluster)", "scope")
    found = get(cluster(), *(f"{path}?labelSelector={scope}" for scope in scopes), external=True, gate=gate)
    assert [asked.namespace for asked in gate.asked if asked] == ["", "serving", "", "serving"]
    assert [status for status, _ in found] == [200, 200, 200, 400]


def test_external_metrics_are_off_unless_asked_for() -> None:
    ((status, _), (_, groups)) = get(cluster(), f"{EXTERNAL_GROUP}/namespaces/serving/gpu_utilization", "/apis")
    assert status == 404
    assert [group["name"] for group in groups["groups"]] == ["custom.metrics.k8s.io"]


@pytest.mark.parametrize(
    ("figure", "text"),
    [(0.0, "0"), (73.5, "73500m"), (42.0, "42"), (0.0001, "1m"), (33.333333, "33333m"), (1e6, "1000000")],
)
def test_quantities_are_in_thousandths_where_needed(figure: float, text: str) -> None:
    assert format_quantity(figure) == text


# Discovery


def test_discovery() -> None:
    found = get(cluster(), "/apis", CUSTOM_GROUP, V2, f"{CUSTOM_GROUP}/v1beta1", EXTERNAL_GROUP, external=True)
    assert [status for status, _ in found] == [200] * 5
    groups, group, new, old, external = (body for _, body in found)
    assert [entry["name"] for entry in groups["groups"]] == ["custom.metrics.k8s.io", "external.metrics.k8s.io"]
    assert group["preferredVersion"]["version"] == "v1beta2"
    assert (new["groupVersion"], old["groupVersion"]) == (
        "custom.metrics.k8s.io/v1beta2",
        "custom.metrics.k8s.io/v1beta1",
    )
    names = {entry["name"]: entry for entry in new["resources"]}
    assert names["pods/gpu_utilization"]["namespaced"]
    assert not names["nodes/gpu_power"]["namespaced"]
    assert "deployments.apps/avg_GPU_utilization" in names
    assert {entry["verbs"][0] for entry in external["resources"]} == {"get"}


def test_discovery_at_once_as_newer_api_servers_ask_for_it() -> None:
    """And as they write it: https://kubernetes.io/docs/concepts/overview/kubernetes-api/#aggregated-discovery."""
    accept = (
        "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,"
        "application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList"
    )
    ((status, body),) = get(cluster(), "/apis", external=True, accept=accept)
    assert (status, body["kind"], body["apiVersion"]) == (200, "APIGroupDiscoveryList", "apidiscovery.k8s.io/v2")
    custom, external = body["items"]
    assert [version["version"] for version in custom["versions"]] == ["v1beta2", "v1beta1"]
    scopes = {of["resource"]: of["scope"] for of in custom["versions"][0]["resources"]}
    assert (scopes["pods"], scopes["nodes"]) == ("Namespaced", "Cluster")
    assert "gpu_busy" in {of["subresource"] for of in custom["versions"][0]["resources"][0]["subresources"]}
    assert external["versions"][0]["resources"][0]["verbs"] == ["get"]


# Refusals


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("namespaces/serving/pods/*/gpu_utilisation", 404, "did you mean gpu_utilization?"),
        ("namespaces/serving/pods/*/gpu_utilization?labelSelector=app%3Dnobody", 404, "app=nobody"),
        ("namespaces/serving/pods/*/gpu_utilization?labelSelector=app%20in", 400, "cannot parse"),
        (
            "namespaces/serving/pods/*/gpu_utilization?labelSelector=app%3Dinference&metricLabelSelector=windw%3D5m",
            400,
            "window?",
        ),
        ("namespaces/serving/pods/*/gpu_utilization?metricLabelSelector=window%3D5h", 400, "--longest-window"),
        ("namespaces/serving/pods/*/gpu_utilization?metricLabelSelector=!window", 400, "window=VALUE"),
        ("namespaces/serving/pods/web/gpu_utilization", 404, "none of its 1 running pods holds a GPU"),
        ("namespaces/serving/pods/gone/gpu_utilization", 404, "no running pod serving/gone"),
        ("namespaces/none/pods/*/gpu_utilization", 404, "no running pod"),
        ("namespaces/serving/pods/a/gpu_sm_activity", 503, "DCGM_FI_PROF_SM_ACTIVE"),
        ("namespaces/serving/ingresses.networking.k8s.io/main/gpu_power", 404, "podgpu has no metrics of"),
        ("nodes/n9/gpu_power", 404, "no exporter reports node n9"),
        ("nodes/*/gpu_power?labelSelector=zone%3Dz", 404, "no node with a GPU matches"),
        ("pods/a/gpu_power", 404, "podgpu has no metrics of"),
        ("namespaces/serving", 404, "not a path of this API"),
        ("a/b/c/d/e/f", 404, "not a path of this API"),
        ("namespaces//pods/*/gpu_power", 404, "not a path of this API"),
        ("namespaces/serving/pods/%00/gpu_power", 404, "not a path of this API"),
    ],
)
def test_bad_input_is_a_status_with_words(path: str, status: int, words: str) -> None:
    ((code, body),) = get(cluster(), f"{V2}/{path}")
    assert (code, body["kind"], body["code"], body["status"]) == (status, "Status", status, "Failure")
    assert words in body["message"]


@pytest.mark.fault(
    "no exporter answers (the HPA asks)", "503 with the reason for each metric; discovery and probes answer as ever"
)
def test_a_backend_that_is_away_is_each_metrics_own_answer() -> None:
    stage = cluster()
    stage.now -= 6.0
    stage.turns(6)
    stage.now += 6.0
    paths = (f"{V2}/namespaces/serving/pods/*/gpu_utilization", f"{V2}/nodes/n1/gpu_utilization", V2, "/apis")
    found = get(stage, *paths)
    assert [status for status, _ in found] == [503, 503, 200, 200]
    assert ", last read " in found[0][1]["message"]
    assert found[0][1]["reason"] == "ServiceUnavailable"


def test_other_methods_and_paths_are_refused_in_json() -> None:
    assert [s for s, _ in get(cluster(), V2, "/apis", method="POST")] == [405, 405]
    ((status, body),) = get(cluster(), "/api/v1/pods")
    assert (status, body["reason"]) == (404, "NotFound")
