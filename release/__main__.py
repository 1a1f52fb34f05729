"""`make release`: builds the release of the committed sources in dist/. The build is reproducible.

Needs pip, git and helm. Downloads Debian packages and wheels with pinned checksums.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import uuid
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from podgpu import REGISTRY
from release.archives import OciLayout, normalize_tar_gz, read_dockerfile, tar_folder, write_deb
from release.kubectl_plugin import build_plugin
from release.man import render_man_page
from release.rootfs import (
    ARCHITECTURES,
    COMMAND,
    HERE,
    PYTHONS,
    VARIANTS,
    add_podgpu,
    build_debian,
    build_wheel,
    extract_compiler,
    find_locks,
    install_for_pythons,
    locked_packages,
    wheel_platforms,
)

ROOT = HERE.parent
_LOCKED_WHEEL = re.compile(r"^(\S+)==(\S+) \\$", re.M)
DEB_LIBRARY = Path("usr/lib/podgpu")
_POSTINST = """\
#!/bin/sh
set -e
if [ "$1" = configure ]; then
    py3compile -p podgpu /usr/lib/podgpu
fi
if [ "$1" = configure ] && [ -d /run/systemd/system ]; then
    systemctl daemon-reload
    systemctl try-restart podgpu.service
fi
"""
_PRERM = """\
#!/bin/sh
set -e
if [ "$1" = remove ] && [ -d /run/systemd/system ]; then
    systemctl disable --now podgpu.service podgpu.socket
fi
py3clean -p podgpu /usr/lib/podgpu
"""
_SUMMARY = "GPU metrics for Prometheus: which pod, container or user uses which GPU"
_DESCRIPTION = (
    " A drop-in for dcgm-exporter that needs no DCGM, with exact figures for shared GPUs."
)


def run(*command: str | Path, **options: Any) -> str:
    return subprocess.run(
        [str(word) for word in command], check=True, stdout=subprocess.PIPE, text=True, **options
    ).stdout.strip()


class Release:
    def __init__(self, commit: str, source: Path, dist: Path) -> None:
        self.commit = commit
        self.source = source
        self.dist = dist
        self.time = int(run("git", "log", "-1", "--format=%ct", commit, cwd=ROOT))
        initial = (source / "src/podgpu/__init__.py").read_text(encoding="utf-8")
        (self.version,) = re.findall(r'^__version__ = "(.+)"$', initial, re.M)
        os.environ["SOURCE_DATE_EPOCH"] = str(self.time)

    def build(self, architectures: list[str]) -> None:
        wheel = self.build_packages()
        self.build_chart()
        self.build_plugin(wheel, architectures)
        for architecture in architectures:
            self.build_deb(wheel, architecture)
        self.build_images(wheel, architectures)
        for variant in VARIANTS:
            self.write_sbom(variant, architectures)
        self._write_checksums()

    def _write_checksums(self) -> None:
        lines = ""
        for path in sorted(self.dist.iterdir()):
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            lines += f"{digest}  {path.name}\n"
        (self.dist / "SHA256SUMS").write_text(lines, encoding="utf-8")

    def build_packages(self) -> Path:
        """Builds the wheel and the sdist. Returns the wheel."""
        commit_file = self.source / "src/podgpu/commit.txt"
        commit_file.write_text(f"{self.commit[:12]}\n", encoding="utf-8")
        wheel = build_wheel(self.source, self.dist)
        shutil.rmtree(self.source / "build", ignore_errors=True)

        name = f"podgpu-{self.version}"
        with tempfile.TemporaryDirectory() as folder:
            members = Path(folder) / name
            shutil.copytree(self.source, members, ignore=shutil.ignore_patterns("*.egg-info"))
            (members / "PKG-INFO").write_bytes(_read_metadata(wheel))
            data = BytesIO()
            with tarfile.open(fileobj=data, mode="w") as archive:
                archive.add(members, name)
        (self.dist / f"{name}.tar.gz").write_bytes(normalize_tar_gz(data.getvalue(), self.time))
        self._report(wheel)
        return wheel

    def build_chart(self) -> None:
        run("helm", "package", self.source / "deploy/helm/podgpu", "--destination", self.dist)
        chart = self.dist / f"podgpu-{self.version}.tgz"
        chart.write_bytes(normalize_tar_gz(chart.read_bytes(), self.time))
        self._report(chart)

    def build_plugin(self, wheel: Path, architectures: list[str]) -> None:
        home = _read_home(self.source)
        built = build_plugin(
            wheel, self.source, self.dist, self.version, home, self.time, architectures
        )
        for path in built:
            self._report(path)

    def build_images(self, wheel: Path, architectures: list[str]) -> None:
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.time))
        config = read_dockerfile(self.source / "Dockerfile")
        config["Labels"] |= {
            "org.opencontainers.image.version": self.version,
            "org.opencontainers.image.revision": self.commit,
        }
        images = {variant: OciLayout(config, created) for variant in VARIANTS}
        with tempfile.TemporaryDirectory() as temporary:
            compiler = extract_compiler(Path(temporary))
            for architecture in architectures:
                self._add_images(images, compiler, wheel, architecture)

        for variant, image in images.items():
            tag = self._tag(variant)
            path = self.dist / f"podgpu-image-{tag}.tar"
            digest = image.write(path, f"{REGISTRY}/podgpu:{tag}", self.time)
            print(f"image {tag}: {digest}")

    def _add_images(
        self,
        images: dict[str, OciLayout],
        compiler: Sequence[str],
        wheel: Path,
        architecture: str,
    ) -> None:
        """Adds one architecture to the images of all variants."""
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            debian = folder / "debian"
            build_debian(compiler, architecture, debian)
            for variant, image in images.items():
                root = shutil.copytree(debian, folder / f"root-{variant}", symlinks=True)
                add_podgpu(compiler, wheel, architecture, variant, root)
                size = image.add_image(architecture, tar_folder(root, self.time))
                name = f"image {self._tag(variant)} {architecture}"
                print(f"{name}: {size / 1e6:.1f} MB compressed")

    def _tag(self, variant: str) -> str:
        return f"{self.version}-{variant}" if variant else self.version

    def build_deb(self, wheel: Path, architecture: str) -> None:
        control = {
            "Package": "podgpu",
            "Version": self.version,
            "Architecture": architecture,
            "Maintainer": "podgpu maintainers <podgpu@localhost>",
            "Depends": f"python3 (>= {PYTHONS[0]}), python3 (<< {_next_python()}), "
            "libc6 (>= 2.36), libstdc++6, procps",
            "Recommends": "ca-certificates",
            "Section": "admin",
            "Priority": "optional",
            "Homepage": _read_home(self.source),
            "Description": f"{_SUMMARY}\n{_DESCRIPTION}",
        }
        deb = self.dist / f"podgpu_{self.version}_{architecture}.deb"
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            platforms = wheel_platforms(architecture)
            install_for_pythons(wheel, platforms, find_locks(""), folder / DEB_LIBRARY)
            self._write_deb_files(folder)
            scripts = {"postinst": _POSTINST, "prerm": _PRERM}
            write_deb(deb, folder, control, scripts, self.time)
        self._report(deb)

    def _write_deb_files(self, folder: Path) -> None:
        files = {
            "usr/bin/podgpu": COMMAND.format(path=f'sys.path.insert(0, "/{DEB_LIBRARY}")'),
            "usr/share/man/man1/podgpu.1": render_man_page(self.version, self.time),
            "usr/share/doc/podgpu/copyright": self._read("LICENSE"),
            "etc/default/podgpu": self._read("deploy/systemd/podgpu.env"),
        }
        for unit in ("podgpu.service", "podgpu.socket"):
            text = self._read(f"deploy/systemd/{unit}")
            text = text.replace("/opt/podgpu/bin/podgpu", "/usr/bin/podgpu")
            files[f"lib/systemd/system/{unit}"] = text
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        (folder / "usr/bin/podgpu").chmod(0o755)

    def _read(self, name: str) -> str:
        return (self.source / name).read_text(encoding="utf-8")

    def write_sbom(self, variant: str, architectures: list[str]) -> None:
        """Writes the software bill of materials of an image, in CycloneDX 1.5."""
        components = []
        for name, version in _locked_wheels(variant):
            components.append(_component(f"pkg:pypi/{name}@{version}", name, version))
        for architecture in architectures:
            for name, version, sha256, _ in locked_packages(architecture):
                purl = f"pkg:deb/debian/{name}@{version}?arch={architecture}"
                component = _component(purl, name, version)
                component["hashes"] = [{"alg": "SHA-256", "content": sha256}]
                components.append(component)
        podgpu = _component(f"pkg:pypi/podgpu@{self.version}", "podgpu", self.version)
        document = {
            "bomFormat": "CycloneDX",
            "specVersion": "1.5",
            "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, self.commit + variant)}",
            "version": 1,
            "metadata": {"component": podgpu},
            "components": components,
        }
        text = json.dumps(document, indent=1, ensure_ascii=False)
        path = self.dist / f"podgpu-image-{self._tag(variant)}.cdx.json"
        path.write_text(f"{text}\n", encoding="utf-8")

    def _report(self, path: Path) -> None:
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB")


def _next_python() -> str:
    """Returns the first version of Python for which there are no compiled modules."""
    major, _, minor = PYTHONS[-1].partition(".")
    return f"{major}.{int(minor) + 1}"


def _locked_wheels(variant: str) -> list[tuple[str, str]]:
    """Returns name and version of each dependency of an image."""
    wheels = []
    for lock in find_locks(variant):
        wheels += _LOCKED_WHEEL.findall(lock.read_text(encoding="utf-8"))
    return sorted(wheels)


def _component(purl: str, name: str, version: str) -> dict[str, Any]:
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def _read_metadata(wheel: Path) -> bytes:
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name)


def _read_home(source: Path) -> str:
    chart = (source / "deploy/helm/podgpu/Chart.yaml").read_text(encoding="utf-8")
    (home,) = re.findall(r"^home: (\S+)$", chart, re.M)
    return str(home)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument(
        "--arch", choices=ARCHITECTURES, action="append", help="only this architecture"
    )
    options = parser.parse_args()
    if run("git", "status", "--porcelain", cwd=ROOT):
        print("warning: uncommitted changes are not part of the release", file=sys.stderr)
    shutil.rmtree(options.dist, ignore_errors=True)
    options.dist.mkdir(parents=True)

    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary)
        command = ["git", "archive", "HEAD"]
        done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE)
        with tarfile.open(fileobj=BytesIO(done.stdout)) as files:
            files.extractall(source, filter="data")
        release = Release(run("git", "rev-parse", "HEAD", cwd=ROOT), source, options.dist)
        release.build(options.arch or list(ARCHITECTURES))


if __name__ == "__main__":
    main()
