"""Container runtime hook (NRI plugin): observes every container and maintains podlist.json.

`nri` implements the protocol, `plugin` answers requests, `devices` finds the GPUs of a container, `podlist` writes the
file, and `loop` connects and reconnects.
"""

from __future__ import annotations

import threading
from collections import Counter

from podgpu.metrics.encode import NO_LABELS, Labels, Sample, families_in

_COUNTERS = [spec for spec in families_in("hook").values() if spec.type == "counter"]


class HookCounters:
    """Counters of the hook's own metrics. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, Counter[str]] = {spec.name: Counter() for spec in _COUNTERS}

    def add(self, family: str, label: str = "", amount: float = 1) -> None:
        with self._lock:
            self._values[family][label] += amount  # type: ignore[assignment]

    def error(self, reason: str) -> None:
        self.add("podgpu_hook_errors_total", reason)

    def samples(self) -> dict[str, list[Sample]]:
        """Returns the samples by family. A counter without labels is 0 before the first event."""
        with self._lock:
            values = {name: sorted(counts.items()) for name, counts in self._values.items()}
        samples = {}
        for spec in _COUNTERS:
            if spec.labels:
                (label,) = spec.labels
                samples[spec.name] = [Sample(Labels([(label, text)]), n) for text, n in values[spec.name]]
            else:
                samples[spec.name] = [Sample(NO_LABELS, n) for _, n in values[spec.name] or [("", 0)]]
        return samples
