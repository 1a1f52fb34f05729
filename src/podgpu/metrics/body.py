"""This module keeps response bodies ready in both encodings, and metrics in both formats that are asked for. Pure."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from hashlib import blake2b

from podgpu.metrics.text import to_openmetrics

_GZIP_LEVEL = 1  # label text repeats: level 1 already gives 20:1, and whoever asks first waits for it


@dataclass(frozen=True, slots=True)
class Body:
    """A response body in both encodings."""

    plain: bytes
    zipped: bytes

    @classmethod
    def of(cls, plain: bytes) -> Body:
        return cls(plain, gzip.compress(plain, _GZIP_LEVEL, mtime=0))


class Exposition:
    """Metrics as text. Their OpenMetrics form is made when it is first asked for, and kept."""

    __slots__ = ("openmetrics_if_made", "text")

    def __init__(self, text: Body) -> None:
        self.text = text
        self.openmetrics_if_made: Body | None = None

    @classmethod
    def of(cls, text: bytes) -> Exposition:
        return cls(Body.of(text))

    def openmetrics(self) -> Body:
        """Two threads that ask at once may both make it: it is the same."""
        if self.openmetrics_if_made is None:
            self.openmetrics_if_made = Body.of(to_openmetrics(self.text.plain))
        return self.openmetrics_if_made

    @property
    def plain(self) -> bytes:
        return self.text.plain

    @property
    def zipped(self) -> bytes:
        return self.text.zipped


NO_METRICS = Exposition.of(b"")


def etag_of(plain: bytes) -> str:
    """Weak, because it stands for both encodings."""
    return f'W/"{blake2b(plain, digest_size=12).hexdigest()}"'
