"""This module serves one node: its agent's metrics and web page, gpu-manager's metrics and the probes beside them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from podgpu.agent.loop import Agent
from podgpu.web.app import Listener, Served, Several, make_application, probe_listener, run
from podgpu.web.connections import limits_for
from podgpu.web.lifecycle import DEFAULT_RELEASE_SECONDS
from podgpu.web.routes import NOTHING_BESIDE, BesideFigures, gpu_manager_routes, probe_routes, routes
from podgpu.web.sockets import Address

if TYPE_CHECKING:
    # It brings YAML and bcrypt, for those who have a web config only.
    from podgpu.web.protection import Protection

GPU_MANAGER_OPTION = "--gpu-manager-address"


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the visitors of one exporter may take."""

    read_seconds: float = 10.0
    """To send a request."""
    write_seconds: float = 30.0
    """To read the answer."""
    scrapes: int = 16
    """Requests for /metrics at a time."""


def serve(
    agent: Agent,
    address: Address,
    on_listening: Callable[[Address], None] = lambda a: None,
    gpu_manager_address: Address | None = None,
    probe_address: Address | None = None,
    protection: Protection | None = None,
    sockets: Sequence[socket.socket] = (),
    lifecycle: bool = True,
    shown: BesideFigures | None = None,
    beside: Sequence[Served] = (),
    bounds: Bounds | None = None,
) -> None:
    """Start the agent and answer requests until SIGINT, SIGTERM or a fatal error of the agent.

    `gpu_manager_address`: a second one, for gpu-manager's metrics alone. `probe_address`: one for the kubelet's probes
    alone, which `protection` leaves plain: a probe can show neither a password nor a certificate. `sockets`: bound
    already, in place of the address. `lifecycle`: POST /-/release is answered. `shown`: on the page. `beside`: what
    runs as long as the agent does.
    """
    bounds = bounds or Bounds()
    app = application(agent, protection, lifecycle, shown, bounds.scrapes)
    tls = protection.tls if protection else None
    listeners = [Listener(app, address, tls=tls, sockets=sockets)]
    if gpu_manager_address is not None:
        theirs = gpu_manager_application(agent, protection)
        words = "gpu-manager's metrics alone on %s/metric"
        listeners.append(Listener(theirs, gpu_manager_address, GPU_MANAGER_OPTION, tls, words))
    if probe_address is not None:
        listeners.append(probe_listener(probe_routes(agent), probe_address))
    release = partial(agent.release, DEFAULT_RELEASE_SECONDS)
    limits = replace(
        limits_for(len(listeners)), headers_seconds=bounds.read_seconds, answer_seconds=bounds.write_seconds
    )
    run(Several([agent, *beside]), listeners, lambda bound: on_listening(bound[0]), release, limits)


def application(
    agent: Agent,
    protection: Protection | None = None,
    lifecycle: bool = True,
    shown: BesideFigures | None = None,
    scrapes: int = 16,
) -> web.Application:
    return make_application(routes(agent, lifecycle, shown or NOTHING_BESIDE, scrapes), protection)


def gpu_manager_application(agent: Agent, protection: Protection | None = None) -> web.Application:
    """What gpu-manager itself would answer, as far as its metrics go."""
    return make_application(gpu_manager_routes(agent), protection)
