"""What the tick remembers between snapshots: error counts, XIDs, samples of clock events within a window."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping

from podgpu.catalog.families import CLOCK_EVENTS
from podgpu.model import XidTally
from podgpu.telemetry.source import XidEvent


class XidLog:
    """Every (device, xid) since the start, and how many of each lie within the window dcgm-exporter counts over."""

    def __init__(self, window: float) -> None:
        self._window = window
        self._totals: Counter[tuple[str, int]] = Counter()
        self._last_seen: dict[tuple[str, int], float] = {}
        self._recent: deque[XidEvent] = deque()
        self.last: dict[str, int] = {}

    def note(self, events: Iterable[XidEvent]) -> None:
        for event in events:
            key = (event.device, event.xid)
            self._totals[key] += 1
            self._last_seen[key] = event.at
            self._recent.append(event)
            self.last[event.device] = event.xid

    def tallies(self, now: float) -> tuple[XidTally, ...]:
        while self._recent and self._recent[0].at <= now - self._window:
            self._recent.popleft()
        in_window = Counter((e.device, e.xid) for e in self._recent)
        return tuple(
            XidTally(device, xid, total, self._last_seen[device, xid], in_window[device, xid])
            for (device, xid), total in sorted(self._totals.items())
        )


class ClockEventLog:
    """Samples of each device's clock event bits within the window."""

    def __init__(self, window: float) -> None:
        self._window = window
        self._samples: dict[str, deque[tuple[float, int]]] = {}

    def note(self, masks: Mapping[str, int], now: float) -> None:
        for device, mask in masks.items():
            self._samples.setdefault(device, deque()).append((now, mask))
        for device in list(self._samples):
            samples = self._samples[device]
            while samples and samples[0][0] <= now - self._window:
                samples.popleft()
            if not samples:
                del self._samples[device]

    def counts(self) -> dict[tuple[str, str], int]:
        counts: Counter[tuple[str, str]] = Counter()
        for device, samples in self._samples.items():
            for _, mask in samples:
                for bit, event in CLOCK_EVENTS.items():
                    if mask & bit:
                        counts[device, event] += 1
        return dict(counts)
