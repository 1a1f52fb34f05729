"""Binds the socket and runs until told to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from podgpu.agent.loop import Agent
from podgpu.errors import StartError, UsageError
from podgpu.serve.routes import DEFAULT_RELEASE_SECONDS, routes

_SHUTDOWN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    """Empty: every interface."""
    port: int

    @property
    def url(self) -> str:
        host = self.host or "localhost"
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def parse_address(text: str) -> Address:
    """`:9400`, `127.0.0.1:9400`, `[::1]:9400`, `name:9400`."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    known_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535
    if not colon or not known_port or (":" in host and not bracketed):
        raise UsageError(f"-a {text!r}: not an address; write HOST:PORT, :PORT or [IPV6]:PORT, such as :9400")
    return Address(host, int(port))


def serve(agent: Agent, address: Address, on_listening: Callable[[Address], None] = lambda a: None) -> None:
    """Start the agent and answer requests until SIGINT, SIGTERM or a fatal error of the agent."""
    asyncio.run(_serve(agent, address, on_listening))
    if agent.fatal is not None:
        raise agent.fatal


async def _serve(agent: Agent, address: Address, on_listening: Callable[[Address], None]) -> None:
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    for stop_signal in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(stop_signal, done.set)
    loop.add_signal_handler(signal.SIGUSR1, lambda: loop.run_in_executor(None, agent.release, DEFAULT_RELEASE_SECONDS))
    loop.add_signal_handler(signal.SIGHUP, agent.reload)
    runner = web.AppRunner(application(agent), access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)
    await runner.setup()
    try:
        bound = await listen(runner, address)
        agent.start(on_fatal=partial(loop.call_soon_threadsafe, done.set))
        on_listening(bound)
        await done.wait()
    finally:
        await runner.cleanup()
        agent.stop()


def application(agent: Agent) -> web.Application:
    app = web.Application(client_max_size=64 * 1024)
    app.add_routes(routes(agent))
    return app


async def listen(runner: web.AppRunner, address: Address) -> Address:
    """Bind; raises StartError that names the address. Returns it with the port the system chose for port 0."""
    site = web.TCPSite(runner, address.host or None, address.port)
    try:
        await site.start()
    except (OSError, UnicodeError) as e:  # UnicodeError: a name like a..b, which no resolver is asked for
        why = getattr(e, "strerror", None) or e
        raise StartError(
            f"cannot listen on {address.host}:{address.port}: {why}; choose another address with -a"
        ) from e
    return Address(address.host, runner.addresses[0][1])
