"""`python -m release.lock`: pins Debian packages in debian.lock, and wheels in *.txt.

Run it on Debian to update the packages, and commit the result. It needs `dpkg` to compare versions.
"""

from __future__ import annotations

import hashlib
import lzma
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

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
        line = f"{name}=={version}"
        for digest in sorted(digests):
            line += f" \\\n    --hash=sha256:{digest}"
        if name in _AUTOSCALE:
            autoscale += f"{line}\n"
        else:
            base += f"{line}\n"
    return base, autoscale


def _download_wheels(
    architecture: str, python: str, constraints: Sequence[str], folder: Path
) -> None:
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["autoscale"]]
    (folder / "constraints.txt").write_text("\n".join(constraints), encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder)]
    command += ["--only-binary=:all:", "--constraint", str(folder / "constraints.txt")]
    command += ["--python-version", python, *wheel_platforms(architecture)]
    subprocess.run([*command, *wanted], check=True)


def main() -> None:
    (HERE / "debian.lock").write_text(lock_debian(), encoding="utf-8")
    base, autoscale = lock_wheels()
    (HERE / "requirements.txt").write_text(base, encoding="utf-8")
    (HERE / "requirements-autoscale.txt").write_text(autoscale, encoding="utf-8")


if __name__ == "__main__":
    main()
