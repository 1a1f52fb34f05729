"""Authorities and certificates made by the openssl command, and clients that show them."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Certificates:
    """Of `ca`: `server` and `renewed` for 127.0.0.1, and `scraper`, a client. Of `stranger`: `outsider`, a client."""

    folder: Path

    def path(self, name: str) -> Path:
        return self.folder / name

    def text(self, name: str) -> str:
        return self.path(name).read_text()

    def put(self, name: str, folder: Path) -> None:
        """As tls.crt and tls.key, where a mounted Secret would have them."""
        shutil.copy(self.path(f"{name}.crt"), folder / "tls.crt")
        shutil.copy(self.path(f"{name}.key"), folder / "tls.key")

    def client(self, shows: str = "") -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.path("ca.crt")))
        if shows:
            context.load_cert_chain(self.path(f"{shows}.crt"), self.path(f"{shows}.key"))
        return context


def make_certificates(folder: Path) -> Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    for authority in ("ca", "stranger"):
        files = ("-keyout", f"{authority}.key", "-out", f"{authority}.crt")
        _openssl(folder, "req", "-x509", *_KEY, *files, "-subj", f"/CN={authority}", "-days", "2")
    _sign(folder, "server", "ca", "IP:127.0.0.1")
    _sign(folder, "renewed", "ca", "IP:127.0.0.1,DNS:renewed.test")
    _sign(folder, "scraper", "ca", "DNS:prometheus.test,email:ops@test,IP:::1,IP:10.0.0.7,URI:spiffe://test/prometheus")
    _sign(folder, "outsider", "stranger", "DNS:prometheus.test")
    return Certificates(folder)


def _sign(folder: Path, name: str, authority: str, names: str) -> None:
    (folder / f"{name}.ext").write_text(f"subjectAltName={names}\n")
    _openssl(folder, "req", *_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
    signer = ("-CA", f"{authority}.crt", "-CAkey", f"{authority}.key", "-CAcreateserial", "-extfile", f"{name}.ext")
    _openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.crt", *signer, "-days", "2")


def _openssl(folder: Path, *words: str) -> None:
    done = subprocess.run(["openssl", *words], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"this openssl cannot make the certificates: {done.stderr[-200:]}")
