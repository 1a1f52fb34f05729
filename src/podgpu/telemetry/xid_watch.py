"""XID errors from NVML's event set, in a thread of their own: the only thing NVML tells without being asked."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from podgpu.catalog.xids import xid_text
from podgpu.errors import DriverGone, SourceError, Unsupported
from podgpu.telemetry.driver import NvmlDriver
from podgpu.telemetry.source import XidEvent

_log = logging.getLogger(__name__)
_WAIT_MS = 250
_NO_INSTANCE = 0xFFFFFFFF


class XidWatch:
    def __init__(self, driver: NvmlDriver, wall: Callable[[], float]) -> None:
        self._driver = driver
        self._wall = wall
        self._stop = threading.Event()
        self._uuids: dict[int | None, str] = {}
        self._lock = threading.Lock()
        self._events: list[XidEvent] = []

    def start(self, handles: Mapping[str, Any]) -> None:
        """Watch these GPUs, by UUID. A GPU that cannot tell XIDs is left out; the others are watched."""
        self.stop()
        self._stop = threading.Event()
        self._uuids = {_address(handle): uuid for uuid, handle in handles.items()}
        arguments = (list(handles.values()), self._stop)
        threading.Thread(target=self._run, args=arguments, name="xid-watch", daemon=True).start()

    def stop(self) -> None:
        """The thread ends within one wait; it holds the driver's `using`, so a shutdown waits for it."""
        self._stop.set()

    def drain(self) -> list[XidEvent]:
        with self._lock:
            events, self._events = self._events, []
        return events

    def _run(self, handles: list[Any], stop: threading.Event) -> None:
        try:
            with self._driver.using():
                event_set = self._register(handles)
            while not stop.is_set():
                self._wait(event_set, stop)
            with self._driver.using():
                self._driver.call("nvmlEventSetFree", event_set)
        except DriverGone:
            _log.debug("xid watch ends: the driver is gone")
        except SourceError as e:
            _log.warning("XID errors cannot be watched on this node: %s", e)

    def _register(self, handles: list[Any]) -> Any:
        event_set = self._driver.call("nvmlEventSetCreate")
        xid = self._driver.constant("nvmlEventTypeXidCriticalError")
        for handle in handles:
            with suppress(Unsupported):
                self._driver.call("nvmlDeviceRegisterEvents", handle, xid, event_set)
        return event_set

    def _wait(self, event_set: Any, stop: threading.Event) -> None:
        try:
            with self._driver.using():
                data = self._driver.call("nvmlEventSetWait_v2", event_set, _WAIT_MS)
                self._note(data)
        except DriverGone:
            raise
        except SourceError as e:
            if e.reason != "timeout":  # a lost GPU makes the wait itself fail: breathe, then go on for the others
                stop.wait(_WAIT_MS / 1000)

    def _note(self, data: Any) -> None:
        uuid = self._uuids.get(_address(data.device), "unknown")  # not asked: a GPU that fell off the bus cannot say
        gi_id = data.gpuInstanceId
        key = uuid if gi_id == _NO_INSTANCE else f"{uuid}/gi{gi_id}"
        event = XidEvent(key, int(data.eventData), self._wall())
        _log.warning("XID %d on %s: %s", event.xid, key, xid_text(event.xid))
        with self._lock:
            self._events.append(event)


def _address(handle: Any) -> int | None:
    """NVML's handles are pointers: two objects for one GPU differ, what they point to does not."""
    return ctypes.cast(handle, ctypes.c_void_p).value
