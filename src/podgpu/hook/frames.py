"""This module knows the frames on a runtime's connection: NRI's multiplexing outside, ttrpc's messages inside. Pure.

Two byte streams share the connection: on one the runtime asks and the plugin answers, on the other the plugin asks.
Their bytes come in pieces that mean nothing; each piece says whose it is. Lengths are checked before bytes are kept.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from podgpu.errors import SourceError

PLUGIN_SERVICE = 1
"""The stream on which the runtime asks."""
RUNTIME_SERVICE = 2
"""The stream on which the plugin asks."""
REQUEST, RESPONSE, DATA = 1, 2, 3

MOST_MESSAGE = 4 * 1024 * 1024
_PIECE_HEAD = struct.Struct(">II")
_MESSAGE_HEAD = struct.Struct(">IIBB")
_MOST_PIECE = MOST_MESSAGE + _MESSAGE_HEAD.size
# Go's reader refuses a piece that is larger than its buffer, and ttrpc reads through one of 4,096 bytes.
_MOST_PIECE_SENT = 4096


class BadFrame(SourceError):
    """What came is no NRI. Nothing after it can be trusted: the connection has to be made anew."""

    def __init__(self, what: str) -> None:
        super().__init__("bad_frame", f"the runtime's side of the connection is not NRI as podgpu knows it: {what}")


class Message(NamedTuple):
    service: int
    stream: int
    kind: int
    data: bytes


class Trunk:
    """Takes bytes as they come and gives messages once they are whole."""

    def __init__(self) -> None:
        self._pieces = bytearray()
        self._streams = {PLUGIN_SERVICE: bytearray(), RUNTIME_SERVICE: bytearray()}

    @property
    def is_between_messages(self) -> bool:
        return not self._pieces and not any(self._streams.values())

    def feed(self, received: bytes) -> Iterator[Message]:
        """Raises BadFrame; messages before that are given first."""
        self._pieces += received
        while (piece := self._next_piece()) is not None:
            service, content = piece
            if service in self._streams:  # others may come to be; theirs is not ours to read
                self._streams[service] += content
                yield from self._messages(service)

    def _next_piece(self) -> tuple[int, bytes] | None:
        if len(self._pieces) < _PIECE_HEAD.size:
            return None
        service, length = _PIECE_HEAD.unpack_from(self._pieces)
        if service == 0:
            raise BadFrame("a piece for connection 0, which is none")
        if length > _MOST_PIECE:
            raise BadFrame(f"a piece of {length:,} bytes, where {_MOST_PIECE:,} is the most")
        end = _PIECE_HEAD.size + length
        if len(self._pieces) < end:
            return None
        content = bytes(self._pieces[_PIECE_HEAD.size : end])
        del self._pieces[:end]
        return service, content

    def _messages(self, service: int) -> Iterator[Message]:
        waiting = self._streams[service]
        while len(waiting) >= _MESSAGE_HEAD.size:
            length, stream, kind, _flags = _MESSAGE_HEAD.unpack_from(waiting)
            if length > MOST_MESSAGE:
                raise BadFrame(f"a message of {length:,} bytes, where {MOST_MESSAGE:,} is the most")
            if kind not in (REQUEST, RESPONSE, DATA):
                raise BadFrame(f"a message of kind {kind}, which ttrpc does not have")
            end = _MESSAGE_HEAD.size + length
            if len(waiting) < end:
                return
            data = bytes(waiting[_MESSAGE_HEAD.size : end])
            del waiting[:end]
            yield Message(service, stream, kind, data)


def encode(message: Message) -> bytes:
    """The bytes to send, in pieces that every runtime can read."""
    whole = _MESSAGE_HEAD.pack(len(message.data), message.stream, message.kind, 0) + message.data
    pieces = (whole[start : start + _MOST_PIECE_SENT] for start in range(0, len(whole), _MOST_PIECE_SENT))
    return b"".join(_PIECE_HEAD.pack(message.service, len(piece)) + piece for piece in pieces)
