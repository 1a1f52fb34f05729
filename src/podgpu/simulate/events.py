"""This module simulates NVML's event sets: who registered for what, and what has happened since. XIDs are the only
events that occur."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pynvml

from podgpu.simulate.gpu import SimulatedGpu
from podgpu.simulate.machine import Machine, address_in, pointer_to

NO_INSTANCE = 0xFFFFFFFF
_LONGEST_WAIT = 0.025


@dataclass(slots=True)
class EventSet:
    registered: dict[int, int] = field(default_factory=dict)
    """GPU number -> mask of event types."""
    waiting: deque[Any] = field(default_factory=deque)


class EventSets:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._sets: dict[int, EventSet] = {}

    def create(self) -> Any:
        address = self._machine.new_address()
        self._sets[address] = EventSet()
        return pointer_to(address, pynvml.c_nvmlEventSet_t)

    def free(self, event_set: Any) -> None:
        self._find(event_set)
        del self._sets[address_in(event_set)]
        self._machine.changed.notify_all()

    def register(self, gpu: SimulatedGpu, types: int, event_set: Any) -> None:
        found = self._find(event_set)
        found.registered[gpu.number] = found.registered.get(gpu.number, 0) | types

    def take(self, event_set: Any) -> Any:
        """The oldest event, None when there is none."""
        waiting = self._find(event_set).waiting
        return waiting.popleft() if waiting else None

    def wait(self, event_set: Any, timeout_ms: int, still_open: Callable[[], None]) -> Any:
        """The oldest event, waiting for one as long as told; `still_open` raises once the session is over.

        The wait is in real time, as an injected clock would never let it end; and short, as whoever lets go of the
        driver waits for it.
        """
        deadline = time.monotonic() + min(timeout_ms / 1000, _LONGEST_WAIT)
        with self._machine.changed:
            while True:
                still_open()
                event = self.take(event_set)
                if event is not None:
                    return event
                left = deadline - time.monotonic()
                if left <= 0:
                    raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
                self._machine.changed.wait(left)

    def raise_xid(self, gpu: SimulatedGpu, xid: int, gi_id: int | None) -> None:
        with self._machine.changed:
            for event_set in self._sets.values():
                if event_set.registered.get(gpu.number, 0) & pynvml.nvmlEventTypeXidCriticalError:
                    event_set.waiting.append(self._event(gpu, xid, gi_id))
            self._machine.changed.notify_all()

    def forget(self) -> None:
        """The driver is gone and every event set with it."""
        self._sets.clear()

    def _event(self, gpu: SimulatedGpu, xid: int, gi_id: int | None) -> Any:
        event = pynvml.c_nvmlEventData_t()
        event.device = pointer_to(self._machine.address_of(gpu), pynvml.c_nvmlDevice_t)
        event.eventType = pynvml.nvmlEventTypeXidCriticalError
        event.eventData = xid
        event.gpuInstanceId = NO_INSTANCE if gi_id is None else gi_id
        event.computeInstanceId = NO_INSTANCE if gi_id is None else 0
        return event

    def _find(self, event_set: Any) -> EventSet:
        found = self._sets.get(address_in(event_set))
        if found is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return found
