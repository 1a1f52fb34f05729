"""Values of dcgm-exporter's chart are accepted, or rejected with the name of the value to use."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from deploy.render import CHART
from podgpu.cli.options import EXPORTER_OPTIONS
from tests.deploy.chart import VARIANTS, container, env, pod, refusal

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
        ({"serviceMonitor": {"enabled": True}}, "Here it is monitor, with enabled, interval"),
        ({"tolerations": [{"operator": "Exists"}]}, "Here it is gpuNodes.tolerations"),
        ({"nodeSelector": {"a": "b"}}, "Here it is gpuNodes.nodeSelector"),
        ({"kubeletPath": "/var/lib/kubelet/pod-resources"}, "Here it is kubeletRoot"),
        ({"customMetrics": "a"}, "Here it is exporter.counters.csv"),
        (
            {"service": {"port": 9400}, "exporter": {"enabled": False}},
            "Here it is exporter.service",
        ),
    ],
)
def test_other_values_are_refused_with_the_value_to_use(
    values: dict[str, Any], advice: str
) -> None:
    (name, *_) = values
    assert f"{name} is a value of dcgm-exporter's chart. {advice}" in refusal(values)


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
    assert f"{words[0]}: use the value {one['value']}," in refusal(
        {"exporter": {"arguments": words}}
    )
    if "env" in one:
        given = [{"name": one["env"], "value": "x"}]
        assert f"{one['env']} is set by the chart: use the value {one['value']}," in refusal(
            {"extraEnv": given}
        )
