"""The attackers: each family in a process of its own, niced, at a bounded rate, until its time is over.

They come from other loopback addresses than the scraper does, as strangers would.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([f"endurance.attack.{name}" for name in ("crude", "secure", "slow", "strangers")])
"""Two dozen processes start as fast as one."""
NICE = 19
"""A dozen attackers together weigh less than one victim: what is measured is the victim."""
_WAIT = 15.0
_BEGIN_SECONDS = 120.0


@dataclass(frozen=True)
class Aim:
    """Whom to attack, and until when."""

    port: int
    login: str
    """An Authorization header that is right: as a browser that has logged in would send it."""
    authority: str = ""
    """The file with whom the victim's certificate is of; empty: it speaks no TLS."""
    until: float = float("inf")
    """On the monotonic clock."""

    @property
    def left(self) -> float:
        return self.until - time.monotonic()


Attack = Callable[[Aim, "Tally"], Awaitable[None]]


class Tally:
    """How often an attack was made; shared with whoever started it."""

    def __init__(self, made: Synchronized[int]) -> None:
        self._made = made

    def add(self, count: int = 1) -> None:
        with self._made.get_lock():
            self._made.value += count


class Attacker:
    """Is made ready first: on a busy machine two dozen processes take longer to begin than some attacks last."""

    def __init__(self, name: str, attack: Attack, aim: Aim, seconds: float, nice: int = NICE) -> None:
        self.name = name
        self._made: Any = _CONTEXT.Value("q", 0)
        self._ready, self._go = _CONTEXT.Event(), _CONTEXT.Event()
        words = (attack, aim, seconds, nice, self._made, self._ready, self._go)
        self._process = _CONTEXT.Process(target=_run, args=words, name=name, daemon=True)

    @property
    def made(self) -> int:
        return int(self._made.value)

    def prepare(self) -> None:
        self._process.start()

    def start(self) -> None:
        """Its time begins."""
        if not self._ready.wait(_BEGIN_SECONDS):
            raise RuntimeError(f"the attacker {self.name!r} does not begin")
        self._go.set()

    def stop(self) -> None:
        self._process.join(2 * _WAIT)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _run(attack: Attack, aim: Aim, seconds: float, nice: int, made: Synchronized[int], ready: Event, go: Event) -> None:
    os.nice(nice)
    logging.disable(logging.CRITICAL)  # a victim that hangs up on an attacker does well
    ready.set()
    if go.wait(_BEGIN_SECONDS):
        with suppress(TimeoutError):
            asyncio.run(_bounded(attack, replace(aim, until=time.monotonic() + seconds), Tally(made)))


async def _bounded(attack: Attack, aim: Aim, tally: Tally) -> None:
    async with asyncio.timeout(max(0.1, aim.left)):
        while aim.left > 0:
            with suppress(OSError, asyncio.IncompleteReadError):
                await attack(aim, tally)
            await asyncio.sleep(0.2)


# What every family is made of


async def connect(aim: Aim, source: str = "127.0.0.2") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.wait_for(asyncio.open_connection("127.0.0.1", aim.port, local_addr=(source, 0)), _WAIT)


async def send(aim: Aim, request: bytes, source: str = "127.0.0.2") -> bytes:
    """The first line of the answer; empty where there was none in time."""
    reader, writer = await connect(aim, source)
    try:
        writer.write(request)
        return await asyncio.wait_for(reader.readline(), _WAIT)
    except (OSError, TimeoutError):
        return b""
    finally:
        close(writer)


def close(writer: asyncio.StreamWriter) -> None:
    """Without waiting, and without leaving the port in TIME_WAIT."""
    sock = writer.get_extra_info("socket")
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.close()


async def several(count: int, one: Callable[[int], Awaitable[object]]) -> None:
    """So many at the same time; one that fails costs no other anything."""
    await asyncio.gather(*(one(number) for number in range(count)), return_exceptions=True)
