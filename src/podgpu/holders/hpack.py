"""This module decodes whatever header blocks of HTTP/2 (RFC 7541) a peer may send, and encodes the few headers of our
requests."""

from __future__ import annotations

from collections.abc import Iterable

MOST_BYTES = 64 * 1024
"""Of decoded headers: no kubelet comes near it."""
_TABLE_BYTES = 4096
_ENTRY_BYTES = 32
_STATIC_TEXT = (
    ":authority|:method=GET|:method=POST|:path=/|:path=/index.html|:scheme=http|:scheme=https|:status=200"
    "|:status=204|:status=206|:status=304|:status=400|:status=404|:status=500|accept-charset"
    "|accept-encoding=gzip, deflate|accept-language|accept-ranges|accept|access-control-allow-origin|age|allow"
    "|authorization|cache-control|content-disposition|content-encoding|content-language|content-length"
    "|content-location|content-range|content-type|cookie|date|etag|expect|expires|from|host|if-match"
    "|if-modified-since|if-none-match|if-range|if-unmodified-since|last-modified|link|location|max-forwards"
    "|proxy-authenticate|proxy-authorization|range|referer|refresh|retry-after|server|set-cookie"
    "|strict-transport-security|transfer-encoding|user-agent|vary|via|www-authenticate"
)
_STATIC = tuple((name, value) for name, _, value in (pair.partition("=") for pair in _STATIC_TEXT.split("|")))
_CODE_LENGTHS = (
    "13 23 28 28 28 28 28 28 28 24 30 28 28 30 28 28 28 28 28 28 28 28 30 28 28 28 28 28 28 28 28 28 6 10 10 12 13 "
    "6 8 11 10 10 8 11 8 6 6 6 5 5 5 6 6 6 6 6 6 6 7 8 15 6 12 10 13 6 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 7 "
    "8 7 8 13 19 13 14 6 15 5 6 5 6 5 6 6 6 5 7 7 6 6 6 5 6 7 6 5 5 6 7 7 7 7 7 15 11 14 13 28 20 22 20 20 22 22 22 "
    "23 22 23 23 23 23 23 24 23 24 24 22 23 24 23 23 23 23 21 22 23 22 23 23 24 22 21 20 22 22 23 23 21 23 22 22 24 "
    "21 22 23 23 21 21 22 21 23 22 23 23 20 22 22 22 23 22 22 23 26 26 20 19 22 23 22 25 26 26 26 27 27 26 24 25 19 "
    "21 26 27 27 26 27 24 21 21 26 26 28 27 27 27 20 24 20 21 22 21 21 23 22 22 25 25 24 24 26 23 26 27 26 26 27 27 "
    "27 27 27 28 27 27 27 27 27 26 30 "
)
"""Of Huffman's code, in bits by byte, the end mark last. The code is canonical: lengths are all there is to it."""
_LONGEST_PADDING = 7

Header = tuple[str, str]


class BadHeaders(ValueError):
    """A block that no encoder writes."""


def encode_headers(headers: Iterable[Header]) -> bytes:
    """As literals, which no table remembers."""
    return b"".join(b"\x00" + _encode_text(name) + _encode_text(value) for name, value in headers)


def _encode_text(text: str) -> bytes:
    data = text.encode("ascii")
    if len(data) < 127:
        return bytes((len(data),)) + data
    rest, length = len(data) - 127, b"\x7f"
    while rest >= 128:
        rest, length = rest >> 7, length + bytes((rest & 127 | 128,))
    return length + bytes((rest,)) + data


class HeaderDecoder:
    """Of one connection: later blocks refer to headers of earlier ones."""

    def __init__(self) -> None:
        self._table: list[Header] = []
        """The newest first."""
        self._most = _TABLE_BYTES

    def decode(self, block: bytes) -> list[Header]:
        """Raises BadHeaders."""
        try:
            return self._decode(_Reader(block))
        except (IndexError, UnicodeDecodeError) as e:
            raise BadHeaders(f"a header block of {len(block)} bytes does not decode: {e}") from e

    def _decode(self, reader: _Reader) -> list[Header]:
        found: list[Header] = []
        while reader.has_more:
            first = reader.peek()
            if first & 0x80:
                found.append(self._entry(reader.number(7)))
            elif first & 0xE0 == 0x20:
                self._resize(reader.number(5))
            else:
                remembered = bool(first & 0x40)
                index = reader.number(6 if remembered else 4)
                header = self._entry(index)[0] if index else reader.text(), reader.text()
                found.append(header)
                if remembered:
                    self._table.insert(0, header)
                    self._evict()
        if sum(map(_size, found)) > MOST_BYTES:
            raise BadHeaders(f"more than {MOST_BYTES} bytes of headers")
        return found

    def _entry(self, index: int) -> Header:
        if not 0 < index <= len(_STATIC) + len(self._table):
            raise BadHeaders(f"no header has the number {index}")
        name, value = _STATIC[index - 1] if index <= len(_STATIC) else self._table[index - len(_STATIC) - 1]
        return name, value

    def _resize(self, most: int) -> None:
        if most > _TABLE_BYTES:
            raise BadHeaders(f"a table of {most} bytes, where {_TABLE_BYTES} were offered")
        self._most = most
        self._evict()

    def _evict(self) -> None:
        while self._table and sum(map(_size, self._table)) > self._most:
            self._table.pop()


def _size(header: Header) -> int:
    return len(header[0]) + len(header[1]) + _ENTRY_BYTES


class _Reader:
    def __init__(self, block: bytes) -> None:
        self._block = block
        self._at = 0

    @property
    def has_more(self) -> bool:
        return self._at < len(self._block)

    def peek(self) -> int:
        return self._block[self._at]

    def number(self, bits: int) -> int:
        most = (1 << bits) - 1
        value = self._next() & most
        if value < most:
            return value
        for shift in range(0, 28, 7):
            byte = self._next()
            value += (byte & 127) << shift
            if not byte & 128:
                return value
        raise BadHeaders("a number of more than 28 bits")

    def _next(self) -> int:
        byte = self._block[self._at]
        self._at += 1
        return byte

    def text(self) -> str:
        coded = bool(self.peek() & 0x80)
        length = self.number(7)
        data = self._block[self._at : self._at + length]
        if len(data) < length:
            raise BadHeaders(f"{length} bytes are announced and {len(data)} are there")
        self._at += length
        return (decode_huffman(data) if coded else data).decode("utf-8", "replace")


def _make_codes() -> dict[tuple[int, int], int]:
    """(length, code) -> byte."""
    codes: dict[tuple[int, int], int] = {}
    code = before = 0
    for length, symbol in sorted((int(text), symbol) for symbol, text in enumerate(_CODE_LENGTHS.split())):
        code <<= length - before
        codes[length, code] = symbol
        code, before = code + 1, length
    return codes


_CODES: dict[tuple[int, int], int] = {}


def decode_huffman(data: bytes) -> bytes:
    """Raises BadHeaders. Few headers a call, so bit by bit will do."""
    if not _CODES:
        _CODES.update(_make_codes())
    found = bytearray()
    length = code = 0
    for byte in data:
        for place in range(7, -1, -1):
            length, code = length + 1, code << 1 | byte >> place & 1
            symbol = _CODES.get((length, code))
            if symbol is not None:
                if symbol > 255:
                    raise BadHeaders("the end mark within a text")
                found.append(symbol)
                length = code = 0
    if length > _LONGEST_PADDING or code != (1 << length) - 1:
        raise BadHeaders("a text that ends within a letter")
    return bytes(found)
