"""Renders the chart with helm. Returns objects by kind and component, their containers and Pod
Security levels.
"""

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
"""Kind of the additional object. Kubernetes has no such kind."""

FOLDER = Path(__file__).parent
VARIANTS: Mapping[str, Mapping[str, Any]] = yaml.load(
    (FOLDER / "variants.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader
)


@cache
def _rendered(values: str, operator: bool) -> str:
    """Returns the objects as JSON, which is parsed much faster than YAML. NOTES.txt is one of the
    objects.
    """
    done = _template(values, operator, _chart_with_notes())
    assert done.returncode == 0, f"{values}: {done.stderr}"
    return json.dumps([one for one in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if one])


@cache
def _chart_with_notes() -> Path:
    """Copies the chart with NOTES.txt as an additional object, because `helm template` does not
    print it.
    """
    folder = Path(tempfile.mkdtemp(prefix="podgpu-chart-"))
    atexit.register(shutil.rmtree, folder)
    copy = folder / "podgpu"
    shutil.copytree(CHART, copy)
    text = (copy / "templates" / "NOTES.txt").read_text(encoding="utf-8")
    body = (
        f'{{{{- define "notes" -}}}}{text}{{{{- end -}}}}kind: {NOTES}\ntext: {{{{ include '
        f'"notes" . | quote }}}}\n'
    )
    (copy / "templates" / "notes.yaml").write_text(body, encoding="utf-8")
    return copy


def refusal(values: Mapping[str, Any]) -> str:
    """Returns helm's error for values that the chart rejects."""
    done = _template(json.dumps(values), operator=False)
    assert done.returncode != 0, "the values were accepted"
    return done.stderr


def _template(values: str, operator: bool, chart: Path = CHART) -> subprocess.CompletedProcess[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:  # JSON is valid YAML
        file.write(values)
        file.flush()
        apis = ("--api-versions", OPERATOR) if operator else ()
        arguments = ("podgpu", str(chart), "--namespace", NAMESPACE, "--values", file.name, *apis)
        return run_helm("template", *arguments)


def notes(values: Mapping[str, Any], operator: bool = True) -> str:
    """Returns NOTES.txt as `helm install` prints it."""
    (found,) = [
        one["text"]
        for one in json.loads(_rendered(json.dumps(values), operator))
        if one["kind"] == NOTES
    ]
    return str(found)


def objects(values: Mapping[str, Any] | None = None, operator: bool = True) -> list[Object]:
    found: list[Object] = json.loads(_rendered(json.dumps(values or {}), operator))
    return [one for one in found if one["kind"] != NOTES]


def of_kind(
    kind: str, values: Mapping[str, Any] | None = None, operator: bool = True
) -> list[Object]:
    return [one for one in objects(values, operator) if one["kind"] == kind]


def the(kind: str, values: Mapping[str, Any] | None = None, component: str = "exporter") -> Object:
    """Returns the only object of this kind that belongs to the component."""
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


def container(
    values: Mapping[str, Any] | None = None, component: str = "exporter", name: str = "podgpu"
) -> Object:
    (found,) = [one for one in pod(values, component)["containers"] if one["name"] == name]
    return dict(found)


def env(values: Mapping[str, Any] | None = None, component: str = "exporter") -> dict[str, Any]:
    return {
        one["name"]: one.get("value", one.get("valueFrom"))
        for one in container(values, component)["env"]
    }


def pods_of(rendered: list[Object]) -> Iterator[Object]:
    for one in rendered:
        if one["kind"] in ("DaemonSet", "Deployment", "Job"):
            yield one["spec"]["template"]["spec"]


def level(spec: Mapping[str, Any]) -> str:
    """Returns the strictest Pod Security level that allows a pod, by the published standards."""
    containers = spec["containers"]
    host = any(spec.get(key) for key in ("hostPID", "hostNetwork", "hostIPC"))
    paths = any("hostPath" in volume for volume in spec.get("volumes", ()))
    ports = any(port.get("hostPort") for one in containers for port in one.get("ports", ()))
    rights = any(
        one["securityContext"].get("privileged")
        or one["securityContext"].get("capabilities", {}).get("add")
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
    loaded: dict[str, Any] = yaml.load(
        (CHART / "values.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader
    )
    return loaded
