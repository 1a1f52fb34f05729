"""Counters of the hook. Thread-safe."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

from podgpu.metrics import families
from podgpu.metrics.encode import NO_LABELS, Family, Labels, Sample
from podgpu.metrics.families import FamilySpec

_PLAIN = (families.HOOK_SYNCHRONISATIONS, families.HOOK_ADJUSTMENTS, families.HOOK_WRITES)
_LABELLED = (families.HOOK_REQUESTS, families.HOOK_REQUEST_SECONDS, families.HOOK_ERRORS)


class HookCounters:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, Counter[str]] = {spec.name: Counter() for spec in (*_PLAIN, *_LABELLED)}

    def add(self, spec: FamilySpec, label: str = "", amount: float = 1) -> None:
        with self._lock:
            self._values[spec.name][label] += amount  # type: ignore[assignment]

    def error(self, reason: str) -> None:
        self.add(families.HOOK_ERRORS, reason)

    def families(self) -> Iterator[Family]:
        with self._lock:
            values = {name: dict(counts) for name, counts in self._values.items()}
        for spec in _PLAIN:
            yield spec.of([Sample(NO_LABELS, values[spec.name].get("", 0))])
        for spec in _LABELLED:
            samples = sorted(values[spec.name].items())
            yield spec.of([Sample(Labels(((spec.labels[0], label),)), value) for label, value in samples])
