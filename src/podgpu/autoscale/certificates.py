"""podgpu's own certificate for the metrics API, and the caBundle of its APIServices.

Every replica creates its own CA and keeps it only in memory. A bundle contains the CAs of all replicas: each replica
adds its own and removes expired ones. A new CA is added to the bundles before its certificate is used, and the old CA
stays until it expires. The API server can therefore verify every certificate that a replica presents.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from ipaddress import ip_address
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from podgpu.clock import Clock, FaultLog
from podgpu.errors import SourceError
from podgpu.kube.client import ApiClient, ApiError

_LIFETIME_SECONDS = 10 * 86_400.0
OVERLAP_SECONDS = 120.0  # a new CA is in the bundles for this time before its certificate is used
_CHECK_SECONDS = 5.0
MAX_CERTIFICATES = 64
_RENEW_AFTER = 2 / 3  # fraction of the lifetime after which a certificate is renewed
_CLOCK_SKEW_SECONDS = 3600.0
_KEPT_FORMER = 1  # earlier CAs of this replica to keep; few, so that a crash loop does not evict other replicas' CAs
_LOG_AGAIN_SECONDS = 600.0
_PATH = "/apis/apiregistration.k8s.io/v1/apiservices/"
_MERGE_PATCH = "application/merge-patch+json"
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----\s[A-Za-z0-9+/=\s]+?-----END CERTIFICATE-----")
_CA_USAGE = x509.KeyUsage(*(False,) * 5, True, *(False,) * 3)  # key_cert_sign only
_log = logging.getLogger(__name__)


class Issued(NamedTuple):
    """A CA and the one server certificate that it signed, as PEM."""

    ca: str
    certificate: str
    key: str
    not_after: float  # Unix time


def issue(names: Sequence[str], not_before: float, not_after: float, ca_name: str = "podgpu autoscale") -> Issued:
    """Creates a CA and a certificate for these host names and addresses. The first one is the common name."""
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = _make_name(f"{ca_name} {secrets.token_hex(8)}")
    start, end = (datetime.fromtimestamp(int(at), UTC) for at in (not_before, not_after))
    key_id = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())

    def sign(subject: x509.Name, public_key: ec.EllipticCurvePublicKey, *extensions: tuple[Any, bool]) -> str:
        builder = x509.CertificateBuilder(issuer, subject, public_key, x509.random_serial_number(), start, end)
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(ca_key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()

    ca = sign(
        issuer,
        ca_key.public_key(),
        (x509.BasicConstraints(ca=True, path_length=None), True),
        (_CA_USAGE, True),
        (key_id, False),
    )
    certificate = sign(
        _make_name(names[0]),
        key.public_key(),
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectAlternativeName([_make_alternative_name(name) for name in names]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(key_id), False),
    )
    key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()).decode()
    return Issued(ca, certificate, key_pem, not_after)


def _make_name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _make_alternative_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def parse_bundle(bundle: str) -> list[x509.Certificate]:
    """Returns the certificates in a PEM text. Skips malformed ones."""
    certificates = []
    for block in _PEM.findall(bundle):
        try:
            certificates.append(x509.load_pem_x509_certificate(block.encode()))
        except ValueError:
            continue
    return certificates


def parse_bundle_der(bundle: str) -> list[bytes]:
    return [certificate.public_bytes(Encoding.DER) for certificate in parse_bundle(bundle)]


def merge_bundle(bundle: str, own: Sequence[str], ca_name: str, wall: float) -> str:
    """Adds our own CAs (PEM) to the bundle, and removes expired CAs and the oldest ones above the limit."""
    wanted = [certificate for pem in own for certificate in parse_bundle(pem)]
    now = datetime.fromtimestamp(wall, UTC)
    former: list[x509.Certificate] = []
    others: list[x509.Certificate] = []
    for certificate in dict.fromkeys(parse_bundle(bundle)):
        if certificate not in wanted and certificate.not_valid_after_utc > now:
            is_former = f"{ca_name} " in certificate.issuer.rfc4514_string()
            (former if is_former else others).append(certificate)

    def newest_first(certificates: Sequence[x509.Certificate]) -> list[x509.Certificate]:
        return sorted(certificates, key=lambda certificate: certificate.not_valid_before_utc, reverse=True)

    kept = newest_first([*others, *newest_first(former)[:_KEPT_FORMER]])[: max(0, MAX_CERTIFICATES - len(wanted))]
    return "".join(certificate.public_bytes(Encoding.PEM).decode() for certificate in (*wanted, *kept))


@dataclass(frozen=True, slots=True)
class ServiceName:
    """The Service in front of podgpu."""

    namespace: str
    name: str

    @property
    def host_names(self) -> tuple[str, ...]:
        """The API server uses the first name in the TLS handshake."""
        host = f"{self.name}.{self.namespace}.svc"
        return host, f"{host}.cluster.local"

    def serves(self, api_service: Mapping[str, Any]) -> bool:
        service = api_service["spec"].get("service") or {}
        return (service.get("namespace"), service.get("name")) == (self.namespace, self.name)


class CertificateIssuer:
    """Creates the current certificate and, before it expires, the next one."""

    def __init__(self, names: Sequence[str], replica: str, clock: Clock | None = None) -> None:
        """`replica` must be the same after a restart of this replica."""
        self._names = names
        self.ca_name = f"podgpu autoscale {hashlib.sha256(replica.encode()).hexdigest()[:16]}"
        self._clock = clock or Clock()
        self.current = self._issue()
        self._next: Issued | None = None
        self._next_known_since: float | None = None  # monotonic time when every bundle had the next CA

    def _issue(self) -> Issued:
        wall = self._clock.wall()
        return issue(self._names, wall - _CLOCK_SKEW_SECONDS, wall + _LIFETIME_SECONDS, self.ca_name)

    def required_cas(self) -> tuple[str, ...]:
        """Returns the CAs that every bundle must contain. Creates the next certificate when the renewal is due."""
        if self._next is None and self._clock.wall() > self.current.not_after - _LIFETIME_SECONDS * (1 - _RENEW_AFTER):
            self._next, self._next_known_since = self._issue(), None
        return (self.current.ca,) if self._next is None else (self.current.ca, self._next.ca)

    def confirm(self, cas: Sequence[str]) -> None:
        """Call when every bundle contains `cas`. Switches to the next certificate after OVERLAP_SECONDS."""
        if self._next is None or self._next.ca not in cas:
            return
        now = self._clock.monotonic()
        if self._next_known_since is None:
            self._next_known_since = now
        if now - self._next_known_since >= OVERLAP_SECONDS:
            self.current, self._next = self._next, None
            _log.info("the metrics API now uses a new certificate")


class CaBundleUpdater:
    """Keeps our CAs in the caBundle of our APIServices. Does not change APIServices that point to other Services."""

    def __init__(
        self,
        client: ApiClient,
        issuer: CertificateIssuer,
        api_services: Sequence[str],
        service: ServiceName,
        clock: Clock | None = None,
    ) -> None:
        self._client = client
        self._issuer = issuer
        self._api_services = api_services
        self._service = service
        self._clock = clock or Clock()
        self._faults: FaultLog[str] = FaultLog(self._clock.monotonic, _LOG_AGAIN_SECONDS)
        self.ready = False
        """True once all our APIServices have contained our CA."""

    async def run(self) -> None:
        while True:
            await self.update()
            await asyncio.sleep(_CHECK_SECONDS)

    async def update(self) -> None:
        cas = self._issuer.required_cas()
        results = [await self._update_one(name, cas) for name in self._api_services]
        if all(results):
            self._issuer.confirm(cas)
            self.ready = True

    async def _update_one(self, name: str, cas: Sequence[str]) -> bool:
        """Returns False if the update must be retried."""
        try:
            await self._merge_into(name, cas)
        except SourceError as error:
            if isinstance(error, ApiError) and error.reason == "not_found":
                # Not an error: deleting the APIService is the documented way to disable the API.
                if self._faults.fail(name, error.reason):
                    _log.warning("the APIService %s does not exist, so the HPA cannot query podgpu", name)
                return True
            conflict = isinstance(error, ApiError) and error.status == 409
            if not conflict and self._faults.fail(name, error.reason):
                _log.warning("cannot add podgpu's CA to the APIService %s: %s", name, error)
            return False
        return True

    async def _merge_into(self, name: str, cas: Sequence[str]) -> None:
        api_service = await self._client.get(f"{_PATH}{name}")
        spec = api_service["spec"]
        if not self._service.serves(api_service):
            if self._faults.fail(name, "foreign"):
                service = spec.get("service")
                owner = f"{service['namespace']}/{service['name']}" if service else "the API server itself"
                _log.error(
                    "the APIService %s points to %s, so podgpu receives no requests for these metrics and leaves it"
                    " unchanged; delete that APIService if it is not needed, or disable podgpu's API",
                    *(name, owner),
                )
            return
        bundle = base64.b64decode(spec.get("caBundle") or "").decode("ascii", "ignore")
        merged = merge_bundle(bundle, cas, self._issuer.ca_name, self._clock.wall())
        if set(parse_bundle(merged)) != set(parse_bundle(bundle)):
            # With the resource version, the API server rejects the patch if the bundle has changed since it was read.
            patch = {
                "metadata": {"resourceVersion": api_service["metadata"]["resourceVersion"]},
                "spec": {"caBundle": base64.b64encode(merged.encode()).decode(), "insecureSkipTLSVerify": False},
            }
            await self._client.submit("PATCH", f"{_PATH}{name}", patch, _MERGE_PATCH)
            _log.info("added podgpu's CA to the APIService %s", name)
        self._faults.recover(name)


async def remove_api_service(client: ApiClient, name: str, service: ServiceName) -> str:
    """Deletes the APIService if it points to our Service. Returns the result as text. Raises SourceError."""
    try:
        api_service = await client.get(f"{_PATH}{name}")
    except ApiError as error:
        if error.reason == "not_found":
            return "does not exist"
        raise
    if not service.serves(api_service):
        return "points to another Service and was not changed"
    await client.submit("DELETE", f"{_PATH}{name}", {"kind": "DeleteOptions", "apiVersion": "v1"})
    return "removed"
