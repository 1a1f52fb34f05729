"""The examples in deploy/autoscaling/direct are valid for Kubernetes, KEDA and podgpu."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
import yaml

from podgpu.autoscale.requests import parse_path, parse_trigger
from tests.deploy.fleet import ROOT

FOLDER = ROOT / "deploy" / "autoscaling" / "direct"
HPAS = ("hpa-pods.yaml", "hpa-scale-to-zero.yaml")
SCALED = ("scaledobject.yaml", "scaledobject-wake-up.yaml")
_SCALED_OBJECT = {
    "scaleTargetRef": {"apiVersion", "kind", "name", "envSourceContainerName"},
    "triggers": {"type", "name", "metricType", "metadata", "authenticationRef", "useCachedMetrics"},
    "": {"scaleTargetRef", "triggers", "pollingInterval", "cooldownPeriod", "initialCooldownPeriod", "idleReplicaCount"}
    | {"minReplicaCount", "maxReplicaCount", "advanced", "fallback"},
}
"""Keys of a ScaledObject's spec (keda.sh/v1alpha1), and of two of its parts."""


def load(name: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")) if one]


@pytest.mark.parametrize("name", HPAS)
def test_an_hpa_is_valid(name: str) -> None:
    (hpa,) = load(name)
    newest = kubernetes_validate.latest_version()
    assert [int(part) for part in newest.split(".")[:2]] >= [1, 37]
    kubernetes_validate.validate(hpa, newest, strict=True)


@pytest.mark.parametrize("name", HPAS)
def test_podgpu_understands_the_requests_of_an_hpa(name: str) -> None:
    (hpa,) = load(name)
    target = hpa["spec"]["scaleTargetRef"]["name"]
    for metric in hpa["spec"]["metrics"]:
        if metric["type"] == "External":
            continue  # another component's
        source = metric[metric["type"].lower()]
        where = "pods/*" if metric["type"] == "Pods" else f"deployments.apps/{target}"
        selector = ",".join(f"{key}={value}" for key, value in source["metric"]["selector"]["matchLabels"].items())
        found = parse_path(f"serving/{where}/{source['metric']['name']}", {"metricLabelSelector": selector}, 600.0)
        assert found.metric.name == "gpu_utilization"
        assert found.pods.namespace == "serving"


@pytest.mark.parametrize("name", SCALED)
def test_a_scaled_object_is_valid_for_keda_and_podgpu(name: str) -> None:
    scaled = load(name)[0]
    assert (scaled["apiVersion"], scaled["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    spec = scaled["spec"]
    assert spec.keys() <= _SCALED_OBJECT[""]
    assert spec["scaleTargetRef"].keys() <= _SCALED_OBJECT["scaleTargetRef"]
    for trigger in spec["triggers"]:
        assert trigger.keys() <= _SCALED_OBJECT["triggers"]
        assert all(isinstance(value, str) for value in trigger["metadata"].values()), "KEDA takes texts alone"
        if trigger["type"] == "external":
            assert trigger["metricType"] == "Value", "a mean is not to be divided by the replicas once more"
            found = parse_trigger("serving", trigger["metadata"], 600.0)
            assert found.pods.owner == ("Deployment", spec["scaleTargetRef"]["name"])
