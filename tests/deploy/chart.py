"""The chart, rendered by helm: objects by kind and name, pods and containers of them, and their Pod Security level."""

from __future__ import annotations

import atexit
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from deploy.render import CHART, NAMESPACE, OPERATOR, run_helm

Object = dict[str, Any]
NOTES = "Notes"
"""A kind that Kubernetes does not have."""

PRICES = {"currency": "EUR", "models": {"NVIDIA H100 80GB HBM3": {"gpu_hour": 2.5, "kwh": 0.3}, "*": {"gpu_hour": 1}}}

VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "defaults": {},
    "nothing": {"exporter": {"enabled": False}},
    "operator's nodes": {"gpuNodes": {"labels": "operator"}},
    "seed 000's nodes": {"gpuNodes": {"labels": "hardware-type"}},
    "all nodes": {"gpuNodes": {"labels": "all", "tolerations": []}},
    "own affinity": {"gpuNodes": {"affinity": {"podAntiAffinity": {}}, "nodeSelector": {"pool": "a100"}}},
    "runtime class": {"gpus": {"runtimeClassName": "nvidia"}},
    "volume mounts": {"gpus": {"access": "volume-mounts"}},
    "cdi": {"gpus": {"access": "cdi"}},
    "driver root": {"gpus": {"access": "driver-root"}},
    "mig monitoring": {"gpus": {"migMonitoring": True}},
    "no mapping": {"exporter": {"kubernetes": {"enabled": False}}},
    "no container usage": {"exporter": {"containerUsage": {"enabled": False}}},
    "least": {"exporter": {"kubernetes": {"enabled": False}, "containerUsage": {"enabled": False}}},
    "pod labels": {"exporter": {"kubernetes": {"podLabels": {"enabled": True, "allowlistRegex": ["^app", "team"]}}}},
    "annotations": {"exporter": {"kubernetes": {"annotations": True}}},
    "dra": {"exporter": {"kubernetes": {"dra": True}}},
    "pod uid": {"exporter": {"kubernetes": {"podUid": True}, "containerUsage": {"enabled": False}}},
    "virtual gpus": {"exporter": {"kubernetes": {"virtualGpus": True, "resourceNames": ["a.com/gpu", "b.com/gpu"]}}},
    "podlist": {"exporter": {"kubernetes": {"podlistDirectory": "/run/koordinator"}}},
    "hpc": {"exporter": {"hpcJobMappingDir": "/run/jobs"}},
    "history on the host": {"exporter": {"historyDir": "/var/lib/podgpu"}},
    "history of the cluster": {
        "exporter": {"historyDir": "emptyDir"},
        "cluster": {"enabled": True, "historyDir": "claim:podgpu-history"},
    },
    "counters by value": {"exporter": {"counters": {"csv": "DCGM_FI_DEV_GPU_UTIL, gauge, GPU utilization (in %).\n"}}},
    "shipped counters": {"exporter": {"counters": {"set": "dcp"}}},
    "4.9 names": {"exporter": {"dcgmNames": 4.9}},
    "both names": {"exporter": {"dcgmNames": "both"}},
    "counters in a ConfigMap": {"exporter": {"counters": {"configMap": {"namespace": "gpu", "name": "counters"}}}},
    "seed 001's values": {
        "exporter": {
            "arguments": ["-c", "1000"],
            "extraConfigMapVolumes": [
                {"name": "exporter-metrics-volume", "configMap": {"name": "exporter-metrics-config-map"}}
            ],
            "extraVolumeMounts": [{"name": "exporter-metrics-volume", "mountPath": "/etc/dcgm-exporter/custom"}],
            "extraEnv": [{"name": "DCGM_EXPORTER_CONFIGMAP_DATA", "value": "default:exporter-metrics-volume"}],
        }
    },
    "seed 001's values where it has them": {
        "arguments": ["-c", 1000],
        "extraConfigMapVolumes": [
            {"name": "exporter-metrics-volume", "configMap": {"name": "exporter-metrics-config-map"}}
        ],
        "extraEnv": [{"name": "DCGM_EXPORTER_CONFIGMAP_DATA", "value": "default:exporter-metrics-volume"}],
    },
    "selinux": {
        "exporter": {"seLinuxOptions": {"type": "spc_t"}},
        "enrich": {"enabled": True, "seLinuxOptions": {"type": "spc_t", "level": "s0"}},
    },
    "host volumes": {"exporter": {"extraHostVolumes": [{"name": "x", "hostPath": {"path": "/run/x"}}]}},
    "another kubelet": {"kubeletRoot": "/var/lib/k0s/kubelet", "logRoot": "/data/log"},
    "host network": {"exporter": {"hostNetwork": True, "arguments": ["-r", "localhost:5555"]}},
    "web config": {"exporter": {"webConfig": {"secretName": "podgpu-web"}}},
    "capability": {"exporter": {"addCapabilities": ["SYS_ADMIN"], "arguments": ["--telemetry", "dcgm"]}},
    "usage from switches": {"exporter": {"usage": {"from": "switches"}}},
    "usage from exact": {"exporter": {"usage": {"from": "exact"}}},
    "another user": {"exporter": {"runAsUser": 1000, "interval": "5s", "port": 9500}},
    "pod settings": {
        "commonLabels": {"team": "platform"},
        "imagePullSecrets": [{"name": "pull"}],
        "image": {"repository": "registry.example/podgpu", "digest": "sha256:" + "a" * 64},
        "exporter": {
            "priorityClassName": "system-node-critical",
            "podLabels": {"a": "b"},
            "podAnnotations": {"c": "d"},
            "serviceAccount": {"name": "mine"},
            "updateStrategy": {"type": "OnDelete", "rollingUpdate": None},
            "service": {"internalTrafficPolicy": "Local", "annotations": {"e": "f"}},
        },
    },
    "network policies": {
        "exporter": {"networkPolicy": {"enabled": True}, "webConfig": {"secretName": "w"}},
        "cluster": {"enabled": True, "networkPolicy": {"enabled": True}, "webConfig": {"secretName": "w"}},
        "enrich": {"enabled": True, "networkPolicy": {"enabled": True}},
    },
    "network policies with exceptions": {
        "exporter": {
            "kubernetes": {"annotations": True},
            "networkPolicy": {
                "enabled": True,
                "from": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
                "extraEgress": [{"ports": [{"port": 5555, "protocol": "TCP"}]}],
            },
        },
        "cluster": {
            "enabled": True,
            "networkPolicy": {"enabled": True},
            "prometheus": {"url": "https://prometheus.example.com"},
        },
        "enrich": {
            "enabled": True,
            "in": "http://$(HOST_IP):9400/metrics",
            "dcgmExporter": {"enabled": False},
            "networkPolicy": {"enabled": True},
        },
    },
    "network policies by Service": {
        "exporter": {"hostNetwork": True},
        "cluster": {
            "enabled": True,
            "networkPolicy": {"enabled": True},
            "prometheus": {"url": "http://prometheus.monitoring.svc"},
            "podOwners": True,
        },
        "enrich": {
            "enabled": True,
            "in": "http://dcgm-exporter:9400/metrics",
            "dcgmExporter": {"enabled": False},
            "networkPolicy": {"enabled": True},
        },
    },
    "network policies on the host's network": {
        "exporter": {"hostNetwork": True},
        "cluster": {"enabled": True, "networkPolicy": {"enabled": True}},
    },
    "network policies everywhere": {
        "cluster": {"enabled": True, "networkPolicy": {"enabled": True}, "discover": {"allNamespaces": True}}
    },
    "cluster": {"cluster": {"enabled": True}},
    "cluster of two": {"cluster": {"enabled": True, "replicas": 2, "prices": PRICES, "interval": "30s"}},
    "cluster by Prometheus": {
        "exporter": {"enabled": False},
        "cluster": {
            "enabled": True,
            "prometheus": {
                "url": "http://prometheus:9090",
                "match": 'cluster="a"',
                "tenant": "team-a",
                "username": "podgpu",
                "insecureSkipVerify": True,
                "secret": {"name": "access", "passwordKey": "password", "caKey": "ca.crt"},
            },
        },
    },
    "cluster everywhere": {
        "cluster": {
            "enabled": True,
            "podOwners": True,
            "discover": {"selector": "app=dcgm-exporter", "allNamespaces": True},
            "exporterAccess": {"secret": {"name": "access", "tokenKey": "token"}},
            "networkPolicy": {"enabled": True},
        }
    },
    "cluster behind TLS": {"cluster": {"enabled": True, "webConfig": {"secretName": "web"}}},
    "autoscale": {"autoscale": {"enabled": True}},
    "autoscale with all": {
        "autoscale": {
            "enabled": True,
            "replicas": 3,
            "arguments": ["--used-means", "allocated"],
            "keda": {"secretName": "keda-server", "clientNames": ["keda-operator"]},
            "externalMetrics": {"enabled": True},
            "discover": {"allNamespaces": True},
            "exporterAccess": {"secret": {"name": "access", "tokenKey": "token"}},
            "interval": "30s",
            "longestWindow": "20m",
            "networkPolicy": {"enabled": True, "from": [{"namespaceSelector": {}}]},
        }
    },
    "autoscale by Prometheus": {
        "exporter": {"enabled": False},
        "autoscale": {
            "enabled": True,
            "prometheus": {"url": "http://prometheus:9090", "match": 'cluster="a"', "tenant": "a"},
            "networkPolicy": {"enabled": True},
        },
    },
    "autoscale with a given certificate": {
        "autoscale": {
            "enabled": True,
            "replicas": 1,
            "customMetrics": {
                "certificate": {"from": "secret", "secretName": "api-tls", "caBundle": "LS0tLS1CRUdJTg=="}
            },
            "networkPolicy": {"enabled": True},
        }
    },
    "autoscale with cert-manager": {
        "autoscale": {
            "enabled": True,
            "customMetrics": {
                "certificate": {"from": "cert-manager", "issuerRef": {"name": "ca", "kind": "ClusterIssuer"}}
            },
        }
    },
    "autoscale for KEDA alone": {
        "autoscale": {"enabled": True, "keda": {"secretName": "keda-server"}, "customMetrics": {"enabled": False}}
    },
    "enrich": {"exporter": {"enabled": False}, "enrich": {"enabled": True}},
    "enrich beside others": {
        "exporter": {"enabled": False},
        "enrich": {
            "enabled": True,
            "in": "http://$(HOST_IP):9400/metrics",
            "interval": "30s",
            "textfile": {"hostPath": "/var/lib/node_exporter/textfile"},
            "dcgmExporter": {"enabled": False},
            "nodeExporter": {"enabled": False},
            "seesGpus": False,
            "kubernetes": {"dra": True, "podUid": True, "oldNames": True},
        },
    },
    "enrich with all": {
        "exporter": {"enabled": False},
        "enrich": {
            "enabled": True,
            "kubernetes": {"annotations": True},
            "dcgmExporter": {"profiling": True},
            "nodeExporter": {"hostPort": 9100},
        },
    },
    "hook": {"hook": {"enabled": True}},
    "hook with all": {
        "kubeletRoot": "/var/lib/k0s/kubelet",
        "exporter": {"kubernetes": {"podlistDirectory": "/run/gpus"}},
        "hook": {
            "enabled": True,
            "inject": True,
            "arguments": ["--plugin-index", "95", "--debug"],
            "nri": {"directory": "/run/nri", "socketName": "plugins.sock"},
            "podlistDirectory": "/run/gpus",
            "port": 9500,
            "priorityClassName": "system-node-critical",
            "seLinuxOptions": {"type": "spc_t"},
            "podAnnotations": {"a": "b"},
            "networkPolicy": {"enabled": True, "from": [{"namespaceSelector": {}}]},
        },
    },
    "enrich on GKE": {"exporter": {"enabled": False}, "enrich": {"enabled": True}, "gpus": {"access": "driver-root"}},
    "pod monitors": {"exporter": {"monitor": {"kind": "PodMonitor"}}, "cluster": {"enabled": True}},
    "protected scrapes": {
        "exporter": {
            "monitor": {
                "additionalLabels": {"release": "prometheus"},
                "scheme": "https",
                "tlsConfig": {"insecureSkipVerify": True},
                "basicAuth": {"username": {"name": "s", "key": "u"}, "password": {"name": "s", "key": "p"}},
                "relabelings": [{"targetLabel": "cluster", "replacement": "a"}],
                "metricRelabelings": [{"action": "drop", "sourceLabels": ["__name__"], "regex": "go_.*"}],
            }
        }
    },
    "no extras": {"rules": {"enabled": False}, "dashboards": {"enabled": False}},
    "other names": {"fullnameOverride": "gpu-metrics", "nameOverride": "gpus"},
}
"""Every feature on or off, by a name a person would give it."""


@cache
def _rendered(values: str, operator: bool) -> str:
    """The objects as JSON, which is read many times faster than YAML. NOTES.txt is one of them."""
    done = _template(values, operator, _chart_with_notes())
    assert done.returncode == 0, f"{values}: {done.stderr}"
    return json.dumps([one for one in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if one])


@cache
def _chart_with_notes() -> Path:
    """`helm template` leaves NOTES.txt out. A copy of the chart has it as an object: one rendering gives both."""
    folder = Path(tempfile.mkdtemp(prefix="podgpu-chart-"))
    atexit.register(shutil.rmtree, folder)
    copy = folder / "podgpu"
    shutil.copytree(CHART, copy)
    text = (copy / "templates" / "NOTES.txt").read_text(encoding="utf-8")
    body = f'{{{{- define "notes" -}}}}{text}{{{{- end -}}}}kind: {NOTES}\ntext: {{{{ include "notes" . | quote }}}}\n'
    (copy / "templates" / "notes.yaml").write_text(body, encoding="utf-8")
    return copy


def refusal(values: Mapping[str, Any]) -> str:
    """What helm says to values it must not take."""
    done = _template(json.dumps(values), operator=False)
    assert done.returncode != 0, "it was taken"
    return done.stderr


def _template(values: str, operator: bool, chart: Path = CHART) -> subprocess.CompletedProcess[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:  # JSON is YAML
        file.write(values)
        file.flush()
        apis = ("--api-versions", OPERATOR) if operator else ()
        arguments = ("podgpu", str(chart), "--namespace", NAMESPACE, "--values", file.name, *apis)
        return run_helm("template", *arguments)


def notes(values: Mapping[str, Any], operator: bool = True) -> str:
    """NOTES.txt as `helm install` prints it."""
    (found,) = [one["text"] for one in json.loads(_rendered(json.dumps(values), operator)) if one["kind"] == NOTES]
    return str(found)


def objects(values: Mapping[str, Any] | None = None, operator: bool = True) -> list[Object]:
    found: list[Object] = json.loads(_rendered(json.dumps(values or {}), operator))
    return [one for one in found if one["kind"] != NOTES]


def of_kind(kind: str, values: Mapping[str, Any] | None = None, operator: bool = True) -> list[Object]:
    return [one for one in objects(values, operator) if one["kind"] == kind]


def the(kind: str, values: Mapping[str, Any] | None = None, component: str = "exporter") -> Object:
    """The one object of that kind that belongs to a component."""
    (found,) = [
        one
        for one in of_kind(kind, values)
        if one["metadata"]["labels"].get("app.kubernetes.io/component") == component
    ]
    return found


def pod(values: Mapping[str, Any] | None = None, component: str = "exporter") -> Object:
    kind = "Deployment" if component in ("cluster", "autoscale") else "DaemonSet"
    spec: Object = the(kind, values, component)["spec"]["template"]["spec"]
    return spec


def container(values: Mapping[str, Any] | None = None, component: str = "exporter", name: str = "podgpu") -> Object:
    (found,) = [one for one in pod(values, component)["containers"] if one["name"] == name]
    return dict(found)


def env(values: Mapping[str, Any] | None = None, component: str = "exporter") -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container(values, component)["env"]}


def pods_of(rendered: list[Object]) -> Iterator[Object]:
    for one in rendered:
        if one["kind"] in ("DaemonSet", "Deployment", "Job"):
            yield one["spec"]["template"]["spec"]


def level(spec: Mapping[str, Any]) -> str:
    """The strictest Pod Security level that lets a pod in, by the published standards."""
    containers = spec["containers"]
    host = any(spec.get(key) for key in ("hostPID", "hostNetwork", "hostIPC"))
    paths = any("hostPath" in volume for volume in spec.get("volumes", ()))
    ports = any(port.get("hostPort") for one in containers for port in one.get("ports", ()))
    rights = any(
        one["securityContext"].get("privileged") or one["securityContext"].get("capabilities", {}).get("add")
        for one in containers
    )
    if host or paths or ports or rights:
        return "privileged"
    return "restricted" if all(_restricted(spec, one) for one in containers) else "baseline"


def _restricted(spec: Mapping[str, Any], one: Mapping[str, Any]) -> bool:
    context = {**spec.get("securityContext", {}), **one["securityContext"]}
    return (
        context.get("runAsNonRoot") is True
        and context.get("runAsUser") != 0
        and context.get("allowPrivilegeEscalation") is False
        and context.get("capabilities", {}).get("drop") == ["ALL"]
        and context.get("seccompProfile", {}).get("type") == "RuntimeDefault"
    )


def values_file() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    return loaded
