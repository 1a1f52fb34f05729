"""This module looks at a cluster as its autoscalers see it: who has the metrics APIs, what every HPA that asks for a
metric of podgpu's would be told, and what podgpu would read of every ScaledObject's trigger. It changes nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import quote

from podgpu.autoscale.api_paths import CUSTOM, CUSTOM_VERSIONS, EXTERNAL, EXTERNAL_VERSION
from podgpu.autoscale.metrics import METRICS
from podgpu.autoscale.refusal import Refusal
from podgpu.autoscale.trigger import KEYS, parse_trigger
from podgpu.doctor.findings import Finding, note, ok, wrong
from podgpu.errors import SourceError
from podgpu.json_shape import mapping_in, objects_in
from podgpu.kube.client import ApiClient, Object

_APISERVICES = "/apis/apiregistration.k8s.io/v1/apiservices/"
_HPAS = "/apis/autoscaling/v2/horizontalpodautoscalers"
_SCALED_OBJECTS = "/apis/keda.sh/v1alpha1/scaledobjects"
_MOST = 200
"""HPAs and ScaledObjects that are looked at, each: a person reads this."""
_LONGEST_WINDOW = 86_400.0
_OURS = frozenset(metric.name for metric in METRICS)
_INSTALL = "helm upgrade podgpu … --set autoscale.enabled=true"


async def examine_autoscaling(client: ApiClient) -> list[Finding]:
    findings = [finding async for finding in _api_services(client)]
    findings += [finding async for finding in _hpas(client)]
    findings += [finding async for finding in _scaled_objects(client)]
    return findings


# Who has the APIs


async def _api_services(client: ApiClient) -> AsyncIterator[Finding]:
    for version in CUSTOM_VERSIONS:
        yield await _api_service(client, f"{version}.{CUSTOM}", needed=True)
    yield await _api_service(client, f"{EXTERNAL_VERSION}.{EXTERNAL}", needed=False)


async def _api_service(client: ApiClient, name: str, needed: bool) -> Finding:
    subject = f"APIService {name}"
    try:
        found = await client.get(f"{_APISERVICES}{name}")
    except SourceError as error:
        if error.reason != "not_found":
            return wrong(subject, str(error))
        if needed:
            return note(subject, "is not there: HPAs cannot ask for custom metrics", _INSTALL)
        return ok(subject, "is not there: nobody serves external metrics, which KEDA or podgpu could")
    service = mapping_in(mapping_in(found.get("spec")).get("service"))
    owner = f"{service.get('namespace', '?')}/{service.get('name', '?')}" if service else "the API server itself"
    available = _condition(found, "Available")
    if available.get("status") == "True":
        return ok(subject, f"answered by {owner}")
    why = str(available.get("message") or available.get("reason") or "nobody says why")
    return wrong(
        subject,
        f"belongs to {owner}, which does not answer: {why}",
        f"while that is so no namespace can be deleted; see that its pods run, or: kubectl delete apiservice {name}",
    )


# What HPAs would be told


async def _hpas(client: ApiClient) -> AsyncIterator[Finding]:
    try:
        listed = await client.get(_HPAS, {"limit": str(_MOST)})
    except SourceError as error:
        yield wrong("HPAs", str(error))
        return
    if mapping_in(listed.get("metadata")).get("continue"):
        yield note("HPAs", f"there are more than {_MOST}: the first {_MOST} are looked at")
    asked = 0
    for hpa in objects_in(listed.get("items")):
        for metric in objects_in(mapping_in(hpa.get("spec")).get("metrics")):
            finding = await _hpa_metric(client, hpa, metric)
            if finding is not None:
                asked += 1
                yield finding
    if not asked:
        yield note("HPAs", f"none asks for a metric of podgpu's ({', '.join(sorted(_OURS))})")


async def _hpa_metric(client: ApiClient, hpa: Object, metric: Object) -> Finding | None:
    """None: it is no metric of podgpu's."""
    kind = str(metric.get("type"))
    asked = mapping_in(metric.get(kind.lower()))
    about = mapping_in(asked.get("metric"))
    name = str(about.get("name"))
    if kind not in ("Pods", "Object") or name not in _OURS:
        return None
    metadata = mapping_in(hpa.get("metadata"))
    namespace = str(metadata.get("namespace"))
    subject = f"HPA {namespace}/{metadata.get('name')}"
    try:
        query = {"metricLabelSelector": _labels(about.get("selector"))} if about.get("selector") else {}
        if kind == "Pods":
            query["labelSelector"] = await _pod_selector(client, hpa, namespace)
            path = f"pods/*/{name}"
        else:
            path = f"{_described(mapping_in(asked.get('describedObject')))}/{name}"
        place = f"/apis/{CUSTOM}/{CUSTOM_VERSIONS[0]}/namespaces/{quote(namespace)}/{path}"
        answer = await client.get(place, query)
    except SourceError as error:
        return wrong(subject, f"{name}: {error}", "an HPA without a figure leaves the number of replicas as it is")
    items = objects_in(answer.get("items"))
    values = [f"{mapping_in(item.get('describedObject')).get('name')} {item.get('value')}" for item in items]
    return ok(subject, f"{name}: {', '.join(values[:8])}{f' and {len(values) - 8} more' if len(values) > 8 else ''}")


async def _pod_selector(client: ApiClient, hpa: Object, namespace: str) -> str:
    """Of the target's pods, as its scale subresource has it: what the HPA controller goes by."""
    target = mapping_in(mapping_in(hpa.get("spec")).get("scaleTargetRef"))
    version, kind = str(target.get("apiVersion", "v1")), str(target.get("kind"))
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    path = f"{root}/namespaces/{quote(namespace)}/{kind.lower()}s/{quote(str(target.get('name')))}/scale"
    return str(mapping_in((await client.get(path)).get("status")).get("selector", ""))


def _described(described: Mapping[str, Any]) -> str:
    version, kind = str(described.get("apiVersion", "v1")), str(described.get("kind"))
    group = version.partition("/")[0] if "/" in version else ""
    if kind == "Namespace":
        return "metrics"
    return f"{kind.lower()}s{f'.{group}' if group else ''}/{quote(str(described.get('name')))}"


def _labels(selector: object) -> str:
    labels = mapping_in(mapping_in(selector).get("matchLabels"))
    return ",".join(f"{key}={value}" for key, value in labels.items())


# What ScaledObjects ask for


async def _scaled_objects(client: ApiClient) -> AsyncIterator[Finding]:
    try:
        listed = await client.get(_SCALED_OBJECTS, {"limit": str(_MOST)})
    except SourceError as error:
        yield ok("KEDA", "is not here") if error.reason == "not_found" else wrong("KEDA", str(error))
        return
    for scaled in objects_in(listed.get("items")):
        metadata = mapping_in(scaled.get("metadata"))
        namespace, name = str(metadata.get("namespace")), str(metadata.get("name"))
        for trigger in objects_in(mapping_in(scaled.get("spec")).get("triggers")):
            given = {str(key): str(value) for key, value in mapping_in(trigger.get("metadata")).items()}
            if str(trigger.get("type")).startswith("external") and "podgpu" in given.get("scalerAddress", ""):
                yield _trigger(f"ScaledObject {namespace}/{name}", namespace, given, trigger.get("metricType"))


def _trigger(subject: str, namespace: str, given: Mapping[str, str], metric_type: object) -> Finding:
    try:
        read = parse_trigger(namespace, given, _LONGEST_WINDOW)
    except Refusal as error:
        return wrong(subject, str(error), f"a trigger's keys are {', '.join(KEYS)}")
    text = f"{read.metric.name} of {read.whom.text}, {read.over.aggregate.name} over {read.over.window:g} s"
    if metric_type != "Value" and read.over.aggregate.name != "sum":
        return wrong(
            subject,
            f"{text}: metricType is {metric_type or 'AverageValue'}, which divides by the number of replicas once more",
            "set metricType: Value, or aggregate: sum",
        )
    return ok(subject, f"{text}, target {read.target:g}")


# Objects of the API


def _condition(found: Object, kind: str) -> Mapping[str, Any]:
    conditions = objects_in(mapping_in(found.get("status")).get("conditions"))
    return next((condition for condition in conditions if condition.get("type") == kind), {})
