"""SharedBusy decides how the busy time of a shared GPU is divided among its processes, and says by which method.

The driver's samples are the floor: they are always there. The context-switch log is used while processes of several
containers are on the GPU, the log answers, and nothing about it is in doubt; otherwise that window is told by samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from podgpu.telemetry.switches.attribution import Habits, Residency, young_first
from podgpu.telemetry.switches.listener import Listener
from podgpu.telemetry.switches.records import HIDDEN_PID, KERNEL_PID, Doubt

_log = logging.getLogger(__name__)
Method = Literal["samples", "switches", "exact"]
_LINGER_SECONDS = 60.0
"""How long a log is kept open after the GPU is no longer shared: jobs come and go."""
_FIRST_PAUSE_SECONDS = 60.0
_LONGEST_PAUSE_SECONDS = 3600.0
_UNKNOWN_PART = 50
"""Of a window, one part in this many may be unaccounted for (2 %)."""
_HIDDEN_PART = 100
"""And one in this many may belong to processes that are hidden from us, or that no list names."""


@dataclass(frozen=True, slots=True)
class Division:
    """One window's busy time among processes."""

    method: Method
    process_ns: dict[int, int]
    resident_ns: dict[int, int]
    switching_ns: int


class SharedBusy:
    """Of one GPU, or one MIG instance on it; from one worker."""

    def __init__(
        self,
        listen: Callable[[], Listener],
        clock: Callable[[], float],
        name: str,
    ) -> None:
        """`listen` opens the log; it raises Doubt where that cannot be."""
        self._listen = listen
        self._clock = clock
        self._name = name
        self._listener: Listener | None = None
        self._habits: dict[int | None, Habits] = {}
        self._shared_at = float("-inf")
        self._retry_at = float("-inf")
        self._pause = _FIRST_PAUSE_SECONDS
        self.doubts: list[str] = []
        """Reason words of the windows since `begin`."""
        self.doubt: Doubt | None = None
        """Why the log is not used although the GPU is shared."""

    def begin(self, shared: bool) -> None:
        """A new turn; whether processes of several containers are on the GPU now."""
        self.doubts = []
        now = self._clock()
        if shared:
            self._shared_at = now
            if self._listener is None and now >= self._retry_at:
                self._open()
        elif self._listener is not None and now - self._shared_at > _LINGER_SECONDS:
            self.close()
        if not shared:
            self.doubt = None

    def divide(
        self,
        window_ns: int,
        busy_ns: int,
        until: float,
        listed: Collection[int],
        instance: int | None = None,
    ) -> Division | None:
        """None: this window is the samples' to tell. `listed`: pids that the driver lists, now or a turn ago."""
        if self._listener is None:
            return None
        try:
            residency, samples = self._listener.window(until, instance)
            covered = residency.window
            if covered < window_ns - window_ns // _UNKNOWN_PART or not residency.stays:
                return None  # it began to listen in the middle, or has not seen a switch yet
            _check(residency, window_ns, listed)
        except Doubt as e:
            self._fall_back(e)
            return None
        self.doubt = None
        self._pause = _FIRST_PAUSE_SECONDS
        return self._division(residency, samples, busy_ns, instance)

    def skip(self, until: float, instance: int | None = None) -> None:
        """A window that nobody can tell of is over."""
        if self._listener is not None:
            try:
                self._listener.window(until, instance)
            except Doubt as e:
                self._fall_back(e)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener, self._habits = None, {}
            _log.info("%s: the context-switch log is closed", self._name)

    def _open(self) -> None:
        try:
            self._listener = self._listen()
        except Doubt as e:
            self._fall_back(e)
        else:
            way = "with busy samples" if self._listener.sampled else "without busy samples"
            _log.info("%s: several containers share it; the context-switch log is read (%s)", self._name, way)

    def _fall_back(self, doubt: Doubt) -> None:
        """Small doubts cost a window, others the log for a while: one that is broken is not asked every second."""
        self.doubts.append(doubt.reason)
        if self.doubt is None or self.doubt.reason != doubt.reason:
            _log.warning("%s: busy time is told by the driver's samples for now: %s", self._name, doubt)
        self.doubt = doubt
        if isinstance(doubt, _OfOneWindow):
            return
        if self._listener is not None:
            self._listener.close()
            self._listener, self._habits = None, {}
        self._retry_at = self._clock() + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)

    def _division(
        self, residency: Residency, samples: list[tuple[int, bool]], busy_ns: int, instance: int | None
    ) -> Division:
        worked = max(0, busy_ns - residency.switching)
        sampled = self._listener is not None and self._listener.sampled
        if sampled:
            habits = self._habits.setdefault(instance, Habits())
            habits.learn(residency, samples)
            figures = habits.estimate(residency, worked)
        else:
            figures = young_first(residency, worked)
        resident = residency.of_processes()
        for pid in (HIDDEN_PID, KERNEL_PID):
            figures.pop(pid, None)
        return Division("exact" if sampled else "switches", figures, resident, residency.switching)


class _OfOneWindow(Doubt):
    """A doubt that says nothing against the log itself."""


def _check(residency: Residency, window_ns: int, listed: Collection[int]) -> None:
    if residency.unknown * _UNKNOWN_PART > window_ns or abs(residency.window - window_ns) * _UNKNOWN_PART > window_ns:
        percent = 100 * max(residency.unknown, abs(residency.window - window_ns)) // window_ns
        raise _OfOneWindow("unaccounted_time", f"{percent} % of the time is missing in the context-switch log")
    resident = residency.of_processes()
    hidden = resident.get(HIDDEN_PID, 0)
    if hidden * _HIDDEN_PART > window_ns:
        raise _OfOneWindow(
            "hidden_process",
            "processes of other users run on it, and who they are is told to CAP_SYS_ADMIN only"
            " (chart: exporter.usage.from: exact)",
        )
    unlisted = sum(ns for pid, ns in resident.items() if pid not in listed and pid not in (HIDDEN_PID, KERNEL_PID))
    if unlisted * _HIDDEN_PART > window_ns:
        raise _OfOneWindow("unlisted_process", "a process runs on it that the driver does not list")
