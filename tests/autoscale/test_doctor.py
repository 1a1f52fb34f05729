"""Findings of `podgpu doctor --autoscale`."""

from __future__ import annotations

import asyncio
from typing import Any

from podgpu.doctor.autoscale import examine_autoscaling
from podgpu.doctor.findings import Finding, Level
from tests.autoscale.api_double import ApiDouble

HPAS = "/apis/autoscaling/v2/horizontalpodautoscalers"
SCALED = "/apis/keda.sh/v1alpha1/scaledobjects"


def hpa(metric: dict[str, Any], current: dict[str, str] | None = None, **condition: str) -> dict[str, Any]:
    """Returns an HPA with the status that the HPA controller writes."""
    kind = metric["type"].lower()
    received = [{"type": metric["type"], kind: {**metric[kind], "current": current}}] if current else [{"type": ""}]
    status = {"currentMetrics": received, "conditions": [{"type": "ScalingActive", "status": "True", **condition}]}
    metadata = {"namespace": "serving", "name": "inference"}
    return {"metadata": metadata, "spec": {"metrics": [metric]}, "status": status}


PODS = {"type": "Pods", "pods": {"metric": {"name": "gpu_utilization"}}}
OBJECT = {"type": "Object", "object": {"metric": {"name": "gpu_busy"}}}
CPU = {"type": "Resource", "resource": {"name": "cpu"}}


def healthy() -> ApiDouble:
    hpas = [hpa(PODS, {"averageValue": "73500m"}), hpa(OBJECT, {"value": "40"}), hpa(CPU)]
    return ApiDouble(answers={HPAS: {"items": hpas}})


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
    assert "gpu_utilization: 73500m" in text
    assert "gpu_busy: 40" in text


def test_an_hpa_without_a_value_is_wrong_and_has_the_reason() -> None:
    failing = hpa(PODS, status="False", message="no exporter answers")
    new = {**hpa(OBJECT), "status": {}}
    text = texts(examined(ApiDouble(answers={HPAS: {"items": [failing, new]}})), Level.WRONG)
    assert "gpu_utilization: no exporter answers" in text
    assert "gpu_busy: the HPA controller has received no value yet" in text


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
