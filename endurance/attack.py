"""`python -m endurance.attack [--minutes 5]`: hostile clients on loopback against an exporter and a
cluster view.

Meanwhile, two scrapers read both once a second. Prints one line per check and exits with 1 if one
fails.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from endurance.vitals import vitals_of

ROOT = Path(__file__).parents[1]
MAX_FILES = 1024  # the usual limit of a container
MAX_EXPORTER_MIB, MAX_CLUSTER_MIB = 300.0, 600.0
MAX_LOG_BYTES = 1_000_000
START_SECONDS = 60.0
Attack = Callable[[int], Awaitable[None]]


@dataclass
class Server:
    name: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path
    max_mib: float
    family: str  # a family that every scrape must contain
    scrapes: int = 0
    failures: list[str] = field(default_factory=list)
    peak_mib: float = 0.0


@dataclass(frozen=True)
class Claim:
    text: str
    value: float
    limit: float

    @property
    def holds(self) -> bool:
        return self.value <= self.limit


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m endurance.attack", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    claims = run(60 * parser.parse_args(arguments).minutes)
    for claim in claims:
        print(
            f"{'ok  ' if claim.holds else 'FAIL'} {claim.text}: {claim.value:g} (limit "
            f"{claim.limit:g})"
        )
    return 0 if all(claim.holds for claim in claims) else 1


def run(seconds: float, attacks: Sequence[Attack] | None = None) -> list[Claim]:
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp") as folder, ExitStack() as stack:
        exporter_port, cluster_port = free_port(), free_port()
        words = ["exporter", "--telemetry", "simulated:2xH100", "-c", "1000", "--path-proc", folder]
        exporter = stack.enter_context(
            server(
                "exporter",
                words,
                exporter_port,
                Path(folder),
                MAX_EXPORTER_MIB,
                "DCGM_FI_DEV_GPU_UTIL",
            )
        )
        words = [
            "cluster",
            "--scrape",
            f"http://127.0.0.1:{exporter_port}/metrics",
            "--interval",
            "2s",
        ]
        cluster = stack.enter_context(
            server(
                "cluster", words, cluster_port, Path(folder), MAX_CLUSTER_MIB, "podgpu_node_gpus"
            )
        )
        servers = [exporter, cluster]
        asyncio.run(attack(servers, seconds, ATTACKS if attacks is None else attacks))
        return [claim for each in servers for claim in judge(each)]


def judge(server: Server) -> Iterator[Claim]:
    for failure in sorted(set(server.failures)):
        print(f"{server.name}: {failure}")
    yield Claim(f"{server.name}: failed scrapes of {server.scrapes}", len(server.failures), 0)
    yield Claim(f"{server.name}: missing scrapes", max(0, 1 - server.scrapes), 0)
    yield Claim(f"{server.name}: peak memory in MiB", server.peak_mib, server.max_mib)
    yield Claim(f"{server.name}: log in bytes", server.log.stat().st_size, MAX_LOG_BYTES)
    yield Claim(f"{server.name}: process ended", float(server.process.poll() is not None), 0)


async def attack(servers: Sequence[Server], seconds: float, attacks: Sequence[Attack]) -> None:
    await asyncio.gather(*(wait_until_up(server) for server in servers))
    tasks = [
        asyncio.create_task(repeat(each, server.port)) for server in servers for each in attacks
    ]
    tasks += [asyncio.create_task(scrape(server)) for server in servers]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for server in servers:
        with suppress(OSError, KeyError):
            server.peak_mib = vitals_of(server.process.pid, 0.0).peak


async def repeat(once: Attack, port: int) -> None:
    while True:
        with suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
            await once(port)
        await asyncio.sleep(0.2)


async def scrape(server: Server) -> None:
    """Scrapes once a second over one connection. Reconnects once if it was closed, like
    Prometheus.
    """
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        while True:
            server.scrapes += 1
            for attempt in range(2):
                try:
                    async with session.get(f"http://127.0.0.1:{server.port}/metrics") as response:
                        text = await response.text()
                        if response.status != 200 or server.family not in text:
                            server.failures.append(
                                f"status {response.status}, {len(text)} characters"
                            )
                        break
                except (aiohttp.ClientError, TimeoutError) as error:
                    if attempt:
                        server.failures.append(type(error).__name__)
            await asyncio.sleep(1.0)


async def wait_until_up(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline and server.process.poll() is None:
            with suppress(aiohttp.ClientError):
                async with session.get(f"http://127.0.0.1:{server.port}/metrics") as response:
                    if server.family in await response.text():
                        return
            await asyncio.sleep(0.1)
    raise RuntimeError(f"{server.name} did not start: {server.log.read_text()[-2000:]}")


# Attacks come from 127.0.0.2, so that they share no address with the scrapers.


async def open_many(port: int, count: int, request: bytes = b"", hold_seconds: float = 4.0) -> None:
    async def one() -> None:
        _, writer = await asyncio.wait_for(
            asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0)), timeout=10
        )
        try:
            writer.write(request)
            await asyncio.sleep(hold_seconds)
        finally:
            writer.transport.abort()

    await asyncio.gather(*(one() for _ in range(count)), return_exceptions=True)


async def silent_connections(port: int) -> None:
    await open_many(port, 400)


async def half_requests(port: int) -> None:
    await open_many(port, 200, b"GET /metrics HTTP/1.1\r\nHost: a\r\nX-A: ")


async def huge_headers(port: int) -> None:
    await open_many(port, 20, b"GET /metrics HTTP/1.1\r\n" + b"X: " + b"a" * 1_000_000)


async def unread_answers(port: int) -> None:
    await open_many(port, 50, b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n" * 20)


async def endless_body(port: int) -> None:
    await open_many(
        port,
        50,
        b"POST /-/release HTTP/1.1\r\nHost: a\r\nContent-Length: 999999999\r\n\r\n" + b"a" * 1000,
    )


async def garbage(port: int) -> None:
    for request in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + random.randbytes(200),
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        random.randbytes(500),
    ):
        await open_many(port, 1, request, hold_seconds=0.1)


ATTACKS: tuple[Attack, ...] = (
    silent_connections,
    half_requests,
    huge_headers,
    unread_answers,
    endless_body,
    garbage,
)


# Servers


@contextmanager
def server(
    name: str, words: Sequence[str], port: int, folder: Path, max_mib: float, family: str
) -> Iterator[Server]:
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "podgpu", *words, "-a", f"127.0.0.1:{port}"],
            stdout=output,
            stderr=output,
            cwd=ROOT,
            env={key: value for key, value in os.environ.items() if not key.startswith("PODGPU_")},
        )
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (MAX_FILES, MAX_FILES))
    try:
        yield Server(name, port, process, log, max_mib, family)
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
