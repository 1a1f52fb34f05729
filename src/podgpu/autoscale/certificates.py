"""Creates podgpu's own certificate for the metrics API, and adds it to the caBundle of the APIServices.

Every replica creates a self-signed certificate at start and keeps the key only in memory. The
bundle contains the certificates of all replicas. After a restart, a replica replaces its earlier certificate.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from podgpu.clock import FaultLog
from podgpu.errors import SourceError
from podgpu.kube.client import ApiClient
from podgpu.tls import Pem

_LIFETIME = timedelta(days=3650)  # longer than any process runs
_CLOCK_SKEW = timedelta(hours=1)
_MAX_NAME = 40  # a common name has at most 64 characters
MAX_CERTIFICATES = 32
_CHECK_SECONDS = 5.0
_LOG_AGAIN_SECONDS = 600.0
_PATH = "/apis/apiregistration.k8s.io/v1/apiservices/"
_log = logging.getLogger(__name__)


def issue(host: str, replica: str, now: datetime | None = None) -> tuple[x509.Certificate, Pem, Pem]:
    """Returns a self-signed certificate, its PEM text and its key. `replica` must stay the same after a restart.

    `host`: the name that the API server uses in the TLS handshake.
    """
    now = now or datetime.now(UTC)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"podgpu autoscale {replica[-_MAX_NAME:]}")])
    builder = x509.CertificateBuilder(
        name, name, key.public_key(), x509.random_serial_number(), now - _CLOCK_SKEW, now + _LIFETIME
    )
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    certificate = builder.sign(key, hashes.SHA256())
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    public = Pem(text=_to_pem(certificate), origin="podgpu's certificate")
    return certificate, public, Pem(text=secret, origin="its key")


def _to_pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()


def parse_bundle(bundle: str) -> list[x509.Certificate]:
    """Returns the certificates in a PEM text, or none if it is malformed."""
    try:
        return x509.load_pem_x509_certificates(bundle.encode())
    except ValueError:
        return []


def merge_bundle(bundle: str, own: x509.Certificate) -> str:
    """Adds `own`. Removes the earlier certificate of this replica, and the oldest ones if there are too many."""
    others = [certificate for certificate in parse_bundle(bundle) if certificate.subject != own.subject]
    others.sort(key=lambda certificate: certificate.not_valid_before_utc, reverse=True)
    return "".join(map(_to_pem, (own, *others[: MAX_CERTIFICATES - 1])))


class CaBundleUpdater:
    """Keeps our certificate in the caBundle of our APIServices. Does not change APIServices of other Services."""

    def __init__(
        self, client: ApiClient, certificate: x509.Certificate, api_services: Sequence[str], service: str
    ) -> None:
        """`service`: namespace and name of the Service in front of podgpu, separated by a slash."""
        self.client = client
        self._certificate = certificate
        self._api_services = api_services
        self._service = service
        self._faults: FaultLog[str] = FaultLog(time.monotonic, _LOG_AGAIN_SECONDS)
        self.ready = False
        """True after all our APIServices have contained our certificate at least once."""

    async def run(self) -> None:
        while True:
            await self.update()
            await asyncio.sleep(_CHECK_SECONDS)

    async def update(self) -> None:
        results = [await self._update_one(name) for name in self._api_services]
        self.ready = self.ready or all(results)

    async def _update_one(self, name: str) -> bool:
        """Returns False if the update must be retried."""
        try:
            await self._merge_into(name)
        except SourceError as error:
            # A missing APIService is not an error: deleting it is the documented way to disable the API.
            # A conflict (409) means that another replica has changed the bundle at the same time.
            if error.reason != "conflict" and self._faults.fail(name, error.reason):
                _log.warning("cannot add podgpu's certificate to the APIService %s: %s", name, error)
            return error.reason in ("not_found", "foreign")
        self._faults.recover(name)
        return True

    async def _merge_into(self, name: str) -> None:
        api_service = await self.client.get(f"{_PATH}{name}")
        spec = api_service["spec"]
        service = spec.get("service") or {}  # empty if the API server itself serves the API
        owner = f"{service.get('namespace')}/{service.get('name')}"
        if owner != self._service:
            raise SourceError(
                "foreign",
                f"it points to {owner}. podgpu receives no requests for these metrics. Delete that APIService if it is"
                " not needed, or disable podgpu's API",
            )
        bundle = base64.b64decode(spec.get("caBundle") or "").decode("ascii", "ignore")
        if self._certificate not in parse_bundle(bundle):
            merged = merge_bundle(bundle, self._certificate)
            # With the resource version, the API server rejects the patch if the bundle has changed since it was read.
            patch = {
                "metadata": {"resourceVersion": api_service["metadata"]["resourceVersion"]},
                "spec": {"caBundle": base64.b64encode(merged.encode()).decode(), "insecureSkipTLSVerify": False},
            }
            await self.client.patch(f"{_PATH}{name}", patch)
            _log.info("added podgpu's certificate to the APIService %s", name)
