"""Flags and variables in the manifests, the image and the systemd unit are valid options."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

from deploy.render import FILES, MANIFESTS, ROOT
from tests.deploy.shipped_options import check_options, known, ours, parse


@pytest.mark.parametrize("name", FILES)
def test_the_manifests(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (MANIFESTS / name).read_text(encoding="utf-8")
    rendered = [one for one in yaml.load_all(text, Loader=yaml.CSafeLoader) if one]
    for one in ours(rendered):
        check_options(one, monkeypatch, name)


def test_the_images(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    example = re.search(r"^# .*docker run .* IMAGE (.+)$", text, re.MULTILINE)
    assert example is not None
    parse("exporter", shlex.split(example[1]), {}, monkeypatch)


def test_the_gpu_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its DaemonSet sets, with only the image changed: the table of docs/install-gpu-operator.md."""
    exposition = (ROOT / "docs" / "install-gpu-operator.md").read_text(encoding="utf-8")
    table = exposition.split("| The operator sets |")[1].split("\n\n")[0]
    named = set(re.findall(r"`((?:DCGM|NODE)_[A-Z_]+)", table))
    assert {"DCGM_EXPORTER_LISTEN", "DCGM_EXPORTER_COLLECTORS", "DCGM_REMOTE_HOSTENGINE_INFO", "NODE_NAME"} <= named
    assert named <= known("exporter")
    variables = dict(re.findall(r"`((?:DCGM|NODE)_[A-Z_]+)=([^`]+)`", table))
    parse("exporter", (), variables, monkeypatch)


def test_the_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the file of variables suggests, too."""
    lines = (ROOT / "deploy" / "systemd" / "podgpu.env").read_text(encoding="utf-8").splitlines()
    pairs = [match.groups() for line in lines if (match := re.fullmatch(r"#?([A-Z_]+)=(.*)", line))]
    variables = {str(name): str(value) for name, value in pairs}
    assert variables.pop("PODGPU_ARGUMENTS") == ""
    assert len(variables) >= 5
    assert set(variables) <= known("exporter")
    parse("exporter", (), variables, monkeypatch)
