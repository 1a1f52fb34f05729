"""A fleet of exporters in a process of its own: as many ports as nodes, texts made by podgpu's own agent and renderer.

`python -m bench.fleet_process NODES ROUNDS` simulates one lived-in node over so many rounds, renders its text each
time, and gives every node of the fleet those texts under a name, UUIDs and pods of its own. It prints one JSON line
when all listen, and one for each line it reads: that begins the next round. It ends when its standard input does.

The server is the least that speaks HTTP: what is measured is whoever asks.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from bench.node import TickClock
from podgpu.agent.loop import Agent, Settings
from podgpu.clock import Clock
from podgpu.gpu.nvml import NvmlTelemetry
from podgpu.holders.identity import IdentityReader
from podgpu.holders.kubelet import KubeletAllocation
from podgpu.metrics.counters import shipped_counters
from podgpu.metrics.encode import CONTENT_TYPE
from podgpu.metrics.render import Policy
from podgpu.simulate.driver import SimulatedNvml
from podgpu.simulate.kubelet import SimulatedKubelet
from podgpu.simulate.node import furnish, place_loads, pods, tenants
from podgpu.usage.containers import ContainerFinder

HOST = "simulated-node"
_OWN_NAMES = re.compile(rb"GPU-[0-9a-f-]{36}|simulated-node|00000000:[0-9A-F]{2}:00\.0|-0(?=\")")
SECONDS_PER_ROUND = 15
_LEVEL = 6


def template_expositions(rounds: int, gpus: str = "8xH100") -> list[bytes]:
    """One node's exposition in each round, with dcp counters and everything podgpu knows of its holders."""
    clock = TickClock(time.time())  # an exposition of another day would not count as fresh
    driver = SimulatedNvml(gpus, clock=clock, wall=clock)
    on_node = tenants(driver)
    place_loads(driver, on_node)
    with tempfile.TemporaryDirectory(prefix="podgpu-fleet-") as directory:
        host = Path(directory)
        furnish(host, on_node)
        socket = str(host / "kubelet.sock")
        with SimulatedKubelet(socket, pods(on_node)):
            return list(_expositions(_agent(driver, host, socket, clock), clock, rounds))


def _agent(driver: SimulatedNvml, host: Path, socket: str, clock: TickClock) -> Agent:
    count = len(driver.machine.gpus)
    names = IdentityReader(str(host / "pods"), str(host / "containers"))
    return Agent(
        NvmlTelemetry(driver, "simulated", lambda: count, clock, clock),
        [KubeletAllocation(socket)],
        Settings(policy=Policy(counters=shipped_counters("dcp") or (), hostname=HOST)),
        Clock(clock, clock),
        identities=names.read,
        containers=ContainerFinder(str(host / "proc"), clock),
    )


def _expositions(agent: Agent, clock: TickClock, rounds: int) -> Iterator[bytes]:
    agent.read_telemetry()
    agent.read_allocation()
    for _ in range(rounds):
        for _ in range(SECONDS_PER_ROUND):
            clock.advance()
            agent.read_usage()
        agent.read_telemetry()
        yield agent.published.fresh.plain
    agent.stop()


def of_node(exposition: bytes, number: int) -> bytes:
    """The text as another node would have it: names of its own, of the same length, and every figure as it was."""
    names: dict[bytes, bytes] = {}

    def own(match: re.Match[bytes]) -> bytes:
        name = match[0]
        found = names.get(name)
        if found is None:
            found = names[name] = _own_name(name, number)
        return found

    return _OWN_NAMES.sub(own, exposition)


def _own_name(name: bytes, number: int) -> bytes:
    if name.startswith(b"GPU-"):
        digits = sha256(b"%d %s" % (number, name)).hexdigest()
        return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:32]}".encode()
    if name == HOST.encode():
        return b"gpu-node-%05d" % number
    return b"-%d" % number if name == b"-0" else name


@dataclass
class Fleet:
    """What every port answers in the round that is."""

    answers: list[list[bytes]]
    """Round -> node -> the whole answer, gzip."""
    round: int = 0

    def answer(self, node: int) -> bytes:
        return self.answers[self.round % len(self.answers)][node]


class Exporter(asyncio.Protocol):
    def __init__(self, fleet: Fleet, node: int) -> None:
        self._fleet = fleet
        self._node = node
        self._asked = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._asked += data
        while b"\r\n\r\n" in self._asked:
            _, _, self._asked = self._asked.partition(b"\r\n\r\n")
            self._transport.write(self._fleet.answer(self._node))


def answer_of(exposition: bytes) -> bytes:
    body = gzip.compress(exposition, _LEVEL)
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Encoding: gzip\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


async def run(nodes: int, rounds: int) -> None:
    expositions = template_expositions(rounds)
    fleet = Fleet([[answer_of(of_node(exposition, node)) for node in range(nodes)] for exposition in expositions])
    loop = asyncio.get_running_loop()
    ports = []
    for node in range(nodes):
        server = await loop.create_server(lambda node=node: Exporter(fleet, node), "127.0.0.1", 0)  # type: ignore[misc]
        ports.append(server.sockets[0].getsockname()[1])
    zipped = sum(map(len, fleet.answers[0]))
    _say({"ports": ports, "exposition_bytes": len(expositions[0]), "zipped_bytes": zipped / nodes})
    while await loop.run_in_executor(None, sys.stdin.readline):
        fleet.round += 1
        _say({"round": fleet.round})


def _say(what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    asyncio.run(run(int(sys.argv[1]), int(sys.argv[2])))
