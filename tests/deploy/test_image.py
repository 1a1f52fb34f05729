"""The image without a container engine: the Dockerfile read as text, its steps carried out in a temporary folder."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from deploy.render import ROOT
from podgpu.metrics.counters import SHIPPED, parse_counters

NVIDIAS_NAMES = {"default-counters.csv", "dcp-metrics-included.csv", "1.x-compatibility-metrics.csv"}


@dataclass(frozen=True)
class Instruction:
    word: str
    rest: str

    @property
    def words(self) -> list[str]:
        return [word for word in shlex.split(self.rest) if not word.startswith("--")]


def instructions() -> list[Instruction]:
    lines = [
        line for line in (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines() if not line.startswith("#")
    ]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [Instruction(*line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def of(word: str) -> list[Instruction]:
    return [one for one in instructions() if one.word == word]


def last_stage() -> list[Instruction]:
    every = instructions()
    start = max(number for number, one in enumerate(every) if one.word == "FROM")
    return every[start:]


# --- as text


def test_the_base_is_pinned() -> None:
    base = next(one for one in of("ARG") if one.rest.startswith("PYTHON_IMAGE="))
    assert re.fullmatch(r"PYTHON_IMAGE=docker\.io/library/python:3\.12\.\d+-slim-\w+@sha256:[0-9a-f]{64}", base.rest)
    assert {one.words[0] for one in of("FROM")} == {"${PYTHON_IMAGE}"}, "two stages of one base"
    assert len(of("FROM")) == 2


# --- what goes in


def test_the_counters_have_nvidias_names() -> None:
    (copy,) = [one for one in last_stage() if one.word == "COPY" and "csv" in one.rest]
    source, target = copy.words
    assert target == "/etc/dcgm-exporter/"
    found = {path.name: path for path in ROOT.glob(source)}
    assert found.keys() == NVIDIAS_NAMES == set(SHIPPED.values())
    for name, path in found.items():
        assert parse_counters(path.read_text(encoding="utf-8"), name)


# --- carried out


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


def test_the_same_input_gives_the_same_bytes(installed: Path) -> None:
    first = digests(installed)
    shutil.rmtree(installed)
    install(installed.parent, installed)
    assert digests(installed) == first


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# --- the lock


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
