"""The archives of `kubectl podgpu` and their krew manifest."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from podgpu import __version__
from podgpu.cli.main import KUBECTL_COMMANDS
from release.rootfs import PYTHONS
from tests.kube.api_server import SimulatedApiServer
from tests.kube.test_config import kubeconfig, write
from tests.release.test_release import find_pythons
from tests.top.servers import podgpu_server

MAX_BYTES = 25_000_000
POD = {
    "namespace": "ml",
    "pod": "train",
    "nodes": ["n1"],
    "allocated_gpus": 1.0,
    "used_gpus": 1.0,
    "idle_gpus": 0.0,
    "unknown_gpus": 0.0,
}


@pytest.fixture(scope="module")
def manifest(dist: Path) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((dist / "podgpu.yaml").read_text(encoding="utf-8"))
    return document


@pytest.fixture(scope="module")
def archive(dist: Path) -> Path:
    return dist / f"kubectl-podgpu-{__version__}-linux-amd64.tar.gz"


@pytest.fixture(scope="module")
def plugin(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpacks the archive, and links to its program as krew does."""
    folder = tmp_path_factory.mktemp("plugin")
    with tarfile.open(archive) as files:
        files.extractall(folder / "store", filter="data")
    (folder / "bin").mkdir()
    link = folder / "bin/kubectl-podgpu"
    link.symlink_to(folder / "store/kubectl-podgpu")
    return link


@pytest.fixture
def config(tmp_path: Path) -> Iterator[str]:
    """Serves a view behind an API server. Yields the kubeconfig."""
    pods = {"api": "podgpu/v1", "pods": [POD]}
    with SimulatedApiServer() as server, podgpu_server({"/api/v1/pods": pods}) as view:
        server.proxied = {"gpus/http:view:9401": f"http://{view.address}"}
        yield write(tmp_path / "config", kubeconfig({"server": server.url}))


def test_the_manifest_names_the_archives(dist: Path, manifest: dict[str, Any]) -> None:
    spec = manifest["spec"]
    assert spec["version"] == f"v{__version__}"
    names = set()
    for platform in spec["platforms"]:
        name = platform["uri"].rpartition("/")[2]
        names.add(name)
        content = (dist / name).read_bytes()
        assert platform["sha256"] == hashlib.sha256(content).hexdigest()
        assert len(content) < MAX_BYTES
        labels = platform["selector"]["matchLabels"]
        assert f"-{labels['os']}-{labels['arch']}." in name
    assert names == {path.name for path in dist.glob("kubectl-podgpu-*")}


def test_each_archive_has_modules_of_its_platform(dist: Path) -> None:
    """Compiled modules are there for each Python; a license is at the top, as krew demands."""
    for path in dist.glob("kubectl-podgpu-*.tar.gz"):
        with tarfile.open(path) as files:
            names = files.getnames()
        assert {"LICENSE", "kubectl-podgpu"} <= set(names)
        system = "darwin" if "-darwin-" in path.name else "linux-gnu"
        for python in PYTHONS:
            version = python.replace(".", "")
            modules = [name for name in names if f"cpython-{version}-" in name]
            assert modules, f"{path.name} has no modules for Python {python}"
            for module in modules:
                assert system in module, f"{path.name}: {module}"


@pytest.mark.parametrize("python", find_pythons())
def test_each_python_runs_the_plugin(python: str, plugin: Path, config: str) -> None:
    command = [python, "-I", str(plugin), "pods", "--kubeconfig", config, "--service", "gpus/view"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ml/train" in done.stdout


def test_every_command_imports_only_what_is_in_the_archive(plugin: Path) -> None:
    python = find_pythons()[0]
    for name in KUBECTL_COMMANDS:
        command = [python, "-I", str(plugin), name, "--help"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), name


def test_a_python_that_is_too_old(plugin: Path, tmp_path: Path) -> None:
    olds = [
        *Path.home().glob(".pyenv/versions/3.[6-9].*/bin/python3"),
        *Path("/usr/bin").glob("python3.[6-9]"),
    ]
    if not olds:
        pytest.skip("there is no old Python")
    command = [str(olds[0]), str(plugin), "--version"]
    nowhere = {"PATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=nowhere)
    assert done.returncode == 1
    assert "kubectl podgpu needs Python 3.11 to 3.14 in PATH: python3 is 3." in done.stderr

    (tmp_path / "python3.12").symlink_to(find_pythons()[-1])
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=nowhere)
    assert done.stdout.startswith(f"podgpu {__version__}")


def test_krew_installs_the_plugin(dist: Path, archive: Path, config: str, tmp_path: Path) -> None:
    krew = shutil.which("kubectl-krew") or shutil.which("krew")
    kubectl = shutil.which("kubectl")
    if krew is None or kubectl is None:
        pytest.skip("needs krew and kubectl in PATH")
    environment = os.environ | {"KREW_ROOT": str(tmp_path), "HOME": str(tmp_path)}
    install = [krew, "install", f"--manifest={dist / 'podgpu.yaml'}", f"--archive={archive}"]
    done = subprocess.run(install, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "This plugin needs Python 3.11 to 3.14" in done.stderr

    environment["PATH"] = f"{tmp_path}/bin:{environment['PATH']}"
    command = [kubectl, "podgpu", "pods", "--kubeconfig", config, "--service", "gpus/view"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ml/train" in done.stdout
