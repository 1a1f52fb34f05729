"""Makes unary gRPC calls over a Unix socket with `h2`. grpcio would start threads and needs 12 MiB more."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from urllib.parse import unquote

from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import H2Error

_STATUS_NAMES = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED"),
    *("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
)
_STATUS_BY_NUMBER = {str(number): name for number, name in enumerate(_STATUS_NAMES)}
_MAX_CALLS = 1000  # per connection, because h2 stores every closed stream
_EMPTY_MESSAGE = bytes(5)


class GrpcError(Exception):
    """A failed call: name of the gRPC status and its message."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


class UnixGrpcClient:
    """Keeps one connection and makes one call at a time. Calls must be safe to repeat."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._http = H2Connection()
        self._lock = threading.Lock()
        self._times_closed = 0

    def call(self, method: str, timeout: float) -> bytes:
        """Sends an empty request and returns the encoded answer. Raises GrpcError."""
        deadline = time.monotonic() + timeout
        with self._lock:
            times_closed = self._times_closed
            while True:
                is_reused = self._socket is not None
                try:
                    return self._exchange(method, deadline, times_closed)
                except (GrpcError, OSError, H2Error) as error:
                    self._disconnect()  # frames of this call may still arrive
                    if self._times_closed != times_closed:
                        raise GrpcError("CANCELLED", "the client was closed") from error
                    if isinstance(error, GrpcError):
                        raise
                    if isinstance(error, TimeoutError):
                        raise GrpcError("DEADLINE_EXCEEDED", f"no answer within {timeout:.1f} s") from error
                    # On a reused connection the call is repeated, because the server may have restarted.
                    if not is_reused:
                        raise GrpcError("UNAVAILABLE", getattr(error, "strerror", None) or str(error)) from error

    def close(self) -> None:
        """Closes the connection and ends a call in progress in another thread. A later call connects again."""
        self._times_closed += 1
        connection = self._socket
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._disconnect()

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connect(self, deadline: float, times_closed: int) -> socket.socket:
        self._disconnect()
        self._socket, self._http = socket.socket(socket.AF_UNIX), H2Connection()
        self._socket.settimeout(_remaining(deadline))
        self._socket.connect(self._path)
        if self._times_closed != times_closed:
            raise ConnectionError("closed while connecting")
        self._http.initiate_connection()
        return self._socket

    def _exchange(self, method: str, deadline: float, times_closed: int) -> bytes:
        connection = self._socket
        if connection is None or self._http.get_next_available_stream_id() > 2 * _MAX_CALLS:
            connection = self._connect(deadline, times_closed)
        headers = [
            *((":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "localhost")),
            *(("te", "trailers"), ("content-type", "application/grpc")),
            ("grpc-timeout", f"{max(1, round(_remaining(deadline) * 1000))}m"),
        ]
        stream = self._http.get_next_available_stream_id()
        self._http.send_headers(stream, headers)
        self._http.send_data(stream, _EMPTY_MESSAGE, end_stream=True)
        answer, body = dict[bytes, bytes](), bytearray()
        while True:
            connection.settimeout(_remaining(deadline))
            connection.sendall(self._http.data_to_send())
            received = connection.recv(256 * 1024)
            if not received:
                raise ConnectionError("the server closed the connection")
            for event in self._http.receive_data(received):
                match event:
                    case ResponseReceived() | TrailersReceived():
                        answer.update(event.headers)
                    case DataReceived():
                        body += event.data
                        self._http.acknowledge_received_data(event.flow_controlled_length, stream)
                    case StreamReset() | ConnectionTerminated():
                        raise ConnectionError(f"the server ended the call (HTTP/2 error {event.error_code})")
                    case StreamEnded():
                        return _parse_answer(answer, body)


def _remaining(deadline: float) -> float:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def _parse_answer(headers: dict[bytes, bytes], body: bytearray) -> bytes:
    text = {name.decode(errors="replace"): value.decode(errors="replace") for name, value in headers.items()}
    number = text.get("grpc-status", "missing")
    if number != "0":
        message = unquote(text.get("grpc-message", "")) or f"gRPC status {number}, HTTP status {text.get(':status')}"
        raise GrpcError(_STATUS_BY_NUMBER.get(number, "UNKNOWN"), message)
    if len(body) < 5 or body[0] or len(body) != 5 + int.from_bytes(body[1:5], "big"):
        raise GrpcError(
            "INTERNAL", f"malformed gRPC response: {len(body)} bytes do not contain exactly one uncompressed message"
        )
    return bytes(body[5:])
