"""What values may be: typos and contradictions are refused with a sentence; every value of values.yaml is described."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from jsonschema import Draft7Validator

from deploy.render import CHART
from deploy.tables import fresh, pattern
from podgpu.holders.sources import SOURCES, SourceType
from tests.deploy.chart import VARIANTS, refusal, values_file

SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
DCGM_CHART = {
    name for name, one in SCHEMA["properties"].items() if "dcgm-exporter's chart" in one.get("description", "")
}
"""Values of dcgm-exporter's chart: see test_chart_dcgm_chart.py."""
HANDED_ON = {"global", "kubernetesObject"}
"""Objects whose keys are not ours to know."""


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"exporterr": {}}, "Additional property exporterr is not allowed"),
        ({"exporter": {"argument": ["-c", "1000"]}}, "exporter: Additional property argument is not allowed"),
        ({"exporter": {"arguments": "-c 1000"}}, "exporter.arguments: Invalid type. Expected: array, given: string"),
        ({"exporter": {"kubernets": {"enabled": True}}}, "exporter: Additional property kubernets is not allowed"),
        ({"exporter": {"kubernetes": {"podlabels": True}}}, "exporter.kubernetes: Additional property podlabels"),
        ({"exporter": {"kubernetes": {"enabled": "yes"}}}, "exporter.kubernetes.enabled: Invalid type"),
        ({"exporter": {"kubernetes": {"allocation": "kublet"}}}, "exporter.kubernetes.allocation: Does not match"),
        ({"exporter": {"kubernetes": {"allocation": "auto,kubelet"}}}, "exporter.kubernetes.allocation: Does not"),
        ({"exporter": {"port": 94000}}, "exporter.port: Must be less than or equal to 65535"),
        ({"exporter": {"interval": "30 s"}}, "exporter.interval: Does not match pattern"),
        ({"exporter": {"counters": {"set": "dcpp"}}}, 'must be one of the following: "", "default", "dcp"'),
        ({"exporter": {"dcgmNames": "4.7"}}, 'must be one of the following: "", "4.8", "4.9", "both"'),
        ({"exporter": {"monitor": {"kind": "serviceMonitor"}}}, '"ServiceMonitor", "PodMonitor"'),
        ({"exporter": {"monitor": {"enabled": "True"}}}, "exporter.monitor.enabled"),
        ({"exporter": {"monitor": {"additionalLabels": {"a": 1}}}}, "additionalLabels.a: Invalid type"),
        ({"exporter": {"addCapabilities": ["CAP_SYS_ADMIN"]}}, "exporter.addCapabilities.0"),
        ({"exporter": {"livenessProbe": {"timeout": 3}}}, "exporter.livenessProbe: Additional property timeout"),
        ({"exporter": {"resources": {"limit": {}}}}, "exporter.resources: Additional property limit"),
        ({"exporter": {"extraEnv": {"A": "b"}}}, "exporter.extraEnv: Invalid type. Expected: array"),
        ({"exporter": {"extraEnv": [{"name": "A", "valuefrom": {}}]}}, "Additional property valuefrom"),
        ({"exporter": {"updateStrategy": {"rollingUpdate": {"maxUnavailable": "10"}}}}, "maxUnavailable"),
        ({"exporter": {"usage": {"from": "exactly"}}}, '"samples", "switches", "exact"'),
        ({"gpus": {"access": "magic"}}, '"runtime", "volume-mounts", "cdi", "driver-root"'),
        ({"gpus": {"cdi": {"device": "all"}}}, "gpus.cdi.device: Does not match pattern"),
        ({"gpuNodes": {"labels": "gpu"}}, '"known", "operator", "hardware-type", "all"'),
        ({"kubeletRoot": "var/lib/kubelet"}, "kubeletRoot: Does not match pattern"),
        ({"image": {"digest": "sha256:abc"}}, "image.digest: Does not match pattern"),
        ({"cluster": {"replicas": "2"}}, "cluster.replicas: Invalid type. Expected: integer"),
        ({"cluster": {"prometheus": {"url": "prometheus:9090"}}}, "cluster.prometheus.url: Does not match pattern"),
        ({"enrich": {"textfile": {"name": "gpu.txt"}}}, "enrich.textfile.name: Does not match pattern"),
        ({"hook": {"nri": {"directory": "run/nri"}}}, "hook.nri.directory: Does not match pattern"),
        ({"hook": {"injekt": True}}, "injekt"),
        ({"cluster": {"prices": {"models": {"*": {"hour": 1}}}}}, "Additional property hour is not allowed"),
        ({"cluster": {"prices": "exmaple"}}, "cluster.prices: Does not match pattern"),
        ({"rules": {"enabled": "never"}}, "rules.enabled"),
        ({"rules": {"runbookBase": "wiki/alerts"}}, "rules.runbookBase: Does not match pattern"),
        ({"exporter": {"seLinuxOptions": {"typ": "spc_t"}}}, "seLinuxOptions: Additional property typ is not allowed"),
    ],
)
def test_a_wrong_value_is_refused_by_name(values: Mapping[str, Any], said: str) -> None:
    assert said in refusal(values)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"exporter": {"kubernetes": {"enabled": False, "dra": True}}},
            "exporter.kubernetes.dra is on, but exporter.kubernetes.enabled is false",
        ),
        (
            {"exporter": {"kubernetes": {"enabled": False, "podLabels": {"enabled": True}}}},
            "exporter.kubernetes.podLabels.enabled is on, but",
        ),
        (
            {"exporter": {"counters": {"csv": "a", "set": "dcp"}}},
            "csv and set both name the counters; keep one of them",
        ),
        ({"exporter": {"counters": {"configMap": {"namespace": "a"}}}}, "a namespace without a name"),
        (
            {"exporter": {"extraEnv": [{"name": "DCGM_EXPORTER_CONFIGMAP_DATA", "value": "counters"}]}},
            'DCGM_EXPORTER_CONFIGMAP_DATA "counters": write NAMESPACE:NAME',
        ),
        (
            {"exporter": {"extraEnv": [{"name": "DCGM_EXPORTER_KUBERNETES", "value": "false"}]}},
            "DCGM_EXPORTER_KUBERNETES is set by the chart: use the value exporter.kubernetes.enabled",
        ),
        (
            {"exporter": {"extraEnv": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "0"}]}},
            "exporter.extraEnv: NVIDIA_VISIBLE_DEVICES is set by the chart",
        ),
        ({"cluster": {"enabled": True, "arguments": ["-a", ":9500"]}}, "cluster.arguments: -a: use cluster.port"),
        (
            {"rules": {"enabled": True, "disabled": ["PodgpuPowerBreak"]}},
            "rules.disabled: there is no alert PodgpuPowerBreak; there are PodgpuXidError,",
        ),
        (
            {"rules": {"enabled": True, "exclude": ["alerts.yaml"]}},
            "there are podgpu-alerts.yaml, podgpu-recording.yaml",
        ),
        (
            {"dashboards": {"enabled": True, "exclude": ["podgpu-nodes.json"]}},
            "dashboards.exclude: there is no file podgpu-nodes.json",
        ),
        ({"gpus": {"access": "cdi", "migMonitoring": True}}, "gpus.migMonitoring is for gpus.access runtime"),
        (
            {"exporter": {"usage": {"from": "exact"}, "containerUsage": {"enabled": False}}},
            "exporter.containerUsage.enabled is false: there is no use to tell apart",
        ),
        (
            {"exporter": {"usage": {"from": "exact"}, "kubernetes": {"enabled": False}}},
            "it would run as uid 65534: Kubernetes gives an added capability to uid 0 only",
        ),
        ({"exporter": {"usage": {"from": "exact"}, "runAsUser": 1000}}, "Set exporter.runAsUser to 0"),
        (
            {"exporter": {"arguments": ["--usage-from=exact"]}},
            "exporter.arguments: --usage-from=exact: use the value exporter.usage.from",
        ),
        (
            {"exporter": {"extraEnv": [{"name": "PODGPU_USAGE_FROM", "value": "exact"}]}},
            "PODGPU_USAGE_FROM is set by the chart: use the value exporter.usage.from",
        ),
        ({"exporter": {"port": 9401, "webConfig": {"secretName": "web"}}}, "probes need a port of their own"),
        ({"cluster": {"enabled": True}, "exporter": {"enabled": False}}, "there is nobody to ask"),
        (
            {"cluster": {"enabled": True, "prometheus": {"secret": {"tokenKey": "token"}}}},
            "cluster.prometheus.secret has keys and no name",
        ),
        (
            {"cluster": {"enabled": True, "exporterAccess": {"secret": {"name": "a"}}}},
            "cluster.exporterAccess.secret names a Secret and no key of it",
        ),
        (
            {"cluster": {"enabled": True, "prometheus": {"username": "me"}}},
            "cluster.prometheus: username and secret.passwordKey go together",
        ),
        (
            {"enrich": {"enabled": True, "dcgmExporter": {"enabled": False}}},
            "say where dcgm-exporter's metrics are, such as http://$(HOST_IP):9400/metrics",
        ),
        ({"enrich": {"enabled": True, "nodeExporter": {"enabled": False}}}, "nobody would read the file"),
        (
            {"hook": {"enabled": True, "podlistDirectory": "/run/gpus"}},
            "make hook.podlistDirectory and exporter.kubernetes.podlistDirectory the same",
        ),
        (
            {"hook": {"enabled": True}, "exporter": {"kubernetes": {"podlistDirectory": "/run/gpus"}}},
            "the hook writes podlist.json in /var/lib/kubelet/pod-resources and the exporter reads it in /run/gpus",
        ),
        (
            {"hook": {"enabled": True, "arguments": ["--podlist=/tmp/x"]}},
            "hook.arguments: --podlist needs more than a flag here; use hook.podlistDirectory",
        ),
        ({"hook": {"enabled": True, "arguments": ["-a", ":1"]}}, "use hook.port"),
        (
            {"cluster": {"enabled": True, "historyDir": "emptyDir", "prometheus": {"url": "http://prometheus:9090"}}},
            "with cluster.prometheus.url the past is Prometheus'",
        ),
        (
            {"cluster": {"enabled": True, "historyDir": "claim:history", "replicas": 2}},
            "a claim is written to by one replica",
        ),
        ({"exporter": {"arguments": ["--history-dir=/tmp"]}}, "use the value exporter.historyDir"),
        (
            {"hook": {"enabled": True, "extraEnv": [{"name": "PODGPU_HOOK_INJECT", "value": "true"}]}},
            "hook.extraEnv: PODGPU_HOOK_INJECT is set by the chart",
        ),
    ],
)
def test_values_that_contradict_each_other_are_refused(values: Mapping[str, Any], said: str) -> None:
    assert said in refusal(values)


def closed_objects(schema: Any, name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(schema, dict):
        if schema.get("type") == "object":
            yield name, schema
        for key, inner in schema.items():
            yield from closed_objects(inner, key)
    elif isinstance(schema, list):
        for inner in schema:
            yield from closed_objects(inner, name)


def test_no_object_takes_a_key_it_does_not_know() -> None:
    for name, schema in closed_objects(SCHEMA):
        if name not in HANDED_ON and not (name == "items" and schema.keys() == {"type"}):
            assert "additionalProperties" in schema, name
            assert schema["additionalProperties"] is not True, name


def test_the_schema_describes_every_value_and_no_other() -> None:
    compare(values_file(), SCHEMA, "")


def compare(values: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> None:
    properties = dict(resolved(schema).get("properties", {}))
    if not path:
        properties = {name: one for name, one in properties.items() if name not in {"global", *DCGM_CHART}}
    optional = {"maxSurge", "currency", "models", "level", "role", "type", "user"} - values.keys()
    assert values.keys() == properties.keys() - optional or not properties, path
    for key, value in values.items():
        if isinstance(value, dict) and key in properties:
            compare(value, properties[key], f"{path}.{key}")


def resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = schema.get("$ref")
    return SCHEMA["definitions"][reference.rpartition("/")[2]] if reference else schema


def test_the_chart_knows_the_sources_that_podgpu_knows() -> None:
    """Its value `allocation`, and the alert that watches them."""
    for path, text in fresh():
        assert path.read_text(encoding="utf-8") == text, "run make manifests"


def test_its_pattern_is_how_sources_are_written() -> None:
    needs = SourceType(SOURCES["kubelet"].create, SOURCES["kubelet"].is_present, ":PATH")
    known = re.compile(pattern({**SOURCES, "needs": needs}))
    each = [f"{name}:/x" if source.argument else name for name, source in SOURCES.items()]
    for good in ("", "auto", *each, ",".join(each), "podlist,kubelet", "kubelet,needs:/x"):
        assert known.search(good), good
    for bad in ("kublet", "kubelet,", "needs", "needs:", "kubelet:/k.sock", "kubelet,auto", "podlist:"):
        assert not known.search(bad), bad


def test_the_schema_itself_is_one() -> None:
    Draft7Validator.check_schema(SCHEMA)
    validator = Draft7Validator(SCHEMA)
    assert not list(validator.iter_errors(values_file()))


def test_a_second_validator_agrees() -> None:
    """Editors and CI check values with other validators than helm's. A null takes a default away: helm's habit."""
    validator = Draft7Validator(SCHEMA)
    for name, values in VARIANTS.items():
        text = json.dumps(values)
        if "null" not in text:
            assert not list(validator.iter_errors(json.loads(text))), name
