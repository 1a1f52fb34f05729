"""deploy/manifests is up to date and valid."""

from __future__ import annotations

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


@files
def test_kubernetes_takes_them(name: str) -> None:
    for one in loaded(name):
        if one["kind"] not in CRDS:
            kubernetes_validate.validate(one, NEWEST, strict=True)


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
