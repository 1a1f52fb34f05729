"""Those who come in numbers or with much: headers of megabytes, more connections than descriptors, any bytes."""

from __future__ import annotations

import asyncio
import random

from endurance.attack.attackers import Aim, Tally, close, connect, send, several

_HEADERS, _HEADER_BYTES = 120, 8000
_CONNECTIONS = 1400
"""More than the victim may open."""
_OPENED_AT_ONCE = 50
"""All 1,400 sockets made before the first connects take a busy machine longer than some attacks last."""
_HELD = 8.0


async def huge_headers(aim: Aim, tally: Tally) -> None:
    """Unfinished requests of a megabyte of headers each, before any login."""

    async def one(_number: int) -> None:
        _, writer = await connect(aim)
        tally.add()
        try:
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: a\r\n")
            for header in range(_HEADERS):
                writer.write(b"X-%d: %s\r\n" % (header, b"a" * _HEADER_BYTES))
                await asyncio.wait_for(writer.drain(), _HELD)
            await asyncio.sleep(_HELD)
        finally:
            close(writer)

    await several(80, one)


async def every_descriptor(aim: Aim, tally: Tally) -> None:
    """As many connections as there are descriptors, and more; held, let go, and again."""
    opening = asyncio.Semaphore(_OPENED_AT_ONCE)

    async def one(_number: int) -> None:
        async with opening:
            _, writer = await connect(aim, "127.0.0.3")
        tally.add()
        try:
            await asyncio.sleep(_HELD)
        finally:
            close(writer)

    await several(_CONNECTIONS, one)
    await asyncio.sleep(_HELD)


async def garbage(aim: Aim, tally: Tally) -> None:
    """What is no HTTP, or hardly: each of these was once an error somewhere."""
    rng = random.Random()
    requests = (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200),
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: a\r\nAccept-Encoding: " + b"gzip," * 1000 + b"\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n Host: a\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"TRACE /../../etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n",
        rng.randbytes(500),
        b"\r\n" * 500,
    )
    for request in requests:
        await send(aim, request)
        tally.add()
    await asyncio.sleep(0.5)
