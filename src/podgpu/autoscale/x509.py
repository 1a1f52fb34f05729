"""This module makes certificates without anybody's help: an authority on the curve P-256 and what it signs, as PEM.
Pure, but for the random numbers it is given.

For podgpu's own listener alone, behind an APIService that is told the authority. A key signs twice in its life, both
times a certificate that nobody else chose: how long that takes tells nobody anything.
"""

from __future__ import annotations

import base64
import hashlib
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import cache
from ipaddress import ip_address
from typing import NamedTuple

_P = 0xFFFFFFFF00000001000000000000000000000000FFFFFFFFFFFFFFFFFFFFFFFF
_N = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_G = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
Point = tuple[int, int]
RandomBelow = Callable[[int], int]
"""A number from 0 to below that, which nobody can foresee (`secrets.randbelow`)."""


# The curve


def _add(a: Point | None, b: Point | None) -> Point | None:
    """None is the point at infinity."""
    if a is None or b is None:
        return a or b
    if a[0] == b[0]:
        if (a[1] + b[1]) % _P == 0:
            return None
        slope = (3 * a[0] * a[0] - 3) * pow(2 * a[1], -1, _P)
    else:
        slope = (b[1] - a[1]) * pow(b[0] - a[0], -1, _P)
    x = (slope * slope - a[0] - b[0]) % _P
    return x, (slope * (a[0] - x) - a[1]) % _P


@cache
def _doublings() -> list[Point | None]:
    """The base point times 1, 2, 4, and so on: keys and signatures are sums of some of them."""
    points: list[Point | None] = [_G]
    while len(points) < _N.bit_length():
        points.append(_add(points[-1], points[-1]))
    return points


def _times(factor: int) -> Point:
    """The base point, so many times."""
    found: Point | None = None
    for place, point in enumerate(_doublings()):
        if factor >> place & 1:
            found = _add(found, point)
    assert found is not None, "only 0 leads to infinity"
    return found


class Key(NamedTuple):
    number: int
    point: Point

    @classmethod
    def made(cls, random_below: RandomBelow) -> Key:
        number = 1 + random_below(_N - 1)
        return cls(number, _times(number))

    @property
    def public(self) -> bytes:
        return b"\x04" + self.point[0].to_bytes(32, "big") + self.point[1].to_bytes(32, "big")

    def sign(self, message: bytes, random_below: RandomBelow) -> bytes:
        """ECDSA over SHA-256, as DER."""
        digest = int.from_bytes(hashlib.sha256(message).digest(), "big")
        while True:
            once = 1 + random_below(_N - 1)
            r = _times(once)[0] % _N
            s = pow(once, -1, _N) * (digest + r * self.number) % _N
            if r and s:
                return _sequence(_integer(r), _integer(s))

    def pem(self) -> str:
        point = _tlv(0xA1, _bits(self.public))
        number = _tlv(0x04, self.number.to_bytes(32, "big"))
        return _pem("EC PRIVATE KEY", _sequence(_integer(1), number, _tlv(0xA0, _oid("1.2.840.10045.3.1.7")), point))


# DER


def _tlv(tag: int, content: bytes) -> bytes:
    size = len(content)
    if size < 0x80:
        return bytes((tag, size)) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes((tag, 0x80 | len(length))) + length + content


def _sequence(*parts: bytes) -> bytes:
    return _tlv(0x30, b"".join(parts))


def _integer(value: int) -> bytes:
    return _tlv(0x02, value.to_bytes(value.bit_length() // 8 + 1, "big"))


def _bits(content: bytes, unused: int = 0) -> bytes:
    return _tlv(0x03, bytes((unused,)) + content)


def _oid(dotted: str) -> bytes:
    first, second, *rest = (int(number) for number in dotted.split("."))
    content = bytearray()
    for number in (40 * first + second, *rest):
        groups = [number & 0x7F]
        while number := number >> 7:
            groups.append(0x80 | number & 0x7F)
        content += bytes(reversed(groups))
    return _tlv(0x06, bytes(content))


def _time(at: float) -> bytes:
    moment = datetime.fromtimestamp(int(at), UTC)
    if moment.year < 2050:
        return _tlv(0x17, moment.strftime("%y%m%d%H%M%SZ").encode())
    return _tlv(0x18, moment.strftime("%Y%m%d%H%M%SZ").encode())


def _pem(kind: str, der: bytes) -> str:
    body = "\n".join(textwrap.wrap(base64.b64encode(der).decode(), 64))
    return f"-----BEGIN {kind}-----\n{body}\n-----END {kind}-----\n"


# Certificates

_ECDSA_SHA256 = _sequence(_oid("1.2.840.10045.4.3.2"))
_EC_KEY = _sequence(_oid("1.2.840.10045.2.1"), _oid("1.2.840.10045.3.1.7"))


class Issued(NamedTuple):
    """An authority, and the one certificate that it has signed."""

    authority: str
    certificate: str
    key: str
    begins: float
    ends: float
    """Unix time, of both."""


def issue(
    names: Sequence[str], begins: float, ends: float, random_below: RandomBelow, maker: str = "podgpu autoscale"
) -> Issued:
    """`names`: what the listener is called, the first for people too; addresses among them are taken as such. `maker`:
    what the authority's name begins with."""
    authority, own = Key.made(random_below), Key.made(random_below)
    issuer = _name(f"{maker} {random_below(1 << 64):016x}")
    validity = _sequence(_time(begins), _time(ends))
    known_by = _sequence(_tlv(0x80, _fingerprint(authority)))
    ca = _certificate(
        issuer,
        issuer,
        validity,
        authority,
        authority,
        (
            _extension("2.5.29.19", _sequence(_tlv(0x01, b"\xff")), critical=True),
            _extension("2.5.29.15", _bits(b"\x04", 2), critical=True),  # signs certificates
            _extension("2.5.29.14", _tlv(0x04, _fingerprint(authority))),
        ),
        random_below,
    )
    leaf = _certificate(
        _name(names[0]),
        issuer,
        validity,
        own,
        authority,
        (
            _extension("2.5.29.19", _sequence(), critical=True),
            _extension("2.5.29.15", _bits(b"\x80", 7), critical=True),  # signs handshakes
            _extension("2.5.29.37", _sequence(_oid("1.3.6.1.5.5.7.3.1"))),  # of a server
            _extension("2.5.29.17", _sequence(*map(_alternative, names))),
            _extension("2.5.29.35", known_by),
        ),
        random_below,
    )
    return Issued(_pem("CERTIFICATE", ca), _pem("CERTIFICATE", leaf), own.pem(), begins, ends)


def _certificate(
    subject: bytes,
    issuer: bytes,
    validity: bytes,
    key: Key,
    signer: Key,
    extensions: Iterable[bytes],
    random_below: RandomBelow,
) -> bytes:
    body = _sequence(
        _tlv(0xA0, _integer(2)),
        _integer(1 + random_below(1 << 120)),
        _ECDSA_SHA256,
        issuer,
        validity,
        subject,
        _sequence(_EC_KEY, _bits(key.public)),
        _tlv(0xA3, _sequence(*extensions)),
    )
    return _sequence(body, _ECDSA_SHA256, _bits(signer.sign(body, random_below)))


def _name(common: str) -> bytes:
    return _sequence(_tlv(0x31, _sequence(_oid("2.5.4.3"), _tlv(0x0C, common[:64].encode()))))


def _extension(dotted: str, content: bytes, *, critical: bool = False) -> bytes:
    return _sequence(_oid(dotted), *((_tlv(0x01, b"\xff"),) if critical else ()), _tlv(0x04, content))


def _alternative(name: str) -> bytes:
    try:
        return _tlv(0x87, ip_address(name).packed)
    except ValueError:
        return _tlv(0x82, name.encode("ascii", "ignore"))


def _fingerprint(key: Key) -> bytes:
    return hashlib.sha256(key.public).digest()[:20]


# Reading a bundle

_BLOCK = re.compile(r"-----BEGIN CERTIFICATE-----\s([A-Za-z0-9+/=\s]+?)-----END CERTIFICATE-----")


def certificates_in(bundle: str) -> list[bytes]:
    """The certificates of a PEM text, as DER; what is none is passed over."""
    found = []
    for block in _BLOCK.findall(bundle):
        try:
            found.append(base64.b64decode("".join(block.split()), validate=True))
        except ValueError:
            continue
    return found


def pem_of(certificate: bytes) -> str:
    return _pem("CERTIFICATE", certificate)


def parse_validity(certificate: bytes) -> tuple[float, float] | None:
    """From when until when it is valid, as Unix time; None: it is no certificate."""
    try:
        body, _ = _content(certificate, 0, 0x30)
        to_be_signed, _ = _content(body, 0, 0x30)
        at = _skip(to_be_signed, 0) if to_be_signed[:1] == b"\xa0" else 0
        for _ in ("serial number", "algorithm", "issuer"):
            at = _skip(to_be_signed, at)
        validity, _ = _content(to_be_signed, at, 0x30)
        second = _skip(validity, 0)
        return _moment(validity, 0), _moment(validity, second)
    except (ValueError, IndexError):
        return None


def _content(der: bytes, at: int, tag: int) -> tuple[bytes, int]:
    begin, end = _bounds(der, at)
    if der[at] != tag:
        raise ValueError("another kind of value")
    return der[begin:end], end


def _skip(der: bytes, at: int) -> int:
    return _bounds(der, at)[1]


def _bounds(der: bytes, at: int) -> tuple[int, int]:
    size, begin = der[at + 1], at + 2
    if size & 0x80:
        begin += size & 0x7F
        if size & 0x7F > 4:
            raise ValueError("too long")
        size = int.from_bytes(der[at + 2 : begin], "big")
    if begin + size > len(der):
        raise ValueError("cut short")
    return begin, begin + size


def _moment(der: bytes, at: int) -> float:
    begin, end = _bounds(der, at)
    text = der[begin:end].decode("ascii")
    if der[at] == 0x17:
        text = ("19" if text[:2] >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
