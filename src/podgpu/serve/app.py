"""Binds the socket and runs until told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from podgpu.agent.loop import Agent
from podgpu.errors import StartError, UsageError
from podgpu.serve.routes import DEFAULT_RELEASE_SECONDS, gpu_manager_routes, routes

ADDRESS_OPTION = "-a"
GPU_MANAGER_OPTION = "--gpu-manager-address"

_SHUTDOWN_SECONDS = 1.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    """Empty: every interface."""
    port: int

    @property
    def url(self) -> str:
        host = self.host or "localhost"
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def parse_address(text: str, option: str = ADDRESS_OPTION) -> Address:
    """`:9400`, `127.0.0.1:9400`, `[::1]:9400`, `name:9400`."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    known_port = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535
    if not colon or not known_port or (":" in host and not bracketed):
        raise UsageError(f"{option} {text!r}: not an address; write HOST:PORT, :PORT or [IPV6]:PORT, such as :9400")
    return Address(host, int(port))


def serve(
    agent: Agent,
    address: Address,
    on_listening: Callable[[Address], None] = lambda a: None,
    gpu_manager_address: Address | None = None,
) -> None:
    """Start the agent and answer requests until SIGINT, SIGTERM or a fatal error of the agent.

    `gpu_manager_address`: a second one, for gpu-manager's metrics alone.
    """
    asyncio.run(_serve(agent, address, on_listening, gpu_manager_address))
    if agent.fatal is not None:
        raise agent.fatal


async def _serve(
    agent: Agent,
    address: Address,
    on_listening: Callable[[Address], None],
    gpu_manager_address: Address | None,
) -> None:
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    for stop_signal in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(stop_signal, done.set)
    loop.add_signal_handler(signal.SIGUSR1, lambda: loop.run_in_executor(None, agent.release, DEFAULT_RELEASE_SECONDS))
    loop.add_signal_handler(signal.SIGHUP, agent.reload)
    async with AsyncExitStack() as at_the_end:
        at_the_end.callback(agent.stop)
        bound = await listen(await _runner(application(agent), at_the_end), address)
        if gpu_manager_address is not None:
            runner = await _runner(gpu_manager_application(agent), at_the_end)
            second = await listen(runner, gpu_manager_address, GPU_MANAGER_OPTION)
            _log.info("gpu-manager's metrics alone on %s/metric", second.url)
        agent.start(on_fatal=partial(loop.call_soon_threadsafe, done.set))
        on_listening(bound)
        await done.wait()


async def _runner(app: web.Application, at_the_end: AsyncExitStack) -> web.AppRunner:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)
    at_the_end.push_async_callback(runner.cleanup)
    await runner.setup()
    return runner


def application(agent: Agent) -> web.Application:
    app = web.Application(client_max_size=64 * 1024)
    app.add_routes(routes(agent))
    return app


def gpu_manager_application(agent: Agent) -> web.Application:
    """What gpu-manager itself would answer, as far as its metrics go."""
    app = web.Application(client_max_size=64 * 1024)
    app.add_routes(gpu_manager_routes(agent))
    return app


async def listen(runner: web.AppRunner, address: Address, option: str = ADDRESS_OPTION) -> Address:
    """Bind; raises StartError that names the address. Returns it with the port the system chose for port 0."""
    site = web.TCPSite(runner, address.host or None, address.port)
    try:
        await site.start()
    except (OSError, UnicodeError) as e:  # UnicodeError: a name like a..b, which no resolver is asked for
        why = getattr(e, "strerror", None) or e
        raise StartError(
            f"cannot listen on {address.host}:{address.port}: {why}; choose another address with {option}"
        ) from e
    return Address(address.host, runner.addresses[0][1])
