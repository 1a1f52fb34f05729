"""This module says who asks, from a certificate that TLS has verified and from the headers beside it, by the rules of
Kubernetes' front proxy. Pure.

Only a certificate of the requestheader authority, with a name that may be a proxy's, makes `X-Remote-*` headers count.
Whoever else sends them is refused rather than overheard: a client's own certificate beside such a header is an attack,
or a proxy that is set up wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote

from podgpu.autoscale.x509 import certificates_in

CONFIG_NAMESPACE, CONFIG_NAME = "kube-system", "extension-apiserver-authentication"
MASTERS = "system:masters"
AUTHENTICATED = "system:authenticated"
_UNAUTHENTICATED = "system:unauthenticated"
_ANONYMOUS = "system:anonymous"
_MOST_GROUPS = 1000
_LARGEST_BUNDLE = 512 * 1024


class Caller(NamedTuple):
    name: str
    groups: tuple[str, ...] = ()
    uid: str = ""
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()


class NotTrusted(Exception):
    """`str()` says why this certificate, or what came with it, is not believed."""


class Headers(Protocol):
    def getall(self, key: str, default: Sequence[str]) -> Sequence[str]: ...

    def __iter__(self) -> Iterator[str]: ...


@dataclass(frozen=True, slots=True)
class Trust:
    """What the API server says of itself in its ConfigMap."""

    front_proxy_ca: str = ""
    client_ca: str = ""
    allowed_names: frozenset[str] = frozenset()
    """Common names of front proxies; none: any that their authority has signed."""
    user_headers: tuple[str, ...] = ()
    group_headers: tuple[str, ...] = ()
    extra_prefixes: tuple[str, ...] = ()
    uid_headers: tuple[str, ...] = ()

    @property
    def authorities(self) -> str:
        """Of whom a client may show a certificate at all."""
        return "\n".join(filter(None, (self.front_proxy_ca, self.client_ca)))


def parse_trust(configmap: Mapping[str, Any]) -> Trust | None:
    """Of the ConfigMap extension-apiserver-authentication; what is not there, or malformed, lets nobody in. None: it is
    no such ConfigMap. Never raises."""
    data = configmap.get("data")
    if not isinstance(data, Mapping):
        return None
    return Trust(
        _bundle(data.get("requestheader-client-ca-file")),
        _bundle(data.get("client-ca-file")),
        frozenset(_names(data.get("requestheader-allowed-names"), _NOBODY)),
        _names(data.get("requestheader-username-headers")),
        _names(data.get("requestheader-group-headers")),
        _names(data.get("requestheader-extra-headers-prefix")),
        _names(data.get("requestheader-uid-headers")),
    )


_NOBODY = ("\0",)
"""A name that no certificate has: a list of allowed names that cannot be read allows none."""


def _bundle(value: object) -> str:
    return value if isinstance(value, str) and len(value) <= _LARGEST_BUNDLE and certificates_in(value) else ""


def _names(value: object, unreadable: tuple[str, ...] = ()) -> tuple[str, ...]:
    if value is None:
        return ()
    try:
        listed = json.loads(value) if isinstance(value, str) else None
    except (ValueError, RecursionError):
        return unreadable
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        return unreadable
    return tuple(listed)


# Who it is


class Shown(NamedTuple):
    """A client's certificate, verified against the authorities of the moment its connection began."""

    chain: tuple[bytes, ...]
    """DER, the client's own first, the authority last."""
    common_name: str
    organizations: tuple[str, ...]
    ends: float
    """Unix time."""


def identify(shown: Shown, headers: Headers, trust: Trust, wall: float) -> Caller:
    """Raises NotTrusted. The authorities are looked at anew for every request: a connection may be older than they."""
    if wall > shown.ends:
        raise NotTrusted("the client certificate has expired: renew it")
    signers = frozenset(shown.chain[1:])
    has_proxys_headers = has_proxy_headers(headers, trust)
    if signers & frozenset(certificates_in(trust.front_proxy_ca)):
        if not trust.allowed_names or shown.common_name in trust.allowed_names:
            return _from_headers(headers, trust)
        if has_proxys_headers:
            raise NotTrusted(
                f"the certificate of {shown.common_name!r} is none of a front proxy's that may say whom it asks for "
                "(requestheader-allowed-names)"
            )
    if signers & frozenset(certificates_in(trust.client_ca)):
        if has_proxys_headers:
            raise NotTrusted(
                f"{shown.common_name!r} shows a client's certificate and says in headers that it asks for somebody "
                "else: only a front proxy may"
            )
        if not shown.common_name:
            raise NotTrusted("the client certificate has no common name")
        return Caller(shown.common_name, with_authenticated(shown.common_name, shown.organizations))
    raise NotTrusted("the client certificate comes from no authority that the API server trusts any more")


def _from_headers(headers: Headers, trust: Trust) -> Caller:
    user = _first(headers, trust.user_headers)
    if not user:
        raise NotTrusted("the front proxy does not say whom it asks for")
    groups = [group for name in trust.group_headers for group in headers.getall(name, ()) if group]
    return Caller(
        user,
        with_authenticated(user, tuple(dict.fromkeys(groups[:_MOST_GROUPS]))),
        _first(headers, trust.uid_headers),
        tuple(sorted(_extra(headers, trust).items())),
    )


def with_authenticated(user: str, groups: tuple[str, ...]) -> tuple[str, ...]:
    """As the API server does it to all whom it knows: the aggregator itself asks for discovery without a group."""
    if user == _ANONYMOUS or AUTHENTICATED in groups or _UNAUTHENTICATED in groups:
        return groups
    return (*groups, AUTHENTICATED)


def _extra(headers: Headers, trust: Trust) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for name in dict.fromkeys(header.lower() for header in headers):
        for prefix in trust.extra_prefixes:
            if prefix and name.startswith(prefix.lower()):
                found[unquote(name[len(prefix) :])] = tuple(headers.getall(name, ()))
    return found


def _first(headers: Headers, names: Iterable[str]) -> str:
    return next((value for name in names for value in headers.getall(name, ()) if value), "")


_ALWAYS = ("x-remote-",)
"""Of a front proxy whatever the ConfigMap calls them, and while nobody has read it."""


def has_proxy_headers(headers: Headers, trust: Trust) -> bool:
    named = tuple(name.lower() for name in (*trust.user_headers, *trust.group_headers, *trust.uid_headers))
    prefixes = tuple(prefix.lower() for prefix in trust.extra_prefixes if prefix) + _ALWAYS
    return any(header.lower() in named or header.lower().startswith(prefixes) for header in headers)
