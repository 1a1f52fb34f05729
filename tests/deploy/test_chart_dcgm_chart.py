"""Values of dcgm-exporter's chart are accepted, or rejected with the name of the value to use."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from deploy.render import CHART
from podgpu.cli.options import EXPORTER_OPTIONS
from tests.deploy.chart import VARIANTS, container, env, of_kind, pod, refusal

SEED = VARIANTS["seed 001's values where it has them"]


def test_values_of_nvidias_walk_through_are_accepted() -> None:
    assert container(SEED)["args"] == ["-c", "1000"]
    assert env(SEED)["DCGM_EXPORTER_CONFIGMAP_DATA"] == "default:exporter-metrics-volume"
    assert pod(SEED)["automountServiceAccountToken"] is True, (
        "the ConfigMap is read from the API server"
    )
    volume = {
        "name": "exporter-metrics-volume",
        "configMap": {"name": "exporter-metrics-config-map"},
    }
    assert volume in pod(SEED)["volumes"]


@pytest.mark.parametrize(
    ("values", "advice"),
    [
        ({"tolerations": [{"operator": "Exists"}]}, "tolerations -> gpuNodes.tolerations"),
        ({"nodeSelector": {"a": "b"}}, "nodeSelector -> gpuNodes.nodeSelector"),
        ({"kubeletPath": "/var/lib/kubelet/pod-resources"}, "kubeletPath -> kubeletRoot"),
        ({"customMetrics": "a"}, "customMetrics -> exporter.counters.csv"),
        (
            {"service": {"port": 9400}, "exporter": {"enabled": False}},
            "service -> exporter.service",
        ),
        ({"serviceMonitor": {"interval": "30s"}}, "serviceMonitor.interval -> monitor.interval"),
    ],
)
def test_other_values_are_refused_with_the_value_to_use(
    values: dict[str, Any], advice: str
) -> None:
    message = refusal(values)
    assert "values of dcgm-exporter's chart, and what to use here" in message
    assert f"\n  {advice}" in message


DCGM_EXPORTER_4_8_4 = {
    "affinity", "arguments", "basicAuth", "config", "customMetrics", "daemonSetAnnotations", "debugDump",
    "extraConfigMapVolumes",
    "extraEnv", "extraHostVolumes", "extraVolumeMounts", "fullnameOverride", "hostNetwork", "hostPID", "image",
    "imagePullSecrets", "initContainers", "kubeletPath", "kubernetes", "kubernetesDRA", "livenessProbe",
    "nameOverride", "namespaceOverride", "nodeSelector", "podAnnotations", "podLabels", "podSecurityContext",
    "priorityClassName", "readinessProbe", "resources", "rollingUpdate", "runtimeClassName", "securityContext",
    "service", "serviceAccount", "serviceMonitor", "tlsServerConfig", "tolerations",
}  # fmt: skip
"""The values of dcgm-exporter's chart 4.8.4."""


def test_every_value_of_the_other_chart_is_used_or_named_in_one_message() -> None:
    used = {
        "arguments", "extraConfigMapVolumes", "extraEnv", "fullnameOverride", "image",
        "imagePullSecrets", "livenessProbe", "nameOverride", "podAnnotations", "podLabels",
        "priorityClassName", "readinessProbe", "resources", "runtimeClassName",
    }  # fmt: skip
    refused = DCGM_EXPORTER_4_8_4 - used
    values: dict[str, Any] = dict.fromkeys(sorted(refused), "x")
    values["serviceMonitor"] = {"enabled": True, "interval": "30s", "honorLabels": False}
    named = set(re.findall(r"^  ([\w.]+) -> ", refusal(values), re.MULTILINE))
    # serviceMonitor.enabled is used.
    refused |= {"serviceMonitor.interval", "serviceMonitor.honorLabels"}
    assert named == refused - {"serviceMonitor"}


def test_unknown_values_of_the_service_monitor_are_refused() -> None:
    assert "serviceMonitor: Additional property intervall" in refusal(
        {"serviceMonitor": {"intervall": "15s"}}
    )


def test_values_of_nvidias_end_to_end_tests_are_accepted() -> None:
    values = {
        "serviceMonitor": {"enabled": False},
        "resources": {"requests": {"cpu": "1000m", "memory": "1024Mi"}},
        "readinessProbe": {"initialDelaySeconds": 45},
        "livenessProbe": {"initialDelaySeconds": 45},
        "image": {
            "repository": "registry.example/podgpu",
            "tag": "1",
            "pullPolicy": "IfNotPresent",
        },
        "arguments": ["-f=/etc/dcgm-exporter/default-counters.csv", "--debug"],
        "runtimeClassName": "nvidia",
    }
    exporter = container(values)
    assert exporter["resources"] == values["resources"]
    assert exporter["readinessProbe"]["initialDelaySeconds"] == 45
    assert exporter["readinessProbe"]["periodSeconds"] == 2
    assert exporter["livenessProbe"]["initialDelaySeconds"] == 45
    assert pod(values)["runtimeClassName"] == "nvidia"
    assert of_kind("ServiceMonitor", values) == []
    assert (
        len(of_kind("ServiceMonitor", {"serviceMonitor": {"enabled": True}}, operator=False)) == 1
    )


def exists(values: Any, path: str) -> bool:
    for key in path.split("."):
        if not isinstance(values, dict) or key not in values:
            return False
        values = values[key]
    return True


# --- flags that need a port, a mount or permissions


def standing_for() -> list[dict[str, Any]]:
    text = (CHART / "templates" / "_dcgm_chart.tpl").read_text(encoding="utf-8")
    table: list[dict[str, Any]] = yaml.safe_load(
        text.split('define "podgpu.exporter.standsFor" -}}')[1].split("{{- end")[0]
    )
    return table


def test_flags_in_the_table_exist() -> None:
    options = {option.flag: option for option in EXPORTER_OPTIONS}
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    for one in standing_for():
        option = options[one["flags"][-1]]
        assert one["flags"] == [name for name in (option.short, option.flag) if name]
        assert one.get("env", option.env) == option.env
        assert exists(values, one["value"])


@pytest.mark.parametrize("one", standing_for(), ids=lambda one: one["flags"][-1])
def test_flags_and_variables_are_refused_with_the_value_to_use(one: dict[str, Any]) -> None:
    """Without this check, probes would use a port without a listener, or a feature would lack
    permissions.
    """
    short, long = one["flags"][0], one["flags"][-1]
    words = [f"--{long}=x"] if short == long else [f"-{short}", "x"]
    assert f"exporter.arguments: {words[0]} -> {one['value']}\n" in refusal(
        {"exporter": {"arguments": words}}
    )
    if "env" in one:
        given = [{"name": one["env"], "value": "x"}]
        assert f"exporter.extraEnv: {one['env']} -> {one['value']}\n" in refusal(
            {"extraEnv": given}
        )


def test_all_flags_are_named_in_one_message() -> None:
    message = refusal(
        {"arguments": ["-a", ":9401", "-k"], "extraEnv": [{"name": "PODGPU_USAGE_FROM"}]}
    )
    for word in ("-a -> exporter.port", "-k -> exporter.kubernetes.enabled", "exporter.usage.from"):
        assert word in message
