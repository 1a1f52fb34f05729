"""This module takes an answer's body in piece by piece: bounded in size, unpacked as it arrives, refused at once when
too large.

What is packed is never there as a whole: a small answer that unpacks to a large one costs what is let through, and one
piece.
"""

from __future__ import annotations

import zlib

from podgpu.errors import SourceError

_STEP = 256 * 1024
"""Unpacked at a time: what a piece of zeros grows to is looked at this often."""
_MOST_MEMBERS = 16
"""Of a compressed answer: what is left is copied for each, and a small answer may have a million of them."""
_GZIP_OR_ZLIB = 47
"""zlib's word for: as the header says."""


class Received:
    """The bytes so far. `shown` is who sends them, for messages."""

    def __init__(self, shown: str, largest: int, encoding: str = "") -> None:
        """`encoding`: of the header Content-Encoding. Raises SourceError for one that was not asked for."""
        if encoding not in ("", "identity", "gzip", "x-gzip", "deflate"):
            raise SourceError("not_prometheus", f"{shown} answers in {encoding!r}, which it was not asked for")
        self._shown = shown
        self._largest = largest
        self._is_packed = encoding not in ("", "identity")
        self._unpacker = zlib.decompressobj(_GZIP_OR_ZLIB)
        self._members = 0
        self._pieces: list[bytes] = []
        self._size = 0
        self._has_begun = False

    def expect(self, size: int) -> None:
        """The sender says how much will come."""
        if size > self._largest:
            raise self._too_large()

    def take(self, piece: bytes) -> None:
        """Raises SourceError: too_large, malformed."""
        self._has_begun = True
        if self._is_packed:
            self._unpack(piece)
        else:
            self._keep(piece)

    def whole(self) -> bytes:
        """Everything, once the sender is done. Raises SourceError when it is not all there."""
        if self._is_packed and self._has_begun and not self._unpacker.eof:
            raise self._malformed("ends too early")
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    def _unpack(self, piece: bytes) -> None:
        is_full = False
        while piece or is_full:
            if self._unpacker.eof:  # gzip may come in several members, and one of two is half an exposition
                self._begin_member()
            try:
                plain = self._unpacker.decompress(piece, _STEP)
            except zlib.error as error:
                raise self._malformed(f"is broken ({error})") from error
            self._keep(plain)
            piece = self._unpacker.unused_data if self._unpacker.eof else self._unpacker.unconsumed_tail
            is_full = len(plain) == _STEP and not self._unpacker.eof

    def _begin_member(self) -> None:
        self._members += 1
        if self._members >= _MOST_MEMBERS:
            raise self._malformed("is in too many pieces")
        self._unpacker = zlib.decompressobj(_GZIP_OR_ZLIB)

    def _keep(self, plain: bytes) -> None:
        self._size += len(plain)
        if self._size > self._largest:
            raise self._too_large()
        if plain:
            self._pieces.append(plain)

    def _malformed(self, why: str) -> SourceError:
        return SourceError("malformed", f"{self._shown}: the compressed answer {why}")

    def _too_large(self) -> SourceError:
        return SourceError(
            "too_large",
            f"{self._shown} answers with more than {self._largest} bytes: see that it is the right place to ask",
        )
