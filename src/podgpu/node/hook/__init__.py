"""An NRI plugin for the container runtime. Observes every container and maintains podlist.json.

`nri` implements the protocol and answers requests. `devices` finds the GPUs of a container. `loop`
connects to the runtime and writes the file.
"""

from __future__ import annotations

import threading

from podgpu.metrics.encode import Labels, Sample, families_in

_FAMILIES = families_in("hook").items()
_COUNTERS = {name: spec.labels for name, spec in _FAMILIES if spec.type == "counter"}


class HookCounters:
    """The counters of the hook's own metrics. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Values by family and label. Counters without labels start at 0. Counters with labels have
        # no series before the first event.
        self._values: dict[tuple[str, str], float] = {}
        for name, labels in _COUNTERS.items():
            if not labels:
                self._values[name, ""] = 0

    def add(self, family: str, label: str = "", amount: float = 1) -> None:
        key = family, label
        with self._lock:
            before = self._values.get(key, 0)
            self._values[key] = before + amount

    def error(self, reason: str) -> None:
        self.add("podgpu_hook_errors_total", reason)

    def samples(self) -> dict[str, list[Sample]]:
        with self._lock:
            values = self._values.copy()

        samples: dict[str, list[Sample]] = {name: [] for name in _COUNTERS}
        for (name, text), value in values.items():
            # A counter has one label or none.
            labels = Labels((label, text) for label in _COUNTERS[name])
            sample = Sample(labels, value)
            samples[name].append(sample)
        return samples
