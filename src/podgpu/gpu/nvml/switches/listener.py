"""Listener keeps one GPU's context-switch log empty and, where it may, asks now and then whether the engine is busy.

It has a thread of its own, because neither can wait for the next turn: the log's ring is finite, and busy samples count
only when they are taken at moments that have nothing to do with the loads. A Doubt ends it; it is never repaired.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Protocol

from podgpu.gpu.nvml.switches.attribution import Residency, Sample
from podgpu.gpu.nvml.switches.records import WHOLE_GPU, Doubt, RecordReader, Timeline

_log = logging.getLogger(__name__)
_SAMPLE_SECONDS = 0.06
"""A look costs half a millisecond of CPU, nearly all of it the driver's: twenty a second are past what `exact` may
cost, and figures of half a minute are as good with seventeen."""
_TICK_SECONDS = 0.001
"""What is due within this is done now."""
_LONGEST_UNTAKEN_SECONDS = 90.0
"""Past this nobody takes windows any more: rather doubt than grow."""


class SwitchLog(Protocol):
    """What a log must be able to do: `resource_manager.ContextSwitchLog`, or the simulated driver's."""

    @property
    def drain_seconds(self) -> float: ...
    def drain(self) -> bytes: ...
    def now(self) -> int: ...
    def is_busy(self) -> bool: ...
    def close(self) -> None: ...


class Listener:
    """Listens from when it is made. `window` may be called from any one thread; it raises Doubt once there is one."""

    def __init__(
        self,
        log: SwitchLog,
        *,
        sampled: bool,
        lead: int = 0,
        slice_work: int = 0,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        in_background: bool = True,
    ) -> None:
        """`sampled`: the busy register may be read. Without `in_background` the caller calls `step` itself."""
        self.sampled = sampled
        self.rests = False
        """Samples would tell nothing new: whoever is resident works all the time."""
        self._log = log
        self._costs = lead, slice_work
        self._wall = wall
        self._clock = clock
        self._lock = threading.Lock()
        self._records = RecordReader()
        self._timelines: dict[int, Timeline] = {}
        self._compute_instances: dict[int, int] = {}
        self._samples: list[Sample] = []
        self.began = self._log_time = self._log.now()
        """On the GPU's clock."""
        self._offset = self.began - int(wall() * 1e9)
        self._drained_at = self._taken_at = clock()
        self._doubt: Doubt | None = None
        self._ended = threading.Event()
        if in_background:
            threading.Thread(target=self._listen, name="switches", daemon=True).start()

    def window(self, until: float, instance: int | None = None) -> tuple[Residency, list[Sample]]:
        """Who was resident since the last window of that instance, up to `until` (Unix time), and the busy samples."""
        with self._lock:
            self._raise_doubt()
            try:
                self._drain()
            except Doubt as e:
                self._end(e)
                raise
            self._taken_at = self._clock()
            timeline = self._timeline(WHOLE_GPU if instance is None else instance)
            end = max(timeline.now, min(int(until * 1e9) + self._offset, self._log_time))
            residency = timeline.window(end)
            samples = [sample for sample in self._samples if sample[0] < end]
            self._samples = [sample for sample in self._samples if sample[0] >= end]
            return residency, samples

    def step(self) -> float:
        """Does what is due now, a busy sample and emptying the log; answers in how many seconds something is due again.

        Samples are taken at moments that nobody can foresee: evenly spaced ones would lock to evenly spaced loads. The
        log is emptied on time: at 5,000 switches a second it is full after three seconds."""
        with self._lock:
            if self._doubt is not None:
                return 0.0
            try:
                if self.sampled and not self.rests:
                    self._sample()
                if self._until_due() < _TICK_SECONDS:
                    self._drain()
                    self._check_taken()
            except Doubt as e:
                self._end(e)
            if self.sampled:
                return random.uniform(0.5, 1.5) * _SAMPLE_SECONDS
            return self._until_due()

    def close(self) -> None:
        with self._lock:
            if self._doubt is None:
                self._end(Doubt("closed", "the context-switch log is no longer read"))

    def _listen(self) -> None:
        try:
            while not self._ended.wait(self.step()):
                pass
        except Exception as e:  # noqa: BLE001 - the edge of a thread: a bug here costs this log, not the process
            _log.exception("context-switch log: unexpected error, please report it")
            with self._lock:
                self._end(Doubt("bug", f"{type(e).__name__}: {e}"))

    def _until_due(self) -> float:
        """Seconds until the log has to be emptied at the latest."""
        return self._drained_at + self._log.drain_seconds - self._clock()

    def _sample(self) -> None:
        before = self._wall()
        busy = self._log.is_busy()
        self._samples.append((int((before + self._wall()) / 2 * 1e9) + self._offset, busy))

    def _drain(self) -> None:
        before = self._wall()
        self._log_time = self._log.now()
        self._offset = self._log_time - int((before + self._wall()) / 2 * 1e9)
        for resident, pid, at, instance, compute_instance in self._records.read(self._log.drain()):
            timeline = self._timelines.get(instance) or self._timeline(instance)
            timeline.add(resident, pid, at)
            if self._compute_instances.get(instance) != compute_instance:
                self._meet_compute_instance(instance, compute_instance)
        self._drained_at = self._clock()

    def _meet_compute_instance(self, instance: int, compute_instance: int) -> None:
        if instance in self._compute_instances:
            raise Doubt(
                "several_compute_instances",
                f"GPU instance {instance} has several compute instances, which run at the same time",
            )
        self._compute_instances[instance] = compute_instance

    def _check_taken(self) -> None:
        if self._clock() - self._taken_at > _LONGEST_UNTAKEN_SECONDS:
            raise Doubt("not_taken", "nobody asked for what the context-switch log says")

    def _timeline(self, instance: int) -> Timeline:
        return self._timelines.setdefault(instance, Timeline(self.began, *self._costs))

    def _raise_doubt(self) -> None:
        if self._doubt is not None:
            raise self._doubt

    def _end(self, doubt: Doubt) -> None:
        self._doubt = doubt
        self._ended.set()
        self._timelines, self._samples = {}, []
        self._log.close()
