"""HTTP servers for the tests of `podgpu top`: one that sends raw bytes, one that answers like
podgpu.
"""

from __future__ import annotations

import socket
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

EXPOSITION = (Path(__file__).parents[1] / "nodes" / "shared" / "expected.prom").read_bytes()
HTML = b"<!doctype html><html><body>Hello</body></html>"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nConnection: close\r\n"
JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Type: application/json\r\nConnection: close\r\n"


def answer(body: bytes, head: bytes = HEAD) -> bytes:
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


class RawServer:
    """Answers every request with the given bytes, and records the requests."""

    def __init__(self, reply: bytes | Callable[[bytes], bytes]) -> None:
        self.reply = reply
        self.requests: list[bytes] = []
        self.silent = False
        self._closing = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.url = f"http://{self.address}/metrics"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    @property
    def paths(self) -> list[str]:
        return [request.split(b" ", 2)[1].decode() for request in self.requests]

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                request = connection.recv(65536)
                if not request:
                    return
                self.requests.append(request)
                if self.silent:
                    self._closing.wait()
                    continue
                connection.sendall(self.reply(request) if callable(self.reply) else self.reply)

    def close(self) -> None:
        self._closing.set()
        socket.create_connection(
            self._listener.getsockname()
        ).close()  # an empty request ends the server thread
        self._thread.join()
        self._listener.close()


@contextmanager
def serving(reply: bytes | Callable[[bytes], bytes]) -> Iterator[RawServer]:
    server = RawServer(reply)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def podgpu_server(answers: Mapping[str, Any]) -> Iterator[RawServer]:
    """`answers`: prefix of the path -> metrics text in bytes, or an object to send as JSON."""

    def reply(request: bytes) -> bytes:
        path = request.split(b" ", 2)[1].decode()
        for prefix, content in answers.items():
            if path.startswith(prefix):
                is_text = isinstance(content, bytes)
                return (
                    answer(content) if is_text else answer(msgspec.json.encode(content), JSON_HEAD)
                )
        return answer(b'{"error":"no such path"}', NOT_FOUND)

    with serving(reply) as server:
        yield server


def history(**points: list[int]) -> dict[str, Any]:
    devices = {
        name.replace("_", "-"): b64encode(bytes(values)).decode() for name, values in points.items()
    }
    return {
        "api": "podgpu/v1",
        "from": 1_799_999_000.0,
        "step_seconds": 15,
        "points": 60,
        "devices": devices,
    }


def unused_url() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
