"""What autoscalers, their users and an API server may send to `podgpu autoscale`: selectors, triggers, paths, trust."""

from __future__ import annotations

import base64
import json
import math

from endurance.fuzz.mutate import Case, documents, texts
from endurance.fuzz.target import Target
from endurance.fuzz.targets_api import of_object
from podgpu.autoscale.api_paths import custom_attributes, external_attributes, parse_custom, parse_external
from podgpu.autoscale.front_proxy import parse_trust
from podgpu.autoscale.metrics import parse_aggregate, parse_target, parse_window
from podgpu.autoscale.pods import parse_running_pod
from podgpu.autoscale.refusal import Refusal
from podgpu.autoscale.reviews import parse_reviewed
from podgpu.autoscale.selectors import parse_selector
from podgpu.autoscale.trigger import parse_over, parse_trigger
from podgpu.autoscale.x509 import parse_validity

_SELECTORS = ("app=inference,tier!=web", "a in (b, c),!d", "example.com/x notin (y),size>5", "a")
_PATHS = (
    "namespaces/serving/pods/*/gpu_utilization",
    "nodes/n1/gpu_power",
    "namespaces/a/metrics/gpu_busy",
    "namespaces/a/deployments.apps/x/gpu_power",
    "namespaces/serving/gpu_utilization",
)
_TRIGGERS = (
    {"owner": "Deployment/x", "target": "60", "window": "5m", "aggregate": "p90"},
    {"selector": "app=x", "targetFromEnv": "1.5", "metric": "gpu_busy", "idleFor": "60", "missing": "leave-out"},
)
_POD = {
    "metadata": {"name": "a", "namespace": "n", "uid": "u", "labels": {"app": "x"}},
    "spec": {"containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1"}}}], "resourceClaims": []},
    "status": {"phase": "Running", "startTime": "2026-11-15T12:00:00Z"},
}
_CERTIFICATE = (
    "MIIBmDCCAT6gAwIBAgIQAO+99EQhmPWyA4gM56piXDAKBggqhkjOPQQDAjAsMSowKAYDVQQDDCFwb2RncHUgYXV0b3NjYWxlIDY5ZTI3NjkzMz"
    "ZjZTY2NjYwHhcNMjYwMTAxMDAwMDAwWhcNMzYwMTAxMDAwMDAwWjAsMSowKAYDVQQDDCFwb2RncHUgYXV0b3NjYWxlIDY5ZTI3NjkzMzZjZTY2"
    "NjYwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAAQT9ZU6y/CZPKcPlB3E4zUoRIV24XURK9snQMVUmqrFD7Lx6OT8joj9PrNoAqPE5wVN+1eWDu"
    "zROTMTUflzyM3go0IwQDAPBgNVHRMBAf8EBTADAQH/MA4GA1UdDwEB/wQEAwICBDAdBgNVHQ4EFgQUkC92qLypP1yXseQXk4DOKwbdq1kwCgYI"
    "KoZIzj0EAwIDSAAwRQIhAOZVUQCyf5PFjPeLEe7cIYMz/C7vaUlXV3H8/HI58psmAiAeCz4incgDpDITZwbbIct+fzU6dJK86MPDmeU0Nrtarg"
    "=="
)
_TRUST = {
    "data": {
        "requestheader-client-ca-file": f"-----BEGIN CERTIFICATE-----\n{_CERTIFICATE}\n-----END CERTIFICATE-----\n",
        "requestheader-allowed-names": '["front-proxy-client"]',
        "requestheader-username-headers": '["X-Remote-User"]',
    }
}
_REVIEW = {"authenticated": True, "user": {"username": "a", "uid": "u", "groups": ["g"], "extra": {"k": ["v"]}}}


def selector(case: Case) -> object:
    assert isinstance(case, str)
    found = parse_selector(case)
    found.matches({"app": "inference", "size": "12"})
    return found.requirements or None


def words(case: Case) -> object:
    """One of them reads it, or all say why not."""
    assert isinstance(case, str)
    found: list[object] = []
    for parse in (parse_aggregate, parse_target, lambda text: parse_window(text, "window", 600.0)):
        try:
            value = parse(case)
        except Refusal:
            continue
        else:
            assert not isinstance(value, float) or (math.isfinite(value) and value > 0)
            found.append(value)
    return found or None


def trigger(case: Case) -> object:
    try:
        metadata = json.loads(case)
    except (ValueError, RecursionError):
        return None
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        return None
    found = parse_trigger("serving", metadata, 600.0)
    assert found.target > 0
    parse_over({key: value for key, value in metadata.items() if key in ("window", "aggregate")}, 600.0)
    return found


def path(case: Case) -> object:
    assert isinstance(case, str)
    where, _, query = case.partition("?")
    asked = {"labelSelector": query, "metricLabelSelector": query[:40]}
    try:
        return parse_external(external_attributes(where, asked), asked, 600.0)
    except Refusal:
        return parse_custom(custom_attributes("v1beta2", where), asked, 600.0)


def validity(case: Case) -> object:
    assert isinstance(case, str)
    try:
        der = base64.b64decode(case, validate=True)
    except ValueError:
        return None
    return parse_validity(der)


AUTOSCALE_TARGETS = (
    Target("label-selectors", texts(_SELECTORS, ("in", "notin", "(", ")", "!", "!=", "==")), selector, (Refusal,)),
    Target("autoscale-words", texts(("p90", "mean", "5m", "90s", "60", "12.5", "max")), words),
    Target("scaled-object-triggers", documents(_TRIGGERS), trigger, (Refusal,)),
    Target("metrics-api-paths", texts(_PATHS, ("*", "pods", "?app=x", "%2A")), path, (Refusal,)),
    Target("running-pods", documents((_POD,)), of_object(parse_running_pod)),
    Target("front-proxy-trust", documents((_TRUST,)), of_object(parse_trust)),
    Target("token-reviews", documents((_REVIEW,)), of_object(parse_reviewed)),
    Target("certificate-validity", texts((_CERTIFICATE,)), validity),
)
