"""This module remembers from snapshot to snapshot: errors that were told, samples of clock events within a window."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping

from podgpu.gpu.source import ErrorEvent
from podgpu.metrics.families import CLOCK_EVENTS
from podgpu.model import XidTally

Key = tuple[str, int]
"""(device, xid)."""


class XidLog:
    """Every (device, xid) since the start, and how many of each lie within the window dcgm-exporter counts over.

    The window goes by the clock that never jumps, a second at a time: a storm of XIDs takes no more room than one.
    """

    def __init__(self, window: float) -> None:
        self._window = window
        self._totals: Counter[Key] = Counter()
        self._last_seen: dict[Key, float] = {}
        self._recent: deque[tuple[float, Counter[Key]]] = deque()
        self.last: dict[str, int] = {}

    def note(self, events: Iterable[ErrorEvent], now: float) -> None:
        """`now` is monotonic; the events came since the last time."""
        for event in events:
            key = (event.device, event.code)
            self._totals[key] += 1
            self._last_seen[key] = event.at
            self._bucket(now)[key] += 1
            self.last[event.device] = event.code

    def _bucket(self, now: float) -> Counter[Key]:
        if not self._recent or now - self._recent[-1][0] >= 1.0:
            self._recent.append((now, Counter()))
        return self._recent[-1][1]

    def tallies(self, now: float) -> tuple[XidTally, ...]:
        """`now` is monotonic."""
        while self._recent and self._recent[0][0] <= now - self._window:
            self._recent.popleft()
        in_window: Counter[Key] = Counter()
        for _, seen in self._recent:
            in_window.update(seen)
        return tuple(
            XidTally(device, xid, total, self._last_seen[device, xid], in_window[device, xid])
            for (device, xid), total in sorted(self._totals.items())
        )


class ClockEventLog:
    """Samples of each device's clock event bits within the window. One thread at a time."""

    def __init__(self, window: float) -> None:
        self._window = window
        self._samples: dict[str, deque[tuple[float, int]]] = {}
        self._last: dict[str, int] = {}
        self._risen: Counter[tuple[str, str]] = Counter()

    def note(self, masks: Mapping[str, int], now: float) -> dict[tuple[str, str], int]:
        """Takes in one sample of each device; how many of each event there are now, as a copy nobody changes."""
        for device, mask in masks.items():
            self._samples.setdefault(device, deque()).append((now, mask))
            self._note_risen(device, mask)
        for device in list(self._samples):
            samples = self._samples[device]
            while samples and samples[0][0] <= now - self._window:
                samples.popleft()
            if not samples:
                del self._samples[device]
        return self._counts()

    def _note_risen(self, device: str, mask: int) -> None:
        risen = mask & ~self._last.get(device, mask)
        self._last[device] = mask
        self._risen.update((device, event) for bit, event in CLOCK_EVENTS.items() if risen & bit)

    def totals(self) -> dict[tuple[str, str], int]:
        """How often each event began since the start; what was there at the first sample did not begin."""
        return dict(self._risen)

    def _counts(self) -> dict[tuple[str, str], int]:
        counts: Counter[tuple[str, str]] = Counter()
        for device, samples in self._samples.items():
            for _, mask in samples:
                for bit, event in CLOCK_EVENTS.items():
                    if mask & bit:
                        counts[device, event] += 1
        return dict(counts)
