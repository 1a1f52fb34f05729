"""Authentication and authorization of the metrics API, by the rules of Kubernetes' aggregation layer.

The front proxy authenticates with a certificate of its CA and passes on the user in `X-Remote-*` headers. Other clients
authenticate with their own certificate or a token. The API server then authorizes the user (SubjectAccessReview). If
the API server cannot be reached, requests are rejected.
"""

from __future__ import annotations

import hashlib
import os
import ssl
import time
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec
from aiohttp import web
from cryptography import x509
from cryptography.x509.oid import NameOID
from multidict import CIMultiDictProxy

from podgpu.autoscale.certificates import parse_bundle_der
from podgpu.autoscale.refusal import forbidden, no_data, unauthorized
from podgpu.autoscale.requests import ResourceAttributes
from podgpu.errors import SourceError
from podgpu.kube.client import ApiClient

CONFIG_NAMESPACE, CONFIG_NAME = "kube-system", "extension-apiserver-authentication"
_MASTERS = "system:masters"
_TOKEN_REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"
_ACCESS_REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
_CACHE_SECONDS = 10.0
_MAX_CACHED = 2000
Headers = CIMultiDictProxy[str]


class Caller(NamedTuple):
    name: str
    groups: tuple[str, ...] = ()
    uid: str = ""
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()


# The API server's ConfigMap


class TrustConfig(NamedTuple):
    """Content of the ConfigMap extension-apiserver-authentication."""

    front_proxy_ca: str = ""
    client_ca: str = ""
    allowed_names: tuple[str, ...] = ()  # common names of front proxies; empty to allow every certificate of the CA
    user_headers: tuple[str, ...] = ()
    group_headers: tuple[str, ...] = ()
    extra_prefixes: tuple[str, ...] = ()
    uid_headers: tuple[str, ...] = ()

    @property
    def client_cas(self) -> str:
        """The CAs of all accepted client certificates, as PEM."""
        return "\n".join(filter(None, (self.front_proxy_ca, self.client_ca)))


_NO_NAME = ("\0",)  # used for a malformed list of allowed names; matches no certificate


def parse_trust_config(configmap: Mapping[str, Any]) -> TrustConfig | None:
    """Returns None if the ConfigMap has no data. Missing or malformed entries grant nothing."""
    data = configmap.get("data")
    if not isinstance(data, Mapping):
        return None
    return TrustConfig(
        _parse_ca(data.get("requestheader-client-ca-file", "")),
        _parse_ca(data.get("client-ca-file", "")),
        _parse_names(data.get("requestheader-allowed-names", "[]"), _NO_NAME),
        _parse_names(data.get("requestheader-username-headers", "[]")),
        _parse_names(data.get("requestheader-group-headers", "[]")),
        _parse_names(data.get("requestheader-extra-headers-prefix", "[]")),
        _parse_names(data.get("requestheader-uid-headers", "[]")),
    )


def _parse_ca(bundle: str) -> str:
    return bundle if parse_bundle_der(bundle) else ""


def _parse_names(text: str, unreadable: tuple[str, ...] = ()) -> tuple[str, ...]:
    try:
        return msgspec.json.decode(text, type=tuple[str, ...])
    except msgspec.DecodeError:
        return unreadable


# Certificates and headers


def read_client_chain(request: web.Request) -> list[bytes]:
    """Returns the verified certificate chain of the connection as DER, starting with the client's own certificate."""
    tls: Any = request.transport.get_extra_info("ssl_object") if request.transport is not None else None
    if tls is None:
        return []
    if hasattr(tls, "get_verified_chain"):  # public since Python 3.13
        return list(tls.get_verified_chain() or ())
    chain = tls._sslobj.get_verified_chain()
    return [ssl.PEM_cert_to_DER_cert(certificate.public_bytes()) for certificate in chain or ()]


def identify(chain: Sequence[bytes], headers: Headers, trust: TrustConfig) -> Caller:
    """Identifies the caller by certificate and headers. Raises Refusal.

    Checks the CAs for every request, because they may have changed since the connection was opened.
    """
    own, signers = x509.load_der_x509_certificate(chain[0]), frozenset(chain[1:])
    if datetime.now(UTC) > own.not_valid_after_utc:
        raise unauthorized("the client certificate has expired: renew it")
    name = next(iter(_subject_values(own, NameOID.COMMON_NAME)), "")
    if signers & frozenset(parse_bundle_der(trust.front_proxy_ca)):
        if not trust.allowed_names or name in trust.allowed_names:
            return _identify_from_headers(headers, trust)
        if _has_proxy_headers(headers, trust):
            raise unauthorized(f"{name!r} may not act as a front proxy (requestheader-allowed-names)")
    if signers & frozenset(parse_bundle_der(trust.client_ca)):
        if _has_proxy_headers(headers, trust):
            raise unauthorized(f"{name!r} sends X-Remote headers without a certificate of the front proxy's CA")
        if not name:
            raise unauthorized("the client certificate has no common name")
        return _make_caller(name, _subject_values(own, NameOID.ORGANIZATION_NAME))
    raise unauthorized("the API server no longer trusts the CA of the client certificate")


def _subject_values(certificate: x509.Certificate, kind: x509.ObjectIdentifier) -> list[str]:
    return [str(attribute.value) for attribute in certificate.subject.get_attributes_for_oid(kind)]


def _identify_from_headers(headers: Headers, trust: TrustConfig) -> Caller:
    user = _first_value(headers, trust.user_headers)
    if not user:
        raise unauthorized("the front proxy's request has no user header")
    groups = [group for name in trust.group_headers for group in headers.getall(name, ()) if group]
    extra: dict[str, list[str]] = {}
    for name in dict.fromkeys(header.lower() for header in headers):
        for prefix in trust.extra_prefixes:
            if prefix and name.startswith(prefix.lower()):
                extra[unquote(name[len(prefix) :])] = headers.getall(name)
    return _make_caller(user, groups, _first_value(headers, trust.uid_headers), extra)


def _make_caller(
    user: str, groups: Iterable[str], uid: str = "", extra: Mapping[str, list[str]] | None = None
) -> Caller:
    """Adds the group system:authenticated, as the API server does, because the aggregator omits it in discovery."""
    all_groups = dict.fromkeys(groups)
    if user != "system:anonymous" and "system:unauthenticated" not in all_groups:
        all_groups["system:authenticated"] = None
    pairs = ((key, tuple(values)) for key, values in (extra or {}).items())
    return Caller(user, tuple(all_groups), uid, tuple(sorted(pairs)))


def _first_value(headers: Headers, names: Iterable[str]) -> str:
    return next((value for name in names for value in headers.getall(name, ()) if value), "")


def _has_proxy_headers(headers: Headers, trust: TrustConfig) -> bool:
    """Headers that begin with `x-remote-` are always proxy headers, even if the ConfigMap does not list them."""
    names = tuple(name.lower() for name in (*trust.user_headers, *trust.group_headers, *trust.uid_headers))
    prefixes = (*(prefix.lower() for prefix in trust.extra_prefixes if prefix), "x-remote-")
    return any(header.lower() in names or header.lower().startswith(prefixes) for header in headers)


# Reviews by the API server


class _ReviewedUser(msgspec.Struct):
    username: str = ""
    uid: str = ""
    groups: list[str] | None = None
    extra: dict[str, list[str]] | None = None


class _ReviewStatus(msgspec.Struct):
    authenticated: bool = False
    user: _ReviewedUser | None = None
    allowed: bool = False
    denied: bool = False


class _Review(msgspec.Struct):
    """A TokenReview or a SubjectAccessReview."""

    status: _ReviewStatus


class Reviews:
    """Requests reviews from the API server and caches the results for ten seconds."""

    def __init__(self, client: ApiClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._results: dict[Hashable, tuple[float, Any]] = {}  # expiry time and result
        self._salt = os.urandom(16)

    async def review_token(self, token: str) -> Caller | None:
        """Returns None if the token is invalid. Raises SourceError."""
        digest = hashlib.blake2b(token.encode("utf-8", "surrogateescape"), key=self._salt).digest()
        caller: Caller | None = await self._cached(digest, lambda: self._submit_token_review(token))
        return caller

    async def is_allowed(self, caller: Caller, target: ResourceAttributes | str) -> bool:
        """`target` is a metric, or a path. Raises SourceError."""
        return bool(await self._cached((caller, target), lambda: self._submit_access_review(caller, target)))

    async def _cached(self, key: Hashable, review: Callable[[], Awaitable[Any]]) -> Any:
        """Caches results, but not errors."""
        until, result = self._results.get(key, (0.0, None))
        if self._clock() < until:
            return result
        result = await review()
        if len(self._results) >= _MAX_CACHED:
            self._results.clear()
        self._results[key] = self._clock() + _CACHE_SECONDS, result
        return result

    async def _submit_token_review(self, token: str) -> Caller | None:
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}}
        status = await self._submit(_TOKEN_REVIEWS, body)
        user = status.user
        if not status.authenticated or user is None or not user.username:
            return None
        return _make_caller(user.username, user.groups or (), user.uid, user.extra)

    async def _submit_access_review(self, caller: Caller, target: ResourceAttributes | str) -> bool:
        spec: dict[str, Any] = {"user": caller.name, "groups": caller.groups}
        if caller.uid:
            spec["uid"] = caller.uid
        if caller.extra:
            spec["extra"] = dict(caller.extra)
        if isinstance(target, str):
            spec["nonResourceAttributes"] = {"path": target, "verb": "get"}
        else:
            spec["resourceAttributes"] = {key: value for key, value in target._asdict().items() if value}
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
        status = await self._submit(_ACCESS_REVIEWS, body)
        return status.allowed and not status.denied

    async def _submit(self, path: str, body: dict[str, Any]) -> _ReviewStatus:
        answer = await self._client.submit("POST", path, body)
        try:
            return msgspec.convert(answer, _Review).status
        except msgspec.ValidationError as error:
            raise SourceError("malformed", f"malformed response to a review: {error}") from error


# Decision


class ApiGate:
    """Authenticates and authorizes requests to the metrics API."""

    def __init__(self, trust: Callable[[], TrustConfig], reviews: Callable[[], Reviews]) -> None:
        self._trust = trust
        self._reviews = reviews

    async def check(self, request: web.Request, target: ResourceAttributes | None) -> None:
        """`target` is None for discovery. Raises Refusal."""
        try:
            caller = await self._authenticate(request)
            if _MASTERS in caller.groups or await self._reviews().is_allowed(caller, target or request.path):
                return
        except SourceError as error:
            raise no_data(f"the API server cannot review this request: {error}") from error
        raise forbidden(_explain_forbidden(caller, target, request.path))

    async def _authenticate(self, request: web.Request) -> Caller:
        """Raises Refusal, SourceError."""
        chain = read_client_chain(request)
        if chain:
            return identify(chain, request.headers, self._trust())
        # X-Remote headers without a certificate are ignored.
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        token = token.strip()
        caller = await self._reviews().review_token(token) if scheme.lower() == "bearer" and token else None
        if caller is None:
            raise unauthorized("unknown caller: send the request through the API server, or send a valid token")
        return caller


def _explain_forbidden(caller: Caller, target: ResourceAttributes | None, path: str) -> str:
    if target is None:
        return f'User "{caller.name}" cannot get path "{path}": see the ClusterRole system:discovery'
    resource = "/".join(filter(None, (target.resource, target.subresource)))
    where = f' in the namespace "{target.namespace}"' if target.namespace else " at the cluster scope"
    rule = f'{{apiGroups: ["{target.group}"], resources: ["{resource}"], verbs: ["{target.verb}"]}}'
    return (
        f'User "{caller.name}" cannot {target.verb} resource "{resource}" in API group "{target.group}"{where}:'
        f" allow it with the rule {rule}"
    )
