"""A fleet of exporters in one process: one port per node, with documents and metrics text of podgpu's own agent.

`python -m bench.fleet_process NODES ROUNDS` simulates one node over so many rounds and serves its documents and texts
for every node, with other names, UUIDs and pods. It prints one JSON line when all ports listen, and one for each line
that it reads: `next` begins the next round, `text` removes the documents. It ends with its standard input.
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
from typing import NamedTuple

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
_OWN_NAMES = re.compile(
    rb"GPU-[0-9a-f-]{36}|simulated-node|00000000:[0-9A-F]{2}:00\.0|-0(?=\")|(?<=\"exporter_id\":\")[0-9a-f]{16}"
)
SECONDS_PER_ROUND = 15
_LEVEL = 6


class Answers(NamedTuple):
    """What an exporter serves in one round."""

    document: bytes
    text: bytes


def template_answers(rounds: int, gpus: str = "8xH100") -> list[Answers]:
    """One node in each round, with dcp counters and holders."""
    clock = TickClock(time.time())  # an exposition of another day would not count as fresh
    driver = SimulatedNvml(gpus, clock=clock, wall=clock)
    on_node = tenants(driver)
    place_loads(driver, on_node)
    with tempfile.TemporaryDirectory(prefix="podgpu-fleet-") as directory:
        host = Path(directory)
        furnish(host, on_node)
        socket = str(host / "kubelet.sock")
        with SimulatedKubelet(socket, pods(on_node)):
            return list(_read_rounds(_agent(driver, host, socket, clock), clock, rounds))


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


def _read_rounds(agent: Agent, clock: TickClock, rounds: int) -> Iterator[Answers]:
    agent.read_telemetry()
    agent.read_allocation()
    for _ in range(rounds):
        for _ in range(SECONDS_PER_ROUND):
            clock.advance()
            agent.read_usage()
        agent.read_telemetry()
        yield Answers(agent.published.node_json(True).plain, agent.published.fresh.plain)
    agent.stop()


def rename(body: bytes, number: int) -> bytes:
    """The same body with other names of the same length."""
    names: dict[bytes, bytes] = {}

    def own(match: re.Match[bytes]) -> bytes:
        name = match[0]
        found = names.get(name)
        if found is None:
            found = names[name] = _own_name(name, number)
        return found

    return _OWN_NAMES.sub(own, body)


def _own_name(name: bytes, number: int) -> bytes:
    if name.startswith(b"GPU-"):
        digits = sha256(b"%d %s" % (number, name)).hexdigest()
        return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:32]}".encode()
    if name == HOST.encode():
        return b"gpu-node-%05d" % number
    if len(name) == 16 and b":" not in name:
        return b"%016x" % number  # exporter_id
    return b"-%d" % number if name == b"-0" else name


@dataclass
class Fleet:
    rounds: list[list[Answers]]  # by round and node, as HTTP responses
    round: int = 0
    has_documents: bool = True

    def answer(self, node: int, request: bytes) -> bytes:
        answers = self.rounds[self.round % len(self.rounds)][node]
        if b" /api/v1/node " not in request.partition(b"\r\n")[0]:
            return answers.text
        return answers.document if self.has_documents else b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


class Exporter(asyncio.Protocol):
    def __init__(self, fleet: Fleet, node: int) -> None:
        self._fleet = fleet
        self._node = node
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while b"\r\n\r\n" in self._received:
            request, _, self._received = self._received.partition(b"\r\n\r\n")
            self._transport.write(self._fleet.answer(self._node, request))


def make_response(body: bytes, content_type: str) -> bytes:
    zipped = gzip.compress(body, _LEVEL)
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\nContent-Encoding: gzip\r\nContent-Length: {len(zipped)}"
    return head.encode() + b"\r\n\r\n" + zipped


def make_responses(answers: Answers, node: int) -> Answers:
    return Answers(
        make_response(rename(answers.document, node), "application/json"),
        make_response(rename(answers.text, node), CONTENT_TYPE),
    )


async def run(nodes: int, rounds: int) -> None:
    templates = template_answers(rounds)
    fleet = Fleet([[make_responses(answers, node) for node in range(nodes)] for answers in templates])
    loop = asyncio.get_running_loop()
    ports = []
    for node in range(nodes):
        server = await loop.create_server(lambda node=node: Exporter(fleet, node), "127.0.0.1", 0)  # type: ignore[misc]
        ports.append(server.sockets[0].getsockname()[1])
    _say({"ports": ports, "document_bytes": len(templates[0].document), "text_bytes": len(templates[0].text)})
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        fleet.round += line.strip() == "next"
        fleet.has_documents &= line.strip() != "text"
        _say({"round": fleet.round})


def _say(what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    asyncio.run(run(int(sys.argv[1]), int(sys.argv[2])))
