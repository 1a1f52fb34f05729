"""Writes tar, OCI and Debian archives whose bytes depend only on their content."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shlex
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

OCI = "application/vnd.oci.image"


def tar_folder(folder: Path, time: int, prefix: str = "") -> bytes:
    """Returns a tar archive of a folder. Entries are sorted, owned by root, and have the same
    time.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path in sorted(folder.rglob("*")):
            member = archive.gettarinfo(str(path), prefix + str(path.relative_to(folder)))
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime = time
            if member.isreg():
                member.mode = 0o755 if member.mode & 0o100 else 0o644
                archive.addfile(member, io.BytesIO(path.read_bytes()))
            else:
                archive.addfile(member)
    return buffer.getvalue()


def normalize_tar_gz(data: bytes, time: int) -> bytes:
    """Rewrites a .tar.gz that another tool wrote, with sorted entries and a fixed time."""
    buffer = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(data)) as source,
        tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as target,
    ):
        for member in sorted(source.getmembers(), key=lambda member: member.name):
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime = time
            member.pax_headers = {}
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            target.addfile(member, source.extractfile(member) if member.isreg() else None)
    return compress(buffer.getvalue())


def compress(data: bytes) -> bytes:
    return gzip.compress(data, 6, mtime=0)  # level 9 needs three times as long and saves 1 %


# Images


def read_dockerfile(path: Path) -> dict[str, Any]:
    """Reads the image configuration from the last stage of the Dockerfile, to avoid a second
    copy.
    """
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    config: dict[str, Any] = {"Env": [], "Labels": {}, "ExposedPorts": {}}
    for line in text[text.rindex("\nFROM ") :].splitlines():
        keyword, _, rest = line.strip().partition(" ")
        if keyword == "ENV":
            config["Env"] += shlex.split(rest)
        elif keyword == "LABEL":
            config["Labels"] |= dict(pair.split("=", 1) for pair in shlex.split(rest))
        elif keyword == "EXPOSE":
            config["ExposedPorts"] |= {f"{port}/tcp": {} for port in rest.split()}
        elif keyword == "USER":
            config["User"] = rest.strip()
        elif keyword == "ENTRYPOINT":
            config["Entrypoint"] = json.loads(rest)
    return config


class OciLayout:
    """Builds a multi-architecture image as an OCI layout in a tar archive, which `skopeo` and `ctr`
    can read.
    """

    def __init__(self, config: Mapping[str, Any], time: str) -> None:
        self._config = dict(config)
        self._time = time
        self._blobs: dict[str, bytes] = {}
        self._manifests: list[dict[str, Any]] = []

    def add_image(self, architecture: str, rootfs: bytes) -> int:
        """Adds the image of one architecture and returns the compressed size of its layer."""
        layer = self._add_blob(compress(rootfs), f"{OCI}.layer.v1.tar+gzip")
        config = {
            "architecture": architecture,
            "os": "linux",
            "created": self._time,
            "config": self._config,
            "rootfs": {
                "type": "layers",
                "diff_ids": [f"sha256:{hashlib.sha256(rootfs).hexdigest()}"],
            },
            "history": [{"created": self._time, "created_by": "python -m release"}],
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{OCI}.manifest.v1+json",
            "config": self._add_json(config, f"{OCI}.config.v1+json"),
            "layers": [layer],
        }
        described = self._add_json(manifest, f"{OCI}.manifest.v1+json")
        self._manifests.append(
            described | {"platform": {"architecture": architecture, "os": "linux"}}
        )
        return int(layer["size"])

    def write(self, path: Path, name: str, time: int) -> str:
        """Writes the archive and returns the image's digest. kind and `ctr` import the image under
        `name`.
        """
        index = {
            "schemaVersion": 2,
            "mediaType": f"{OCI}.index.v1+json",
            "manifests": self._manifests,
        }
        described = self._add_json(index, f"{OCI}.index.v1+json")
        names = {
            "io.containerd.image.name": name,
            "org.opencontainers.image.ref.name": name.rpartition(":")[2],
        }
        files = {
            "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
            "index.json": _encode({**index, "manifests": [described | {"annotations": names}]}),
            **{f"blobs/sha256/{digest}": data for digest, data in self._blobs.items()},
        }
        path.write_bytes(_tar_files(sorted(files.items()), time))
        return str(described["digest"])

    def _add_json(self, document: Mapping[str, Any], media_type: str) -> dict[str, Any]:
        return self._add_blob(_encode(document), media_type)

    def _add_blob(self, data: bytes, media_type: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        self._blobs[digest] = data
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}


def _encode(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def _tar_files(files: Iterable[tuple[str, bytes]], time: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            member.mtime = time
            member.mode = 0o644
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


# Debian packages


def write_deb(
    path: Path, folder: Path, control: Mapping[str, str], scripts: Mapping[str, str], time: int
) -> None:
    """Writes a Debian package with the files in a folder. Marks files below /etc as configuration
    files.
    """
    sums = ""
    settings = ""
    size = 0
    for file in sorted(folder.rglob("*")):
        if not file.is_file():
            continue
        name = file.relative_to(folder)
        sums += f"{hashlib.md5(file.read_bytes()).hexdigest()}  {name}\n"
        size += file.stat().st_size
        if name.parts[0] == "etc":
            settings += f"/{name}\n"

    text = "".join(f"{key}: {value}\n" for key, value in control.items())
    text += f"Installed-Size: {size // 1024}\n"
    members = {"control": text, "md5sums": sums, "conffiles": settings, **scripts}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for member_name, content in members.items():
            member = tarfile.TarInfo(f"./{member_name}")
            member.size = len(content.encode())
            member.mtime = time
            member.mode = 0o755 if member_name in scripts else 0o644
            archive.addfile(member, io.BytesIO(content.encode()))
    parts = {
        "debian-binary": b"2.0\n",
        "control.tar.gz": compress(buffer.getvalue()),
        "data.tar.gz": compress(tar_folder(folder, time, prefix="./")),
    }
    with path.open("wb") as deb:
        deb.write(b"!<arch>\n")
        for part, data in parts.items():
            deb.write(f"{part:<16}{time:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode())
            deb.write(data + b"\n" * (len(data) % 2))
