"""Converts the context-switch log to a trace in Chrome's Trace Event Format, which ui.perfetto.dev opens.

Each container is a process of the trace, and each of its processes a thread with the slices `run`, `run (cut)` and
`wait`. Each GPU or MIG instance is a process with the slices `switch`, the counter `busy` and marks. Times are
microseconds since the start of the recording. This module does no input or output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from podgpu.gpu.nvml.switch_attribution import BusySample, Residency, Stay, estimate_without_samples
from podgpu.gpu.nvml.switch_waiting import WaitEstimator

Event = dict[str, Any]
_MAX_SWITCH_NS = 1_000_000


class EngineTrace:
    """Records one GPU or MIG instance, window by window."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.samples: list[BusySample] = []
        self.marks: list[tuple[int, str]] = []
        """Time and text of XIDs and changes of the clock events."""
        self.waits: list[tuple[int, int, int]] = []
        """Begin, end and pid."""
        self.stays: list[Stay] = []
        self.estimator = WaitEstimator()

    def add(self, residency: Residency, samples: Iterable[BusySample], busy_share: float) -> None:
        """Adds a window. `busy_share`: part of the window for which the device was busy."""
        self.samples += samples
        stays = list(residency.stays)
        if self.stays and stays and self.stays[-1][:2] == stays[0][:2]:  # continues from the last window
            self.stays[-1] = self.stays[-1]._replace(until=stays.pop(0).until)
        self.stays += stays
        worked = int(busy_share * residency.window) - residency.switching
        self.estimator.add(residency, estimate_without_samples(residency, worked))
        self.waits += [wait for wait in self.estimator.intervals if wait[0] < wait[1]]

    def make_events(self, tracks: Tracks, since: int) -> list[Event]:
        """Returns the events, unsorted. `since`: start of the recording."""
        gpu = tracks.find(self.name, "context switches")
        before: Stay | None = None
        events: list[Event] = []
        for stay in self.stays:
            if before is not None and stay.since - before.until < _MAX_SWITCH_NS:
                events.append(_slice("switch", gpu, before.until - since, stay.since - since))
            name = "run (cut)" if self.estimator.is_cut(stay.until - stay.began) else "run"
            events.append(_slice(name, tracks.find_process(stay.pid), stay.since - since, stay.until - since))
            before = stay
        for begin, end, pid in self.waits:
            events.append(_slice("wait", tracks.find_process(pid), begin - since, end - since))
        for at, busy in self.samples:
            events.append({"ph": "C", "name": "busy", "ts": (at - since) / 1000, **gpu, "args": {"busy": int(busy)}})
        for at, text in self.marks:
            events.append({"ph": "i", "name": text, "ts": (at - since) / 1000, **gpu, "s": "p"})
        return events


class Tracks:
    """Numbers the processes and threads of a trace by their names."""

    def __init__(self, describe: Callable[[int], tuple[str, str]]) -> None:
        """`describe`: returns the names of the container and of the process with this pid."""
        self._describe = describe
        self._groups: dict[str, int] = {}
        self._tracks: dict[tuple[str, str], dict[str, int]] = {}
        self._processes: dict[int, dict[str, int]] = {}

    def find(self, group: str, track: str) -> dict[str, int]:
        """Returns the members `pid` and `tid` of an event."""
        pid = self._groups.setdefault(group, len(self._groups) + 1)
        return self._tracks.setdefault((group, track), {"pid": pid, "tid": len(self._tracks) + 1})

    def find_process(self, pid: int) -> dict[str, int]:
        if pid not in self._processes:
            self._processes[pid] = self.find(*self._describe(pid))
        return self._processes[pid]

    def make_events(self) -> list[Event]:
        return [
            {"ph": "M", "name": name, **numbers, "args": {"name": text}}
            for (group, track), numbers in self._tracks.items()
            for name, text in (("process_name", group), ("thread_name", track))
        ]


def make_trace(
    engines: Sequence[EngineTrace], since: int, describe: Callable[[int], tuple[str, str]], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the trace as an object for JSON. `about`: members of `otherData`."""
    tracks = Tracks(describe)
    events = [event for engine in engines for event in engine.make_events(tracks, since)]
    events.sort(key=lambda event: event["ts"])
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": [*tracks.make_events(), *events]}


def _slice(name: str, track: Mapping[str, int], begin: int, end: int) -> Event:
    return {"ph": "X", "name": name, "ts": begin / 1000, "dur": (end - begin) / 1000, **track}
