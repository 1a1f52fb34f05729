"""The systemd unit and socket."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from deploy.render import ROOT
from podgpu.cli.main import cli
from podgpu.cli.options import EXPORTER_OPTIONS

FOLDER = ROOT / "deploy" / "systemd"
UNIT = FOLDER / "podgpu.service"
SOCKET = FOLDER / "podgpu.socket"
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


def service() -> configparser.SectionProxy:
    return section(UNIT, "Service")


def section(unit: Path, name: str) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(
        interpolation=None, delimiters=("=",), comment_prefixes=("#",)
    )
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(unit, encoding="utf-8")
    return parser[name]


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, check=False
    )


@pytest.fixture
def startable(tmp_path: Path) -> Path:
    """Returns a copy of the unit with an existing program, because systemd checks the path."""
    copy = tmp_path / "podgpu.service"
    text = UNIT.read_text(encoding="utf-8")
    copy.write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", text), encoding="utf-8")
    return copy


@needs_systemd
def test_systemd_understands_the_socket(startable: Path) -> None:
    beside = startable.with_name("podgpu.socket")
    beside.write_text(SOCKET.read_text(encoding="utf-8"), encoding="utf-8")
    done = analyze("verify", "--man=no", str(beside), str(startable))
    assert (done.returncode, done.stderr) == (0, "")


def test_the_socket_is_the_port_podgpu_would_bind() -> None:
    rows = {option.flag: option for option in EXPORTER_OPTIONS}
    found = section(SOCKET, "Socket")
    assert found["ListenStream"] == rows["address"].default.removeprefix(":")
    assert "Accept" not in found, "podgpu itself accepts connections"
    variables = (FOLDER / "podgpu.env").read_text(encoding="utf-8")
    assert f"#{rows['web-systemd-socket'].env}=true" in variables.splitlines()


def test_it_starts_the_exporter() -> None:
    program, command, *rest = shlex.split(service()["ExecStart"])
    assert program == "/opt/podgpu/bin/podgpu", "the path in the README"
    assert command in cli.list_commands(click.Context(cli))
    assert rest == ["$PODGPU_ARGUMENTS"]
    assert service()["RestartPreventExitStatus"] == "2", "the exit code for invalid options"
