"""The examples for the HPA and KEDA, with prometheus-adapter and a real Prometheus, and without
them.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from podgpu.scale.requests import parse_path, parse_trigger
from tests.deploy.fleet import ROOT, Fleet, Series, fleet_in, needs_servers
from tests.nodes.clock import wait_until

FOLDER = ROOT / "deploy" / "autoscaling"
FILES = sorted([*FOLDER.glob("*.yaml"), *FOLDER.glob("direct/hpa*.yaml")])


def load(file: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return loaded


def adapter() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(
        load(FOLDER / "prometheus-adapter.yaml")["data"]["config.yaml"]
    )
    return config


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_kubernetes_takes_it(file: Path) -> None:
    kubernetes_validate.validate(load(file), kubernetes_validate.latest_version(), strict=True)


# --- requests of an HPA to the adapter, and the adapter's queries


@dataclass(frozen=True)
class Request:
    """A request of the HPA to the adapter."""

    external: bool
    metric: str
    resource: str = ""
    """Label that names the requested objects."""
    names: tuple[str, ...] = ()
    namespace: str = ""


def request(hpa: Mapping[str, Any], pods: Sequence[str]) -> Request:
    (asked,) = hpa["spec"]["metrics"]
    namespace = hpa["metadata"]["namespace"]
    if asked["type"] == "External":
        return Request(True, asked["external"]["metric"]["name"])
    if asked["type"] == "Pods":
        return Request(False, asked["pods"]["metric"]["name"], "pod", tuple(pods), namespace)
    described = asked["object"]["describedObject"]
    assert (described["kind"], described["name"]) == ("Namespace", namespace)
    return Request(False, asked["object"]["metric"]["name"], "namespace", (described["name"],))


def rule_for(wanted: Request) -> dict[str, Any]:
    """Returns the rule for this metric and kind of object. Checks that there is only one."""
    rules = adapter()["externalRules" if wanted.external else "rules"]
    (found,) = [rule for rule in rules if rule["name"]["as"] == wanted.metric]
    if wanted.external:
        assert found["resources"] == {"namespaced": False}
    else:
        assert {"resource": wanted.resource} in found["resources"]["overrides"].values()
    return dict(found)


def filled(rule: Mapping[str, Any], series: str, wanted: Request) -> str:
    """Returns the adapter's query: the namespace first, then the objects. Several objects become a
    pattern.
    """
    matchers = [f'namespace="{wanted.namespace}"'] if wanted.namespace else []
    if wanted.names:
        operator = "=~" if len(wanted.names) > 1 else "="
        matchers.append(f'{wanted.resource}{operator}"{"|".join(wanted.names)}"')
    values = {"Series": series, "LabelMatchers": ",".join(matchers), "GroupBy": wanted.resource}
    return re.sub(r"<<\.(\w+)>>", lambda m: values[m[1]], rule["metricsQuery"])


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with (
        tempfile.TemporaryDirectory(prefix="pg", dir="/tmp") as folder,
        fleet_in(Path(folder)) as running,
    ):
        yield running


def told(fleet: Fleet, file: str, namespace: str, pods: Sequence[str] = ()) -> list[Series]:
    """Returns the values that the HPA of this file would get in that namespace."""
    hpa = load(FOLDER / file)
    hpa["metadata"]["namespace"] = namespace
    for asked in hpa["spec"]["metrics"]:
        if asked["type"] == "Object":
            asked["object"]["describedObject"]["name"] = namespace
    wanted = request(hpa, pods)
    rule = rule_for(wanted)
    names = {one["__name__"] for one in fleet.prometheus.series(rule["seriesQuery"])}
    return [one for name in names for one in fleet.prometheus.ask(filled(rule, name, wanted))]


@needs_servers
def test_values_of_the_cluster_a_namespace_and_each_pod(fleet: Fleet) -> None:
    """Busy loads use 30 % of the memory bandwidth: 27, 15, 15 and 12 %. The free GPU does not
    count.
    """

    def is_it() -> bool:
        values = [one.value for one in told(fleet, "hpa.yaml", "serving")]
        by_namespace = {
            one.labels["namespace"]: one.value
            for one in told(fleet, "hpa-namespace.yaml", "research")
        }
        by_pod = told(fleet, "hpa-pods.yaml", "batch", ["embed-0", "ocr-0"])  # on a shared GPU
        return (
            values == [pytest.approx((27 + 15 + 15 + 12) / 4, rel=0.1)]
            and by_namespace == {"research": pytest.approx((27 + 12) / 2, rel=0.1)}
            and {one.labels["pod"]: round(one.value / 5) for one in by_pod}
            == {"embed-0": 7, "ocr-0": 3}
        )

    wait_until(is_it, "the metrics of the three examples")


DIRECT_HPAS = ("hpa-pods.yaml", "hpa-scale-to-zero.yaml")
SCALED = ("scaledobject.yaml", "scaledobject-wake-up.yaml")
_SCALED_OBJECT = {
    "scaleTargetRef": {"apiVersion", "kind", "name", "envSourceContainerName"},
    "triggers": {"type", "name", "metricType", "metadata", "authenticationRef", "useCachedMetrics"},
    "": {
        "scaleTargetRef",
        "triggers",
        "pollingInterval",
        "cooldownPeriod",
        "initialCooldownPeriod",
        "idleReplicaCount",
    }
    | {"minReplicaCount", "maxReplicaCount", "advanced", "fallback"},
}
"""Valid keys of a ScaledObject's spec (keda.sh/v1alpha1) and of two of its fields."""


def _load_all(name: str) -> list[dict[str, Any]]:
    return [
        one
        for one in yaml.safe_load_all((FOLDER / "direct" / name).read_text(encoding="utf-8"))
        if one
    ]


@pytest.mark.parametrize("name", DIRECT_HPAS)
def test_podgpu_understands_the_requests_of_an_hpa(name: str) -> None:
    (hpa,) = _load_all(name)
    target = hpa["spec"]["scaleTargetRef"]["name"]
    for metric in hpa["spec"]["metrics"]:
        if metric["type"] == "External":
            continue  # external metrics come from another component
        source = metric[metric["type"].lower()]
        where = "pods/*" if metric["type"] == "Pods" else f"deployments.apps/{target}"
        selector = ",".join(
            f"{key}={value}" for key, value in source["metric"]["selector"]["matchLabels"].items()
        )
        found = parse_path(
            f"serving/{where}/{source['metric']['name']}", {"metricLabelSelector": selector}, 600.0
        )
        assert found.metric.name == "gpu_utilization"
        assert found.pods.namespace == "serving"


@pytest.mark.parametrize("name", SCALED)
def test_a_scaled_object_is_valid_for_keda_and_podgpu(name: str) -> None:
    scaled = _load_all(name)[0]
    assert (scaled["apiVersion"], scaled["kind"]) == ("keda.sh/v1alpha1", "ScaledObject")
    spec = scaled["spec"]
    assert spec.keys() <= _SCALED_OBJECT[""]
    assert spec["scaleTargetRef"].keys() <= _SCALED_OBJECT["scaleTargetRef"]
    for trigger in spec["triggers"]:
        assert trigger.keys() <= _SCALED_OBJECT["triggers"]
        assert all(isinstance(value, str) for value in trigger["metadata"].values()), (
            "KEDA accepts only strings"
        )
        if trigger["type"] == "external":
            assert trigger["metricType"] == "Value", (
                "a mean must not be divided by the number of replicas"
            )
            found, _target = parse_trigger("serving", trigger["metadata"], 600.0)
            assert found.pods.owner == ("Deployment", spec["scaleTargetRef"]["name"])
