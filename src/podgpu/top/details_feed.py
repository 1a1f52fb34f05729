"""Asks the server for all it knows of the GPU somebody looks at, in a thread: the screen never waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from podgpu.errors import SourceError
from podgpu.top.api_answers import GpuFacts
from podgpu.top.details import More

REFRESH_SECONDS = 5.0


class AsksGpu(Protocol):
    def gpu(self, uuid: str) -> GpuFacts:
        """Raises SourceError; bounded in time."""


class DetailsFeed:
    """One question at a time, about the GPU that was looked at last. What an earlier one had is forgotten."""

    def __init__(self, notify: Callable[[], object], clock: Callable[[], float] = time.monotonic) -> None:
        """`notify` is called from a thread when there is an answer."""
        self._notify = notify
        self._clock = clock
        self._lock = threading.Lock()
        self._uuid = ""
        self._more = More()
        self._asked_at = float("-inf")
        self._asking = False

    def look_at(self, uuid: str, api: AsksGpu | None) -> More | None:
        """What is known by now; asks anew where that is nothing, or old. None: nobody can be asked."""
        if api is None:
            return None
        with self._lock:
            if uuid != self._uuid:
                self._uuid, self._more, self._asked_at = uuid, More(), float("-inf")
            if not self._asking and self._clock() >= self._asked_at + REFRESH_SECONDS:
                self._asking, self._asked_at = True, self._clock()
                threading.Thread(target=self._ask, args=(uuid, api), name="top-details", daemon=True).start()
            return self._more

    def _ask(self, uuid: str, api: AsksGpu) -> None:
        more = More(error="the question could not be asked")
        try:
            more = More(api.gpu(uuid))
        except SourceError as error:
            knows_no_more = error.reason == "http_404"
            more = More(GpuFacts()) if knows_no_more else More(error=str(error))
        finally:
            with self._lock:
                self._asking = False
                if uuid == self._uuid:  # what was known stays, with the reason why there is nothing newer
                    self._more = more if more.facts else replace(more, facts=self._more.facts)
            self._notify()
