"""Throttling tells from a GPU's counters whether heat or the power brake has held its clocks down for a while."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from podgpu.metrics.conditions import POWER_BRAKE, THERMAL
from podgpu.metrics.families import CLOCK_EVENTS, CLOCK_EVENTS_FIELD, THROTTLE_REASONS
from podgpu.model import Value

WHILE_SECONDS = 60.0
"""So long it has to last: a GPU that is throttled for a moment does what it is made to do."""
BEGINS, ENDS = 0.5, 0.1
"""Part of that time: from here on it is throttled, below that it is not any more."""
_LEAST_SECONDS = 5.0
"""Between two samples, however often the GPU is read."""
_NS = 1e9


@dataclass(frozen=True, slots=True)
class _Kind:
    counters: tuple[int, ...]
    """Fields that count nanoseconds; the highest counts, older drivers have the last only."""
    bits: int
    """Of the clock events, where there are no such counters."""


def _kind(*reasons: str) -> _Kind:
    counters = {reason: field_id for field_id, reason in THROTTLE_REASONS.items()}
    return _Kind(
        tuple(counters[reason] for reason in reasons),
        sum(bit for bit, event in CLOCK_EVENTS.items() if event in reasons),
    )


_KINDS: Mapping[str, _Kind] = {
    THERMAL: _kind("sw_thermal", "hw_thermal", "thermal"),
    POWER_BRAKE: _kind("hw_power_brake"),
}
_FIELDS = frozenset(i for kind in _KINDS.values() for i in kind.counters) | {CLOCK_EVENTS_FIELD}


@dataclass(slots=True)
class Throttling:
    """Of one GPU."""

    _samples: deque[tuple[float, dict[int, float]]] = field(default_factory=deque)
    _held: set[str] = field(default_factory=set)
    _last: dict[str, float | None] = field(default_factory=dict)

    def look(self, values: Mapping[int, Value], now: float) -> dict[str, float | None]:
        """Condition -> for how many seconds it has lasted at least; None: it is not there. What is not known yet, or
        cannot be, is left out."""
        known = {i: float(v) for i in _FIELDS if isinstance(v := values.get(i), int | float)}
        samples = self._samples
        if samples and now - samples[-1][0] < _LEAST_SECONDS:
            return self._last
        samples.append((now, known))
        while len(samples) > 2 and now - samples[1][0] >= WHILE_SECONDS:
            samples.popleft()
        lasted = now - samples[0][0]
        if lasted >= WHILE_SECONDS:
            ratios = {name: ratio for name in _KINDS if (ratio := self._ratio(name)) is not None}
            self._last = {name: self._judge(name, ratio, lasted) for name, ratio in ratios.items()}
        return self._last

    def _judge(self, name: str, ratio: float, lasted: float) -> float | None:
        if ratio >= BEGINS or (name in self._held and ratio >= ENDS):
            self._held.add(name)
            return lasted
        self._held.discard(name)
        return None

    def _ratio(self, name: str) -> float | None:
        """The part of the time in the window in which it was held back."""
        (began, first), (now, last) = self._samples[0], self._samples[-1]
        counters = [i for i in _KINDS[name].counters if i in first and i in last]
        if counters:
            return max((last[i] - first[i]) / _NS / (now - began) for i in counters)
        masks = [sample[CLOCK_EVENTS_FIELD] for _, sample in list(self._samples)[1:] if CLOCK_EVENTS_FIELD in sample]
        return sum(bool(int(mask) & _KINDS[name].bits) for mask in masks) / len(masks) if masks else None
