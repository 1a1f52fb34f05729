"""Every flag and variable that is shipped (chart, manifests, image, unit) is an option with a value it takes."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
import pytest
import yaml

from deploy.render import FILES, MANIFESTS, ROOT
from podgpu.cli.autoscale_options import AUTOSCALE_OPTIONS
from podgpu.cli.cluster_options import CLUSTER_OPTIONS
from podgpu.cli.enrich import ENRICH_OPTIONS
from podgpu.cli.hook import HOOK_OPTIONS
from podgpu.cli.option_table import EXPORTER_OPTIONS
from podgpu.cli.params import Option, normalise, with_options
from tests.deploy.chart import VARIANTS, Object, objects, pods_of

OPTIONS: Mapping[str, Sequence[Option]] = {
    "exporter": EXPORTER_OPTIONS,
    "cluster": CLUSTER_OPTIONS,
    "autoscale": AUTOSCALE_OPTIONS,
    "enrich": ENRICH_OPTIONS,
    "hook": HOOK_OPTIONS,
}
OTHERS = {
    "NODE_NAME",
    "HOST_IP",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    "NVIDIA_MIG_MONITOR_DEVICES",
    "LD_LIBRARY_PATH",
}
"""Read by podgpu without an option (NODE_NAME), by the chart's own arguments, or by the container runtime."""


def parse(command: str, arguments: Sequence[str], variables: Mapping[str, str], patch: pytest.MonkeyPatch) -> None:
    """As the command would read them, up to the point where it would run. Raises click's error for a wrong one."""
    for name in [name for name in os.environ if name.startswith(("DCGM_", "PODGPU_", "KUBERNETES_", "NVIDIA_"))]:
        patch.delenv(name)
    for name, value in variables.items():
        patch.setenv(name, value)
    options = OPTIONS[command]
    made = click.command(command)(with_options(options)(lambda **_: None))
    made.make_context(command, normalise(list(arguments), options))


def known(command: str) -> set[str]:
    return {option.env for option in OPTIONS[command] if option.env} | OTHERS


def ours(rendered: list[Object]) -> Iterator[Object]:
    for spec in pods_of(rendered):
        yield from (one for one in spec["containers"] if one["name"] == "podgpu")


def check(one: Object, patch: pytest.MonkeyPatch) -> None:
    program, command = one["command"]
    variables = {variable["name"]: variable["value"] for variable in one["env"] if "value" in variable}
    assert program == "podgpu"
    assert {variable["name"] for variable in one["env"]} <= known(command)
    parse(command, one.get("args", ()), variables, patch)


@pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS.keys())
def test_the_charts(values: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for one in ours(objects(values)):
        check(one, monkeypatch)


@pytest.mark.parametrize("name", FILES)
def test_the_manifests(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = [one for one in yaml.safe_load_all((MANIFESTS / name).read_text(encoding="utf-8")) if one]
    for one in ours(rendered):
        check(one, monkeypatch)


def test_the_images(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    example = re.search(r"^# .*docker run .* IMAGE (.+)$", text, re.MULTILINE)
    assert example is not None
    parse("exporter", shlex.split(example[1]), {}, monkeypatch)


def test_the_gpu_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its DaemonSet sets, with only the image changed: the table of docs/install-gpu-operator.md."""
    exposition = (ROOT / "docs" / "install-gpu-operator.md").read_text(encoding="utf-8")
    table = exposition.split("| the operator sets |")[1].split("\n\n")[0]
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


def test_a_wrong_option_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(click.UsageError, match="--discover-kubernets"):
        parse("cluster", ["--discover-kubernets=a"], {}, monkeypatch)
    with pytest.raises(click.UsageError, match="PODGPU_CONTAINER_USAGE"):
        parse("exporter", [], {"PODGPU_CONTAINER_USAGE": "maybe"}, monkeypatch)
