"""`python -m release.lock`: pins Debian packages in debian.lock, and wheels in *.txt.

Run it on Debian to update the packages, and commit the result. It needs `dpkg` to compare versions.
"""

from __future__ import annotations

import hashlib
import lzma
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from release.kubectl_plugin import PLATFORMS, PLUGIN_LOCK, UNUSED_BY_PLUGIN
from release.rootfs import ARCHITECTURES, HERE, IMAGE_PYTHON, MIRROR, PYTHONS, wheel_platforms

SUITES = (
    ("debian", "bookworm"),
    ("debian", "bookworm-updates"),
    ("debian-security", "bookworm-security"),
)
PACKAGES = [
    "base-files",
    "ca-certificates",
    "libc6",
    "libgcc-s1",
    "libstdc++6",
    "libcrypt1",
    "zlib1g",
    "libbz2-1.0",
    "liblzma5",
    "libexpat1",
    "libffi8",
    "libssl3",
    "libsqlite3-0",
    "libuuid1",
    f"python{IMAGE_PYTHON}-minimal",
    f"libpython{IMAGE_PYTHON}-minimal",
    f"libpython{IMAGE_PYTHON}-stdlib",
]
_PIP_DOWNLOAD = (sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:")
_AUTOSCALE = ("grpcio", "cryptography", "cffi", "pycparser")


Package = dict[str, str]
"""The fields of a Debian package in an index."""


def lock_debian() -> str:
    lines = []
    for architecture in ARCHITECTURES:
        newest: dict[str, Package] = {}
        for archive, suite in SUITES:
            for package in _read_index(archive, suite, architecture):
                name = package.get("Package", "")
                if name not in PACKAGES:
                    continue
                if name not in newest or _is_newer(package, newest[name]):
                    package["Filename"] = f"{archive}/{package['Filename']}"
                    newest[name] = package

        for name in PACKAGES:
            package = newest[name]
            fields = [package["Version"], package["SHA256"], package["Filename"]]
            lines.append(" ".join([architecture, name, *fields]))
    return "".join(f"{line}\n" for line in lines)


def _read_index(archive: str, suite: str, architecture: str) -> Iterator[Package]:
    url = f"{MIRROR}/{archive}/dists/{suite}/main/binary-{architecture}/Packages.xz"
    with urllib.request.urlopen(url, timeout=60) as answer:
        text = lzma.decompress(answer.read()).decode()
    for paragraph in text.split("\n\n"):
        package = {}
        for line in paragraph.splitlines():
            key, separator, value = line.partition(": ")
            # A line that begins with a space continues the value of the previous line.
            if separator and not line.startswith(" "):
                package[key] = value
        yield package


def _is_newer(package: Package, other: Package) -> bool:
    command = ["dpkg", "--compare-versions", package["Version"], "gt", other["Version"]]
    return subprocess.run(command, check=False).returncode == 0


def lock_wheels() -> tuple[str, str]:
    """Returns the requirements of all images, and the additional ones of the autoscale image.

    They have the same versions for every architecture and Python, but other checksums.
    """
    hashes: dict[tuple[str, str], set[str]] = {}
    for architecture in ARCHITECTURES:
        for python in PYTHONS:
            constraints = [f"{name}=={version}" for name, version in hashes]
            with tempfile.TemporaryDirectory() as temporary:
                folder = Path(temporary)
                _download_wheels(architecture, python, constraints, folder)
                for wheel in folder.glob("*.whl"):
                    name, version = wheel.name.split("-")[:2]
                    key = (name.lower().replace("_", "-"), version)
                    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
                    hashes.setdefault(key, set()).add(digest)

    base = ""
    autoscale = ""
    for (name, version), digests in sorted(hashes.items()):
        requirement = _write_requirement(f"{name}=={version}", digests)
        if name in _AUTOSCALE:
            autoscale += requirement
        else:
            base += requirement
    return base, autoscale


def lock_plugin_wheels(base: str) -> str:
    """Returns the requirements of the kubectl plugin, with checksums for its platforms.

    `base`: the requirements of the images, whose versions are used.
    """
    wanted = []
    for name, version in re.findall(r"^(\S+)==(\S+)", base, re.M):
        if name not in UNUSED_BY_PLUGIN:
            wanted.append(f"{name}=={version}")
    hashes: dict[str, set[str]] = {requirement: set() for requirement in wanted}
    for platform in PLATFORMS:
        for python in PYTHONS:
            with tempfile.TemporaryDirectory() as temporary:
                command = [*_PIP_DOWNLOAD, "--dest", temporary, "--no-deps"]
                command += ["--python-version", python, *platform.wheel_platforms, *wanted]
                subprocess.run(command, check=True)
                for wheel in Path(temporary).glob("*.whl"):
                    name, version = wheel.name.split("-")[:2]
                    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
                    hashes[f"{name.lower().replace('_', '-')}=={version}"].add(digest)
    return "".join(_write_requirement(name, digests) for name, digests in hashes.items())


def _write_requirement(requirement: str, digests: set[str]) -> str:
    line = requirement
    for digest in sorted(digests):
        line += f" \\\n    --hash=sha256:{digest}"
    return f"{line}\n"


def _download_wheels(
    architecture: str, python: str, constraints: Sequence[str], folder: Path
) -> None:
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["autoscale"]]
    (folder / "constraints.txt").write_text("\n".join(constraints), encoding="utf-8")
    command = [*_PIP_DOWNLOAD, "--dest", str(folder)]
    command += ["--constraint", str(folder / "constraints.txt")]
    command += ["--python-version", python, *wheel_platforms(architecture)]
    subprocess.run([*command, *wanted], check=True)


def main() -> None:
    (HERE / "debian.lock").write_text(lock_debian(), encoding="utf-8")
    base, autoscale = lock_wheels()
    (HERE / "requirements.txt").write_text(base, encoding="utf-8")
    (HERE / "requirements-autoscale.txt").write_text(autoscale, encoding="utf-8")
    PLUGIN_LOCK.write_text(lock_plugin_wheels(base), encoding="utf-8")


if __name__ == "__main__":
    main()
