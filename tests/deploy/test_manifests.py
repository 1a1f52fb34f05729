"""deploy/manifests: what the chart renders, and enough for `kubectl apply -f` by itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from deploy.render import FILES, MANIFESTS, NAMESPACE, ROOT
from tests.deploy.chart import level, pods_of
from tests.deploy.test_chart import CRDS, NEWEST

files = pytest.mark.parametrize("name", FILES)


@cache
def loaded(name: str) -> list[dict[str, object]]:
    text = (MANIFESTS / name).read_text(encoding="utf-8")
    return [one for one in yaml.load_all(text, Loader=yaml.CSafeLoader) if one]


def render(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.render", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_they_are_current() -> None:
    done = render(ROOT, "--check")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_stale_one_is_named(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    stale = tmp_path / "deploy" / "manifests" / "exporter.yaml"
    current = stale.read_text(encoding="utf-8")
    stale.write_text(current.replace("192Mi", "1Gi"), encoding="utf-8")
    done = render(tmp_path, "--check")
    assert done.returncode == 1
    assert done.stdout == "deploy/manifests/exporter.yaml is not what the chart renders (run make manifests)\n"
    assert render(tmp_path).returncode == 0
    assert stale.read_text(encoding="utf-8") == current


def test_there_are_no_others() -> None:
    assert {path.name for path in MANIFESTS.iterdir()} == set(FILES)


@files
def test_kubernetes_takes_them(name: str) -> None:
    for one in loaded(name):
        if one["kind"] not in CRDS:
            kubernetes_validate.validate(one, NEWEST, strict=True)


@files
def test_nothing_says_that_helm_looks_after_it(name: str) -> None:
    text = (MANIFESTS / name).read_text(encoding="utf-8")
    assert "managed-by" not in text
    assert "helm.sh" not in text


@files
def test_the_namespace_lets_the_pods_in(name: str) -> None:
    rendered = loaded(name)
    levels = {level(spec) for spec in pods_of(rendered)}
    if levels:
        assert rendered[0]["kind"] == "Namespace"
        labels = rendered[0]["metadata"]["labels"]  # type: ignore[index]
        assert levels <= {"restricted", labels["pod-security.kubernetes.io/enforce"]}
    elsewhere = {one["kind"] for one in rendered if one["metadata"].get("namespace", NAMESPACE) != NAMESPACE}  # type: ignore[attr-defined]
    assert elsewhere <= {"RoleBinding"}, "of the API server's own trust, in kube-system"
