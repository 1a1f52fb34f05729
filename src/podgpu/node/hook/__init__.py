"""An NRI plugin for the container runtime. Observes every container and maintains podlist.json.

`nri` implements the protocol and answers requests. `devices` finds the GPUs of a container. `loop`
connects to the runtime and writes the file.
"""

from __future__ import annotations

import threading

from podgpu.metrics.encode import Labels, Sample, families_in

_COUNTERS = {
    name: spec.labels for name, spec in families_in("hook").items() if spec.type == "counter"
}


class HookCounters:
    """The counters of the hook's own metrics. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Counters without labels start at 0. Counters with labels have no series before the first
        # event.
        self._values: dict[str, dict[str, float]] = {
            name: {} if labels else {"": 0} for name, labels in _COUNTERS.items()
        }

    def add(self, family: str, label: str = "", amount: float = 1) -> None:
        with self._lock:
            self._values[family][label] = self._values[family].get(label, 0) + amount

    def error(self, reason: str) -> None:
        self.add("podgpu_hook_errors_total", reason)

    def samples(self) -> dict[str, list[Sample]]:
        with self._lock:
            return {
                name: [
                    Sample(Labels((label, text) for label in labels), n)
                    for text, n in self._values[name].items()
                ]
                for name, labels in _COUNTERS.items()
            }
