"""What every request passes before it is answered: the rate limit, the configured headers, basic auth.

Passwords are compared in one thread of their own: bcrypt is slow on purpose, and the event loop has scrapes to answer.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import os
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import bcrypt
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from podgpu.serve.web_config import RateLimit, WebConfig

MOST_REMEMBERED = 100
_FORGOTTEN_AT_ONCE = MOST_REMEMBERED // 10
_BCRYPT_BYTES = 72
"""bcrypt looks at no more of a password. Go ignores the rest; Python's bcrypt refuses it."""
_NOBODY = "." * 53


class TokenBucket:
    """Starts full; one token comes per interval, up to `burst`."""

    def __init__(self, limit: RateLimit, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._tokens = float(limit.burst)
        self._counted_at = clock()

    def take(self) -> bool:
        now = self._clock()
        earned = (now - self._counted_at) / self._limit.interval
        self._tokens = min(self._tokens + earned, float(self._limit.burst))
        self._counted_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class Passwords:
    """Compares one password at a time, and remembers the last verdicts, good and bad, without the passwords."""

    def __init__(self, compare: Callable[[bytes, bytes], bool] = bcrypt.checkpw) -> None:
        self._compare = compare
        self._verdicts: dict[bytes, bool] = {}
        self._salt = os.urandom(32)
        self._thread = ThreadPoolExecutor(1, "podgpu-bcrypt")

    def close(self) -> None:
        # Without this a queue of guesses would be worked off before the process may end.
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def are_right(self, users: Mapping[str, str], user: bytes, password: bytes) -> bool:
        hashed = users.get(user.decode("utf-8", "surrogateescape"))
        # Whoever is unknown costs as much time as whoever is known.
        against = hashed or _dummy_hash(users)
        verdict = self._digest(user, against.encode(), password)
        right = self._verdicts.get(verdict)
        if right is None:
            work = (verdict, against.encode(), password)
            right = await asyncio.get_running_loop().run_in_executor(self._thread, self._judge, *work)
        return right and hashed is not None

    def _digest(self, *parts: bytes) -> bytes:
        """Of user, hash and password: a hash that is changed in the file counts at once."""
        digest = hashlib.blake2b(key=self._salt, digest_size=32)
        for part in parts:
            digest.update(len(part).to_bytes(8, "big") + part)
        return digest.digest()

    def _judge(self, verdict: bytes, hashed: bytes, password: bytes) -> bool:
        """In the thread, the only one that writes; a wait for the same question may have answered this one."""
        if verdict not in self._verdicts:
            right = self._is_right(hashed, password)
            if len(self._verdicts) >= MOST_REMEMBERED:
                for forgotten in random.sample(list(self._verdicts), _FORGOTTEN_AT_ONCE):
                    del self._verdicts[forgotten]
            self._verdicts[verdict] = right
        return self._verdicts[verdict]

    def _is_right(self, hashed: bytes, password: bytes) -> bool:
        try:
            return self._compare(password[:_BCRYPT_BYTES], hashed)
        except ValueError:  # a password no hash can be of
            return False


def _dummy_hash(users: Mapping[str, str]) -> str:
    """Nobody's, at the highest cost of anybody's."""
    cost = max(value[4:6] for value in users.values())
    return f"$2b${cost}${_NOBODY}"


def parse_basic(header: str) -> tuple[bytes, bytes] | None:
    """User and password of an Authorization header."""
    scheme, _, credentials = header.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        user, colon, password = base64.b64decode(credentials.encode("ascii"), validate=True).partition(b":")
    except (binascii.Error, UnicodeEncodeError):
        return None
    return (user, password) if colon else None


def guard(current: Callable[[], WebConfig | None], bucket: TokenBucket | None, passwords: Passwords) -> Middleware:
    """The middleware. `current` says what holds now; None: the file cannot be used, and nobody is let in."""

    @web.middleware
    async def pass_or_refuse(request: web.Request, handler: Handler) -> web.StreamResponse:
        config = current()
        if config is None:
            return web.Response(status=500, text="the web config file cannot be used; the log says why\n")
        if bucket is not None and not bucket.take():
            return web.Response(status=429, text="Too Many Requests\n")
        if config.users and not await _is_known(request, config.users, passwords):
            refusal = web.Response(status=401, text="Unauthorized\n", headers={"WWW-Authenticate": "Basic"})
            return _with_headers(refusal, config)
        try:
            response = await handler(request)
        except web.HTTPException as error:  # aiohttp's own 404 and 405
            _with_headers(error, config)
            raise
        return _with_headers(response, config)

    return pass_or_refuse


async def _is_known(request: web.Request, users: Mapping[str, str], passwords: Passwords) -> bool:
    credentials = parse_basic(request.headers.get("Authorization", ""))
    return credentials is not None and await passwords.are_right(users, *credentials)


def _with_headers(response: web.StreamResponse, config: WebConfig) -> web.StreamResponse:
    for name, value in config.headers.items():
        response.headers.setdefault(name, value)  # as in Go, what a handler sets itself stands
    return response
