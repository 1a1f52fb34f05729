"""Nothing of a connection that ended is left for the search for garbage, during which no scrape is answered."""

from __future__ import annotations

import gc
import socket
from asyncio import selector_events
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import yaml

from podgpu.compose.process import let_go_of_what_ended
from podgpu.web.connections import Connection, Limits
from podgpu.web.exporter_app import application
from podgpu.web.protection import protect
from tests.nodes.clock import PATIENCE, wait_until
from tests.nodes.node import Node
from tests.web.certificates import make_certificates
from tests.web.server import LOOPBACK, Client, running

TRANSPORT = vars(selector_events)["_SelectorSocketTransport"]
RESET, ORDERLY = b"\1\0\0\0\0\0\0\0", b"\0\0\0\0\0\0\0\0"
SENT = (b"", b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01", b"no request at all\r\n\r\n")
"""After the first, nothing, the visitor is let go after a while."""
SOON = Limits(headers_seconds=0.3, look_seconds=0.05)


@pytest.fixture
def _as_podgpu_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(TRANSPORT, "_call_connection_lost", TRANSPORT._call_connection_lost)
    let_go_of_what_ended()
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def connections() -> int:
    """In memory, whether anybody holds them or not: without a search for garbage all that came since is of the youngest
    generation."""
    return sum(isinstance(found, (TRANSPORT, Connection)) for found in gc.get_objects(generation=0))


def visit(client: Client, hang_up: bytes, sent: bytes, *, handshake: bool) -> None:
    address = (client.address.host, client.address.port)
    with socket.create_connection(address, PATIENCE) as visitor, suppress(OSError):
        visitor.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, hang_up)
        if handshake and client.tls is not None:
            with client.tls.wrap_socket(visitor, server_hostname=client.address.host) as secure:
                secure.sendall(sent)
                secure.recv(64)
        else:
            visitor.sendall(sent)
            visitor.recv(64)


@contextmanager
def serving(node: Node, folder: Path, *, over_tls: bool) -> Iterator[Client]:
    node.take_turns()
    if not over_tls:
        with running(node.agent, limits=SOON) as client:
            yield client
        return
    certificates = make_certificates(folder)
    certificates.put("server", folder)
    config = folder / "web.yml"
    config.write_text(yaml.safe_dump({"tls_server_config": {"cert_file": "tls.crt", "key_file": "tls.key"}}))
    protection = protect(str(config))
    try:
        app = partial(application, protection=protection)
        with running(node.agent, LOOPBACK, app, protection.tls, SOON) as plain:
            yield Client(plain.address, certificates.client())
    finally:
        protection.close()


@pytest.mark.fault(
    "strangers come by the thousand, and are answered, cut off, or fail the handshake",
    "nothing of them is left that only a search for garbage finds, in which no scrape would be answered",
)
@pytest.mark.usefixtures("_as_podgpu_runs")
@pytest.mark.parametrize("over_tls", [False, True], ids=["plain", "tls"])
def test_who_has_gone_leaves_nothing_behind(node: Node, tmp_path: Path, over_tls: bool) -> None:
    with serving(node, tmp_path, over_tls=over_tls) as client:
        before = connections()
        for hang_up, sent, handshake in product((RESET, ORDERLY), SENT, (True, False)):
            visit(client, hang_up, sent, handshake=handshake)
        wait_until(lambda: connections() <= before, "every connection that ended is out of memory")
