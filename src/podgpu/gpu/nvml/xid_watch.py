"""XidWatch waits for XID errors in a thread of its own: the only thing that NVML tells without being asked."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from podgpu.errors import DriverGone, SourceError
from podgpu.gpu.nvml.driver import Grip, NvmlDriver
from podgpu.gpu.nvml.mig import instance_named
from podgpu.gpu.source import ErrorEvent
from podgpu.metrics.conditions import xid_text
from podgpu.model import device_key

_log = logging.getLogger(__name__)
_WAIT_MS = 400
"""Each wait costs 0.17 ms of CPU, an event or not (an H200). Whoever lets go of the driver waits for its end."""
_MOST_WAITING = 100_000
"""Events nobody asked for yet. A storm brings a thousand in a second; past this the newest are only logged."""
SAY_SECONDS = 60.0
"""How often the same XID of the same device is worth a line."""


class XidWatch:
    """Each GPU has itself registered by whoever reads it: one that fails or hangs there is its own affair."""

    def __init__(
        self, driver: NvmlDriver, wall: Callable[[], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._driver = driver
        self._wall = wall
        self._clock = clock
        self._set: Any = None
        """The event set; None: XIDs are not watched."""
        self._uuids: dict[int | None, str] = {}
        self._lock = threading.Lock()
        self._events: list[ErrorEvent] = []
        self._said: dict[tuple[str, int], tuple[float, int]] = {}
        """(device, xid) -> when it was last logged, and how many came since."""

    def start(self) -> None:
        """Begins with a new event set. Whoever opened the driver calls this, from inside `using`."""
        self._uuids = {}
        try:
            self._set = self._driver.call("nvmlEventSetCreate")
        except DriverGone:
            raise
        except SourceError as e:
            _log.warning("XID errors cannot be watched on this node: %s", e)
            return
        threading.Thread(target=self._run, args=(self._set,), name="xid-watch", daemon=True).start()

    def register(self, uuid: str, grip: Grip) -> bool:
        """Watch this GPU too; False: none is watched. Raises SourceError; Unsupported where it cannot tell XIDs."""
        if self._set is None:
            return False
        self._uuids[address_in(grip.handle)] = uuid
        xid = self._driver.constant("nvmlEventTypeXidCriticalError")
        self._driver.call("nvmlDeviceRegisterEvents", grip, xid, self._set)
        return True

    def free(self) -> None:
        """To be called when nobody can be using the driver: the thread ends before its next wait."""
        ended, self._set = self._set, None
        if ended is not None:
            with suppress(SourceError):
                self._driver.call("nvmlEventSetFree", ended)

    def drain(self) -> list[ErrorEvent]:
        with self._lock:
            events, self._events = self._events, []
        return events

    def _run(self, event_set: Any) -> None:
        try:
            while self._wait(event_set):
                pass
        except DriverGone:
            _log.debug("xid watch ends: the driver is gone")

    def _wait(self, event_set: Any) -> bool:
        """False once the set is no more; the driver may have been closed and opened again meanwhile."""
        try:
            with self._driver.using(gives_way=True):
                if event_set is not self._set:
                    return False
                event = self._driver.wait_for_event(event_set, _WAIT_MS)
        except DriverGone:
            raise
        except SourceError:  # a lost GPU makes the wait itself fail: breathe, then go on for the others
            time.sleep(_WAIT_MS / 1000)
            return True
        if event is not None:
            self._note(event)
        return True

    def _note(self, data: Any) -> None:
        uuid = self._uuids.get(address_in(data.device), "unknown")  # not asked: a GPU that fell off the bus cannot say
        key = device_key(uuid, instance_named(data.gpuInstanceId))
        event = ErrorEvent(key, int(data.eventData), self._wall())
        self._say(event)
        with self._lock:
            if len(self._events) < _MOST_WAITING:
                self._events.append(event)

    def _say(self, event: ErrorEvent) -> None:
        """A GPU that is ill may tell the same thousands of times."""
        what, now = (event.device, event.code), self._clock()
        said_at, since = self._said.get(what, (float("-inf"), 0))
        if now - said_at < SAY_SECONDS:
            self._said[what] = (said_at, since + 1)
            return
        self._said[what] = (now, 0)
        more = f" (and {since} times more since it was last logged)" if since else ""
        _log.warning("XID %d on %s: %s%s", event.code, event.device, xid_text(event.code), more)


def address_in(handle: Any) -> int | None:
    """NVML's handles are pointers: two objects for one GPU differ, what they point to does not."""
    return ctypes.cast(handle, ctypes.c_void_p).value
