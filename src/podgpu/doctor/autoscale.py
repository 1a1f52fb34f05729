"""Checks the values of podgpu's metrics that HPAs and ScaledObjects receive."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

from podgpu.autoscale.metrics import METRICS
from podgpu.autoscale.requests import TRIGGER_KEYS, Refusal, parse_trigger
from podgpu.doctor.findings import Finding, note, ok, wrong
from podgpu.errors import SourceError
from podgpu.kube.client import ApiClient
from podgpu.kube.config import require_config
from podgpu.kube.objects import KubeObject

_HPAS = "/apis/autoscaling/v2/horizontalpodautoscalers"
_SCALED_OBJECTS = "/apis/keda.sh/v1alpha1/scaledobjects"
_MAX_OBJECTS = 200
_MAX_WINDOW = 86_400.0
_METRICS = frozenset(metric.name for metric in METRICS)


def check_autoscaling(kubeconfig: str) -> list[Finding]:
    """Raises UsageError if no API server is configured."""
    config = require_config(kubeconfig)

    async def check() -> list[Finding]:
        async with ApiClient(config) as client:
            return await examine_autoscaling(client)

    return asyncio.run(check())


async def examine_autoscaling(client: ApiClient) -> list[Finding]:
    return [*await _check_hpas(client), *await _check_scaled_objects(client)]


async def _check_hpas(client: ApiClient) -> list[Finding]:
    try:
        hpas = await client.get(_HPAS, {"limit": str(_MAX_OBJECTS)})
    except SourceError as error:
        return [wrong("HPAs", str(error))]
    findings = [finding for hpa in hpas.get("items") or () for finding in _check_hpa(hpa)]
    if not findings:
        findings.append(note("HPAs", f"no HPA uses a metric of podgpu ({', '.join(sorted(_METRICS))})"))
    if hpas.get("metadata", {}).get("continue"):
        findings.append(note("HPAs", f"more than {_MAX_OBJECTS}; only the first {_MAX_OBJECTS} are checked"))
    return findings


def _check_hpa(hpa: KubeObject) -> Iterator[Finding]:
    """Compares the metrics in the spec with the values that the HPA controller received."""
    subject, status = f"HPA {hpa['metadata']['namespace']}/{hpa['metadata']['name']}", hpa.get("status") or {}
    values = dict(map(_read_metric, status.get("currentMetrics") or ()))
    conditions = {condition["type"]: condition for condition in status.get("conditions") or ()}
    active = conditions.get("ScalingActive", {})
    for name, _ in map(_read_metric, hpa["spec"].get("metrics") or ()):
        if name not in _METRICS:
            continue
        value = values.get(name, {}).get("averageValue") or values.get(name, {}).get("value")
        if value is not None and active.get("status") != "False":
            yield ok(subject, f"{name}: {value}")
        else:
            reason = active.get("message") or "the HPA controller has received no value yet"
            yield wrong(subject, f"{name}: {reason}", "an HPA without a value does not change the number of replicas")


def _read_metric(metric: KubeObject) -> tuple[str, KubeObject]:
    """Returns the name and the current value of a metric of podgpu. Both are empty for other kinds of metrics."""
    source = metric.get("pods") or metric.get("object") or {}
    return source.get("metric", {}).get("name", ""), source.get("current") or {}


async def _check_scaled_objects(client: ApiClient) -> list[Finding]:
    try:
        scaled_objects = await client.get(_SCALED_OBJECTS, {"limit": str(_MAX_OBJECTS)})
    except SourceError as error:
        return [ok("KEDA", "not installed") if error.reason == "not_found" else wrong("KEDA", str(error))]
    findings = []
    for scaled_object in scaled_objects.get("items") or ():
        metadata = scaled_object["metadata"]
        for trigger in scaled_object["spec"].get("triggers") or ():
            keys = {key: str(value) for key, value in (trigger.get("metadata") or {}).items()}
            if trigger.get("type", "").startswith("external") and "podgpu" in keys.get("scalerAddress", ""):
                subject = f"ScaledObject {metadata['namespace']}/{metadata['name']}"
                findings.append(_check_trigger(subject, metadata["namespace"], keys, trigger.get("metricType")))
    return findings


def _check_trigger(subject: str, namespace: str, keys: Mapping[str, str], metric_type: str | None) -> Finding:
    try:
        query, target = parse_trigger(namespace, keys, _MAX_WINDOW)
    except Refusal as error:
        return wrong(subject, str(error), f"valid keys of a trigger are {', '.join(TRIGGER_KEYS)}")
    aggregate = query.aggregate
    text = f"{query.metric.name} of {query.pods.text}, {aggregate} over {query.window:g} s"
    if metric_type != "Value" and aggregate != "sum":
        return wrong(
            subject,
            f"{text}: metricType is {metric_type or 'AverageValue'}, which divides by the number of replicas again",
            "set metricType: Value, or aggregate: sum",
        )
    return ok(subject, f"{text}, target {target:g}")
