"""Monitors, rules and dashboards of the chart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from deploy.render import CHART
from tests.deploy.chart import VARIANTS, env, objects, of_kind, pod
from tests.deploy.relabelings import chart_monitor, endpoint_of
from tests.deploy.test_chart import CRDS


@pytest.mark.parametrize(
    ("variant", "component"),
    [
        ("defaults", "exporter"),
        ("pod monitors", "exporter"),
        ("cluster", "cluster"),
        ("enrich", "enrich"),
        ("hook", "hook"),
    ],
)
def test_monitor_scrapes_its_pods_and_keeps_pod_labels(variant: str, component: str) -> None:
    endpoint = endpoint_of(chart_monitor(VARIANTS[variant], component))
    containers = pod(VARIANTS[variant], component)["containers"]
    assert endpoint["port"] in {port["name"] for one in containers for port in one.get("ports", ())}
    assert endpoint["honorLabels"] is True
    dropped = [
        rule["regex"] for rule in endpoint["relabelings"] if rule.get("action") == "labeldrop"
    ]
    assert dropped == ["pod|namespace|container"]


@pytest.mark.parametrize("switch", [True, False, "auto"])
@pytest.mark.parametrize("operator", [True, False])
def test_auto_follows_the_cluster(switch: bool | str, operator: bool) -> None:
    everything = {"cluster": {"enabled": True}, "enrich": {"enabled": True}}
    values = {"monitor": {"enabled": switch}, "rules": {"enabled": switch}, **everything}
    wanted = (
        {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
        if switch is True or (switch and operator)
        else set()
    )
    assert CRDS & {one["kind"] for one in objects(values, operator)} == wanted


HOLDER_RULES = CHART / "files" / "rules" / "podgpu-holders.yaml"
RULE_FILES = sorted({*(CHART / "files" / "rules").glob("*.yaml")} - {HOLDER_RULES})
DASHBOARD_FILES = sorted((CHART / "files" / "dashboards").glob("*.json"))


def test_rule_objects_have_the_content_of_the_files() -> None:
    rendered = of_kind("PrometheusRule", {"rules": {"additionalLabels": {"release": "prometheus"}}})
    assert [one["spec"] for one in rendered] == [
        yaml.safe_load(file.read_text(encoding="utf-8")) for file in RULE_FILES
    ]
    assert RULE_FILES
    for one in rendered:
        assert one["apiVersion"] == "monitoring.coreos.com/v1"
        assert one["metadata"]["labels"]["release"] == "prometheus"


def test_rules_of_holders_only_without_their_labels_on_dcgm_series() -> None:
    values = {"exporter": {"kubernetes": {"dcgmHolderLabels": False}}}
    specs = [one["spec"] for one in of_kind("PrometheusRule", values)]
    assert yaml.safe_load(HOLDER_RULES.read_text(encoding="utf-8")) in specs
    assert len(specs) == len(RULE_FILES) + 1
    assert env(values)["PODGPU_DCGM_HOLDER_LABELS"] == "false"
    assert "PODGPU_DCGM_HOLDER_LABELS" not in env({})


def test_dashboard_objects_have_the_content_of_the_files() -> None:
    values = {"dashboards": {"annotations": {"grafana_folder": "GPU"}, "namespace": "grafana"}}
    rendered = [
        one
        for one in of_kind("ConfigMap", values)
        if "grafana_dashboard" in one["metadata"]["labels"]
    ]
    assert [json.loads(next(iter(one["data"].values()))) for one in rendered] == [
        json.loads(file.read_text(encoding="utf-8")) for file in DASHBOARD_FILES
    ]
    for one in rendered:
        assert one["metadata"]["annotations"] == {"grafana_folder": "GPU"}
        assert one["metadata"]["namespace"] == "grafana"
        assert len(json.dumps(one)) < 1_000_000, "a ConfigMap may have up to 1 MiB"


def rules(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    rendered = of_kind("PrometheusRule", values)
    return [rule for one in rendered for group in one["spec"]["groups"] for rule in group["rules"]]


@pytest.mark.parametrize(
    ("values", "alert"),
    [
        ({"rules": {"disabled": ["PodgpuPowerBrake"]}}, "PodgpuPowerBrake"),
        ({"exporter": {"enabled": False}}, "PodgpuExporterAbsent"),
    ],
)
def test_disabled_alerts(values: Mapping[str, Any], alert: str) -> None:
    assert [rule for rule in rules({}) if rule not in rules(values)] == [
        rule for rule in rules({}) if rule.get("alert") == alert
    ]
