"""Privileges and RBAC of each feature."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest

from podgpu.kube.service_proxy import ServiceName
from podgpu.writers.write_option import PERMISSIONS, Permission
from tests.deploy.chart import VARIANTS, Object, container, env, notes, objects, of_kind, pod

NO_MAPPING = {"exporter": {"kubernetes": {"enabled": False}}}
NO_USAGE = {"exporter": {"usage": {"from": "none"}}}
LEAST = {"exporter": {"kubernetes": {"enabled": False}, "usage": {"from": "none"}}}


def test_default_exporter_can_only_read_the_kubelets_directory_and_logs() -> None:
    spec = pod()
    assert spec["securityContext"] == {
        "runAsUser": 0,
        "runAsGroup": 0,
        "runAsNonRoot": False,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["automountServiceAccountToken"] is False
    assert "hostNetwork" not in spec
    assert {volume["hostPath"]["path"] for volume in spec["volumes"]} == {
        "/var/lib/kubelet/pod-resources",
        "/var/log/pods",
        "/var/log/containers",
    }
    assert all(mount["readOnly"] for mount in container()["volumeMounts"])


@pytest.mark.parametrize("values", [NO_MAPPING, LEAST])
def test_exporter_without_pod_mapping_is_not_root(values: Mapping[str, Any]) -> None:
    context = pod(values)["securityContext"]
    assert (context["runAsUser"], context["runAsNonRoot"]) == (65534, True)
    assert not any(
        "kubelet" in volume["hostPath"]["path"] for volume in pod(values).get("volumes", ())
    )
    assert env(values)["DCGM_EXPORTER_KUBERNETES"] == "false"


def test_host_pid_only_with_container_usage() -> None:
    assert pod()["hostPID"] is True
    assert env()["PODGPU_USAGE_FROM"] == "auto"
    assert "hostPID" not in pod(NO_USAGE)
    assert env(NO_USAGE)["PODGPU_USAGE_FROM"] == "none"
    assert [volume["name"] for volume in pod(NO_USAGE)["volumes"]] == ["pod-resources"]
    assert all(
        "hostPID" not in pod(VARIANTS[name], "enrich") for name in ("enrich", "enrich with all")
    )


def test_exact_usage_adds_sys_admin_only() -> None:
    """Kubernetes requires allowPrivilegeEscalation for this capability."""
    exact = VARIANTS["usage from exact"]
    assert env(exact)["PODGPU_USAGE_FROM"] == "exact"
    assert container(exact)["securityContext"] == {
        "allowPrivilegeEscalation": True,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], "add": ["SYS_ADMIN"]},
    }
    assert {**pod(exact), "containers": []} == {**pod(), "containers": []}
    assert container(exact)["volumeMounts"] == container()["volumeMounts"]
    assert "- SYS_ADMIN (exporter.usage.from exact)" in notes(exact)


def test_the_notes_say_how_users_log_in() -> None:
    full = {"cluster": {"profile": "full"}}
    assert "log in" not in notes(full)
    with_users = {"cluster": {"profile": "full", "auth": "kubernetes"}}
    assert "put an OIDC proxy in front of it" in notes(with_users)
    assert "http://localhost:9401/api/v1/view" in notes(with_users)
    encrypted = {"cluster": {**with_users["cluster"], "webConfig": {"secretName": "web"}}}
    assert "http(s)://localhost:9401/api/v1/view" in notes(encrypted)


def test_the_kernel_log_needs_one_capability_and_no_device() -> None:
    blame = VARIANTS["xid blame"]
    context = container(blame)["securityContext"]
    assert context["capabilities"] == {"drop": ["ALL"], "add": ["SYSLOG"]}
    assert "privileged" not in context
    assert {**pod(blame), "containers": []} == {**pod(), "containers": []}
    assert container(blame)["volumeMounts"] == container()["volumeMounts"]
    assert "- SYSLOG (exporter.xidBlame)" in notes(blame)


def rules_of(values: Mapping[str, Any], component: str = "exporter") -> dict[str, list[Object]]:
    """Returns the rules that are bound to the component's account, by kind of role."""
    found: dict[str, list[Object]] = {}
    for one in objects(values):
        if one["kind"] in ("Role", "ClusterRole"):
            bindings = [b for b in of_kind(f"{one['kind']}Binding", values) if _binds(b, one)]
            assert [b["subjects"][0]["name"] for b in bindings] == [f"podgpu-{component}"]
            found.setdefault(one["kind"], []).extend(one["rules"])
    return found


def _binds(binding: Object, role: Object) -> bool:
    same_place = binding["metadata"].get("namespace") == role["metadata"].get("namespace")
    return binding["roleRef"]["name"] == role["metadata"]["name"] and same_place


PODS = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}
SLICES = {
    "apiGroups": ["resource.k8s.io"],
    "resources": ["resourceslices"],
    "verbs": ["list", "watch"],
}
CLAIMS = {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": ["get"]}
VERSIONS = {"nonResourceURLs": ["/apis/resource.k8s.io"], "verbs": ["get"]}


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("defaults", {}),
        ("pod uid", {}),
        ("pod labels", {"ClusterRole": [PODS]}),
        ("annotations", {"ClusterRole": [PODS]}),
        ("dra", {"ClusterRole": [PODS, SLICES, CLAIMS, VERSIONS]}),
    ],
)
def test_roles_of_enabled_features(variant: str, expected: dict[str, list[Object]]) -> None:
    assert rules_of(VARIANTS[variant]) == expected
    assert pod(VARIANTS[variant])["automountServiceAccountToken"] is bool(expected)


@pytest.mark.parametrize(
    ("variant", "namespace", "name"),
    [
        ("counters in a ConfigMap", "gpu", "counters"),
        ("seed 001's values", "default", "exporter-metrics-volume"),
    ],
)
def test_only_the_configmap_of_counters_can_be_read(
    variant: str, namespace: str, name: str
) -> None:
    one_map = {
        "apiGroups": [""],
        "resources": ["configmaps"],
        "resourceNames": [name],
        "verbs": ["list", "watch"],
    }
    assert rules_of(VARIANTS[variant]) == {"Role": [one_map]}
    (role,) = of_kind("Role", VARIANTS[variant])
    assert role["metadata"]["namespace"] == namespace
    assert env(VARIANTS[variant])["DCGM_EXPORTER_CONFIGMAP_DATA"] == f"{namespace}:{name}"


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("cluster", {"Role": [["endpointslices"], ["services"]]}),
        (
            "cluster with prices by node label",
            {"Role": [["endpointslices"], ["services"]], "ClusterRole": [["nodes"]]},
        ),
        ("cluster by Prometheus", {}),
        ("everything on with own parts", {"Role": [["endpointslices"], ["services"]]}),
        (
            "cluster everywhere",
            {
                "ClusterRole": [
                    ["endpointslices"],
                    ["services"],
                    ["pods"],
                    ["tokenreviews"],
                    ["subjectaccessreviews"],
                ]
            },
        ),
    ],
)
def test_roles_of_the_cluster_view(variant: str, expected: dict[str, Any]) -> None:
    rules = rules_of(VARIANTS[variant], "cluster")
    assert {kind: [rule["resources"] for rule in some] for kind, some in rules.items()} == expected
    assert pod(VARIANTS[variant], "cluster")["automountServiceAccountToken"] is bool(expected)


def test_each_writer_has_the_role_that_doctor_checks() -> None:
    values = VARIANTS["writers"]
    granted = {}
    for one in of_kind("ClusterRole", values):
        if one["metadata"]["name"].endswith("-withdraw"):
            continue
        _, _, writer = one["metadata"]["name"].partition("-exporter-write-")
        permissions = set()
        for rule in one["rules"]:
            for group, resource, verb in product(
                rule["apiGroups"], rule["resources"], rule["verbs"]
            ):
                name, _, subresource = resource.partition("/")
                permissions.add(Permission(verb, group, name, subresource))
        granted[writer] = permissions
    assert granted == {name: set(wanted) for name, wanted in PERMISSIONS.items() if wanted}
    assert env(values)["PODGPU_WRITE"] == ",".join(values["exporter"]["write"])
    assert pod(values)["automountServiceAccountToken"] is True


def test_without_writers_there_is_no_role_and_no_token() -> None:
    assert of_kind("ClusterRole") == []
    assert "PODGPU_WRITE" not in env()


def test_uninstall_removes_what_was_written() -> None:
    """After the exporters and their roles are deleted, so that they cannot write again."""
    found = [
        one for one in objects(VARIANTS["writers"]) if one["metadata"]["name"].endswith("withdraw")
    ]
    kinds = [one["kind"] for one in found]
    assert sorted(kinds) == ["ClusterRole", "ClusterRoleBinding", "Job", "ServiceAccount"]
    order = {}
    for one in found:
        annotations = one["metadata"]["annotations"]
        assert annotations["helm.sh/hook"] == "post-delete"
        assert "hook-succeeded" in annotations["helm.sh/hook-delete-policy"]
        order[one["kind"]] = int(annotations["helm.sh/hook-weight"])
    assert order.pop("Job") > max(order.values())
    assert all(not one["metadata"]["name"].endswith("withdraw") for one in objects({}))


def test_nvsentinel_needs_its_socket_and_no_token() -> None:
    values = VARIANTS["nvsentinel"]
    [volume] = [one for one in pod(values)["volumes"] if one["name"] == "nvsentinel"]
    assert volume["hostPath"] == {"path": "/var/run/nvsentinel", "type": "DirectoryOrCreate"}
    assert pod(values)["automountServiceAccountToken"] is False
    assert of_kind("ClusterRole", values) == []
    assert of_kind("Job", values) == []


def test_readers_may_use_the_proxy_of_the_view_only() -> None:
    values = VARIANTS["readers of the cluster view"]
    [role] = [one for one in of_kind("Role", values) if one["metadata"]["name"].endswith("-reader")]
    [service] = [
        one for one in of_kind("Service", values) if one["metadata"]["name"].endswith("-cluster")
    ]
    name = service["metadata"]["name"]
    port = service["spec"]["ports"][0]["port"]
    expected = ServiceName(role["metadata"]["namespace"], name, str(port))
    assert role["rules"] == [
        {
            "apiGroups": [""],
            "resources": ["services/proxy"],
            "resourceNames": [expected.segment],
            "verbs": ["get"],
        }
    ]
    [binding] = [
        one
        for one in of_kind("RoleBinding", values)
        if one["roleRef"]["name"] == role["metadata"]["name"]
    ]
    assert [subject["name"] for subject in binding["subjects"]] == ["ann", "default"]
    # podgpu finds the Service by these labels.
    assert service["metadata"]["labels"]["app.kubernetes.io/part-of"] == "podgpu"
    assert service["metadata"]["labels"]["app.kubernetes.io/component"] == "cluster"
