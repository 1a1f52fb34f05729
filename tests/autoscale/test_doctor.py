"""Findings of `podgpu doctor --autoscale`."""

from __future__ import annotations

import asyncio
from typing import Any

from podgpu.doctor.autoscale import examine_autoscaling
from podgpu.doctor.findings import Finding, Level
from tests.autoscale.api_double import ApiDouble

HPAS = "/apis/autoscaling/v2/horizontalpodautoscalers"
SCALED = "/apis/keda.sh/v1alpha1/scaledobjects"
SERVING = "/apis/custom.metrics.k8s.io/v1beta2/namespaces/serving"


def hpa(metric: dict[str, Any]) -> dict[str, Any]:
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "inference"}
    spec = {"scaleTargetRef": target, "metrics": [metric]}
    return {"metadata": {"namespace": "serving", "name": "inference"}, "spec": spec}


PODS = {"type": "Pods", "pods": {"metric": {"name": "gpu_utilization", "selector": {"matchLabels": {"window": "2m"}}}}}
OBJECT = {
    "type": "Object",
    "object": {
        "metric": {"name": "gpu_busy"},
        "describedObject": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "inference"},
    },
}
CPU = {"type": "Resource", "resource": {"name": "cpu"}}


def value(name: str, quantity: str) -> dict[str, Any]:
    return {"items": [{"describedObject": {"name": name}, "value": quantity}]}


def healthy() -> ApiDouble:
    return ApiDouble(
        answers={
            HPAS: {"items": [hpa(PODS), hpa(OBJECT), hpa(CPU)]},
            "/apis/apps/v1/namespaces/serving/deployments/inference/scale": {"status": {"selector": "app=inference"}},
            f"{SERVING}/pods/*/gpu_utilization": value("inference-1", "73500m"),
            f"{SERVING}/deployments.apps/inference/gpu_busy": value("inference", "40"),
        },
    )


def examined(api: ApiDouble) -> list[Finding]:
    async def run() -> list[Finding]:
        async with api.running() as client:
            return await examine_autoscaling(client)

    return asyncio.run(run())


def texts(findings: list[Finding], level: Level) -> str:
    return "\n".join(f"{f.subject}: {f.text} {f.advice}" for f in findings if f.level is level)


def test_a_healthy_cluster_has_the_value_of_each_hpa() -> None:
    findings = examined(healthy())
    assert texts(findings, Level.WRONG) == ""
    text = texts(findings, Level.OK)
    assert "gpu_utilization: inference-1 73500m" in text
    assert "gpu_busy: inference 40" in text


def test_an_hpa_without_a_value_is_wrong_and_has_the_reason() -> None:
    api = healthy()
    api.answers[f"{SERVING}/pods/*/gpu_utilization"] = {"code": 503, "message": "no exporter answers"}
    assert "no exporter answers" in texts(examined(api), Level.WRONG)


def test_without_hpas_there_is_a_note() -> None:
    findings = examined(ApiDouble(answers={HPAS: {"items": []}}))
    text = texts(findings, Level.NOTE)
    assert "no HPA uses a metric of podgpu" in text
    assert texts(findings, Level.WRONG) == ""


def scaled(metric_type: str = "Value", **metadata: str) -> dict[str, Any]:
    given = {"scalerAddress": "podgpu-autoscale.podgpu.svc:9411", "owner": "Deployment/x", "target": "60", **metadata}
    trigger = {"type": "external", "metricType": metric_type, "metadata": given}
    return {"metadata": {"namespace": "serving", "name": "x"}, "spec": {"triggers": [trigger, {"type": "cron"}]}}


def test_triggers_are_checked() -> None:
    api = healthy()
    api.answers[SCALED] = {"items": [scaled(), scaled(windw="5m"), scaled("AverageValue"), scaled("", aggregate="sum")]}
    findings = examined(api)
    assert texts(findings, Level.OK).count("gpu_utilization of Deployment serving/x") == 2
    text = texts(findings, Level.WRONG)
    assert "did you mean window?" in text
    assert "metricType: Value" in text
