"""This module makes the objects that the metrics APIs answer with: discovery, lists of values, refusals. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any

from podgpu.autoscale.api_paths import (
    CUSTOM,
    CUSTOM_VERSIONS,
    EXTERNAL,
    EXTERNAL_VERSION,
    WORKLOADS,
    Asked,
    Described,
)
from podgpu.autoscale.metrics import METRICS
from podgpu.autoscale.questions import LEAST, Answer, PodFigure
from podgpu.autoscale.refusal import Kind

Object = dict[str, Any]

STATUS_OF = {Kind.BAD_REQUEST: 400, Kind.FORBIDDEN: 403, Kind.NOT_FOUND: 404, Kind.NO_DATA: 503}
_RESOURCES = ("pods", "nodes", "namespaces", *WORKLOADS)
_NOT_NAMESPACED = frozenset({"nodes", "namespaces"})


# Discovery


def group_list(external: bool) -> Object:
    groups = [_group(CUSTOM, CUSTOM_VERSIONS)]
    if external:
        groups.append(_group(EXTERNAL, (EXTERNAL_VERSION,)))
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


def group(name: str) -> Object:
    versions = CUSTOM_VERSIONS if name == CUSTOM else (EXTERNAL_VERSION,)
    return {"kind": "APIGroup", "apiVersion": "v1", **_group(name, versions)}


def _group(name: str, versions: Sequence[str]) -> Object:
    listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}


def custom_resources(version: str) -> Object:
    named = (f"{resource}/{metric.name}" for resource in _RESOURCES for metric in METRICS)
    return _resources(CUSTOM, version, "MetricValueList", named)


def external_resources() -> Object:
    return _resources(EXTERNAL, EXTERNAL_VERSION, "ExternalMetricValueList", (metric.name for metric in METRICS))


def _resources(group_name: str, version: str, kind: str, names: Iterable[str]) -> Object:
    resources = [
        {
            "name": name,
            "singularName": "",
            "namespaced": name.partition("/")[0] not in _NOT_NAMESPACED,
            "kind": kind,
            "verbs": ["get"],
        }
        for name in names
    ]
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": f"{group_name}/{version}",
        "resources": resources,
    }


AGGREGATED_TYPE = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"


def aggregated_discovery(external: bool) -> Object:
    """Everything at once, as API servers since 1.30 ask for it."""
    items = [_discovered(CUSTOM, {version: custom_resources(version) for version in CUSTOM_VERSIONS})]
    if external:
        items.append(_discovered(EXTERNAL, {EXTERNAL_VERSION: external_resources()}))
    return {"kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {}, "items": items}


def _discovered(name: str, versions: Mapping[str, Object]) -> Object:
    listed = [
        {"version": version, "freshness": "Current", "resources": _by_parent(resources["resources"])}
        for version, resources in versions.items()
    ]
    return {"metadata": {"name": name}, "versions": listed}


def _by_parent(resources: Iterable[Object]) -> list[Object]:
    """`pods/gpu_power` is a subresource of `pods`, which has no verbs of its own."""
    found: dict[str, Object] = {}
    for resource in resources:
        name, slash, metric = resource["name"].partition("/")
        kind = {"group": "", "version": "", "kind": resource["kind"]}
        parent = found.setdefault(
            name,
            {
                "resource": name,
                "responseKind": kind,
                "scope": "Namespaced" if resource["namespaced"] else "Cluster",
                "singularResource": "",
                "verbs": [] if slash else resource["verbs"],
            },
        )
        if slash:
            subresource = {"subresource": metric, "responseKind": kind, "verbs": resource["verbs"]}
            parent.setdefault("subresources", []).append(subresource)
    return list(found.values())


def openapi_v2(version: str) -> Object:
    """No path is described; without an answer the API server's log would complain for ever."""
    return {"swagger": "2.0", "info": {"title": "podgpu autoscale", "version": version}, "paths": {}}


# Values


def quantity(value: float) -> str:
    """In thousandths where it is not whole: `73500m`. What is not 0 is never told as 0."""
    thousandths = round(value * 1000)
    if thousandths == 0 and value > 0:
        thousandths = round(LEAST * 1000)
    whole, rest = divmod(thousandths, 1000)
    return str(whole) if rest == 0 else f"{thousandths}m"


def timestamp(at: float) -> str:
    return datetime.fromtimestamp(math.floor(at), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def custom_values(version: str, asked: Asked, answers: Iterable[tuple[Described, Answer]]) -> Object:
    make = _item_v1beta2 if version == "v1beta2" else _item_v1beta1
    return {
        "kind": "MetricValueList",
        "apiVersion": f"{CUSTOM}/{version}",
        "metadata": {},
        "items": [make(asked, described, answer) for described, answer in answers],
    }


def pod_values(version: str, asked: Asked, figures: Sequence[PodFigure], ends_at: float, interval: float) -> bytes:
    """The same of pods, as bytes: there may be thousands, and all but name, window and value is said once."""
    (item,) = custom_values(version, asked, [(asked.described("NAME"), Answer(0.0, ends_at, 0.0))])["items"]
    item |= {"windowSeconds" if version == "v1beta2" else "window": "WINDOW", "value": "VALUE"}
    pattern = json.dumps(item, separators=(",", ":")).replace("%", "%%")
    for word in ('"NAME"', '"WINDOW"', '"VALUE"'):
        pattern = pattern.replace(word, "%s", 1)
    windows = {rounds: round(rounds * interval) for rounds in {of.rounds for of in figures}}
    items = ",".join([pattern % (_quoted(of.name), windows[of.rounds], f'"{quantity(of.value)}"') for of in figures])
    whole = json.dumps(custom_values(version, asked, ()), separators=(",", ":"))
    return whole.replace('"items":[]', f'"items":[{items}]').encode()


def _item_v1beta2(asked: Asked, described: Described, answer: Answer) -> Object:
    return {
        "describedObject": _reference(described),
        "metric": {"name": asked.metric.name, "selector": _selector(asked)},
        "timestamp": timestamp(answer.at),
        "windowSeconds": round(answer.window),
        "value": quantity(answer.value),
    }


def _item_v1beta1(asked: Asked, described: Described, answer: Answer) -> Object:
    return {
        "describedObject": _reference(described),
        "metricName": asked.metric.name,
        "timestamp": timestamp(answer.at),
        "window": round(answer.window),
        "value": quantity(answer.value),
        "selector": _selector(asked),
    }


def _selector(asked: Asked) -> Object | None:
    return {"matchLabels": dict(asked.given)} if asked.given else None


def _reference(described: Described) -> Object:
    found = {"kind": described.kind, "name": described.name, "apiVersion": described.api_version}
    return {**found, "namespace": described.namespace} if described.namespace else found


def external_value(asked: Asked, answer: Answer) -> Object:
    item = {
        "metricName": asked.metric.name,
        "metricLabels": {},
        "timestamp": timestamp(answer.at),
        "window": round(answer.window),
        "value": quantity(answer.value),
    }
    return {
        "kind": "ExternalMetricValueList",
        "apiVersion": f"{EXTERNAL}/{EXTERNAL_VERSION}",
        "metadata": {},
        "items": [item],
    }


# Refusals


def status(code: int, reason: str, message: str) -> Object:
    """As the API server writes them: its clients show the message."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }
