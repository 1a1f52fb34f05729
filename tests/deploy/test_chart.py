"""Rules for every object of the chart, in all variants: helm lint, Kubernetes' schemas, least
privilege.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from deploy.render import CHART, NAMESPACE, ROOT, run_helm
from tests.deploy.chart import VARIANTS, Object, level, notes, objects, pods_of
from tests.deploy.shipped_options import check_options, ours

CRDS = {"ServiceMonitor", "PodMonitor", "PrometheusRule", "Certificate"}
CLUSTER_WIDE = {"ClusterRole", "ClusterRoleBinding", "APIService"}
OLDEST, NEWEST = "1.25", ".".join(kubernetes_validate.latest_version().split(".")[:2])
LINTED = ("defaults", "cluster of two", "autoscale with all", "enrich with all", "hook with all")

# The cache avoids reading a megabyte of definitions for every object.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)


@cache
def rendered_variants() -> Mapping[str, list[Object]]:
    """Returns the objects of each variant. Callers share the result and must not change it."""
    return {name: objects(values) for name, values in VARIANTS.items()}


def every_object() -> Iterator[tuple[str, Object]]:
    """Yields each object with the name of its variant."""
    return ((name, one) for name, rendered in rendered_variants().items() for one in rendered)


def every_pod() -> Iterator[tuple[str, Object]]:
    return (
        (name, spec) for name, rendered in rendered_variants().items() for spec in pods_of(rendered)
    )


def every_container() -> Iterator[tuple[str, Object]]:
    return ((name, one) for name, spec in every_pod() for one in spec["containers"])


@pytest.mark.parametrize("name", LINTED)
def test_lint(name: str, tmp_path: Path) -> None:
    path = tmp_path / "values.json"
    path.write_text(json.dumps(VARIANTS[name]), encoding="utf-8")
    done = run_helm("lint", "--strict", str(CHART), "--namespace", NAMESPACE, "--values", str(path))
    assert done.returncode == 0, done.stdout
    assert "[WARNING]" not in done.stdout


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_objects_match_the_schemas_of_kubernetes(version: str) -> None:
    assert list(refused(every_object(), version)) == []


def refused(found: Iterator[tuple[str, Object]], version: str) -> Iterator[str]:
    """Yields the validation errors. Equal objects of several variants are validated once."""
    seen = set()
    for name, one in found:
        text = json.dumps(one)
        if one["kind"] not in CRDS and text not in seen:
            seen.add(text)
            try:
                kubernetes_validate.validate(one, version, strict=True)
            except kubernetes_validate.ValidationError as e:
                yield f"{name}: {one['kind']} {one['metadata']['name']}: {e.message}"


def test_objects_have_names_labels_and_a_namespace() -> None:
    seen = set()
    for name, one in every_object():
        metadata = one["metadata"]
        assert len(metadata["name"]) <= 63, name
        assert metadata["labels"]["app.kubernetes.io/part-of"] == "podgpu", name
        assert ("namespace" in metadata) == (one["kind"] not in CLUSTER_WIDE), name
        key = (name, one["kind"], metadata.get("namespace"), metadata["name"])
        assert key not in seen
        seen.add(key)


def test_selectors_match_one_workload_or_service() -> None:
    for name, rendered in rendered_variants().items():
        workloads = [one for one in rendered if one["kind"] in ("DaemonSet", "Deployment")]
        labels = [one["spec"]["template"]["metadata"]["labels"] for one in workloads]
        services = [one["metadata"]["labels"] for one in rendered if one["kind"] == "Service"]
        for one in rendered:
            selector = _selector(one)
            if selector is not None:
                among = services if one["kind"] == "ServiceMonitor" else labels
                matches = sum(selector.items() <= some.items() for some in among)
                assert matches == 1, (name, one["kind"], selector)


def _selector(one: Object) -> dict[str, str] | None:
    match one["kind"]:
        case "Service":
            return dict(one["spec"]["selector"])
        case "DaemonSet" | "Deployment" | "PodDisruptionBudget" | "ServiceMonitor" | "PodMonitor":
            return dict(one["spec"]["selector"]["matchLabels"])
        case "NetworkPolicy":
            return dict(one["spec"]["podSelector"]["matchLabels"])
    return None


def test_mounts_have_volumes() -> None:
    for name, spec in every_pod():
        volumes = [volume["name"] for volume in spec.get("volumes", ())]
        assert len(volumes) == len(set(volumes)), name
        for one in spec["containers"]:
            mounts = one.get("volumeMounts", ())
            assert {mount["name"] for mount in mounts} <= set(volumes), name
            assert len({mount["mountPath"] for mount in mounts}) == len(mounts), name
            variables = [variable["name"] for variable in one.get("env", ())]
            assert len(variables) == len(set(variables)), name


def test_probes_use_a_port_of_the_container() -> None:
    for name, one in every_container():
        ports = {port["name"] for port in one.get("ports", ())}
        for probe in ("livenessProbe", "readinessProbe"):
            if probe in one:
                assert one[probe]["httpGet"]["port"] in ports, name
                assert one[probe]["timeoutSeconds"] >= 1, name


def test_containers_have_requests_and_a_memory_limit() -> None:
    for name, one in every_container():
        assert one["resources"]["requests"].keys() == {"cpu", "memory"}, name
        assert one["resources"]["limits"].keys() == {"memory"}, (
            f"{name}: a CPU limit would delay the loops"
        )
        assert not any("nvidia.com" in key for part in one["resources"].values() for key in part), (
            name
        )


def test_every_flag_and_variable_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rendered in rendered_variants().items():
        for one in ours(rendered):
            check_options(one, monkeypatch, name)


def test_privileges_only_for_enabled_features() -> None:
    for name, spec in every_pod():
        values = VARIANTS[name]
        driver_root = values.get("gpus", {}).get("access") == "driver-root"
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert "hostIPC" not in spec, name
        for one in spec["containers"]:
            context = one["securityContext"]
            if one["name"] != "dcgm-exporter":  # NVIDIA's exporter may write files
                assert context["readOnlyRootFilesystem"] is True, name
            assert context.get("privileged", False) == (
                driver_root and one["name"] != "node-exporter"
            ), name
            if not context.get("privileged"):
                added = context["capabilities"].get("add", [])
                assert context["capabilities"]["drop"] == ["ALL"], name
                assert context["allowPrivilegeEscalation"] == ("SYS_ADMIN" in added), name
                assert not added or _needs_capability(values), (name, added)


def _needs_capability(values: Mapping[str, Any]) -> bool:
    return bool(
        values.get("gpus", {}).get("migMonitoring")
        or values.get("exporter", {}).get("addCapabilities")
        or values.get("exporter", {}).get("xidBlame")
        or values.get("exporter", {}).get("usage", {}).get("from") == "exact"
        or values.get("enrich", {}).get("dcgmExporter", {}).get("profiling")
    )


def test_notes_name_the_pod_security_level() -> None:
    for name, rendered in rendered_variants().items():
        needed = {level(spec) for spec in pods_of(rendered)}
        text = notes(VARIANTS[name])
        if "privileged" in needed:
            assert 'must allow the Pod Security level "privileged"' in text, name
            assert "pod-security.kubernetes.io/enforce=privileged" in text, name
        else:
            assert needed <= {"restricted"}, name
            assert 'can have the Pod Security level "restricted"' in text, name


def test_pages_and_sections_named_in_the_notes_exist() -> None:
    pages = set()
    for name, values in VARIANTS.items():
        shown = notes(values, operator=name != "defaults").replace("the README", "README.md")
        for section, page in re.findall(r'(?:"([^"]+)" in )?((?:docs/)?[\w-]+\.md)', shown):
            pages.add(page)
            text = (ROOT / page).read_text(encoding="utf-8")
            assert not section or f"## {section}\n" in text, (name, section)
        assert ("-autoscale" in shown) == values.get("autoscale", {}).get("enabled", False), name
    assert len(pages) > 1, "the notes name pages"


def test_no_write_access_to_the_api_server() -> None:
    for name, one in every_object():
        for rule in one.get("rules", ()) if one["kind"] in ("Role", "ClusterRole") else ():
            if rule.get("resources") == [
                "apiservices"
            ]:  # permissions of autoscale, tested in test_chart_autoscale.py
                assert rule["resourceNames"], name
                continue
            if rule.get("resources") in (["tokenreviews"], ["subjectaccessreviews"]):
                # cluster.auth: a review is created to ask a question, and changes nothing
                assert rule["verbs"] == ["create"], name
                continue
            if "-exporter-w" in one["metadata"]["name"]:
                # exporter.write, and its removal, tested in test_chart_security.py
                continue
            assert set(rule["verbs"]) <= {"get", "list", "watch"}, name
            assert "secrets" not in rule.get("resources", ()), name
        if one["kind"] == "ServiceAccount":
            assert one["automountServiceAccountToken"] is False, name
