"""This module owns what can be made to go wrong: calls that hang, fail or lie, GPUs that vanish, drivers that are
reloaded.

Tests and the demo speak to this; the driver asks it before every call.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pynvml

from podgpu.simulate.events import EventSets
from podgpu.simulate.machine import Machine

Subject = str | int
"""A function's name, or the number of a field value."""

_EVERY_GPU = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What to say instead of the truth: a value, or an error code."""

    value: Any = None
    error: int = 0


@dataclass(slots=True)
class Hang:
    function: str
    gpu: int | None
    released: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)
    """Set once a call hangs here, so that a test can wait for it rather than sleep."""

    def release(self) -> None:
        self.released.set()


class Faults:
    """`gpu` is a GPU's number; None means all of them (and calls without a device)."""

    def __init__(self, machine: Machine, events: EventSets) -> None:
        self._machine = machine
        self._events = events
        self._hangs: list[Hang] = []
        self._answers: dict[tuple[Subject, int | None], Answer] = {}
        self.init_error = 0
        self.session_error = 0
        """What calls of sessions opened before the last reload get."""
        self.driver_epoch = 0
        self.processes_hidden = False

    # Calls -----------------------------------------------------------------------------------------------------

    def hang(self, function: str, gpu: int | None = None) -> Hang:
        """Calls of the function block until released."""
        hang = Hang(function, gpu)
        with self._machine.lock:
            self._hangs.append(hang)
        return hang

    def release_all(self) -> None:
        with self._machine.lock:
            hangs, self._hangs = self._hangs, []
        for hang in hangs:
            hang.release()

    def answer(self, subject: Subject, value: Any, gpu: int | None = None) -> None:
        """The function, or the field value of that number, answers `value` whatever the truth is."""
        with self._machine.lock:
            self._answers[subject, gpu] = Answer(value=value)

    def fail(self, subject: Subject, error: int, gpu: int | None = None) -> None:
        """The function raises, or the field value carries, this NVML error code."""
        with self._machine.lock:
            self._answers[subject, gpu] = Answer(error=error)

    def unsupported(self, subject: Subject, gpu: int | None = None) -> None:
        self.fail(subject, pynvml.NVML_ERROR_NOT_SUPPORTED, gpu)

    def clear(self, subject: Subject, gpu: int | None = None) -> None:
        """The truth again."""
        with self._machine.lock:
            self._answers.pop((subject, gpu), None)

    def hide_processes(self, hidden: bool = True) -> None:
        """As in a PID namespace of one's own: process lists are empty, process utilisation is not."""
        self.processes_hidden = hidden

    # GPUs ------------------------------------------------------------------------------------------------------

    def lose(self, gpu: int, *, enumerated: bool = True) -> None:
        """Falls off the bus; with `enumerated` false it is not even counted any more."""
        with self._machine.lock:
            lost = self._machine.gpu(gpu)
            lost.lost, lost.enumerated = True, enumerated

    def recover(self, gpu: int) -> None:
        with self._machine.lock:
            lost = self._machine.gpu(gpu)
            lost.lost, lost.enumerated = False, True

    def add_gpu(self, spec: str) -> list[int]:
        return self._machine.add(spec)

    def remove_gpu(self, gpu: int) -> None:
        self._machine.unplug(gpu)

    def reset(self, gpu: int) -> None:
        """Counters start again, nothing runs, old handles are stale; a lost GPU is back."""
        self._machine.reset(gpu)

    def relayout(self, gpu: int, profiles: Sequence[str] | None) -> list[str]:
        """Another MIG layout, or None for MIG off; the new MIG devices' UUIDs."""
        return self._machine.relayout(gpu, profiles)

    def cut_link(self, gpu: int, link: int) -> None:
        """One of its NVLinks goes down, until the GPU is reset."""
        with self._machine.lock:
            self._machine.gpu(gpu).links_down.add(link)

    def raise_xid(self, gpu: int, xid: int, gi_id: int | None = None) -> None:
        self._events.raise_xid(self._machine.gpu(gpu), xid, gi_id)

    # Driver ----------------------------------------------------------------------------------------------------

    def unload_driver(self) -> None:
        self._take_driver_away(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    def remove_library(self) -> None:
        self._take_driver_away(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    def mismatch_versions(self) -> None:
        """The driver was upgraded under a library of the older version."""
        self._take_driver_away(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    def load_driver(self) -> None:
        self.init_error = 0

    def reload_driver(self, error: int = pynvml.NVML_ERROR_UNKNOWN) -> None:
        """All handles are stale and open sessions get `error` until they are shut down and opened again."""
        with self._machine.lock:
            self.driver_epoch += 1
            self.session_error = error
            self._machine.forget_handles()
            self._events.forget()
            self._machine.changed.notify_all()

    def _take_driver_away(self, error: int) -> None:
        self.init_error = error
        self.reload_driver()

    # Asked by the driver ---------------------------------------------------------------------------------------

    def wait_out(self, function: str, gpu: int | None) -> None:
        """Blocks while a hang matches. The lock is not held."""
        if not self._hangs:
            return
        for hang in list(self._hangs):
            if hang.function == function and hang.gpu in (_EVERY_GPU, gpu):
                hang.entered.set()
                hang.released.wait()

    def answer_for(self, subject: Subject, gpu: int | None) -> Answer | None:
        if not self._answers:
            return None
        return self._answers.get((subject, gpu)) or self._answers.get((subject, _EVERY_GPU))
