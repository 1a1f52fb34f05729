"""UnixChannel makes one gRPC call at a time over a Unix socket: HTTP/2 as far as that takes it. No thread of its own,
and no pool.

grpcio does the same with 20 MiB of memory and a thread for every core, up to 16, where the exporter makes one call in
five seconds. Only what servers are allowed to send is understood; anything else ends the connection.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import unquote

from podgpu.holders.hpack import BadHeaders, HeaderDecoder, encode_headers

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_END_STREAM = _ACK = 0x1
_END_HEADERS, _PADDED, _PRIORITY = 0x4, 0x8, 0x20
_MOST_FRAME = 16384  # what a peer may send to who has not asked for more
_WINDOW = (1 << 31) - 1
_FIRST_WINDOW = 65535
_GIVE_BACK = 1 << 20
_MOST_BLOCK = 64 * 1024
_LAST_STREAM = (1 << 31) - 3
_CODES = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED"),
    *("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
)
_RESETS = {7: "UNAVAILABLE", 8: "CANCELLED", 11: "RESOURCE_EXHAUSTED", 12: "PERMISSION_DENIED"}


class CallFailed(Exception):
    """A call without an answer: gRPC's name of the code, and what was said with it."""

    def __init__(self, code: str, details: str) -> None:
        super().__init__(f"{code}: {details}")
        self.code = code
        self.details = details


class ChannelClosed(Exception):
    """Somebody closed the channel during the call."""


class _Gone(Exception):
    """The connection ended before anything of the answer came: a new one may do better."""


class UnixChannel:
    """The connection to one server: made at the first call, kept, and made anew when the server ended it."""

    def __init__(self, path: str, most_bytes: int) -> None:
        self._path = path
        self._most_bytes = most_bytes
        self._connection: _Connection | None = None
        self._is_closed = False

    def call(self, method: str, timeout: float) -> bytes:
        """The answer to an empty request. Raises CallFailed, or ChannelClosed."""
        give_up_at = time.monotonic() + timeout
        kept = self._connection is not None
        try:
            try:
                return self._call(method, give_up_at)
            except _Gone:
                if not kept:
                    raise
                return self._call(method, give_up_at)  # it was ended while nobody looked
        except _Gone as e:
            raise CallFailed("UNAVAILABLE", str(e)) from e

    def _call(self, method: str, give_up_at: float) -> bytes:
        try:
            if self._connection is None:
                self._connection = _Connection(self._path, give_up_at)
                if self._is_closed:
                    raise ChannelClosed
            answer = self._connection.call(method, give_up_at, self._most_bytes)
            if self._connection is not None and self._connection.is_spent:
                self._drop()
            return answer
        except CallFailed:
            if self._connection is not None and self._connection.is_unsure:
                self._drop()
            raise
        except TimeoutError as e:
            self._drop()
            raise CallFailed("DEADLINE_EXCEEDED", "no answer in time") from e
        except (OSError, BadHeaders, _Gone, struct.error) as e:
            self._drop()
            if self._is_closed:
                raise ChannelClosed from e
            if isinstance(e, _Gone):
                raise
            raise CallFailed("UNAVAILABLE", e.strerror or str(e) if isinstance(e, OSError) else str(e)) from e

    def close(self) -> None:
        """From any thread; a call in progress ends with ChannelClosed."""
        self._is_closed = True
        self._drop()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class _Connection:
    def __init__(self, path: str, give_up_at: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._received = bytearray()
        self._stream = -1
        self._greeting = _greeting()
        """Goes out with the first call."""
        self._headers = HeaderDecoder()
        self._unreturned = 0
        self.is_spent = False
        """The server takes no more calls on it."""
        self.is_unsure = True
        """Frames of an earlier call may still be on their way."""
        try:
            self._wait_until(give_up_at)
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for the answer
        self._socket.close()

    def call(self, method: str, give_up_at: float, most_bytes: int) -> bytes:
        self._stream += 2
        self.is_unsure, self.is_spent = True, self._stream >= _LAST_STREAM
        milliseconds = max(1, round((give_up_at - time.monotonic()) * 1000))
        headers = encode_headers(
            (
                *((":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "localhost")),
                *(("te", "trailers"), ("content-type", "application/grpc"), ("grpc-timeout", f"{milliseconds}m")),
            )
        )
        greeting, self._greeting = self._greeting, b""
        request = (
            greeting
            + _frame(_HEADERS, _END_HEADERS, self._stream, headers)
            + _frame(_DATA, _END_STREAM, self._stream, bytes(5))
        )
        self._wait_until(give_up_at)
        try:
            self._socket.sendall(request)
        except ConnectionError as e:
            raise _Gone(str(e.strerror)) from e
        return self._answer(give_up_at, most_bytes)

    def _answer(self, give_up_at: float, most_bytes: int) -> bytes:
        body, said = bytearray(), dict[str, str]()
        for kind, flags, content in self._frames_of_the_call(give_up_at):
            if kind == _HEADERS:
                said.update(self._headers.decode(content))
            elif kind == _DATA:
                body += content
                _check_size(body, most_bytes)
            elif kind == _RST_STREAM:
                (reason,) = struct.unpack(">I", content)
                raise CallFailed(_RESETS.get(reason, "INTERNAL"), f"the server ended the call (HTTP/2 error {reason})")
            if flags & _END_STREAM and kind in (_HEADERS, _DATA):
                break
        self.is_unsure = False
        return _message(body, said)

    def _frames_of_the_call(self, give_up_at: float) -> Iterator[tuple[int, int, bytes]]:
        """Whole header blocks, data without padding, resets; whatever else is between them is seen to."""
        while True:
            kind, flags, stream, content = self._frame(give_up_at)
            if kind == _HEADERS:
                content = _unpadded(flags, content)[5 if flags & _PRIORITY else 0 :]
                while not flags & _END_HEADERS:
                    more_kind, more, _, part = self._frame(give_up_at)
                    if more_kind != _CONTINUATION or len(content) + len(part) > _MOST_BLOCK:
                        raise BadHeaders("a header block that does not end")
                    content, flags = content + part, flags | more & _END_HEADERS
                if stream != self._stream:
                    self._headers.decode(content)  # its table is the connection's
            elif kind == _DATA:
                self._give_back(len(content))
                content = _unpadded(flags, content)
            elif kind == _GOAWAY:
                self._be_sent_away(content)
            elif not flags & _ACK and kind in (_SETTINGS, _PING):
                self._tell(_frame(kind, _ACK, 0, content if kind == _PING else b""))
            if stream == self._stream and kind in (_HEADERS, _DATA, _RST_STREAM):
                yield kind, flags, content

    def _be_sent_away(self, content: bytes) -> None:
        self.is_spent = True
        last, reason = struct.unpack(">II", content[:8])
        if last < self._stream:
            raise _Gone(f"the server takes no more calls (HTTP/2 error {reason})")

    def _give_back(self, size: int) -> None:
        self._unreturned += size
        if self._unreturned >= _GIVE_BACK:
            self._tell(_frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", self._unreturned)))
            self._unreturned = 0

    def _tell(self, frame: bytes) -> None:
        """A server that is gone may have said all there is to say: reading on will tell."""
        with suppress(ConnectionError):
            self._socket.sendall(frame)

    def _frame(self, give_up_at: float) -> tuple[int, int, int, bytes]:
        head = self._take(9, give_up_at)
        size, kind, flags, stream = int.from_bytes(head[:3], "big"), head[3], head[4], int.from_bytes(head[5:], "big")
        if size > _MOST_FRAME:
            raise BadHeaders("what answers speaks no HTTP/2")
        return kind, flags, stream & _WINDOW, self._take(size, give_up_at)

    def _take(self, size: int, give_up_at: float) -> bytes:
        while len(self._received) < size:
            self._wait_until(give_up_at)
            try:
                more = self._socket.recv(256 * 1024)
            except ConnectionError as e:
                raise _Gone(str(e.strerror)) from e
            if not more:
                raise _Gone("the server closed the connection")
            self._received += more
        taken = bytes(memoryview(self._received)[:size])
        del self._received[:size]
        return taken

    def _wait_until(self, give_up_at: float) -> None:
        left = give_up_at - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)


def _greeting() -> bytes:
    settings = _frame(
        _SETTINGS, 0, 0, struct.pack(">HIHI", 2, 0, 4, _WINDOW)
    )  # no pushes, and as much data as there is
    return _PREFACE + settings + _frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _WINDOW - _FIRST_WINDOW))


def _frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return len(content).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + content


def _unpadded(flags: int, content: bytes) -> bytes:
    if not flags & _PADDED:
        return content
    if not content or content[0] >= len(content):
        raise BadHeaders("more padding than there is in the frame")
    return content[1 : len(content) - content[0]]


def _check_size(body: bytearray, most_bytes: int) -> None:
    """What has come of a message so far. Raises CallFailed."""
    if len(body) < 5:
        return
    size = int.from_bytes(body[1:5], "big")
    if size > most_bytes:
        raise CallFailed("RESOURCE_EXHAUSTED", f"the message is larger than max ({size} vs. {most_bytes})")
    if len(body) - 5 > size:  # it may never end
        raise CallFailed("INTERNAL", f"more than the {size} bytes that were announced")


def _message(body: bytes | bytearray, said: dict[str, str]) -> bytes:
    """Raises CallFailed for every answer but a good one."""
    if said.get(":status", "") != "200":
        raise CallFailed("UNAVAILABLE", f"what answers speaks no gRPC (HTTP status {said.get(':status', 'missing')})")
    status = said.get("grpc-status", "")
    number = int(status) if status.isascii() and status.isdigit() and len(status) < 3 else -1
    code = _CODES[number] if 0 <= number < len(_CODES) else "UNKNOWN"
    if code != "OK":
        raise CallFailed(code, unquote(said.get("grpc-message", "")) or (f"status {status}" if status else "no status"))
    if len(body) < 5 or body[0] or int.from_bytes(body[1:5], "big") != len(body) - 5:
        raise CallFailed("INTERNAL", f"{len(body)} bytes that are not one plain message")
    return bytes(body[5:])
