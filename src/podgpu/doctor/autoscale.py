"""Checks the values of podgpu's metrics that HPAs and ScaledObjects receive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from urllib.parse import quote

from podgpu.autoscale.metrics import METRICS
from podgpu.autoscale.requests import CUSTOM_GROUP, CUSTOM_VERSIONS, TRIGGER_KEYS, Refusal, parse_trigger
from podgpu.doctor.findings import Finding, note, ok, wrong
from podgpu.errors import SourceError, few_of
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
    findings = [finding async for finding in _check_hpas(client)]
    return findings + [finding async for finding in _check_scaled_objects(client)]


# HPAs


async def _check_hpas(client: ApiClient) -> AsyncIterator[Finding]:
    try:
        hpas = await client.get(_HPAS, {"limit": str(_MAX_OBJECTS)})
    except SourceError as error:
        yield wrong("HPAs", str(error))
        return
    if hpas.get("metadata", {}).get("continue"):
        yield note("HPAs", f"more than {_MAX_OBJECTS}; only the first {_MAX_OBJECTS} are checked")
    uses_podgpu = False
    for hpa in hpas.get("items") or ():
        for metric in hpa["spec"].get("metrics") or ():
            finding = await _check_hpa_metric(client, hpa, metric)
            if finding is not None:
                uses_podgpu = True
                yield finding
    if not uses_podgpu:
        yield note("HPAs", f"no HPA uses a metric of podgpu ({', '.join(sorted(_METRICS))})")


async def _check_hpa_metric(client: ApiClient, hpa: KubeObject, metric: KubeObject) -> Finding | None:
    """Returns None if the metric is not one of podgpu's."""
    kind = metric.get("type", "")
    source = metric.get(kind.lower()) or {}
    identifier = source.get("metric") or {}
    name = identifier.get("name")
    if kind not in ("Pods", "Object") or name not in _METRICS:
        return None
    namespace = hpa["metadata"]["namespace"]
    subject = f"HPA {namespace}/{hpa['metadata']['name']}"
    query = {}
    if identifier.get("selector"):
        labels = identifier["selector"].get("matchLabels") or {}
        query["metricLabelSelector"] = ",".join(f"{key}={value}" for key, value in labels.items())
    try:
        if kind == "Pods":
            query["labelSelector"] = await _read_pod_selector(client, hpa)
            path = f"pods/*/{name}"
        else:
            path = f"{_object_path(source['describedObject'])}/{name}"
        base = f"/apis/{CUSTOM_GROUP}/{CUSTOM_VERSIONS[0]}/namespaces/{quote(namespace)}"
        answer = await client.get(f"{base}/{path}", query)
    except SourceError as error:
        return wrong(subject, f"{name}: {error}", "an HPA without a value does not change the number of replicas")
    values = [f"{item['describedObject']['name']} {item['value']}" for item in answer.get("items") or ()]
    return ok(subject, f"{name}: {few_of(values, 8)}")


async def _read_pod_selector(client: ApiClient, hpa: KubeObject) -> str:
    """Reads the selector of the target's scale subresource, as the HPA controller does."""
    target, namespace = hpa["spec"]["scaleTargetRef"], quote(hpa["metadata"]["namespace"])
    version = target.get("apiVersion", "v1")
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    scale = await client.get(f"{root}/namespaces/{namespace}/{target['kind'].lower()}s/{quote(target['name'])}/scale")
    return str(scale.get("status", {}).get("selector", ""))


def _object_path(reference: KubeObject) -> str:
    if reference["kind"] == "Namespace":
        return "metrics"
    group, slash, _ = reference.get("apiVersion", "v1").partition("/")
    return f"{reference['kind'].lower()}s{f'.{group}' if slash else ''}/{quote(reference['name'])}"


# ScaledObjects


async def _check_scaled_objects(client: ApiClient) -> AsyncIterator[Finding]:
    try:
        scaled_objects = await client.get(_SCALED_OBJECTS, {"limit": str(_MAX_OBJECTS)})
    except SourceError as error:
        yield ok("KEDA", "not installed") if error.reason == "not_found" else wrong("KEDA", str(error))
        return
    for scaled_object in scaled_objects.get("items") or ():
        metadata = scaled_object["metadata"]
        for trigger in scaled_object["spec"].get("triggers") or ():
            keys = {key: str(value) for key, value in (trigger.get("metadata") or {}).items()}
            if trigger.get("type", "").startswith("external") and "podgpu" in keys.get("scalerAddress", ""):
                subject = f"ScaledObject {metadata['namespace']}/{metadata['name']}"
                yield _check_trigger(subject, metadata["namespace"], keys, trigger.get("metricType"))


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
