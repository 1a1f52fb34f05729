"""Gate keeps a library from being pulled away under a call: it counts who is inside, and shuts when all are out."""

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
        self._wanted = 0
        """How many wait for everyone to be out."""

    @property
    def is_open(self) -> bool:
        return self._open

    def open(self) -> None:
        self._open = True

    def shut(self, wait: float) -> bool:
        """Shuts it at the first moment when nobody is inside; False, and still open, when there is none in time.

        It stays open until then: one call that hangs would otherwise keep everybody else out for as long.
        """
        with self._idle:
            self._wanted += 1
            try:
                if not self._idle.wait_for(lambda: self._inside == 0, wait):
                    return False
                self._open = False
                return True
            finally:
                self._wanted -= 1
                self._idle.notify_all()

    @contextmanager
    def passed(self, gives_way: bool = False) -> Iterator[None]:
        """Around every group of calls. Raises DriverGone while the gate is shut.

        Who comes again at once, and would never leave a moment when nobody is inside, `gives_way` to who wants to shut.
        """
        with self._idle:
            if gives_way:
                self._idle.wait_for(lambda: not self._wanted)
            if not self._open:
                raise DriverGone(f"podgpu has let go of {self._what}", "released")
            self._inside += 1
        try:
            yield
        finally:
            with self._idle:
                self._inside -= 1
                self._idle.notify_all()
