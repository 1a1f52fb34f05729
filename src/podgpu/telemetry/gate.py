"""A library is not pulled away under a call: those who use it are counted in, and closing waits until all are out."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from podgpu.errors import DriverGone


class Gate:
    def __init__(self, what: str) -> None:
        self._what = what
        """What is behind it, in words."""
        self._idle = threading.Condition()
        self._inside = 0
        self._open = False

    @property
    def is_open(self) -> bool:
        return self._open

    def open(self) -> None:
        self._open = True

    def shut(self, wait: float) -> bool:
        """Nobody new comes in; True once nobody is inside. In time or not at all: else it is open again, and False."""
        with self._idle:
            self._open = False
            if self._idle.wait_for(lambda: self._inside == 0, wait):
                return True
            self._open = True
            return False

    @contextmanager
    def passed(self) -> Iterator[None]:
        """Around every group of calls. Raises DriverGone while the gate is shut."""
        with self._idle:
            if not self._open:
                raise DriverGone(f"podgpu has let go of {self._what}", "released")
            self._inside += 1
        try:
            yield
        finally:
            with self._idle:
                self._inside -= 1
                self._idle.notify_all()
