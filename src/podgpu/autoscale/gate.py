"""This module owns who gets an answer of the metrics API: the front proxy's word, a client's certificate or a token
says who asks, the API server says whether they may. What cannot be found out is a no."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

from podgpu.autoscale.api_paths import Attributes
from podgpu.autoscale.front_proxy import MASTERS, Caller, NotTrusted, Shown, Trust, identify, with_authenticated
from podgpu.autoscale.metrics_api import Rejection
from podgpu.autoscale.reviews import LONGEST_TOKEN, Overloaded, Reviews
from podgpu.errors import SourceError

_NOBODY = Rejection(
    401, "Unauthorized", "podgpu does not know who asks: ask through the API server, or with a token of it"
)


class ApiGate:
    def __init__(
        self, trust: Callable[[], Trust], reviews: Callable[[], Reviews], wall: Callable[[], float] = time.time
    ) -> None:
        """`trust`: as the API server's ConfigMap has it now. `reviews`: made on the loop that serves."""
        self._trust = trust
        self._reviews = reviews
        self._wall = wall

    async def admit(self, request: web.Request, asked: Attributes | None) -> Rejection | None:
        try:
            caller = await self._who(request)
            if caller is None:
                return _NOBODY
            if MASTERS in caller.groups or await self._reviews().may(caller, asked or request.path):
                return None
        except NotTrusted as error:
            return Rejection(401, "Unauthorized", str(error))
        except Overloaded as error:
            return Rejection(429, "TooManyRequests", str(error))
        except SourceError as error:
            return Rejection(
                503, "ServiceUnavailable", f"the API server cannot be asked whether this is allowed: {error}"
            )
        return Rejection(403, "Forbidden", _forbidden(caller, asked, request.path))

    async def _who(self, request: web.Request) -> Caller | None:
        """None: nobody that is known. Raises NotTrusted, SourceError."""
        trust = self._trust()
        shown = client_certificate(request)
        if shown is not None:
            return identify(shown, request.headers, trust, self._wall())
        # Without a certificate whatever headers say of a user is nobody's word, and is not looked at.
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token or len(token) > LONGEST_TOKEN:
            return None
        caller = await self._reviews().owner_of(token)
        return caller and caller._replace(groups=with_authenticated(caller.name, caller.groups))


def _forbidden(caller: Caller, asked: Attributes | None, path: str) -> str:
    """In the words of the API server, and what to do."""
    if asked is None:
        return f'User "{caller.name}" cannot get path "{path}": see the ClusterRole system:discovery'
    resource = "/".join(filter(None, (asked.resource, asked.subresource)))
    where = f' in the namespace "{asked.namespace}"' if asked.namespace else " at the cluster scope"
    return (
        f'User "{caller.name}" cannot {asked.verb} resource "{resource}" in API group "{asked.group}"{where}: allow it '
        f'with the rule {{apiGroups: ["{asked.group}"], resources: ["{resource}"], verbs: ["{asked.verb}"]}}'
    )


# The certificate


def client_certificate(request: web.Request) -> Shown | None:
    """What the client has shown and TLS has verified; None: nothing."""
    tls = request.transport.get_extra_info("ssl_object") if request.transport is not None else None
    if tls is None:
        return None
    chain = _verified_chain(tls)
    named = tls.getpeercert()
    if not chain or not named:
        return None
    subject = [pair for part in named.get("subject", ()) for pair in part]
    return Shown(
        tuple(chain),
        next((value for name, value in subject if name == "commonName"), ""),
        tuple(value for name, value in subject if name == "organizationName"),
        ssl.cert_time_to_seconds(named["notAfter"]) if "notAfter" in named else 0.0,
    )


def _verified_chain(tls: Any) -> list[bytes]:
    """DER. Python has had this since 3.10, and under a public name since 3.13."""
    if hasattr(tls, "get_verified_chain"):
        return list(tls.get_verified_chain() or ())
    inner = getattr(tls, "_sslobj", None)
    chain = inner.get_verified_chain() if inner is not None else None
    return [ssl.PEM_cert_to_DER_cert(certificate.public_bytes()) for certificate in chain or ()]
