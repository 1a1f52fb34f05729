"""Values of the chart's components: mounts, ports, arguments, network policies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from deploy.render import CHART, run_helm
from tests.deploy.chart import VARIANTS, container, env, of_kind, pod, the

Values = Mapping[str, Any]


def mounts(values: Values, component: str = "exporter", name: str = "podgpu") -> dict[str, str]:
    return {
        one["mountPath"]: one["name"]
        for one in container(values, component, name).get("volumeMounts", ())
    }


def host_paths(values: Values, component: str = "exporter") -> dict[str, str]:
    volumes = pod(values, component).get("volumes", ())
    return {one["name"]: one["hostPath"]["path"] for one in volumes if "hostPath" in one}


def test_another_directory_of_the_kubelet() -> None:
    values = VARIANTS["another kubelet"]
    assert host_paths(values) == {
        "pod-resources": "/var/lib/k0s/kubelet/pod-resources",
        "pod-logs": "/var/log/pods",
        "container-logs": "/var/log/containers",
    }
    assert mounts(values) == mounts({}), "paths in the container do not change"


@pytest.mark.parametrize(
    ("variant", "component"), [("web config", "exporter"), ("cluster behind TLS", "cluster")]
)
def test_web_config_adds_a_plain_port_for_probes(variant: str, component: str) -> None:
    one = container(VARIANTS[variant], component)
    assert {item["name"]: item["containerPort"] for item in one["ports"]}["probes"] == 9402
    assert one["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "probes"}
    assert one["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "probes"}
    assert mounts(VARIANTS[variant], component)["/etc/podgpu/web"] == "web-config"
    words = (
        *(str(value) for value in env(VARIANTS[variant], component).values()),
        *one.get("args", ()),
    )
    assert any(word.endswith("/etc/podgpu/web/web-config.yml") for word in words)
    assert any(word.endswith(":9402") for word in words)


def test_exporter_without_an_api_server_has_no_egress() -> None:
    spec = the("NetworkPolicy", VARIANTS["network policies"])["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert spec["egress"] == []
    assert [rule["ports"][0]["port"] for rule in spec["ingress"]] == ["metrics", "probes"]
    assert the("NetworkPolicy", VARIANTS["network policies"], "enrich")["spec"]["egress"] == []


def test_cluster_may_connect_to_its_exporters() -> None:
    rules = the("NetworkPolicy", VARIANTS["network policies"], "cluster")["spec"]["egress"]
    labels = the("DaemonSet", VARIANTS["network policies"])["spec"]["selector"]["matchLabels"]
    assert rules[-1]["to"] == [{"podSelector": {"matchLabels": labels}}]
    assert {port["port"] for port in rules[0]["ports"]} == {53, 5353}, "DNS"
    everywhere = the("NetworkPolicy", VARIANTS["network policies everywhere"], "cluster")["spec"][
        "egress"
    ][-1]
    assert everywhere["to"] == [{"podSelector": {"matchLabels": labels}, "namespaceSelector": {}}]


def test_cluster_discovers_the_exporters_of_its_release() -> None:
    arguments = dict(
        word.removeprefix("--").split("=", 1)
        for word in container(VARIANTS["cluster"], "cluster")["args"]
    )
    namespace, _, selector = arguments["discover-kubernetes"].partition("/")
    wanted = dict(pair.split("=") for pair in selector.split(","))
    service = the("Service", VARIANTS["cluster"])
    assert namespace == service["metadata"]["namespace"]
    assert wanted.items() <= service["metadata"]["labels"].items(), (
        "EndpointSlices have the labels of their Service"
    )
    assert service["spec"]["ports"][0]["name"] == "metrics", "this port is scraped"


def test_cluster_behind_an_ingress() -> None:
    ingress = the("Ingress", VARIANTS["cluster behind an Ingress"], "cluster")
    [rule] = ingress["spec"]["rules"]
    backend = rule["http"]["paths"][0]["backend"]["service"]
    service = the("Service", VARIANTS["cluster behind an Ingress"], "cluster")
    assert (rule["host"], backend["name"]) == ("gpus.example.com", service["metadata"]["name"])
    assert backend["port"]["name"] in {port["name"] for port in service["spec"]["ports"]}
    assert ingress["spec"]["tls"] == [{"hosts": ["gpus.example.com"], "secretName": "gpus-tls"}]


def test_cluster_reads_from_prometheus() -> None:
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


def test_hook_mounts_only_the_runtime_socket_and_one_directory() -> None:
    values = VARIANTS["hook"]
    assert host_paths(values, "hook") == {
        "nri": "/var/run/nri",
        "podlist": "/var/lib/kubelet/pod-resources",
    }
    assert mounts(values, "hook") == {
        "/var/run/nri": "nri",
        "/var/lib/kubelet/pod-resources": "podlist",
    }
    spec = pod(values, "hook")
    assert spec["serviceAccountName"] == "podgpu-hook"
    assert spec["automountServiceAccountToken"] is False
    assert not any(
        spec.get(key) for key in ("hostPID", "hostNetwork", "hostIPC", "runtimeClassName")
    )
    assert container(values, "hook")["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert env(values, "hook")["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert env(values, "hook")["PODGPU_HOOK_INJECT"] == "false"


def test_history_of_the_cluster_on_a_claim() -> None:
    """The old pod ends before the new one starts, because only one can mount the volume."""
    values = VARIANTS["history of the cluster"]
    assert "--history-dir=/var/lib/podgpu/history" in container(values, "cluster")["args"]
    spec = pod(values, "cluster")
    assert {"name": "history", "persistentVolumeClaim": {"claimName": "podgpu-history"}} in spec[
        "volumes"
    ]
    assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsUser"] == 65534
    assert {"name": "history", "emptyDir": {"sizeLimit": "64Mi"}} in pod(values)["volumes"]


# The nodes of the pods, and how they are replaced


def test_the_exporter_tolerates_nodes_of_the_control_plane() -> None:
    tolerated = {one["key"] for one in pod()["tolerations"]}
    assert tolerated == {"nvidia.com/gpu", "node-role.kubernetes.io/control-plane"}


def test_pods_on_gpu_nodes_are_not_evicted_for_workloads() -> None:
    values = {name: {"enabled": True} for name in ("cluster", "enrich", "hook")}
    for component in ("exporter", "enrich", "hook"):
        assert pod(values, component)["priorityClassName"] == "system-node-critical"
    assert "priorityClassName" not in pod(values, "cluster")
    assert "priorityClassName" not in pod({"priorityClassName": ""})
    assert pod({"priorityClassName": "mine", **values}, "cluster")["priorityClassName"] == "mine"


def test_gke_allows_the_priority_class_only_in_kube_system() -> None:
    for version, has_class in (("v1.33.2-gke.100", False), ("v1.33.2", True)):
        done = run_helm("template", "podgpu", str(CHART), "--kube-version", version)
        assert ("priorityClassName: system-node-critical" in done.stdout) is has_class


def operator_labels(values: Values) -> list[str]:
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = pod(values)["affinity"]["nodeAffinity"][required]["nodeSelectorTerms"]
    return [term["matchExpressions"][0]["key"] for term in terms]


def test_nodes_of_the_gpu_operator_with_a_device_plugin_or_dra() -> None:
    labels = [
        "nvidia.com/gpu.deploy.dcgm-exporter",
        "nvidia.com/gpu.deploy.dcgm-exporter-dra",
    ]
    assert operator_labels({"gpuNodes": {"labels": "operator"}}) == labels
    other: Values = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    values = {"gpuNodes": {"labels": "operator", "affinity": other}}
    assert operator_labels(values) == labels
    assert "podAntiAffinity" in pod(values)["affinity"]


def strategy(values: Values, component: str = "exporter") -> dict[str, Any]:
    found: dict[str, Any] = the("DaemonSet", values, component)["spec"]["updateStrategy"]
    return found


def test_a_roll_out_of_the_exporter_leaves_no_gap_on_a_node() -> None:
    """`helm --wait` waits for all pods but maxUnavailable: with 10 %, for none on one node."""
    assert strategy({})["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": "10%"}
    memory = {"exporter": {"historyDir": "emptyDir"}}
    assert strategy(memory)["rollingUpdate"]["maxSurge"] == "10%"


@pytest.mark.parametrize(
    "exporter", [{"hostNetwork": True}, {"historyDir": "/var/lib/podgpu"}], ids=str
)
def test_two_exporters_that_share_a_port_or_a_file_do_not_run_at_once(
    exporter: dict[str, Any],
) -> None:
    assert strategy({"exporter": exporter})["rollingUpdate"] == {"maxUnavailable": "10%"}


@pytest.mark.parametrize("component", ["enrich", "hook"])
def test_two_pods_of_other_components_do_not_run_on_a_node(component: str) -> None:
    values = {component: {"enabled": True}}
    assert strategy(values, component)["rollingUpdate"] == {"maxUnavailable": "10%"}


def test_the_update_strategy_of_the_values_is_used() -> None:
    assert strategy({"updateStrategy": {"type": "OnDelete"}}) == {"type": "OnDelete"}


def test_one_value_turns_on_what_the_readme_shows() -> None:
    full = {"cluster": {"profile": "full"}}
    arguments = container(full, "cluster")["args"]
    assert {"--owners=api", "--prices=example", "--history-dir=/var/lib/podgpu/history"} <= {
        *arguments
    }
    (claim,) = of_kind("PersistentVolumeClaim", full)
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert claim["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "4Gi"}},
    }
    volumes = {volume["name"]: volume for volume in pod(full, "cluster")["volumes"]}
    name = claim["metadata"]["name"]
    assert volumes["history"]["persistentVolumeClaim"] == {"claimName": name}
    patterns = env(full)["DCGM_EXPORTER_KUBERNETES_POD_LABEL_ALLOWLIST_REGEX"].split(",")
    for label, is_read in [("team", True), ("cost-center", True), ("teammate", False)]:
        assert any(re.search(pattern, label) for pattern in patterns) is is_read


def test_token_counters_of_pods_need_their_list_and_their_ports() -> None:
    own = {"cluster": {"enabled": True, "tokenMetrics": "pods"}, "networkPolicy": {"enabled": True}}
    assert "--token-metrics=pods" in container(own, "cluster")["args"]
    rules = [rule for role in of_kind("ClusterRole", own) for rule in role["rules"]]
    assert {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]} in rules
    policies = {one["metadata"]["name"]: one for one in of_kind("NetworkPolicy", own)}
    egress = next(one for name, one in policies.items() if name.endswith("cluster"))["spec"][
        "egress"
    ]
    assert {"ports": [{"protocol": "TCP"}], "to": [{"namespaceSelector": {}}]} in egress

    plain = {"cluster": {"enabled": True}}
    assert not any("token-metrics" in word for word in container(plain, "cluster")["args"])


def _list_rules(values: dict[str, Any]) -> set[tuple[str, str]]:
    """Returns what the cluster view may list and watch: API group and resource."""
    rules = set()
    for role in of_kind("ClusterRole", values):
        for rule in role["rules"]:
            if rule["verbs"] == ["list", "watch"]:
                rules |= {
                    (group, each) for group in rule["apiGroups"] for each in rule["resources"]
                }
    return rules


def test_the_queue_reads_pods_nodes_and_claims_only_if_it_is_on() -> None:
    needed = {("", "pods"), ("", "nodes")}
    for resource in ("resourceclaims", "deviceclasses", "resourceslices"):
        needed.add(("resource.k8s.io", resource))
    needed |= {("", "resourcequotas"), ("apps", "replicasets"), ("apps", "statefulsets")}
    needed |= {("batch", "jobs"), ("scheduling.run.ai", "queues")}
    for resource in ("workloads", "clusterqueues", "localqueues"):
        needed.add(("kueue.x-k8s.io", resource))
    own = {"cluster": {"enabled": True, "queue": True}}
    assert "--queue" in container(own, "cluster")["args"]
    assert needed <= _list_rules(own)
    assert pod(own, "cluster").get("automountServiceAccountToken") is not False

    plain = {"cluster": {"enabled": True}}
    assert "--queue" not in container(plain, "cluster")["args"]
    assert not needed & _list_rules(plain)

    assert "--queue" in container({"cluster": {"profile": "full"}}, "cluster")["args"]
    off = {"cluster": {"profile": "full", "queue": False}}
    assert "--queue" not in container(off, "cluster")["args"]


def test_each_part_of_the_profile_can_be_turned_off() -> None:
    own = {
        "cluster": {
            "profile": "full",
            "podOwners": False,
            "prices": "none",
            "historyDir": "memory",
        },
        "exporter": {"kubernetes": {"podLabels": {"enabled": False}}},
    }
    arguments = " ".join(container(own, "cluster")["args"])
    assert "--owners=none" in arguments
    assert "--prices" not in arguments
    assert "--history-dir" not in arguments
    assert of_kind("PersistentVolumeClaim", own) == []
    assert "DCGM_EXPORTER_KUBERNETES_ENABLE_POD_LABELS" not in env(own)


def test_two_replicas_of_the_cluster_view_read_from_prometheus() -> None:
    shared = {
        "cluster": {"profile": "full", "replicas": 2},
        "source": {"prometheus": {"url": "http://prometheus:9090"}},
    }
    assert of_kind("PersistentVolumeClaim", shared) == []
    assert not any("history" in word for word in container(shared, "cluster")["args"])
    assert len(of_kind("PodDisruptionBudget", shared)) == 1


def test_a_history_that_does_not_last_is_announced() -> None:
    values = {"cluster": {"enabled": True, "historyDir": "emptyDir"}}
    (note,) = [word for word in container(values, "cluster")["args"] if "history-note" in word]
    reason, _, what_to_do = note.partition("=")[2].partition(": ")
    assert reason == "it is lost when the pod is replaced"
    assert "cluster.historyClaim" in what_to_do
