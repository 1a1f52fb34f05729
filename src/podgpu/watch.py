"""Runs a computation again and again, in a thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from podgpu.errors import StartError

_STOP_SECONDS = 2.0
_log = logging.getLogger(__name__)


class Watch:
    """A service. A subclass defines `update`. `pause`: seconds until the next one."""

    name = "watch"  # of the thread

    def __init__(self) -> None:
        self.fatal: StartError | None = None
        self.pause = 60.0
        self._wake = threading.Event()
        self._is_stopping = False
        self._thread: threading.Thread | None = None

    def update(self) -> None:
        raise NotImplementedError

    def start(self, on_fatal: Callable[[], object]) -> None:
        del on_fatal  # unused, because podgpu continues without the result
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_stopping:
            try:
                self.update()
            except Exception:  # noqa: BLE001 - outermost frame of a thread; podgpu continues
                _log.exception("unexpected error while computing %s; please report it", self.name)
            self._wake.wait(self.pause)
            self._wake.clear()

    def reload(self) -> None:
        """Updates now (SIGHUP)."""
        self._wake.set()

    def stop(self) -> None:
        self._is_stopping = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_STOP_SECONDS)
