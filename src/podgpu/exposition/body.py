"""A response body, ready in both encodings that are asked for. Pure."""

from __future__ import annotations

import gzip
from dataclasses import dataclass

_GZIP_LEVEL = 1  # label text repeats: level 1 already gives 20:1, and this runs in every tick


@dataclass(frozen=True, slots=True)
class Body:
    """A response body in both encodings."""

    plain: bytes
    zipped: bytes

    @classmethod
    def of(cls, plain: bytes) -> Body:
        return cls(plain, gzip.compress(plain, _GZIP_LEVEL, mtime=0))


EMPTY = Body.of(b"")
