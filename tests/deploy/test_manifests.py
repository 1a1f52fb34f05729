"""deploy/manifests is up to date and valid. Flags and variables in other shipped files are valid
options.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from deploy.render import FILES, MANIFESTS, NAMESPACE, ROOT
from tests.deploy.chart import level, pods_of
from tests.deploy.shipped_options import check_options, known, ours, parse
from tests.deploy.test_chart import CRDS, NEWEST

files = pytest.mark.parametrize("name", FILES)


@cache
def loaded(name: str) -> list[dict[str, Any]]:
    text = (MANIFESTS / name).read_text(encoding="utf-8")
    return [one for one in yaml.load_all(text, Loader=yaml.CSafeLoader) if one]


def render(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.render", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_manifests_are_current() -> None:
    done = render(ROOT, "--check")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@files
def test_manifests_match_the_schemas_of_kubernetes(name: str) -> None:
    for one in loaded(name):
        if one["kind"] not in CRDS:
            kubernetes_validate.validate(one, NEWEST, strict=True)


@files
def test_the_namespace(name: str) -> None:
    rendered = loaded(name)
    assert "Namespace" not in {one["kind"] for one in rendered}, "kubectl delete would delete it"
    if any(level(spec) == "privileged" for spec in pods_of(rendered)):
        text = (MANIFESTS / name).read_text(encoding="utf-8")
        assert f"label namespace {NAMESPACE} pod-security.kubernetes.io/enforce=privileged" in text
    elsewhere = {
        one["kind"] for one in rendered if one["metadata"].get("namespace", NAMESPACE) != NAMESPACE
    }
    assert elsewhere <= {"RoleBinding"}, (
        "only a RoleBinding in kube-system, for the API server's authentication"
    )


@files
def test_flags_and_variables_are_options(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for one in ours(loaded(name)):
        check_options(one, monkeypatch, name)


# Options of the image, the GPU operator and the systemd unit


def test_options_in_the_dockerfile(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    example = re.search(r"^# .*docker run .* IMAGE (.+)$", text, re.MULTILINE)
    assert example is not None
    parse("exporter", shlex.split(example[1]), {}, monkeypatch)


def test_options_of_the_gpu_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the variables that the operator's DaemonSet sets, from the table of
    docs/install-gpu-operator.md.
    """
    exposition = (ROOT / "docs" / "install-gpu-operator.md").read_text(encoding="utf-8")
    table = exposition.split("| The operator sets |")[1].split("\n\n")[0]
    named = set(re.findall(r"`((?:DCGM|NODE)_[A-Z_]+)", table))
    assert {
        "DCGM_EXPORTER_LISTEN",
        "DCGM_EXPORTER_COLLECTORS",
        "DCGM_REMOTE_HOSTENGINE_INFO",
        "NODE_NAME",
    } <= named
    assert named <= known("exporter")
    variables = dict(re.findall(r"`((?:DCGM|NODE)_[A-Z_]+)=([^`]+)`", table))
    parse("exporter", (), variables, monkeypatch)


def test_options_of_the_systemd_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the variables of podgpu.env, including those that are commented out."""
    lines = (ROOT / "deploy" / "systemd" / "podgpu.env").read_text(encoding="utf-8").splitlines()
    pairs = [match.groups() for line in lines if (match := re.fullmatch(r"#?([A-Z_]+)=(.*)", line))]
    variables = {str(name): str(value) for name, value in pairs}
    assert variables.pop("PODGPU_ARGUMENTS") == ""
    assert len(variables) >= 5
    assert set(variables) <= known("exporter")
    parse("exporter", (), variables, monkeypatch)
