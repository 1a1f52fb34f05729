"""The systemd unit: systemd's own opinion of it, and that it starts what the package has."""

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
from podgpu.cli.exporter_options import EXPORTER_OPTIONS
from podgpu.cli.main import cli
from podgpu.web.connections import ConnectionLimits

FOLDER = ROOT / "deploy" / "systemd"
UNIT = FOLDER / "podgpu.service"
SOCKET = FOLDER / "podgpu.socket"
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def service() -> configparser.SectionProxy:
    return section(UNIT, "Service")


def section(unit: Path, name: str) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(unit, encoding="utf-8")
    return parser[name]


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, check=False)


@pytest.fixture
def startable(tmp_path: Path) -> Path:
    """The unit with a program that is here: systemd looks for it."""
    copy = tmp_path / "podgpu.service"
    text = UNIT.read_text(encoding="utf-8")
    copy.write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", text), encoding="utf-8")
    return copy


@needs_systemd
def test_systemd_understands_it(startable: Path) -> None:
    done = analyze("verify", "--man=no", str(startable))
    assert (done.returncode, done.stderr) == (0, "")


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
    assert "Accept" not in found, "podgpu accepts by itself"
    variables = (FOLDER / "podgpu.env").read_text(encoding="utf-8")
    assert f"#{rows['web-systemd-socket'].env}=true" in variables.splitlines()


def test_it_has_descriptors_for_every_visitor() -> None:
    listeners = 3
    wanted = listeners * ConnectionLimits().max_connections + 256
    assert int(service()["LimitNOFILE"]) >= wanted


@needs_systemd
def test_systemd_finds_little_to_complain_about(startable: Path) -> None:
    """Its exposure level goes from 0 (none) to 10; most services are above 9."""
    done = analyze("security", "--offline=true", "--threshold=25", "--no-pager", str(startable))
    assert done.returncode == 0, done.stdout.splitlines()[-1]


def test_it_starts_the_exporter() -> None:
    program, command, *rest = shlex.split(service()["ExecStart"])
    assert program == "/opt/podgpu/bin/podgpu", "where the README installs it"
    assert command in cli.list_commands(click.Context(cli))
    assert rest == ["$PODGPU_ARGUMENTS"]
    assert service()["RestartPreventExitStatus"] == "2", "the exit code of a wrong call"


def test_it_may_nothing_and_still_see_the_gpus() -> None:
    found = service()
    for key in ("NoNewPrivileges", "DynamicUser", "ProtectHome", "PrivateTmp", "RestrictNamespaces"):
        assert found[key] == "yes", key
    assert (found["CapabilityBoundingSet"], found["AmbientCapabilities"]) == ("", "")
    assert found["ProtectSystem"] == "strict"
    assert not {"PrivateDevices", "DevicePolicy", "ProtectClock", "ProtectProc", "MemoryDenyWriteExecute"} & set(found)


def test_the_file_of_variables_is_the_one_it_reads() -> None:
    assert service()["EnvironmentFile"] == "-/etc/default/podgpu"
    assert "/etc/default/podgpu" in (FOLDER / "podgpu.env").read_text(encoding="utf-8").splitlines()[0]
