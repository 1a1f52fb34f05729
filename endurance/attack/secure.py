"""Those who come to a port that speaks TLS: who never greet, stop half way, talk nonsense, or attack from inside."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress

from endurance.attack.attackers import Aim, Tally, close, connect, several

_HELD = 12.0
"""Seconds: longer than a victim gives anybody for a handshake."""
_AT_ONCE = 20
_INSIDE = 8
_PIECE = 1 << 16
_NONSENSE = (
    b"\x16\x03\x03\x00\x04\x00\x00\x00\x00",  # HelloRequest, as if a server asked to negotiate anew
    b"\x14\x03\x03\x00\x01\x01" * 200,  # ChangeCipherSpec, again and again
    b"\x15\x03\x03\x00\x02\x01\x00",  # an alert: the client says goodbye in clear text
    b"\x17\x03\x03\x00\x00" * 500,  # records with nothing in them
    b"\x17\x03\x03\xff\xff" + b"a" * 0xFFFF,  # a record longer than any may be
    b"\x16\x03\x03\x40\x00" + b"\x01\xff\xff\xff" * 4096,  # a handshake message of 16 MiB begins
)


async def handshakes(aim: Aim, tally: Tally) -> None:
    """Every way in which a handshake does not come to its end, each several times at once."""
    ways: tuple[Callable[[Aim], Awaitable[None]], ...] = (_no_hello, _half_hello, _drips, _stalls, _plain, _negotiates)

    async def one(number: int) -> None:
        tally.add()
        await ways[number % len(ways)](aim)

    await several(_AT_ONCE * len(ways), one)


async def _no_hello(aim: Aim) -> None:
    reader, writer = await connect(aim)
    try:
        await asyncio.wait_for(reader.read(), min(_HELD, aim.left))
    finally:
        close(writer)


async def _half_hello(aim: Aim) -> None:
    hello = _Client(aim).hello()
    reader, writer = await connect(aim)
    try:
        writer.write(hello[: len(hello) // 2])
        await asyncio.wait_for(reader.read(), min(_HELD, aim.left))
    finally:
        close(writer)


async def _drips(aim: Aim) -> None:
    """A hello of which one byte comes at a time."""
    _, writer = await connect(aim)
    try:
        for byte in _Client(aim).hello():
            writer.write(bytes((byte,)))
            await writer.drain()
            await asyncio.sleep(0.2)
    finally:
        close(writer)


async def _stalls(aim: Aim) -> None:
    """The server has done its work of a handshake, and hears no more."""
    reader, writer = await connect(aim)
    try:
        writer.write(_Client(aim).hello())
        while await asyncio.wait_for(reader.read(_PIECE), min(_HELD, aim.left)):
            pass
    finally:
        close(writer)


async def _plain(aim: Aim) -> None:
    reader, writer = await connect(aim)
    try:
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: a\r\nAuthorization: %s\r\n\r\n" % aim.login.encode())
        await asyncio.wait_for(reader.read(), _HELD)
    finally:
        close(writer)


async def _negotiates(aim: Aim) -> None:
    """A handshake that ends well, and nonsense behind it, which nobody has encrypted."""
    reader, writer = await connect(aim)
    try:
        client = _Client(aim)
        await client.shake_hands(reader, writer)
        writer.write(random.choice(_NONSENSE))
        await asyncio.wait_for(reader.read(), _HELD)
    finally:
        close(writer)


class _Client:
    """A client's side of TLS whose bytes are sent by hand."""

    def __init__(self, aim: Aim) -> None:
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = _context(aim).wrap_bio(self._came, self._goes, server_hostname="127.0.0.1")

    def hello(self) -> bytes:
        with suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
        return self._goes.read()

    async def shake_hands(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                writer.write(self._goes.read())
                piece = await asyncio.wait_for(reader.read(_PIECE), _HELD)
                if not piece:
                    raise ConnectionError from None
                self._came.write(piece)
            else:
                writer.write(self._goes.read())
                return


def _context(aim: Aim) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=aim.authority)


async def inside(aim: Aim, tally: Tally) -> None:
    """Attacks on HTTP, made by who has shaken hands as he should."""
    context = _context(aim)

    async def one(number: int) -> None:
        source = asyncio.open_connection("127.0.0.1", aim.port, local_addr=("127.0.0.4", 0), ssl=context)
        reader, writer = await asyncio.wait_for(source, _HELD)
        tally.add()
        try:
            await ways[number % len(ways)](reader, writer)
        finally:
            close(writer)

    async def header_without_end(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: a\r\n")
        for number in range(120):
            writer.write(b"X-%d: %s\r\n" % (number, b"a" * 8000))
            await asyncio.wait_for(writer.drain(), _HELD)
        await asyncio.sleep(_HELD)

    async def nobody_reads(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(200):
            writer.write(f"GET /metrics HTTP/1.1\r\nHost: a\r\nAuthorization: {aim.login}\r\n\r\n".encode())
        await asyncio.sleep(_HELD)

    async def silent(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await asyncio.wait_for(reader.read(), min(_HELD, aim.left))

    async def wrong_login(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        guess = random.getrandbits(60)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: a\r\nAuthorization: Basic %s\r\n\r\n" % f"{guess:0>16x}".encode())
        await asyncio.wait_for(reader.read(_PIECE), _HELD)

    ways = (header_without_end, nobody_reads, silent, wrong_login)
    await several(_INSIDE * len(ways), one)
