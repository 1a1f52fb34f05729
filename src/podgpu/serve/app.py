"""Binds the sockets and runs until told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from aiohttp import web

from podgpu.agent.loop import Agent
from podgpu.errors import StartError, UsageError
from podgpu.serve.routes import DEFAULT_RELEASE_SECONDS, gpu_manager_routes, probe_routes, routes

if TYPE_CHECKING:  # brings YAML and bcrypt, for those who have a web config only
    from podgpu.serve.protection import Protection

ADDRESS_OPTION = "-a"
GPU_MANAGER_OPTION = "--gpu-manager-address"
PROBE_OPTION = "--probe-address"

_SHUTDOWN_SECONDS = 1.0
_SAFE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}
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


class Served(Protocol):
    """What runs in the background while requests are answered: a node's agent, or the cluster's loop."""

    @property
    def fatal(self) -> StartError | None:
        """Why it must end."""

    def start(self, on_fatal: Callable[[], object]) -> None: ...
    def reload(self) -> None: ...
    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Listener:
    app: web.Application
    address: Address
    option: str = ADDRESS_OPTION
    protection: Protection | None = None
    said: str = ""
    """What is logged once it listens, with %s for its URL."""

    @property
    def tls(self) -> ssl.SSLContext | None:
        return self.protection.tls if self.protection else None


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
    listeners = [Listener(application(agent, protection), address, protection=protection)]
    if gpu_manager_address is not None:
        theirs = gpu_manager_application(agent, protection)
        said = "gpu-manager's metrics alone on %s/metric"
        listeners.append(Listener(theirs, gpu_manager_address, GPU_MANAGER_OPTION, protection, said))
    if probe_address is not None:
        listeners.append(probe_listener(probe_routes(agent), probe_address))
    release = partial(agent.release, DEFAULT_RELEASE_SECONDS)
    run(agent, listeners, lambda bound: on_listening(bound[0]), release)


def probe_listener(handlers: list[web.RouteDef], address: Address) -> Listener:
    return Listener(make_application(handlers, None), address, PROBE_OPTION, said="probes alone on %s/livez")


def run(
    served: Served,
    listeners: Sequence[Listener],
    on_listening: Callable[[Sequence[Address]], None] = lambda bound: None,
    release: Callable[[], object] | None = None,
) -> None:
    """Until SIGINT, SIGTERM or a fatal error of what is served. `on_listening` gets every listener's address, before
    what is served starts."""
    asyncio.run(_run(served, listeners, on_listening, release))
    if served.fatal is not None:
        raise served.fatal


async def _run(
    served: Served,
    listeners: Sequence[Listener],
    on_listening: Callable[[Sequence[Address]], None],
    release: Callable[[], object] | None,
) -> None:
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    for stop_signal in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(stop_signal, done.set)
    if release is not None:
        loop.add_signal_handler(signal.SIGUSR1, lambda: loop.run_in_executor(None, release))
    loop.add_signal_handler(signal.SIGHUP, served.reload)
    async with AsyncExitStack() as at_the_end:
        at_the_end.callback(served.stop)
        bound = []
        for one in listeners:
            runner = await _runner(one.app, at_the_end)
            bound.append(await listen(runner, one.address, one.option, one.tls))
        for one, where in zip(listeners, bound, strict=True):
            if one.said:
                _log.info(one.said, where.url)
        on_listening(bound)
        served.start(on_fatal=partial(loop.call_soon_threadsafe, done.set))
        await done.wait()


async def _runner(app: web.Application, at_the_end: AsyncExitStack) -> web.AppRunner:
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)
    at_the_end.push_async_callback(runner.cleanup)
    await runner.setup()
    return runner


def application(agent: Agent, protection: Protection | None = None) -> web.Application:
    return make_application(routes(agent), protection)


def gpu_manager_application(agent: Agent, protection: Protection | None = None) -> web.Application:
    """What gpu-manager itself would answer, as far as its metrics go."""
    return make_application(gpu_manager_routes(agent), protection)


def make_application(handlers: list[web.RouteDef], protection: Protection | None) -> web.Application:
    app = web.Application(client_max_size=64 * 1024, middlewares=[protection.middleware] if protection else [])
    app.add_routes(handlers)
    app.on_response_prepare.append(_with_safe_headers)
    return app


async def _with_safe_headers(_request: web.Request, response: web.StreamResponse) -> None:
    """On every answer, errors too: none of them is anything to a browser but what it says it is. What a handler or the
    web config says itself stands."""
    for name, value in _SAFE_HEADERS.items():
        response.headers.setdefault(name, value)


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
