"""Makes the simulated clock wait for the agent's calls.

The clock runs up to 100 times as fast as real time. On a busy machine, a call that is late for one
real second would otherwise be late for 100 simulated seconds, and the metrics would miss GPUs and
holders that are healthy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

_POLL_SECONDS = 0.001
_OPENING = "open-gpu"
"""Start of the names of the threads in which the driver's GPUs are opened."""


class Calls:
    """The calls that are in progress in the agent's workers."""

    def __init__(self, find_hung_threads: Callable[[], set[int]]) -> None:
        """`find_hung_threads`: function that returns the ids of the threads in which a simulated
        call hangs.
        """
        self._find_hung_threads = find_hung_threads
        self._threads: set[int] = set()

    def track(self, source: object, *methods: str) -> None:
        """Tracks all later calls of these methods."""
        for name in methods:
            setattr(source, name, self._tracked(getattr(source, name)))

    def finish(self) -> bool:
        """Waits until every call has ended, except calls that hang. Returns False if all had ended
        before.
        """
        is_late = False
        while self._are_running():
            is_late = True
            time.sleep(_POLL_SECONDS)
        return is_late

    def _are_running(self) -> bool:
        is_opening = any(thread.name.startswith(_OPENING) for thread in threading.enumerate())
        return is_opening or bool(self._threads.copy() - self._find_hung_threads())

    def _tracked(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*arguments: Any) -> Any:
            thread = threading.get_ident()  # a worker runs one call at a time
            self._threads.add(thread)
            try:
                return method(*arguments)
            finally:
                self._threads.discard(thread)

        return call
