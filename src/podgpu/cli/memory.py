"""Keeps the exporter small: glibc gives every thread a heap of its own, about 2 MiB with a thread for each GPU."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_M_ARENA_MAX = -8


def share_one_heap() -> None:
    """Before any thread begins. Where the C library is another one there is nothing to do."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
