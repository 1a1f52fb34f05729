"""Reads series off an exposition; small enough to run where nothing but podgpu is installed."""

from __future__ import annotations

import re
from collections.abc import Iterator

_PAIR = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def series(text: str, name: str) -> Iterator[tuple[dict[str, str], float]]:
    for line in text.splitlines():
        if line.startswith((f"{name}{{", f"{name} ")):
            yield dict(_PAIR.findall(line)), float(line.rsplit(" ", 1)[1])
