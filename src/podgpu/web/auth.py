"""This module owns what every request passes before it is answered: the rate limit, the configured headers, basic auth.

Passwords are compared in one thread of their own: bcrypt is slow on purpose, and the event loop has scrapes to answer.
Whoever was let in before does not wait for that thread; of those who do, few from one address may.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import ipaddress
import os
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import bcrypt
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from podgpu.web.web_config import RateLimit, WebConfig

MOST_REMEMBERED = 100
MOST_WAITING = 64
MOST_WAITING_FROM_ONE = 4
"""Behind a queue of these a login with bcrypt's usual cost of 10 waits a quarter of a second."""
_GUESSES_NICE = 10
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


class TooManyGuesses(Exception):
    """More passwords wait to be compared than may."""


class Passwords:
    """Compares one password at a time, and remembers the last verdicts without the passwords.

    Good ones apart from bad ones: only who knows a password can add to the good ones.
    """

    def __init__(self, compare: Callable[[bytes, bytes], bool] = bcrypt.checkpw) -> None:
        self._compare = compare
        self._good: dict[bytes, None] = {}
        self._bad: dict[bytes, None] = {}
        self._pending: dict[bytes, asyncio.Future[bool]] = {}
        self._waiting: Counter[str] = Counter()
        self._salt = os.urandom(32)
        self._thread = ThreadPoolExecutor(1, "podgpu-bcrypt", initializer=_give_way)

    def close(self) -> None:
        # Without this a queue of guesses would be worked off before the process may end.
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def remembered(self) -> int:
        return len(self._good) + len(self._bad)

    async def are_right(self, users: Mapping[str, str], user: bytes, password: bytes, asker: str = "") -> bool:
        """Raises TooManyGuesses. `asker`: the address it comes from."""
        hashed = users.get(user.decode("utf-8", "surrogateescape"))
        # Whoever is unknown costs as much time as whoever is known.
        against = (hashed or _dummy_hash(users)).encode()
        question = self._digest(user, against, password)
        if question in self._good:
            _remember(self._good, question)
            return hashed is not None
        if question in self._bad:
            return False
        right = await self._judged(question, against, password, _network_of(asker))
        return right and hashed is not None

    async def _judged(self, question: bytes, hashed: bytes, password: bytes, asker: str) -> bool:
        """The same question asked by several at once is one comparison."""
        pending = self._pending.get(question)
        if pending is None:
            if len(self._pending) >= MOST_WAITING or self._waiting[asker] >= MOST_WAITING_FROM_ONE:
                raise TooManyGuesses
            pending = asyncio.get_running_loop().run_in_executor(self._thread, self._is_right, hashed, password)
            self._pending[question] = pending
            self._waiting[asker] += 1
            pending.add_done_callback(lambda done: self._note(question, asker, done))
        return await asyncio.shield(pending)

    def _note(self, question: bytes, asker: str, done: asyncio.Future[bool]) -> None:
        del self._pending[question]
        self._waiting[asker] -= 1
        self._waiting += Counter()  # forgets those who wait for nothing
        if not done.cancelled():
            _remember(self._good if done.result() else self._bad, question)

    def _digest(self, *parts: bytes) -> bytes:
        """Of user, hash and password: a hash that is changed in the file counts at once."""
        digest = hashlib.blake2b(key=self._salt, digest_size=32)
        for part in parts:
            digest.update(len(part).to_bytes(8, "big") + part)
        return digest.digest()

    def _is_right(self, hashed: bytes, password: bytes) -> bool:
        try:
            return self._compare(password[:_BCRYPT_BYTES], hashed)
        except ValueError:  # a password no hash can be of
            return False


def _give_way() -> None:
    """What strangers have us compute is done when nothing else wants the processor. Linux has this for one thread."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _GUESSES_NICE)


def _remember(verdicts: dict[bytes, None], question: bytes) -> None:
    """As the latest; the one not asked for longest is forgotten."""
    verdicts.pop(question, None)
    if len(verdicts) >= MOST_REMEMBERED:
        del verdicts[next(iter(verdicts))]
    verdicts[question] = None


def _network_of(address: str) -> str:
    """An IPv6 host has 2^64 addresses to ask from: its network counts."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4 or parsed.ipv4_mapped:
        return address
    return str(ipaddress.ip_network((parsed, 64), strict=False))


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


def guard(
    current: Callable[[], Awaitable[WebConfig | None]], bucket: TokenBucket | None, passwords: Passwords
) -> Middleware:
    """The middleware. `current` says what holds now; None: the file cannot be used, and nobody is let in."""

    @web.middleware
    async def pass_or_refuse(request: web.Request, handler: Handler) -> web.StreamResponse:
        config = await current()
        if config is None:
            return web.Response(status=500, text="the web config file cannot be used; the log says why\n")
        if bucket is not None and not bucket.take():
            return web.Response(status=429, text="Too Many Requests\n")
        if config.users and (refusal := await _refusal(request, config.users, passwords)) is not None:
            return _with_headers(refusal, config)
        try:
            response = await handler(request)
        except web.HTTPException as error:  # aiohttp's own 404 and 405
            _with_headers(error, config)
            raise
        return _with_headers(response, config)

    return pass_or_refuse


async def _refusal(request: web.Request, users: Mapping[str, str], passwords: Passwords) -> web.Response | None:
    credentials = parse_basic(request.headers.get("Authorization", ""))
    try:
        if credentials is not None and await passwords.are_right(users, *credentials, asker=request.remote or ""):
            return None
    except TooManyGuesses:
        wait = {"Retry-After": "1"}
        return web.Response(status=429, text="too many passwords wait to be compared: try again\n", headers=wait)
    return web.Response(status=401, text="Unauthorized\n", headers={"WWW-Authenticate": "Basic"})


def _with_headers(response: web.StreamResponse, config: WebConfig) -> web.StreamResponse:
    for name, value in config.headers.items():
        response.headers.setdefault(name, value)  # as in Go, what a handler sets itself stands
    return response
