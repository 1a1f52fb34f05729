"""Free ports for processes under test, HTTP servers in threads, polling of servers, and lines of
metrics text.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tests.nodes.clock import PATIENCE

_PORTS_GIVEN = 2000  # number of ports for each worker of xdist
_FIRST_PORT = 20_000 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 6 * _PORTS_GIVEN
_PORTS = itertools.count(
    os.getpid() * 8, 8
)  # the demo also uses the four ports after its first one
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def free_port() -> int:
    """Returns a port for a process that binds it later.

    It is outside the range that the kernel uses for connections. Other test processes get other
    ports.
    """
    while True:
        port = _FIRST_PORT + next(_PORTS) % _PORTS_GIVEN
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


class QuietHandler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        with suppress(ConnectionError):  # the client closed the connection early
            super().handle()


@contextmanager
def serving(server: HTTPServer | type[BaseHTTPRequestHandler]) -> Iterator[int]:
    """Runs a server in a thread and yields its port. Creates a server if a handler is given."""
    if isinstance(server, type):
        server = ThreadingHTTPServer(("127.0.0.1", 0), server)
        server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def read_if_ready(url: str | Request, context: ssl.SSLContext | None = None) -> bytes | None:
    """Returns the body. None if the server does not listen yet, or answers with an error."""
    try:
        with urlopen(url, timeout=PATIENCE, context=context) as response:
            body: bytes = response.read()
            return body
    except HTTPError as error:
        # Python 3.14 warns about an answer that stays open.
        error.close()
    except OSError:
        pass
    return None


def lines_of(text: str, family: str) -> list[tuple[dict[str, str], float]]:
    """Returns labels and values of one family."""
    lines = (line for line in text.splitlines() if line.startswith((family + "{", family + " ")))
    return [(dict(_LABEL.findall(line)), float(line.rpartition(" ")[2])) for line in lines]
