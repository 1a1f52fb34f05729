"""This module answers questions about the past from the ring: in threads, since none of it may hold up a request for
metrics."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

from podgpu.history import columns, telling
from podgpu.history.asking import JSON, PER_HOUR, STEP, Kept, Range, Window
from podgpu.history.keeper import RingClock
from podgpu.history.ring import Ring
from podgpu.history.rows import Key


class RingHistory:
    def __init__(self, ring: Ring, clock: RingClock) -> None:
        self._ring = ring
        self._clock = clock
        self._lines = Sparklines(ring)
        self._one_at_a_time = asyncio.Semaphore(1)

    async def sparklines(self, asked: Range) -> bytes:
        async with self._one_at_a_time:
            return await asyncio.to_thread(self.sparklines_now, asked)

    def sparklines_now(self, asked: Range) -> bytes:
        now, ahead = self._clock.now(), self._clock.ahead()
        return self._lines.json(_window(asked, now, ahead), asked, now)

    async def gpu(self, device: Key, asked: Range) -> JSON | None:
        async with self._one_at_a_time:
            return await asyncio.to_thread(self.gpu_now, device, asked)

    def gpu_now(self, device: Key, asked: Range) -> JSON | None:
        now, ahead = self._clock.now(), self._clock.ahead()
        kept = self._ring.keep_of(device, asked, now)
        return None if kept is None else telling.gpu_json(_window(asked, now, ahead), _unix(kept, ahead))

    async def pod(self, namespace: str, pod: str, asked: Range) -> JSON | None:
        async with self._one_at_a_time:
            return await asyncio.to_thread(self.pod_now, namespace, pod, asked)

    def pod_now(self, namespace: str, pod: str, asked: Range) -> JSON | None:
        now, ahead = self._clock.now(), self._clock.ahead()
        with self._ring.lock:
            devices = self._ring.spans.devices_of(namespace, pod)
        found = (self._ring.keep_of(device, asked, now) for device in devices)
        kept = [_unix(keep, ahead) for keep in found if keep is not None]
        return telling.pod_json(_window(asked, now, ahead), namespace, pod, kept)


class Sparklines:
    """Everybody's utilisation over the last hour. Points that are over are made once: a page asks again and again."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._points: dict[int, tuple[list[bytes | None], bytes]] = {}
        self._step = 0
        self._making = threading.Lock()

    def json(self, window: Window, asked: Range, now: float) -> bytes:
        together = asked.step // STEP
        with self._ring.lock:
            found = self._ring.latest(PER_HOUR + together, now)
            rows = [(key.text, row.place) for key, row in self._ring.rows if not key.who]
            count = self._ring.rows.end
        first_step = int(now // STEP) - len(found) + 1
        with self._making:
            if self._step != asked.step:
                self._step, self._points = asked.step, {}
            last = int(now // asked.step)
            points = {}
            for number in range(last - asked.steps + 1, last + 1):
                begin = number * together - first_step
                its_columns = found[max(begin, 0) : max(begin + together, 0)]
                points[number] = self._point(number, its_columns, count)
            self._points = {number: (found_of, made) for number, (found_of, made) in points.items()}
            everything = b"".join(made for _, made in points.values())
        lines = {name: everything[place::count] for name, place in rows}
        return telling.sparklines_json(window, lines)

    def _point(self, number: int, its_columns: list[bytes | None], count: int) -> tuple[list[bytes | None], bytes]:
        known = self._points.get(number)
        if known is not None and len(known[1]) == count and _are_same(known[0], its_columns):
            return known
        return its_columns, columns.utilization_bytes([column for column in its_columns if column is not None], count)


def _are_same(before: list[bytes | None], now: list[bytes | None]) -> bool:
    return len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True))


def _window(asked: Range, now: float, ahead: float) -> Window:
    first = (int(now // asked.step) - asked.steps + 1) * asked.step
    return Window(first + ahead, asked.step, asked.steps)


def _unix(kept: Kept, ahead: float) -> Kept:
    if not ahead:
        return kept
    moved = [replace(s, start=s.start + ahead, end=None if s.end is None else s.end + ahead) for s in kept.spans]
    return replace(kept, spans=moved)
