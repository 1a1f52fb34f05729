"""Keeps podgpu small and even: how its C library and Python manage memory, and how its threads take turns."""

from __future__ import annotations

import ctypes
import gc
import sys
from contextlib import suppress

_M_ARENA_MAX = -8
_NEW_OBJECTS = 20_000
"""Looking at so many takes 2 ms, in which no other thread runs."""
_TURN_SECONDS = 0.0005


def share_one_heap() -> None:
    """Before any thread begins: glibc gives every thread a heap of its own, about 2 MiB with a thread for each GPU.

    Where the C library is another one there is nothing to do.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def look_for_cycles_seldom() -> None:
    """A round over thousands of GPUs makes objects by the hundred thousand, none in a cycle; looking for cycles after
    every 700 of them, as Python does, takes a third of the round."""
    gc.set_threshold(_NEW_OBJECTS, 10, 100)


def take_turns_often() -> None:
    """Beside a thread that reads pages, an answer waits for its turn half a dozen times, 5 ms each as Python has it."""
    sys.setswitchinterval(_TURN_SECONDS)
