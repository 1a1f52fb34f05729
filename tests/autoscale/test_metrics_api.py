"""Answers of the custom and the external metrics API over real HTTP, to callers who are allowed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from podgpu.autoscale.metrics_api import MetricsApi, format_quantity
from podgpu.autoscale.requests import ResourceAttributes
from podgpu.web.app import Listener, listening
from podgpu.web.connections import ConnectionLimits
from podgpu.web.sockets import Address
from tests.autoscale.scenes import Stage, gpu, holder, pod

CUSTOM = "/apis/custom.metrics.k8s.io"
V2 = f"{CUSTOM}/v1beta2"
EXTERNAL = "/apis/external.metrics.k8s.io/v1beta1"


class OpenGate:
    def __init__(self) -> None:
        self.targets: list[ResourceAttributes | None] = []

    async def check(self, request: web.Request, target: ResourceAttributes | None) -> None:
        self.targets.append(target)


def get(
    stage: Stage, *paths: str, external: bool = False, method: str = "GET", gate: OpenGate | None = None
) -> list[tuple[int, Any]]:
    async def run() -> list[tuple[int, Any]]:
        app = MetricsApi(stage.store, gate or OpenGate(), external=external).application()
        answers = []
        async with (
            listening(Listener(app, Address("127.0.0.1", 0)), ConnectionLimits()) as bound,
            aiohttp.ClientSession() as session,
        ):
            for path in paths:
                async with session.request(method, bound.url + path) as answer:
                    answers.append((answer.status, json.loads(await answer.read())))
        return answers

    return asyncio.run(run())


def cluster() -> Stage:
    """serving/a and b on n1 and n2 (half and fully busy), web without a GPU, other/x on n2."""
    stage = Stage(
        [pod("a"), pod("b", node="n2"), pod("web", asks=False), pod("x", namespace="other", owner="", node="n2")],
        node_labels={"n1": (("zone", "a"),), "n2": (("zone", "b"),)},
    )
    stage.turns(
        4,
        n1=(gpu(0, holder("a", utilization=0.5), utilization=0.5, power_watts=400.25, measured=50.0),),
        n2=(
            gpu(0, holder("b", utilization=1.0), uuid="GPU-b", utilization=1.0, measured=100.0),
            gpu(1, holder("x", namespace="other", utilization=0.1), uuid="GPU-x", utilization=0.1, measured=10.0),
        ),
    )
    stage.now += 6.0
    return stage


WORKLOAD = "namespaces/serving/deployments.apps/inference/gpu_utilization?metricLabelSelector="


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("namespaces/serving/pods/*/gpu_utilization?labelSelector=app%3Dinference", {"a": "50", "b": "100"}),
        ("namespaces/serving/pods/%2A/gpu_utilization", {"a": "50", "b": "100"}),
        ("namespaces/serving/pods/a/gpu_power", {"a": "400250m"}),
        ("namespaces/serving/metrics/gpu_utilization", {"serving": "75"}),
        ("namespaces/serving/gpu_utilization", {"serving": "75"}),
        ("namespaces/serving/metrics/avg_GPU_utilization", {"serving": "75"}),
        ("nodes/n2/gpu_utilization", {"n2": "55"}),
        ("nodes/*/gpu_utilization?labelSelector=zone%3Da", {"n1": "50"}),
        ("nodes/*/gpu_utilization", {"n1": "50", "n2": "55"}),
        (f"{WORKLOAD}aggregate%3Dmax", {"inference": "100"}),
        (f"{WORKLOAD}aggregate%3Dp50,window%3D30s", {"inference": "75"}),
    ],
)
def test_values(path: str, expected: dict[str, str]) -> None:
    ((status, body),) = get(cluster(), f"{V2}/{path}")
    assert status == 200, body
    assert {item["describedObject"]["name"]: item["value"] for item in body["items"]} == expected


def test_both_versions_with_the_metrics_selector() -> None:
    path = "namespaces/serving/pods/a/gpu_utilization?metricLabelSelector=window%3D30s,missing%3Dleave-out"
    (_, old), (_, new) = get(cluster(), f"{CUSTOM}/v1beta1/{path}", f"{V2}/{path}")
    selector = {"matchLabels": {"window": "30s", "missing": "leave-out"}}
    common = {
        "describedObject": {"kind": "Pod", "namespace": "serving", "name": "a", "apiVersion": "/v1"},
        **{"timestamp": "2023-11-14T22:16:00Z", "value": "50"},
    }
    (item,) = old["items"]
    assert item == {**common, "metricName": "gpu_utilization", "window": 30, "selector": selector}
    (item,) = new["items"]
    assert item == {**common, "metric": {"name": "gpu_utilization", "selector": selector}, "windowSeconds": 30}


REFERENCE = json.loads((Path(__file__).parents[1] / "data/custom-metrics-apiserver.json").read_text())
"""Path -> answer of an adapter of custom-metrics-apiserver 1.35, with made-up values; one item a list."""


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


def test_external_metrics_of_a_workload_a_namespace_and_the_cluster() -> None:
    base = f"{EXTERNAL}/namespaces/serving"
    answers = get(
        cluster(),
        f"{base}/gpu_utilization?labelSelector=owner%3DDeployment.inference",
        f"{base}/gpu_utilization",
        f"{base}/avg_GPU_utilization?labelSelector=scope%3Dcluster",
        external=True,
    )
    assert [body["items"][0]["value"] for _, body in answers] == ["75", "75", "53333m"]
    assert answers[0][1]["kind"] == "ExternalMetricValueList"


def test_the_scope_cluster_needs_permission_for_all_namespaces() -> None:
    gate, path = OpenGate(), f"{EXTERNAL}/namespaces/serving/gpu_utilization"
    scopes = ("scope%3Dcluster", "scope%3Dnamespace,window%3D30s", "window%3D30s,scope%20in%20(cluster)", "scope")
    answers = get(cluster(), *(f"{path}?labelSelector={scope}" for scope in scopes), external=True, gate=gate)
    assert [target.namespace for target in gate.targets if target] == ["", "serving", "", "serving"]
    assert [status for status, _ in answers] == [200, 200, 200, 400]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (73.5, "73500m"), (42.0, "42"), (0.0001, "1m"), (33.333333, "33333m"), (1e6, "1000000")],
)
def test_quantities_are_in_thousandths_if_needed(value: float, text: str) -> None:
    assert format_quantity(value) == text


def test_discovery() -> None:
    answers = get(cluster(), "/apis", CUSTOM, V2, f"{CUSTOM}/v1beta1", EXTERNAL, "/openapi/v2", external=True)
    assert [status for status, _ in answers] == [200] * 6
    groups, group, new, old, external, _ = (body for _, body in answers)
    assert [entry["name"] for entry in groups["groups"]] == ["custom.metrics.k8s.io", "external.metrics.k8s.io"]
    assert group["preferredVersion"]["version"] == "v1beta2"
    assert new["groupVersion"] == "custom.metrics.k8s.io/v1beta2"
    assert old["groupVersion"] == "custom.metrics.k8s.io/v1beta1"
    names = {entry["name"]: entry for entry in new["resources"]}
    assert names["pods/gpu_utilization"]["namespaced"]
    assert not names["nodes/gpu_power"]["namespaced"]
    assert "deployments.apps/avg_GPU_utilization" in names
    assert {entry["verbs"][0] for entry in external["resources"]} == {"get"}


def test_external_metrics_are_off_by_default() -> None:
    ((status, _), (_, groups)) = get(cluster(), f"{EXTERNAL}/namespaces/serving/gpu_utilization", "/apis")
    assert status == 404
    assert [group["name"] for group in groups["groups"]] == ["custom.metrics.k8s.io"]


# Errors


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("namespaces/serving/pods/*/gpu_utilisation", 404, "did you mean gpu_utilization?"),
        ("namespaces/serving/pods/*/gpu_utilization?labelSelector=app%3Dnobody", 404, "app=nobody"),
        ("namespaces/serving/pods/*/gpu_utilization?labelSelector=app%20in", 400, "cannot parse"),
        ("namespaces/serving/pods/*/gpu_utilization?metricLabelSelector=windw%3D5m", 400, "window?"),
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
        ("namespaces//pods/*/gpu_power", 404, "not a path of this API"),
        ("namespaces/serving/pods/%00/gpu_power", 404, "not a path of this API"),
    ],
)
def test_a_wrong_request_has_its_status_and_a_reason(path: str, status: int, text: str) -> None:
    ((code, body),) = get(cluster(), f"{V2}/{path}")
    assert (code, body["kind"], body["code"], body["status"]) == (status, "Status", status, "Failure")
    assert text in body["message"]


@pytest.mark.fault(
    "no exporter answers (the HPA polls)", "503 with the reason for each metric; discovery and probes are not affected"
)
def test_missing_values_do_not_affect_discovery() -> None:
    stage = cluster()
    stage.now -= 6.0
    stage.turns(6)
    stage.now += 6.0
    paths = (f"{V2}/namespaces/serving/pods/*/gpu_utilization", f"{V2}/nodes/n1/gpu_utilization", V2, "/apis")
    answers = get(stage, *paths)
    assert [status for status, _ in answers] == [503, 503, 200, 200]
    assert ", last read " in answers[0][1]["message"]
    assert answers[0][1]["reason"] == "ServiceUnavailable"


def test_other_methods_and_paths_have_an_error_in_json() -> None:
    assert [status for status, _ in get(cluster(), V2, "/apis", method="POST")] == [405, 405]
    ((status, body),) = get(cluster(), "/api/v1/pods")
    assert (status, body["reason"]) == (404, "NotFound")
