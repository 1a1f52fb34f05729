"""This module assembles what `podgpu exporter` is beside its agent, as the options say: history, waste, prices, who is
let in; and has it served."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from podgpu.agent.loop import Agent
from podgpu.cluster.prices import ReadPrices, read_prices
from podgpu.compose.agent import Naming, Options, exporter_agent
from podgpu.compose.histories import node_recorder
from podgpu.compose.servers import SOON_SECONDS, ApiAccess
from podgpu.web.app import load_protection
from podgpu.web.exporter_app import PageSources, RequestLimits, serve
from podgpu.web.node_page import NodeWaste
from podgpu.web.sockets import Address, systemd_sockets

if TYPE_CHECKING:
    from podgpu.web.protection import Protection

_log = logging.getLogger("podgpu")


@dataclass(frozen=True, slots=True)
class Doors:
    """Where the exporter is asked."""

    address: Address
    gpu_manager: Address | None
    probes: Address | None


@dataclass(frozen=True, slots=True)
class Exporter:
    """What the options come to: the agent, which nobody has started yet, and what is needed to serve it."""

    agent: Agent
    options: Options
    naming: Naming
    sockets: Sequence[socket.socket]
    protection: Protection | None
    prices: ReadPrices

    def serve(self, doors: Doors) -> None:
        """Until SIGINT, SIGTERM or a fatal error of the agent. Raises UsageError and StartError."""
        options = self.options
        waste = NodeWaste(self.agent, self.prices)
        with self.naming("history_dir"):
            recorder = node_recorder(self.agent, options["history_dir"], waste, self.prices)
        serve(
            self.agent,
            doors.address,
            lambda bound: _log.info("listening on %s/metrics", bound.url),
            doors.gpu_manager,
            doors.probes,
            self.protection,
            self.sockets,
            options["web_enable_lifecycle"],
            page=PageSources(recorder, self.prices, waste.statement),
            services=[recorder, waste],
            limits=RequestLimits(
                options["web_read_timeout"], options["web_write_timeout"], options["max_concurrent_scrapes"]
            ),
        )


@contextmanager
def opened_exporter(options: Options, naming: Naming) -> Iterator[Exporter]:
    """With --once, too, everything is looked at: whoever looks before leaving it running learns what is wrong. Raises
    UsageError."""
    once = options["once"]
    with ExitStack() as at_the_end:
        with naming("web_systemd_socket"):
            sockets = systemd_sockets(os.environ) if options["web_systemd_socket"] and not once else []
        with naming("web_config_file"):
            protection = load_protection(options["web_config_file"])
        with naming("prices"):
            prices = read_prices(options["prices"])
        # Probes are answered soon, whatever the API server does; --once has nobody to answer and can wait.
        api = ApiAccess(options["kubeconfig"]) if once else ApiAccess(options["kubeconfig"], SOON_SECONDS)
        at_the_end.callback(api.close)
        yield Exporter(exporter_agent(options, api, naming), options, naming, sockets, protection, prices)
