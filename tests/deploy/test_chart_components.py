"""Values of the chart's components: mounts, ports, arguments, network policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.deploy.chart import VARIANTS, container, env, pod, the

Values = Mapping[str, Any]


def mounts(values: Values, component: str = "exporter", name: str = "podgpu") -> dict[str, str]:
    return {one["mountPath"]: one["name"] for one in container(values, component, name).get("volumeMounts", ())}


def host_paths(values: Values, component: str = "exporter") -> dict[str, str]:
    volumes = pod(values, component).get("volumes", ())
    return {one["name"]: one["hostPath"]["path"] for one in volumes if "hostPath" in one}


# --- the exporter


def test_the_kubelets_directory_is_where_it_is_said_to_be() -> None:
    values = VARIANTS["another kubelet"]
    assert host_paths(values) == {
        "pod-resources": "/var/lib/k0s/kubelet/pod-resources",
        "pod-logs": "/var/log/pods",
        "container-logs": "/var/log/containers",
    }
    assert mounts(values) == mounts({}), "inside, everything is where podgpu looks for it"


@pytest.mark.parametrize(("variant", "component"), [("web config", "exporter"), ("cluster behind TLS", "cluster")])
def test_protected_expositions_have_a_plain_port_for_probes(variant: str, component: str) -> None:
    one = container(VARIANTS[variant], component)
    assert {item["name"]: item["containerPort"] for item in one["ports"]}["probes"] == 9402
    assert one["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "probes"}
    assert one["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "probes"}
    assert mounts(VARIANTS[variant], component)["/etc/podgpu/web"] == "web-config"
    said = (*(str(value) for value in env(VARIANTS[variant], component).values()), *one.get("args", ()))
    assert any(word.endswith("/etc/podgpu/web/web-config.yml") for word in said)
    assert any(word.endswith(":9402") for word in said)


# --- network policies


def test_an_exporter_that_asks_nobody_may_ask_nobody() -> None:
    spec = the("NetworkPolicy", VARIANTS["network policies"])["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert spec["egress"] == []
    assert [rule["ports"][0]["port"] for rule in spec["ingress"]] == ["metrics", "probes"]
    assert the("NetworkPolicy", VARIANTS["network policies"], "enrich")["spec"]["egress"] == []


def test_the_cluster_may_ask_its_exporters() -> None:
    rules = the("NetworkPolicy", VARIANTS["network policies"], "cluster")["spec"]["egress"]
    labels = the("DaemonSet", VARIANTS["network policies"])["spec"]["selector"]["matchLabels"]
    assert rules[-1]["to"] == [{"podSelector": {"matchLabels": labels}}]
    assert {port["port"] for port in rules[0]["ports"]} == {53, 5353}, "DNS"
    everywhere = the("NetworkPolicy", VARIANTS["network policies everywhere"], "cluster")["spec"]["egress"][-1]
    assert everywhere["to"] == [{"podSelector": {"matchLabels": labels}, "namespaceSelector": {}}]


# --- the cluster view


def test_the_cluster_finds_this_releases_exporters() -> None:
    arguments = dict(
        word.removeprefix("--").split("=", 1) for word in container(VARIANTS["cluster"], "cluster")["args"]
    )
    namespace, _, selector = arguments["discover-kubernetes"].partition("/")
    wanted = dict(pair.split("=") for pair in selector.split(","))
    service = the("Service", VARIANTS["cluster"])
    assert namespace == service["metadata"]["namespace"]
    assert wanted.items() <= service["metadata"]["labels"].items(), "an EndpointSlice has its Service's labels"
    assert service["spec"]["ports"][0]["name"] == "metrics", "the port that is scraped"


def test_the_cluster_asks_prometheus_where_there_is_one() -> None:
    values = VARIANTS["cluster by Prometheus"]
    assert container(values, "cluster")["args"] == [
        "--address=:9401",
        "--prometheus=http://prometheus:9090",
        '--match=cluster="a"',
        "--prometheus-tenant=team-a",
        "--prometheus-username=podgpu",
        "--prometheus-password-file=/etc/podgpu/prometheus/password",
        "--prometheus-ca-file=/etc/podgpu/prometheus/ca.crt",
        "--prometheus-insecure-skip-verify=true",
        "--owners=none",
    ]
    assert mounts(values, "cluster")["/etc/podgpu/prometheus"] == "prometheus-access"


# --- enrich


def test_seed_000s_daemonset() -> None:
    """dcgm-exporter, podgpu and node_exporter in one pod; one writes into the directory, one reads."""
    values = VARIANTS["enrich"]
    assert [one["name"] for one in pod(values, "enrich")["containers"]] == ["podgpu", "dcgm-exporter", "node-exporter"]
    assert mounts(values, "enrich")["/run/textfile"] == "textfile"
    reading = container(values, "enrich", "node-exporter")
    assert reading["volumeMounts"] == [{"name": "textfile", "mountPath": "/run/textfile", "readOnly": True}]
    assert "--collector.textfile.directory=/run/textfile" in reading["args"]
    assert container(values, "enrich", "dcgm-exporter")["args"] == ["-a", "127.0.0.1:9400"]
    assert "--in=http://127.0.0.1:9400/metrics" in container(values, "enrich")["args"]
    volumes = {one["name"]: one for one in pod(values, "enrich")["volumes"]}
    assert volumes["textfile"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "32Mi"}


# --- the hook


def test_the_hook_reaches_the_runtime_and_one_directory_and_nothing_else() -> None:
    values = VARIANTS["hook"]
    assert host_paths(values, "hook") == {"nri": "/var/run/nri", "podlist": "/var/lib/kubelet/pod-resources"}
    assert mounts(values, "hook") == {"/var/run/nri": "nri", "/var/lib/kubelet/pod-resources": "podlist"}
    spec = pod(values, "hook")
    assert spec["serviceAccountName"] == "podgpu-hook"
    assert spec["automountServiceAccountToken"] is False
    assert not any(spec.get(key) for key in ("hostPID", "hostNetwork", "hostIPC", "runtimeClassName"))
    assert container(values, "hook")["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert env(values, "hook")["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert env(values, "hook")["PODGPU_HOOK_INJECT"] == "false"


# --- history


def test_history_of_the_cluster_on_a_claim() -> None:
    """The old pod goes before the new one comes: they cannot both have the volume."""
    values = VARIANTS["history of the cluster"]
    assert "--history-dir=/var/lib/podgpu/history" in container(values, "cluster")["args"]
    spec = pod(values, "cluster")
    assert {"name": "history", "persistentVolumeClaim": {"claimName": "podgpu-history"}} in spec["volumes"]
    assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsUser"] == 65534
    assert {"name": "history", "emptyDir": {"sizeLimit": "64Mi"}} in pod(values)["volumes"]
