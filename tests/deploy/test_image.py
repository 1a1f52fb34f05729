"""The image without a container engine: its installation script runs in a temporary folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from deploy.render import ROOT
from podgpu.metrics.counters import SHIPPED, parse_counters

NVIDIAS_NAMES = {"default-counters.csv", "dcp-metrics-included.csv", "1.x-compatibility-metrics.csv"}


def test_dockerfile() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert re.search(
        r"^ARG PYTHON_IMAGE=docker\.io/library/python:3\.12\.\d+-slim-\w+@sha256:[0-9a-f]{64}$", text, re.M
    )
    assert 'ENTRYPOINT ["podgpu", "exporter"]' in text
    copied = re.search(r"^COPY (\S+\.csv) /etc/dcgm-exporter/$", text, re.M)
    assert copied is not None
    paths = {path.name: path for path in ROOT.glob(copied[1])}
    assert paths.keys() == NVIDIAS_NAMES == set(SHIPPED.values())
    for name, path in paths.items():
        assert parse_counters(path.read_text(encoding="utf-8"), name)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the build stage makes of /opt/podgpu, but for podgpu's dependencies: they are downloads."""
    folder = tmp_path_factory.mktemp("image")
    (folder / "kept").mkdir()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / "kept")
    shutil.copytree(ROOT / "src", folder / "kept" / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    install(folder, folder / "opt")
    return folder / "opt"


def install(folder: Path, prefix: Path) -> None:
    """From a fresh copy: a build leaves things in its sources."""
    source = folder / "src"
    shutil.copytree(folder / "kept", source)
    (folder / "requirements.txt").write_text("", encoding="utf-8")
    script = ROOT / "deploy" / "docker" / "install.sh"
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SOURCE_DATE_EPOCH": "315532800",
        "PYTHONHASHSEED": "0",
    }
    command = ["sh", str(script), str(source), str(prefix), str(folder / "requirements.txt")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(source)


def site_packages(prefix: Path) -> Path:
    (found,) = prefix.glob("lib/python*/site-packages")
    return found


def test_everything_needed_at_run_time_is_there(installed: Path) -> None:
    package = site_packages(installed) / "podgpu"
    sources = installed.parent / "kept" / "src" / "podgpu"
    wanted = {str(path.relative_to(sources)) for path in sources.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert wanted - {str(path.relative_to(package)) for path in package.rglob("*")} == set()


def test_it_runs(installed: Path, tmp_path: Path) -> None:
    """With the dependencies of the tests' own environment, without podgpu's sources."""
    environment = {"PATH": f"{installed / 'bin'}:/usr/bin:/bin", "PYTHONPATH": sysconfig.get_path("purelib")}
    for arguments in (["exporter", "--help"], ["exporter", "--telemetry", "simulated:1xH100", "--once"]):
        command = [str(installed / "bin" / "podgpu"), *arguments]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert "DCGM_FI_DEV_GPU_UTIL" in done.stdout


def locked(name: str) -> dict[str, str]:
    """Package -> version."""
    text = (ROOT / "deploy" / "docker" / name).read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z0-9-]+)==([^\s\\]+)", text, re.MULTILINE))


@pytest.mark.parametrize(
    ("name", "table", "key"),
    [("requirements.txt", "project", "dependencies"), ("build-requirements.txt", "build-system", "requires")],
)
def test_the_lock_is_what_the_package_asks_for(name: str, table: str, key: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    versions = locked(name)
    for text in project[table][key]:
        wanted = Requirement(text)
        version = versions[wanted.name.lower()]
        assert wanted.specifier.contains(version), f"{name} has {wanted.name} {version}; {text} is asked for"


@pytest.mark.parametrize("name", ["requirements.txt", "build-requirements.txt"])
def test_every_locked_package_has_hashes(name: str) -> None:
    text = (ROOT / "deploy" / "docker" / name).read_text(encoding="utf-8")
    entries = re.split(r"^(?=[a-z0-9-]+==)", text, flags=re.MULTILINE)[1:]
    assert len(entries) == len(locked(name))
    assert all("--hash=sha256:" in entry for entry in entries)
