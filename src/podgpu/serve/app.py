"""Binds the sockets and runs until told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from podgpu.agent.loop import Agent
from podgpu.errors import StartError, UsageError
from podgpu.serve.routes import DEFAULT_RELEASE_SECONDS, gpu_manager_routes, probe_routes, routes

if TYPE_CHECKING:  # brings YAML and bcrypt, for those who have a web config only
    from podgpu.serve.protection import Protection

ADDRESS_OPTION = "-a"
GPU_MANAGER_OPTION = "--gpu-manager-address"
PROBE_OPTION = "--probe-address"

_SAID = {GPU_MANAGER_OPTION: "gpu-manager's metrics alone on %s/metric", PROBE_OPTION: "probes alone on %s/livez"}
_SHUTDOWN_SECONDS = 1.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    """Empty: every interface."""
    port: int
    scheme: str = "http"

    @property
    def url(self) -> str:
        host = self.host or "localhost"
        return f"{self.scheme}://[{host}]:{self.port}" if ":" in host else f"{self.scheme}://{host}:{self.port}"


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
    probe_address: Address | None = None,
    protection: Protection | None = None,
) -> None:
    """Start the agent and answer requests until SIGINT, SIGTERM or a fatal error of the agent.

    `gpu_manager_address`: a second one, for gpu-manager's metrics alone. `probe_address`: one for the kubelet's probes
    alone, which `protection` leaves plain: a probe can show neither a password nor a certificate.
    """
    listeners = [_Listener(application(agent, protection), address, ADDRESS_OPTION, protection)]
    if gpu_manager_address is not None:
        theirs = gpu_manager_application(agent, protection)
        listeners.append(_Listener(theirs, gpu_manager_address, GPU_MANAGER_OPTION, protection))
    if probe_address is not None:
        listeners.append(_Listener(probe_application(agent), probe_address, PROBE_OPTION))
    asyncio.run(_serve(agent, listeners, on_listening))
    if agent.fatal is not None:
        raise agent.fatal


@dataclass(frozen=True, slots=True)
class _Listener:
    app: web.Application
    address: Address
    option: str
    protection: Protection | None = None

    @property
    def tls(self) -> ssl.SSLContext | None:
        return self.protection.tls if self.protection else None


async def _serve(agent: Agent, listeners: list[_Listener], on_listening: Callable[[Address], None]) -> None:
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    for stop_signal in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(stop_signal, done.set)
    loop.add_signal_handler(signal.SIGUSR1, lambda: loop.run_in_executor(None, agent.release, DEFAULT_RELEASE_SECONDS))
    loop.add_signal_handler(signal.SIGHUP, agent.reload)
    async with AsyncExitStack() as at_the_end:
        at_the_end.callback(agent.stop)
        bound = []
        for one in listeners:
            runner = await _runner(one.app, at_the_end)
            bound.append(await listen(runner, one.address, one.option, one.tls))
        for one, where in list(zip(listeners, bound, strict=True))[1:]:
            _log.info(_SAID[one.option], where.url)
        agent.start(on_fatal=partial(loop.call_soon_threadsafe, done.set))
        on_listening(bound[0])
        await done.wait()


async def _runner(app: web.Application, at_the_end: AsyncExitStack) -> web.AppRunner:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)
    at_the_end.push_async_callback(runner.cleanup)
    await runner.setup()
    return runner


def application(agent: Agent, protection: Protection | None = None) -> web.Application:
    return _application(routes(agent), protection)


def gpu_manager_application(agent: Agent, protection: Protection | None = None) -> web.Application:
    """What gpu-manager itself would answer, as far as its metrics go."""
    return _application(gpu_manager_routes(agent), protection)


def probe_application(agent: Agent) -> web.Application:
    return _application(probe_routes(agent), None)


def _application(handlers: list[web.RouteDef], protection: Protection | None) -> web.Application:
    app = web.Application(client_max_size=64 * 1024, middlewares=[protection.middleware] if protection else [])
    app.add_routes(handlers)
    return app


async def listen(
    runner: web.AppRunner, address: Address, option: str = ADDRESS_OPTION, tls: ssl.SSLContext | None = None
) -> Address:
    """Bind; raises StartError that names the address. Returns it with the port the system chose for port 0."""
    site = web.TCPSite(runner, address.host or None, address.port, ssl_context=tls)
    try:
        await site.start()
    except (OSError, UnicodeError) as e:  # UnicodeError: a name like a..b, which no resolver is asked for
        why = getattr(e, "strerror", None) or e
        raise StartError(
            f"cannot listen on {address.host}:{address.port}: {why}; choose another address with {option}"
        ) from e
    return Address(address.host, runner.addresses[0][1], "https" if tls else "http")
