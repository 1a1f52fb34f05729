"""`podgpu autoscale` in the chart: permissions, availability, APIServices, uninstallation."""

from __future__ import annotations

from typing import Any

from deploy.render import NAMESPACE
from tests.deploy.chart import VARIANTS, of_kind, pod, the

CUSTOM = ["v1beta2.custom.metrics.k8s.io", "v1beta1.custom.metrics.k8s.io"]
PLAIN, ALL = VARIANTS["autoscale"], VARIANTS["autoscale with all"]
KEDA_ALONE = VARIANTS["autoscale for KEDA alone"]


def rules(values: Any, role: str) -> list[Any]:
    (found,) = [
        one for one in of_kind("ClusterRole", values) if one["metadata"]["name"].endswith(role)
    ]
    return list(found["rules"])


def test_a_replica_is_always_available() -> None:
    deployment = the("Deployment", PLAIN, "autoscale")["spec"]
    assert deployment["replicas"] == 2
    assert deployment["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert the("PodDisruptionBudget", PLAIN, "autoscale")["spec"]["maxUnavailable"] == 1
    spread = [one["topologyKey"] for one in pod(PLAIN, "autoscale")["topologySpreadConstraints"]]
    assert spread == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]


def test_only_keda_can_connect_to_its_listener() -> None:
    values = {"autoscale": {"enabled": True, "keda": {"secretName": "keda-server"}}}
    spec = the("NetworkPolicy", values, "autoscale")["spec"]
    clients = {rule["ports"][0]["port"]: rule.get("from") for rule in spec["ingress"]}
    keda = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}}]
    assert clients == {"api": None, "keda": keda, "probes": None}
    assert spec["policyTypes"] == ["Ingress"]


def test_it_may_patch_only_its_own_apiservices() -> None:
    pods, apiservices = rules(PLAIN, "podgpu-autoscale")
    assert pods == {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}
    assert (apiservices["resourceNames"], apiservices["verbs"]) == (CUSTOM, ["get", "patch"])


def test_roles_of_the_metrics_api_only_with_the_api() -> None:
    def bound(values: Any) -> set[str]:
        kinds = ("ClusterRoleBinding", "RoleBinding")
        return {one["roleRef"]["name"] for kind in kinds for one in of_kind(kind, values)}

    assert "extension-apiserver-authentication-reader" in bound(PLAIN)
    assert "extension-apiserver-authentication-reader" not in bound(KEDA_ALONE)
    (reader,) = [
        one
        for one in of_kind("RoleBinding", PLAIN)
        if one["metadata"]["namespace"] == "kube-system"
    ]
    assert reader["roleRef"]["name"] == "extension-apiserver-authentication-reader"


def test_apiservice_has_service_and_authority() -> None:
    given, injected = (
        VARIANTS["autoscale with a given certificate"],
        VARIANTS["autoscale with cert-manager"],
    )
    own = of_kind("APIService", PLAIN)[0]["spec"]
    assert own["service"] == {"namespace": NAMESPACE, "name": "podgpu-autoscale", "port": 443}
    assert "caBundle" not in own, "podgpu sets the caBundle, and an upgrade must not remove it"
    assert not any("insecureSkipTLSVerify" in one["spec"] for one in of_kind("APIService", ALL))
    assert {one["spec"]["caBundle"] for one in of_kind("APIService", given)} == {"LS0tLS1CRUdJTg=="}
    (service,) = [
        one for one in of_kind("Service", PLAIN) if one["metadata"]["name"] == "podgpu-autoscale"
    ]
    assert {
        "name": "https",
        "port": 443,
        "targetPort": "api",
        "protocol": "TCP",
        "appProtocol": "https",
    } in service["spec"]["ports"]
    (certificate,) = of_kind("Certificate", injected)
    annotations = {
        one["metadata"]["annotations"]["cert-manager.io/inject-ca-from"]
        for one in of_kind("APIService", injected)
    }
    assert annotations == {f"{NAMESPACE}/{certificate['metadata']['name']}"}
    assert certificate["spec"]["dnsNames"] == [f"podgpu-autoscale.{NAMESPACE}.svc"]
