"""Handles one NRI connection: multiplexing, ttrpc frames, registration, and answers to the runtime's requests.

Two byte streams share the connection: one for requests of the runtime, one for requests of the plugin. If the plugin
fails, the runtime gets an answer without an adjustment, because with an error it would not start the container.
"""

from __future__ import annotations

import logging
import socket
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from google.protobuf.message import DecodeError

from podgpu.errors import SourceError
from podgpu.hook import nri_pb2
from podgpu.hook.counters import HookCounters

PLUGIN_SERVICE = 1  # stream of the runtime's requests
RUNTIME_SERVICE = 2  # stream of the plugin's requests
REQUEST, RESPONSE, DATA = 1, 2, 3
PLUGIN_API = "nri.pkg.api.v1alpha1.Plugin"
RUNTIME_API = "nri.pkg.api.v1alpha1.Runtime"
MAX_MESSAGE = 4 * 1024 * 1024
_FRAME_HEADER = struct.Struct(">II")
_MESSAGE_HEADER = struct.Struct(">IIBB")
_MAX_FRAME = MAX_MESSAGE + _MESSAGE_HEADER.size
_MAX_SENT_FRAME = 4096  # Go's ttrpc reads through a buffer of this size and rejects larger frames
_SEND_SECONDS = 5
_REGISTRATION_SECONDS = 60.0  # the runtime registers plugins one after the other
_READ_BYTES = 256 * 1024
_UNIMPLEMENTED = 12
_log = logging.getLogger("podgpu")


class BadFrame(SourceError):
    """The received data is not valid NRI, so the connection must be closed."""

    def __init__(self, what: str) -> None:
        super().__init__("bad_frame", f"the runtime sent data that is not valid NRI ({what})")


class NoSuchMethod(Exception):
    """The plugin does not implement this method."""


class Message(NamedTuple):
    service: int
    stream: int
    kind: int
    data: bytes


class Demuxer:
    """Splits received bytes into messages. Checks lengths before buffering."""

    def __init__(self) -> None:
        self._frames = bytearray()
        self._streams = {PLUGIN_SERVICE: bytearray(), RUNTIME_SERVICE: bytearray()}

    @property
    def is_between_messages(self) -> bool:
        return not self._frames and not any(self._streams.values())

    def feed(self, received: bytes) -> Iterator[Message]:
        """Yields complete messages. Raises BadFrame."""
        self._frames += received
        while (frame := self._next_frame()) is not None:
            service, content = frame
            if service in self._streams:  # others are ignored, because NRI may add services
                self._streams[service] += content
                yield from self._messages(service)

    def _next_frame(self) -> tuple[int, bytes] | None:
        if len(self._frames) < _FRAME_HEADER.size:
            return None
        service, length = _FRAME_HEADER.unpack_from(self._frames)
        if service == 0:
            raise BadFrame("a frame for connection 0, which does not exist")
        if length > _MAX_FRAME:
            raise BadFrame(f"a frame of {length:,} bytes; the maximum is {_MAX_FRAME:,}")
        end = _FRAME_HEADER.size + length
        if len(self._frames) < end:
            return None
        content = bytes(self._frames[_FRAME_HEADER.size : end])
        del self._frames[:end]
        return service, content

    def _messages(self, service: int) -> Iterator[Message]:
        buffer = self._streams[service]
        while len(buffer) >= _MESSAGE_HEADER.size:
            length, stream, kind, _flags = _MESSAGE_HEADER.unpack_from(buffer)
            if length > MAX_MESSAGE:
                raise BadFrame(f"a message of {length:,} bytes; the maximum is {MAX_MESSAGE:,}")
            if kind not in (REQUEST, RESPONSE, DATA):
                raise BadFrame(f"a message of kind {kind}, which ttrpc does not have")
            end = _MESSAGE_HEADER.size + length
            if len(buffer) < end:
                return
            data = bytes(buffer[_MESSAGE_HEADER.size : end])
            del buffer[:end]
            yield Message(service, stream, kind, data)


def encode(message: Message) -> bytes:
    content = _MESSAGE_HEADER.pack(len(message.data), message.stream, message.kind, 0) + message.data
    frames = (content[start : start + _MAX_SENT_FRAME] for start in range(0, len(content), _MAX_SENT_FRAME))
    return b"".join(_FRAME_HEADER.pack(message.service, len(frame)) + frame for frame in frames)


class RequestHandler(Protocol):
    def answer(self, method: str, payload: bytes) -> bytes:
        """Returns the encoded response. Raises NoSuchMethod, SourceError or DecodeError."""


class Session:
    """Registers the plugin and answers requests until the connection ends."""

    def __init__(
        self, connection: socket.socket, plugin: RequestHandler, name: tuple[str, str], counters: HookCounters
    ) -> None:
        """`name` contains the name and the two-digit index of the plugin."""
        self._connection = connection
        self._plugin = plugin
        self._name, self._index = name
        self._counters = counters
        self._registered = False
        self._logged: set[str] = set()

    def run(self) -> None:
        """Returns when the connection ends between two messages. Raises SourceError otherwise."""
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", _SEND_SECONDS, 0))
        try:
            self._register()
            self._read_all()
        except TimeoutError as error:
            raise SourceError(
                "no_answer", f"the runtime did not answer the registration for {_REGISTRATION_SECONDS:.0f} s"
            ) from error
        except OSError as error:
            raise SourceError("connection_lost", f"the connection to the runtime broke ({error.strerror})") from error
        finally:
            self._connection.close()

    def _register(self) -> None:
        self._connection.settimeout(_REGISTRATION_SECONDS)
        registration = nri_pb2.RegisterPluginRequest(plugin_name=self._name, plugin_idx=self._index)
        payload = registration.SerializeToString()
        request = nri_pb2.Request(service=RUNTIME_API, method="RegisterPlugin", payload=payload)
        self._send(Message(RUNTIME_SERVICE, 1, REQUEST, request.SerializeToString()))

    def _read_all(self) -> None:
        demuxer = Demuxer()
        while received := self._connection.recv(_READ_BYTES):
            for message in demuxer.feed(received):
                self._handle(message)
        if not demuxer.is_between_messages:
            raise SourceError("truncated", "the connection to the runtime ended in the middle of a message")
        if not self._registered:
            raise SourceError(
                "refused",
                "the runtime closed the connection before it registered the plugin: see its log; it may accept only"
                " plugins that it started itself (containerd: disable_connections)",
            )

    def _handle(self, message: Message) -> None:
        if message.service == RUNTIME_SERVICE and message.kind == RESPONSE:
            self._finish_registration(message.data)
        elif message.service == PLUGIN_SERVICE and message.kind == REQUEST:
            self._send(message._replace(kind=RESPONSE, data=self._answer(message.data)))
        else:
            self._counters.error("unexpected_message")

    def _finish_registration(self, data: bytes) -> None:
        try:
            answer = nri_pb2.Response.FromString(data)
        except DecodeError as error:
            raise BadFrame("the answer to the registration is not a ttrpc message") from error
        if answer.status.code:
            raise SourceError(
                "refused",
                f"the runtime rejects the plugin {self._index}-{self._name} ({answer.status.message}): it may use"
                " another version of NRI than v1alpha1, which containerd has since 1.7 and CRI-O since 1.26",
            )
        self._registered = True
        self._connection.settimeout(None)

    def _answer(self, data: bytes) -> bytes:
        started = time.monotonic()
        try:
            request = nri_pb2.Request.FromString(data)
        except DecodeError:
            self._counters.error("bad_request")
            return b""
        if request.service != PLUGIN_API:
            self._counters.error("other_protocol")
            _log.warning("the runtime called %s, but podgpu implements %s", request.service[:200], PLUGIN_API)
            return _status(_UNIMPLEMENTED, f"podgpu implements {PLUGIN_API} only")
        method, answer = request.method, b""
        try:
            answer = self._plugin.answer(method, request.payload)
        except NoSuchMethod:
            self._count_request("other", started)
            return _status(_UNIMPLEMENTED, f"podgpu has no method {method[:80]}")
        except DecodeError:
            self._failed(method, "bad_request", "the request is not an NRI message")
        except SourceError as error:
            self._failed(method, error.reason, str(error))
        except Exception as error:  # noqa: BLE001 - a bug here must not fail a container
            _log.exception("unexpected error, please report it")
            self._failed(method, "bug", f"{type(error).__name__}: {error}")
        self._count_request(method, started)
        response: bytes = nri_pb2.Response(payload=answer).SerializeToString()
        return response

    def _count_request(self, method: str, started: float) -> None:
        self._counters.add("podgpu_hook_requests_total", method)
        self._counters.add("podgpu_hook_request_seconds_total", method, time.monotonic() - started)

    def _failed(self, method: str, reason: str, problem: str) -> None:
        """Counts every failure. Logs each reason as a warning only once."""
        self._counters.error(reason)
        level = logging.DEBUG if reason in self._logged else logging.WARNING
        self._logged.add(reason)
        _log.log(level, "%s is answered without an adjustment: %s", method[:80], problem)

    def _send(self, message: Message) -> None:
        self._connection.sendall(encode(message))


def _status(code: int, text: str) -> bytes:
    response: bytes = nri_pb2.Response(status=nri_pb2.Status(code=code, message=text)).SerializeToString()
    return response
