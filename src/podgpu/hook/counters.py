"""Counters and metric families of the hook. Thread-safe."""

from __future__ import annotations

import platform
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from podgpu import __version__
from podgpu.metrics import families
from podgpu.metrics.encode import NO_LABELS, Family, Labels, Sample


@dataclass(frozen=True, slots=True)
class HookState:
    is_synchronised: bool
    is_up_to_date: bool
    containers: int
    gpu_containers: int
    disagreeing: int


class HookCounters:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: Counter[str] = Counter()
        self._requests: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}
        self._events: Counter[str] = Counter()

    def error(self, reason: str) -> None:
        with self._lock:
            self._errors[reason] += 1

    def answered(self, method: str, seconds: float) -> None:
        with self._lock:
            self._requests[method] += 1
            self._seconds[method] = self._seconds.get(method, 0.0) + seconds

    def synchronised(self) -> None:
        self._count(families.HOOK_SYNCHRONISATIONS.name)

    def adjusted(self) -> None:
        self._count(families.HOOK_ADJUSTMENTS.name)

    def wrote(self) -> None:
        self._count(families.HOOK_WRITES.name)

    def _count(self, name: str) -> None:
        with self._lock:
            self._events[name] += 1

    def families(self, state: HookState) -> list[Family]:
        with self._lock:
            errors, requests, seconds = dict(self._errors), dict(self._requests), dict(self._seconds)
            events = dict(self._events)
        build = Labels((("version", __version__), ("python_version", platform.python_version())))
        gauges = (
            (families.HOOK_SYNCHRONISED, int(state.is_synchronised)),
            (families.HOOK_CONTAINERS, state.containers),
            (families.HOOK_GPU_CONTAINERS, state.gpu_containers),
            (families.HOOK_DISAGREEING, state.disagreeing),
            (families.HOOK_UP_TO_DATE, int(state.is_up_to_date)),
        )
        counters = (families.HOOK_SYNCHRONISATIONS, families.HOOK_ADJUSTMENTS, families.HOOK_WRITES)
        return [
            families.HOOK_BUILD_INFO.of([Sample(build, 1)]),
            *(spec.of([Sample(NO_LABELS, value)]) for spec, value in gauges),
            *(spec.of([Sample(NO_LABELS, events.get(spec.name, 0))]) for spec in counters),
            families.HOOK_REQUESTS.of(list(_samples("method", requests))),
            families.HOOK_REQUEST_SECONDS.of(list(_samples("method", seconds))),
            families.HOOK_ERRORS.of(list(_samples("reason", errors))),
        ]


def _samples(label: str, values: Mapping[str, int | float]) -> Iterable[Sample]:
    return (Sample(Labels(((label, word),)), value) for word, value in sorted(values.items()))
