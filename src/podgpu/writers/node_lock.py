"""Lets only one of the exporters of a node write, with a lock on a directory of the node.

The kernel releases the lock when its process ends. So a new exporter takes over at once, and
nothing is left behind.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass


@dataclass(eq=False)
class NodeLock:
    """`directory`: a directory that all exporters of the node see. It may be read-only."""

    directory: str
    problem: str = ""  # why the lock cannot be taken, other than that another exporter has it
    _descriptor: int | None = None

    def acquire(self) -> bool:
        """Returns whether this process has the lock. Does not wait."""
        if self._descriptor is not None:
            return True

        self.problem = ""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            descriptor = os.open(self.directory, flags)
        except OSError as error:
            self.problem = f"cannot open {self.directory}: {error.strerror}"
            return False

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Another exporter has the lock, which is no problem.
            os.close(descriptor)
            return False
        except OSError as error:
            self.problem = f"cannot lock {self.directory}: {error.strerror}"
            os.close(descriptor)
            return False

        self._descriptor = descriptor
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
