"""Those who pretend: wrong logins by the hundred, and web pages that make a browser ask for what it should not."""

from __future__ import annotations

import asyncio
import base64
import random

from endurance.attack.attackers import Aim, Tally, send, several

_AT_ONCE = 300


async def wrong_logins(aim: Aim, tally: Tally) -> None:
    """Three hundred at a time, each with another password, from a few addresses."""
    rng = random.Random()

    async def one(number: int) -> None:
        login = base64.b64encode(f"prometheus:{rng.getrandbits(64)}".encode()).decode()
        request = f"GET /metrics HTTP/1.1\r\nHost: a\r\nAuthorization: Basic {login}\r\nConnection: close\r\n\r\n"
        await send(aim, request.encode(), f"127.0.0.{10 + number % 4}")
        tally.add()

    await several(_AT_ONCE, one)
    await asyncio.sleep(1.0)


_BROWSERS = (
    "Origin: http://evil.example\r\nSec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: no-cors\r\n",
    "Origin: null\r\n",
    "Host: rebound.example\r\nSec-Fetch-Site: same-origin\r\nOrigin: http://rebound.example\r\n",
    "Referer: http://evil.example/\r\nContent-Type: text/plain\r\n",
    "X-Forwarded-For: 127.0.0.1\r\n",
)


async def cross_site(aim: Aim, tally: Tally) -> None:
    """A browser that has logged in is led to let the driver go for an hour; a sidecar's address tries it too."""
    for headers in _BROWSERS:
        host = "" if "Host:" in headers else f"Host: 127.0.0.1:{aim.port}\r\n"
        request = f"POST /-/release?seconds=3600 HTTP/1.1\r\n{host}{headers}Authorization: {aim.login}\r\n"
        source = "127.0.0.6" if "Forwarded" in headers else "127.0.0.1"
        await send(aim, f"{request}Content-Length: 0\r\nConnection: close\r\n\r\n".encode(), source)
        tally.add()
    await asyncio.sleep(3.0)
