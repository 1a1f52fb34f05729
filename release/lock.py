"""`python -m release.lock`: pins the Debian packages and wheels of the images in debian.lock and
*.txt.

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
from pathlib import Path

from release.rootfs import ARCHITECTURES, HERE, MIRROR, PYTHON_VERSION, wheel_platforms

SUITES = (
    ("debian", "bookworm"),
    ("debian", "bookworm-updates"),
    ("debian-security", "bookworm-security"),
)
PACKAGES = (
    *(
        "base-files",
        "ca-certificates",
        "libc6",
        "libgcc-s1",
        "libstdc++6",
        "libcrypt1",
        "zlib1g",
        "libbz2-1.0",
    ),
    *("liblzma5", "libexpat1", "libffi8", "libssl3", "libsqlite3-0", "libuuid1"),
    *("python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib"),
)
_AUTOSCALE = ("grpcio", "cryptography", "cffi", "pycparser")


def lock_debian() -> str:
    lines = []
    for architecture in ARCHITECTURES:
        newest: dict[str, dict[str, str]] = {}
        for archive, suite in SUITES:
            url = f"{MIRROR}/{archive}/dists/{suite}/main/binary-{architecture}/Packages.xz"
            with urllib.request.urlopen(url, timeout=60) as answer:
                text = lzma.decompress(answer.read()).decode()
            for paragraph in text.split("\n\n"):
                package = dict(
                    line.split(": ", 1)
                    for line in paragraph.splitlines()
                    if ": " in line and line[0] != " "
                )
                name = package.get("Package", "")
                if name in PACKAGES and (name not in newest or _is_newer(package, newest[name])):
                    newest[name] = package | {"Filename": f"{archive}/{package['Filename']}"}
        lines += [
            " ".join(
                (
                    architecture,
                    name,
                    newest[name]["Version"],
                    newest[name]["SHA256"],
                    newest[name]["Filename"],
                )
            )
            for name in PACKAGES
        ]
    return "".join(f"{line}\n" for line in lines)


def _is_newer(package: dict[str, str], other: dict[str, str]) -> bool:
    command = ["dpkg", "--compare-versions", package["Version"], "gt", other["Version"]]
    return subprocess.run(command, check=False).returncode == 0


def lock_wheels() -> tuple[str, str]:
    """Returns the requirements of all images, and the additional ones of the autoscale image."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["autoscale"]]
    hashes: dict[tuple[str, str], set[str]] = {}
    for architecture in ARCHITECTURES:
        constraints = [
            f"{name}=={version}" for name, version in hashes
        ]  # the same versions for every architecture
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "constraints.txt").write_text("\n".join(constraints), encoding="utf-8")
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--dest",
                folder,
                "--only-binary=:all:",
            ]
            command += [
                "--constraint",
                f"{folder}/constraints.txt",
                "--python-version",
                PYTHON_VERSION,
            ]
            subprocess.run([*command, *wheel_platforms(architecture), *wanted], check=True)
            for wheel in Path(folder).glob("*.whl"):
                name, version = wheel.name.split("-")[:2]
                digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
                hashes.setdefault((name.lower().replace("_", "-"), version), set()).add(digest)
    texts = {True: "", False: ""}
    for (name, version), digests in sorted(hashes.items()):
        options = "".join(f" \\\n    --hash=sha256:{digest}" for digest in sorted(digests))
        texts[name in _AUTOSCALE] += f"{name}=={version}{options}\n"
    return texts[False], texts[True]


def main() -> None:
    (HERE / "debian.lock").write_text(lock_debian(), encoding="utf-8")
    base, autoscale = lock_wheels()
    (HERE / "requirements.txt").write_text(base, encoding="utf-8")
    (HERE / "requirements-autoscale.txt").write_text(autoscale, encoding="utf-8")


if __name__ == "__main__":
    main()
