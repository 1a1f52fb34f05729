"""Keeps podgpu small and even: how its C library and Python manage memory."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

_M_ARENA_MAX = -8
_NEW_OBJECTS = 100_000


def share_one_heap() -> None:
    """Before any thread begins: glibc gives every thread a heap of its own, about 2 MiB with a thread for each GPU.

    Where the C library is another one there is nothing to do.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def look_for_cycles_seldom() -> None:
    """A round over thousands of GPUs makes objects by the hundred thousand, none in a cycle; looking for cycles after
    every 700 of them, as Python does, takes a third of the round."""
    gc.set_threshold(_NEW_OBJECTS, 20, 100)
