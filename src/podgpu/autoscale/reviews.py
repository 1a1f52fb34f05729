"""This module asks the API server whose a token is and whether somebody may ask for something, and remembers its word
for a while.

Bounded in every way: so many answers are kept, so many questions are under way, each for so long. No answer is a no.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import Any, Generic, TypeVar

from podgpu.autoscale.api_paths import Attributes
from podgpu.autoscale.front_proxy import Caller
from podgpu.errors import SourceError
from podgpu.kube.client import ApiClient, Object

KEPT_SECONDS = 10.0
MOST_KEPT = 2000
MOST_UNDER_WAY = 32
_TOKEN_REVIEWS = "/apis/authentication.k8s.io/v1/tokenreviews"
_ACCESS_REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
LONGEST_TOKEN = 16 * 1024
T = TypeVar("T")


class Overloaded(SourceError):
    """More questions are under way than may be."""

    def __init__(self) -> None:
        super().__init__("overloaded", f"{MOST_UNDER_WAY} reviews are under way already: ask again in a moment")


class _Kept(Generic[T]):
    """Answers by question. Those who ask the same at once share one question to the server."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._answers: dict[Hashable, tuple[float, T]] = {}
        self._coming: dict[Hashable, asyncio.Task[T]] = {}

    async def get(self, question: Hashable, ask: Callable[[], Awaitable[T]]) -> T:
        """Raises what `ask` raises, which is not remembered."""
        kept = self._answers.get(question)
        if kept is not None and self._clock() < kept[0]:
            return kept[1]
        coming = self._coming.get(question)
        if coming is None:
            if len(self._coming) >= MOST_UNDER_WAY:
                raise Overloaded
            coming = asyncio.ensure_future(self._asked(question, ask))
            self._coming[question] = coming
            coming.add_done_callback(lambda done: self._done(question, done))
        return await asyncio.shield(coming)

    async def _asked(self, question: Hashable, ask: Callable[[], Awaitable[T]]) -> T:
        answer = await ask()
        self._answers.pop(question, None)
        while len(self._answers) >= MOST_KEPT:
            del self._answers[next(iter(self._answers))]
        self._answers[question] = self._clock() + KEPT_SECONDS, answer
        return answer

    def _done(self, question: Hashable, done: asyncio.Task[T]) -> None:
        del self._coming[question]
        if not done.cancelled():
            done.exception()  # those who waited have it; nobody may have

    def __len__(self) -> int:
        return len(self._answers)


class Reviews:
    """For one event loop."""

    def __init__(self, client: ApiClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._callers: _Kept[Caller | None] = _Kept(clock)
        self._verdicts: _Kept[bool] = _Kept(clock)
        self._salt = os.urandom(16)

    async def owner_of(self, token: str) -> Caller | None:
        """None: nobody's. Raises SourceError."""
        digest = hashlib.blake2b(token.encode("utf-8", "surrogateescape"), key=self._salt).digest()
        return await self._callers.get(digest, lambda: self._review_token(token))

    async def may(self, caller: Caller, asked: Attributes | str) -> bool:
        """`asked`: a metric, or a path. Raises SourceError."""
        return await self._verdicts.get((caller, asked), lambda: self._review_access(caller, asked))

    @property
    def kept(self) -> int:
        return len(self._callers) + len(self._verdicts)

    async def _review_token(self, token: str) -> Caller | None:
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}}
        status = _status(await self._client.submit("POST", _TOKEN_REVIEWS, body))
        return parse_reviewed(status)

    async def _review_access(self, caller: Caller, asked: Attributes | str) -> bool:
        spec: Object = {"user": caller.name, "groups": list(caller.groups)}
        if caller.uid:
            spec["uid"] = caller.uid
        if caller.extra:
            spec["extra"] = {key: list(values) for key, values in caller.extra}
        if isinstance(asked, str):
            spec["nonResourceAttributes"] = {"path": asked, "verb": "get"}
        else:
            spec["resourceAttributes"] = {key: value for key, value in asked._asdict().items() if value}
        body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
        status = _status(await self._client.submit("POST", _ACCESS_REVIEWS, body))
        return status.get("allowed") is True and status.get("denied") is not True


def parse_reviewed(status: Mapping[str, Any]) -> Caller | None:
    """Of a TokenReview's status. Never raises."""
    user = status.get("user")
    if status.get("authenticated") is not True or not isinstance(user, Mapping):
        return None
    name, uid, groups, extra = (user.get(key) for key in ("username", "uid", "groups", "extra"))
    if not isinstance(name, str) or not name:
        return None
    return Caller(
        name,
        tuple(_texts(groups)),
        uid if isinstance(uid, str) else "",
        tuple(sorted((k, tuple(_texts(v))) for k, v in extra.items() if isinstance(k, str)))
        if isinstance(extra, Mapping)
        else (),
    )


def _texts(value: object) -> list[str]:
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def _status(answer: Object) -> Mapping[str, Any]:
    status = answer.get("status")
    return status if isinstance(status, Mapping) else {}
