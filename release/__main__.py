"""`make release`: builds the release of the committed sources in dist/. The build is reproducible.

Needs Python 3.11 with pip, git and helm. Downloads Debian packages and wheels with pinned
checksums.
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
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from podgpu import REGISTRY
from release.archives import OciLayout, normalize_tar_gz, read_dockerfile, tar_folder, write_deb
from release.man import render_man_page
from release.rootfs import (
    ARCHITECTURES,
    COMMAND,
    HERE,
    VARIANTS,
    add_podgpu,
    build_debian,
    build_wheel,
    check_python,
    install_wheels,
    locked_packages,
)

ROOT = HERE.parent
_LOCKED_WHEEL = re.compile(r"^(\S+)==(\S+) \\$", re.M)
_POSTINST = """\
#!/bin/sh
set -e
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
"""


def run(*command: str | Path, **options: Any) -> str:
    return subprocess.run(
        [str(word) for word in command], check=True, stdout=subprocess.PIPE, text=True, **options
    ).stdout.strip()


class Release:
    def __init__(self, commit: str, source: Path, dist: Path) -> None:
        self.commit, self.source, self.dist = commit, source, dist
        self.time = int(run("git", "log", "-1", "--format=%ct", commit, cwd=ROOT))
        initial = (source / "src/podgpu/__init__.py").read_text(encoding="utf-8")
        (self.version,) = re.findall(r'^__version__ = "(.+)"$', initial, re.M)
        os.environ["SOURCE_DATE_EPOCH"] = str(self.time)

    def build(self, architectures: list[str]) -> None:
        wheel = self.build_packages()
        self.build_chart()
        for architecture in architectures:
            self.build_deb(wheel, architecture)
        self.build_images(wheel, architectures)
        for variant in VARIANTS:
            self.write_sbom(variant, architectures)
        sums = [
            f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n"
            for p in sorted(self.dist.iterdir())
        ]
        (self.dist / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")

    def build_packages(self) -> Path:
        (self.source / "src/podgpu/commit.txt").write_text(
            f"{self.commit[:12]}\n", encoding="utf-8"
        )
        wheel = build_wheel(self.source, self.dist)
        shutil.rmtree(self.source / "build", ignore_errors=True)
        name = f"podgpu-{self.version}"
        with tempfile.TemporaryDirectory() as folder:
            members = shutil.copytree(
                self.source, Path(folder) / name, ignore=shutil.ignore_patterns("*.egg-info")
            )
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

    def build_images(self, wheel: Path, architectures: list[str]) -> None:
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.time))
        config = read_dockerfile(self.source / "Dockerfile")
        config["Labels"] |= {
            "org.opencontainers.image.version": self.version,
            "org.opencontainers.image.revision": self.commit,
        }
        images = {variant: OciLayout(config, created) for variant in VARIANTS}
        for architecture in architectures:
            with tempfile.TemporaryDirectory() as folder:
                debian = Path(folder) / "debian"
                build_debian(architecture, debian)
                for variant, image in images.items():
                    root = shutil.copytree(debian, Path(folder) / f"root-{variant}", symlinks=True)
                    add_podgpu(wheel, architecture, variant, root)
                    size = image.add_image(architecture, tar_folder(root, self.time))
                    print(
                        f"image {self._tag(variant)} {architecture}: {size / 1e6:.1f} MB compressed"
                    )
        for variant, image in images.items():
            tag = self._tag(variant)
            digest = image.write(
                self.dist / f"podgpu-image-{tag}.tar", f"{REGISTRY}/podgpu:{tag}", self.time
            )
            print(f"image {tag}: {digest}")

    def _tag(self, variant: str) -> str:
        return f"{self.version}-{variant}" if variant else self.version

    def build_deb(self, wheel: Path, architecture: str) -> None:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            install_wheels(wheel, architecture, "", folder / "usr/lib/podgpu")
            files = {
                "usr/bin/podgpu": COMMAND.format(path='sys.path.insert(0, "/usr/lib/podgpu")'),
                "usr/share/man/man1/podgpu.1": render_man_page(self.version, self.time),
                "usr/share/doc/podgpu/copyright": (self.source / "LICENSE").read_text(
                    encoding="utf-8"
                ),
                "etc/default/podgpu": (self.source / "deploy/systemd/podgpu.env").read_text(
                    encoding="utf-8"
                ),
            }
            for unit in ("podgpu.service", "podgpu.socket"):
                text = (self.source / "deploy/systemd" / unit).read_text(encoding="utf-8")
                files[f"lib/systemd/system/{unit}"] = text.replace(
                    "/opt/podgpu/bin/podgpu", "/usr/bin/podgpu"
                )
            for name, content in files.items():
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(content, encoding="utf-8")
            (folder / "usr/bin/podgpu").chmod(0o755)
            control = {
                "Package": "podgpu",
                "Version": self.version,
                "Architecture": architecture,
                "Maintainer": "podgpu maintainers <podgpu@localhost>",
                "Depends": "python3.11, libc6 (>= 2.36), procps",
                "Recommends": "ca-certificates",
                "Section": "admin",
                "Priority": "optional",
                "Homepage": _read_home(self.source),
                "Description": "GPU metrics for Prometheus: which pod, container or user uses "
                "which "
                "GPU\n"
                " A drop-in for dcgm-exporter that needs no DCGM, with exact figures for shared "
                "GPUs.",
            }
            deb = self.dist / f"podgpu_{self.version}_{architecture}.deb"
            write_deb(deb, folder, control, {"postinst": _POSTINST, "prerm": _PRERM}, self.time)
            self._report(deb)

    def write_sbom(self, variant: str, architectures: list[str]) -> None:
        """Writes the software bill of materials of an image, in CycloneDX 1.5."""
        files = ["requirements.txt"] + (["requirements-autoscale.txt"] if variant else [])
        wheels = [
            match
            for f in files
            for match in _LOCKED_WHEEL.findall((HERE / f).read_text(encoding="utf-8"))
        ]
        components = [
            _component(f"pkg:pypi/{name}@{version}", name, version)
            for name, version in sorted(wheels)
        ]
        for architecture in architectures:
            for name, version, sha256, _ in locked_packages(architecture):
                component = _component(
                    f"pkg:deb/debian/{name}@{version}?arch={architecture}", name, version
                )
                components.append(component | {"hashes": [{"alg": "SHA-256", "content": sha256}]})
        document = {
            "bomFormat": "CycloneDX",
            "specVersion": "1.5",
            "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, self.commit + variant)}",
            "version": 1,
            "metadata": {
                "component": _component(f"pkg:pypi/podgpu@{self.version}", "podgpu", self.version)
            },
            "components": components,
        }
        text = json.dumps(document, indent=1, ensure_ascii=False)
        (self.dist / f"podgpu-image-{self._tag(variant)}.cdx.json").write_text(
            f"{text}\n", encoding="utf-8"
        )

    def _report(self, path: Path) -> None:
        print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB")


def _component(purl: str, name: str, version: str) -> dict[str, Any]:
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def _read_metadata(wheel: Path) -> bytes:
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name)


def _read_home(source: Path) -> str:
    (home,) = re.findall(
        r"^home: (\S+)$",
        (source / "deploy/helm/podgpu/Chart.yaml").read_text(encoding="utf-8"),
        re.M,
    )
    return str(home)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument(
        "--arch", choices=ARCHITECTURES, action="append", help="only this architecture"
    )
    options = parser.parse_args()
    check_python()
    if run("git", "status", "--porcelain", cwd=ROOT):
        print("warning: uncommitted changes are not part of the release", file=sys.stderr)
    shutil.rmtree(options.dist, ignore_errors=True)
    options.dist.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as source:
        archive = subprocess.run(
            ["git", "archive", "HEAD"], cwd=ROOT, check=True, stdout=subprocess.PIPE
        ).stdout
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            files.extractall(source, filter="data")
        release = Release(run("git", "rev-parse", "HEAD", cwd=ROOT), Path(source), options.dist)
        release.build(options.arch or list(ARCHITECTURES))


if __name__ == "__main__":
    main()
