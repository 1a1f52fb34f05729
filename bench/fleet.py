"""`python -m bench.fleet NODES`: a process that serves /metrics and /api/v1/node of many simulated
nodes.

Every node has its own port. Paths below /text have no /api/v1/node, like an exporter without
documents. The process prints its ports as JSON. Each line on standard input starts the next round.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import sys
from functools import partial

from bench.node import rename, simulated_node
from podgpu.metrics.encode import CONTENT_TYPE

ROUNDS = 2
Pages = dict[bytes, bytes]  # path -> HTTP response


def make_documents() -> list[tuple[bytes, bytes]]:
    """Returns text and JSON of the simulated node in each round."""
    documents = []
    with simulated_node() as node:
        for _ in range(ROUNDS):
            node.run_round()
            published = node.agent.published
            documents.append((published.fresh.plain, published.render("fresh_json").plain))
    return documents


def make_pages(documents: tuple[bytes, bytes], number: int) -> Pages:
    text, document = (rename(each, number) for each in documents)
    metrics = _response(b"200 OK", CONTENT_TYPE, text)
    return {
        b"/metrics": metrics,
        b"/text/metrics": metrics,
        b"/api/v1/node": _response(b"200 OK", "application/json", document),
    }


def _response(status: bytes, content_type: str, body: bytes) -> bytes:
    body = gzip.compress(body, 6)
    head = (
        f"Content-Type: {content_type}\r\nContent-Encoding: gzip\r\nContent-Length: "
        f"{len(body)}\r\n\r\n"
    ).encode()
    return b"HTTP/1.1 " + status + b"\r\n" + head + body


_NOT_FOUND = _response(b"404 Not Found", "text/plain", b"")


class Fleet:
    def __init__(self, nodes: int) -> None:
        self._rounds = [
            [make_pages(each, number) for number in range(nodes)] for each in make_documents()
        ]
        self.round = 0

    def answer(self, node: int, request: bytes) -> bytes:
        path = request.split(b" ", 2)[1]
        return self._rounds[self.round % ROUNDS][node].get(path, _NOT_FOUND)


class NodeProtocol(asyncio.Protocol):
    """A minimal HTTP server with persistent connections, because the benchmark measures the
    client.
    """

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


async def run(nodes: int) -> None:
    fleet, loop, ports = Fleet(nodes), asyncio.get_running_loop(), []
    for node in range(nodes):
        server = await loop.create_server(partial(NodeProtocol, fleet, node), "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
    print(json.dumps(ports), flush=True)
    while await loop.run_in_executor(None, sys.stdin.readline):
        fleet.round += 1
        print(json.dumps(fleet.round), flush=True)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    asyncio.run(run(int(sys.argv[1])))
