"""The locked packages of the images, and the settings that the Dockerfile and the release share."""

from __future__ import annotations

import re
import tomllib

from packaging.requirements import Requirement

from deploy.render import ROOT
from release.archives import read_dockerfile
from release.rootfs import ARCHITECTURES, locked_packages

LOCKS = ("requirements.txt", "requirements-autoscale.txt", "build-requirements.txt")


def test_dockerfile() -> None:
    config = read_dockerfile(ROOT / "Dockerfile")
    assert config["Entrypoint"] == ["podgpu", "exporter"]
    assert config["User"] == "0:0"
    assert "NVIDIA_VISIBLE_DEVICES=all" in config["Env"]
    assert set(config["ExposedPorts"]) == {"9400/tcp", "9401/tcp"}


def test_locked_wheels_satisfy_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    versions: dict[str, str] = {}
    for name in LOCKS:
        text = (ROOT / "release" / name).read_text(encoding="utf-8")
        entries = re.split(r"^(?=[a-z0-9-]+==)", text, flags=re.MULTILINE)[1:]
        assert all("--hash=sha256:" in entry for entry in entries)
        versions |= {entry.split("==")[0]: entry.split("==")[1].split()[0] for entry in entries}
    wanted = [
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["autoscale"],
    ]
    for text in [*wanted, *project["build-system"]["requires"]]:
        requirement = Requirement(text)
        version = versions[requirement.name.lower()]
        assert requirement.specifier.contains(version), (
            f"locked: {requirement.name} {version}; needed: {text}"
        )


def test_each_architecture_has_the_same_debian_packages() -> None:
    names = [
        [package[0] for package in locked_packages(architecture)] for architecture in ARCHITECTURES
    ]
    assert names[0] == names[1]
    assert "python3.11-minimal" in names[0]
