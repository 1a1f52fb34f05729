"""Certificate authorities and certificates from the openssl command, and TLS contexts for them."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.nodes.clock import wait_until

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_SCRAPER = "DNS:prometheus.test,email:ops@test,IP:::1,IP:10.0.0.7,URI:spiffe://test/prometheus"


@dataclass(frozen=True)
class Certificates:
    """Certificates in a folder.

    `ca` signed those of the servers `server`, `renewed`, `elsewhere` and `expired`, and of the
    clients `client` and `scraper`. `stranger` signed that of the client `outsider`. `ca` signed the
    authority `intermediate`, which signed that of the client `department`.
    """

    folder: Path

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def text(self, name: str) -> str:
        return (self.folder / name).read_text()

    def put(self, name: str, folder: Path) -> None:
        """Copies a pair to tls.crt and tls.key, as in a mounted Secret."""
        shutil.copy(self.path(f"{name}.crt"), folder / "tls.crt")
        shutil.copy(self.path(f"{name}.key"), folder / "tls.key")

    def client(self, shows: str = "") -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.path("ca.crt"))
        # The CA has no key usage, like those of older clusters. Since 3.13, Python rejects these.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if shows:
            context.load_cert_chain(self.path(f"{shows}.crt"), self.path(f"{shows}.key"))
        return context

    def server_context(self, name: str = "server", ask_client: bool = False) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.path(f"{name}.crt"), self.path(f"{name}.key"))
        if ask_client:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self.path("ca.crt"))
        return context


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    folder = tmp_path_factory.mktemp("certificates")
    for authority in ("ca", "stranger"):
        files = ("-keyout", f"{authority}.key", "-out", f"{authority}.crt")
        _openssl(folder, "req", "-x509", *_KEY, *files, "-subj", f"/CN={authority}", "-days", "2")
    _sign(folder, "server", "subjectAltName=IP:127.0.0.1,DNS:api.test")
    _sign(folder, "renewed", "subjectAltName=IP:127.0.0.1,DNS:renewed.test")
    _sign(folder, "elsewhere", "subjectAltName=DNS:api.test")
    # Newer versions of openssl refuse a certificate that ends before it begins.
    _sign(folder, "expired", "subjectAltName=IP:127.0.0.1", days=0)
    signed_at = time.time()
    _sign(folder, "client", "extendedKeyUsage=clientAuth")
    _sign(folder, "scraper", f"subjectAltName={_SCRAPER}")
    _sign(folder, "outsider", "subjectAltName=DNS:prometheus.test", authority="stranger")
    _sign(folder, "intermediate", "basicConstraints=critical,CA:TRUE")
    _sign(folder, "department", "extendedKeyUsage=clientAuth", authority="intermediate")
    wait_until(lambda: time.time() > signed_at + 1.0, "the certificate has expired")
    return Certificates(folder)


def _sign(folder: Path, name: str, extension: str, days: int = 2, authority: str = "ca") -> None:
    (folder / f"{name}.ext").write_text(extension + "\n")
    _openssl(
        folder,
        "req",
        *_KEY,
        "-keyout",
        f"{name}.key",
        "-out",
        f"{name}.csr",
        "-subj",
        f"/CN={name}",
    )
    signer = (
        "-CA",
        f"{authority}.crt",
        "-CAkey",
        f"{authority}.key",
        "-CAcreateserial",
        "-extfile",
        f"{name}.ext",
    )
    _openssl(
        folder,
        "x509",
        "-req",
        "-in",
        f"{name}.csr",
        "-out",
        f"{name}.crt",
        *signer,
        "-days",
        str(days),
    )


def _openssl(folder: Path, *words: str) -> None:
    done = subprocess.run(
        ["openssl", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"openssl cannot make the certificates: {done.stderr}"
