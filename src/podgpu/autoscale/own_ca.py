"""This module keeps an authority of podgpu's own, and what the API server knows of it: the caBundle of podgpu's own
APIServices.

Every replica has its own, in memory alone. A bundle holds those of all replicas; each puts its own in and takes out
what has expired, and what it had itself before it was started anew. The next authority is in the bundles a while before
its certificate is shown, and the last one stays in them until it expires: no certificate is ever shown that somebody
who has just read the bundle would not believe.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podgpu.autoscale.x509 import Issued, RandomBelow, certificates_in, issue, parse_validity, pem_of
from podgpu.clock import Clock, Faults
from podgpu.errors import SourceError
from podgpu.json_shape import mapping_in
from podgpu.kube.client import ApiClient, ApiError

LIFETIME = 10 * 86_400.0
_RENEWED_AFTER = 2 / 3
_CLOCKS_DIFFER = 3600.0
"""Seconds before now from which on a certificate is valid: clocks of nodes may be behind."""
OVERLAP_SECONDS = 120.0
"""For which the next authority is in the bundles before its certificate is shown."""
LOOK_SECONDS = 30.0
MOST_IN_BUNDLE = 64
_MOST_FORMER = 1
"""Authorities that this replica had before, of those that have not expired: the one before it was renewed. One that
crashes again and again has a new one each time, and must not push the others' out."""
_PATH = "/apis/apiregistration.k8s.io/v1/apiservices/"
_MERGE = "application/merge-patch+json"
_SAID_AGAIN_SECONDS = 600.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """The Service that podgpu answers behind."""

    namespace: str
    name: str

    @property
    def names(self) -> tuple[str, ...]:
        """What the API server calls it in the handshake, first."""
        host = f"{self.name}.{self.namespace}.svc"
        return host, f"{host}.cluster.local"

    def is_behind(self, api_service: Mapping[str, Any]) -> bool:
        service = mapping_in(mapping_in(api_service.get("spec")).get("service"))
        return (service.get("namespace"), service.get("name")) == (self.namespace, self.name)


def maker_of(replica: str) -> str:
    """What the authorities of a replica are called, however often it starts."""
    return f"podgpu autoscale {hashlib.sha256(replica.encode()).hexdigest()[:16]}"


def merged(bundle: str, own: Sequence[str], maker: str, wall: float) -> str:
    """The bundle with our own authorities (PEM) in it, and none that has expired; ours and the youngest stay."""
    wanted = [certificate for pem in own for certificate in certificates_in(pem)]
    former: list[tuple[float, bytes]] = []
    others: list[tuple[float, bytes]] = []
    for certificate in dict.fromkeys(certificates_in(bundle)):
        validity = parse_validity(certificate)
        if certificate not in wanted and validity is not None and validity[1] > wall:
            is_former = f"{maker} ".encode() in certificate
            (former if is_former else others).append((validity[0], certificate))
    stay = sorted([*others, *sorted(former, reverse=True)[:_MOST_FORMER]], reverse=True)
    youngest = stay[: max(0, MOST_IN_BUNDLE - len(wanted))]
    return "".join(pem_of(certificate) for certificate in (*wanted, *(found for _, found in youngest)))


class OwnCa:
    """The certificate to show now, and the one to show next."""

    def __init__(
        self,
        names: Sequence[str],
        replica: str,
        clock: Clock | None = None,
        lifetime: float = LIFETIME,
        random_below: RandomBelow = secrets.randbelow,
    ) -> None:
        """`replica`: what tells this one from the others, and is the same after a restart."""
        self._names = names
        self.maker = maker_of(replica)
        self._clock = clock or Clock()
        self._lifetime = lifetime
        self._random_below = random_below
        self.shown = self._issue()
        self._next: Issued | None = None
        self._known_since: float | None = None
        """Monotonic time since which the next one is in every bundle."""

    def _issue(self) -> Issued:
        wall = self._clock.wall()
        return issue(self._names, wall - _CLOCKS_DIFFER, wall + self._lifetime, self._random_below, self.maker)

    def authorities(self) -> tuple[str, ...]:
        """What has to be in the bundles now."""
        if self._next is None and self._clock.wall() > self.shown.ends - self._lifetime * (1 - _RENEWED_AFTER):
            self._next, self._known_since = self._issue(), None
        return (self.shown.authority,) if self._next is None else (self.shown.authority, self._next.authority)

    def are_in_bundles(self, authorities: Sequence[str]) -> None:
        """All of them are. The next one takes over once it has been there for a while."""
        if self._next is None or self._next.authority not in authorities:
            return
        now = self._clock.monotonic()
        if self._known_since is None:
            self._known_since = now
        if now - self._known_since >= OVERLAP_SECONDS:
            self.shown, self._next = self._next, None
            _log.info(
                "the metrics API shows a new certificate, of an authority that its APIServices have known a while"
            )


class BundleKeeper:
    """Keeps the bundles of these APIServices, each only while it leads to our own Service."""

    def __init__(
        self,
        client: ApiClient,
        ca: OwnCa,
        services: Sequence[str],
        served: Served,
        clock: Clock | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._client = client
        self._ca = ca
        self._services = services
        self._served = served
        self._clock = clock or Clock()
        self._sleep = sleep
        self._faults: Faults[str] = Faults(self._clock.monotonic, _SAID_AGAIN_SECONDS)
        self.are_known = False
        """Every APIService that is ours and there has our authority, at least once."""
        self._missing: set[str] = set()
        """APIServices that are not there."""

    async def run(self) -> None:
        while True:
            await self.turn()
            is_settled = self.are_known and not self._missing
            await self._sleep(LOOK_SECONDS if is_settled else LOOK_SECONDS / 15)

    async def turn(self) -> None:
        authorities = self._ca.authorities()
        states = [await self._look_at(name, authorities) for name in self._services]
        if all(states):
            self._ca.are_in_bundles(authorities)
            self.are_known = True

    async def _look_at(self, name: str, authorities: Sequence[str]) -> bool:
        """Whether there is nothing left to do about this one."""
        self._missing.discard(name)
        try:
            return await self._keep(name, authorities)
        except SourceError as error:
            if isinstance(error, ApiError) and error.reason == "not_found":
                # Somebody has removed it, which is the documented way out: a replica that starts now is to be ready.
                self._missing.add(name)
                if self._faults.fails(name, error.reason):
                    _log.warning("the APIService %s is not there: nobody asks podgpu for its metrics", name)
                return True
            conflict = isinstance(error, ApiError) and error.status == 409
            if not conflict and self._faults.fails(name, error.reason):
                _log.warning("podgpu's CA cannot be written into the APIService %s: %s", name, error)
            return False

    async def _keep(self, name: str, authorities: Sequence[str]) -> bool:
        found = await self._client.get(f"{_PATH}{name}")
        spec, metadata = mapping_in(found.get("spec")), mapping_in(found.get("metadata"))
        service = mapping_in(spec.get("service"))
        if not self._served.is_behind(found):
            if self._faults.fails(name, "foreign"):
                owner = f"{service.get('namespace')}/{service.get('name')}" if service else "the API server itself"
                _log.error(
                    "the APIService %s belongs to %s: podgpu leaves it alone, and is not asked for these metrics; "
                    "remove what owns it, or turn podgpu's off",
                    name,
                    owner,
                )
            return True
        bundle = _decoded(spec.get("caBundle"))
        wanted = merged(bundle, authorities, self._ca.maker, self._clock.wall())
        if set(certificates_in(wanted)) != set(certificates_in(bundle)):
            await self._client.submit("PATCH", f"{_PATH}{name}", _patch(metadata, wanted), _MERGE)
            _log.info("the APIService %s has podgpu's CA now", name)
        self._faults.answers(name)
        return True


async def remove_service(client: ApiClient, name: str, served: Served) -> str:
    """What became of it, in words. Raises SourceError."""
    try:
        found = await client.get(f"{_PATH}{name}")
    except ApiError as error:
        if error.reason == "not_found":
            return "is not there"
        raise
    if not served.is_behind(found):
        return "belongs to somebody else and stays"
    await client.submit("DELETE", f"{_PATH}{name}", {"kind": "DeleteOptions", "apiVersion": "v1"})
    return "removed"


def _patch(metadata: Mapping[str, Any], bundle: str) -> dict[str, Any]:
    """The version makes the API server refuse it where somebody else has changed the bundle meanwhile."""
    encoded = base64.b64encode(bundle.encode()).decode()
    return {
        "metadata": {"resourceVersion": metadata.get("resourceVersion")},
        "spec": {"caBundle": encoded, "insecureSkipTLSVerify": False},
    }


def _decoded(bundle: object) -> str:
    try:
        return base64.b64decode(bundle, validate=True).decode("ascii", "ignore") if isinstance(bundle, str) else ""
    except ValueError:
        return ""
