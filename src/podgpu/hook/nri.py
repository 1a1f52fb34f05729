"""Handles one NRI connection: multiplexing, ttrpc frames, registration, and answers to the runtime's requests.

Two byte streams share the connection: one for requests of the runtime, one for requests of the plugin. If the plugin
fails, it answers without an adjustment, because the runtime does not start a container after an error.
"""

from __future__ import annotations

import logging
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from google.protobuf.message import DecodeError

from podgpu.errors import SourceError
from podgpu.hook import HookCounters, nri_pb2

PLUGIN_SERVICE = 1  # stream of the runtime's requests
RUNTIME_SERVICE = 2  # stream of the plugin's requests
REQUEST, RESPONSE = 1, 2
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


class Message(NamedTuple):
    service: int
    stream: int
    kind: int
    data: bytes


def split_messages(received: Iterable[bytes]) -> Iterator[Message]:
    """Yields complete messages. Raises SourceError if the data is invalid. Checks lengths before buffering."""
    frames, streams = bytearray(), {PLUGIN_SERVICE: bytearray(), RUNTIME_SERVICE: bytearray()}
    for piece in received:
        frames += piece
        while frame := _cut(frames, _FRAME_HEADER, 1, _MAX_FRAME):
            (service, _length), content = frame
            if service not in streams:  # ignored, because NRI may add services
                continue
            streams[service] += content
            while message := _cut(streams[service], _MESSAGE_HEADER, 0, MAX_MESSAGE):
                (_length, stream, kind, _flags), data = message
                yield Message(service, stream, kind, data)


def _cut(
    buffer: bytearray, header: struct.Struct, length_position: int, limit: int
) -> tuple[tuple[int, ...], bytes] | None:
    """Removes a header and its content from the buffer and returns both. Returns None if they are incomplete."""
    if len(buffer) < header.size:
        return None
    fields = header.unpack_from(buffer)
    length = fields[length_position]
    if length > limit:
        problem = f"the runtime sent data that is not valid NRI ({length:,} bytes; the maximum is {limit:,})"
        raise SourceError("bad_frame", problem)
    end = header.size + length
    if len(buffer) < end:
        return None
    content = bytes(buffer[header.size : end])
    del buffer[:end]
    return fields, content


def encode(message: Message) -> bytes:
    content = _MESSAGE_HEADER.pack(len(message.data), message.stream, message.kind, 0) + message.data
    frames = (content[start : start + _MAX_SENT_FRAME] for start in range(0, len(content), _MAX_SENT_FRAME))
    return b"".join(_FRAME_HEADER.pack(message.service, len(frame)) + frame for frame in frames)


class Session:
    """Registers the plugin and answers requests until the connection ends."""

    def __init__(
        self,
        connection: socket.socket,
        answer: Callable[[str, bytes], bytes],
        name: tuple[str, str],
        counters: HookCounters,
    ) -> None:
        """`answer` returns the encoded response to a method and its payload; it may raise any exception. `name`
        contains the name and the two-digit index of the plugin."""
        self._connection = connection
        self._call = answer
        self._name, self._index = name
        self._counters = counters
        self._registered = False

    def run(self) -> None:
        """Returns when the runtime ends the connection. Raises SourceError if it fails."""
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", _SEND_SECONDS, 0))
        self._connection.settimeout(_REGISTRATION_SECONDS)
        try:
            self._register()
            for message in split_messages(iter(lambda: self._connection.recv(_READ_BYTES), b"")):
                self._handle(message)
        except TimeoutError as error:
            raise SourceError(
                "no_answer", f"the runtime did not answer the registration for {_REGISTRATION_SECONDS:.0f} s"
            ) from error
        except OSError as error:
            raise SourceError("connection_lost", f"the connection to the runtime broke ({error.strerror})") from error
        finally:
            self._connection.close()
        if not self._registered:
            raise SourceError(
                "refused",
                "the runtime closed the connection before it registered the plugin: see its log; it may accept only"
                " plugins that it started itself (containerd: disable_connections)",
            )

    def _register(self) -> None:
        registration = nri_pb2.RegisterPluginRequest(plugin_name=self._name, plugin_idx=self._index)
        payload = registration.SerializeToString()
        request = nri_pb2.Request(service=RUNTIME_API, method="RegisterPlugin", payload=payload)
        self._connection.sendall(encode(Message(RUNTIME_SERVICE, 1, REQUEST, request.SerializeToString())))

    def _handle(self, message: Message) -> None:
        if message.service == RUNTIME_SERVICE and message.kind == RESPONSE:
            self._finish_registration(message.data)
        elif message.service == PLUGIN_SERVICE and message.kind == REQUEST:
            self._connection.sendall(encode(message._replace(kind=RESPONSE, data=self._answer(message.data))))
        else:
            self._counters.error("unexpected_message")

    def _finish_registration(self, data: bytes) -> None:
        answer = nri_pb2.Response.FromString(data)
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
        request, response, method = nri_pb2.Request(), nri_pb2.Response(), "other"
        try:
            request.ParseFromString(data)
            method = request.method
            if request.service != PLUGIN_API:
                raise NotImplementedError
            response.payload = self._call(method, request.payload)
        except NotImplementedError:
            self._failed(f"{request.service}/{method}", "other_protocol", f"podgpu implements {PLUGIN_API} only")
            response.status.code, method = _UNIMPLEMENTED, "other"
        except DecodeError:
            self._failed(method, "bad_request", "the request is not an NRI message")
        except SourceError as error:
            self._failed(method, error.reason, str(error))
        except Exception as error:  # noqa: BLE001 - a bug here must not fail a container
            _log.exception("unexpected error, please report it")
            self._failed(method, "bug", repr(error))
        self._counters.add("podgpu_hook_requests_total", method)
        self._counters.add("podgpu_hook_request_seconds_total", method, time.monotonic() - started)
        encoded: bytes = response.SerializeToString()
        return encoded

    def _failed(self, method: str, reason: str, problem: str) -> None:
        self._counters.error(reason)
        _log.warning("%s failed, so the container is not changed: %s", method, problem)
