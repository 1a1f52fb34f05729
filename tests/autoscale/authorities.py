"""Authorities and certificates of a cluster, made by the openssl command: the front proxy's, clients', strangers'."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Authorities:
    """`sign` makes NAME.crt and NAME.key of an authority that `authority` made."""

    folder: Path

    def authority(self, name: str) -> str:
        """Its certificate, PEM."""
        files = ("-keyout", f"{name}.key", "-out", f"{name}.crt")
        self._openssl("req", "-x509", *_KEY, *files, "-subj", f"/CN={name}", "-days", "2")
        return self.text(f"{name}.crt")

    def sign(
        self, name: str, authority: str, subject: str = "", names: str = "", usage: str = "clientAuth", days: int = 2
    ) -> None:
        extensions = [f"extendedKeyUsage={usage}"] + ([f"subjectAltName={names}"] if names else [])
        (self.folder / f"{name}.ext").write_text("\n".join(extensions))
        subject = subject or f"/CN={name}"
        self._openssl("req", *_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", subject)
        signer = ("-CA", f"{authority}.crt", "-CAkey", f"{authority}.key", "-CAcreateserial", "-extfile", f"{name}.ext")
        self._openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.crt", *signer, "-days", str(days))

    def text(self, name: str) -> str:
        return (self.folder / name).read_text()

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def client(self, shows: str = "", trusts: str = "serving") -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.path(f"{trusts}.crt"))
        context.check_hostname = False
        if shows:
            context.load_cert_chain(self.path(f"{shows}.crt"), self.path(f"{shows}.key"))
        return context

    def _openssl(self, *words: str) -> None:
        done = subprocess.run(["openssl", *words], cwd=self.folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"this openssl cannot make the certificates: {done.stderr[-200:]}")


def make_authorities(folder: Path) -> Authorities:
    """serving signs `server`; front-proxy signs `aggregator` and `other-proxy`; client-ca signs `alice` (of the groups
    dev and ops), `aggregator-of-clients` (with the aggregator's name) and `late`, which has expired; stranger signs
    `mallory`, with the aggregator's name too."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    made = Authorities(folder)
    for name in ("serving", "front-proxy", "client-ca", "stranger"):
        made.authority(name)
    made.sign("server", "serving", names="IP:127.0.0.1,DNS:localhost", usage="serverAuth")
    made.sign("aggregator", "front-proxy", "/CN=front-proxy-client")
    made.sign("other-proxy", "front-proxy", "/CN=somebody-else")
    made.sign("alice", "client-ca", "/O=dev/O=ops/CN=alice")
    made.sign("aggregator-of-clients", "client-ca", "/CN=front-proxy-client")
    made.sign("late", "client-ca", "/CN=late", days=-1)
    made.sign("mallory", "stranger", "/CN=front-proxy-client")
    return made
