"""The chart as a whole: helm's lint, Kubernetes' schemas, and what every object must have; each feature on and off."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from deploy.render import CHART, NAMESPACE, run_helm
from podgpu import __version__
from tests.deploy.chart import VARIANTS, Object, objects, of_kind, pods_of

CRDS = {"ServiceMonitor", "PodMonitor", "PrometheusRule", "Certificate"}
CLUSTER_WIDE = {"ClusterRole", "ClusterRoleBinding", "APIService"}
OLDEST, NEWEST = "1.25", ".".join(kubernetes_validate.latest_version().split(".")[:2])
BETWEEN = ("1.27", "1.29", "1.31", "1.33")
EVERYTHING = {"cluster": {"enabled": True, "replicas": 2}, "enrich": {"enabled": True, "kubernetes": {"dra": True}}}
EVERYTHING["autoscale"] = {"enabled": True}

# Else it reads the megabyte of definitions anew for every object.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)

variants = pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS.keys())


@variants
def test_lint(values: Mapping[str, Any], tmp_path: Path) -> None:
    (tmp_path / "values.json").write_text(json.dumps(values), encoding="utf-8")
    done = run_helm("lint", "--strict", str(CHART), "--namespace", NAMESPACE, "--values", str(tmp_path / "values.json"))
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


@variants
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_kubernetes_takes_every_object(values: Mapping[str, Any], version: str) -> None:
    for one in objects(values):
        if one["kind"] not in CRDS:
            validate(json.dumps(one), version)


@pytest.mark.parametrize("version", BETWEEN)
def test_so_do_the_versions_between(version: str) -> None:
    for one in objects(EVERYTHING):
        if one["kind"] not in CRDS:
            validate(json.dumps(one), version)


@cache  # most objects are the same in most variants
def validate(one: str, version: str) -> None:
    kubernetes_validate.validate(json.loads(one), version, strict=True)


def test_a_wrong_object_is_seen() -> None:
    """That the validation above validates."""
    (daemonset,) = of_kind("DaemonSet")
    daemonset["spec"]["template"]["spec"]["hostPid"] = True
    with pytest.raises(kubernetes_validate.ValidationError, match="hostPid"):
        kubernetes_validate.validate(daemonset, NEWEST, strict=True)


@variants
def test_objects_have_names_labels_and_a_namespace(values: Mapping[str, Any]) -> None:
    seen = set()
    for one in objects(values):
        metadata = one["metadata"]
        assert len(metadata["name"]) <= 63
        assert metadata["labels"]["app.kubernetes.io/part-of"] == "podgpu"
        assert ("namespace" in metadata) == (one["kind"] not in CLUSTER_WIDE)
        key = (one["kind"], metadata.get("namespace"), metadata["name"])
        assert key not in seen
        seen.add(key)


@variants
def test_selectors_find_the_pods(values: Mapping[str, Any]) -> None:
    rendered = objects(values)
    labels = [
        one["spec"]["template"]["metadata"]["labels"] for one in rendered if one["kind"] in ("DaemonSet", "Deployment")
    ]
    services = [one["metadata"]["labels"] for one in rendered if one["kind"] == "Service"]
    for one in rendered:
        selector = _selector(one)
        if selector is not None:
            among = services if one["kind"] == "ServiceMonitor" else labels
            assert sum(selector.items() <= some.items() for some in among) == 1, (one["kind"], selector)


def _selector(one: Object) -> dict[str, str] | None:
    match one["kind"]:
        case "Service":
            return dict(one["spec"]["selector"])
        case "DaemonSet" | "Deployment" | "PodDisruptionBudget" | "ServiceMonitor" | "PodMonitor":
            return dict(one["spec"]["selector"]["matchLabels"])
        case "NetworkPolicy":
            return dict(one["spec"]["podSelector"]["matchLabels"])
    return None


@variants
def test_mounts_and_volumes_belong_together(values: Mapping[str, Any]) -> None:
    for spec in pods_of(objects(values)):
        volumes = [volume["name"] for volume in spec.get("volumes", ())]
        assert len(volumes) == len(set(volumes))
        for one in spec["containers"]:
            mounts = one.get("volumeMounts", ())
            assert {mount["name"] for mount in mounts} <= set(volumes)
            assert len({mount["mountPath"] for mount in mounts}) == len(mounts)
            names = [variable["name"] for variable in one.get("env", ())]
            assert len(names) == len(set(names))


@variants
def test_probes_ask_a_port_that_is_there(values: Mapping[str, Any]) -> None:
    for spec in pods_of(objects(values)):
        for one in spec["containers"]:
            ports = {port["name"] for port in one.get("ports", ())}
            for probe in ("livenessProbe", "readinessProbe"):
                if probe in one:
                    assert one[probe]["httpGet"]["port"] in ports
                    assert one[probe]["timeoutSeconds"] >= 1


@variants
def test_every_container_has_a_memory_budget(values: Mapping[str, Any]) -> None:
    for spec in pods_of(objects(values)):
        for one in spec["containers"]:
            assert one["resources"]["requests"].keys() == {"cpu", "memory"}
            assert one["resources"]["limits"].keys() == {"memory"}, "a throttled tick is a late tick"
            assert not any("nvidia.com" in name for part in one["resources"].values() for name in part)


def test_the_version_is_the_packages() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert (chart["version"], chart["appVersion"]) == (__version__, __version__)


def test_nothing_of_the_operators_without_the_operator() -> None:
    everything = {"cluster": {"enabled": True}, "enrich": {"enabled": True}}
    assert not CRDS & {one["kind"] for one in objects(everything, operator=False)}
    assert {"ServiceMonitor", "PodMonitor", "PrometheusRule"} == CRDS & {one["kind"] for one in objects(everything)}


def test_switched_off_components_leave_nothing() -> None:
    off = {"exporter": {"enabled": False}, "rules": {"enabled": False}, "dashboards": {"enabled": False}}
    assert objects(off) == []


def test_a_digest_goes_before_the_tag() -> None:
    digest = "sha256:" + "a" * 64
    (daemonset,) = of_kind("DaemonSet", {"image": {"repository": "r/podgpu", "tag": "x", "digest": digest}})
    assert daemonset["spec"]["template"]["spec"]["containers"][0]["image"] == f"r/podgpu@{digest}"


def test_two_releases_of_one_name_do_not_meet() -> None:
    (role,) = of_kind("ClusterRole", {"exporter": {"kubernetes": {"dra": True}}})
    assert role["metadata"]["name"].startswith(f"{NAMESPACE}-")
