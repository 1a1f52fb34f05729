"""`python3 -m release.rootfs ARCH FOLDER [--variant autoscale]`: writes the root file system of an
image.

The Dockerfile and `make release` use this script, so both produce the same files. It needs pip, but
no root privileges. Debian packages and wheels are pinned with checksums (see lock.py). The image
contains Python and its libraries, but no shell and no package manager.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ARCHITECTURES = {"amd64": "x86_64", "arm64": "aarch64"}
VARIANTS = ("", "autoscale")
IMAGE_PYTHON = "3.11"
"""Python of Debian 12, which is in the images."""
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
"""The Pythons for which the Debian package has compiled modules."""
MIRROR = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org")
# Fallback: the mirror removes old versions of packages, but this archive keeps them.
SNAPSHOT = "https://snapshot.debian.org/archive/{archive}/20261101T000000Z/{path}"
SITE_PACKAGES = Path("usr/lib/python3/dist-packages")
COMMAND = """\
#!/usr/bin/python3 -I
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
_LINKED = ("bin", "sbin", "lib", "lib64")
"""Directories that are links to those in /usr."""
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


def find_locks(variant: str) -> list[Path]:
    """Returns the files with the dependencies of an image, and their checksums."""
    locks = [HERE / "requirements.txt"]
    if variant:
        locks.append(HERE / "requirements-autoscale.txt")
    return locks


def install_wheels(
    wheel: Path,
    platforms: Sequence[str],
    locks: Sequence[Path],
    folder: Path,
    python: str = IMAGE_PYTHON,
) -> None:
    """Installs podgpu and its dependencies into a folder, for one version of Python.

    `platforms`: pip's options for the wheels that run there.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    pip += ["--no-compile", "--no-deps", "--target", str(folder)]
    pip += ["--only-binary=:all:", "--python-version", python, *platforms]

    locked = ["--require-hashes"]
    for lock in locks:
        locked += ["--requirement", str(lock)]
    own = ["--no-index", "--find-links", str(wheel.parent), "podgpu"]
    for packages in (locked, own):
        subprocess.run([*pip, *packages], check=True)
        # pip warns if it already exists.
        shutil.rmtree(folder / "bin", ignore_errors=True)

    for record in folder.glob("*.dist-info/direct_url.json"):
        # It contains the local path of the wheel.
        record.unlink()
    for record in folder.glob("*.dist-info/RECORD"):
        _remove_local_paths(record)


def install_for_pythons(
    wheel: Path, platforms: Sequence[str], locks: Sequence[Path], folder: Path
) -> None:
    """Installs podgpu and its dependencies for all versions of Python into one folder.

    The names of compiled modules contain the version, and all other files are the same.
    """
    first, *others = PYTHONS
    install_wheels(wheel, platforms, locks, folder, first)
    for python in others:
        with tempfile.TemporaryDirectory() as temporary:
            other = Path(temporary)
            install_wheels(wheel, platforms, locks, other, python)
            for module in other.rglob("*.so"):
                target = folder / module.relative_to(other)
                if not target.exists():
                    shutil.copy2(module, target)


def _remove_local_paths(record: Path) -> None:
    """Removes the lines of removed files, whose checksums depend on local paths."""
    lines = record.read_text(encoding="utf-8").splitlines(keepends=True)
    removed = re.compile(r"(\.\./)*bin/|[^/]+/direct_url\.json,")
    kept = [line for line in lines if removed.match(line) is None]
    record.write_text("".join(kept), encoding="utf-8")


def compile_python(compiler: Sequence[str], folder: Path, installed_at: Path) -> None:
    """Writes .pyc files. Without them each process compiles the code and needs 10 MiB more."""
    options = ["-q", "--invalidation-mode", "unchecked-hash", "-j", "1"]
    options += ["-s", str(folder), "-p", str(installed_at)]
    subprocess.run([*compiler, "-m", "compileall", *options, str(folder)], check=True)


def extract_compiler(folder: Path) -> list[str]:
    """Extracts the image's Python for this machine. Returns the command that runs it.

    So the .pyc files do not depend on the Python that builds the release.
    """
    machine = platform.machine()
    for architecture, name in ARCHITECTURES.items():
        if name == machine:
            _extract_packages(architecture, folder)
            libraries = folder / "usr/lib" / f"{machine}-linux-gnu"
            loader = next(libraries.glob("ld-linux*.so.*"))
            python = folder / f"usr/bin/python{IMAGE_PYTHON}"
            return [str(loader), "--library-path", str(libraries), str(python), "-I"]
    raise SystemExit(
        f"a release can be built on {', '.join(ARCHITECTURES.values())}: not {machine}"
    )


def extract_deb(data: bytes, folder: Path) -> None:
    """Extracts a Debian package."""
    offset = len(b"!<arch>\n")
    while offset < len(data):
        name = data[offset : offset + 16].decode().strip(" /")
        size = int(data[offset + 48 : offset + 58])
        content = data[offset + 60 : offset + 60 + size]
        offset += 60 + size + size % 2
        if name.startswith("data.tar"):
            break
    else:
        raise SystemExit("not a Debian package: it has no data.tar")
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            member.name = str(_place(Path(member.name)))
            if member.islnk():
                member.linkname = str(_place(Path(member.linkname)))
            if not member.name.startswith(_UNUSED):
                archive.extract(member, folder, filter="tar")


def _place(path: Path) -> Path:
    """Returns where the file is, because directories such as /bin are links."""
    if path.parts and path.parts[0] in _LINKED:
        return Path("usr", path)
    return path


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
    packages = []
    for line in (HERE / "debian.lock").read_text(encoding="utf-8").splitlines():
        package_architecture, name, version, sha256, path = line.split()
        if package_architecture == architecture:
            packages.append((name, version, sha256, path))
    return packages


def _extract_packages(architecture: str, root: Path) -> None:
    folders = ["usr/bin", "usr/sbin", "usr/lib", "usr/lib64"]
    folders += ["etc", "tmp", "run", "proc", "sys", "dev"]
    for name in folders:
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in _LINKED:
        (root / name).symlink_to(f"usr/{name}")
    for _, _, sha256, path in locked_packages(architecture):
        extract_deb(download(path, sha256), root)


def build_debian(compiler: Sequence[str], architecture: str, root: Path) -> None:
    """Writes Python and its libraries into the root file system."""
    _extract_packages(architecture, root)
    library = Path(f"usr/lib/python{IMAGE_PYTHON}")
    for module in _UNUSED_MODULES:
        shutil.rmtree(root / library / module, ignore_errors=True)
    # Python has its own codecs.
    shutil.rmtree(root / "usr/lib" / f"{ARCHITECTURES[architecture]}-linux-gnu" / "gconv")
    compile_python(compiler, root / library, Path("/") / library)
    _write_system_files(root)


def add_podgpu(
    compiler: Sequence[str], wheel: Path, architecture: str, variant: str, root: Path
) -> None:
    platforms = wheel_platforms(architecture)
    install_wheels(wheel, platforms, find_locks(variant), root / SITE_PACKAGES)
    compile_python(compiler, root / SITE_PACKAGES, Path("/") / SITE_PACKAGES)
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
    (root / "usr/bin/python3").symlink_to(f"python{IMAGE_PYTHON}")
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
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        compiler = extract_compiler(folder / "compiler")
        build_debian(compiler, options.architecture, options.folder)
        wheel = build_wheel(HERE.parent, folder)
        add_podgpu(compiler, wheel, options.architecture, options.variant, options.folder)


if __name__ == "__main__":
    main()
