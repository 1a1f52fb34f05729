"""Those who take their time: silent connections, one byte a second, answers nobody reads, bodies that never come."""

from __future__ import annotations

import asyncio

from endurance.attack.attackers import Aim, Tally, close, connect, several

_HELD = 20.0
"""Seconds after which an attacker gives one up and begins anew."""


async def silent(aim: Aim, tally: Tally) -> None:
    """Connections on which nothing is ever said."""

    async def one(_number: int) -> None:
        reader, writer = await connect(aim)
        tally.add()
        try:
            await asyncio.wait_for(reader.read(), min(_HELD, aim.left))
        finally:
            close(writer)

    await several(100, one)


async def one_byte_a_second(aim: Aim, tally: Tally) -> None:
    """A request whose header never ends."""

    async def one(_number: int) -> None:
        _, writer = await connect(aim)
        tally.add()
        try:
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: a\r\nX-Slow: ")
            for _ in range(int(_HELD)):
                writer.write(b"a")
                await writer.drain()
                await asyncio.sleep(1.0)
        finally:
            close(writer)

    await several(50, one)


async def nobody_reads(aim: Aim, tally: Tally) -> None:
    """Many expositions are asked for on one connection, and none is read."""

    async def one(_number: int) -> None:
        _, writer = await connect(aim)
        tally.add()
        try:
            request = f"GET /metrics HTTP/1.1\r\nHost: a\r\nAuthorization: {aim.login}\r\n\r\n".encode()
            for _ in range(200):
                writer.write(request)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await asyncio.sleep(_HELD)
        finally:
            close(writer)

    await several(10, one)


async def no_body(aim: Aim, tally: Tally) -> None:
    """A body is promised and does not come, or comes without end."""

    async def one(number: int) -> None:
        _, writer = await connect(aim)
        tally.add()
        try:
            head = f"POST /-/release HTTP/1.1\r\nHost: a\r\nAuthorization: {aim.login}\r\n"
            writer.write(
                f"{head}Content-Length: 1000000000\r\n\r\n".encode()
                if number % 2
                else f"{head}Transfer-Encoding: chunked\r\n\r\n".encode()
            )
            for _ in range(int(_HELD)):
                writer.write(b"ffff\r\n" + b"x" * 0xFFFF + b"\r\n")
                await asyncio.wait_for(writer.drain(), _HELD)
                await asyncio.sleep(1.0)
        finally:
            close(writer)

    await several(10, one)
