"""Builds `kubectl podgpu`: an archive for each platform, and the manifest for krew.

An archive contains a Python program and its libraries for several versions of Python. It is a
folder and no zipapp, because Python cannot import compiled modules from a zip file, and krew
unpacks the archive anyway.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from release.archives import compress, tar_folder
from release.rootfs import HERE, PYTHONS, install_for_pythons, wheel_platforms

PLUGIN_LOCK = HERE / "requirements-kubectl.txt"
UNUSED_BY_PLUGIN = ("bcrypt", "google-re2", "h2", "hpack", "hyperframe")
"""Libraries that only servers and the exporter import."""
PROGRAM = "kubectl-podgpu"
_COMMAND = '''\
#!/usr/bin/env python3
"""kubectl podgpu. Runs with the Pythons of VERSIONS; older ones look for a newer one."""

import os
import shutil
import subprocess
import sys

VERSIONS = {versions}
if sys.version_info[:2] not in VERSIONS:
    for version in reversed(VERSIONS):
        program = shutil.which("python%d.%d" % version)
        # A program of pyenv may exist without its Python.
        if program and subprocess.call([program, "-c", ""], stderr=subprocess.DEVNULL) == 0:
            os.execv(program, [program] + sys.argv)
    sys.exit(
        "podgpu: kubectl podgpu needs Python {oldest} to {newest} in PATH: python3 is %d.%d"
        % sys.version_info[:2]
    )

sys.path.insert(0, os.path.join(os.path.dirname(os.path.realpath(__file__)), "lib"))

from podgpu.__main__ import kubectl_main

kubectl_main()
'''
_DESCRIPTION = """\
Shows which pod uses which GPU, how much of it, and what that costs: a live
table (top), pods, waste, cost and savings. Shared GPUs and MIG are included.

Reads podgpu's cluster view through the API server, with your own kubeconfig.
You need permission to get services/proxy in podgpu's namespace.
"""
_CAVEATS = """\
This plugin needs Python {oldest} to {newest} in PATH, and in the cluster podgpu's chart
with the cluster view: {home}/blob/main/docs/kubectl.md
"""


@dataclass(frozen=True)
class PluginPlatform:
    """Operating system and architecture, as krew names them."""

    os: str
    arch: str
    wheel_platforms: tuple[str, ...]  # pip's options


def _mac_platforms(machine: str) -> tuple[str, ...]:
    """Returns pip's options for the wheels that run on macOS 11."""
    versions = ["11_0", *(f"10_{minor}" for minor in range(15, 8, -1))]
    words = []
    for version in versions:
        words += ["--platform", f"macosx_{version}_{machine}"]
        words += ["--platform", f"macosx_{version}_universal2"]
    return tuple(words)


PLATFORMS = (
    PluginPlatform("linux", "amd64", tuple(wheel_platforms("amd64"))),
    PluginPlatform("linux", "arm64", tuple(wheel_platforms("arm64"))),
    PluginPlatform("darwin", "amd64", _mac_platforms("x86_64")),
    PluginPlatform("darwin", "arm64", _mac_platforms("arm64")),
)


def build_plugin(
    wheel: Path,
    source: Path,
    dist: Path,
    version: str,
    home: str,
    time: int,
    architectures: Sequence[str],
) -> list[Path]:
    """Returns the archive of each platform, and the manifest."""
    built = []
    platforms = []
    for platform in PLATFORMS:
        if platform.arch not in architectures:
            continue
        archive = dist / f"{PROGRAM}-{version}-{platform.os}-{platform.arch}.tar.gz"
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            install_for_pythons(wheel, platform.wheel_platforms, [PLUGIN_LOCK], folder / "lib")
            _write_command(folder / PROGRAM)
            shutil.copy(source / "LICENSE", folder)
            archive.write_bytes(compress(tar_folder(folder, time)))
        platforms.append(_describe_platform(platform, archive, version, home))
        built.append(archive)

    manifest = dist / "podgpu.yaml"
    document = make_manifest(version, home, platforms)
    text = yaml.dump(document, Dumper=_ManifestDumper, sort_keys=False)
    manifest.write_text(text, encoding="utf-8")
    return [*built, manifest]


class _ManifestDumper(yaml.SafeDumper):
    """Writes texts of several lines as they are read."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = "|" if "\n" in data else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_ManifestDumper.add_representer(str, _ManifestDumper.represent_str)


def _write_command(path: Path) -> None:
    versions = [tuple(map(int, version.split("."))) for version in PYTHONS]
    text = _COMMAND.format(versions=tuple(versions), oldest=PYTHONS[0], newest=PYTHONS[-1])
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def _describe_platform(
    platform: PluginPlatform, archive: Path, version: str, home: str
) -> dict[str, Any]:
    return {
        "selector": {"matchLabels": {"os": platform.os, "arch": platform.arch}},
        "uri": f"{home}/releases/download/v{version}/{archive.name}",
        "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
        "bin": PROGRAM,
    }


def make_manifest(version: str, home: str, platforms: list[dict[str, Any]]) -> dict[str, Any]:
    pythons = {"oldest": PYTHONS[0], "newest": PYTHONS[-1]}
    return {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "podgpu"},
        "spec": {
            "version": f"v{version}",
            "homepage": home,
            "shortDescription": "Show which pod uses which GPU, and its cost",
            "description": _DESCRIPTION,
            "caveats": _CAVEATS.format(home=home, **pythons),
            "platforms": platforms,
        },
    }
