"""`python3 -m release.rootfs ARCH FOLDER [--variant autoscale]`: writes the root file system of an
image.

The Dockerfile and `make release` use this script, so both produce the same files. It needs Python
3.11 with pip, but no root privileges. Debian packages and wheels are pinned with checksums (see
lock.py). The image contains Python and its libraries, but no shell and no package manager.
"""

from __future__ import annotations

import argparse
import compileall
import hashlib
import io
import os
import py_compile
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
ARCHITECTURES = {"amd64": "x86_64", "arm64": "aarch64"}
VARIANTS = ("", "autoscale")
PYTHON_VERSION = "3.11"
MIRROR = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org")
# Fallback: the mirror removes old versions of packages, but this archive keeps them.
SNAPSHOT = "https://snapshot.debian.org/archive/{archive}/20261101T000000Z/{path}"
SITE_PACKAGES = Path("usr/lib/python3/dist-packages")
COMMAND = """\
#!/usr/bin/python3.11 -I
import sys
{path}
from podgpu.__main__ import main

sys.exit(main())
"""
_UNUSED = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/lintian",
    "usr/share/locale",
    "usr/share/bug",
    "usr/lib/init",
    "usr/share/base-files",
)
_UNUSED_MODULES = ("ensurepip", "lib2to3", "pydoc_data", "distutils", "test")


def wheel_platforms(architecture: str) -> list[str]:
    """Returns pip's options for the wheels that run on Debian 12 (glibc 2.36)."""
    machine = ARCHITECTURES[architecture]
    tags = (f"manylinux_2_{minor}_{machine}" for minor in (36, 35, 34, 31, 28, 26, 17, 12, 5))
    return [word for tag in (*tags, f"manylinux2014_{machine}") for word in ("--platform", tag)]


def build_wheel(source: Path, folder: Path) -> Path:
    """Builds podgpu's wheel with the pinned setuptools."""
    with tempfile.TemporaryDirectory() as tools:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        requirements = ["--require-hashes", "--requirement", str(HERE / "build-requirements.txt")]
        subprocess.run([*pip, "install", "--quiet", "--target", tools, *requirements], check=True)
        command = [
            *pip,
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--wheel-dir",
            str(folder),
            str(source),
        ]
        subprocess.run(
            command, check=True, env=os.environ | {"PYTHONPATH": tools, "PYTHONHASHSEED": "0"}
        )
    return next(folder.glob("podgpu-*.whl"))


def install_wheels(wheel: Path, architecture: str, variant: str, folder: Path) -> None:
    """Installs podgpu and its dependencies into a folder, with reproducible .pyc files."""
    requirements = [HERE / "requirements.txt"] + (
        [HERE / "requirements-autoscale.txt"] if variant else []
    )
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-compile",
        "--no-deps",
    ]
    platform = [
        "--only-binary=:all:",
        "--python-version",
        PYTHON_VERSION,
        *wheel_platforms(architecture),
    ]
    pip += ["--target", str(folder), *platform]
    locked = [word for file in requirements for word in ("--requirement", str(file))]
    for packages in (
        ["--require-hashes", *locked],
        ["--no-index", "--find-links", str(wheel.parent), "podgpu"],
    ):
        subprocess.run([*pip, *packages], check=True)
        shutil.rmtree(folder / "bin", ignore_errors=True)  # pip warns if it already exists
    for record in folder.glob("*.dist-info/direct_url.json"):
        record.unlink()  # contains the local path of the wheel
    for record in folder.glob("*.dist-info/RECORD"):
        # The removed files have checksums here that depend on local paths.
        lines = record.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = (
            line for line in lines if not re.match(r"(\.\./)*bin/|[^/]+/direct_url\.json,", line)
        )
        record.write_text("".join(kept), encoding="utf-8")
    compile_python(folder, Path("/") / SITE_PACKAGES)


def compile_python(folder: Path, installed_at: Path) -> None:
    """Writes .pyc files. Without them each process compiles the code and needs 10 MiB more."""
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(
        folder,
        quiet=2,
        invalidation_mode=mode,
        stripdir=str(folder),
        prependdir=str(installed_at),
        workers=1,
    )


def extract_deb(data: bytes, folder: Path) -> None:
    """Extracts a Debian package. Directories such as /bin are links, so files go to /usr/bin."""
    offset = len(b"!<arch>\n")
    while offset < len(data):
        name, size = (
            data[offset : offset + 16].decode().strip(" /"),
            int(data[offset + 48 : offset + 58]),
        )
        content = data[offset + 60 : offset + 60 + size]
        offset += 60 + size + size % 2
        if name.startswith("data.tar"):
            break
    else:
        raise SystemExit("not a Debian package: it has no data.tar")
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            parts = Path(member.name).parts
            if parts and parts[0] in ("bin", "sbin", "lib", "lib64"):
                member.name = str(Path("usr", *parts))
            if member.islnk() and member.linkname.removeprefix("./").split("/")[0] in (
                "bin",
                "sbin",
                "lib",
                "lib64",
            ):
                member.linkname = f"usr/{member.linkname.removeprefix('./')}"
            if not member.name.startswith(_UNUSED) and not member.name.startswith(
                tuple(f"./{p}" for p in _UNUSED)
            ):
                archive.extract(member, folder, filter="tar")


def download(archive_path: str, sha256: str) -> bytes:
    archive, path = archive_path.split("/", 1)
    for url in (f"{MIRROR}/{archive_path}", SNAPSHOT.format(archive=archive, path=path)):
        try:
            with urllib.request.urlopen(url, timeout=120) as answer:
                data: bytes = answer.read()
        except urllib.error.HTTPError:
            continue
        if hashlib.sha256(data).hexdigest() == sha256:
            return data
        raise SystemExit(
            f"{url} does not have the checksum in release/debian.lock: run python -m release.lock"
        )
    raise SystemExit(
        f"{archive_path} is no longer available: run python -m release.lock and commit the result"
    )


def locked_packages(architecture: str) -> list[tuple[str, str, str, str]]:
    """Returns name, version, checksum and path of each Debian package."""
    rows = (
        line.split() for line in (HERE / "debian.lock").read_text(encoding="utf-8").splitlines()
    )
    return [(row[1], row[2], row[3], row[4]) for row in rows if row[0] == architecture]


def check_python() -> None:
    if sys.version_info[:2] != (3, 11):
        raise SystemExit(
            "the image has Python 3.11, which must also write its .pyc files: make "
            "PYTHON=python3.11 clean release"
        )


def build_debian(architecture: str, root: Path) -> None:
    """Writes Python and its libraries into the root file system."""
    for name in (
        "usr/bin",
        "usr/sbin",
        "usr/lib",
        "usr/lib64",
        "etc",
        "tmp",
        "run",
        "proc",
        "sys",
        "dev",
    ):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    for _, _, sha256, path in locked_packages(architecture):
        extract_deb(download(path, sha256), root)
    for module in _UNUSED_MODULES:
        shutil.rmtree(root / "usr/lib/python3.11" / module, ignore_errors=True)
    shutil.rmtree(
        root / "usr/lib" / f"{ARCHITECTURES[architecture]}-linux-gnu" / "gconv"
    )  # Python has its own codecs
    compile_python(root / "usr/lib/python3.11", Path("/usr/lib/python3.11"))
    _write_system_files(root)


def add_podgpu(wheel: Path, architecture: str, variant: str, root: Path) -> None:
    install_wheels(wheel, architecture, variant, root / SITE_PACKAGES)
    command = root / "usr/bin/podgpu"
    command.write_text(COMMAND.format(path=""), encoding="utf-8")
    command.chmod(0o755)
    # dcgm-exporter's paths, so that its values of -f and DCGM_EXPORTER_COLLECTORS still work.
    shutil.copytree(
        root / SITE_PACKAGES / "podgpu/metrics/counters",
        root / "etc/dcgm-exporter",
        dirs_exist_ok=True,
    )


def _write_system_files(root: Path) -> None:
    (root / "tmp").chmod(0o1777)
    (root / "etc/passwd").write_text(
        "root:x:0:0:root:/root:/usr/sbin/nologin\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    )
    (root / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")
    (root / "etc/nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")
    (root / "usr/bin/python3").symlink_to("python3.11")
    certificates = sorted((root / "usr/share/ca-certificates/mozilla").glob("*.crt"))
    bundle = root / "etc/ssl/certs/ca-certificates.crt"
    bundle.parent.mkdir(parents=True, exist_ok=True)
    bundle.write_text(
        "".join(path.read_text(encoding="utf-8") for path in certificates), encoding="utf-8"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python3 -m release.rootfs", description=__doc__)
    parser.add_argument("architecture", choices=ARCHITECTURES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--variant", choices=VARIANTS, default="")
    options = parser.parse_args()
    check_python()
    build_debian(options.architecture, options.folder)
    with tempfile.TemporaryDirectory() as folder:
        wheel = build_wheel(HERE.parent, Path(folder))
        add_podgpu(wheel, options.architecture, options.variant, options.folder)


if __name__ == "__main__":
    main()
