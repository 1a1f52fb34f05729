"""Checks users at the API server (`--auth kubernetes`), and finds the namespaces they may see.

A user is known by a bearer token, or by the headers of an OIDC proxy. He sees the namespaces in
which he may list pods. The API server decides both: TokenReview, then SubjectAccessReview.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from podgpu.errors import SourceError
from podgpu.kube.objects import KubeObject
from podgpu.web.responses import json_error

_TOKEN_REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"
_ACCESS_REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
_REMEMBER_SECONDS = 60.0  # a withdrawn permission remains in effect for this time
_MAX_REMEMBERED = 20_000
_MAX_REVIEWS = 16  # requests to the API server at the same time
_MAX_NAME = 1024
_MAX_GROUPS = 256
_PROBES = ("/health", "/livez", "/ready")
_API = "/api/"
_PAGE = "/page/"
_BEARER = "bearer "
Key = TypeVar("Key")
Value = TypeVar("Value")


class Viewer(Protocol):
    """What one user may see."""

    async def sees_all(self) -> bool:
        """Returns whether the user may see all namespaces, also those of a later time."""

    async def visible(self, namespaces: Iterable[str]) -> frozenset[str]:
        """Returns those of the namespaces that the user may see."""


class _Everything:
    async def sees_all(self) -> bool:
        return True

    async def visible(self, namespaces: Iterable[str]) -> frozenset[str]:
        return frozenset(namespaces)


EVERYTHING: Viewer = _Everything()
_VIEWER: web.RequestKey[Viewer] = web.RequestKey("viewer", Viewer)


def viewer_of(request: web.Request) -> Viewer:
    """Returns what the user may see. Without `--auth kubernetes`, everybody sees everything."""
    viewer: Viewer = request.get(_VIEWER, EVERYTHING)
    return viewer


class User(NamedTuple):
    name: str
    groups: tuple[str, ...] = ()
    uid: str = ""
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def describe(self) -> KubeObject:
        """Returns the fields of a SubjectAccessReview that identify the user."""
        return {
            "user": self.name,
            "groups": list(self.groups),
            "uid": self.uid,
            "extra": {name: list(values) for name, values in self.extra},
        }


class UserHeaders(NamedTuple):
    """Headers in which a trusted proxy names the user. Without names, only tokens count."""

    user: str = ""
    groups: str = ""

    def read(self, headers: Mapping[str, str]) -> User | None:
        name = ""
        if self.user:
            name = headers.get(self.user, "").strip()
        if not name or len(name) > _MAX_NAME:
            return None

        groups = ["system:authenticated"]
        if self.groups:
            stripped = [group.strip() for group in headers.get(self.groups, "").split(",")]
            named = [group for group in stripped if group]
            groups += named[:_MAX_GROUPS]

        return User(name, tuple(groups))


class _TokenStatus(msgspec.Struct):
    authenticated: bool = False
    user: Mapping[str, Any] = {}


class _TokenReview(msgspec.Struct):
    status: _TokenStatus


class _AccessStatus(msgspec.Struct):
    allowed: bool = False
    denied: bool = False


class _AccessReview(msgspec.Struct):
    status: _AccessStatus


class Reviews(Protocol):
    """Creates a review at the API server and returns the answer. Raises SourceError."""

    async def create(self, path: str, document: KubeObject) -> bytes: ...
    async def close(self) -> None: ...


class _Memory(Generic[Key, Value]):
    """Remembers answers of the API server for a minute. Forgets the first of too many."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._answers: dict[Key, tuple[float, Value]] = {}

    def find(self, key: Key) -> tuple[Value] | None:
        """Returns the answer in a tuple, because None may be an answer."""
        answer = self._answers.get(key)
        if answer is None:
            return None
        read_at, value = answer
        if self._clock() - read_at >= _REMEMBER_SECONDS:
            return None
        return (value,)

    def add(self, key: Key, value: Value) -> None:
        self._answers[key] = self._clock(), value
        if len(self._answers) > _MAX_REMEMBERED:
            first = next(iter(self._answers))
            del self._answers[first]


class KubernetesAccess:
    """Lets the API server decide who may see what. Fails closed: no answer means no access."""

    def __init__(
        self,
        reviews: Reviews,
        headers: UserHeaders,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reviews = reviews
        self._headers = headers
        self._salt = os.urandom(32)
        self._users: _Memory[bytes, User | None] = _Memory(clock)
        self._decisions: _Memory[tuple[User, str, str], bool] = _Memory(clock)
        self._slots = asyncio.Semaphore(_MAX_REVIEWS)

    async def close(self, _app: web.Application) -> None:
        await self._reviews.close()

    @web.middleware
    async def check_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in _PROBES:
            return await _answer_probe(request, handler)

        try:
            user = await self._find_user(request)
            if user is None:
                return _refuse()

            if not self._is_filtered(request.path):
                verb = request.method.lower()
                if not await self._may_use_path(user, verb, request.path):
                    text = f"user {user.name!r} may not {verb} {request.path}"
                    return json_error(403, f"{text}: allow this nonResourceURL in a ClusterRole")

            request[_VIEWER] = _KubernetesViewer(self, user)
            return await handler(request)
        except AccessUnknown as error:
            return json_error(
                503, f"access cannot be checked: {error}", headers={"Retry-After": "15"}
            )

    @staticmethod
    def _is_filtered(path: str) -> bool:
        """Returns whether the answer of this path is limited to the user's namespaces."""
        return path == "/" or path.startswith((_API, _PAGE))

    async def _find_user(self, request: web.Request) -> User | None:
        user = self._headers.read(request.headers)
        if user is not None:
            return user

        authorization = request.headers.get("Authorization", "")
        if authorization[: len(_BEARER)].lower() != _BEARER:
            return None

        token = authorization[len(_BEARER) :].strip()
        if not token:
            return None

        # The key is a hash, so that no token stays in memory.
        key = hashlib.blake2b(token.encode("utf-8", "replace"), key=self._salt).digest()
        # A tuple, because None stands for an invalid token.
        cached = self._users.find(key)
        if cached is not None:
            return cached[0]

        user = await self._review_token(token)
        self._users.add(key, user)
        return user

    async def _review_token(self, token: str) -> User | None:
        document = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token},
        }
        review = await self._review(_TOKEN_REVIEWS, document, _TokenReview)
        user = review.status.user
        name = user.get("username", "")
        if not review.status.authenticated or not name:
            return None

        extra = []
        for key, values in sorted((user.get("extra") or {}).items()):
            extra.append((key, tuple(values)))

        groups = tuple(user.get("groups") or ())
        return User(name, groups, user.get("uid") or "", tuple(extra))

    async def may_list_pods(self, user: User, namespace: str) -> bool:
        """An empty namespace stands for all namespaces."""
        attributes = {"verb": "list", "resource": "pods", "namespace": namespace}
        return await self._decide(user, "pods", namespace, {"resourceAttributes": attributes})

    async def _may_use_path(self, user: User, verb: str, path: str) -> bool:
        attributes = {"verb": verb, "path": path}
        return await self._decide(user, verb, path, {"nonResourceAttributes": attributes})

    async def _decide(self, user: User, what: str, where: str, attributes: KubeObject) -> bool:
        cached = self._decisions.find((user, what, where))
        if cached is not None:
            return cached[0]

        document = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {**user.describe(), **attributes},
        }
        review = await self._review(_ACCESS_REVIEWS, document, _AccessReview)
        allowed = review.status.allowed and not review.status.denied
        self._decisions.add((user, what, where), allowed)
        return allowed

    async def _review(self, path: str, document: KubeObject, kind: type[Value]) -> Value:
        try:
            async with self._slots:
                body = await self._reviews.create(path, document)
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise AccessUnknown(f"the answer to {path} is not a review: {error}") from error
        except SourceError as error:
            raise AccessUnknown(str(error)) from error


class AccessUnknown(Exception):
    """The API server did not decide."""


class _KubernetesViewer:
    def __init__(self, access: KubernetesAccess, user: User) -> None:
        self._access = access
        self._user = user

    async def sees_all(self) -> bool:
        return await self._access.may_list_pods(self._user, "")

    async def visible(self, namespaces: Iterable[str]) -> frozenset[str]:
        # Without duplicates. Holders that are no pods have an empty namespace.
        unique = list(dict.fromkeys(filter(None, namespaces)))
        if await self.sees_all():
            return frozenset(unique)

        decisions: list[Awaitable[bool]] = []
        for namespace in unique:
            decisions.append(self._access.may_list_pods(self._user, namespace))

        allowed = await asyncio.gather(*decisions)
        return frozenset(name for name, may in zip(unique, allowed, strict=True) if may)


async def _answer_probe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers a probe without details: the kubelet cannot log in, and details name nodes."""
    response = await handler(request)
    text = "OK\n" if response.status == 200 else "not ready\n"
    return web.Response(status=response.status, text=text)


def _refuse() -> web.Response:
    message = "log in: send a token of this cluster as Authorization: Bearer TOKEN"
    return json_error(401, message, headers={"WWW-Authenticate": 'Bearer realm="podgpu"'})
